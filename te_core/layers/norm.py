"""LayerNorm and RMSNorm as a layer of their own: y = norm(x)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core.arguments import explained, settle
from te_core.dtypes import DType
from te_core.ops import raw as ops
from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class NormSpec:
    """All that a norm's plan depends on besides shapes."""

    dtype: DType  # of the output
    kind: str  # "LayerNorm" or "RMSNorm"
    eps: float
    zero_centered: bool = False
    forward_margin: int = 0  # multiprocessors left to others
    backward_margin: int = 0

    def __post_init__(self) -> None:
        settle(self, "dtype")


class NormSaved(NamedTuple):
    """What backward reads."""

    x: Tensor
    gamma: Tensor
    mean: Tensor | None
    rstd: Tensor


@explained
def forward(
    rt: Runtime, x: Tensor, gamma: Tensor, beta: Tensor | None, *, spec: NormSpec, scales: Scales | None = None
) -> tuple[tuple[Tensor], NormSaved]:
    """((y,), saved) for x [.., H]."""
    y, _, mean, rstd = ops.norm_forward(
        rt,
        x.matrix(),
        gamma,
        beta,
        kind=spec.kind,
        eps=spec.eps,
        zero_centered=spec.zero_centered,
        out_dtype=spec.dtype,
        sm_margin=spec.forward_margin,
    )
    assert y is not None
    return (y.reshape(*x.shape),), NormSaved(x, gamma, mean, rstd)


@explained
def backward(
    rt: Runtime, dy: Tensor, saved: NormSaved, *, spec: NormSpec, scales: Scales | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dgamma, dbeta)."""
    x = saved.x
    dx = rt.empty(x.shape, x.dtype)
    _, dgamma, dbeta = ops.norm_backward(
        rt,
        dy.matrix(),
        x.matrix(),
        saved.gamma,
        saved.mean,
        saved.rstd,
        kind=spec.kind,
        zero_centered=spec.zero_centered,
        sm_margin=spec.backward_margin,
        out=dx.matrix(),
    )
    return dx, dgamma, dbeta
