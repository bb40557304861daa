"""Quantization by hand, by golden bytes and by any bits; the delayed-scaling update. The formulas of all formats are
rows (tests/core/operation_cast_rows.py); NVFP4 has a file of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_core import dtypes, ops
from te_core.ops.quantize import ScalingState, allocate
from te_core.runtime import Runtime
from tests.backends import cuda_runtime, requires_cuda
from tests.core.covering_lists import covering_lists
from tests.core.inputs import DTYPES, FP8, SHAPES, codes, numpy_dtype, placed, poisoned, values
from tests.core.operation_cast_rows import KINDS, Rule, quantize
from tests.core.operations import check, results
from tests.reference import quantize as ref
from tests.reference import quantize_mxfp8 as mxfp8
from tests.reference.quantize import LIMIT

DATA = Path(__file__).parent.parent / "data"


def stored(name: str) -> dict[str, Any]:
    """The arrays of a file."""
    with np.load(DATA / name) as found:
        return {n: found[n] for n in found.files}


def golden(rt: Runtime, sources: dict[str, Any], name: str, rule: Rule) -> tuple[Any, Any, Any]:
    """(what a cast gives of the input of a name, the cast, the input)."""
    kind, dtype, *_ = name.split("/")
    x = sources[f"{kind}/{dtype}/input"]
    x, cast = x.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else x, rule.cast(rt)
    return ops.quantize(rt, placed(rt, x), cast), cast, x


def test_golden_per_tensor(rt: Runtime) -> None:
    """The bytes and scales that the established implementation writes (tests/data/README.md)."""
    arrays = stored("quantizers.npz")
    names = sorted(name[: -len("/data")] for name in arrays if name.endswith("/data"))
    assert len(names) >= 50
    for name in names:
        _, _, recipe, form, *options = name.split("/")
        rule = Rule("delayed", f"float8_{form}")
        if recipe == "delayed":
            rule = rule._replace(scale=float(options[0][len("scale") :]), amax=0.0)
        else:
            rule = rule._replace(name="current", epsilon=float(options[1][3:]), power_of_two=options[0] == "pow2_True")
        q, cast, _ = golden(rt, arrays, name, rule)
        np.testing.assert_array_equal(codes(rt, q.rowwise), arrays[f"{name}/data"], err_msg=name)
        np.testing.assert_array_equal(codes(rt, q.columnwise), arrays[f"{name}/data"].T, err_msg=name)
        np.testing.assert_array_equal(rt.numpy(q.scale_inv), arrays[f"{name}/scale_inv"], err_msg=name)
        if recipe == "delayed":
            np.testing.assert_array_equal(rt.numpy(cast.amax), arrays[f"{name}/amax"], err_msg=name)


def test_golden_blocks(rt: Runtime) -> None:
    """The same of block scaling, without the padding."""
    sources, arrays = stored("quantizers.npz"), stored("quantizers_block.npz")
    names = sorted({n.rpartition("/")[0] for n in arrays})
    assert len(names) == 48
    for name in names:
        _, _, grain, form, option = name.split("/")
        tiled = grain == "block2d"
        rule = Rule("128x128" if tiled else "1x128", f"float8_{form}", power_of_two=option == "pow2_True")
        q, _, x = golden(rt, sources, name, rule)
        for side, size in (("rowwise", x.shape), ("columnwise", x.shape[::-1])):
            data = arrays[f"{name}/rowwise_data"].T if tiled and side == "columnwise" else arrays[f"{name}/{side}_data"]
            np.testing.assert_array_equal(codes(rt, getattr(q, side))[: size[0], : size[1]], data, err_msg=name)
            held = np.s_[:, : -(-size[1] // 128)] if tiled else np.s_[:, : size[0]]
            got, want = rt.numpy(getattr(q, f"{side}_scale")), arrays[f"{name}/{side}_scale_inv"]
            np.testing.assert_array_equal(got[held], want[held], err_msg=f"{name} {side}")


@pytest.mark.parametrize("name", ["delayed", "current", "1x128", "128x128", "mxfp8", "mxfp8 tiles"])
@given(data=st.data())
def test_any_bits(name: str, data: Any) -> None:
    """Every bit pattern of every type, of small matrices: the CPU backend against the formulas."""
    dtype = data.draw(st.sampled_from(DTYPES))
    shape, width = (data.draw(st.integers(0, 40)), data.draw(st.integers(0, 40))), numpy_dtype(dtype).itemsize
    size = shape[0] * shape[1] * width
    x = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), numpy_dtype(dtype)).reshape(shape)
    kinds = dict(KINDS)
    KINDS["drawn"] = lambda *_: x
    try:
        case = quantize((shape, "drawn"), dtype, data.draw(st.integers(0, 59)), name)
        check(results(Runtime.cpu(), case), case)
    finally:
        KINDS.clear()
        KINDS.update(kinds)


# ------------------------------------------------------------------------------------------------------ by hand


def test_scales_of_blocks_by_hand(rt: Runtime) -> None:
    """Which elements share a scale: one large element shows in its own block and nowhere else."""
    x = np.ones((256, 384), np.float32)
    x[130, 260] = 448 * 8
    for tiled in (False, True):
        q = ops.quantize(rt, placed(rt, x), Rule("128x128" if tiled else "1x128", power_of_two=True).cast(rt))
        row, column = rt.numpy(q.rowwise_scale), rt.numpy(q.columnwise_scale)
        usual = np.float32(1 / 256)  # 448 / 1, down to a power of two
        if tiled:
            assert row.shape == (2, 4) and column.shape == (3, 4)
            assert row[1, 2] == 8 and column[2, 1] == 8
            assert (np.delete(row[:, :3].ravel(), 5) == usual).all()
            assert (row[:, 3] == 1).all() and (column[:, 2:] == 1).all()
        else:
            assert row.shape == (3, 256) and column.shape == (2, 384)
            assert row[2, 130] == 8 and column[1, 260] == 8
            assert (row == usual).sum() == row.size - 1 and (column == usual).sum() == column.size - 1


@pytest.mark.parametrize("fp8", FP8)
def test_scale_of_every_power(rt: Runtime, fp8: str) -> None:
    """A maximum of limit * 2^n has the code n + 127, the next number above it one more."""
    limit = np.float32(LIMIT[fp8])
    exponents = np.arange(-130, 119 if fp8 == "float8_e4m3" else 112)
    x = np.zeros((2 * exponents.size, 40), np.float32)
    x[::2, 7] = np.ldexp(limit, exponents)
    # The product with the rounded 1 / limit must lie above the power too, hence a few steps.
    x[1::2, 7] = -np.ldexp(limit * np.float32(1 + 2.0**-20), exponents)
    q = ops.quantize(rt, placed(rt, x), Rule("mxfp8", fp8).cast(rt))
    np.testing.assert_array_equal(codes(rt, q.rowwise), mxfp8.quantize(x, fp8, False, False)[0])
    got = rt.numpy(q.rowwise_scale)[: x.shape[0], 0].reshape(-1, 2)
    np.testing.assert_array_equal(got[3:, 0], exponents[3:] + 127)  # from the code 0 = 2^-127 on, by hand
    np.testing.assert_array_equal(got[3:, 1], exponents[3:] + 128)
    np.testing.assert_array_equal(got[:3], 0)


def odd_blocks(fp8: str) -> dict[str, Any]:
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
def test_odd_blocks_by_hand(rt: Runtime, fp8: str, columnwise: bool) -> None:
    cases = odd_blocks(fp8)
    x = np.zeros((len(cases), 32), np.float32)
    for row, (block, _, _) in zip(x, cases.values(), strict=True):
        row[: len(block)] = block
    x = x.T if columnwise else x
    q = ops.quantize(rt, placed(rt, x), Rule("mxfp8", fp8, (not columnwise, columnwise)).cast(rt))
    data = codes(rt, q.columnwise if columnwise else q.rowwise)
    scale = rt.numpy(q.columnwise_scale if columnwise else q.rowwise_scale)
    data, scale = (data.T, scale.T) if columnwise else (data, scale)
    for i, (name, (_, code, first)) in enumerate(cases.items()):
        assert scale[i, 0] == code, name
        np.testing.assert_array_equal(data[i, : len(first)], first, err_msg=name)


def test_tile_shares_one_scale(rt: Runtime) -> None:
    """The largest of a 32x32 tile decides for all of it, in both copies, and for its neighbours nothing."""
    x = np.ones((64, 96), np.float32)
    x[40, 70] = 448 * 2.0**9
    q = ops.quantize(rt, placed(rt, x), Rule("mxfp8 tiles").cast(rt))
    rows, columns = rt.numpy(q.rowwise_scale), rt.numpy(q.columnwise_scale)
    ordinary = 127 - 8  # 1 / 448, rounded up to 2^-8
    assert (rows[:64, :3] == [[ordinary] * 3] * 32 + [[ordinary, ordinary, 136]] * 32).all()
    assert (columns[0, :96] == ordinary).all() and (columns[1, :64] == ordinary).all()
    assert (columns[1, 64:96] == 136).all()
    np.testing.assert_array_equal(codes(rt, q.rowwise), codes(rt, q.columnwise))


# ------------------------------------------------------------------------------------------ scales of the next step


def update_case(rt: Runtime, rng: np.random.Generator, count: int, longest: int) -> Any:
    """States of all lengths, some as wide as those of many experts; columns zero, NaN, infinite, tiny or huge."""
    states, plain = [], []
    for i in range(count):
        rows, cols = int(rng.integers(1, longest + 1)), int(rng.integers(1, 8)) * (40 if i % 16 == 3 else 1)
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
def test_update_scales(rt: Runtime, algo: str, count: int, longest: int) -> None:
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
def test_update_scales_by_hand(rt: Runtime, algo: str) -> None:
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
def test_cuda_cast_with_partials() -> None:
    """The second pass of current scaling, given someone else's partial maxima."""
    from te_core.backends.cuda.quantize import run_cast

    rt = poisoned(cuda_runtime())
    for i, shape in enumerate(SHAPES):
        x = values(shape, "bfloat16", i)
        parts = np.array([ref.amax(p) for p in np.array_split(x.reshape(-1), 700)], np.float32)
        cast = Rule("current").cast(rt)
        q = allocate(rt, shape, cast)
        partials, sums = rt.tensor(parts), rt.empty((shape[1],), dtypes.float32)
        run_cast(rt, placed(rt, x), cast, q, (partials.ptr, parts.size), sums)
        (row, column), _ = Rule("current").copies(x)
        np.testing.assert_array_equal(codes(rt, q.rowwise), row[""])
        np.testing.assert_array_equal(codes(rt, q.columnwise), column[""])
        assert rt.numpy(q.scale_inv) == row["_scale"]
        exact = x.astype(np.float64)
        assert np.allclose(
            rt.numpy(sums), exact.sum(axis=0), rtol=0, atol=1e-5 * np.abs(exact).sum(axis=0).max(initial=0) + 1e-9
        )


