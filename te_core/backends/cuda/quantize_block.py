"""FP8 with block scales (1x128 pieces, 128x128 tiles), and back, on CUDA.

One launch makes both copies; column sums add a small one that adds up the partial sums of the tiles in a fixed order.
"""

from __future__ import annotations

from te_core.backends.cuda.quantize import THREADS as DEQUANTIZE_THREADS
from te_core.backends.cuda.quantize import aligned
from te_core.backends.cuda.sums import FORMATS, TYPES, add_column_sums, column_workspace
from te_core.kernels import loader
from te_core.quantized import BLOCK, PAD, Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_SIDE = BLOCK["block"]
#: Rows of a thread of quantize_block.cu; its columns fill 16 bytes.
_ROWS = 16
#: x, rowwise, its scales, columnwise, its scales, column_sum, epsilon, power_of_two, rows, cols, across
_ARGS = "ppppppfiqqi"


def quantize_block(rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None) -> None:
    """Quantize x in one launch of quantize_block.cu."""
    (rows, cols), dtype = x.shape, x.dtype
    across, down = -(-cols // _SIDE), -(-rows // _SIDE)
    kernel = loader.get(
        rt,
        "quantize_block",
        args=_ARGS,
        DTYPE=TYPES[dtype],
        FORMAT=FORMATS[cast.dtype],
        TILED=cast.format.tiled,
        ROWWISE=cast.rowwise,
        COLUMNWISE=cast.columnwise,
        COLUMN_SUM=column_sum is not None,
        ALIGNED=aligned(x),
    )
    sums = 0 if column_sum is None else column_workspace(rt, down, cols)
    if across and down:
        threads, shared = _SIDE // _ROWS * _SIDE // (16 // dtype.itemsize), _SIDE * _SIDE * dtype.itemsize
        pointers = (x, out.rowwise, out.rowwise_scale, out.columnwise, out.columnwise_scale, sums)
        numbers = (cast.epsilon, cast.power_of_two, rows, cols, across)
        kernel(rt, across * down, threads, *pointers, *numbers, shared=shared)
    add_column_sums(rt, sums, down, column_sum)


def dequantize_block(rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool) -> None:
    """out = q times the scales of its blocks, from one of the copies."""
    rows, cols = q.shape
    if not rows or not cols:
        return
    source, scales = (q.columnwise, q.columnwise_scale) if columnwise else (q.rowwise, q.rowwise_scale)
    assert source is not None and scales is not None  # the ops floor refuses a missing copy
    vector = cols % 4 == 0 and out.ptr % (4 * out.dtype.itemsize) == 0
    kernel = loader.get(
        rt,
        "dequantize_block",
        args="pppqq",
        DTYPE=TYPES[out.dtype],
        FORMAT=FORMATS[q.dtype],
        COLUMNWISE=columnwise,
        TILED=q.format.tiled,
        VECTOR=vector,
    )
    tile_m, tile_n = (8 * PAD, 64) if columnwise else (16, 32 * PAD)
    grid = (-(-rows // tile_m), -(-cols // tile_n))
    kernel(rt, grid, DEQUANTIZE_THREADS, source, scales, out, rows, cols)
