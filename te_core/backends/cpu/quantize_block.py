"""FP8 with a scale for each 1x128 piece or 128x128 tile, and back.

Rule, for the elements of one block: amax = max |x| over those that are not NaN, at least epsilon; scale = limit / amax
in float32 (limit is the largest value of the FP8 type), rounded down to a power of two if asked for; 1 where amax is 0
or infinite, the largest finite value of x's own type where the quotient overflows. q = saturating cast, round to
nearest even, of float32(x) * scale; 1 / scale is stored. What is missing from a block at the edge counts as zeros.

The matrix is walked in tiles of 128 x 128: the elements of a tile share the scale of each piece that lies in it, along
its rows and along its columns, and its float32 values (64 KiB) stay in the core's cache for both copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from te_core import dtypes
from te_core.backends.cpu import codec
from te_core.backends.cpu.executor import F32, Executor, scratch
from te_core.backends.cpu.matrix import store_column_sum
from te_core.dtypes import DType
from te_core.quantized import BLOCK, Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

Array = np.ndarray[Any, Any]
Tile = tuple[slice, slice]

_SIDE = BLOCK["block"]
_ONE = np.float32(1)


@np.errstate(all="ignore")
def quantize_block(rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None) -> None:
    """Quantize a matrix in the orientations that `out` holds."""
    ex, values = scratch(rt), x.numpy()
    if column_sum is not None:
        store_column_sum(ex, values, column_sum)
    deliver_blocks(ex, values, cast, out)


@np.errstate(all="ignore")
def deliver_blocks(ex: Executor, values: Array, cast: Cast, out: QuantizedTensor) -> None:
    """Cast a dense matrix of an activation dtype to FP8 with a scale for each block."""
    source_type, tiled, (m, k) = dtypes.dtype(values.dtype), cast.format.tiled, values.shape
    copies = []
    for data, scales, columnwise in (
        (out.rowwise, out.rowwise_scale, False),
        (out.columnwise, out.columnwise_scale, True),
    ):
        if data is None or scales is None:
            continue
        storage, inverse, rows, along = data.numpy().view(np.uint8), scales.numpy(), m, k
        if columnwise:
            storage, rows, along = storage.T, k, m
        # Zeros around the values that a copy holds, and around their scales those of zeros.
        storage[m:] = 0
        storage[:m, k:] = 0
        inverse[:, -(-along // _SIDE) if tiled else rows :] = _ONE / _scale(0, source_type, cast)
        copies.append((storage, inverse, columnwise))
    for tile in _tiles(m, k):
        part = codec.decode(ex, values[tile], ex.floats("block tile", *values[tile].shape))
        magnitude = codec.magnitudes(part)
        for storage, inverse, columnwise in copies:
            largest = magnitude.max() if tiled else magnitude.max(axis=0 if columnwise else 1)
            scale = _scale(largest, source_type, cast)
            scaled = ex.floats("block scaled", *part.shape)
            np.multiply(part, scale if columnwise else scale[..., None], out=scaled)
            codes = np.empty(part.shape, cast.dtype.numpy)
            codec.encode(ex, scaled, codes)
            storage[tile] = codes.view(np.uint8)
            inverse[_scale_place(tile, columnwise, tiled)] = _ONE / scale


@np.errstate(all="ignore")
def dequantize_block(rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool) -> None:
    """The values of one copy of a quantized matrix."""
    data, scales = (q.columnwise, q.columnwise_scale) if columnwise else (q.rowwise, q.rowwise_scale)
    assert data is not None and scales is not None  # the ops floor refuses a missing copy
    ex, (m, k) = scratch(rt), q.shape
    codes, inverse, values = data.numpy(), scales.numpy(), out.numpy()
    for rows, columns in _tiles(m, k):
        source = codes[columns, rows].T if columnwise else codes[rows, columns]
        part = codec.decode(ex, np.ascontiguousarray(source), ex.floats("block tile", *source.shape))
        scale = inverse[_scale_place((rows, columns), columnwise, q.format.tiled)]
        np.multiply(part, scale if columnwise else scale[..., None], out=part)
        codec.encode(ex, part, values[rows, columns])


def _tiles(m: int, k: int) -> Iterator[Tile]:
    for row in range(0, m, _SIDE):
        for column in range(0, k, _SIDE):
            yield slice(row, min(row + _SIDE, m)), slice(column, min(column + _SIDE, k))


def _scale_place(tile: Tile, columnwise: bool, tiled: bool) -> Any:
    """Where the scales of a tile lie: one element of a tiled copy's, else one for each of the copy's rows."""
    across, along = tile[::-1] if columnwise else tile  # of the copy
    block = along.start // _SIDE
    return (across.start // _SIDE, block) if tiled else (block, across)


def _scale(largest: Any, source: DType, cast: Cast) -> F32:
    """The scales of blocks from their maxima (as bits), elements of type `source`."""
    amax = np.maximum(np.asarray(largest, np.uint32).view(np.float32), np.float32(cast.epsilon))
    scale = np.float32(cast.dtype.max) / amax
    scale = np.where(np.isinf(scale), np.float32(source.max), scale)  # a tiny maximum
    if cast.power_of_two:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return np.asarray(np.where((amax == 0) | ~np.isfinite(amax), _ONE, scale), np.float32)
