"""Residual add, and bias + dropout + residual add with a mask that is drawn again instead of stored.

The mask: word i of Philox4x32-10 decides element i. Key = (seed low 32 bits, seed high 32 bits); counter =
(low 32 bits of i // 4, high 32 bits of i // 4, low 32 bits of offset, (high 32 bits of offset) XOR site), word
i % 4 of the output. Element i is kept when word >= floor(p * 2^32), and scaled by float32(1 / (1 - p)); p = 1 keeps
none.
`rng` is an int64 tensor [2] = (seed, offset) on the device; `site` numbers the place in the model.
"""

from __future__ import annotations

from te_core import dtypes
from te_core.dtypes import ACTIVATION_DTYPES
from te_core.errors import ArgumentError
from te_core.ops import _check
from te_core.runtime import Runtime
from te_core.tensor import Tensor


def add(rt: Runtime, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """a + b in float32, rounded to a's dtype; `out` may be a or b."""
    op = "add"
    check_pair(op, a, b)
    _check.on_device(op, rt.device, a, b)
    _check.result(op, rt.device, "out", out, a.shape, (a.dtype,))
    if out is None:
        out = rt.empty(a.shape, a.dtype)
    rt.backend.add(rt, a, b, out)
    return out


def rank_sum(rt: Runtime, parts: Tensor, *, out: Tensor) -> None:
    """out [m, n] = the summands [ranks, m, n] of as many ranks, added in float32 in this order and rounded once.

    Rows of out may lie apart: it may be some of the columns of a matrix.
    """
    op = "rank_sum"
    _check.one_of(op, "dtype of parts", parts.dtype, ACTIVATION_DTYPES)
    _check.dense(op, "parts", parts)
    ends = out.ndim == 2 and (out.shape[1] < 2 or out.row_major_strides()[1] == 1)
    if (
        parts.ndim != 3
        or not parts.shape[0]
        or parts.shape[1:] != out.shape
        or out.dtype is not parts.dtype
        or not ends
    ):
        allowed = "parts [ranks, m, n] and out [m, n] of one dtype, the elements of a row side by side"
        raise ArgumentError(op, f"parts = {parts!r}, out = {out!r}", allowed, "correct parts or out")
    _check.on_device(op, rt.device, parts, out)
    _check.written(op, "out", out)
    rt.backend.rank_sum(rt, parts, out)


def bias_dropout_add(
    rt: Runtime,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    p: float,
    rng: Tensor | None = None,
    site: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """residual + dropout(x + bias, p) over a matrix x [M, N]; the sum is formed in float32 and rounded once."""
    op = "bias_dropout_add"
    check_dropout(op, x, p, rng)
    _check.vector(op, "bias", bias, x.shape[1], (x.dtype,))
    if residual is not None:
        check_pair(op, x, residual)
    _check.on_device(op, rt.device, x, bias, residual, rng)
    _check.result(op, rt.device, "out", out, x.shape, (x.dtype,))
    if out is None:
        out = rt.empty(x.shape, x.dtype)
    rt.backend.bias_dropout_add(rt, x, bias, residual, out, p, rng, site)
    return out


def bias_dropout_add_backward(
    rt: Runtime, dy: Tensor, *, p: float, rng: Tensor | None = None, site: int = 0, column_sum: Tensor | None = None
) -> Tensor:
    """The gradient of x: dy where the same mask kept the element, scaled. `column_sum` [N] is the bias gradient.

    The residual's gradient is dy itself.
    """
    op = "bias_dropout_add_backward"
    check_dropout(op, dy, p, rng)
    _check.vector(op, "column_sum", column_sum, dy.shape[1], ACTIVATION_DTYPES)
    _check.on_device(op, rt.device, dy, rng, column_sum)
    _check.written(op, "column_sum", column_sum)
    dx = rt.empty(dy.shape, dy.dtype)
    rt.backend.bias_dropout_add_backward(rt, dy, dx, p, rng, site, column_sum)
    return dx


def check_pair(op: str, a: Tensor, b: Tensor) -> None:
    """Two dense tensors of one shape, dtype and device."""
    _check.one_of(op, "dtype", a.dtype, ACTIVATION_DTYPES)
    if a.shape != b.shape or a.dtype is not b.dtype or not (a.is_contiguous and b.is_contiguous):
        _check.require(False, op, f"{a!r} and {b!r}", "two dense tensors of one shape and dtype", "make them alike")
    _check.same_device(op, a, b)


def check_dropout(op: str, x: Tensor, p: float, rng: Tensor | None) -> None:
    """A matrix to drop elements of, with what decides which."""
    _check.matrix(op, "x", x)
    _check.one_of(op, "dtype", x.dtype, ACTIVATION_DTYPES)
    if p != 0.0:
        if not 0.0 <= p <= 1.0:
            raise ArgumentError(op, f"p={p}", "0 <= p <= 1", "choose a probability")
        if rng is None:
            raise ArgumentError(op, f"p={p} without rng", "rng, an int64 tensor (seed, offset)", "pass rng=")
    _check.vector(op, "rng", rng, 2, (dtypes.int64,))
