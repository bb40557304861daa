"""The KV cache of inference: new keys and values appended to it, rows moved within it, its pages gathered.

A cache is dense: [rows, capacity, groups, d], sequence i in row i; or, with `pages` (int32 [sequences, pages each]),
[pages, page size, groups, d], and token t of sequence i lies in page pages[i, t // page size] at t % page size. k and
v differ at most in d. Lengths are running sums, int32 [sequences + 1], in device memory: nothing here waits for the
host or depends on values it knows, so a captured graph goes on working while sequences grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core import dtypes
from te_core.attention import DIMENSIONS, FORMATS  # noqa: F401  (of declarations)
from te_core.dtypes import ACTIVATION_DTYPES
from te_core.ops import _check
from te_core.ops.declare import exported, operation, rules
from te_core.runtime import Runtime
from te_core.tensor import Tensor, widest_access

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
    _check_cache(op, rt, cache)
    _check_append(op, rt, new_k, new_v, cache, cu_new, cu_cached, form)
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
    spec = rt.plans.find(rt, _move_spec, cache)
    _check.written("kv_move", "the cache", cache.k, cache.v)
    rt.backend.kv_move(rt, spec, cache, moves, min(longest, spec.capacity))


def _move_spec(rt: Runtime, cache: KVCache) -> KVCacheSpec:
    op = "kv_move"
    _check_cache(op, rt, cache)
    _check.require(cache.pages is None, op, "a paged cache", "a contiguous one", "permute its page table instead")
    return _cache_spec(cache)


@operation("""
    must cache.pages is not None: a paged cache; read the contiguous cache itself
    cu_cached [offsets] i32
    must 1 <= offsets <= cache.rows + 1: lengths of up to {cache.rows} sequences; correct the lengths
""")
def kv_gather(rt: Runtime, cache: KVCache, cu_cached: Tensor) -> tuple[Tensor, Tensor]:
    """k and v of a paged cache as contiguous [sequences, capacity, groups, d], zeros behind each sequence's end."""
    _check_cache("kv_gather", rt, cache)
    rows = cu_cached.shape[0] - 1
    k, v = (rt.empty((rows, cache.capacity, *t.shape[2:]), t.dtype) for t in (cache.k, cache.v))
    rt.backend.kv_gather(rt, _cache_spec(cache), cache, cu_cached, k, v)
    return k, v


def _cache_spec(cache: KVCache, *others: Tensor) -> KVCacheSpec:
    k, v, _ = cache
    heads = (k.shape[3] * k.dtype.itemsize, v.shape[3] * v.dtype.itemsize)
    blocks, tokens, groups, _ = k.shape
    paged, vector = cache.pages is not None, widest_access(k, v, *others)
    return KVCacheSpec(cache.rows, cache.capacity, blocks, tokens, paged, groups, *heads, vector)


def _steps(form: str, new: Tensor) -> tuple[int, int, int]:
    batch, token, head = DIMENSIONS[form]
    strides, size = new.row_major_strides(), new.dtype.itemsize
    return strides[token] * size, 0 if batch is None else strides[batch] * size, strides[head] * size


@rules("""
    form in FORMATS
    cu_new [offsets] i32: Running sums of the new tokens.
    must 1 <= offsets <= cache.rows + 1: lengths of up to {cache.rows} sequences; correct the lengths
    cu_cached [offsets] i32: Running sums of the tokens in the cache, the new ones included.
    new_k [...] cache.k rows: New keys.
    new_v [...] cache.k rows: New values.
    must new_k.ndim == new_v.ndim == len(form): {len(form)} dimensions ({form}); correct new_k and new_v, or form
    must new_k.shape[-2:] == cache.k.shape[-2:] and new_v.shape[-2:] == cache.v.shape[-2:]: heads as the cache has them;
        correct new_k and new_v, or the sizes that the cache was made for
    must new_k.shape[:-1] == new_v.shape[:-1]: shapes that differ at most in the last dimension; correct one of them
    must form == "thd" or new_k.shape[DIMENSIONS[form][0]] == offsets - 1: one length for each row; correct the lengths
""")
def _check_append(
    op: str, rt: Runtime, new_k: Tensor, new_v: Tensor, cache: KVCache, cu_new: Tensor, cu_cached: Tensor, form: str
) -> None:
    """New tokens have a place in the cache."""


@rules("""
    cache.k [blocks, tokens, groups, d] DTYPES: Memory of the keys.
    cache.v [blocks, tokens, groups, cache.v.shape[-1]] cache.k: Memory of the values, as that of the keys but for d.
    cache.pages? [sequences, pages] i32: Table of pages.
    must max(cache.rows * cache.capacity, blocks * tokens) < 1 << 31: room for less than 2^31 tokens; make the cache
        smaller
""")
def _check_cache(op: str, rt: Runtime, cache: KVCache) -> None:
    """A cache is dense, on the device, and small enough."""
