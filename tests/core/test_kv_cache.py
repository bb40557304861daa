"""The KV cache's copies, against one token at a time, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import ops
from te_core.errors import ArgumentError
from te_core.ops import KVCache
from te_core.ops.kv_cache import _cache_spec
from te_core.tensor import Tensor
from tests.core.covering_lists import covering_lists
from tests.core.inputs import DTYPES, placed, poisoned, values
from tests.reference.kv_cache import appended, gathered

FORMS = ("sbhd", "bshd", "thd")
#: (capacity, page size, groups, d of k, d of v, new tokens of each sequence, tokens held before)
CASES = [
    (16, 4, 2, 8, 8, (1, 1, 1), (0, 7, 15)),
    (12, 3, 1, 3, 5, (4, 0, 7, 1), (8, 5, 0, 2)),  # elements one by one, an empty step, the last place
    (64, 16, 3, 64, 32, (17, 33, 64), (0, 31, 0)),
    (40, 8, 8, 128, 128, (1, 1, 40, 1, 0), (39, 3, 0, 0, 0)),
    (8, 8, 5, 6, 24, (2,), (3,)),  # vectors of four bytes
    (24, 1, 2, 16, 16, (5, 0, 0, 3), (19, 24, 0, 11)),  # a page is a token
]


def sums(rt, lengths):
    return rt.tensor(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def new_tokens(form, lengths, groups, d, dtype, seed):
    """New tokens in their format; what lies behind a sequence's own is there to be left alone."""
    longest, rows = max(lengths) + 1, len(lengths)
    shape = {"sbhd": (longest, rows), "bshd": (rows, longest), "thd": (sum(lengths) + 2,)}[form]
    return values((*shape, groups, d), dtype, seed)


def strided(rt, array, shift):
    """The array as the middle part of a packed projection: every head between two others."""
    wide = np.full((*array.shape[:-2], array.shape[-2] * 3, array.shape[-1]), 0.5, array.dtype)
    wide[..., 1::3, :] = array
    base = placed(rt, wide, shift)
    *outer, groups, d = array.shape
    step = list(base.row_major_strides())
    step[-2] *= 3
    return Tensor(base.ptr + d * base.dtype.itemsize, (*outer, groups, d), base.dtype, base.device, base, tuple(step))


def page_table(rows, capacity, page_size, seed):
    """Pages in no order, some of them nobody's."""
    each = capacity // page_size
    return np.random.default_rng(seed).permutation(rows * each + 3)[: rows * each].reshape(rows, each).astype(np.int32)


