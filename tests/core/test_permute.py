"""Rows of tokens to experts and back, against the rules copy by copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError, UnsupportedError
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core.covering_lists import covering_lists
from tests.core.inputs import DTYPES, numpy_dtype, placed, poisoned
from tests.reference import permute as reference

#: Tokens, experts or slots, columns: one of all, odd vectors, more experts than a warp, more tokens than a block, rows
#: longer than the threads of a token copy at once.
SIZES = [(1, 1, 1), (12, 5, 16), (33, 40, 9), (700, 64, 24), (70, 3, 1000), (20, 130, 264), (300, 8, 4096)]
LONG = [(40, 70, 1200), (9, 5, 6000)]
#: Half a unit in the last place of a result, and of the float32 that it is summed in.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SINGLE = 2.0**-23


def routed(tokens: int, experts: int, seed: int = 0) -> Any:
    """Some tokens without an expert, some with all; an expert without tokens."""
    rng = np.random.default_rng([seed, tokens, experts])
    routing = rng.random((tokens, experts)) < rng.choice([0.0, 0.1, 0.5, 1.0], (tokens, 1))
    if experts > 2:
        routing[:, experts // 2] = False
    return routing


def normal(shape: tuple[int, ...], dtype: str, seed: int = 1) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(numpy_dtype(dtype))


def probabilities(routing: Any, dtype: str, zeros: bool = True) -> Any:
    """Of what is routed; a few are 0."""
    probs = np.random.default_rng(routing.shape).random(routing.shape) * routing + routing * 0.01
    if zeros:
        probs[1::5] = 0
    return probs.astype(numpy_dtype(dtype))


def paddings(routing: Any, align: int) -> tuple[Any, int]:
    """What is inserted before each expert, and the rows of the result."""
    counts = routing.sum(0)
    padded = -(-counts // align) * align
    return np.cumsum(padded - counts) - (padded - counts), int(padded.sum())


def entries(row_map: Any, experts: int) -> set[tuple[int, int, int]]:
    """(token, expert, row) of a mask's map, which lists the last expert first."""
    found = set()
    for t, line in enumerate(row_map):
        n = line[2 * experts]
        rows, of = line[:n], line[experts : experts + n]
        assert list(of) == sorted(of, reverse=True) and list(rows) == sorted(rows, reverse=True)
        found |= {(t, int(e), int(r)) for e, r in zip(of, rows, strict=True)}
    return found


def index_map(copies: Any, tokens: int, slots: int) -> Any:
    made = np.full((slots, tokens), -1, np.int32)
    for t, k, row in copies:
        made[k, t] = row
    return made.reshape(-1)


def near(got: Any, want: Any, terms: Any, dtype: str) -> None:
    """Within the roundings of `dtype`, and float32's of the sum of the terms' sizes."""
    error = np.abs(got.astype(np.float64) - want)
    tiny = 2.0**-24 if dtype == "float16" else 0.0
    assert (error <= ROUNDING[dtype] * np.abs(want) + 4 * SINGLE * terms + tiny).all(), error.max()


# ---------------------------------------------------------------------------------------------------- maps


@covering_lists(
    pytest.mark.parametrize("size", SIZES, ids=str),
    pytest.mark.parametrize("kind", ["bool", "uint8", "int32", "int64"]),
)
def test_map_of_a_mask(rt: Runtime, size: tuple[int, int, int], kind: str) -> None:
    tokens, experts, _ = size
    routing = routed(tokens, experts)
    given = rt.tensor(routing.astype(kind) * (3 if kind.startswith("int") else 1))
    starts = poisoned(rt).empty((experts + 1,), dtypes.int32)
    made = rt.numpy(ops.mask_row_map(poisoned(rt), given, starts=starts))
    assert entries(made, experts) == set(reference.mask_copies(routing))
    np.testing.assert_array_equal(rt.numpy(starts), [0, *np.cumsum(routing.sum(0))])
    np.testing.assert_array_equal(rt.numpy(ops.mask_row_map(rt, given))[:, -1], routing.sum(1))


