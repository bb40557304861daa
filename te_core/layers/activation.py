"""An activation function as a layer of its own: y = act(x)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core.arguments import explained
from te_core.ops import raw as ops
from te_core.ops.activation import Clamp
from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class ActivationLayerSpec:
    """All that the layer's plan depends on besides shapes."""

    kind: str
    clamp: Clamp | None = None  # of clamped_swiglu


class ActivationSaved(NamedTuple):
    """What backward reads."""

    x: Tensor


@explained
def forward(
    rt: Runtime, x: Tensor, *, spec: ActivationLayerSpec, scales: Scales | None = None
) -> tuple[tuple[Tensor], ActivationSaved]:
    """((y,), saved) for x [.., F], or [.., 2 F] of a gated one."""
    y, _ = ops.activation_forward(rt, x.matrix(), spec.kind, clamp=spec.clamp)
    assert y is not None
    return (y.reshape(*x.shape[:-1], y.shape[1]),), ActivationSaved(x)


@explained
def backward(
    rt: Runtime, dy: Tensor, saved: ActivationSaved, *, spec: ActivationLayerSpec, scales: Scales | None = None
) -> tuple[Tensor]:
    """(dx,)."""
    x = saved.x
    dx, _ = ops.activation_backward(rt, dy.matrix(), x.matrix(), spec.kind, clamp=spec.clamp)
    assert dx is not None
    return (dx.reshape(*x.shape),)
