"""The KV cache, sequence by sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.kv_cache import KVAppendSpec, KVCache, KVCacheSpec

Array = npt.NDArray[Any]


def kv_append(
    rt: Runtime, spec: KVAppendSpec, new_k: Tensor, new_v: Tensor, cache: KVCache, cu_new: Tensor, cu_cached: Tensor
) -> None:
    """Copy each sequence's new tokens to its end."""
    first, last = cu_new.numpy(), cu_cached.numpy()
    for new, old in ((new_k.numpy(), cache.k.numpy()), (new_v.numpy(), cache.v.numpy())):
        for row in range(len(first) - 1):
            tokens = _tokens(new, spec.form, row, int(first[row]), int(first[row + 1]))
            begin = int(last[row + 1] - last[row]) - int(first[row + 1] - first[row])
            position = np.arange(begin, begin + len(tokens))
            where, inside = _places(cache, row, position)
            old.reshape(-1, *old.shape[2:])[where] = tokens[inside]


def _tokens(new: Array, form: str, row: int, begin: int, end: int) -> Array:
    """The new tokens of one sequence."""
    if form == "thd":
        return new[begin:end]
    mine = new[row] if form == "bshd" else new[:, row]
    return mine[: max(end - begin, 0)]


def _places(cache: KVCache, row: int, position: Array) -> tuple[Array, Array]:
    """Which tokens of the cache, its pages or rows flattened, these positions are; and which exist at all."""
    inside = (position >= 0) & (position < cache.capacity)
    position = position[inside]
    if cache.pages is None:
        return row * cache.capacity + position, inside
    size = cache.k.shape[1]
    page = cache.pages.numpy()[row, position // size].astype(np.int64)
    exists = (page >= 0) & (page < cache.k.shape[0])
    inside[inside] = exists
    return (page * size + position % size)[exists], inside


def kv_move(rt: Runtime, spec: KVCacheSpec, cache: KVCache, moves: Tensor, longest: int) -> None:
    """Copy row after row."""
    for store in (cache.k.numpy(), cache.v.numpy()):
        spare = np.empty(store.shape[1:], store.dtype)
        for to, source, tokens in moves.numpy():
            if max(to, source) >= cache.rows:
                continue
            n = min(tokens, longest)
            (spare if to < 0 else store[to])[:n] = (spare if source < 0 else store[source])[:n]


def kv_gather(rt: Runtime, spec: KVCacheSpec, cache: KVCache, cu_cached: Tensor, k: Tensor, v: Tensor) -> None:
    """Copy the tokens of each sequence from its pages."""
    lengths = np.diff(cu_cached.numpy())
    for old, out in ((cache.k.numpy(), k.numpy()), (cache.v.numpy(), v.numpy())):
        out[...] = 0
        for row in range(len(lengths)):
            where, inside = _places(cache, row, np.arange(lengths[row]))
            out[row, np.nonzero(inside)[0]] = old.reshape(-1, *old.shape[2:])[where]