@covering_lists(
    pytest.mark.parametrize("size", [(40000, 24), (513, 1), (640, 33), (700, 1100), (9000, 64)], ids=str),
    pytest.mark.parametrize("kind", ["bool", "int32"]),
)
def test_map_of_a_large_mask(rt: Runtime, size: tuple[int, int], kind: str) -> None:
    """Several blocks, several tiles a block, and blocks of tokens that nobody gets."""
    tokens, experts = size
    routing = np.random.default_rng(3).random(size) < 0.2
    routing[tokens // 13 : tokens // 4] = False
    starts = poisoned(rt).empty((experts + 1,), dtypes.int32)
    made = rt.numpy(ops.mask_row_map(poisoned(rt), rt.tensor(routing.astype(kind)), starts=starts))
    counts = made[:, 2 * experts]
    np.testing.assert_array_equal(counts, routing.sum(1))
    np.testing.assert_array_equal(rt.numpy(starts), [0, *np.cumsum(routing.sum(0))])
    place = np.zeros(routing.shape, np.int64)
    place.T[routing.T] = np.arange(routing.sum())
    for j in range(counts.max()):
        token = np.nonzero(counts > j)[0]
        expert = made[token, experts + j]
        assert j == 0 or (expert < made[token, experts + j - 1]).all()
        np.testing.assert_array_equal(made[token, j], place[token, expert])


@covering_lists(
    pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (12, 2), (300, 8), (3000, 3)]),
    pytest.mark.parametrize("ids", ["usual", "many", "any"]),
    pytest.mark.parametrize("rows", ["all", "some", "none", "more"]),
    turns=2,
)
def test_index_map(rt: Runtime, tokens: int, slots: int, ids: str, rows: str) -> None:
    low, high = {"usual": (0, 7), "many": (0, 3000), "any": (-(1 << 31), 1 << 31)}[ids]
    experts = np.random.default_rng([tokens, slots]).integers(low, high, (tokens, slots)).astype(np.int32)
    kept = {"all": tokens * slots, "some": tokens * slots * 2 // 3, "none": 0, "more": tokens * slots + 5}[rows]
    made = rt.numpy(ops.index_row_map(poisoned(rt), rt.tensor(experts), rows=kept))
    np.testing.assert_array_equal(made, index_map(reference.index_copies(experts, kept), tokens, slots))


def test_index_map_of_many(rt: Runtime) -> None:
    """More entries than one round of the blocks."""
    experts = np.random.default_rng(5).integers(0, 100, (30000, 4)).astype(np.int32)
    for values in (experts, experts - 50, experts * 100_000):
        made = rt.numpy(ops.index_row_map(poisoned(rt), rt.tensor(values), rows=110_000))
        places = np.empty(values.size, np.int64)
        places[np.argsort(values.reshape(-1), kind="stable")] = np.arange(values.size)
        np.testing.assert_array_equal(made, np.where(places < 110_000, places, -1).reshape(-1, 4).T.reshape(-1))


CHUNKS = [
    ([3, 0, 5, 4], [2, 0, 3, 1], 12),
    ([3, 0, 5, 4], [3, 2, 1, 0], 20),  # rows behind them
    ([0, 0], [1, 0], 3),
    ([], [], 4),
    ([7], [0], 7),
    ([0, 1] * 300, list(range(599, -1, -1)), 300),
]


@covering_lists(
    pytest.mark.parametrize("case", CHUNKS, ids=lambda c: str(c)[:30]),
    pytest.mark.parametrize("kinds", [("int32", "int32"), ("int64", "int64"), ("int32", "int64")], ids=str),
)
def test_map_of_chunks(rt: Runtime, case: Any, kinds: tuple[str, str]) -> None:
    sizes, order, rows = case
    given = (rt.tensor(np.array(v, k)) for v, k in zip((sizes, order), kinds, strict=True))
    made = rt.numpy(ops.chunk_row_map(poisoned(rt), *given, rows=rows))
    np.testing.assert_array_equal(made, index_map(reference.chunk_copies(sizes, order, rows), rows, 1))


def test_chunks_of_many_rows(rt: Runtime) -> None:
    sizes = np.random.default_rng(0).integers(0, 400, 64)
    order = np.random.default_rng(1).permutation(64)
    rows = int(sizes.sum()) + 100
    made = rt.numpy(ops.chunk_row_map(poisoned(rt), rt.tensor(sizes), rt.tensor(order), rows=rows))
    wanted = index_map(reference.chunk_copies(sizes.tolist(), order.tolist(), rows), rows, 1)
    np.testing.assert_array_equal(made, wanted)


# --------------------------------------------------------------------------------------------------- moves


@covering_lists(
    pytest.mark.parametrize("size", SIZES + LONG, ids=str), pytest.mark.parametrize("dtype", [*DTYPES, "uint8"])
)
def test_permute(rt: Runtime, size: tuple[int, int, int], dtype: str) -> None:
    """Bit for bit, in as many rows as there are copies and in more: the others are zeros."""
    rt = poisoned(rt)
    tokens, experts, columns = size
    routing = routed(tokens, experts)
    x = normal((tokens, columns), "float32") if dtype != "uint8" else np.arange(tokens * columns).reshape(tokens, -1)
    x = x.astype(dtype if dtype == "uint8" else numpy_dtype(dtype))
    row_map = ops.mask_row_map(rt, rt.tensor(routing))
    copies = reference.mask_copies(routing)
    for offset, rows in ((0, len(copies)), (1, len(copies) + 70), (0, max(len(copies) - 3, 0))):
        out, none = ops.permute(rt, placed(rt, x, offset), row_map, rows=rows)
        assert none is None
        np.testing.assert_array_equal(rt.numpy(out), reference.permuted(x, copies, rows)[0])


@covering_lists(
    pytest.mark.parametrize("size", SIZES + LONG, ids=str),
    pytest.mark.parametrize("align", [1, 16]),
    pytest.mark.parametrize("probs", [False, True]),
    pytest.mark.parametrize("known", [False, True]),
    turns=2,
)
def test_rows_that_nobody_gets(rt: Runtime, size: tuple[int, int, int], align: int, probs: bool, known: bool) -> None:
    """They are zeros, before each expert and behind all, whether or not the map's starts say which; twice, for what a
    call leaves behind.
    """
    rt = poisoned(rt)
    tokens, experts, columns = size
    routing = routed(tokens, experts)
    pad, count = paddings(routing, align)
    x, given = normal((tokens, columns), "float32"), probabilities(routing, "float32")
    starts = rt.empty((experts + 1,), dtypes.int32)
    row_map = ops.mask_row_map(rt, rt.tensor(routing), starts=starts)
    for rows in (count, count + 70, count + 70, max(count - 3, 0)):
        out, row_probs = ops.permute(
            rt,
            placed(rt, x),
            row_map,
            rows=rows,
            probs=rt.tensor(given) if probs else None,
            pad_offsets=None if align == 1 else rt.tensor(pad),
            starts=starts if known else None,
        )
        wanted = reference.permuted(x, reference.mask_copies(routing, pad), rows, given if probs else None)
        np.testing.assert_array_equal(rt.numpy(out), wanted[0])
        if row_probs is not None:
            np.testing.assert_array_equal(rt.numpy(row_probs), wanted[1])
    nobody = ops.mask_row_map(rt, rt.tensor(np.zeros_like(routing)))
    out, _ = ops.permute(rt, placed(rt, x), nobody, rows=count)
    assert not rt.numpy(out).any()


@covering_lists(
    pytest.mark.parametrize("size", SIZES, ids=str),
    pytest.mark.parametrize("align", [1, 16]),
    pytest.mark.parametrize("kind", DTYPES),
)
def test_permute_with_probabilities(rt: Runtime, size: tuple[int, int, int], align: int, kind: str) -> None:
    """Rows of probability 0 are zeros, and so is what pads the experts."""
    rt = poisoned(rt)
    tokens, experts, columns = size
    routing = routed(tokens, experts)
    x, probs = normal((tokens, columns), "bfloat16"), probabilities(routing, kind)
    pad, rows = paddings(routing, align)
    given = None if align == 1 else rt.tensor(pad)
    row_map = ops.mask_row_map(rt, rt.tensor(routing))
    out, row_probs = ops.permute(rt, placed(rt, x), row_map, rows=rows, probs=rt.tensor(probs), pad_offsets=given)
    wanted, wanted_probs = reference.permuted(x, reference.mask_copies(routing, pad), rows, probs)
    np.testing.assert_array_equal(rt.numpy(out), wanted)
    np.testing.assert_array_equal(rt.numpy(row_probs).astype(np.float64), wanted_probs)


@covering_lists(pytest.mark.parametrize("size", SIZES + LONG, ids=str), pytest.mark.parametrize("dtype", DTYPES))
def test_permute_by_an_index_map(rt: Runtime, size: tuple[int, int, int], dtype: str) -> None:
    rt = poisoned(rt)
    tokens, slots, columns = size[0], min(size[1], 9), size[2]
    experts = np.random.default_rng(0).integers(0, 6, (tokens, slots)).astype(np.int32)
    x = normal((tokens, columns), dtype)
    for rows in (tokens * slots, tokens * slots // 2 + 1, tokens * slots + 9):
        copies = reference.index_copies(experts, rows)
        row_map = ops.index_row_map(rt, rt.tensor(experts), rows=rows)
        out, _ = ops.permute(rt, placed(rt, x, 1), row_map, rows=rows)
        np.testing.assert_array_equal(rt.numpy(out), reference.permuted(x, copies, rows)[0])


def test_nothing_is_written_without_fill(rt: Runtime) -> None:
    """All rows are somebody's, so none has to be looked for."""
    x = normal((12, 16), "float32")
    row_map = ops.chunk_row_map(rt, rt.tensor(np.array([3, 5])), rt.tensor(np.array([1, 0])), rows=12)
    out, _ = ops.permute(poisoned(rt), rt.tensor(x), row_map, rows=12, fill=False)
    np.testing.assert_array_equal(rt.numpy(out), x[[3, 4, 5, 6, 7, 0, 1, 2, 8, 9, 10, 11]])


@covering_lists(pytest.mark.parametrize("size", SIZES, ids=str), pytest.mark.parametrize("dtype", DTYPES))
def test_unpermute(rt: Runtime, size: tuple[int, int, int], dtype: str) -> None:
    """Sums, weighted sums, padded or not."""
    rt = poisoned(rt)
    tokens, experts, columns = size
    routing = routed(tokens, experts)
    row_map = ops.mask_row_map(rt, rt.tensor(routing))
    for offset, align, kind in ((0, 1, None), (1, 16, None), (0, 1, "float32"), (0, 8, dtype)):
        pad, rows = paddings(routing, align)
        copies = reference.mask_copies(routing, pad)
        x = normal((rows, columns), dtype)
        weights = None if kind is None else probabilities(routing, kind, zeros=False)
        out, none = ops.unpermute(
            rt,
            placed(rt, x, offset),
            row_map,
            tokens=tokens,
            weights=None if weights is None else rt.tensor(weights),
            pad_offsets=None if align == 1 else rt.tensor(pad),
        )
        assert none is None
        wanted = reference.unpermuted(x, copies, tokens, weights)
        sizes = reference.unpermuted(np.abs(x), copies, tokens, weights)
        near(rt.numpy(out), wanted, sizes * max(experts, 1) ** 0.5, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_there_count_for_nothing(rt: Runtime, dtype: str) -> None:
    """Dropped ones, and those behind the last."""
    rt = poisoned(rt)
    routing, experts = routed(40, 5), np.random.default_rng(0).integers(0, 6, (40, 3)).astype(np.int32)
    x = normal((30, 24), dtype)
    masked, copies = ops.mask_row_map(rt, rt.tensor(routing)), reference.mask_copies(routing)
    assert len(copies) > 30
    out, _ = ops.unpermute(rt, rt.tensor(x), masked, tokens=40)
    near(rt.numpy(out), reference.unpermuted(x, copies, 40), reference.unpermuted(abs(x), copies, 40), dtype)
    index, copies = ops.index_row_map(rt, rt.tensor(experts), rows=30), reference.index_copies(experts, 30)
    out, _ = ops.unpermute(rt, rt.tensor(x), index, tokens=40)
    near(rt.numpy(out), reference.unpermuted(x, copies, 40), reference.unpermuted(abs(x), copies, 40), dtype)
    out, _ = ops.unpermute(rt, rt.tensor(x[:0]), masked, tokens=40)
    assert not rt.numpy(out).any()


def kept_in(dtype: str, x: Any, copies: Any, tokens: int, weights: Any) -> Any:
    """The sum in x's dtype, each product added exactly and rounded once."""
    total = np.zeros((tokens, x.shape[1]), x.dtype)
    weights = weights.astype(x.dtype)
    for t, k, row in sorted(copies, key=lambda c: c[1]):
        exact = total[t].astype(np.longdouble) + np.longdouble(weights[t, k]) * x[row].astype(np.longdouble)
        total[t] = nearest(exact, dtype)
    return total


def nearest(exact: Any, dtype: str) -> Any:
    """To nearest, ties to even: bf16 has no conversion from wide numbers of its own."""
    if dtype != "bfloat16":
        return exact.astype(dtype)
    step = np.exp2(np.floor(np.log2(np.where(exact == 0, 1, np.abs(exact)))) - 7)
    return (np.rint(exact / step) * step).astype(np.float32).astype(numpy_dtype(dtype))


@covering_lists(
    pytest.mark.parametrize(("tokens", "slots", "columns"), [(12, 2, 16), (50, 8, 72), (9, 5, 3), (5, 3, 4096)]),
    pytest.mark.parametrize("dtype", DTYPES),
)
def test_weighted_by_an_index_map(rt: Runtime, tokens: int, slots: int, columns: int, dtype: str) -> None:
    """Bit for bit: the sum is kept in the dtype of the values."""
    rt = poisoned(rt)
    rng = np.random.default_rng(0)
    experts, rows = rng.integers(0, 6, (tokens, slots)).astype(np.int32), tokens * slots * 3 // 4
    x, weights = normal((rows, columns), dtype), rng.random((tokens, slots)).astype(np.float32)
    row_map = ops.index_row_map(rt, rt.tensor(experts), rows=rows)
    out, _ = ops.unpermute(rt, placed(rt, x), row_map, tokens=tokens, weights=rt.tensor(weights))
    copies = reference.index_copies(experts, rows)
    np.testing.assert_array_equal(rt.numpy(out), kept_in(dtype, x, copies, tokens, weights))


@covering_lists(pytest.mark.parametrize("size", SIZES, ids=str), pytest.mark.parametrize("kind", DTYPES))
def test_gradients_of_permute(rt: Runtime, size: tuple[int, int, int], kind: str) -> None:
    """What `unpermute` does for it: rows of probability 0 are no copies of the token."""
    rt = poisoned(rt)
    tokens, experts, columns = size
    routing = routed(tokens, experts)
    probs = probabilities(routing, kind)
    pad, rows = paddings(routing, 8)
    dy, d_rows = normal((rows, columns), "bfloat16"), normal((rows,), kind)
    dx, d_probs = ops.unpermute(
        rt,
        placed(rt, dy),
        ops.mask_row_map(rt, rt.tensor(routing)),
        tokens=tokens,
        gates=rt.tensor(probs),
        row_probs=rt.tensor(d_rows),
        pad_offsets=rt.tensor(pad),
    )
    copies = reference.mask_copies(routing, pad)
    wanted = reference.unpermuted(dy, copies, tokens, probs != 0)
    near(rt.numpy(dx), wanted, reference.unpermuted(abs(dy), copies, tokens), "bfloat16")
    expected = np.zeros(probs.shape, d_rows.dtype)
    for t, e, row in copies:
        expected[t, e] = d_rows[row]
    np.testing.assert_array_equal(rt.numpy(d_probs), expected)


@covering_lists(pytest.mark.parametrize("size", SIZES, ids=str), pytest.mark.parametrize("dtype", DTYPES))
def test_gradients_of_a_weighted_sum(rt: Runtime, size: tuple[int, int, int], dtype: str) -> None:
    """By both kinds of maps; rows that nobody reads have gradient 0."""
    rt = poisoned(rt)
    tokens, choices, columns = size
    routing = routed(tokens, choices)
    pad, rows = paddings(routing, 16)
    slots = min(choices, 7)
    experts = np.random.default_rng(0).integers(0, 6, (tokens, slots)).astype(np.int32)
    kept = max(tokens * slots * 2 // 3, 1)
    cases = [
        (ops.mask_row_map(rt, rt.tensor(routing)), reference.mask_copies(routing, pad), rows, choices, "float32"),
        (ops.mask_row_map(rt, rt.tensor(routing)), reference.mask_copies(routing), rows + 3, choices, dtype),
        (ops.index_row_map(rt, rt.tensor(experts), rows=kept), reference.index_copies(experts, kept), kept, slots, ""),
    ]
    for i, (row_map, copies, count, each, kind) in enumerate(cases):
        dy, x = normal((tokens, columns), dtype, 2), normal((count, columns), dtype)
        weights = normal((tokens, each), kind or "float32", 3)
        offsets = rt.tensor(pad) if i == 0 else None
        dx, d_weights = ops.unpermute_backward(
            rt, placed(rt, dy), placed(rt, x, i % 2), row_map, rt.tensor(weights), pad_offsets=offsets
        )
        used = weights.astype(dy.dtype) if kind == "" else weights
        wanted, wanted_weights = reference.unpermuted_gradients(dy, x, copies, used)
        near(rt.numpy(dx), wanted, np.abs(wanted), dtype)
        _, sizes = reference.unpermuted_gradients(abs(dy), abs(x), copies, weights)
        near(rt.numpy(d_weights), wanted_weights, sizes * columns**0.5, kind or "float32")


# ------------------------------------------------------------------------------------------------- nothing


def test_nothing(rt: Runtime) -> None:
    """No tokens, no experts, no rows, no columns."""
    rt = poisoned(rt)
    for tokens, experts in ((0, 4), (4, 0), (3, 2)):
        row_map = ops.mask_row_map(rt, rt.tensor(np.zeros((tokens, experts), bool)))
        assert row_map.shape == (tokens, 2 * experts + 1) and not rt.numpy(row_map)[:, -1].any()
        for columns in (0, 8):
            x = rt.tensor(np.ones((tokens, columns), np.float32))
            out, _ = ops.permute(rt, x, row_map, rows=0)
            assert out.shape == (0, columns)
            back, _ = ops.unpermute(rt, out, row_map, tokens=tokens)
            assert back.shape == (tokens, columns) and not rt.numpy(back).any()
            more, _ = ops.permute(rt, x, row_map, rows=5)
            assert not rt.numpy(more).any()
            starts = rt.empty((experts + 1,), dtypes.int32)
            ops.mask_row_map(rt, rt.tensor(np.zeros((tokens, experts), bool)), starts=starts)
            more, _ = ops.permute(rt, x, row_map, rows=5, starts=starts)
            assert not rt.numpy(more).any() and not rt.numpy(starts).any()
            weights = rt.tensor(np.ones((tokens, experts), np.float32))
            dx, d_weights = ops.unpermute_backward(rt, x, more, row_map, weights)
            assert not rt.numpy(dx).any() and not rt.numpy(d_weights).any()


def test_refusals(rt: Runtime) -> None:
    f32 = np.float32
    x, routing = rt.tensor(np.zeros((4, 8), f32)), rt.tensor(np.eye(4, 3, dtype=np.int32))
    row_map = ops.mask_row_map(rt, routing)
    rows, probs = rt.tensor(np.zeros((3, 8), f32)), rt.tensor(np.zeros((4, 3), f32))
    index = ops.index_row_map(rt, rt.tensor(np.zeros((4, 2), np.int32)), rows=8)
    long = rt.tensor(np.zeros((5, 8), f32))
    for call, part in (
        (lambda: ops.mask_row_map(rt, probs), "routing = .*dtype"),
        (lambda: ops.mask_row_map(rt, rt.tensor(np.zeros(4, bool))), "routing"),
        (lambda: ops.mask_row_map(rt, routing, starts=rt.tensor(np.zeros(3, np.int32))), "starts"),
        (lambda: ops.permute(rt, x, row_map, rows=3, starts=rt.tensor(np.zeros(3, np.int32))), "starts"),
        (lambda: ops.permute(rt, x, index, rows=3, starts=rt.tensor(np.zeros(4, np.int32))), "a mask's map"),
        (lambda: ops.index_row_map(rt, rt.tensor(np.zeros((4, 2), np.int64)), rows=8), "experts = .*dtype"),
        (lambda: ops.chunk_row_map(rt, routing, routing, rows=4), "sizes"),
        (lambda: ops.chunk_row_map(rt, *(rt.tensor(np.zeros(n, np.int32)) for n in (2, 3)), rows=4), "order"),
        (lambda: ops.permute(rt, long, row_map, rows=3), "row_map"),
        (lambda: ops.permute(rt, x, row_map, rows=-1), "rows"),
        (lambda: ops.permute(rt, x, row_map, rows=3, probs=rt.tensor(np.zeros((4, 2), f32))), "probs = "),
        (lambda: ops.permute(rt, x, index, rows=3, probs=probs), "a mask's map"),
        (lambda: ops.permute(rt, x, row_map, rows=3, pad_offsets=rt.tensor(np.zeros(2, np.int64))), "pad_offsets"),
        (lambda: ops.unpermute(rt, rows, row_map, tokens=5), "row_map"),
        (lambda: ops.unpermute(rt, rows, row_map, tokens=4, weights=probs, gates=probs), "one of them"),
        (lambda: ops.unpermute(rt, rows, row_map, tokens=4, row_probs=rt.tensor(np.zeros(3, f32))), "row_probs"),
        (lambda: ops.unpermute(rt, rt.tensor(np.zeros((3, 8), np.uint8)), row_map, tokens=4), "x = .*dtype"),
        (lambda: ops.unpermute_backward(rt, rows, rows, row_map, probs), "row_map"),
        (lambda: ops.unpermute_backward(rt, rt.tensor(np.zeros((4, 9), f32)), rows, row_map, probs), "dy"),
    ):
        with pytest.raises(ArgumentError, match=part):
            call()
    with pytest.raises(UnsupportedError, match="experts"):
        ops.mask_row_map(rt, rt.tensor(np.zeros((1, 5000), bool)))


def test_a_plan_hides_no_wrong_argument(rt: Runtime) -> None:
    """Refused as well where the right call has made a plan of the same shapes before."""
    x, routing = rt.tensor(np.zeros((4, 8), np.float32)), rt.tensor(np.eye(4, 3, dtype=np.int32))
    row_map = ops.mask_row_map(rt, routing)
    ops.permute(rt, x, row_map, rows=3)
    other = Tensor(row_map.ptr, row_map.shape, dtypes.float32, row_map.device, row_map)
    strided = Tensor(x.ptr, (4, 8), x.dtype, x.device, x, (1, 4))
    for wrong in ((x, other), (strided, row_map)):
        with pytest.raises(ArgumentError):
            ops.permute(rt, *wrong, rows=3)


def test_chunks_that_do_not_fit_are_refused_where_they_can_be_seen() -> None:
    rt = Runtime.cpu()
    for sizes, order, rows in (([3, 4], [0, 0], 7), ([3, 4], [0, 2], 7), ([3, 4], [1, 0], 6), ([-1, 4], [1, 0], 7)):
        with pytest.raises(ArgumentError, match="each chunk named once"):
            ops.chunk_row_map(rt, rt.tensor(np.array(sizes)), rt.tensor(np.array(order)), rows=rows)
