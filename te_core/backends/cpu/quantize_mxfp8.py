"""FP8 with an E8M0 scale for each 32 elements or 32x32 tile, and back; the order in which cuBLASLt reads scales.

The rule, for each block of the matrix padded with zeros to whole 32s both ways:

    v = amax * float32(1 / limit)                 amax = max |x| without NaN, limit = 448 or 57344
    e = v rounded up to a power of two, by its exponent field: field + 1 if the mantissa is not 0, up to 254;
        inf is 254; a subnormal v is 0 up to 2^-127 (mantissa 0x400000), else 1
    q = sat_cast(float32(x) * 2^(127 - e))        for e = 254 that power is subnormal, which is no exception
    x' = float32(q) * 2^(e - 127)                 e = 255 is NaN

The rest of the scale tensors, beyond the padded matrix, is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from te_core.backends.cpu import codec
from te_core.backends.cpu.executor import CHUNK, F32, Executor, scratch
from te_core.backends.cpu.matrix import store_column_sum
from te_core.quantized import BLOCK, Cast, QuantizedTensor, up
from te_core.runtime import Runtime
from te_core.tensor import Tensor

Array = np.ndarray[Any, Any]
Codes = npt.NDArray[np.uint8]

_SIDE = BLOCK["mxfp8"]


def _powers(exponents: Array) -> F32:
    """2^(exponents - 127), by bits: one step below the normal numbers lies 2^-127."""
    bits = np.where(exponents > 0, exponents << 23, 0x00400000)
    return bits.astype(np.uint32).view(np.float32)


_CODES = np.arange(256)
_SCALE = np.where(_CODES < 255, _powers(_CODES), np.float32(np.nan))
_INVERSE = np.where(_CODES < 255, _powers(np.maximum(254 - _CODES, 0)), np.float32(np.nan))


@np.errstate(all="ignore")
def quantize_mxfp8(rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None) -> None:
    """Quantize a matrix in the orientations that `out` holds."""
    ex, values = scratch(rt), x.numpy()
    if column_sum is not None:
        store_column_sum(ex, values, column_sum)
    for scales in (out.rowwise_scale, out.columnwise_scale):
        if scales is not None:
            scales.numpy()[...] = 0
    m, k = up(values.shape[0], _SIDE), up(values.shape[1], _SIDE)
    if not m or not k:
        return
    for band in _bands(m, k):
        part = _padded(ex, values[band], band.stop - band.start, k)
        tops = codec.magnitudes(part).reshape(-1, _SIDE, k // _SIDE, _SIDE)  # row block, row, column block, column
        tiles = np.max(tops, axis=(1, 3), keepdims=True) if cast.format.tiled else None
        for data, scales, along in ((out.rowwise, out.rowwise_scale, 3), (out.columnwise, out.columnwise_scale, 1)):
            if data is None or scales is None:
                continue
            largest = np.max(tops, axis=along, keepdims=True) if tiles is None else tiles
            codes = _e8m0(largest.view(np.float32), cast.dtype.max)
            scaled = np.multiply(part.reshape(tops.shape), _INVERSE[codes], out=ex.floats("mxfp8 scaled", *tops.shape))
            codec.encode(ex, scaled, data.numpy()[band])
            target = scales.numpy()
            if along == 3:
                target[band, : k // _SIDE] = np.broadcast_to(codes, (*tops.shape[:3], 1)).reshape(-1, k // _SIDE)
            else:
                block = slice(band.start // _SIDE, band.stop // _SIDE)
                target[block, :k] = np.broadcast_to(codes, (tops.shape[0], 1, *tops.shape[2:])).reshape(-1, k)


@np.errstate(all="ignore")
def dequantize_mxfp8(rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool) -> None:
    """The values of one copy of a quantized matrix."""
    data, scales = (q.columnwise, q.columnwise_scale) if columnwise else (q.rowwise, q.rowwise_scale)
    assert data is not None and scales is not None  # the ops floor refuses a missing copy
    ex, values, (m, k) = scratch(rt), out.numpy(), q.shape
    if not m or not k:
        return
    height, width = data.shape
    codes, scale = data.numpy(), _SCALE[scales.numpy()]
    for band in _bands(height, width):
        part = codec.decode(ex, codes[band], ex.floats("mxfp8 part", band.stop - band.start, width))
        blocks = part.reshape(-1, _SIDE, width // _SIDE, _SIDE)
        if columnwise:
            block = slice(band.start // _SIDE, band.stop // _SIDE)
            blocks *= scale[block, :width].reshape(-1, 1, width // _SIDE, _SIDE)
        else:
            blocks *= scale[band, : width // _SIDE].reshape(-1, _SIDE, width // _SIDE, 1)
        rows = values[band]
        codec.encode(ex, part[: rows.shape[0], :k], rows)


def _bands(height: int, width: int) -> Iterator[slice]:
    """Whole row blocks of a padded matrix, about CHUNK elements each."""
    step = max(1, CHUNK // (width * _SIDE)) * _SIDE
    for start in range(0, height, step):
        yield slice(start, min(start + step, height))


def _padded(ex: Executor, source: Array, height: int, width: int) -> F32:
    """A dense matrix as float32, with zeros below and to the right."""
    m, k = source.shape
    part = ex.floats("mxfp8 part", height, width)
    part[m:] = 0
    if k == width:
        codec.decode(ex, source, part[:m])
    else:
        part[:m, :k] = source
        part[:m, k:] = 0
    return part


def _e8m0(amax: F32, limit: float) -> Codes:
    """The scale codes of blocks from their maxima."""
    bits = (amax * (np.float32(1) / np.float32(limit))).view(np.uint32)
    # From a whole power of two on (of the normal numbers; below them, from 2^-127 on) the field carries once more.
    carry = np.where(bits > 0x00800000, np.uint32(0x007FFFFF), np.uint32(0x003FFFFF))
    return np.asarray(np.minimum((bits + carry) >> 23, 254), np.uint8)


# ------------------------------------------------------------------------------------------------ swizzle


def swizzle_scales(rt: Runtime, scale: Tensor, out: Tensor, transposed: bool) -> None:
    """Scales in the order in which cuBLASLt reads them."""
    source = scale.numpy().T if transposed else scale.numpy()
    rows, blocks = source.shape
    tiles = source.reshape(rows // 128, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4)
    out.numpy().reshape(tiles.shape)[...] = tiles
