"""MXFP8 quantization and dequantization on CUDA, and the order in which cuBLASLt reads scales.

A cast is one launch for both copies, which share nothing but x; column sums add the launch that adds up the partial
sums of the blocks in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_core.backends.cuda.quantize import BLOCKS_PER_SM, THREADS, multiprocessors
from te_core.backends.cuda.sums import FORMATS, TYPES, add_column_sums, column_workspace, sum_kernel
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.quantized import Cast, QuantizedTensor, up
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.quantize import QuantizeSpec
    from te_core.ops.swizzle import SwizzleSpec

#: Rows of a block of threads.
_SIDE = 32
#: The largest blockIdx.y.
_MAX_GRID_Y = 65535
#: x, rowwise, its scales, columnwise, its scales, column_sum, rows, cols
_QUANTIZE_ARGS = "ppppppqq"


@dataclass(frozen=True, slots=True)
class Mxfp8Plan:
    """One launch of quantize_mxfp8.cu. `aligned` says whether rows allow 16-byte loads; the address must, too."""

    family: str
    kernel: Kernel
    aligned: bool
    constants: dict[str, Any]
    grid: tuple[int, int]
    shape: tuple[int, ...]
    sum_kernel: Kernel | None

    def kernel_for(self, rt: Runtime, x: Tensor) -> Kernel:
        """The kernel for this address of x."""
        if self.aligned and x.ptr & 15:
            return loader.get(rt, "quantize_mxfp8", args=_QUANTIZE_ARGS, **{**self.constants, "ALIGNED": 0})
        return self.kernel


def plan_quantize_mxfp8(rt: Runtime, spec: QuantizeSpec) -> Mxfp8Plan:
    """The launch of `quantize_mxfp8`."""
    shape, dtype, sum_dtype = spec.shape, spec.dtype, spec.sum
    form, rowwise, columnwise = spec.cast.format, spec.cast.rowwise, spec.cast.columnwise
    aligned = shape[1] % (16 // dtype.itemsize) == 0
    constants: dict[str, Any] = {
        "DTYPE": TYPES[dtype],
        "FORMAT": FORMATS[form.dtype],
        "ROWWISE": int(rowwise),
        "COLUMNWISE": int(columnwise),
        "TILED": int(form.tiled),
        "COLUMN_SUM": int(sum_dtype is not None),
        "ALIGNED": int(aligned),
    }
    copies = "_".join(name for name, wanted in (("rows", rowwise), ("columns", columnwise)) if wanted)
    grain = "tiled_" if form.tiled else ""
    return Mxfp8Plan(
        family=f"quantize_mxfp8_{grain}{copies}{'' if sum_dtype is None else '_sums'}",
        kernel=loader.get(rt, "quantize_mxfp8", args=_QUANTIZE_ARGS, **constants),
        aligned=aligned,
        constants=constants,
        grid=_grid(rt, shape, dtype, sum_dtype is not None),
        shape=shape,
        sum_kernel=sum_kernel(rt, sum_dtype),
    )


def _grid(rt: Runtime, shape: tuple[int, ...], dtype: DType, sums: bool) -> tuple[int, int]:
    """Blocks over the scales' whole 128s. With sums a block takes several 32 rows in turn, to leave few partials."""
    across = -(-up(shape[1], 128) // _columns(dtype))
    down = up(shape[0], 128) // _SIDE
    if sums and across:
        down = min(down, max(1, BLOCKS_PER_SM * multiprocessors(rt) // across))
    return across, min(down, _MAX_GRID_Y)


def _columns(dtype: DType) -> int:
    """Columns of a block of quantize_mxfp8: eight lanes of 16 bytes in each of its warps."""
    return THREADS // 4 * (16 // dtype.itemsize)


def quantize_mxfp8(
    rt: Runtime, plan: Mxfp8Plan, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None
) -> None:
    """Quantize x as planned."""
    (rows, cols), (across, down) = plan.shape, plan.grid
    sums = 0 if column_sum is None else column_workspace(rt, down, cols)
    if across and down:
        plan.kernel_for(rt, x)(
            rt,
            plan.grid,
            THREADS,
            x.ptr,
            *_addresses(out.rowwise, out.rowwise_scale),
            *_addresses(out.columnwise, out.columnwise_scale),
            sums,
            rows,
            cols,
        )
    if column_sum is not None:
        add_column_sums(rt, plan.sum_kernel, sums, down, cols, column_sum.ptr)


def _addresses(data: Tensor | None, scales: Tensor | None) -> tuple[int, int]:
    return (0, 0) if data is None or scales is None else (data.ptr, scales.ptr)


def dequantize_mxfp8(rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool) -> None:
    """out = q times its scales, from one of the copies."""
    rows, cols = q.shape
    if not rows or not cols:
        return
    data, scales = (q.columnwise, q.columnwise_scale) if columnwise else (q.rowwise, q.rowwise_scale)
    assert data is not None and scales is not None  # the ops floor refuses a missing copy
    vector = 16 // out.dtype.itemsize
    kernel = loader.get(
        rt,
        "dequantize_mxfp8",
        args="pppqq",
        DTYPE=TYPES[out.dtype],
        FORMAT=FORMATS[q.dtype],
        COLUMNWISE=int(columnwise),
        ALIGNED=int(cols % vector == 0 and not out.ptr & 15),
    )
    grid = (-(-cols // (32 * vector)), min(-(-rows // _SIDE), _MAX_GRID_Y))
    kernel(rt, grid, THREADS, data.ptr, scales.ptr, out.ptr, rows, cols)


# ------------------------------------------------------------------------------------------------ swizzle


@dataclass(frozen=True, slots=True)
class SwizzlePlan:
    """One launch of swizzle_scales.cu over scales of R `rows` and C `blocks`."""

    family: str
    kernel: Kernel
    grid: int
    rows: int
    blocks: int


def plan_swizzle_scales(rt: Runtime, spec: SwizzleSpec) -> SwizzlePlan:
    """The launch of `swizzle_scales`."""
    transposed = spec.transposed
    rows, blocks = spec.shape[::-1] if transposed else spec.shape
    kernel = loader.get(rt, "swizzle_scales", args="ppqq", TRANSPOSED=int(transposed))
    down, across = rows // 128, blocks // 4  # tiles; a block of threads takes 32 of all, or 8 beside one another
    grid = -(-(down * across) // 32) if transposed else down * -(-across // 8)
    return SwizzlePlan(f"swizzle_scales{'_transposed' if transposed else ''}", kernel, grid, rows, blocks)


def swizzle_scales(rt: Runtime, plan: SwizzlePlan, scale: Tensor, out: Tensor) -> None:
    """Scales in the order in which cuBLASLt reads them."""
    if plan.grid:
        plan.kernel(rt, plan.grid, 256, scale.ptr, out.ptr, plan.rows, plan.blocks)
