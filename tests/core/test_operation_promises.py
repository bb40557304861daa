"""What single operations promise beside their values (tests/core/operation_rows.py has those)."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.backends.cpu.executor import CHUNK, row_blocks
from te_core.kernels import loader
from te_core.ops import KVCache
from te_core.ops.activation import KINDS
from te_core.plan_cache import PlanCache
from te_core.quantized import Cast, Format
from te_core.runtime import Runtime
from tests.backends import cuda_runtime, requires_cuda
from tests.core.fake_cuda import Make
from tests.core.inputs import placed, poisoned, values
from tests.core.operation_rows import columns, rng_of
from tests.core.operation_token_rows import running
from tests.core.operations import drawn
from tests.reference import activation as of_activation
from tests.reference import loss as of_loss
from tests.reference import norm as of_norm
from tests.reference import softmax as of_softmax
from tests.reference.elementwise import philox

# ------------------------------------------------------------------------------------------------ the references


def gradients_of(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """(a function of arrays by name, its gradients by name where that of its result is dy, the arrays)."""
    random = np.random.default_rng(5)
    x, gamma, beta, sink = (random.standard_normal(s) for s in ((3, 6), 6, 6, 2))
    if name in ("LayerNorm", "RMSNorm"):
        rule: Any = {"kind": name, "eps": 1e-3, "zero_centered": True}
        given = {"x": x, "gamma": gamma, **({"beta": beta} if name == "LayerNorm" else {})}
        return (
            lambda a: of_norm.forward(a["x"], a["gamma"], a.get("beta"), **rule).y,
            lambda a, dy: {n: getattr(of_norm.backward(dy, a["x"], a["gamma"], **rule), f"d{n}") for n in given},
            given,
        )
    if name == "softmax":
        scores = random.standard_normal((1, 2, 3, 6))
        visible = of_softmax.seen(scores.shape, right=0, bottom_right=True)
        made = lambda a: of_softmax.softmax(a["x"], visible, 0.7, a["sink"])  # noqa: E731
        back = lambda a, dy: dict(zip(("x", "sink"), of_softmax.gradients(dy, *made(a), 0.7), strict=True))  # noqa: E731
        return lambda a: made(a)[0], back, {"x": scores, "sink": sink}
    if name == "l2_norm":
        return (
            lambda a: of_softmax.l2_norm(a["x"], 0.1),
            lambda a, dy: {"x": of_softmax.l2_norm_gradient(dy, a["x"], 0.1)},
            {"x": x},
        )
    if name == "loss":
        target = np.array([1, -100, 4])
        one = lambda a, dy: of_loss.loss(a["x"], target, dy, -100, 0.2, 0.01)  # noqa: E731
        return lambda a: one(a, np.ones(3))[0], lambda a, dy: {"x": one(a, dy)[1]}, {"x": x}
    return (
        lambda a: of_activation.forward(name, a["x"]),
        lambda a, dy: {"x": of_activation.backward(name, dy, a["x"])},
        {"x": x},
    )


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "softmax", "l2_norm", "loss", *KINDS])
def test_gradients_of_the_references_are_slopes(name: str) -> None:
    function, gradients, given = gradients_of(name)
    dy = np.random.default_rng(6).standard_normal(function(given).shape)
    found = gradients(given, dy)
    for part, array in given.items():
        for at in np.ndindex(array.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = {**given, part: array.copy()}
                moved[part][at] += step
                ends.append((dy * function(moved)).sum())
            assert found[part][at] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7), (part, at)


def test_draws_of_the_reference_are_the_published_ones() -> None:
    """The vectors that the generator's authors publish with it (Random123, kat_vectors)."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


# ------------------------------------------------------------------------------------------------------ dropout


