"""The KV cache on CUDA: kernels/kv_cache.cu, in the widest vectors that all addresses and strides allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.kv_cache import KVAppendSpec, KVCache, KVCacheSpec, KVGatherSpec, KVMoveSpec

THREADS = 256


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One launch: its kernel, how tokens and their vectors are dealt out, and the numbers behind the pointers."""

    kernel: Kernel
    grid: tuple[int, int]
    block: tuple[int, int]
    numbers: tuple[int, ...]
    family: str = "kv_cache"


def plan_kv_append(rt: Runtime, spec: KVAppendSpec) -> CopyPlan:
    """Strides and sizes in vectors."""
    cache, width, packed = spec.cache, spec.cache.vector, spec.form == "thd"
    steps = [n // width for n in (*spec.k_steps, *spec.v_steps)]
    k, v = cache.k_head // width, cache.v_head // width
    places = (cache.capacity, cache.tokens, cache.blocks)
    numbers = (*steps, k, v, cache.groups, spec.sequences, spec.tokens, *places)
    constants = {"WIDTH": width, "PACKED": int(packed), "PAGED": int(cache.paged)}
    kernel = loader.get(rt, "kv_cache", entry="kv_append", args="p" * 7 + "q" * 6 + "i" * 8, **constants)
    slots = spec.tokens if packed else spec.sequences * spec.tokens
    return CopyPlan(kernel, *_shares(slots if spec.sequences else 0, cache.groups * (k + v)), numbers)


def kv_append(
    rt: Runtime, plan: CopyPlan, new_k: Tensor, new_v: Tensor, cache: KVCache, cu_new: Tensor, cu_cached: Tensor
) -> None:
    """Copy each sequence's new tokens to its end."""
    if plan.grid[0]:
        pages = 0 if cache.pages is None else cache.pages.ptr
        plan.kernel(
            rt,
            plan.grid,
            plan.block,
            new_k.ptr,
            new_v.ptr,
            cache.k.ptr,
            cache.v.ptr,
            cu_new.ptr,
            cu_cached.ptr,
            pages,
            *plan.numbers,
        )


def plan_kv_move(rt: Runtime, spec: KVMoveSpec) -> CopyPlan:
    """All rows of a place in them are one thread's."""
    k, v = _vectors(spec.cache)
    constants = {"WIDTH": spec.cache.vector, "PACKED": 0, "PAGED": 0}
    kernel = loader.get(rt, "kv_cache", entry="kv_move", args="pppiiiiii", **constants)
    numbers = (spec.longest, spec.cache.capacity, k, v, spec.cache.rows)
    return CopyPlan(kernel, *_shares(spec.longest, k + v), numbers)


def kv_move(rt: Runtime, plan: CopyPlan, cache: KVCache, moves: Tensor) -> None:
    """Move row after row."""
    if plan.grid[0]:
        plan.kernel(rt, plan.grid, plan.block, cache.k.ptr, cache.v.ptr, moves.ptr, moves.shape[0], *plan.numbers)


def plan_kv_gather(rt: Runtime, spec: KVGatherSpec) -> CopyPlan:
    """A thread for each vector of the result, zeros included."""
    cache = spec.cache
    k, v = _vectors(cache)
    constants = {"WIDTH": cache.vector, "PACKED": 0, "PAGED": 1}
    kernel = loader.get(rt, "kv_cache", entry="kv_gather", args="p" * 6 + "i" * 6, **constants)
    numbers = (k, v, spec.sequences, cache.capacity, cache.tokens, cache.blocks)
    return CopyPlan(kernel, *_shares(spec.sequences * cache.capacity, k + v), numbers)


def kv_gather(rt: Runtime, plan: CopyPlan, cache: KVCache, cu_cached: Tensor, k: Tensor, v: Tensor) -> None:
    """Copy the tokens of each sequence from its pages."""
    if plan.grid[0] and cache.pages is not None:
        plan.kernel(
            rt,
            plan.grid,
            plan.block,
            cache.k.ptr,
            cache.v.ptr,
            k.ptr,
            v.ptr,
            cu_cached.ptr,
            cache.pages.ptr,
            *plan.numbers,
        )


def _vectors(cache: KVCacheSpec) -> tuple[int, int]:
    """The vectors of a token of k and of v."""
    return cache.groups * cache.k_head // cache.vector, cache.groups * cache.v_head // cache.vector


def _shares(tokens: int, vectors: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Grid and block for so many tokens of so many vectors; a grid of no blocks where there is nothing to do."""
    across = min(THREADS, 1 << max(vectors - 1, 0).bit_length())
    down = THREADS // across
    return (-(-tokens // down) if vectors else 0, -(-vectors // across)), (across, down)
