"""NVFP4 and back (`te_core.ops.quantize_nvfp4` states the rule).

A copy is walked in strips of whole lines, 16 or a multiple: a strip has all that its blocks need, tiles included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from te_core import dtypes
from te_core.backends.cpu import codec
from te_core.backends.cpu.elementwise import philox_words
from te_core.backends.cpu.executor import CHUNK, F32, scratch
from te_core.backends.cpu.matrix import store_column_sum
from te_core.quantized import BLOCK, Cast, Format, QuantizedTensor, up
from te_core.runtime import Runtime
from te_core.tensor import Tensor

Array = np.ndarray[Any, Any]
Codes = npt.NDArray[np.uint8]

_N = BLOCK["nvfp4"]
_ONE, _SIX, _TOP = np.float32(1), np.float32(6), np.finfo(np.float32).max
_SIXTH = _ONE / _SIX
#: The values of the sixteen codes: E2M1, sign bit 8.
_VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_SCALES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
#: The transform's signs, over 4.
_SIGNED_QUARTERS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32) / np.float32(4)
#: Turns the site of a cast into that of its columnwise copy.
_COLUMNWISE_SITE = 0x40000000


@np.errstate(all="ignore")
def quantize_nvfp4(rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None) -> None:
    """Quantize a matrix in the orientations that `out` holds."""
    values = x.numpy()
    if column_sum is not None:
        store_column_sum(scratch(rt), values, column_sum)
    if out.rowwise is not None:
        _deliver(values, cast, out, False)
    if out.columnwise is not None:
        _deliver(_transformed(values) if cast.transform else values.T, cast, out, True)


def _arrays(q: QuantizedTensor, columnwise: bool) -> tuple[Codes, Codes, F32]:
    """Data, scales and amax of a copy."""
    data, scale, amax = (
        (q.columnwise, q.columnwise_scale, q.columnwise_amax)
        if columnwise
        else (q.rowwise, q.rowwise_scale, q.rowwise_amax)
    )
    assert data is not None and scale is not None  # the ops floor refuses a missing copy
    # An amax for each of no lines has no memory.
    return data.numpy(), scale.numpy(), np.empty(0, np.float32) if amax is None else amax.numpy()


def _transformed(values: Array) -> Array:
    """The columns of a matrix as lines, padded, Hadamard-transformed: exact in bf16."""
    m, k = values.shape
    out = np.zeros((k, up(m, _N)), ml_dtypes.bfloat16)
    out[:, :m] = values.T
    for start, stop in _strips(k, out.shape[1]):
        u = out[start:stop].astype(np.float32).reshape(-1, _N) * _SIGNED_QUARTERS
        for h in (1, 2, 4, 8):
            pairs = u.reshape(-1, _N // (2 * h), 2, h)
            u = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2)
        out[start:stop] = u.reshape(stop - start, -1)
        out[start:stop] += ml_dtypes.bfloat16(0)  # makes a negative zero positive
    return out


def _strips(lines: int, length: int) -> Iterator[tuple[int, int]]:
    """Ranges of lines, whole 16s, that hold about CHUNK values."""
    step = max(1, CHUNK // max(1, length * _N)) * _N
    for start in range(0, lines, step):
        yield start, min(start + step, lines)


def _deliver(lines: Array, cast: Cast, out: QuantizedTensor, columnwise: bool) -> None:
    """Cast one copy, given by its lines: amax, scales, data, padding."""
    data, scales, amax = _arrays(out, columnwise)
    form, (count, length), width = cast.format, lines.shape, 2 * data.shape[1]
    if form.row_scaled:
        for start, stop in _strips(count, length):
            amax[start:stop] = _magnitudes(lines[start:stop].astype(np.float32)).max(axis=1, initial=0)
    elif cast.maxima is not None:
        amax[0] = cast.maxima.numpy()[-1 if columnwise else 0]
    else:
        amax[0] = codec.amax(lines if lines.flags.c_contiguous else lines.T)
    site = cast.site ^ _COLUMNWISE_SITE if columnwise else cast.site
    scales[...] = 0
    if not data.size:
        return
    for start, stop in _strips(data.shape[0], width):
        v = np.zeros((stop - start, width), np.float32)
        inside = lines[start:stop]
        v[: len(inside), :length] = inside
        largest = amax[:1]
        if form.row_scaled:
            largest = np.zeros((stop - start, 1), np.float32)
            largest[: len(inside), 0] = amax[start:stop]
        random = None
        if cast.stochastic:
            assert cast.rng is not None  # the ops floor refuses stochastic rounding without it
            words = philox_words(cast.rng.numpy(), site, start * width // 4, v.size // 4)
            random = np.ascontiguousarray(words).view(np.uint8).reshape(v.shape)
        codes, scale = _quantized(v, largest, form, cast.four_over_six, random, columnwise)
        data[start:stop] = codes[:, 0::2] | codes[:, 1::2] << 4
        scales[start:stop, : width // _N] = scale


def _quantized(
    v: F32, amax: F32, form: Format, four_over_six: str | None, random: Codes | None, columnwise: bool
) -> tuple[Codes, Codes]:
    """The codes of a strip [lines, length] and of its scales [lines, length / 16]."""
    encode = np.minimum(np.float32(6 * form.bound) / amax, _TOP)
    encode[(amax == 0) | (encode == 0)] = _ONE
    decode = _ONE / encode
    blocks = v.reshape(len(v), -1, _N)
    largest = _magnitudes(blocks).max(axis=2)
    if form.tiled:
        tiles = largest.reshape(-1, _N, largest.shape[1]).max(axis=1)
        largest = np.repeat(tiles, _N, axis=0)
    if four_over_six is None:
        scale = _e4m3(largest * (encode * _SIXTH))
        return _rounded(blocks, scale, decode, random).reshape(v.shape), scale
    base = largest / _SIX * encode
    candidates = []
    for factor in (_ONE, np.float32(1.5)):
        scale = _e4m3(base * factor)
        codes = _rounded(blocks, scale, decode, None)
        d = _VALUES[codes] * _SCALES[scale][..., None]
        d = d * amax[..., None] / np.float32(6 * form.bound) - blocks
        error = _sums(np.abs(d) if four_over_six == "MAE" else d * d, form.tiled, columnwise)
        candidates.append((codes, scale, error))
    (codes, scale, error), (other_codes, other_scale, other_error) = candidates
    better = other_error < error
    codes = np.where(better[..., None], other_codes, codes)
    return codes.reshape(v.shape), np.where(better, other_scale, scale)


def _magnitudes(v: F32) -> F32:
    """|v|, zero for NaN: a signalling one would outlive np.fmax."""
    return np.where(np.isnan(v), np.float32(0), np.abs(v))


def _e4m3(scale: F32) -> Codes:
    """Scales as E4M3 codes; they are never NaN or negative, and saturate."""
    return codec.fp8_codes(np.minimum(scale, _TOP).view(np.uint32), dtypes.float8_e4m3)


def _rounded(blocks: F32, scale: Codes, decode: F32, random: Codes | None) -> Codes:
    """The E2M1 codes of blocks [lines, n, 16] under their scales [lines, n]; `random`: rounded stochastically."""
    v = blocks * np.minimum(_ONE / (_SCALES[scale] * decode), _TOP)[..., None]
    size = np.minimum(np.abs(v), _SIX)
    if random is not None:
        step = np.where(size < 2, np.float32(0.5), np.where(size < 4, _ONE, np.float32(2)))
        size = size + random.reshape(v.shape).astype(np.float32) * np.float32(1 / 256) * step
        code = _at_least(size, 0.5, 1, 1.5, 2, 3, 4, 6)
    else:
        code = _at_least(size, 0.75, 1.75, 3.5)
        for above in (0.25, 1.25, 2.5, 5):
            code += size > np.float32(above)
    code |= np.signbit(v).view(np.uint8) << 3
    code[np.isnan(v)] = 7
    return code


def _at_least(size: F32, *bounds: float) -> Codes:
    """How many of the bounds each number reaches."""
    count = np.zeros(size.shape, np.uint8)
    for bound in bounds:
        count += size >= np.float32(bound)
    return count


def _sums(d: F32, tiled: bool, columnwise: bool) -> F32:
    """The sums of [lines, n, 16] over blocks, in the order of the rule, for each line and block."""
    if not tiled:
        return _pairwise(d)
    tiles = d.reshape(-1, _N, d.shape[1], _N)  # of the lines; in a columnwise copy, these are columns of x
    tiles = tiles.transpose(0, 2, 3, 1) if columnwise else tiles.transpose(0, 2, 1, 3)
    return np.repeat(_pairwise(_pairwise(tiles)), _N, axis=0)


def _pairwise(d: F32) -> F32:
    """The sums over the last axis, of 16: neighbours first."""
    while d.shape[-1] > 1:
        d = d[..., 0::2] + d[..., 1::2]
    return d[..., 0]


@np.errstate(all="ignore")
def dequantize_nvfp4(rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool) -> None:
    """The values of one copy; of the columnwise one, with its padded rows and as it was transformed."""
    codes, scales, largest = _arrays(q, columnwise)
    target = out.numpy().T if columnwise else out.numpy()
    count, length = target.shape
    unit = np.float32(1 / (6 * q.format.bound))
    for start, stop in _strips(count, length):
        part = codes[start:stop]
        values = np.empty((stop - start, part.shape[1], 2), np.float32)
        values[..., 0], values[..., 1] = _VALUES[part & 15], _VALUES[part >> 4]
        blocks = values.reshape(stop - start, -1, _N)
        maxima = largest[start:stop, None] if q.format.row_scaled else largest
        blocks *= (_SCALES[scales[start:stop, : blocks.shape[1]]] * maxima * unit)[..., None]
        target[start:stop] = blocks.reshape(stop - start, -1)[:, :length]
