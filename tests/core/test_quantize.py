"""Quantization per tensor, and back; transpose, amax and the delayed-scaling update. Bytes are compared, not values."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.ops.quantize import ScalingState, allocate
from te_core.quantized import Cast
from te_core.runtime import Runtime
from tests.backends import cuda_runtime, requires_cuda
from tests.core.covering_lists import covering_lists
from tests.core.inputs import DTYPES, FP8, SHAPES, codes, numpy_dtype, placed, poisoned, values
from tests.reference import quantize as ref

ORIENTATIONS = [(True, False), (False, True), (True, True)]


def make_cast(rt, fp8, orientation=(True, True), *, scale=None, amax=None, epsilon=0.0, power_of_two=False):
    def vector(v):
        return None if v is None else rt.tensor(np.array([v], np.float32))

    return Cast(
        dtypes.dtype(fp8),
        rowwise=orientation[0],
        columnwise=orientation[1],
        scale=vector(scale),
        amax=vector(amax),
        epsilon=epsilon,
        power_of_two=power_of_two,
    )


def check_storage(rt, q, expected, orientation, scale):
    """Both orientations, the padding and the inverse scale, bit for bit."""
    assert (q.rowwise is not None, q.columnwise is not None) == orientation
    if q.rowwise is not None:
        np.testing.assert_array_equal(codes(rt, q.rowwise), ref.store(expected))
    if q.columnwise is not None:
        np.testing.assert_array_equal(codes(rt, q.columnwise), ref.store(expected.T))
    assert rt.numpy(q.scale_inv)[0] == np.float32(1) / np.float32(scale)


@covering_lists(pytest.mark.parametrize("dtype", DTYPES), pytest.mark.parametrize("fp8", FP8))
def test_delayed(rt, dtype, fp8):
    rt = poisoned(rt)
    for i, shape in enumerate(SHAPES):
        x = values(shape, dtype, i, special=i % 2 == 1)
        orientation, scale = ORIENTATIONS[i % 3], (0.37, 32.0, 1.0)[i // 3 % 3]
        before = (0.0, 1e-4, 3e38)[i % 3]
        cast = make_cast(rt, fp8, orientation, scale=scale, amax=before)
        q = ops.quantize(rt, placed(rt, x), cast)
        check_storage(rt, q, ref.cast(x, scale, fp8), orientation, scale)
        assert rt.numpy(cast.amax)[0] == max(np.float32(before), ref.amax(x))


@covering_lists(pytest.mark.parametrize("dtype", DTYPES), pytest.mark.parametrize("fp8", FP8))
def test_current(rt, dtype, fp8):
    rt = poisoned(rt)
    for i, shape in enumerate(SHAPES):
        x = values(shape, dtype, i, special=i % 4 == 3)
        orientation, epsilon, power_of_two = ORIENTATIONS[(i + 1) % 3], (0.0, 0.5, 1e30)[i % 3], i % 2 == 0
        if i == 2:
            x = np.zeros_like(x)
        if i == 6:
            x = (x.astype(np.float32) * 1e-38).astype(x.dtype)  # the quotient overflows
        cast = make_cast(rt, fp8, orientation, epsilon=epsilon, power_of_two=power_of_two, amax=0.0)
        q = ops.quantize(rt, placed(rt, x), cast)
        scale = ref.scale_of(ref.amax(x), fp8, epsilon, power_of_two)
        check_storage(rt, q, ref.cast(x, scale, fp8), orientation, scale)
        assert rt.numpy(cast.amax)[0] == ref.amax(x)


def golden_cases():
    with np.load(Path(__file__).parent.parent / "data" / "quantizers.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    return arrays, sorted(name[: -len("/data")] for name in arrays if name.endswith("/data"))


def test_golden(rt):
    """The bytes and scales that the established implementation writes (tests/data/quantizers.npz)."""
    arrays, names = golden_cases()
    assert len(names) >= 50
    for name in names:
        kind, dtype, recipe, form, *options = name.split("/")
        x = arrays[f"{kind}/{dtype}/input"]
        x = x.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else x
        fp8 = f"float8_{form}"
        if recipe == "delayed":
            cast = make_cast(rt, fp8, scale=float(options[0][len("scale") :]), amax=0.0)
        else:
            cast = make_cast(rt, fp8, epsilon=float(options[1][3:]), power_of_two=options[0] == "pow2_True")
        q = ops.quantize(rt, placed(rt, x), cast)
        np.testing.assert_array_equal(codes(rt, q.rowwise), arrays[f"{name}/data"], err_msg=name)
        np.testing.assert_array_equal(codes(rt, q.columnwise), arrays[f"{name}/data"].T, err_msg=name)
        np.testing.assert_array_equal(rt.numpy(q.scale_inv), arrays[f"{name}/scale_inv"], err_msg=name)
        if recipe == "delayed":
            np.testing.assert_array_equal(rt.numpy(cast.amax), arrays[f"{name}/amax"], err_msg=name)


@requires_cuda
def test_any_bits_cuda():
    """All bit patterns of the 16-bit types and a million of float32, on CUDA."""
    rng = np.random.default_rng(0)
    for fp8 in FP8:
        for dtype in ("bfloat16", "float16"):
            check_any_bits(
                cuda_runtime(), np.arange(65536, dtype=np.uint16).view(numpy_dtype(dtype)).reshape(256, 256), fp8
            )
        floats = rng.integers(0, 1 << 32, (1024, 1024), np.uint32).view(np.float32)
        check_any_bits(cuda_runtime(), floats, fp8)


def check_any_bits(rt, x, fp8):
    for scale in (1.0, 1e-30, 3.7e4):
        cast = make_cast(rt, fp8, scale=scale, amax=0.0)
        q = ops.quantize(rt, placed(rt, x), cast)
        check_storage(rt, q, ref.cast(x, scale, fp8), (True, True), scale)
        assert rt.numpy(cast.amax)[0] == ref.amax(x)


@covering_lists(pytest.mark.parametrize("dtype", DTYPES), pytest.mark.parametrize("fp8", FP8))
def test_dequantize(rt, dtype, fp8):
    rt = poisoned(rt)
    for i, shape in enumerate(SHAPES):
        x = values(shape, "float32", i, special=i % 2 == 1)
        for orientation in ORIENTATIONS:
            q = ops.quantize(rt, placed(rt, x), make_cast(rt, fp8, orientation, scale=0.3))
            got = rt.numpy(ops.dequantize(rt, q, dtypes.dtype(dtype)))
            decoded = ref.cast(x, 0.3, fp8).view(ref.FP8[fp8]).astype(np.float32)
            with np.errstate(over="ignore"):
                expected = (decoded * (np.float32(1) / np.float32(0.3))).astype(numpy_dtype(dtype))
            np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3", "bfloat16", "int16", "float32", "int32"])
def test_transpose(rt, dtype):
    rt = poisoned(rt)
    rng = np.random.default_rng(0)
    for shape in [*SHAPES, (16, 160), (144, 32), (320, 272)]:
        dt = numpy_dtype(dtype)
        x = rng.integers(0, 256, (*shape, dt.itemsize), np.uint8).view(dt)[..., 0]
        for offset in (0, 3):
            got = rt.numpy(ops.transpose(rt, placed(rt, x, offset)))
            np.testing.assert_array_equal(got.view(f"u{dt.itemsize}"), x.T.view(f"u{dt.itemsize}"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(rt, dtype):
    for i, shape in enumerate([(0,), (1,), (7,), (4096,), (3, 5, 7), (1000, 999)]):
        x = values(shape, dtype, i, special=i == 3)
        assert rt.numpy(ops.amax(rt, placed(rt, x)))[0] == ref.amax(x)
        if x.size > 1:  # at either end, where the vectors do not reach
            for place in (0, -1):
                y = np.zeros_like(x)
                y.reshape(-1)[place] = -3
                for offset in (0, 1):
                    assert rt.numpy(ops.amax(rt, placed(rt, y, offset)))[0] == 3
    for i, shape in enumerate([(40, 64), (33, 16), (16, 31), (2, 300)]):
        x = values(shape, dtype, i, special=True)
        assert rt.numpy(ops.amax(rt, placed(rt, x, 1 + i)))[0] == ref.amax(x)
    assert rt.numpy(ops.amax(rt, placed(rt, np.full((9,), np.nan).astype(numpy_dtype(dtype)))))[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_with_column_sums(rt, dtype):
    """In one pass: the maximum of `amax`, and the sums that `quantize` makes in current scaling, to the bit."""
    for i, shape in enumerate([(1, 1), (40, 64), (33, 16), (16, 31), (300, 272), (1000, 999)]):
        x = placed(rt, values(shape, dtype, i), i % 2)
        for sum_dtype in (x.dtype, dtypes.float32):
            found, wanted = (rt.empty((shape[1],), sum_dtype) for _ in range(2))
            most = ops.amax(rt, x, column_sum=found)
            ops.quantize(rt, x, make_cast(rt, "e4m3"), column_sum=wanted)
            assert rt.numpy(most)[0] == rt.numpy(ops.amax(rt, x))[0]
            np.testing.assert_array_equal(rt.numpy(found), rt.numpy(wanted))
    with pytest.raises(ArgumentError, match="column_sum"):
        ops.amax(rt, x, column_sum=rt.empty((shape[1] + 1,), dtypes.float32))


def update_case(rt, rng, count, longest):
    """States of all lengths, with columns that are zero, NaN, infinite, tiny or huge."""
    states, plain = [], []
    for i in range(count):
        rows, cols = int(rng.integers(1, longest + 1)), int(rng.integers(1, 8))
        history = (10.0 ** rng.uniform(-4, 4, (rows, cols))).astype(np.float32)
        odd = np.array([0.0, 0.0, np.nan, np.inf, 1e-44, 3e38], np.float32)
        for c in range(cols):
            for row in (0, int(rng.integers(0, rows))):
                if rng.random() < 0.5:
                    history[row, c] = rng.choice(odd)
            if rng.random() < 0.2:
                history[:, c] = rng.choice(odd)
        scale = rng.uniform(0.1, 100, cols).astype(np.float32)
        limit = float((448.0, 57344.0 / 4)[i % 2])
        used = np.full(cols, -1, np.float32)
        states.append(ScalingState(rt.tensor(scale), rt.tensor(history), rt.tensor(used), limit))
        plain.append((scale, history, limit))
    return states, plain


@covering_lists(
    pytest.mark.parametrize(("count", "longest"), [(1, 1), (1, 1024), (40, 80), (900, 4)]),
    pytest.mark.parametrize("algo", ["max", "most_recent"]),
)
def test_update_scales(rt, algo, count, longest):
    states, plain = update_case(rt, np.random.default_rng(count), count, longest)
    for _ in range(2):
        ops.update_scales(rt, states, algo)
        for i, (state, (scale, history, limit)) in enumerate(zip(states, plain, strict=True)):
            np.testing.assert_array_equal(rt.numpy(state.used), scale)
            new_scale, new_history = ref.update(scale.tolist(), history.tolist(), limit, algo)
            plain[i] = np.array(new_scale, np.float32), np.array(new_history, np.float32), limit
            np.testing.assert_array_equal(rt.numpy(state.scale), plain[i][0], err_msg=str(history))
            np.testing.assert_array_equal(rt.numpy(state.history), plain[i][1])


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_update_scales_by_hand(rt, algo):
    """A history of four: what moves where, and which value the scale follows."""
    history = np.array([[2, 0], [7, 7], [3, 3], [1, 1]], np.float32)
    state = ScalingState(
        rt.tensor(np.array([5, 6], np.float32)), rt.tensor(history), rt.tensor(np.zeros(2, np.float32)), 448.0
    )
    ops.update_scales(rt, [state], algo)
    np.testing.assert_array_equal(rt.numpy(state.history), [[0, 0], [3, 7], [1, 3], [2, 1]])
    np.testing.assert_array_equal(rt.numpy(state.scale), np.array([448 / (7 if algo == "max" else 2), 6], np.float32))
    np.testing.assert_array_equal(rt.numpy(state.used), [5, 6])


# ---------------------------------------------------------------------------------------------- CUDA alone


@requires_cuda
def test_cuda_equals_cpu_on_large():
    """Several tiles in each direction, all orientations: bytes, scale and amax of both backends."""
    cpu, cuda = Runtime.cpu(), cuda_runtime()
    for dtype in DTYPES:
        x = values((700, 1096), dtype, 5, special=True)
        for fp8 in FP8:
            for scale in (0.7, None):
                results = []
                for rt in (cpu, cuda):
                    cast = make_cast(rt, fp8, scale=scale, amax=0.0)
                    q = ops.quantize(rt, placed(rt, x), cast)
                    results.append(
                        [codes(rt, q.rowwise), codes(rt, q.columnwise), rt.numpy(q.scale_inv), rt.numpy(cast.amax)]
                    )
                for a, b in zip(*results, strict=True):
                    np.testing.assert_array_equal(a, b)


@requires_cuda
def test_cuda_cast_with_partials():
    """The second pass of current scaling, given someone else's partial maxima."""
    from te_core.backends.cuda.quantize import run_cast

    rt = poisoned(cuda_runtime())
    for i, shape in enumerate(SHAPES):
        x = values(shape, "bfloat16", i)
        parts = np.array([ref.amax(p) for p in np.array_split(x.reshape(-1), 700)], np.float32)
        cast = make_cast(rt, "float8_e4m3")
        q = allocate(rt, shape, cast)
        partials, sums = rt.tensor(parts), rt.empty((shape[1],), dtypes.float32)
        run_cast(rt, placed(rt, x), cast, q, (partials.ptr, parts.size), sums)
        scale = ref.scale_of(ref.amax(x), "float8_e4m3", 0.0, False)
        check_storage(rt, q, ref.cast(x, scale, "float8_e4m3"), (True, True), scale)
        exact = x.astype(np.float64)
        assert np.allclose(
            rt.numpy(sums), exact.sum(axis=0), rtol=0, atol=1e-5 * np.abs(exact).sum(axis=0).max(initial=0) + 1e-9
        )


@requires_cuda
def test_cuda_update_launches():
    """One launch up to 800 states, two above."""
    rt = cuda_runtime()
    from te_core.backends.cuda import quantize as cuda

    states, _ = update_case(rt, np.random.default_rng(1), 801, 3)
    assert [len(cuda.plan_update(rt, states[:n], "max").launches) for n in (1, 100, 101, 800, 801)] == [1, 1, 1, 1, 2]
