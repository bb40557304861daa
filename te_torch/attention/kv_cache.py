"""Where keys and values are kept between calls: managers of caches in rows, and in pages.

A manager knows which row or which pages a sequence has, and puts its tokens there. `InferenceParams` tells it of steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from te_core.attention import bucket
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import KVCache
from te_core.ops import raw as ops
from te_core.tensor import Tensor
from te_torch.runtime import default_device, runtime_for, to_core

Sequences = OrderedDict[int, int]  # id -> tokens, in the order of the batch's rows

CACHE_FORMAT = "bshd"
_SPARE = -1  # the row of `ops.kv_move` that is none of the cache


def full(what: str, room: str) -> UnsupportedError:
    """The documented RuntimeError."""
    return UnsupportedError("KV cache is full! pre_step", what, room, "let sequences finish first, or make more room")


class KVCacheManager:
    """What `InferenceParams` asks of a cache; the base of a `custom_cache_manager`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer number
        self.sequences: Sequences = OrderedDict()

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        """Make `cache[layer_number]`."""
        raise NotImplementedError

    def pre_step(self, step_dict: Sequences) -> Sequences:
        """Forget absent sequences, take in new ones, advance the others by a token; the lengths after the step."""
        self.sequences = _following(self.sequences, step_dict)
        return self.sequences

    def step(
        self,
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor,
        qkv_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new tokens; `cu_cached_seqlens` counts them in. The caches of k and v."""
        raise NotImplementedError


class DeviceCacheManager(KVCacheManager):
    """A cache in one piece of memory for each layer and each of k and v."""

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.dtype = num_heads_kv, dtype
        self.head_dims = (head_dim_k, head_dim_k if head_dim_v is None else head_dim_v)
        self.device = device_of(device)
        self._views: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, KVCache]] = {}

    @property
    def _shape(self) -> tuple[int, int]:
        """The first two dimensions of the caches."""
        return self.max_batch_size, self.max_sequence_length

    def allocate_memory(self, layer_number: int) -> None:
        """Zeros: an attention multiplies what lies behind a sequence's end by zero, which a NaN would survive."""
        with torch.inference_mode(False):
            k, v = (
                torch.zeros((*self._shape, self.num_heads_kv, d), dtype=self.dtype, device=self.device)
                for d in self.head_dims
            )
        self.cache[layer_number] = (k, v)
        self._views.clear()

    def _pages(self, rows: int) -> Tensor | None:
        return None

    def __getstate__(self) -> dict[str, Any]:
        """Without the views: their addresses are those of this manager's memory, and of its memory until now. (torch
        moves what is on a CPU into shared memory, in place, if this is for another process.)
        """
        self._views.clear()
        return {**self.__dict__, "_views": {}}

    def step(
        self,
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor,
        qkv_format: str,
        first: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new tokens to the rows from `first` on; these rows, or all pages."""
        rows = cu_new_seqlens.shape[0] - 1
        found = self._views.get((layer_number, first, rows))
        if found is None:  # what an append to these rows writes to, made once
            if layer_number not in self.cache:
                self.allocate_memory(layer_number)
            k, v = self.cache[layer_number]
            pages = self._pages(rows)
            if pages is None:
                with torch.inference_mode(False):
                    k, v = k[first : first + rows], v[first : first + rows]
            found = self._views[layer_number, first, rows] = (k, v, KVCache(to_core(k), to_core(v), pages))
        k, v, cache = found
        new, cu = (_strided(new_k), _strided(new_v)), (to_core(cu_new_seqlens), to_core(cu_cached_seqlens))
        ops.kv_append(runtime_for(new_k), *new, cache, *cu, form=qkv_format)
        return k, v

    def _checked(self, step_dict: Sequences) -> Sequences:
        """The sequences after the step, if there is room for them."""
        after = _following(self.sequences, step_dict)
        if len(after) > self.max_batch_size:
            raise full(f"{len(after)} sequences", f"max_batch_size={self.max_batch_size}")
        for name, tokens in after.items():
            if tokens > self.max_sequence_length:
                raise full(f"{tokens} tokens of sequence {name}", f"max_sequence_length={self.max_sequence_length}")
        return after


class NonPagedKVCacheManager(DeviceCacheManager):
    """Caches [max_batch_size, max_sequence_length, heads, head dim], a row for each sequence."""

    def pre_step(self, step_dict: Sequences) -> Sequences:
        """Also moves rows, so that row i is the i-th sequence of the step."""
        after = self._checked(step_dict)
        rows = {name: row for row, name in enumerate(self.sequences)}
        lengths = list(self.sequences.values())
        moves = _moves({to: rows[name] for to, name in enumerate(after) if name in rows}, lengths)
        if moves and self.cache:
            plan = to_core(staged(moves, self.device).to(self.device, non_blocking=True))
            longest = bucket(max(tokens for _, _, tokens in moves))
            for k, v in self.cache.values():
                ops.kv_move(runtime_for(k), KVCache(to_core(k), to_core(v)), plan, longest=longest)
        self.sequences = after
        return after


class PagedKVCacheManager(DeviceCacheManager):
    """Caches [total_num_pages, page_size, heads, head dim]; a sequence has as many pages as its tokens need.

    On its own (as `custom_cache_manager`) it may have fewer pages than all sequences at full length would need.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        device: torch.device | str | None = None,
        *,
        total_num_pages: int,
        page_size: int,
    ) -> None:
        super().__init__(max_batch_size, max_sequence_length, num_heads_kv, head_dim_k, dtype, head_dim_v, device)
        self.total_num_pages, self.page_size = total_num_pages, page_size
        self.max_pages = -(-max_sequence_length // page_size)
        with torch.inference_mode(False):
            #: The pages of each row's sequence; page 0 stands where it has none.
            self.page_table = torch.zeros((max_batch_size, self.max_pages), dtype=torch.int32, device=self.device)
        self.free_pages: list[int] = list(range(total_num_pages))
        self.allocated_pages: dict[int, list[int]] = {}  # by sequence

    @property
    def _shape(self) -> tuple[int, int]:
        return self.total_num_pages, self.page_size

    def _pages(self, rows: int) -> Tensor:
        return to_core(self.page_table).rows(0, rows)

    def reset(self) -> None:
        """Forget all sequences; all pages are free."""
        super().reset()
        self.free_pages, self.allocated_pages = list(range(self.total_num_pages)), {}

    def pre_step(self, step_dict: Sequences) -> Sequences:
        """Also gives back the pages of absent sequences and takes those that new tokens need."""
        after = self._checked(step_dict)
        pages = {name: self.allocated_pages.get(name, []) for name in after}
        free = self.free_pages + [p for name, had in self.allocated_pages.items() if name not in after for p in had]
        wanted = {name: -(-tokens // self.page_size) - len(pages[name]) for name, tokens in after.items()}
        if sum(wanted.values()) > len(free):
            raise full(f"{sum(wanted.values())} more pages", f"{len(free)} free ones of {self.total_num_pages}")
        for name, count in wanted.items():
            if count:
                pages[name] = pages[name] + free[:count]
                del free[:count]
        if list(pages.items()) != list(self.allocated_pages.items()):
            rows = [[*had, *[0] * (self.max_pages - len(had))] for had in pages.values()]
            if rows:
                self.page_table[: len(rows)].copy_(staged(rows, self.device), non_blocking=True)
        self.free_pages, self.allocated_pages, self.sequences = free, pages, after
        return after

    def print_cache(self) -> None:
        """Print the pages in use, and for each row its sequence, how long it is and where it lies."""
        used = self.total_num_pages - len(self.free_pages)
        print(f"{type(self).__name__}: {used} of {self.total_num_pages} pages of {self.page_size} tokens in use")
        for row, (name, tokens) in enumerate(self.sequences.items()):
            pages = ", ".join(map(str, self.allocated_pages[name])) or "none"
            print(f"  row {row}: sequence {name}, {tokens} tokens in pages {pages}")


def _following(sequences: Sequences, step_dict: Sequences) -> Sequences:
    """The sequences after a step, in the step's order."""
    after: Sequences = OrderedDict()
    for name, new in step_dict.items():
        had = sequences.get(name)
        if new < 0 or (had is not None and new != 1):
            raise ArgumentError(
                "InferenceParams.pre_step",
                f"{new} tokens for sequence {name}" + ("" if had is None else f", which is in the cache with {had}"),
                "any number for a new sequence, 1 for one that is in the cache: continuing it by several tokens at "
                "once is not expressible in pre_step",
                "bring the tokens one by one, or the whole sequence under a new id",
            )
        after[name] = (had or 0) + new
    return after


def _moves(sources: dict[int, int], tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """(row to, row from, tokens) in an order in which no row is overwritten that is still to be read.

    `sources`: which row each row's sequence was in; `tokens` of each old row.
    """
    pending = {to: source for to, source in sources.items() if to != source}
    read = set(pending.values())
    found = []
    for start in [to for to in pending if to not in read]:
        to = start
        while to in pending:
            source = pending.pop(to)
            found.append((to, source, tokens[source]))
            to = source
    while pending:  # circles: the first row waits in the spare one
        first = to = next(iter(pending))
        found.append((_SPARE, first, tokens[first]))
        while (source := pending.pop(to)) != first:
            found.append((to, source, tokens[source]))
            to = source
        found.append((to, _SPARE, tokens[first]))
    return found


def staged(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """int32 on the host; pinned for a copy to a GPU, so that the host does not wait for it."""
    return torch.tensor(rows, dtype=torch.int32, pin_memory=device.type == "cuda")


def _strided(t: torch.Tensor) -> Tensor:
    """A core view with the tensor's strides, the last one 1."""
    if t.stride(-1) != 1:
        t = t.contiguous()
    return to_core(t, strided=True)


def device_of(device: torch.device | str | None) -> torch.device:
    """A device with its index."""
    found = default_device() if device is None else torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