@requires_cuda
def test_cuda_update_launches() -> None:
    """One launch up to 800 states, two above."""
    rt = cuda_runtime()
    from te_core.backends.cuda import quantize as cuda

    states, _ = update_case(rt, np.random.default_rng(1), 801, 3)
    assert [len(cuda.plan_update(rt, states[:n], "max")) for n in (1, 100, 101, 800, 801)] == [1, 1, 1, 1, 2]


@requires_cuda
def test_cuda_more_rows_than_a_grid_has() -> None:
    """Above 65535 blocks of 32 rows a block takes several."""
    rt = poisoned(cuda_runtime())
    x = np.ones((65535 * 32 + 70, 1), np.float16)
    x[:, 0] = np.arange(x.shape[0]) % 1000
    q = ops.quantize(rt, placed(rt, x), Rule("mxfp8").cast(rt))
    tail = slice(65530 * 32, None)
    for data, scale, columnwise in ((q.rowwise, q.rowwise_scale, False), (q.columnwise, q.columnwise_scale, True)):
        expected, scales = mxfp8.quantize(x[tail], "float8_e4m3", False, columnwise)
        first = 65530 if columnwise else 65530 * 32
        got = rt.numpy(scale)[first:]
        rows = -(-x[tail].shape[0] // 32) if columnwise else x[tail].shape[0]
        np.testing.assert_array_equal(got[:rows], scales[:rows])
        assert not got[rows:].any()
        np.testing.assert_array_equal(codes(rt, data)[tail], expected)
        values_back = rt.numpy(ops.dequantize(rt, q, dtypes.float32, columnwise=columnwise))
        exact = mxfp8.dequantize(expected, scales, "float8_e4m3", columnwise)[: x[tail].shape[0], :1]
        np.testing.assert_array_equal(values_back[tail], exact.astype(np.float32))
