"""The CPU backend's number formats against ml_dtypes: every code, every value near a rounding boundary."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_core import dtypes
from te_core.backends.cpu import codec
from te_core.backends.cpu.executor import CHUNK, Executor
from te_core.runtime import HostAllocator

FP8 = (dtypes.float8_e4m3, dtypes.float8_e5m2)
HALF = (dtypes.bfloat16, dtypes.float16)
EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)


@pytest.fixture
def ex() -> Executor:
    return Executor(HostAllocator())


def encoded(ex: Executor, values: np.ndarray, dtype: dtypes.DType, scale: float | None = None) -> np.ndarray:
    out = np.empty(values.shape, dtype.numpy)
    with np.errstate(all="ignore"):
        codec.encode(ex, values, out, None if scale is None else np.float32(scale))
    return out.view(f"u{dtype.itemsize}")


def expected_fp8(values: np.ndarray, dtype: dtypes.DType) -> np.ndarray:
    """ml_dtypes' cast, made saturating, with one code for NaN."""
    limit = np.float32(dtype.max)
    with np.errstate(invalid="ignore"):
        codes = np.clip(values, -limit, limit).astype(dtype.numpy).view(np.uint8)
    codes[np.isnan(values)] = 0x7F
    return codes


def around(bits: np.ndarray, reach: int = 3) -> np.ndarray:
    """The float32 values of these bits and their neighbours, both signs."""
    near = (bits.astype(np.int64)[:, None] + np.arange(-reach, reach + 1)).reshape(-1)
    near = near[(near >= 0) & (near <= 0x7FFFFFFF)].astype(np.uint32)
    return np.concatenate([near, near | np.uint32(0x80000000)]).view(np.float32)


def boundaries(dtype: dtypes.DType) -> np.ndarray:
    """The bits of every finite value of an FP8 format, of every tie between two, and of what lies beyond."""
    finite = np.arange(128, dtype=np.uint8).view(dtype.numpy).astype(np.float64)
    finite = np.sort(finite[np.isfinite(finite)])
    ties = (finite[1:] + finite[:-1]) / 2
    top = finite[-1] + (finite[-1] - finite[-2]) / 2  # from here on IEEE rounding would leave the range
    values = np.concatenate([finite, ties, [top, 2 * top, np.finfo(np.float32).max, np.inf]])
    return values.astype(np.float32).view(np.uint32)


# --- FP8 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_fp8_code(ex, dtype):
    """It decodes to its value, also as one of a pair, and its value comes back as the code."""
    codes = np.arange(256, dtype=np.uint8)
    values = codec.decode(ex, codes.view(dtype.numpy), np.empty(256, np.float32))
    one_by_one = codes.view(dtype.numpy).astype(np.float32)
    np.testing.assert_array_equal(values, one_by_one)
    np.testing.assert_array_equal(np.signbit(values), codes >= 128)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(encoded(ex, values[finite], dtype), codes[finite])
    pairs = EVERY_HALF.view(np.uint8)
    decoded = codec.decode(ex, pairs.view(dtype.numpy), np.empty(pairs.size, np.float32))
    np.testing.assert_array_equal(decoded, one_by_one[pairs])


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_rounding(ex, dtype):
    """Around every boundary; of all values of 12 significant bits and those with something far below, all ties; of both
    16-bit types; NaN has one code, and what lies beyond the range saturates.
    """
    coarse = np.arange(1 << 20, dtype=np.uint32) << np.uint32(12)
    sweep = [(coarse | np.uint32(below)).view(np.float32) for below in (0, 1, 0x7FF, 0xFFF)]
    halves = [EVERY_HALF.view(source.numpy).astype(np.float32) for source in HALF]
    for values in (around(boundaries(dtype)), *sweep, *halves):
        np.testing.assert_array_equal(encoded(ex, values, dtype), expected_fp8(values, dtype))
    nan_bits = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
    assert encoded(ex, nan_bits.view(np.float32), dtype).tolist() == [0x7F] * 5
    top = 0x7E if dtype is dtypes.float8_e4m3 else 0x7B
    infinite = np.array([np.inf, -np.inf, 1e30, -1e30], np.float32)
    assert encoded(ex, infinite, dtype).tolist() == [top, top | 0x80] * 2


