"""Small matrix helpers: another size (cropped, or filled up with zeros), and column sums."""

from __future__ import annotations

from te_core.ops.declare import operation
from te_core.runtime import Runtime
from te_core.tensor import Tensor


@operation("""
    x [M, N]
    must x.dtype.bits in (8, 16, 32): elements of 8, 16 or 32 bits
    rows: Number of rows of the result.
    cols: Number of columns of the result.
    out? [rows, cols] x written
""")
def resize(rt: Runtime, x: Tensor, rows: int, cols: int, *, out: Tensor | None = None) -> Tensor:
    """The matrix x cropped, or padded with zeros, to [rows, cols]."""
    if out is None:
        out = rt.empty((rows, cols), x.dtype)
    rt.backend.resize(rt, x, out)
    return out


@operation("""
    x [M, N] act
    out [N] act written: Vector that is set.
""")
def column_sum(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """out [N] = the column sums of x [M, N], added in float32 in a fixed order."""
    rt.backend.column_sum(rt, x, out)
