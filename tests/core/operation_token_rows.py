"""The rows of operations on tokens: rotation, caches, tokens to experts, sequences over ranks."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np

from te_core import dtypes, ops
from te_core.ops import KVCache
from te_core.ops.context import Span
from te_core.runtime import Runtime
from tests.core.inputs import DTYPES, numpy_dtype, values
from tests.core.operations import Array, Case, Found, Near, Put, Row, close, drawn, type_of
from tests.reference import context as of_context
from tests.reference import kv_cache as of_cache
from tests.reference import permute as of_permute
from tests.reference import rope as of_rope

FORMS = ("sbhd", "bshd", "thd")


def running(lengths: Any) -> Array:
    """Running sums."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


# -------------------------------------------------------------------------------------------------------- rope

#: Of the length of a channel pair: cosine, sine and three roundings of float32; half a unit of 8 and 11 bits.
TURN = {"float32": 4e-7, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# fmt, shape, d2, interleaved, cp
TURNS = [
    ("sbhd", (5, 2, 3, 8), 8, False, (1, 0)),
    ("sbhd", (7, 3, 2, 128), 128, False, (1, 0)),
    ("bshd", (2, 9, 4, 64), 32, True, (1, 0)),
    ("bshd", (3, 4, 1, 72), 72, True, (3, 1)),
    ("sbhd", (6, 1, 5, 6), 2, False, (2, 1)),
    ("bshd", (1, 8, 40, 80), 48, False, (2, 0)),
    ("thd", (23, 3, 16), 16, True, (1, 0)),
    ("thd", (30, 2, 64), 40, False, (2, 1)),
    ("thd", (12, 1, 10), 6, True, (2, 0)),
    ("sbhd", (3, 2, 2, 5), 4, True, (1, 0)),
    ("bshd", (0, 4, 2, 8), 8, False, (1, 0)),
    ("sbhd", (4, 2, 2, 8), 0, False, (1, 0)),
]


def angles(random: np.random.Generator, rows: int, d2: int, *, four: bool = False) -> Array:
    """Any angles, not only those of two equal halves."""
    table = (random.standard_normal((rows, d2)) * 10 ** random.uniform(-2, 2.5, (rows, d2))).astype(np.float32)
    return table.reshape(rows, 1, 1, d2) if four else table


def turned(expected: Array, x: Array, dtype: str) -> Near:
    """Within the error of a rotation: relative to the largest channel of the head."""
    scale = np.abs(x.astype(np.float64)).max(axis=-1, keepdims=True, initial=0) * 2 + 1e-30
    return Near(expected, TURN[dtype] * scale, dtype)


def rope(size: Any, dtype: str, number: int) -> Case:
    """There and back; of heads inside of a packed projection, and in place."""
    (fmt, shape, d2, interleaved, cp), starting = size
    random = np.random.default_rng([1, *shape])
    x, table = random.standard_normal(shape).astype(numpy_dtype(dtype)), angles(random, 40 * cp[0], d2, four=starting)
    cu = None
    if fmt == "thd":  # whole sequences whose local parts fill all but the last tokens; two of them are empty
        local = [0, 4, 0, shape[0] - 4 - 4 - 2, 4] if shape[0] > 12 else [4, 0, 2]
        cu = running([n * cp[0] for n in local])
    count = len(cu) - 1 if cu is not None else shape[fmt.index("b")]
    starts = random.integers(0, 5, count).astype(np.int32) if starting else None
    options = {"fmt": fmt, "interleaved": interleaved, "cp_size": cp[0], "cp_rank": cp[1]}

    def run(rt: Runtime, put: Put, how: str = "") -> Found:
        more = {"cu_seqlens": put(cu), "start_positions": put(starts), **options}
        found = {}
        for name, backward in (("there", False), ("back", True)):
            t = put.spread(x, -3) if how == "spread" else put(x)
            out = t if how == "in place" else None
            found[name] = ops.rope(rt, t, put(table), backward=backward, out=out, **more)
            assert found[name] is t or out is None
        return found

    rule = {"interleaved": interleaved, "cu_seqlens": cu, "starts": starts, "cp": cp}
    want = [turned(of_rope.turn(x, table, fmt, backward=back, **rule), x, dtype) for back in (False, True)]
    also = tuple(partial(run, how=how) for how in ("spread", "in place"))
    return Case(run, dict(zip(("there", "back"), want, strict=True)), also)


# heads, groups, dims, packing, fmt, rotated
SPLITS = [
    (4, 4, (8, 8, 8), True, "sbhd", "both"),
    (6, 2, (64, 64, 64), True, "bshd", "both"),
    (6, 2, (16, 16, 12), False, "sbhd", "q"),
    (4, 1, (80, 80, 40), False, "bshd", "k"),
    (4, 2, (16, 16, 16), True, "thd", "both"),
    (4, 2, (6, 6, 3), False, "thd", "none"),
    (8, 2, (128, 128, 128), True, "sbhd", "none"),
    (0, 3, (16, 16, 16), True, "sbhd", "k"),
    (0, 3, (8, 8, 5), False, "bshd", "none"),
    (3, 3, (12, 8, 4), True, "sbhd", "two tables"),
]


def rope_qkv(size: Any, dtype: str, number: int) -> Case:
    """Every head comes from its place in the row, turned as `rope` turns it; backward writes the row again."""
    (heads, groups, dims, packing, fmt, rotated), interleaved = size
    random = np.random.default_rng([5, heads, groups])
    lead, cp = {"thd": ((11,), (1, 0)), "sbhd": ((4, 3), (2, 1)), "bshd": ((3, 4), (2, 0))}[fmt]
    width = ops.packed_width(heads, groups, dims)
    row = random.standard_normal((*lead, width)).astype(numpy_dtype(dtype))
    cu, starts = np.array([0, 3, 3, 10], np.int32), np.array([1, 0, 2], np.int32)
    table = angles(random, 16, 4 if rotated == "two tables" else dims[1] // 2 * 2)
    other = angles(random, 12, dims[0]) if rotated == "two tables" else table
    tables = (
        other if rotated in ("both", "q", "two tables") else None,
        table if rotated not in ("q", "none") else None,
        None,
    )
    how = (heads, groups, dims, packing)
    options = dict(zip(("heads", "groups", "head_dims", "interleaved_groups"), how, strict=True))
    options |= {"fmt": fmt, "interleaved": interleaved, "cp_size": cp[0], "cp_rank": cp[1]}
    places = of_rope.split(np.arange(width)[None], *how)
    parts = [row[..., at[0]] for at in places]
    grads = [random.standard_normal(part.shape).astype(row.dtype) for part in parts]
    rule = {"interleaved": interleaved, "cu_seqlens": cu, "starts": starts, "cp": cp}
    want: dict[str, Near | None] = {}
    back, off = np.zeros(row.shape), np.zeros(row.shape)
    for name, part, grad, of, at in zip("qkv", parts, grads, tables, places, strict=True):
        near = Near(part) if of is None else turned(of_rope.turn(part, of, fmt, **rule), part, dtype)
        want[name] = near if part.size else None
        of_grad = Near(grad.astype(np.float64))
        if of is not None:
            of_grad = turned(of_rope.turn(grad, of, fmt, backward=True, **rule), grad, dtype)
        back[..., at[0]], off[..., at[0]] = of_grad.value, of_grad.off
    want["back"] = Near(back, off, dtype)

    def run(rt: Runtime, put: Put) -> Found:
        first, second = put(tables[0]), put(tables[1])
        if tables[0] is tables[1]:
            second = first
        more = {
            "cu_seqlens": put(cu) if fmt == "thd" and rotated != "none" else None,
            "start_positions": put(starts) if rotated != "none" else None,
            **options,
        }
        given = ops.rope_qkv(rt, put(row), first, second, **more)
        dq, dk, dv = (put(g) if g.size else None for g in grads)
        found = dict(zip("qkv", given, strict=True))
        return {**found, "back": ops.rope_qkv_backward(rt, dq, dk, dv, first, second, **more)}

    return Case(run, want)


# ------------------------------------------------------------------------------------------------------ caches

#: (capacity, page size, groups, d of k, d of v, new tokens of each sequence, tokens held before)
CACHES = [
    (16, 4, 2, 8, 8, (1, 1, 1), (0, 7, 15)),
    (12, 3, 1, 3, 5, (4, 0, 7, 1), (8, 5, 0, 2)),  # elements one by one, an empty step, the last place
    (64, 16, 3, 64, 32, (17, 33, 64), (0, 31, 0)),
    (40, 8, 8, 128, 128, (1, 1, 40, 1, 0), (39, 3, 0, 0, 0)),
    (8, 8, 5, 6, 24, (2,), (3,)),  # vectors of four bytes
    (24, 1, 2, 16, 16, (5, 0, 0, 3), (19, 24, 0, 11)),  # a page is a token
]


def page_table(rows: int, capacity: int, page_size: int, seed: int) -> Array:
    """Pages in no order, some of them nobody's."""
    each = capacity // page_size
    return np.random.default_rng(seed).permutation(rows * each + 3)[: rows * each].reshape(rows, each).astype(np.int32)


def both(found: Any) -> Found:
    """k and v."""
    return dict(zip("kv", found, strict=False))


def kv_append(size: Any, dtype: str, number: int) -> Case:
    """From tensors of their own, and from a packed projection: every head between two others."""
    (capacity, page_size, groups, d_k, d_v, lengths, held), form, paged = size
    rows, longest = len(lengths), max(lengths) + 1
    pages = page_table(rows, capacity, page_size, number) if paged else None
    shape = (rows * capacity // page_size + 3, page_size) if paged else (rows + 1, capacity)
    old = [values((*shape, groups, d), dtype, 10 + d) for d in (d_k, d_v)]
    # What lies behind a sequence's own is there to be left alone.
    lead = {"sbhd": (longest, rows), "bshd": (rows, longest), "thd": (sum(lengths) + 2,)}[form]
    new = [values((*lead, groups, d), dtype, 20 + d) for d in (d_k, d_v)]
    after = [n + h for n, h in zip(lengths, held, strict=True)]

    def run(rt: Runtime, put: Put, spread: bool = False) -> Found:
        cache = KVCache(*map(put, old), put(pages))
        given = [put.spread(n) if spread else put(n) for n in new]
        ops.kv_append(rt, *given, cache, put(running(lengths)), put(running(after)), form=form)
        return both(cache)

    made = [of_cache.appended(o, pages, n, form, lengths, held) for o, n in zip(old, new, strict=True)]
    return Case(run, both(map(Near, made)), (partial(run, spread=True),))


def kv_gather(size: Any, dtype: str, number: int) -> Case:
    """A cache off the grid of 16 bytes is read in narrower vectors; a page table off it changes nothing."""
    capacity, page_size, groups, d_k, d_v, _, held = size
    rows, table = len(held), page_table(len(held), capacity, page_size, number)
    old = [values((rows * capacity // page_size + 3, page_size, groups, d), dtype, d) for d in (d_k, d_v)]

    def run(rt: Runtime, put: Put, moved: int = -1) -> Found:
        parts = [put(a) if moved in (-1, i) else put._replace(offset=0)(a) for i, a in enumerate((*old, table))]
        return both(ops.kv_gather(rt, KVCache(*parts), put(running(held))))

    odd = tuple(lambda rt, put, i=i: run(rt, put._replace(offset=1), i) for i in range(3))
    return Case(run, both(Near(of_cache.gathered(o, table, held)) for o in old), odd)


def kv_move(size: tuple[int, int], dtype: str, number: int) -> Case:
    """Rows fall down, change places, go round in a circle; each for its own number of tokens."""
    old = [values((5, 9, 2, d), dtype, d) for d in size]
    moved = [o.copy() for o in old]
    for e, o in zip(moved, old, strict=True):
        e[0, :7], e[1, :9], e[2, :2] = o[1, :7], o[2, :9], o[0, :2]  # a circle of three
        e[3, :4] = o[4, :4]
    real = [(-1, 0, 2), (0, 1, 7), (1, 2, 9), (2, -1, 2), (3, 4, 4)]
    moves = np.array([*real, (4, 5, 3), (7, 0, 9)], np.int32)  # the last two: no such rows

    def run(rt: Runtime, put: Put) -> Found:
        cache = KVCache(*map(put, old))
        ops.kv_move(rt, cache, put(moves), longest=16)
        return both(cache)

    return Case(run, both(map(Near, moved)))


# ----------------------------------------------------------------------------------------------------- experts

#: Tokens, experts or slots, columns: one of all, odd vectors, more experts than a warp, more tokens than a block, rows
#: longer than the threads of a token copy at once.
SIZES = [(1, 1, 1), (12, 5, 16), (33, 40, 9), (700, 64, 24), (70, 3, 1000), (20, 130, 264), (300, 8, 4096)]
LONG = [(40, 70, 1200), (9, 5, 6000)]
NOTHING = [(0, 4, 8), (4, 0, 8), (3, 2, 0)]
#: Several blocks, several tiles a block, and blocks of tokens that nobody gets.
MASKS = [(40000, 24), (513, 1), (640, 33), (700, 1100), (9000, 64)]
SINGLE = 2.0**-23


def routed(tokens: int, experts: int) -> Array:
    """Some tokens without an expert, some with all; an expert without tokens."""
    random = np.random.default_rng([0, tokens, experts])
    routing = random.random((tokens, experts)) < random.choice([0.0, 0.1, 0.5, 1.0], (tokens, 1))
    if experts > 2:
        routing[:, experts // 2] = False
    return routing


def probabilities(routing: Array, dtype: str, zeros: bool = True) -> Array:
    """Of what is routed; a few are 0."""
    probs = np.random.default_rng(routing.shape).random(routing.shape) * routing + routing * 0.01
    if zeros:
        probs[1::5] = 0
    return probs.astype(numpy_dtype(dtype))


def paddings(routing: Array, align: int) -> tuple[Array, int]:
    """What is inserted before each expert, and the rows of the result."""
    counts = routing.sum(0)
    padded = -(-counts // align) * align
    return np.cumsum(padded - counts) - (padded - counts), int(padded.sum())


def near(value: Array, terms: Array, dtype: str) -> Near:
    """Within the roundings of `dtype`, and float32's of the sum of the terms' sizes."""
    rounding = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    return Near(value, rounding * np.abs(value) + 4 * SINGLE * terms + (2.0**-24 if dtype == "float16" else 0), dtype)


def mask_row_map(size: tuple[int, int], dtype: str, number: int) -> Case:
    """Of a token its rows and experts, the last expert first, and how many: what lies between is nobody's."""
    tokens, experts = size
    routing = routed(tokens, experts)
    if tokens > 512 and (tokens, experts) in MASKS:
        routing = np.random.default_rng(3).random(size) < 0.2
        routing[tokens // 13 : tokens // 4] = False
    place, counts = np.zeros(routing.shape, np.int64), routing.sum(1)
    place.T[routing.T] = np.arange(routing.sum())
    token, expert = np.nonzero(routing[:, ::-1])
    expert = experts - 1 - expert
    at = np.arange(len(token)) - np.repeat(np.cumsum(counts) - counts, counts)
    given = routing.astype(dtype) * (3 if dtype.startswith("int") else 1)

    def run(rt: Runtime, put: Put) -> Found:
        starts = rt.empty((experts + 1,), dtypes.int32)
        made = ops.mask_row_map(rt, put(given), starts=starts)
        return {"map": made, "starts": starts, "alone": ops.mask_row_map(rt, put(given))}

    def want(found: dict[str, Array]) -> dict[str, Near | None]:
        made = {name: found[name].copy() for name in ("map", "alone")}
        for m in made.values():
            m[token, at], m[token, experts + at], m[:, 2 * experts] = place[token, expert], expert, counts
        return {**{name: Near(m) for name, m in made.items()}, "starts": Near(running(routing.sum(0)))}

    return Case(run, want)


def index_row_map(size: Any, dtype: str, number: int) -> Case:
    """In the order of ids, equal ones in that of the entries; more entries than one round of the blocks."""
    tokens, slots, (low, high), kept = size
    ids = np.random.default_rng([tokens, slots]).integers(low, high, (tokens, slots)).astype(np.int32)
    rows = {"all": ids.size, "some": ids.size * 2 // 3, "none": 0, "more": ids.size + 5}[kept]
    places = np.empty(ids.size, np.int32)
    places[np.argsort(ids.reshape(-1), kind="stable")] = np.arange(ids.size)
    made = np.where(places < rows, places, -1).reshape(tokens, slots).T.reshape(-1).astype(np.int32)
    return Case(lambda rt, put: {"map": ops.index_row_map(rt, put(ids), rows=rows)}, {"map": Near(made)})


CHUNKS = [
    ([3, 0, 5, 4], [2, 0, 3, 1], 12),
    ([3, 0, 5, 4], [3, 2, 1, 0], 20),  # rows behind them
    ([0, 0], [1, 0], 3),
    ([], [], 4),
    ([7], [0], 7),
    ([0, 1] * 300, list(range(599, -1, -1)), 300),
    ([137 * i % 400 for i in range(64)], [(29 * i + 5) % 64 for i in range(64)], 13000),
]


def chunk_row_map(size: Any, dtype: str, number: int) -> Case:
    sizes, order, rows = size
    made = np.full(rows, -1, np.int32)
    for token, _, row in of_permute.chunk_copies(sizes, order, rows):
        made[token] = row
    kinds = dtype.split("-")
    given = [np.array(v, kind) for v, kind in zip((sizes, order), kinds, strict=True)]
    return Case(lambda rt, put: {"map": ops.chunk_row_map(rt, *map(put, given), rows=rows)}, {"map": Near(made)})


def permute(size: Any, dtype: str, number: int) -> Case:
    """Rows that nobody gets are zeros: before each expert, behind all, of probability 0; also where a call left marks,
    and whether or not the map's starts say which.
    """
    (tokens, experts, width), align, kind, known = size
    kind = None if dtype == "uint8" or not width else kind  # a GPU moves no probabilities where it moves no rows
    routing = routed(tokens, experts)
    x = np.arange(tokens * width).reshape(tokens, width).astype("uint8") if dtype == "uint8" else None
    x = drawn((tokens, width), dtype, 1) if x is None else x
    pad, count = paddings(routing, align)
    probs = None if kind is None else probabilities(routing, kind)
    copies = of_permute.mask_copies(routing, pad)
    counts = (count, count + 70, count + 70, max(count - 3, 0))

    def run(rt: Runtime, put: Put) -> Found:
        starts = rt.empty((experts + 1,), dtypes.int32)
        row_map = ops.mask_row_map(rt, put(routing), starts=starts)
        found = {}
        for i, rows in enumerate(counts):
            options = {"probs": put(probs), "pad_offsets": None if align == 1 else put(pad)}
            made = ops.permute(rt, put(x), row_map, rows=rows, starts=starts if known else None, **options)
            found |= {f"rows {i}": made[0], f"probs {i}": made[1]}
        nobody = ops.mask_row_map(rt, put(np.zeros_like(routing)))
        return {**found, "nobody": ops.permute(rt, put(x), nobody, rows=count)[0]}

    want: dict[str, Near | None] = {"nobody": Near(np.zeros((count, width), x.dtype))}
    for i, rows in enumerate(counts):
        made = of_permute.permuted(x, copies, rows, probs)
        want[f"rows {i}"] = Near(made[0])
        want[f"probs {i}"] = None if probs is None else Near(made[1].astype(probs.dtype))
    return Case(run, want)


def permute_by_index(size: Any, dtype: str, number: int) -> Case:
    tokens, slots, width = size[0], min(size[1], 9), size[2]
    ids, x = np.random.default_rng(0).integers(0, 6, (tokens, slots)).astype(np.int32), drawn((tokens, width), dtype, 1)
    counts = (ids.size, ids.size // 2 + 1, ids.size + 9)

    def run(rt: Runtime, put: Put) -> Found:
        maps = [ops.index_row_map(rt, put(ids), rows=rows) for rows in counts]
        return {str(n): ops.permute(rt, put(x), m, rows=n)[0] for n, m in zip(counts, maps, strict=True)}

    return Case(run, {str(n): Near(of_permute.permuted(x, of_permute.index_copies(ids, n), n)[0]) for n in counts})


def unpermute(size: Any, dtype: str, number: int) -> Case:
    """Sums, weighted sums, padded or not; rows that are not there, dropped or behind the last, count for nothing."""
    (tokens, experts, width), align, kind, lost = size
    routing = routed(tokens, experts)
    pad, count = paddings(routing, align)
    copies, x = of_permute.mask_copies(routing, pad), drawn((max(count - lost, 0), width), dtype, 1)
    weights = None if kind is None else probabilities(routing, kind, zeros=False)

    def run(rt: Runtime, put: Put) -> Found:
        row_map = ops.mask_row_map(rt, put(routing))
        options = {"weights": put(weights), "pad_offsets": None if align == 1 else put(pad)}
        out, none = ops.unpermute(rt, put(x), row_map, tokens=tokens, **options)
        return {"out": out, "none": none}

    terms = of_permute.unpermuted(np.abs(x), copies, tokens, weights) * max(experts, 1) ** 0.5
    return Case(run, {"out": near(of_permute.unpermuted(x, copies, tokens, weights), terms, dtype), "none": None})


def unpermute_by_index(size: tuple[int, int, int], dtype: str, number: int) -> Case:
    """Weighted, to the bit: the sum is kept in the dtype of the values, each product added exactly and rounded once."""
    tokens, slots, width = size
    random = np.random.default_rng(0)
    ids, rows = random.integers(0, 6, (tokens, slots)).astype(np.int32), tokens * slots * 3 // 4
    x, weights = drawn((rows, width), dtype, 1), random.random((tokens, slots)).astype(np.float32)
    copies, kept, plain = (
        of_permute.index_copies(ids, rows),
        np.zeros((tokens, width), x.dtype),
        weights.astype(x.dtype),
    )
    for t, k, row in sorted(copies, key=lambda c: c[1]):
        exact = kept[t].astype(np.longdouble) + np.longdouble(plain[t, k]) * x[row].astype(np.longdouble)
        kept[t] = nearest(exact, dtype)

    def run(rt: Runtime, put: Put) -> Found:
        row_map = ops.index_row_map(rt, put(ids), rows=rows)
        out, _ = ops.unpermute(rt, put(x), row_map, tokens=tokens, weights=put(weights))
        return {"weighted": out, "plain": ops.unpermute(rt, put(x), row_map, tokens=tokens)[0]}

    terms = of_permute.unpermuted(np.abs(x), copies, tokens)
    return Case(run, {"weighted": Near(kept), "plain": near(of_permute.unpermuted(x, copies, tokens), terms, dtype)})


def nearest(exact: Any, dtype: str) -> Any:
    """To nearest, ties to even: bf16 has no conversion from wide numbers of its own."""
    if dtype != "bfloat16":
        return exact.astype(dtype)
    step = np.exp2(np.floor(np.log2(np.where(exact == 0, 1, np.abs(exact)))) - 7)
    return (np.rint(exact / step) * step).astype(np.float32).astype(numpy_dtype(dtype))


def permute_gradients(size: tuple[int, int, int], dtype: str, number: int) -> Case:
    """What `unpermute` does for them: rows of probability 0 are no copies of the token."""
    tokens, experts, width = size
    routing = routed(tokens, experts)
    probs, (pad, rows) = probabilities(routing, dtype), paddings(routing, 8)
    dy, d_rows = drawn((rows, width), "bfloat16", 1), drawn((rows,), dtype, 1)
    copies, d_probs = of_permute.mask_copies(routing, pad), np.zeros(probs.shape, d_rows.dtype)
    for t, e, row in copies:
        d_probs[t, e] = d_rows[row]

    def run(rt: Runtime, put: Put) -> Found:
        given = {"gates": put(probs), "row_probs": put(d_rows), "pad_offsets": put(pad)}
        dx, found = ops.unpermute(rt, put(dy), ops.mask_row_map(rt, put(routing)), tokens=tokens, **given)
        return {"dx": dx, "dprobs": found}

    dx, terms = (of_permute.unpermuted(t, copies, tokens, w) for t, w in ((dy, probs != 0), (abs(dy), None)))
    return Case(run, {"dx": near(dx, terms, "bfloat16"), "dprobs": Near(d_probs)})


def unpermute_backward(size: Any, dtype: str, number: int) -> Case:
    """By both kinds of maps; rows that nobody reads have gradient 0."""
    (tokens, choices, width), by = size
    routing, slots, pad = routed(tokens, choices), min(choices, 7), None
    ids = np.random.default_rng(0).integers(0, 6, (tokens, slots)).astype(np.int32)
    kind = {"padded": "float32", "more rows": dtype, "index": "float32"}[by]
    if by == "index":
        count = max(tokens * slots * 2 // 3, 1)
        copies = of_permute.index_copies(ids, count)
    else:
        pad, count = paddings(routing, 16) if by == "padded" else (None, int(routing.sum()) + 3)
        copies = of_permute.mask_copies(routing, pad)
    dy, x = drawn((tokens, width), dtype, 2), drawn((count, width), dtype, 1)
    weights = drawn((tokens, slots if by == "index" else choices), kind, 3)

    def run(rt: Runtime, put: Put) -> Found:
        row_map = ops.index_row_map(rt, put(ids), rows=count) if by == "index" else ops.mask_row_map(rt, put(routing))
        dx, d_weights = ops.unpermute_backward(rt, put(dy), put(x), row_map, put(weights), pad_offsets=put(pad))
        return {"dx": dx, "dweights": d_weights}

    used = weights.astype(dy.dtype) if by == "index" else weights
    dx, d_weights = of_permute.unpermuted_gradients(dy, x, copies, used)
    _, terms = of_permute.unpermuted_gradients(abs(dy), abs(x), copies, weights)
    return Case(run, {"dx": near(dx, np.abs(dx), dtype), "dweights": near(d_weights, terms * width**0.5, kind)})


# -------------------------------------------------------------------------------------- sequences over ranks

#: (batch, tokens, heads, width): vectors of 8, 4, 2 and 1 elements, rows longer than a block, and nothing at all.
PARTIALS = [
    (2, 6, 3, 16),
    (1, 5, 2, 12),
    (3, 4, 1, 6),
    (2, 3, 2, 7),
    (1, 2, 1, 4104),
    (2, 33, 5, 128),
    (2, 40, 3, 7),
    (2, 0, 3, 8),
]
TYPES = [
    "bfloat16-bfloat16-bfloat16",
    "bfloat16-bfloat16-float32",
    "float32-float16-float32",
    "float32-bfloat16-bfloat16",
    "float32-float32-float32",
    "float16-float32-float16",
]


def partial_output(form: str, size: Any, dtype: str, seed: int, empty: float = 0.3) -> tuple[Array, Array]:
    """An output and statistics; rows of no key have infinite ones of either sign, and NaN for output."""
    b, s, h, d = size
    shape = {"sbhd": (s, b, h, d), "bshd": (b, s, h, d), "thd": (b * s, h, d)}[form]
    of_stats = (b * s, h) if form == "thd" else (b, h, s)
    random = np.random.default_rng(seed)
    out = random.standard_normal(shape).astype(numpy_dtype(dtype))
    stats = (random.standard_normal(of_stats) * 5).astype(np.float32)
    stats[random.random(of_stats) < empty] = -np.inf
    stats[random.random(of_stats) < empty / 2] = np.inf
    of_context.by_token(out, form)[np.isinf(of_context.stats_by_token(stats, form))] = np.nan
    return out, stats


def merge(size: Any, dtype: str, number: int) -> Case:
    """Two partial outputs, or one that gets the sink; zeros exactly where nobody has seen a key."""
    form, sizes, softmax, count = size
    types = dtype.split("-")
    given = [partial_output(form, sizes, types[i], 2 * number + i) for i in range(count)]
    sinks = np.random.default_rng(number).uniform(-2, 4, sizes[2]).astype(np.float32)
    sink = {"vanilla": None, "off-by-one": np.zeros(sizes[2]), "learnable": sinks}[softmax]
    value, logs = of_context.merged(given, form, sink)
    terms = sum(np.nan_to_num(np.abs(of_context.by_token(out.astype(np.float64), form))) for out, _ in given)
    off = np.where(np.all(value == 0, axis=-1, keepdims=True), 0, close(value, types[2]).off + 1e-5 * terms)
    out_shape, stats_shape = given[0][0].shape, given[0][1].shape
    value, off = (of_context.by_token(t, form) if form != "thd" else t.reshape(out_shape) for t in (value, off))
    logs = logs.reshape(stats_shape) if form == "thd" else logs.transpose(1, 2, 0)
    finite = np.where(np.isinf(logs), 0, logs)

    def run(rt: Runtime, put: Put, in_place: bool = False) -> Found:
        parts = [put(t) for pair in given for t in pair] + [None] * (4 - 2 * count)
        out = rt.empty(out_shape, type_of(types[2]))
        stats = parts[1] if in_place else rt.empty(stats_shape, dtypes.float32)
        more = {"softmax": softmax, "sink": put(sinks) if softmax == "learnable" else None}
        ops.attention_merge(rt, *parts, out=out, stats=stats, form=form, **more)
        return {"out": out, "stats": stats}

    want = {"out": Near(value, off, types[2]), "stats": Near(logs, 2e-6 + 2e-6 * np.abs(finite), "float32")}
    return Case(run, want, (partial(run, in_place=True),))


def context_sum(shape: tuple[int, ...], dtype: str, number: int) -> Case:
    """Float32, rounded once. Of any shape, in place where the type is one, and without a second one."""
    types = dtype.split("-")
    a, b = (drawn(shape, t, i) for i, t in enumerate(types[:2]))
    total = (a.astype(np.float32) + b.astype(np.float32)).astype(numpy_dtype(types[2]))

    def run(rt: Runtime, put: Put, in_place: bool = False) -> Found:
        first, out, alone = put(a), rt.empty(shape, type_of(types[2])), rt.empty(shape, type_of(types[2]))
        out = first if in_place and types[0] == types[2] else out
        ops.context_sum(rt, first, put(b), out=out)
        ops.context_sum(rt, put(a), None, out=alone)
        return {"sum": out, "alone": alone}

    want = {"sum": Near(total), "alone": Near(a.astype(np.float32).astype(total.dtype))}
    return Case(run, want, (partial(run, in_place=True),))


def sink_grad(size: Any, dtype: str, number: int) -> Case:
    form, sizes = size
    (out, stats), (dy, _) = (partial_output(form, sizes, dtype, number + n) for n in (0, 50))
    dy = np.where(np.isnan(dy.astype(np.float32)), 1, dy).astype(dy.dtype)
    of_context.by_token(dy, form)[np.isinf(of_context.stats_by_token(stats, form))] = np.nan
    sink = np.random.default_rng(number).uniform(-2, 4, sizes[2]).astype(np.float32)
    value = of_context.sink_grad(dy, out, stats, sink, form)
    return Case(
        lambda rt, put: {"dsink": ops.attention_sink_grad(rt, *map(put, (dy, out, stats, sink)), form=form)},
        {"dsink": Near(value, 1e-4 + 1e-4 * np.abs(value), "float32")},
    )


def batch(size: int, seed: int, count: int | None = None) -> tuple[Array, Array]:
    """Running sums of lengths and of padded lengths, of 0 to `count` sequences, 0 and 1 and whole paddings included."""
    random = np.random.default_rng(seed)
    count = int(random.integers(0, 9)) if count is None else count
    padded = random.integers(0, 6, count) * 2 * size
    lengths = np.where(random.random(count) < 0.2, padded, random.integers(0, padded + 1))
    lengths = np.where(random.random(count) < 0.2, np.minimum(padded, random.integers(0, 2, count)), lengths)
    return running(lengths), running(padded)


def spans_of(size: int) -> tuple[Span, ...]:
    """Of each rank both chunks, the first and the second; runs of chunks in sequence order; a window's keys."""
    found = []
    for rank in range(size):
        late = 2 * size - 1 - rank
        first, second = (rank, rank + 1), (late, late + 1)
        found += [Span((first, second), size), Span((first,), size), Span((second,), size, 1), Span(((0, rank),))]
        found += [Span(((rank + 1, late),), skip=rank + 1), Span(((late + 1, 2 * size),), 1, late + 1)]
        found += [Span((first,), 1, rank, 2), Span((second,), 1, late, 7)]
    return tuple(found)


def context_lengths(size: Any, dtype: str, number: int) -> Case:
    """Each span, one position at a time. Of packed sequences, and dense: all rows are padded to one length."""
    ranks, count, chunk, first = size
    spans = spans_of(ranks)[:first]
    if chunk:
        lengths = running([0, 1, 3, chunk * ranks, 2 * ranks * chunk, chunk * ranks + 1])
        padded = None
    else:
        lengths, padded = batch(ranks, number, count)

    def spanned(valid: Array, wholes: Array, begins: Array) -> Array:
        made = []
        for span in spans:
            each = [
                sum(of_context.valid(n, whole, ranks, run, span.before) for run in span.ranges)
                for n, whole in zip(np.diff(valid), wholes, strict=True)
            ]
            skipped = np.append(np.maximum(span.skip * (wholes // (2 * ranks)) - span.before, 0), 0)
            made += [running(each), begins // span.parts + skipped]
        return np.array(made, np.int32).reshape(2 * len(spans), len(valid))

    def run(rt: Runtime, put: Put) -> Found:
        options = {"size": ranks, "spans": spans}
        if chunk:
            return {"all": ops.context_lengths(rt, put(lengths), chunk=chunk, **options)}
        found = ops.context_lengths(rt, put(lengths), put(padded), **options)
        return {"some": found, "all": ops.context_lengths(rt, put(padded), **options)}

    if padded is not None:
        of = np.diff(padded)
        return Case(run, {"some": Near(spanned(lengths, of, padded)), "all": Near(spanned(padded, of, padded))})
    rows = spanned(lengths, np.full(len(lengths) - 1, 2 * ranks * chunk), np.zeros(len(lengths), np.int64))
    for i, span in enumerate(spans):  # places count from the begin of a row, that behind the last one as well
        rows[2 * i + 1] = max(span.skip * chunk - span.before, 0)
    return Case(run, {"all": Near(rows)})


def numbered(shape: tuple[int, ...], dtype: str) -> Array:
    """Every element another one, as far as the type goes."""
    return (np.arange(int(np.prod(shape))) % 251 + 1).astype(np.uint8).reshape(shape).astype(numpy_dtype(dtype))


def shape_of(form: str, tokens: int, heads: int, width: int) -> tuple[int, ...]:
    """Of so many tokens, of two rows in dense formats."""
    lead = {"sbhd": (tokens, 2), "bshd": (2, tokens), "thd": (tokens,)}[form]
    return (*lead, heads, width)


def sequence_rows(size: Any, dtype: str, number: int) -> Case:
    """To ranks, one token at a time, and back; tokens of no sequence are zeros. `parts`: the tensor holds that much of
    each sequence: groups of an a2a inside of a ring.
    """
    form, ranks, heads, width, parts = size
    padded = None if form != "thd" else batch(ranks, number % 5)[1] * parts
    own = None if padded is None else padded // parts
    count = 6 * ranks if own is None else int(own[-1]) + ranks * (number % 3)
    whole = numbered(shape_of(form, count, heads, width), dtype)
    by_token = whole.swapaxes(0, 1) if form == "bshd" else whole
    found = np.zeros((ranks, count // ranks, *by_token.shape[1:]), whole.dtype)
    for rank in range(ranks):
        places = of_context.of_rank(count, ranks, rank) if own is None else of_context.places_of_rank(own, ranks, rank)
        found[rank, : len(places)] = by_token[places]
    found, back = found.swapaxes(1, 2) if form == "bshd" else found, whole.copy()
    if own is not None:
        back[own[-1] :] = 0

    def run(rt: Runtime, put: Put) -> Found:
        more = {"form": form, "size": ranks, "cu_seqlens_padded": put(padded), "parts": parts}
        there = ops.context_rows(rt, put(whole), how="sequence_to_ranks", **more)
        return {"there": there, "back": ops.context_rows(rt, there, how="ranks_to_sequence", **more)}

    return Case(run, {"there": Near(found), "back": Near(back)})


def head_rows(size: Any, dtype: str, number: int) -> Case:
    """Heads to ranks and back; fewer heads than ranks go to several."""
    form, (ranks, heads, width) = size
    whole = numbered(shape_of(form, 5, heads, width), dtype)
    each = max(heads // ranks, 1)
    found = np.stack([whole[..., r * heads // ranks : r * heads // ranks + each, :] for r in range(ranks)])

    def run(rt: Runtime, put: Put) -> Found:
        there = ops.context_rows(rt, put(whole), how="heads_to_ranks", form=form, size=ranks)
        back = heads >= ranks
        return {
            "there": there,
            "back": ops.context_rows(rt, there, how="ranks_to_heads", form=form, size=ranks) if back else None,
        }

    return Case(run, {"there": Near(found), "back": Near(whole) if heads >= ranks else None})


def splitmix(seed: int, number: int) -> int:
    """The finalizer, in Python's integers."""
    mask = (1 << 64) - 1
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def context_draws(size: tuple[int, tuple[int, ...]], dtype: str, number: int) -> Case:
    seed, numbers = size
    made = np.array([(splitmix(seed, n), 96) for n in numbers], np.int64).reshape(len(numbers), 2)
    rng = np.array([seed, 96], np.int64)
    return Case(lambda rt, put: {"draws": ops.context_draws(rt, put(rng), numbers)}, {"draws": Near(made)})


def context_max(count: int, dtype: str, number: int) -> Case:
    parts = drawn((5, 300), "float32")
    parts[2, 3], parts[:, 4], parts[0, 5] = np.nan, -np.inf, np.inf
    parts = parts[:count]
    most, among = np.fmax.reduce(parts, axis=0, initial=-np.inf), np.full(900, -np.inf, np.float32)
    among[300:600] = most
    return Case(
        lambda rt, put: {
            "alone": ops.context_max(rt, put(parts)),
            "among": ops.context_max(rt, put(parts), heads=900, first=300),
        },
        {"alone": Near(most), "among": Near(among)},
    )


IDS = {"usual": (0, 7), "many": (0, 3000), "any": (-(1 << 31), 1 << 31)}
INDICES = [
    (*ids, kind, kept)
    for i, ids in enumerate([(1, 1), (12, 2), (300, 8), (3000, 3)])
    for j, kind in enumerate(IDS.values())
    for kept in ("all", "some", "none", "more")[(i + j) % 2 :: 2]
] + [(30000, 4, kind, "some") for kind in ((0, 100), (-50, 50), (0, 10_000_000))]
PERMUTED = [
    (size, align, kind, known)
    for i, size in enumerate(SIZES + LONG + NOTHING)
    for j, (align, kind) in enumerate([(1, None), (16, "float32"), (1, "bfloat16"), (16, None)])
    for known in ((i + j) % 2 == 0,)
]
UNPERMUTED = [
    (size, *how)
    for size in (*SIZES, *NOTHING)
    for how in ((1, None, 0), (16, None, 0), (1, "float32", 0), (8, "bfloat16", 0), (1, None, 10))
]
MERGED = [
    (form, size, softmax, 2 if (i + j) % 4 else 1)
    for form in FORMS
    for i, size in enumerate(PARTIALS)
    for j, softmax in enumerate(("vanilla", "off-by-one", "learnable"))
]
ONE = ("int32",)  # where no type is to be chosen
MANY = (0, 1, 7, 2**40, *range(100, 400))
RANKS = (1, 2, 3, 4, 8)
LENGTHS = [(size, None, 0, None) for size in RANKS for _ in range(12)] + [(size, None, 5, None) for size in RANKS]
#: Many sequences; more spans than a launch takes.
LENGTHS += [(2, n, 0, 8) for n in (1023, 1024, 2500)] + [(32, 3, 0, None)]
SEQUENCES = [
    (form, size, heads, width, 1)
    for form in FORMS
    for size in RANKS
    for heads, width in ((2, 16), (1, 3), (3, 8), (5, 130), (1, 4))
] + [("thd", 2, 2, 8, 3)]
HEADS = [(1, 3, 8), (2, 4, 16), (3, 6, 5), (4, 4, 64), (4, 2, 8), (4, 1, 3), (8, 16, 128)]
ROWS: dict[str, Row] = {
    "rope": Row(
        rope, [*product(TURNS, (False, True))], large=[(("sbhd", (33, 2, 5, 96), 64, i, (1, 0)), False) for i in (0, 1)]
    ),
    "rope_qkv": Row(rope_qkv, [*product(SPLITS, (False, True))]),
    "kv_append": Row(kv_append, [(c, form, paged) for c in CACHES for form in FORMS for paged in (False, True)]),
    "kv_gather": Row(kv_gather, CACHES, every=True),
    "kv_move": Row(kv_move, [(8, 16), (3, 5)], every=True),
    "mask_row_map": Row(mask_row_map, [s[:2] for s in SIZES + NOTHING] + MASKS, ("bool", "uint8", "int32", "int64")),
    "index_row_map": Row(index_row_map, INDICES, ONE),
    "chunk_row_map": Row(chunk_row_map, CHUNKS, ("int32-int32", "int64-int64", "int32-int64"), every=True),
    "permute": Row(permute, PERMUTED, (*DTYPES, "uint8")),
    "permute by index": Row(permute_by_index, SIZES + LONG),
    "unpermute": Row(unpermute, UNPERMUTED),
    "unpermute by index": Row(unpermute_by_index, [(12, 2, 16), (50, 8, 72), (9, 5, 3), (5, 3, 4096)], every=True),
    "gradients of permute": Row(permute_gradients, SIZES),
    "unpermute_backward": Row(unpermute_backward, [*product([*SIZES, (3, 2, 0)], ("padded", "more rows", "index"))]),
    "attention_merge": Row(merge, MERGED, TYPES),
    "context_sum": Row(
        context_sum, [(7,), (3, 5), (4, 2, 8), (2, 3, 4, 16), (2, 2, 3, 2, 6), (3, 40000), (0, 4)], TYPES, every=True
    ),
    "attention_sink_grad": Row(sink_grad, [*product(FORMS, PARTIALS)]),
    "context_lengths": Row(context_lengths, LENGTHS, ONE),
    "context_rows of sequences": Row(sequence_rows, SEQUENCES, ("bfloat16", "uint8", "float32", "float8_e4m3")),
    "context_rows of heads": Row(head_rows, [*product(FORMS, HEADS)], ("bfloat16", "uint8", "float32")),
    "context_draws": Row(context_draws, [(s, n) for s in (0, 1234, -5, 2**63 - 1) for n in (MANY, ())], ("int64",)),
    "context_max": Row(context_max, [5, 1, 0], ("float32",)),
}
