"""float32 to and from bf16, fp16, E4M3 and E5M2. Round to nearest even; FP8 saturates; NaN is kept.

FP8 encoding in three steps: (1) the value's 32 bits are rounded to odd at 16 bits: truncated, with the lowest
kept bit set if anything was cut off. (2) Those 16 bits index a table. (3) The table was made once by
`fp8_codes`, plain integer arithmetic on fp32 bits. Rounding to odd loses nothing that step 3 looks at: it
keeps 8 significant bits where FP8 has 4 at most, and what lies above or below a tie stays there.
FP8 decoding is a table of all pairs of codes, two values per look-up. bf16 and fp16 go by ml_dtypes' and
NumPy's own casts, which are IEEE (they overflow to infinity); arithmetic of ours on their bits was no faster.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from te_core import dtypes
from te_core.backends.cpu.executor import CHUNK, F32, Executor
from te_core.dtypes import DType

Array = np.ndarray[Any, Any]

_SIGNED = {width: f"<i{width}" for width in (2, 4)}

NAN_CODE = 0x7F  # what the GPU's saturating conversion gives for any NaN, in both formats

#: format: (mantissa bits, exponent bias, code of the largest finite value)
_FORMATS = {dtypes.float8_e4m3: (3, 7, 0x7E), dtypes.float8_e5m2: (2, 15, 0x7B)}


def fp8_codes(bits: Array, dtype: DType) -> npt.NDArray[np.uint8]:
    """The FP8 codes nearest to float32 values given by their bits, by integer arithmetic alone."""
    mantissa, bias, top = _FORMATS[dtype]
    wide = bits.astype(np.int64)
    magnitude = wide & 0x7FFFFFFF
    exponent = np.maximum(magnitude >> 23, 1)  # fp32 subnormals have the exponent of the smallest normals
    significand = (magnitude & 0x7FFFFF) | ((magnitude >= 0x800000).astype(np.int64) << 23)
    lowest = 128 - bias  # the fp32 exponent field of the format's smallest normal value
    # Below it the spacing no longer shrinks: more bits are cut off instead. All are gone at 25.
    cut = np.minimum(23 - mantissa + np.maximum(lowest - exponent, 0), 25)
    rounded = (significand + (1 << (cut - 1)) - 1 + ((significand >> cut) & 1)) >> cut
    # `rounded` still has its leading one, which makes the exponent's first step (and a carry the next).
    code = np.minimum(rounded + (np.maximum(exponent - lowest, 0) << mantissa), top)
    code |= (wide >> 24) & 0x80
    code[magnitude > 0x7F800000] = NAN_CODE
    return np.asarray(code, np.uint8)


def _decode_table(dtype: DType) -> F32:
    """The 256 values of an FP8 format."""
    mantissa, bias, top = _FORMATS[dtype]
    code = np.arange(256)
    field, fraction = (code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1)
    implicit = np.where(field > 0, 1 << mantissa, 0)
    value = np.ldexp((fraction + implicit).astype(np.float32), np.maximum(field, 1) - bias - mantissa)
    if dtype is dtypes.float8_e5m2:
        value[(code & 0x7F) == 0x7C] = np.inf
    value[(code & 0x7F) > (0x7C if dtype is dtypes.float8_e5m2 else top)] = np.nan
    return np.asarray(np.copysign(value, np.where(code & 0x80, -1.0, 1.0)), np.float32)


def _pairs(values: F32) -> npt.NDArray[np.int64]:
    """The table of code pairs: 16 bits (little-endian) to two float32 values, held as one 8-byte word."""
    both = np.empty((256, 256, 2), np.float32)
    both[..., 0] = values[None, :]
    both[..., 1] = values[:, None]
    return both.view(np.int64).reshape(-1)


_TOP_HALVES = np.arange(1 << 16, dtype=np.uint32) << 16
_ENCODE = {d.numpy: fp8_codes(_TOP_HALVES, d) for d in _FORMATS}
_DECODE = {d.numpy: _decode_table(d) for d in _FORMATS}
_DECODE_PAIRS = {numpy: _pairs(values) for numpy, values in _DECODE.items()}


def decode(ex: Executor, source: Array, out: F32) -> F32:
    """Fill `out` with the values of `source` (dense, of one size) and return it."""
    pairs = _DECODE_PAIRS.get(source.dtype)
    if pairs is None:
        np.copyto(out, source)
        return out
    codes, flat = source.reshape(-1).view(np.uint8), out.reshape(-1)
    even = codes.size & ~1
    words, doubles = codes[:even].view(np.uint16), flat[:even].view(np.int64)
    for start in range(0, words.size, CHUNK):
        part = words[start : start + CHUNK]
        index = ex.wide[: part.size]
        index[...] = part
        pairs.take(index, out=doubles[start : start + CHUNK], mode="clip")  # "raise" would buffer its output
    if even < codes.size:
        flat[-1] = _DECODE[source.dtype][codes[-1]]
    return out


def encode(ex: Executor, values: F32, out: Array, scale: np.float32 | None = None) -> None:
    """Fill `out` (dense, of one size) with `values * scale`, rounded to its type. `values` stays as it is."""
    table = _ENCODE.get(out.dtype)
    if table is None:
        np.copyto(out, values if scale is None else values * scale, casting="unsafe")
        return
    flat, codes = values.reshape(-1), out.reshape(-1).view(np.uint8)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        if scale is not None:
            part = np.multiply(part, scale, out=ex.value[: part.size])
        _look_up(ex, part.view(np.uint32), table, codes[start : start + CHUNK])


def encode_by_table(ex: Executor, source: Array, out: Array, scale: np.float32) -> None:
    """`encode` dense bf16 or fp16 values to FP8, by a table of all their 2^16 made for this one scale."""
    every = np.arange(1 << 16, dtype=np.uint16).view(source.dtype).astype(np.float32)
    table = np.empty(1 << 16, out.dtype)
    encode(ex, every, table, scale)
    code_of = table.view(np.uint8)
    bits, codes = source.reshape(-1).view(np.uint16), out.reshape(-1).view(np.uint8)
    for start in range(0, bits.size, CHUNK):
        part = bits[start : start + CHUNK]
        index = ex.wide[: part.size]
        index[...] = part
        code_of.take(index, out=codes[start : start + CHUNK], mode="clip")


def _look_up(
    ex: Executor, bits: npt.NDArray[np.uint32], table: npt.NDArray[np.uint8], codes: npt.NDArray[np.uint8]
) -> None:
    """codes = table[bits rounded to odd at 16 bits]."""
    odd, index = ex.odd[: bits.size], ex.wide[: bits.size]
    np.bitwise_and(bits, 0xFFFF, out=odd)
    np.add(odd, 0xFFFF, out=odd)  # reaches bit 16 unless all that is cut off is zero
    np.bitwise_or(odd, bits, out=odd)
    np.right_shift(odd, 16, out=odd)
    index[...] = odd
    table.take(index, out=codes, mode="clip")


def amax(source: Array) -> np.float32:
    """Max |x| over the elements of a dense array that are not NaN; 0 if there are none."""
    if source.size == 0:
        return np.float32(0)
    width, flat = source.dtype.itemsize, source.reshape(-1)
    unsigned, signed = flat.view(dtypes.UNSIGNED[width]), flat.view(_SIGNED[width])
    # As integers, positive floats sort by magnitude; so (unsigned) do the negative ones, above all the rest:
    # two reductions and no temporary.
    sign = 1 << (8 * width - 1)
    top = int(unsigned.max())
    largest = max(int(signed.max()), top - sign if top >= sign else top)
    infinity = _INFINITY[source.dtype]
    if largest > infinity:  # a NaN is in it: look again without them (fmax does not ignore a signalling one)
        magnitude = unsigned & (sign - 1)
        magnitude[magnitude > infinity] = 0
        largest = int(magnitude.max())
    bits = np.array([largest], unsigned.dtype)
    return np.float32(bits.view(source.dtype)[0])


def magnitudes(values: F32) -> npt.NDArray[np.uint32]:
    """|x| as bits, whose order is that of the values; 0 for a NaN."""
    bits = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    if bits.max() > 0x7F800000:
        bits[bits > 0x7F800000] = 0
    return bits


_INFINITY = {np.dtype(np.float32): 0x7F800000, np.dtype(np.float16): 0x7C00, np.dtype(ml_dtypes.bfloat16): 0x7F80}
