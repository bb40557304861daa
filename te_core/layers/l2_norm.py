"""Rows divided by their length, as a layer: y = x / sqrt(sum(x^2) + eps)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core.arguments import explained
from te_core.ops import raw as ops
from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class L2NormSpec:
    """All that the layer's plan depends on besides shapes."""

    eps: float


class L2NormSaved(NamedTuple):
    """What backward reads."""

    x: Tensor


@explained
def forward(
    rt: Runtime, x: Tensor, *, spec: L2NormSpec, scales: Scales | None = None
) -> tuple[tuple[Tensor], L2NormSaved]:
    """((y,), saved) for x [.., d]."""
    return (ops.l2_norm_forward(rt, x.matrix(), eps=spec.eps).reshape(*x.shape),), L2NormSaved(x)


@explained
def backward(
    rt: Runtime, dy: Tensor, saved: L2NormSaved, *, spec: L2NormSpec, scales: Scales | None = None
) -> tuple[Tensor]:
    """(dx,)."""
    x = saved.x
    return (ops.l2_norm_backward(rt, dy.matrix(), x.matrix(), eps=spec.eps).reshape(*x.shape),)
