"""MXFP8: one scale for each 32 elements or 32x32 tile, and back; the order of scales for cuBLASLt. Bytes compared."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.quantized import Cast, Copy, Format, QuantizedTensor
from te_core.runtime import Runtime
from tests.backends import cuda_runtime, requires_cuda
from tests.core.covering_lists import covering_lists
from tests.core.inputs import DTYPES, FP8, SHAPES, codes, numpy_dtype, placed, poisoned, values
from tests.reference import quantize_mxfp8 as ref
from tests.reference.quantize import LIMIT

ORIENTATIONS = [(True, True), (True, False), (False, True)]
#: Around the 32, 128 and 256 that the kernels count in.
EDGES = [(33, 65), (32, 32), (128, 256), (129, 257), (31, 288), (1, 640), (640, 1)]


def make_cast(fp8, orientation=(True, True), tiled=False):
    form = Format(dtypes.dtype(fp8), "mxfp8", tiled)
    return Cast(form, rowwise=orientation[0], columnwise=orientation[1])


def check(rt, q, x, fp8, orientation=(True, True), tiled=False):
    """Data and scales of the copies, padding included, bit for bit."""
    assert (q.rowwise is not None, q.columnwise is not None) == orientation
    copies = (q.rowwise, q.rowwise_scale), (q.columnwise, q.columnwise_scale)
    for columnwise, (data, scale) in enumerate(copies):
        if data is not None:
            expected, scales = ref.quantize(x, fp8, tiled, bool(columnwise))
            np.testing.assert_array_equal(rt.numpy(scale), scales, err_msg=f"scales {x.shape} {columnwise=}")
            np.testing.assert_array_equal(codes(rt, data), expected, err_msg=f"data {x.shape} {columnwise=}")


@covering_lists(
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("fp8", FP8),
    pytest.mark.parametrize("tiled", [False, True], ids=["pieces", "tiled"]),
    turns=2,
)
def test_quantize(rt, dtype, fp8, tiled):
    rt = poisoned(rt)
    for i, shape in enumerate([*SHAPES, *EDGES]):
        x = values(shape, dtype, i, special=i % 2 == 1)
        orientation = ORIENTATIONS[i % 3]
        q = ops.quantize(rt, placed(rt, x), make_cast(fp8, orientation, tiled))
        check(rt, q, x, fp8, orientation, tiled)


@pytest.mark.parametrize("fp8", FP8)
def test_scale_of_every_power(rt, fp8):
    """A maximum of limit * 2^n has the code n + 127, the next number above it one more."""
    limit = np.float32(LIMIT[fp8])
    exponents = np.arange(-130, 119 if fp8 == "float8_e4m3" else 112)
    x = np.zeros((2 * exponents.size, 40), np.float32)
    x[::2, 7] = np.ldexp(limit, exponents)
    # The product with the rounded 1 / limit must lie above the power too, hence a few steps.
    x[1::2, 7] = -np.ldexp(limit * np.float32(1 + 2.0**-20), exponents)
    q = ops.quantize(rt, placed(rt, x), make_cast(fp8))
    check(rt, q, x, fp8)
    got = rt.numpy(q.rowwise_scale)[: x.shape[0], 0].reshape(-1, 2)
    np.testing.assert_array_equal(got[3:, 0], exponents[3:] + 127)  # from the code 0 = 2^-127 on, by hand
    np.testing.assert_array_equal(got[3:, 1], exponents[3:] + 128)
    np.testing.assert_array_equal(got[:3], 0)


def odd_blocks(fp8):
    """Blocks of 32 by name: their values, their scale code and the first codes of their data."""
    limit, top = LIMIT[fp8], 0x7E if fp8 == "float8_e4m3" else 0x7B
    one = 0x38 if fp8 == "float8_e4m3" else 0x3C  # the code of 1.0
    return {
        "zeros": ([0.0, -0.0], 0, [0x00, 0x80]),
        "all NaN": ([np.nan] * 32, 0, [0x7F] * 32),
        "a NaN does not count": ([np.nan, limit, -limit, 1.0], 127, [0x7F, top, top | 0x80, one]),
        "infinity": ([np.inf, -np.inf, 1.0, np.nan], 254, [top, top | 0x80, 0, 0x7F]),
        "the limit": ([limit, 1.0], 127, [top, one]),
        "twice the limit": ([-2 * limit, 2.0], 128, [top | 0x80, one]),
        "subnormal of float32": ([1e-44], 0, [0]),
    }


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("columnwise", [False, True])
def test_odd_blocks_by_hand(rt, fp8, columnwise):
    cases = odd_blocks(fp8)
    x = np.zeros((len(cases), 32), np.float32)
    for row, (block, _, _) in zip(x, cases.values(), strict=True):
        row[: len(block)] = block
    x = x.T if columnwise else x
    q = ops.quantize(rt, placed(rt, x), make_cast(fp8, (not columnwise, columnwise)))
    data = codes(rt, q.columnwise if columnwise else q.rowwise)
    scale = rt.numpy(q.columnwise_scale if columnwise else q.rowwise_scale)
    data, scale = (data.T, scale.T) if columnwise else (data, scale)
    for i, (name, (_, code, first)) in enumerate(cases.items()):
        assert scale[i, 0] == code, name
        np.testing.assert_array_equal(data[i, : len(first)], first, err_msg=name)


def test_tile_shares_one_scale(rt):
    """The largest of a 32x32 tile decides for all of it, in both copies, and for its neighbours nothing."""
    x = np.ones((64, 96), np.float32)
    x[40, 70] = 448 * 2.0**9
    q = ops.quantize(rt, placed(rt, x), make_cast("float8_e4m3", tiled=True))
    rows, columns = rt.numpy(q.rowwise_scale), rt.numpy(q.columnwise_scale)
    ordinary = 127 - 8  # 1 / 448, rounded up to 2^-8
    assert (rows[:64, :3] == [[ordinary] * 3] * 32 + [[ordinary, ordinary, 136]] * 32).all()
    assert (columns[0, :96] == ordinary).all() and (columns[1, :64] == ordinary).all()
    assert (columns[1, 64:96] == 136).all()
    np.testing.assert_array_equal(codes(rt, q.rowwise), codes(rt, q.columnwise))


# ---------------------------------------------------------------------------------------------- and back


@covering_lists(pytest.mark.parametrize("dtype", DTYPES), pytest.mark.parametrize("fp8", FP8))
def test_dequantize(rt, dtype, fp8):
    """Any data bytes below any scales: all 256 codes of both."""
    rt = poisoned(rt)
    rng = np.random.default_rng(0)
    for i, shape in enumerate([*SHAPES, *EDGES]):
        for columnwise in (False, True):
            q = ops.quantize(rt, placed(rt, values(shape, "float32", i)), make_cast(fp8, tiled=i % 2 == 1))
            data, scale = (q.columnwise, q.columnwise_scale) if columnwise else (q.rowwise, q.rowwise_scale)
            if i % 3:  # those of the cast itself are checked as well
                data, scale = (
                    rt.tensor(rng.integers(0, 256, t.shape, np.uint8).view(t.dtype.numpy)) for t in (data, scale)
                )
                copy = Copy(data, scale, None)
                q = QuantizedTensor(q.format, shape, None if columnwise else copy, copy if columnwise else None)
            got = rt.numpy(ops.dequantize(rt, q, dtypes.dtype(dtype), columnwise=columnwise))
            exact = ref.dequantize(codes(rt, data), rt.numpy(scale), fp8, columnwise)[: shape[0], : shape[1]]
            with np.errstate(over="ignore"):
                expected = exact.astype(np.float32).astype(numpy_dtype(dtype))
            np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


def test_dequantize_unaligned_width(rt):
    """The default copy, and values that come back whole."""
    x = np.arange(1, 1 + 50 * 37).reshape(50, 37).astype(np.float32) % 7
    for orientation in ORIENTATIONS:
        q = ops.quantize(rt, placed(rt, x), make_cast("float8_e4m3", orientation))
        np.testing.assert_array_equal(rt.numpy(ops.dequantize(rt, q, dtypes.float32)), x)


# ---------------------------------------------------------------------------------------------- swizzle


@pytest.mark.parametrize("shape", [(128, 4), (256, 4), (128, 8), (384, 36), (1024, 20), (0, 4), (128, 0)])
def test_swizzle(rt, shape):
    rt = poisoned(rt)
    scale = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    got = ops.swizzle_scales(rt, rt.tensor(scale))
    assert got.shape == shape
    np.testing.assert_array_equal(rt.numpy(got).ravel(), ref.swizzled(scale))
    got = ops.swizzle_scales(rt, rt.tensor(np.ascontiguousarray(scale.T)), transposed=True)
    assert got.shape == shape[::-1]
    np.testing.assert_array_equal(rt.numpy(got).ravel(), ref.swizzled(scale))


# ---------------------------------------------------------------------------------------------- CUDA alone


@requires_cuda
def test_cuda_equals_cpu_on_any_bits():
    """All bit patterns of the 16-bit types and a million of float32: the bytes of both backends."""
    rng = np.random.default_rng(0)
    inputs = [np.arange(65536, dtype=np.uint16).view(numpy_dtype(d)).reshape(256, 256) for d in DTYPES[1:]]
    inputs.append(rng.integers(0, 1 << 32, (1000, 1090), np.uint32).view(np.float32))
    inputs += [values((700, 1096), d, 5, special=True) for d in DTYPES]
    for x in inputs:
        for fp8 in FP8:
            for tiled in (False, True):
                cpu, cuda = (
                    (rt, ops.quantize(rt, placed(rt, x), make_cast(fp8, tiled=tiled)))
                    for rt in (Runtime.cpu(), cuda_runtime())
                )
                for name in ("rowwise", "rowwise_scale", "columnwise", "columnwise_scale"):
                    a, b = (codes(rt, getattr(q, name)) for rt, q in (cpu, cuda))
                    np.testing.assert_array_equal(a, b, err_msg=f"{name} {x.dtype} {fp8} {tiled}")


@requires_cuda
def test_cuda_more_rows_than_a_grid_has():
    """Above 65535 blocks of 32 rows a block takes several."""
    rt = poisoned(cuda_runtime())
    x = np.ones((65535 * 32 + 70, 1), np.float16)
    x[:, 0] = np.arange(x.shape[0]) % 1000
    q = ops.quantize(rt, placed(rt, x), make_cast("float8_e4m3"))
    tail = slice(65530 * 32, None)
    for data, scale, columnwise in ((q.rowwise, q.rowwise_scale, False), (q.columnwise, q.columnwise_scale, True)):
        expected, scales = ref.quantize(x[tail], "float8_e4m3", False, columnwise)
        first = 65530 if columnwise else 65530 * 32
        got = rt.numpy(scale)[first:]
        rows = -(-x[tail].shape[0] // 32) if columnwise else x[tail].shape[0]
        np.testing.assert_array_equal(got[:rows], scales[:rows])
        assert not got[rows:].any()
        np.testing.assert_array_equal(codes(rt, data)[tail], expected)
        values_back = rt.numpy(ops.dequantize(rt, q, dtypes.float32, columnwise=columnwise))
        exact = ref.dequantize(expected, scales, "float8_e4m3", columnwise)[: x[tail].shape[0], :1]
        np.testing.assert_array_equal(values_back[tail], exact.astype(np.float32))