@pytest.mark.full
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_rounding_of_every_float(ex, dtype):
    step = 1 << 22  # positive ones: the sign bit is set apart
    for start in range(0, 1 << 31, step):
        values = np.arange(start, start + step, dtype=np.uint64).astype(np.uint32).view(np.float32)
        np.testing.assert_array_equal(encoded(ex, values, dtype), expected_fp8(values, dtype))


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0e-39, 1e38])
def test_encoding_by_table_is_the_same_encoding(ex, dtype, scale):
    for source in HALF:
        halves = np.tile(EVERY_HALF, 3)[: 2 * CHUNK + 77].view(source.numpy)
        out = np.empty(halves.shape, dtype.numpy)
        with np.errstate(all="ignore"):
            codec.encode_by_table(ex, halves, out, np.float32(scale))
            product = halves.astype(np.float32) * np.float32(scale)
        np.testing.assert_array_equal(out.view(np.uint8), expected_fp8(product, dtype))


@pytest.mark.parametrize("dtype", FP8, ids=str)
@given(count=st.integers(0, 3 * CHUNK + 2), scale=st.floats(2**-20, 2**20, width=32), seed=st.integers(0, 99))
def test_any_length_and_scale(dtype, count, scale, seed):
    ex = Executor(HostAllocator())
    values = np.random.default_rng(seed).standard_normal(count, np.float32)
    before = values.copy()
    codes = encoded(ex, values, dtype, scale)
    np.testing.assert_array_equal(codes, expected_fp8(values * np.float32(scale), dtype))
    np.testing.assert_array_equal(values, before)  # scaled on the side, not in place
    back = codec.decode(ex, codes.view(dtype.numpy), np.full(count, -1, np.float32))
    np.testing.assert_array_equal(back, codes.view(dtype.numpy).astype(np.float32))


# --- bf16 and fp16 --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_half_precision_code(ex, dtype):
    """It comes back; twice the largest number is infinite."""
    values = codec.decode(ex, EVERY_HALF.view(dtype.numpy), np.empty(1 << 16, np.float32))
    if dtype is dtypes.bfloat16:
        np.testing.assert_array_equal(values.view(np.uint32), EVERY_HALF.astype(np.uint32) << 16)
    codes, number = encoded(ex, values, dtype), ~np.isnan(values)
    np.testing.assert_array_equal(codes[number], EVERY_HALF[number])
    assert np.isnan(codes[~number].view(dtype.numpy).astype(np.float32)).all()
    with np.errstate(over="ignore"):
        huge = encoded(ex, np.float32(dtype.max) * np.array([2, -2], np.float32), dtype)
    assert huge.view(dtype.numpy).astype(np.float32).tolist() == [np.inf, -np.inf]


def test_rounding_at_every_tie(ex):
    """Independent of ml_dtypes, which does the work here: of bf16 to nearest even on the bits."""
    high = np.arange(0x7F80, dtype=np.uint32) << np.uint32(16)
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = high | np.uint32(low)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        np.testing.assert_array_equal(encoded(ex, bits.view(np.float32), dtypes.bfloat16), nearest)
    exact = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    ties = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)  # a tie needs 12 bits: float32 holds it
    below = np.arange(0x7BFF, dtype=np.uint16)
    for values, codes in ((ties, below + (below & 1)), (np.nextafter(ties, np.float32(0)), below)):
        np.testing.assert_array_equal(encoded(ex, values, dtypes.float16), codes)
    np.testing.assert_array_equal(encoded(ex, np.nextafter(ties, np.float32(np.inf)), dtypes.float16), below + 1)


# --- amax -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("numpy", [np.float32, ml_dtypes.bfloat16, np.float16])
@given(seed=st.integers(0, 999), count=st.integers(1, 200), nans=st.integers(0, 3), sign=st.sampled_from([-1, 0, 1]))
def test_amax_ignores_nan(numpy, seed, count, nans, sign):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(count) * 10.0 ** rng.integers(-8, 4, count)).astype(numpy)
    if sign:
        values = np.abs(values) * numpy(sign)
    quiet = np.array(np.nan, numpy).view(f"u{values.itemsize}")
    infinity = np.array(np.inf, numpy).view(quiet.dtype)
    # Signalling ones too, with the smallest payload: maximum functions may not ignore those.
    values.view(quiet.dtype)[rng.integers(0, count, nans)] = rng.choice([quiet, infinity + 1])
    with np.errstate(invalid="ignore"):
        numbers = values[~np.isnan(values)].astype(np.float64)
    assert codec.amax(values) == np.max(np.abs(numbers), initial=0.0)


@pytest.mark.parametrize("numpy", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_amax_of_the_extremes(numpy):
    assert codec.amax(np.empty((0, 4), numpy)) == 0
    assert codec.amax(np.array([-0.0, 0.0], numpy)) == 0
    assert codec.amax(np.array([1, -np.inf, np.nan], numpy)) == np.inf
    assert codec.amax(np.array([np.nan, -np.nan], numpy)) == 0