@covering_lists(
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"]),
    pytest.mark.parametrize("form", FORMS),
    turns=2,
)
def test_append(rt, dtype, paged, form):
    for i, (capacity, page_size, groups, d_k, d_v, lengths, held) in enumerate(CASES):
        rows = len(lengths)
        pages = page_table(rows, capacity, page_size, i) if paged else None
        shape = (rows * capacity // page_size + 3, page_size) if paged else (rows + 1, capacity)
        old = [values((*shape, groups, d), dtype, 10 + d) for d in (d_k, d_v)]
        new = [new_tokens(form, lengths, groups, d, dtype, 20 + d) for d in (d_k, d_v)]
        expected = [appended(o, pages, n, form, lengths, held) for o, n in zip(old, new, strict=True)]
        after = [n + h for n, h in zip(lengths, held, strict=True)]
        for shift, place in ((0, placed), (1, placed), (0, strided), (1, strided)):
            cache = KVCache(*(placed(rt, o, shift) for o in old), None if pages is None else rt.tensor(pages))
            ops.kv_append(rt, *(place(rt, n, shift) for n in new), cache, sums(rt, lengths), sums(rt, after), form=form)
            for got, want in zip(cache[:2], expected, strict=True):
                np.testing.assert_array_equal(rt.numpy(got).view(np.uint8), want.view(np.uint8), f"case {i}")


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_append_outside_is_not_written(rt, paged):
    """Lengths that the cache has no room for, and pages that do not exist, spoil nothing."""
    lengths, held = (3, 2, 1), (2, 4, 0)  # of four
    old, new = values((3, 4, 2, 8), "float32", 1), values((3, 3, 2, 8), "float32", 2)
    pages = np.array([[1], [-1], [3]], np.int32) if paged else None
    cache = KVCache(placed(rt, old), placed(rt, old), None if pages is None else rt.tensor(pages))
    after = [n + h for n, h in zip(lengths, held, strict=True)]
    ops.kv_append(rt, placed(rt, new), placed(rt, new), cache, sums(rt, lengths), sums(rt, after), form="bshd")
    expected = old.copy()
    expected[1 if paged else 0, 2:4] = new[0, :2]
    if not paged:
        expected[2, 0] = new[2, 0]
    for got in cache[:2]:
        np.testing.assert_array_equal(rt.numpy(got), expected)


def test_append_nothing(rt):
    """No tokens, and no sequences."""
    old = values((2, 4, 2, 8), "bfloat16", 1)
    cache = KVCache(placed(rt, old), placed(rt, old))
    for rows in (2, 0):
        none = rt.tensor(np.zeros((rows, 0, 2, 8), old.dtype))
        ops.kv_append(rt, none, none, cache, sums(rt, [0] * rows), sums(rt, [1] * rows), form="bshd")
    np.testing.assert_array_equal(rt.numpy(cache.k), old)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather(rt, dtype):
    for i, (capacity, page_size, groups, d_k, d_v, _, held) in enumerate(CASES):
        rows = len(held)
        pages = page_table(rows, capacity, page_size, i)
        old = [values((rows * capacity // page_size + 3, page_size, groups, d), dtype, d) for d in (d_k, d_v)]
        for shift in (0, 1):
            cache = KVCache(*(placed(rt, o, shift) for o in old), rt.tensor(pages))
            for got, o in zip(ops.kv_gather(poisoned(rt), cache, sums(rt, held)), old, strict=True):
                want = gathered(o, pages, held)
                np.testing.assert_array_equal(rt.numpy(got).view(np.uint8), want.view(np.uint8), f"case {i}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_move(rt, dtype):
    """Rows fall down, change places, go round in a circle; each for its own number of tokens."""
    for d_k, d_v in ((8, 16), (3, 5)):
        old = [values((5, 9, 2, d), dtype, d) for d in (d_k, d_v)]
        expected = [o.copy() for o in old]
        for e, o in zip(expected, old, strict=True):
            e[0, :7], e[1, :9], e[2, :2] = o[1, :7], o[2, :9], o[0, :2]  # a circle of three
            e[3, :4] = o[4, :4]
        real = [(-1, 0, 2), (0, 1, 7), (1, 2, 9), (2, -1, 2), (3, 4, 4)]
        moves = rt.tensor(np.array([*real, (4, 5, 3), (7, 0, 9)], np.int32))  # the last two: no such rows
        cache = KVCache(*(placed(rt, o) for o in old))
        ops.kv_move(rt, cache, moves, longest=16)
        for got, want in zip(cache[:2], expected, strict=True):
            np.testing.assert_array_equal(rt.numpy(got).view(np.uint8), want.view(np.uint8))


def test_refusals(rt):
    cache = KVCache(rt.tensor(np.zeros((2, 4, 2, 8), np.float32)), rt.tensor(np.zeros((2, 4, 2, 8), np.float32)))
    new, cu = rt.tensor(np.zeros((2, 1, 2, 8), np.float32)), sums(rt, [1, 1])
    paged = KVCache(cache.k, cache.v, rt.tensor(np.zeros((1, 2), np.int32)))
    other = rt.tensor(np.zeros((2, 1, 2, 8), np.float16))
    heads = rt.tensor(np.zeros((2, 1, 3, 8), np.float32))
    for call, part in (
        (lambda: ops.kv_append(rt, new, new, cache, cu, cu, form="bhsd"), "form"),
        (lambda: ops.kv_append(rt, new, other, cache, cu, cu, form="bshd"), "new_v"),
        (lambda: ops.kv_append(rt, heads, new, cache, cu, cu, form="bshd"), "new_k"),
        (
            lambda: ops.kv_append(rt, new, new, cache, sums(rt, [1]), sums(rt, [1]), form="bshd"),
            "one length for each row",
        ),
        (lambda: ops.kv_append(rt, new, new, cache, cu, sums(rt, [1]), form="bshd"), "cu_cached"),
        (lambda: ops.kv_append(rt, new, new, paged, cu, cu, form="bshd"), "up to 1 sequences"),
        (lambda: ops.kv_gather(rt, cache, cu), "a paged cache"),
        (lambda: ops.kv_move(rt, paged, rt.tensor(np.zeros((1, 3), np.int32)), longest=4), "page table"),
        (lambda: ops.kv_move(rt, cache, rt.tensor(np.zeros((1, 2), np.int32)), longest=4), "moves"),
    ):
        with pytest.raises(ArgumentError, match=part):
            call()


def test_a_plan_hides_no_wrong_argument(rt):
    """Refused as well where the right call has made a plan of the same shapes before."""
    cache = KVCache(*(rt.tensor(np.zeros((2, 8, 2, 4), np.float32)) for _ in range(2)))
    new, cu = rt.tensor(np.zeros((2, 1, 2, 4), np.float32)), rt.tensor(np.arange(3, dtype=np.int32))
    ops.kv_append(rt, new, new, cache, cu, cu, form="bshd")
    long, short = rt.tensor(np.arange(3, dtype=np.int64)), rt.tensor(np.arange(2, dtype=np.int32))
    for lengths in ((long, cu), (cu, long), (cu, short)):
        with pytest.raises(ArgumentError):
            ops.kv_append(rt, new, new, cache, *lengths, form="bshd")
    with pytest.raises(ArgumentError, match="longest"):
        ops.kv_move(rt, cache, rt.tensor(np.zeros((1, 3), np.int32)), longest=-1)


def test_vectors_begin_on_their_boundaries(rt):
    """A cache off the grid of 16 bytes is read in narrower vectors; a page table off it changes nothing."""
    held, table = values((7, 4, 2, 8), "fp32", 1), page_table(2, 8, 4, 2)
    for shift in ((0, 0, 1), (0, 1, 0), (1, 0, 0)):
        cache = KVCache(*(placed(rt, a, n) for a, n in zip((held, held, table), shift, strict=True)))
        for found in ops.kv_gather(rt, cache, rt.tensor(np.array([0, 5, 8], np.int32))):
            np.testing.assert_array_equal(rt.numpy(found), gathered(held, table, [5, 3]))
        assert not (cache.k.ptr | cache.v.ptr) % _cache_spec(cache).vector
