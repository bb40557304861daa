"""The KV cache of inference: new keys and values appended to it, rows moved within it, its pages gathered.

A cache is dense: [rows, capacity, groups, d], sequence i in row i; or, with `pages` (int32 [sequences, pages each]),
[pages, page size, groups, d], and token t of sequence i lies in page pages[i, t // page size] at t % page size. k and
v differ at most in d. Lengths are running sums, int32 [sequences + 1], in device memory: nothing here waits for the
host or depends on values it knows, so a captured graph goes on working while sequences grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from te_core import dtypes
from te_core.attention import DIMENSIONS, FORMATS
from te_core.dtypes import ACTIVATION_DTYPES
from te_core.ops import _check
from te_core.ops.declare import exported, operation
from te_core.runtime import Runtime
from te_core.tensor import Tensor

DTYPES = (*ACTIVATION_DTYPES, dtypes.float8_e4m3, dtypes.float8_e5m2, dtypes.uint8)


@exported("""
    k: Memory of the keys.
    v: Memory of the values.
    pages: Table of pages, int32 [rows, pages]. None for a cache without pages.
""")
class KVCache(NamedTuple):
    """The memory of one layer's cache."""

    k: Tensor
    v: Tensor
    pages: Tensor | None = None

    @property
    def rows(self) -> int:
        """How many sequences there is room for."""
        return self.k.shape[0] if self.pages is None else self.pages.shape[0]

    @property
    def capacity(self) -> int:
        """How many tokens of a sequence there is room for."""
        return self.k.shape[1] * (1 if self.pages is None else self.pages.shape[1])


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """A cache as launches know it; lengths of memory in bytes."""

    rows: int  # sequences there is room for
    capacity: int  # tokens of a sequence
    blocks: int  # pages, or rows
    tokens: int  # of a page, or of a row
    paged: bool
    groups: int
    k_head: int
    v_head: int
    vector: int  # the widest one that divides every address, stride and head of all tensors of the call


@dataclass(frozen=True, slots=True)
class KVAppendSpec:
    """All that the launch of `kv_append` depends on besides addresses."""

    cache: KVCacheSpec
    form: str
    sequences: int
    tokens: int  # in the token dimension of what is new
    k_steps: tuple[int, int, int]  # bytes from a token, a sequence and a head to the next
    v_steps: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KVMoveSpec:
    """All that the launch of `kv_move` depends on besides addresses."""

    cache: KVCacheSpec
    longest: int


@dataclass(frozen=True, slots=True)
class KVGatherSpec:
    """All that the launch of `kv_gather` depends on besides addresses."""

    cache: KVCacheSpec
    sequences: int


@operation("""
    new_k: New keys.
    new_v: New values.
    cache: Memory of the cache (`KVCache`).
    cu_new: Running sums of the new tokens, int32 [b + 1].
    cu_cached: Running sums of the tokens in the cache, the new ones included, int32 [b + 1].
""")
def kv_append(
    rt: Runtime, new_k: Tensor, new_v: Tensor, cache: KVCache, cu_new: Tensor, cu_cached: Tensor, *, form: str
) -> None:
    """Write the new tokens of each sequence behind those that the cache holds.

    `form` is sbhd, bshd (the new tokens of a sequence at the beginning of its row) or thd (sequence after sequence);
    any strides whose last one is 1. `cu_cached` counts the new tokens in: those of sequence i go to its positions
    cached_i - new_i up to cached_i. What would lie outside the cache or its pages is not written.
    """
    spec = rt.plans.find(rt, _append_spec, (new_k, new_v, cache, cu_new, cu_cached, form))
    _check.written("kv_append", "the cache", cache.k, cache.v)
    rt.backend.kv_append(rt, spec, new_k, new_v, cache, cu_new, cu_cached)


def _append_spec(rt: Runtime, asked: tuple[Tensor, Tensor, KVCache, Tensor, Tensor, str]) -> KVAppendSpec:
    """The arguments are looked at once for all that are alike: a cache grows by a token at a time, in each layer."""
    op, (new_k, new_v, cache, cu_new, cu_cached, form) = "kv_append", asked
    _check.on_device(op, rt.device, new_k, new_v, *cache, cu_new, cu_cached)
    _check_append(op, new_k, new_v, cache, cu_new, cu_cached, form)
    tokens = new_k.shape[DIMENSIONS[form][1]]
    steps = _steps(form, new_k), _steps(form, new_v)
    return KVAppendSpec(_cache_spec(cache, new_k, new_v), form, cu_new.shape[0] - 1, tokens, *steps)


@operation("""
    moves [n, 3] i32: (row to, row from, tokens) of each move.
    longest: Most tokens of a move.
    must longest >= 0: the tokens of the longest move
""")
def kv_move(rt: Runtime, cache: KVCache, moves: Tensor, *, longest: int) -> None:
    """Move sequences between the rows of a cache without pages, one move after the other.

    `moves` int32 [n, 3]: (row to, row from, tokens). Row -1 is a spare one that keeps what was moved there last, for
    rows that change places. No move has more than `longest` tokens; one that names a row behind the last is not made.
    """
    spec = rt.plans.find(rt, _move_spec, (cache, longest))
    _check.written("kv_move", "the cache", cache.k, cache.v)
    rt.backend.kv_move(rt, spec, cache, moves)


