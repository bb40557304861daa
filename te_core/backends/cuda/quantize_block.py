"""FP8 with block scales (1x128 pieces, 128x128 tiles), and back, on CUDA.

One launch makes both copies, of a matrix or of what a norm or activation computes (`run_tiles`). Column sums add a
small one that adds up the partial sums of the tiles in a fixed order.
"""

from __future__ import annotations

from typing import Any

from te_core.backends.cuda.quantize import THREADS as DEQUANTIZE_THREADS
from te_core.backends.cuda.quantize import aligned, dequantizer
from te_core.backends.cuda.sums import FORMATS, TYPES, add_column_sums, column_workspace
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.quantized import BLOCK, Cast, CastKey, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_SIDE = BLOCK["block"]
#: What follows a tile kernel's own operands: rowwise, its scales, columnwise, its scales, column_sum, epsilon,
#: power_of_two, rows, cols, across.
TILE_ARGS = "pppppfiqqi"


def tile_constants(cast: CastKey, dtype: DType, sums: bool) -> dict[str, Any]:
    """The constants of common/block_tile.cuh but ALIGNED: what is delivered, of values of this type."""
    return {
        "DTYPE": TYPES[dtype],
        "FORMAT": FORMATS[cast.format.dtype],
        "TILED": cast.format.tiled,
        "ROWWISE": cast.rowwise,
        "COLUMNWISE": cast.columnwise,
        "COLUMN_SUM": sums,
    }


def tile_threads(dtype: DType) -> int:
    """Threads of a tile's block: each has sixteen rows of the columns that fill 16 bytes."""
    return _SIDE // 16 * _SIDE // (16 // dtype.itemsize)


def tile_bytes(dtype: DType) -> int:
    """Shared memory of one output's tile."""
    return _SIDE * _SIDE * dtype.itemsize


def run_tiles(
    rt: Runtime,
    kernel: Kernel,
    operands: tuple[Tensor | None, ...],
    values: tuple[int, DType],
    cast: Cast,
    out: QuantizedTensor,
    column_sum: Tensor | None = None,
    more: tuple[float, ...] = (),
) -> None:
    """One launch over all tiles of an output, and of a second one of as many columns beside it where `out` is as wide.

    `values`: the columns of an output, and the type that is cast. `more` follows the arguments of all tile kernels.
    """
    (rows, width), (cols, dtype) = out.shape, values
    across, down = -(-cols // _SIDE), -(-rows // _SIDE)
    sums = 0 if column_sum is None else column_workspace(rt, down, width)
    if across and down:
        pointers = (*operands, out.rowwise, out.rowwise_scale, out.columnwise, out.columnwise_scale, sums)
        numbers = (cast.epsilon, cast.power_of_two, rows, cols, across)
        shared = width // cols * tile_bytes(dtype)
        kernel(rt, across * down, tile_threads(dtype), *pointers, *numbers, *more, shared=shared)
    add_column_sums(rt, sums, down, column_sum)


def quantize_block(rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None) -> None:
    """Quantize x in one launch of quantize_block.cu."""
    constants = tile_constants(cast.key, x.dtype, column_sum is not None)
    kernel = loader.get(rt, "quantize_block", args="p" + TILE_ARGS, ALIGNED=aligned(x), **constants)
    run_tiles(rt, kernel, (x,), (x.shape[1], x.dtype), cast, out, column_sum)


def dequantize_block(rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool) -> None:
    """out = q times the scales of its blocks, from one of the copies."""
    if out.size:
        source, scales = (q.columnwise, q.columnwise_scale) if columnwise else (q.rowwise, q.rowwise_scale)
        kernel, (across, down) = dequantizer(rt, "dequantize_block", q, out, columnwise, TILED=q.format.tiled)
        kernel(rt, (down, across), DEQUANTIZE_THREADS, source, scales, out, *q.shape)
