"""LayerNorm and RMSNorm over the rows of a matrix, forward and backward.

Forward, in float32:  LayerNorm  y = (x - mean) * rstd * g + beta,  rstd = 1 / sqrt(mean((x - mean)^2) + eps)
                      RMSNorm    y = x * rstd * g,                  rstd = 1 / sqrt(mean(x^2) + eps)
with g = gamma, or 1 + gamma if `zero_centered`. y is rounded to `out_dtype`; with a `cast` it is delivered in FP8,
cast from exactly that rounded value, so fused equals unfused bit for bit. mean and rstd are float32 [M].

In a residual stream both directions take the addition beside the norm along: forward norms the sum of a `Branch`,
which `ops.bias_dropout_add` would form bit for bit; backward adds the gradient that comes round the norm.

Beside them the L2 norm, rows divided by their length: y = x * r, r = 1 / sqrt(sum(x^2) + eps), a sum and not a mean,
rounded once to x's dtype. Its backward computes r again: dx = r * (dy - x * r^2 * sum(dy * x)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from te_core import dtypes
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.ops import _check
from te_core.ops.declare import operation, rules
from te_core.ops.quantize import allocate, check_cast, is_apart, key_of, needs_values, quantize
from te_core.quantized import Cast, CastKey, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

KINDS = ("LayerNorm", "RMSNorm")
MAX_ROW = 65536


class Branch(NamedTuple):
    """What a forward norm does first: sum = residual + dropout(x + bias, p), written; the sum is what is normed."""

    residual: Tensor
    sum: Tensor
    bias: Tensor | None = None
    p: float = 0.0
    rng: Tensor | None = None
    site: int = 0


@dataclass(frozen=True, slots=True)
class NormOpSpec:
    """All that the launches of a norm depend on besides addresses."""

    kind: str
    shape: tuple[int, ...]
    x: DType
    gamma: DType
    out: DType  # of backward: dy's
    zero_centered: bool
    sm_margin: int
    alignment: int  # how far addresses are off the 16-byte grid, all of them together
    cast: CastKey | None = None
    keep: bool = False
    branch: bool = False  # forward: the sum of a branch is normed
    bias: bool = False  # of the branch
    p: float = 0.0
    add: bool = False  # backward: a gradient goes into dx


class NormOperands(NamedTuple):
    """What a forward reads and writes."""

    x: Tensor
    gamma: Tensor
    beta: Tensor | None
    y: Tensor | None
    cast: Cast | None
    q: QuantizedTensor | None
    mean: Tensor | None
    rstd: Tensor
    eps: float
    branch: Branch | None


class NormGradients(NamedTuple):
    """What a backward reads and writes."""

    dy: Tensor
    x: Tensor
    gamma: Tensor
    mean: Tensor | None
    rstd: Tensor
    add: Tensor | None
    dx: Tensor
    dgamma: Tensor
    dbeta: Tensor | None


_ROWS = """
    x [M, N] act
    must 1 <= N <= MAX_ROW: rows of 1 to {MAX_ROW} elements; use a shorter row
"""


@operation(_ROWS)
def l2_norm_forward(rt: Runtime, x: Tensor, *, eps: float) -> Tensor:
    """y for the rows of a dense matrix x [M, d]."""
    y = rt.empty(x.shape, x.dtype)
    rt.backend.l2_norm_forward(rt, x, y, eps)
    return y


@operation(_ROWS, "dy =x")
def l2_norm_backward(rt: Runtime, dy: Tensor, x: Tensor, *, eps: float) -> Tensor:
    """dx, in x's dtype."""
    dx = rt.empty(x.shape, x.dtype)
    rt.backend.l2_norm_backward(rt, dy, x, dx, eps)
    return dx


_NORMED = """
    kind in KINDS: Which norm it is.
    x [M, N] act: Input.
    must 1 <= N <= MAX_ROW: rows of 1 to {MAX_ROW} elements; use a shorter row
    gamma [N] act: Weight of the norm.
    zero_centered: Whether gamma is stored as its distance from 1.
    sm_margin: How many multiprocessors the kernel leaves free.
"""