def test_a_mask_by_the_published_words(rt: Runtime) -> None:
    """The published words decide the mask: kept at p = word / 2^32, dropped one step above."""
    words = philox((0, 0, 0, 0), (0, 0))
    x = placed(rt, np.ones((1, 4), np.float32))
    for i, word in enumerate(words):
        for step, kept in ((0, True), (1, False)):
            out = ops.bias_dropout_add(rt, x, None, None, p=(word + step) / 2**32, rng=rng_of(rt, 0, 0))
            assert (rt.numpy(out)[0, i] != 0) == kept


def test_statistics_of_a_mask(rt: Runtime) -> None:
    """The kept share is 1 - p within five sigma, in every column as over all; seed, offset and site each count."""
    rows, cols = 1024, 512
    x = placed(rt, np.ones((rows, cols), np.float32))

    def mask(p, seed=1, offset=2, site=3):
        return rt.numpy(ops.bias_dropout_add(rt, x, None, None, p=p, rng=rng_of(rt, seed, offset), site=site)) != 0

    for p in (0.05, 0.5, 0.8):
        kept = mask(p)
        sigma = np.sqrt(p * (1 - p))
        assert abs(kept.mean() - (1 - p)) < 5 * sigma / np.sqrt(rows * cols)
        assert np.abs(kept.mean(axis=0) - (1 - p)).max() < 5.5 * sigma / np.sqrt(rows)
        assert np.abs(kept.mean(axis=1) - (1 - p)).max() < 5.5 * sigma / np.sqrt(cols)
    one = mask(0.5)
    np.testing.assert_array_equal(one, mask(0.5))
    others = [
        mask(0.5, **{name: value})
        for name, value in (("seed", 2), ("seed", 1 + (1 << 32)), ("offset", 3), ("offset", 2 + (1 << 32)), ("site", 4))
    ]
    for other in (*others, np.roll(one, 1, axis=0), np.roll(one, 1, axis=1)):
        assert abs((one == other).mean() - 0.5) < 5 * 0.5 / np.sqrt(rows * cols)


# ---------------------------------------------------------------------------------------------- softmax, rotation


def test_a_seen_nan_shows(rt: Runtime) -> None:
    x = np.zeros((1, 1, 3, 8), np.float32)
    x[0, 0, 1, 5] = np.nan
    y = rt.numpy(ops.softmax_forward(rt, rt.tensor(x))[0])
    assert np.isnan(y[0, 0, 1]).any()
    np.testing.assert_allclose(y[0, 0, [0, 2]], 1 / 8, rtol=1e-6)


def test_large_scores_do_not_overflow(rt: Runtime) -> None:
    x = np.array([[[[3e38, -3e38, 3e38], [-3e38, -3e38, -3e38]]]], np.float32)
    sink = rt.tensor(np.array([1e38], np.float32))
    np.testing.assert_allclose(rt.numpy(ops.softmax_forward(rt, rt.tensor(x))[0])[0, 0, 0], [0.5, 0, 0.5])
    y, share = ops.softmax_forward(rt, rt.tensor(x), sink=sink)
    np.testing.assert_allclose(rt.numpy(y)[0, 0], [[0.5, 0, 0.5], [0, 0, 0]])
    np.testing.assert_allclose(rt.numpy(share).reshape(-1), [0, 1])


def test_every_row_of_scores_has_a_team() -> None:
    from te_core.backends.cuda.softmax import team_of

    for cols in (0, 1, 2, 7, 8, 16, 24, 100, 1000, 1024, 4096, 16384, 32768, 32776, 65536, 100003):
        for itemsize in (2, 4):
            for alignment in (0, itemsize, 8):
                team = team_of(cols, itemsize, alignment)
                assert cols % team.width == 0
                assert alignment % (team.width * itemsize) == 0
                assert team.size * team.teams % 32 == 0
                assert team.size <= 1024
                assert team.iters == 0 or team.size * team.iters * team.width >= cols
                assert team.iters * team.width <= 32


