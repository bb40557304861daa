"""The KV cache on CUDA: kernels/kv_cache.cu, in the widest vectors that all addresses and strides allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_core.attention import DIMENSIONS
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.kv_cache import KVCache

THREADS = 256


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One launch: its kernel, how tokens and their vectors are dealt out, and the numbers behind the pointers."""

    kernel: Kernel
    grid: tuple[int, int]
    block: tuple[int, int]
    numbers: tuple[int, ...]
    family: str = "kv_cache"


def plan_kv_append(rt: Runtime, form: str, new_k: Tensor, new_v: Tensor, cache: KVCache, rows: int) -> CopyPlan:
    """Strides and sizes in vectors."""
    width = _width(cache.k, cache.v, new_k, new_v)
    batch, token, head = DIMENSIONS[form]
    strides = []
    for t in (new_k, new_v):
        step = t.row_major_strides()
        counts = (step[token], 0 if batch is None else step[batch], step[head])
        strides += [n * t.dtype.itemsize // width for n in counts]
    k, v = (t.shape[3] * t.dtype.itemsize // width for t in (cache.k, cache.v))
    groups, tokens = cache.k.shape[2], new_k.shape[token]
    numbers = (*strides, k, v, groups, rows, tokens, cache.capacity, cache.k.shape[1], cache.k.shape[0])
    constants = {"WIDTH": width, "PACKED": int(batch is None), "PAGED": int(cache.pages is not None)}
    kernel = loader.get(rt, "kv_cache", entry="kv_append", args="p" * 7 + "q" * 6 + "i" * 8, **constants)
    slots = tokens if batch is None else rows * tokens
    return CopyPlan(kernel, *_shares(slots if rows else 0, groups * (k + v)), numbers)


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


def plan_kv_move(rt: Runtime, cache: KVCache, longest: int) -> CopyPlan:
    """All rows of a place in them are one thread's."""
    width = _width(cache.k, cache.v)
    k, v = _vectors(cache, width)
    kernel = loader.get(rt, "kv_cache", entry="kv_move", args="pppiiiiii", WIDTH=width, PACKED=0, PAGED=0)
    return CopyPlan(kernel, *_shares(longest, k + v), (longest, cache.capacity, k, v, cache.rows))


def kv_move(rt: Runtime, plan: CopyPlan, cache: KVCache, moves: Tensor) -> None:
    """Move row after row."""
    if plan.grid[0]:
        plan.kernel(rt, plan.grid, plan.block, cache.k.ptr, cache.v.ptr, moves.ptr, moves.shape[0], *plan.numbers)


def plan_kv_gather(rt: Runtime, cache: KVCache, rows: int) -> CopyPlan:
    """A thread for each vector of the result, zeros included."""
    width = _width(cache.k, cache.v)
    k, v = _vectors(cache, width)
    kernel = loader.get(rt, "kv_cache", entry="kv_gather", args="p" * 6 + "i" * 6, WIDTH=width, PACKED=0, PAGED=1)
    numbers = (k, v, rows, cache.capacity, cache.k.shape[1], cache.k.shape[0])
    return CopyPlan(kernel, *_shares(rows * cache.capacity, k + v), numbers)


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


def _width(*tensors: Tensor) -> int:
    """The bytes of the widest vector that divides every address, stride and head of these tensors."""
    bits = 16
    for t in tensors:
        step = t.row_major_strides()
        bits |= t.ptr
        for n in (*(s for s, count in zip(step[:-1], t.shape[:-1], strict=True) if count > 1), t.shape[-1]):
            bits |= n * t.dtype.itemsize
    return bits & -bits


def _vectors(cache: KVCache, width: int) -> tuple[int, int]:
    """The vectors of a token of k and of v."""
    k, v = (t.shape[2] * t.shape[3] * t.dtype.itemsize // width for t in (cache.k, cache.v))
    return k, v


def _shares(tokens: int, vectors: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Grid and block for so many tokens of so many vectors; a grid of no blocks where there is nothing to do."""
    across = min(THREADS, 1 << max(vectors - 1, 0).bit_length())
    down = THREADS // across
    return (-(-tokens // down) if vectors else 0, -(-vectors // across)), (across, down)