@operation(
    _NORMED,
    """
    beta? [N] gamma: Bias of the norm. None for RMSNorm.
    must (beta is None) == (kind == "RMSNorm"): a beta with LayerNorm, none with RMSNorm; correct beta
    branch: What x is added to first (`Branch`): residual + dropout(x + bias) is written, and is what is normed. None
        norms x.
""",
)
def norm_forward(
    rt: Runtime,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    *,
    kind: str,
    eps: float,
    zero_centered: bool = False,
    out_dtype: DType | None = None,
    cast: Cast | None = None,
    keep: bool = False,
    sm_margin: int = 0,
    branch: Branch | None = None,
) -> tuple[Tensor | None, QuantizedTensor | None, Tensor | None, Tensor]:
    """(y, quantized, mean, rstd): y is None when only the FP8 copy is wanted (`cast` without `keep`).

    mean is None for RMSNorm. `sm_margin` leaves that many multiprocessors to others.
    """
    apart, wanted = None, keep  # a launch of its own, from the rounded values, as fused kernels have them
    if cast is not None and is_apart(cast, keep, in_blocks=out_dtype in (None, x.dtype)):
        apart, cast, keep = cast, None, False
    out_dtype = out_dtype or x.dtype
    op = "norm_forward"
    _check.one_of(op, "dtype of the output", out_dtype, ACTIVATION_DTYPES)
    if cast is not None:
        check_cast(op, rt.device, cast)
    off = _check.off(x, gamma, beta)
    if branch is not None:
        _check_branch(op, rt, x, branch)
        off |= _check.off(branch.residual, branch.sum, branch.bias)
    types = x.dtype, gamma.dtype, out_dtype
    spec = NormOpSpec(kind, x.shape, *types, zero_centered, sm_margin, off, key_of(cast), keep)
    if branch is not None:
        spec = replace(spec, branch=True, bias=branch.bias is not None, p=branch.p)
    y = rt.empty(x.shape, out_dtype) if needs_values(cast, keep) else None
    q = allocate(rt, x.shape, cast) if cast is not None else None  # type: ignore[arg-type]
    mean = rt.empty((x.shape[0],), dtypes.float32) if kind == "LayerNorm" else None
    rstd = rt.empty((x.shape[0],), dtypes.float32)
    rt.backend.norm_forward(rt, spec, NormOperands(x, gamma, beta, y, cast, q, mean, rstd, eps, branch))
    if apart is not None and y is not None:
        return (y if wanted else None), quantize(rt, y, apart), mean, rstd
    return (y if cast is None or keep else None), q, mean, rstd


@operation(
    _NORMED,
    """
    dy [M, N] act
    rstd [M] f32: Inverse standard deviations of the rows that forward gave.
    mean? [M] f32: Means of the rows that forward gave. None for RMSNorm.
    must (mean is None) == (kind == "RMSNorm"): a mean with LayerNorm, none with RMSNorm; pass what forward returned
    add? =x: Gradient that is added to dx. None adds none.
    out? =x written
""",
)
def norm_backward(
    rt: Runtime,
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    kind: str,
    zero_centered: bool = False,
    sm_margin: int = 0,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dgamma, dbeta): dx in x's dtype, fresh or into `out`; dgamma and dbeta in gamma's, summed in float32 in a
    fixed order.

    `add`, of x's shape and dtype, goes into dx before its one rounding: the gradient that reaches x round the norm.
    """
    off = _check.off(x, dy, gamma, add, out)
    spec = NormOpSpec(kind, x.shape, x.dtype, gamma.dtype, dy.dtype, zero_centered, sm_margin, off, add=add is not None)
    dx = rt.empty(x.shape, x.dtype) if out is None else out
    dgamma = rt.empty(gamma.shape, gamma.dtype)
    dbeta = rt.empty(gamma.shape, gamma.dtype) if kind == "LayerNorm" else None
    rt.backend.norm_backward(rt, spec, NormGradients(dy, x, gamma, mean, rstd, add, dx, dgamma, dbeta))
    return dx, dgamma, dbeta


@rules("""
    branch.residual =x
    branch.sum =x written
    branch.bias? [x.shape[1]] x
    must 0.0 <= branch.p <= 1.0: a probability
    branch.rng? [2] i64
    must branch.p == 0.0 or branch.rng is not None: rng, an int64 tensor (seed, offset), where p is not 0; pass rng=
""")
def _check_branch(op: str, rt: Runtime, x: Tensor, branch: Branch) -> None:
    """What x is added to first has its size."""
