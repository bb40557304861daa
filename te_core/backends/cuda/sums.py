"""Sums of a matrix by columns or rows, and the adding of the partial column sums that other kernels leave."""

from __future__ import annotations

from te_core import device, dtypes
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: How the kernels spell a type.
TYPES = {dtypes.float32: "float", dtypes.bfloat16: "bf16", dtypes.float16: "fp16"}
FORMATS = {dtypes.float8_e4m3: "E4M3", dtypes.float8_e5m2: "E5M2"}

_LANES = 32


# ------------------------------------------------------------- the second half of every column sum: column_sum.cu


def column_workspace(rt: Runtime, parts: int, width: int) -> int:
    """Where a launch leaves its partial column sums: float32 [parts, width]."""
    return rt.workspace("column sums", 4 * parts * width)


def add_column_sums(rt: Runtime, partials: int, parts: int, out: Tensor | None) -> None:
    """The vector `out`, if it is wanted, = the sums over the rows of the partials [parts, width]."""
    if out is not None and out.size:
        kernel = loader.get(rt, "column_sum", args="ppiq", DTYPE=TYPES[out.dtype])
        kernel(rt, -(-out.size // _LANES), 256, partials, out, parts, out.size)


# --------------------------------------------------------------------------- sums in launches of their own: sums.cu


def column_sum(rt: Runtime, x: int, shape: tuple[int, ...], source: DType, out: Tensor) -> None:
    """The column sums of a dense matrix at x, in one launch or, for many rows, two with a float32 workspace."""
    rows, cols = shape
    if not cols:
        return
    wide = 16 // source.itemsize
    if cols % wide:
        wide = 1
    # Four blocks on every multiprocessor; a part of less than 64 rows is not worth a block. (An address off the grid
    # changes nothing in this: the order of the additions depends on the shape alone.)
    blocks = 4 * device.info(rt.device.index).multiprocessors
    parts = max(1, min(-(-rows // 64), blocks // -(-cols // (_LANES * wide))))
    if x & 15:
        wide = 1
    kernel = _get(rt, "column_parts", "ppqqq", source, out.dtype if parts == 1 else dtypes.float32, wide)
    partials = out.ptr if parts == 1 else column_workspace(rt, parts, cols)
    grid, span = -(-cols // (_LANES * wide)), -(-rows // parts)
    kernel(rt, (grid, parts), (_LANES, 8), x, partials, rows, cols, rows if parts == 1 else span)
    if parts > 1:
        add_column_sums(rt, partials, parts, out)


def row_sum(rt: Runtime, x: Tensor, scale: Tensor | None, out: Tensor) -> None:
    """The row sums of a dense matrix; FP8 values are multiplied by their scale."""
    if x.shape[0]:
        kernel = _get(rt, "row_sum", "pppqq", x.dtype, out.dtype, 1)
        kernel(rt, x.shape[0], 256, x, scale, out, *x.shape)


def _get(rt: Runtime, entry: str, args: str, source: DType, out: DType, wide: int) -> Kernel:
    fp8 = FORMATS.get(source)
    return loader.get(
        rt,
        "sums",
        entry=entry,
        args=args,
        IN="u8" if fp8 else TYPES[source],
        FP8=fp8 or "E4M3",
        OUT=TYPES[out],
        WIDE=wide,
    )