def _move_spec(rt: Runtime, asked: tuple[KVCache, int]) -> KVMoveSpec:
    op, (cache, longest) = "kv_move", asked
    _check_cache(op, cache)
    _check.require(cache.pages is None, op, "a paged cache", "a contiguous one", "permute its page table instead")
    _check.on_device(op, rt.device, *cache)
    return KVMoveSpec(_cache_spec(cache), min(longest, cache.capacity))


@operation()
def kv_gather(rt: Runtime, cache: KVCache, cu_cached: Tensor) -> tuple[Tensor, Tensor]:
    """k and v of a paged cache as contiguous [sequences, capacity, groups, d], zeros behind each sequence's end."""
    op = "kv_gather"
    _check_cache(op, cache)
    _check.require(cache.pages is not None, op, "no pages", "a paged cache", "read the contiguous cache itself")
    _check_lengths(op, cache, cu_cached)
    _check.on_device(op, rt.device, *cache, cu_cached)
    rows = cu_cached.shape[0] - 1
    k, v = (rt.empty((rows, cache.capacity, *t.shape[2:]), t.dtype) for t in (cache.k, cache.v))
    rt.backend.kv_gather(rt, KVGatherSpec(_cache_spec(cache), rows), cache, cu_cached, k, v)
    return k, v


def _cache_spec(cache: KVCache, *others: Tensor) -> KVCacheSpec:
    k, v, _ = cache
    heads = (k.shape[3] * k.dtype.itemsize, v.shape[3] * v.dtype.itemsize)
    bits = 16
    for t in (k, v, *others):
        bits |= t.ptr
        for n in _byte_steps(t):
            bits |= n
    blocks, tokens, groups, _ = k.shape
    paged = cache.pages is not None
    return KVCacheSpec(cache.rows, cache.capacity, blocks, tokens, paged, groups, *heads, vector=bits & -bits)


def _byte_steps(t: Tensor) -> Iterator[int]:
    """The strides along which there is a next one, and the length of the last dimension."""
    strides = t.row_major_strides()[:-1]
    for n in (*(s for s, count in zip(strides, t.shape[:-1], strict=True) if count > 1), t.shape[-1]):
        yield n * t.dtype.itemsize


def _steps(form: str, new: Tensor) -> tuple[int, int, int]:
    batch, token, head = DIMENSIONS[form]
    strides, size = new.row_major_strides(), new.dtype.itemsize
    return strides[token] * size, 0 if batch is None else strides[batch] * size, strides[head] * size


def _check_append(
    op: str, new_k: Tensor, new_v: Tensor, cache: KVCache, cu_new: Tensor, cu_cached: Tensor, form: str
) -> None:
    _check.one_of(op, "form", form, FORMATS)
    _check_cache(op, cache)
    _check_lengths(op, cache, cu_new)
    _check.vector(op, "cu_cached", cu_cached, cu_new.shape[0], (dtypes.int32,))
    rows, batch = cu_new.shape[0] - 1, DIMENSIONS[form][0]
    for name, new, old in (("new_k", new_k, cache.k), ("new_v", new_v, cache.v)):
        _check.require(
            new.ndim == (3 if batch is None else 4)
            and new.shape[-2:] == old.shape[-2:]
            and new.dtype is old.dtype
            and (new.shape[-1] < 2 or new.row_major_strides()[-1] == 1),
            op,
            f"{name} = {new!r}",
            f"{form} with {old.shape[2]} heads of {old.shape[3]} in {old.dtype}, as the cache, last stride 1",
            f"correct {name}, its format, or the sizes and dtype that the cache was made for",
        )
        _check.require(
            batch is None or new.shape[batch] == rows,
            op,
            f"{name} = {new!r} with lengths of {rows} sequences",
            "one length for each row",
            "correct the lengths",
        )
    _check.require(
        new_k.shape[:-1] == new_v.shape[:-1],
        op,
        f"new_k {new_k!r}, new_v {new_v!r}",
        "shapes that differ at most in the last dimension",
        "correct one of them",
    )


def _check_cache(op: str, cache: KVCache) -> None:
    k, v, pages = cache
    _check.one_of(op, "dtype of the cache", k.dtype, DTYPES)
    _check.require(
        k.ndim == v.ndim == 4
        and k.shape[:3] == v.shape[:3]
        and k.dtype is v.dtype
        and k.is_contiguous
        and v.is_contiguous,
        op,
        f"k {k!r}, v {v!r}",
        "dense caches [rows or pages, tokens, groups, d] that differ at most in d",
        "correct the caches",
    )
    _check.require(
        pages is None or (pages.ndim == 2 and pages.is_contiguous and pages.dtype is dtypes.int32),
        op,
        f"pages = {pages!r}",
        "dense int32 [sequences, pages each]",
        "correct the page table",
    )
    tokens = max(cache.rows * cache.capacity, k.shape[0] * k.shape[1])
    _check.require(tokens < 1 << 31, op, f"room for {tokens} tokens", "less than 2^31", "make the cache smaller")


def _check_lengths(op: str, cache: KVCache, cu: Tensor) -> None:
    _check.require(
        cu.ndim == 1 and 1 <= cu.shape[0] <= cache.rows + 1 and cu.is_contiguous and cu.dtype is dtypes.int32,
        op,
        f"lengths {cu!r}",
        f"dense int32 running sums of up to {cache.rows} sequences",
        "correct the lengths",
    )
