"""MXFP8 quantization and dequantization on CUDA, and the order in which cuBLASLt reads scales.

A cast is one launch for both copies, which share nothing but x; column sums add the launch that adds up the partial
sums of the blocks in a fixed order.
"""

from __future__ import annotations

from te_core.backends.cuda.quantize import BLOCKS_PER_SM, THREADS, aligned, multiprocessors
from te_core.backends.cuda.sums import FORMATS, TYPES, add_column_sums, column_workspace
from te_core.kernels import loader
from te_core.quantized import Cast, QuantizedTensor, up
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: Rows of a block of threads.
_SIDE = 32
#: The largest blockIdx.y.
_MAX_GRID_Y = 65535
#: x, rowwise, its scales, columnwise, its scales, column_sum, rows, cols
_QUANTIZE_ARGS = "ppppppqq"


def quantize_mxfp8(rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None) -> None:
    """Quantize x in one launch of quantize_mxfp8.cu."""
    kernel = loader.get(
        rt,
        "quantize_mxfp8",
        args=_QUANTIZE_ARGS,
        DTYPE=TYPES[x.dtype],
        FORMAT=FORMATS[cast.dtype],
        ROWWISE=cast.rowwise,
        COLUMNWISE=cast.columnwise,
        TILED=cast.format.tiled,
        COLUMN_SUM=column_sum is not None,
        ALIGNED=aligned(x),
    )
    # Blocks over the scales' whole 128s; a block has the columns of eight lanes of 16 bytes in each of its warps. With
    # sums it takes several 32 rows in turn, to leave few partials.
    columns = THREADS // 4 * (16 // x.dtype.itemsize)
    across, down = -(-up(x.shape[1], 128) // columns), up(x.shape[0], 128) // _SIDE
    if column_sum is not None and across:
        down = min(down, max(1, BLOCKS_PER_SM * multiprocessors(rt) // across))
    down = min(down, _MAX_GRID_Y)
    sums = 0 if column_sum is None else column_workspace(rt, down, x.shape[1])
    if across and down:
        copies = (out.rowwise, out.rowwise_scale, out.columnwise, out.columnwise_scale)
        kernel(rt, (across, down), THREADS, x, *copies, sums, *x.shape)
    add_column_sums(rt, sums, down, column_sum)


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
        COLUMNWISE=columnwise,
        ALIGNED=aligned(out),
    )
    grid = (-(-cols // (32 * vector)), min(-(-rows // _SIDE), _MAX_GRID_Y))
    kernel(rt, grid, THREADS, data, scales, out, rows, cols)


# ------------------------------------------------------------------------------------------------ swizzle


def swizzle_scales(rt: Runtime, scale: Tensor, out: Tensor, transposed: bool) -> None:
    """Scales of R `rows` and C `blocks` in the order in which cuBLASLt reads them."""
    rows, blocks = scale.shape[::-1] if transposed else scale.shape
    kernel = loader.get(rt, "swizzle_scales", args="ppqq", TRANSPOSED=transposed)
    down, across = rows // 128, blocks // 4  # tiles; a block of threads takes 32 of all, or 8 beside one another
    grid = -(-(down * across) // 32) if transposed else down * -(-across // 8)
    if grid:
        kernel(rt, grid, 256, scale, out, rows, blocks)