def test_a_position_outside_the_table_is_nan(rt: Runtime) -> None:
    t = rt.tensor(np.ones((3, 2, 1, 4), np.float32))
    table = rt.tensor(np.ones((4, 2), np.float32))
    starts = rt.tensor(np.array([1, 3], np.int32))
    y = rt.numpy(ops.rope(rt, t, table, start_positions=starts))
    assert np.isfinite(y[:, 0]).all()
    assert np.isfinite(y[0, 1]).all()
    assert np.isnan(y[1:, 1, :, :2]).all()
    np.testing.assert_array_equal(y[..., 2:], 1)


# ------------------------------------------------------------------------------------------------------ tokens


def test_nothing_is_written_without_fill(rt: Runtime) -> None:
    """All rows are somebody's, so none has to be looked for."""
    x = drawn((12, 16), "float32")
    row_map = ops.chunk_row_map(rt, rt.tensor(np.array([3, 5])), rt.tensor(np.array([1, 0])), rows=12)
    out, _ = ops.permute(poisoned(rt), rt.tensor(x), row_map, rows=12, fill=False)
    np.testing.assert_array_equal(rt.numpy(out), x[[3, 4, 5, 6, 7, 0, 1, 2, 8, 9, 10, 11]])


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_kv_append_outside_is_not_written(rt: Runtime, paged: bool) -> None:
    """Lengths that the cache has no room for, and pages that do not exist, spoil nothing."""
    lengths, held = (3, 2, 1), (2, 4, 0)  # of four
    old, new = values((3, 4, 2, 8), "float32", 1), values((3, 3, 2, 8), "float32", 2)
    pages = np.array([[1], [-1], [3]], np.int32) if paged else None
    cache = KVCache(placed(rt, old), placed(rt, old), None if pages is None else rt.tensor(pages))
    after = [n + h for n, h in zip(lengths, held, strict=True)]
    ops.kv_append(
        rt, placed(rt, new), placed(rt, new), cache, rt.tensor(running(lengths)), rt.tensor(running(after)), form="bshd"
    )
    expected = old.copy()
    expected[1 if paged else 0, 2:4] = new[0, :2]
    if not paged:
        expected[2, 0] = new[2, 0]
    for got in cache[:2]:
        np.testing.assert_array_equal(rt.numpy(got), expected)


def test_kv_append_nothing(rt: Runtime) -> None:
    """No tokens, and no sequences."""
    old = values((2, 4, 2, 8), "bfloat16", 1)
    cache = KVCache(placed(rt, old), placed(rt, old))
    for rows in (2, 0):
        none = rt.tensor(np.zeros((rows, 0, 2, 8), old.dtype))
        ops.kv_append(
            rt, none, none, cache, rt.tensor(running([0] * rows)), rt.tensor(running([1] * rows)), form="bshd"
        )
    np.testing.assert_array_equal(rt.numpy(cache.k), old)


# ----------------------------------------------------------------------------------------- counters and maxima


@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_every_cast_counts(rt: Runtime, scaling: str) -> None:
    """quantize, and what fuses a cast, whose result stays the same."""
    array = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    array[2, 3] = np.inf
    x, gamma = rt.tensor(array, dtypes.bfloat16), rt.tensor(np.ones(64, np.float32), dtypes.bfloat16)
    one = rt.tensor(np.ones(1, np.float32))
    found = []
    for counter in (rt.tensor(np.zeros(2, np.int64)), None):
        form = Format(dtypes.float8_e4m3, scaling)
        scale = one if scaling == "tensor" else None
        cast = Cast(form, rowwise=True, columnwise=True, scale=scale, nonfinite=counter)
        made = [
            ops.quantize(rt, x, cast),
            ops.norm_forward(rt, x, gamma, None, kind="RMSNorm", eps=1e-5, cast=cast)[1],
            ops.activation_forward(rt, x, "relu", cast=cast)[1],
            ops.activation_backward(rt, x, x, "relu", cast=cast)[1],
            *ops.quantize_many(rt, [x, x], [cast, cast]),
        ]
        found.append([rt.numpy(q.rowwise).view(np.uint8) for q in made])
        if counter is not None:
            seen = rt.numpy(counter).tolist()
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    # x, x through relu both ways, twice x; the norm's row of an infinity has one NaN.
    assert seen == [1, 5]


