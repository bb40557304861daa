"""Sums of a matrix by columns or rows: the bias gradients that no other kernel delivers (kernels/sums.cu)."""

from __future__ import annotations

from te_core import device, dtypes
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime

#: What the kernels' constants call our types.
TYPE_NAMES = {dtypes.float32: "float", dtypes.bfloat16: "bf16", dtypes.float16: "fp16"}
_FP8_NAMES = {dtypes.float8_e4m3: "E4M3", dtypes.float8_e5m2: "E5M2"}
_LANES = 32


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
        self._second: Kernel | None = None
        if self.parts > 1:
            self._second = loader.get(rt, "column_sum", args="ppiq", DTYPE=TYPE_NAMES[out])

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
        partial = rt.workspace("column sums", 4 * self.parts * self.cols)
        span = -(-self.rows // self.parts)
        kernel(rt, (grid, self.parts), (_LANES, 8), x, partial, self.rows, self.cols, span)
        self._second(rt, -(-self.cols // 32), 256, partial, out, self.parts, self.cols)


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
    fp8 = _FP8_NAMES.get(source)
    return loader.get(
        rt, "sums", entry=entry, args=args, IN="u8" if fp8 else TYPE_NAMES[source], FP8=fp8 or "E4M3",
        OUT=TYPE_NAMES[out], WIDE=wide,
    )  # fmt: skip
