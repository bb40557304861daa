"""The KV cache on CUDA: kernels/kv_cache.cu, in the widest vectors that all addresses and strides allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.kv_cache import KVAppendSpec, KVCache, KVCacheSpec

THREADS = 256


def kv_append(
    rt: Runtime, spec: KVAppendSpec, new_k: Tensor, new_v: Tensor, cache: KVCache, cu_new: Tensor, cu_cached: Tensor
) -> None:
    """Copy each sequence's new tokens to its end; strides and sizes in vectors."""
    form, width, packed = spec.cache, spec.cache.vector, spec.form == "thd"
    steps = [n // width for n in (*spec.k_steps, *spec.v_steps)]
    k, v = form.k_head // width, form.v_head // width
    numbers = (*steps, k, v, form.groups, spec.sequences, spec.tokens, form.capacity, form.tokens, form.blocks)
    args = "p" * 7 + "q" * 6 + "i" * 8
    kernel = loader.get(rt, "kv_cache", entry="kv_append", args=args, WIDTH=width, PACKED=packed, PAGED=form.paged)
    slots = spec.tokens if packed else spec.sequences * spec.tokens
    grid, block = _shares(slots if spec.sequences else 0, form.groups * (k + v))
    if grid[0]:
        kernel(rt, grid, block, new_k, new_v, cache.k, cache.v, cu_new, cu_cached, cache.pages, *numbers)


def kv_move(rt: Runtime, spec: KVCacheSpec, cache: KVCache, moves: Tensor, longest: int) -> None:
    """Move row after row: all rows of a place in them are one thread's."""
    k, v = _vectors(spec)
    kernel = loader.get(rt, "kv_cache", entry="kv_move", args="pppiiiiii", WIDTH=spec.vector, PACKED=False, PAGED=False)
    numbers = (moves.shape[0], longest, spec.capacity, k, v, spec.rows)
    grid, block = _shares(longest, k + v)
    if grid[0]:
        kernel(rt, grid, block, cache.k, cache.v, moves, *numbers)


def kv_gather(rt: Runtime, spec: KVCacheSpec, cache: KVCache, cu_cached: Tensor, k: Tensor, v: Tensor) -> None:
    """Copy the tokens of each sequence from its pages: a thread for each vector of the result, zeros included."""
    vectors, sequences = _vectors(spec), k.shape[0]
    kernel = loader.get(
        rt, "kv_cache", entry="kv_gather", args="p" * 6 + "i" * 6, WIDTH=spec.vector, PACKED=False, PAGED=True
    )
    numbers = (*vectors, sequences, spec.capacity, spec.tokens, spec.blocks)
    grid, block = _shares(sequences * spec.capacity, sum(vectors))
    if grid[0]:
        kernel(rt, grid, block, cache.k, cache.v, k, v, cu_cached, cache.pages, *numbers)


def _vectors(cache: KVCacheSpec) -> tuple[int, int]:
    """The vectors of a token of k and of v."""
    return cache.groups * cache.k_head // cache.vector, cache.groups * cache.v_head // cache.vector


def _shares(tokens: int, vectors: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Grid and block for so many tokens of so many vectors; a grid of no blocks where there is nothing to do."""
    across = min(THREADS, 1 << max(vectors - 1, 0).bit_length())
    down = THREADS // across
    return (-(-tokens // down) if vectors else 0, -(-vectors // across)), (across, down)