@pytest.mark.parametrize("columnwise", [False, True])
def test_the_maximum_of_a_norm_may_stand_anywhere(rt: Runtime, columnwise: bool) -> None:
    """Whichever warp of a block has it."""
    gamma, x = placed(rt, np.ones(1024, ml_dtypes.bfloat16)), np.ones((32, 1024), ml_dtypes.bfloat16)
    for place in itertools.product(range(32), (5, 300, 700, 1020)):
        x[:] = 1
        x[place] = 1e4
        found = rt.tensor(np.zeros(1, np.float32))
        cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=columnwise, amax=found, scale=None)
        y, *_ = ops.norm_forward(rt, placed(rt, x), gamma, None, kind="RMSNorm", eps=1e-5, cast=cast, keep=True)
        assert rt.numpy(found)[0] == rt.numpy(y)[place] > 30, place


# ------------------------------------------------------------------------------------------------------ plans


def test_the_kernel_of_rank_sum_goes_by_addresses(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense rows are one long row; vectors are as wide as addresses and strides allow."""
    rt, found = make().runtime(), []

    def get(*_: Any, **constants: Any) -> Any:
        return lambda rt, grid, block, parts, out, *numbers: found.append(
            (constants["VEC"], constants["RANKS"], numbers)
        )

    monkeypatch.setattr(loader, "get", get)
    parts, out = rt.empty((3, 4, 2048), dtypes.bfloat16), rt.empty((4, 2 * 2048), dtypes.bfloat16)
    ops.rank_sum(rt, parts, out=rt.empty((4, 2048), dtypes.bfloat16))
    ops.rank_sum(rt, parts, out=columns(out, 2, 1))
    ops.rank_sum(rt, rt.empty((9, 4, 6), dtypes.bfloat16), out=rt.empty((4, 6), dtypes.bfloat16))
    ops.rank_sum(rt, rt.empty((2, 4, 6), dtypes.float32), out=columns(rt.empty((4, 18), dtypes.float32), 3, 1))
    assert found == [
        (8, 3, (1, 1024, 1, 3, 2048)),
        (8, 3, (4, 256, 1, 3, 4096)),
        (8, 0, (1, 3, 1, 9, 6)),
        (2, 2, (4, 3, 1, 2, 18)),
    ]


def norm_plans(rt: Runtime, rows: int, cols: int, cast: Cast | None = None, margin: int = 0) -> list[Any]:
    """The plans of a norm, and of its backward without a cast, in an empty cache."""
    x, gamma = rt.tensor(np.ones((rows, cols), ml_dtypes.bfloat16)), rt.tensor(np.ones(cols, ml_dtypes.bfloat16))
    before, rt.plans = rt.plans, PlanCache()
    rule: dict[str, Any] = {"kind": "RMSNorm", "sm_margin": margin}
    try:
        _, _, _, rstd = ops.norm_forward(rt, x, gamma, None, eps=1e-5, cast=cast, **rule)
        if cast is None:
            ops.norm_backward(rt, x, x, gamma, None, rstd, **rule)
        return [p for p in rt.plans.values() if getattr(p, "family", "").startswith("norm")]
    finally:
        rt.plans = before


@requires_cuda
def test_norms_take_the_planned_kernels() -> None:
    rt = cuda_runtime()
    for casts, family in (("delayed row", "rows"), ("delayed both", "transposed"), ("current both", "rows")):
        scale = rt.tensor(np.ones(1, np.float32)) if "delayed" in casts else None
        cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise="both" in casts, scale=scale)
        (plan,) = norm_plans(rt, 512, 4096, cast)
        assert plan.family == f"norm_forward_{family}" and plan.grid > 1
    for cols, family in ((4096, "rows"), (16383, "rows"), (16392, "wide"), (65535, "wide")):
        assert [p.family for p in norm_plans(rt, 64, cols)] == ["norm_forward_rows", f"norm_backward_{family}"]


@requires_cuda
def test_a_margin_leaves_multiprocessors_alone() -> None:
    from te_core.backends.cuda.norm import limits

    rt = cuda_runtime()
    for plan in norm_plans(rt, 4000, 1024, margin=16):
        assert plan.grid == limits(rt).multiprocessors - 16, plan.family


def test_every_row_of_a_norm_is_covered_by_its_team() -> None:
    from te_core.backends.cuda import norm_tiling as tiling

    limits = tiling.Limits(132, 2048, 233472, 232448, 62914560)  # an H200's
    lengths = [*range(1, 300), *(2**n + d for n in range(8, 17) for d in (-1, 0, 1, 8) if 2**n + d <= 65536)]
    for cols in lengths:
        for size in (2, 4):
            for alignment in (0, 2 * size, size):
                width = tiling.vector_width(cols, alignment, (size, size), 16 // size)
                assert cols % width == 0
                assert alignment % (width * size) == 0
                forward = tiling.forward_team(cols, width, size)
                backward = tiling.backward_team(cols, width)
                turning = tiling.transposing_team(forward)
                assert tiling.TILE_ROWS % turning.teams == 0
                for team in (*(forward.in_blocks_of(n) for n in (256, 1024)), turning, backward or turning):
                    assert 32 <= team.threads <= 1024
                    assert team.threads % 32 == 0
                    assert team.size % 32 == 0 or 32 % team.size == 0
                    assert team.size <= 32 or team.teams <= tiling.MAX_TEAMS
                    assert team.iters == 0 or team.size * team.iters * width >= cols
                    stages = tiling.stages(team.row_bytes(size), 1, 4, limits)
                    assert stages * team.row_bytes(size) < limits.shared_per_block_optin
                assert backward or cols > 16384, "these rows have a kernel that reads them once"
    assert tiling.forward_team(4096, 8, 2).is_full(4096)
    assert tiling.forward_team(5120, 8, 2).is_full(5120)
    assert not tiling.forward_team(4104, 8, 2).is_full(4104)
    assert tiling.backward_team(16392, 8) is None


# ---------------------------------------------------------------------------------------- the CPU's blocks of rows


@pytest.mark.parametrize(
    ("rows", "columns"), [(0, 5), (5, 0), (1, 1), (7, CHUNK + 1), (101, 700), (2 * CHUNK + 5, 1), (2 * CHUNK + 5, 3)]
)
def test_blocks_cover_each_row_once(rows: int, columns: int) -> None:
    blocks = list(row_blocks(rows, columns))
    assert [i for b in blocks for i in range(b.start, b.stop)] == list(range(rows))
    assert all(b.stop - b.start == 1 or (b.stop - b.start) * columns <= CHUNK for b in blocks)


def test_a_far_mean_costs_the_variance_nothing() -> None:
    cpu = Runtime.cpu()
    # The float32 mean is off by up to half its last place, 3e-5 here; the spread is 4e-5.
    rows = 1000.0 + np.random.default_rng(0).integers(-2, 3, (8, 4001)) * 2.0**-14
    x = cpu.tensor(rows.astype(np.float32))
    g = cpu.tensor(np.ones(4001, np.float32))
    _, _, mean, rstd = ops.norm_forward(cpu, x, g, g, kind="LayerNorm", eps=1e-12)
    exact = rows.astype(np.float64)
    np.testing.assert_allclose(cpu.numpy(mean), exact.mean(axis=1), rtol=6e-8)
    np.testing.assert_allclose(cpu.numpy(rstd), 1 / np.sqrt(exact.var(axis=1) + 1e-12), rtol=1e-6)
