"""LayerNorm and RMSNorm as a layer of their own: y = norm(x)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core.arguments import explained, settle
from te_core.dtypes import DType
from te_core.ops import raw as ops
from te_core.ops.norm import Branch
from te_core.quantize.state import Scales
from te_core.quantized import Cast, QuantizedTensor
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


#: x, gamma, mean and rstd, where a gradient goes through the norm.
NormKept = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@explained
def forward(
    rt: Runtime, x: Tensor, gamma: Tensor, beta: Tensor | None, *, spec: NormSpec, scales: Scales | None = None
) -> tuple[tuple[Tensor], NormSaved]:
    """((y,), saved) for x [.., H]."""
    y, _, mean, rstd = normalized(rt, x, gamma, beta, spec)
    assert y is not None
    return (y.reshape(*x.shape),), NormSaved(x, gamma, mean, rstd)


@explained
def backward(
    rt: Runtime, dy: Tensor, saved: NormSaved, *, spec: NormSpec, scales: Scales | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dgamma, dbeta)."""
    return norm_gradients(rt, dy.matrix(), saved, spec)


def normalized(
    rt: Runtime,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    spec: NormSpec,
    cast: Cast | None = None,
    keep: bool = False,
    branch: Branch | None = None,
) -> tuple[Tensor | None, QuantizedTensor | None, Tensor | None, Tensor]:
    """What `ops.norm_forward` makes of the rows of x in this norm."""
    return ops.norm_forward(
        rt,
        x.matrix(),
        gamma,
        beta,
        kind=spec.kind,
        eps=spec.eps,
        zero_centered=spec.zero_centered,
        out_dtype=spec.dtype,
        cast=cast,
        keep=keep,
        sm_margin=spec.forward_margin,
        branch=branch,
    )


def norm_gradients(
    rt: Runtime,
    dn: Tensor,
    kept: NormKept,
    spec: NormSpec,
    returned: Tensor | None = None,
    stream: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dgamma, dbeta) from the gradients of the norm's output [M, H], of the same where it was returned besides,
    and of what went round the norm."""
    x, gamma, mean, rstd = kept
    assert x is not None and gamma is not None and rstd is not None
    if returned is not None:
        dn = ops.add(rt, dn, returned.matrix(), out=dn)
    dx = rt.empty(x.shape, x.dtype)
    _, dgamma, dbeta = ops.norm_backward(
        rt,
        dn,
        x.matrix(),
        gamma,
        mean,
        rstd,
        kind=spec.kind,
        zero_centered=spec.zero_centered,
        sm_margin=spec.backward_margin,
        add=None if stream is None else stream.matrix(),
        out=dx.matrix(),
    )
    return dx, dgamma, dbeta
