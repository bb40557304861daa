"""Sums of a matrix by columns or rows, and the adding of the partial column sums that other kernels leave."""

from __future__ import annotations

from te_core import device, dtypes
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime

#: How the kernels spell a type.
TYPES = {dtypes.float32: "float", dtypes.bfloat16: "bf16", dtypes.float16: "fp16"}
FORMATS = {dtypes.float8_e4m3: "E4M3", dtypes.float8_e5m2: "E5M2"}

_LANES = 32


# ------------------------------------------------------------- the second half of every column sum: column_sum.cu


def sum_kernel(rt: Runtime, dtype: DType | None) -> Kernel | None:
    """The kernel that adds partial column sums into a vector of this type."""
    return None if dtype is None else loader.get(rt, "column_sum", args="ppiq", DTYPE=TYPES[dtype])


def column_workspace(rt: Runtime, parts: int, width: int) -> int:
    """Where a launch leaves its partial column sums: float32 [parts, width]."""
    return rt.workspace("column sums", 4 * parts * width)


def add_column_sums(rt: Runtime, kernel: Kernel | None, partials: int, parts: int, width: int, out: int) -> None:
    """The vector at `out` = the sums over the rows of the partials [parts, width]."""
    if width and kernel is not None:
        kernel(rt, -(-width // _LANES), 256, partials, out, parts, width)


# --------------------------------------------------------------------------- sums in launches of their own: sums.cu


class ColumnSum:
    """The column sums of a dense [rows, cols], in one launch or, for many rows, two with a float32 workspace."""

    __slots__ = ("_first", "_narrow", "_out", "_second", "_source", "_wide", "cols", "parts", "rows")

    def __init__(self, rt: Runtime, rows: int, cols: int, source: DType, out: DType) -> None:
        self.rows, self.cols = rows, cols
        wide = 16 // source.itemsize
        self._wide = wide if cols % wide == 0 else 1
        # Four blocks on every multiprocessor; a part of less than 64 rows is not worth a block.
        columns_of_blocks = -(-cols // (_LANES * self._wide)) or 1
        blocks = 4 * device.info(rt.device.index).multiprocessors
        self.parts = max(1, min(-(-rows // 64), blocks // columns_of_blocks))
        self._source, self._out = source, out if self.parts == 1 else dtypes.float32
        self._first = self._kernel(rt, self._wide)
        self._narrow = self._first if self._wide == 1 else None
        self._second = sum_kernel(rt, out if self.parts > 1 else None)

    def _kernel(self, rt: Runtime, wide: int) -> Kernel:
        return _get(rt, "column_parts", "ppqqq", self._source, self._out, wide)

    def __call__(self, rt: Runtime, x: int, scale: int, out: int) -> None:
        """Sum from address x to address out (FP8 is never summed by columns, so `scale` goes unused)."""
        if not self.cols:
            return
        kernel, wide = self._first, self._wide
        if x & 15 and wide > 1:
            if self._narrow is None:
                self._narrow = self._kernel(rt, 1)
            kernel, wide = self._narrow, 1
        grid = -(-self.cols // (_LANES * wide))
        if self._second is None:
            kernel(rt, grid, (_LANES, 8), x, out, self.rows, self.cols, self.rows)
            return
        partials = column_workspace(rt, self.parts, self.cols)
        span = -(-self.rows // self.parts)
        kernel(rt, (grid, self.parts), (_LANES, 8), x, partials, self.rows, self.cols, span)
        add_column_sums(rt, self._second, partials, self.parts, self.cols, out)


class RowSum:
    """The row sums of a dense [rows, cols]; FP8 values are multiplied by their scale."""

    __slots__ = ("_kernel", "cols", "rows")

    def __init__(self, rt: Runtime, rows: int, cols: int, source: DType, out: DType) -> None:
        self.rows, self.cols = rows, cols
        self._kernel = _get(rt, "row_sum", "pppqq", source, out, 1)

    def __call__(self, rt: Runtime, x: int, scale: int, out: int) -> None:
        """Sum from address x to address out."""
        if self.rows:
            self._kernel(rt, self.rows, 256, x, scale, out, self.rows, self.cols)


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
