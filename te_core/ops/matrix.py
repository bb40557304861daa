"""Small matrix helpers: another size (cropped, or filled up with zeros), and column sums."""

from __future__ import annotations

from te_core.dtypes import ACTIVATION_DTYPES
from te_core.ops import _check
from te_core.runtime import Runtime
from te_core.tensor import Tensor


def resize(rt: Runtime, x: Tensor, rows: int, cols: int, *, out: Tensor | None = None) -> Tensor:
    """The matrix x cropped, or padded with zeros, to [rows, cols]."""
    _check.matrix("resize", "x", x)
    _check.one_of("resize", "element size of x", x.dtype.bits, (8, 16, 32))
    _check.on_device("resize", rt.device, x)
    _check.result("resize", rt.device, "out", out, (rows, cols), (x.dtype,))
    if out is None:
        out = rt.empty((rows, cols), x.dtype)
    rt.backend.resize(rt, x, out)
    return out


def column_sum(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """out [N] = the column sums of x [M, N], added in float32 in a fixed order."""
    _check.matrix("column_sum", "x", x)
    _check.one_of("column_sum", "dtype of x", x.dtype, ACTIVATION_DTYPES)
    _check.vector("column_sum", "out", out, x.shape[1], ACTIVATION_DTYPES)
    _check.on_device("column_sum", rt.device, x, out)
    _check.written("column_sum", "out", out)
    rt.backend.column_sum(rt, x, out)
