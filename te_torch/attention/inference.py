"""Keys and values kept between calls of a model that generates: `InferenceParams`, and the caches behind it.

    params = InferenceParams(max_batch_size, max_sequence_length, num_heads_kv, head_dim_k, dtype)
    params.pre_step(OrderedDict({7: 12, 9: 5}))       # before each call: which sequences, how many new tokens each
    model(hidden_states, inference_params=params)     # each layer's attention calls params.step

Row i of the batch is the i-th sequence of that step. Lengths, page tables and caches keep their addresses, and a step
depends on no value that the host knows: captured once, it serves all steps of the same shape.

The older form, `InferenceParams(max_batch_size, max_sequence_length)`, learns the sizes at the first use. All its
sequences are equally long, and the caller advances `sequence_len_offset`.

No gradient goes through a cache: generate under torch.no_grad() or torch.inference_mode().
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from te_core import ops
from te_core.attention import DIMENSIONS, FORMATS, bucket
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import KVCache
from te_core.tensor import Tensor
from te_torch.attention.masks import AttentionArgumentError
from te_torch.runtime import constant_at_trace, runtime_for, to_core, to_torch

Sequences = OrderedDict[int, int]  # id -> tokens, in the order of the batch's rows
Stepped = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, str]

CACHE_FORMAT = "bshd"
_SPARE = -1  # the row of `ops.kv_move` that is none of the cache
_ALIGNED = 64  # elements: each of the lengths that share a buffer begins at a round address


def full(what: str, room: str) -> UnsupportedError:
    """The documented RuntimeError."""
    return UnsupportedError("KV cache is full! pre_step", what, room, "let sequences finish first, or make more room")


# ------------------------------------------------------------------------------------------------- the managers


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
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor, qkv_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Append the new tokens; `cu_cached_seqlens` counts them in. The caches of k and v."""
        raise NotImplementedError


class _DeviceCacheManager(KVCacheManager):
    """A cache in one piece of memory for each layer and each of k and v."""

    def __init__(
        self, max_batch_size: int, max_sequence_length: int, num_heads_kv: int, head_dim_k: int, dtype: torch.dtype,
        head_dim_v: int | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.dtype = num_heads_kv, dtype
        self.head_dims = (head_dim_k, head_dim_k if head_dim_v is None else head_dim_v)
        self.device = _device(device)
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
        """Without the views: their addresses are those of this manager's memory."""
        return {**self.__dict__, "_views": {}}

    def _append(
        self, layer_number: int, new: tuple[torch.Tensor, torch.Tensor], cu: tuple[torch.Tensor, torch.Tensor],
        form: str, first: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Append to the rows from `first`; these rows, or all pages."""
        rows = cu[0].shape[0] - 1
        found = self._views.get((layer_number, first, rows))
        if found is None:
            found = self._view(layer_number, first, rows)
        k, v, cache = found
        ops.kv_append(
            runtime_for(new[0]), _strided(new[0]), _strided(new[1]), cache, to_core(cu[0]), to_core(cu[1]), form=form
        )
        return k, v

    def _view(self, layer_number: int, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, KVCache]:
        """What an append to these rows writes to, made once."""
        if layer_number not in self.cache:
            self.allocate_memory(layer_number)
        k, v = self.cache[layer_number]
        pages = self._pages(rows)
        if pages is None:
            with torch.inference_mode(False):
                k, v = k[first : first + rows], v[first : first + rows]
        found = self._views[layer_number, first, rows] = (k, v, KVCache(to_core(k), to_core(v), pages))
        return found

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor, qkv_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Append the new tokens; the rows of these sequences, or all pages."""
        return self._append(layer_number, (new_k, new_v), (cu_new_seqlens, cu_cached_seqlens), qkv_format)

    def _checked(self, step_dict: Sequences) -> Sequences:
        """The sequences after the step, if there is room for them."""
        after = _following(self.sequences, step_dict)
        if len(after) > self.max_batch_size:
            raise full(f"{len(after)} sequences", f"max_batch_size={self.max_batch_size}")
        for name, tokens in after.items():
            if tokens > self.max_sequence_length:
                raise full(f"{tokens} tokens of sequence {name}", f"max_sequence_length={self.max_sequence_length}")
        return after


class NonPagedKVCacheManager(_DeviceCacheManager):
    """Caches [max_batch_size, max_sequence_length, heads, head dim], a row for each sequence."""

    def pre_step(self, step_dict: Sequences) -> Sequences:
        """Also moves rows, so that row i is the i-th sequence of the step."""
        after = self._checked(step_dict)
        rows = {name: row for row, name in enumerate(self.sequences)}
        held = list(self.sequences.values())
        moves = _moves({to: rows[name] for to, name in enumerate(after) if name in rows}, held)
        if moves and self.cache:
            staged = to_core(_staged(moves, self.device).to(self.device, non_blocking=True))
            longest = bucket(max(tokens for _, _, tokens in moves))
            for k, v in self.cache.values():
                ops.kv_move(runtime_for(k), KVCache(to_core(k), to_core(v)), staged, longest=longest)
        self.sequences = after
        return after


class PagedKVCacheManager(_DeviceCacheManager):
    """Caches [total_num_pages, page_size, heads, head dim]; a sequence has as many pages as its tokens need.

    On its own (as `custom_cache_manager`) it may have fewer pages than all sequences at full length would need.
    """

    def __init__(
        self, max_batch_size: int, max_sequence_length: int, num_heads_kv: int, head_dim_k: int, dtype: torch.dtype,
        head_dim_v: int | None = None, device: torch.device | str | None = None, *, total_num_pages: int,
        page_size: int,
    ) -> None:  # fmt: skip
        super().__init__(
            max_batch_size, max_sequence_length, num_heads_kv, head_dim_k, dtype, head_dim_v, device
        )  # fmt: skip
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
                self.page_table[: len(rows)].copy_(_staged(rows, self.device), non_blocking=True)
        self.free_pages, self.allocated_pages, self.sequences = free, pages, after
        return after


# ------------------------------------------------------------------------------------------------ InferenceParams


class InferenceParams:
    """The KV cache of a model's layers, and the lengths of the sequences in it."""

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: KVCacheManager | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """`device` (default: the current CUDA device, or the CPU where there is none) is that of the model."""
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k, self.dtype = num_heads_kv, head_dim_k, dtype
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        if isinstance(custom_cache_manager, PagedKVCacheManager):
            is_paged, page_size = True, custom_cache_manager.page_size
            total_num_pages = custom_cache_manager.total_num_pages
        self.is_paged, self.total_num_pages, self.page_size = is_paged, total_num_pages, page_size
        self.max_ctx_len = max_ctx_len
        self.device = _device(device)
        sizes = (num_heads_kv, head_dim_k, dtype)
        #: The two-argument form: the caller advances `sequence_len_offset`, and sizes are those of the first k and v.
        self.is_older_form = sizes == (None, None, None) and custom_cache_manager is None
        self.sequence_len_offset = 0
        self.batch_size_offset = 0
        self._check(sizes, qkv_format, custom_cache_manager is not None)
        self.input_qkv_format, self.cache_qkv_format = qkv_format, CACHE_FORMAT
        self.output_qkv_format = _output_format(qkv_format)
        self.sequences: Sequences = OrderedDict()
        self.batch_size = 0
        self.max_seqlen_q = max_ctx_len or 0  # thd: no sequence of this step has more new tokens
        self._new_tokens: list[int] = []
        room = -(-(max_batch_size + 1) // _ALIGNED) * _ALIGNED
        self._room = room
        self._place()
        self.cache_manager: Any = custom_cache_manager
        if custom_cache_manager is None and not self.is_older_form:
            self.cache_manager = self._manager(num_heads_kv, head_dim_k, self.head_dim_v, dtype)

    def _check(self, sizes: tuple[object, ...], qkv_format: str, custom: bool) -> None:
        """The documented conditions, and that the format exists."""
        _require(
            min(self.max_batch_size, self.max_sequence_length) > 0,
            f"max_batch_size={self.max_batch_size}, max_sequence_length={self.max_sequence_length}",
            "positive numbers", "make room for a sequence and a token at least",
        )  # fmt: skip
        _require(
            self.is_older_form or None not in sizes, f"num_heads_kv, head_dim_k, dtype = {sizes}",
            "all three of them (or only max_batch_size and max_sequence_length, the older form)", "pass all three",
        )  # fmt: skip
        _require(qkv_format in FORMATS, f"qkv_format={qkv_format!r}", " or ".join(FORMATS), "choose one of these")
        _require(
            qkv_format != "thd" or (self.max_ctx_len is not None and not self.is_older_form),
            f"qkv_format='thd' with max_ctx_len={self.max_ctx_len}", "the longest context of a new sequence",
            "pass max_ctx_len, and the sizes of the cache",
        )  # fmt: skip
        if not self.is_paged or custom:
            return
        size, count = self.page_size, self.total_num_pages
        _require(
            not self.is_older_form, "is_paged in the two-argument form", "a contiguous cache",
            "pass num_heads_kv, head_dim_k and dtype",
        )  # fmt: skip
        _require(
            size is not None and size > 0 and self.max_sequence_length % size == 0,
            f"max_sequence_length={self.max_sequence_length} with page_size={size}", "whole pages",
            "choose a page_size that divides max_sequence_length",
        )  # fmt: skip
        wanted = self.max_batch_size * self.max_sequence_length // (size or 1)
        _require(
            count == wanted, f"total_num_pages={count}", f"{wanted}: max_batch_size * max_sequence_length / page_size",
            "pass this number, or a PagedKVCacheManager with fewer pages as custom_cache_manager",
        )  # fmt: skip

    def _place(self) -> None:
        """Memory for the lengths, on the device."""
        with torch.inference_mode(False):
            self._lengths = torch.zeros((3, self._room), dtype=torch.int32, device=self.device)
        self._divide()

    def _divide(self) -> None:
        """The views of that memory, and what is kept of them."""
        count = self.max_batch_size
        with torch.inference_mode(False):
            self.cu_seqlens_q = self._lengths[0, : count + 1]
            self.cu_seqlens_kv = self._lengths[1, : count + 1]
            self._seqlens_pre_step = self._lengths[2, :count]
        self._cu: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the lengths of so many rows
        self._spans: tuple[tuple[int, int, int], torch.Tensor, torch.Tensor] | None = None
        self._pre: tuple[int, torch.Tensor] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._divide()  # pickled views are not views any more

    def _manager(self, heads: Any, head_dim_k: Any, head_dim_v: Any, dtype: Any) -> _DeviceCacheManager:
        sizes = (self.max_batch_size, self.max_sequence_length, heads, head_dim_k, dtype, head_dim_v, self.device)
        if self.is_paged:
            pages: dict[str, Any] = {"total_num_pages": self.total_num_pages, "page_size": self.page_size}
            return PagedKVCacheManager(*sizes, **pages)
        return NonPagedKVCacheManager(*sizes)

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        self.sequences, self.batch_size, self._new_tokens = OrderedDict(), 0, []
        self.sequence_len_offset = self.batch_size_offset = 0
        self._lengths.zero_()
        if self.cache_manager is not None:
            self.cache_manager.reset()

    def allocate_memory(self, layer_number: int) -> None:
        """Make the caches of a layer; its first `step` does it otherwise."""
        if self.cache_manager is None:
            raise ArgumentError(
                "InferenceParams.allocate_memory", "the two-argument form", "sizes that are known",
                "leave it to the first step, or pass num_heads_kv, head_dim_k and dtype",
            )  # fmt: skip
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: Sequences) -> None:
        """Say what the next call of the model brings: {sequence id: new tokens}, in the order of the batch's rows.

        An id that is not there any more has finished, a new one brings its context, and every other one brings
        exactly one token. If there is no room, nothing has changed.
        """
        if self.is_older_form:
            raise ArgumentError(
                "InferenceParams.pre_step", "the two-argument form", "the form with sizes",
                "pass num_heads_kv, head_dim_k and dtype, or advance sequence_len_offset instead",
            )  # fmt: skip
        if self.max_ctx_len is not None:
            most = max(step_dict.values(), default=0)
            if most > self.max_ctx_len:
                raise ArgumentError(
                    "InferenceParams.pre_step", f"{most} new tokens", f"at most max_ctx_len={self.max_ctx_len}",
                    "raise max_ctx_len",
                )  # fmt: skip
        self.sequences = OrderedDict(self.cache_manager.pre_step(step_dict))
        if self.max_ctx_len is not None:
            # Two values only, so that the attention needs two plans: for prefill and for decoding.
            self.max_seqlen_q = self.max_ctx_len if most > 1 else 1
        self.batch_size = len(self.sequences)
        after = list(self.sequences.values())
        self._new_tokens = [step_dict[name] for name in self.sequences]
        before = [a - new for a, new in zip(after, self._new_tokens, strict=True)]
        size = self._lengths.shape[1]
        rows = [_running_sums(self._new_tokens, size), _running_sums(after, size), before + [0] * (size - len(before))]
        self._lengths.copy_(_staged(rows, self.device), non_blocking=True)

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """int32 [max_batch_size]: how long each sequence was before this step, where its new tokens begin."""
        if not self.is_older_form:
            return self._seqlens_pre_step
        if self._pre is None or self._pre[0] != self.sequence_len_offset:
            offset = self.sequence_len_offset
            with torch.inference_mode(False):
                starts = torch.full((self.max_batch_size,), offset, dtype=torch.int32, device=self.device)
            self._pre = (offset, starts)
        return self._pre[1]

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str | None = None
    ) -> Stepped:
        """Append a layer's new k and v: (k cache, v cache, cu_seqlens_q, cu_seqlens_kv, capacity, their formats).

        In sbhd and bshd the caches and lengths are those of the batch's rows, which may be more than there are
        sequences; in thd those of `max_batch_size` rows, so that shapes do not change while sequences come and go.
        """
        form = self.input_qkv_format if qkv_format is None else qkv_format
        if torch.compiler.is_compiling() and _make_eager():
            stepped: Stepped = _eager_step(self, layer_number, new_k, new_v, form)
            return stepped
        if form not in FORMATS or (form == "thd" and self.max_ctx_len is None):
            raise ArgumentError(
                "InferenceParams.step", f"qkv_format={form!r}, max_ctx_len={self.max_ctx_len}",
                " or ".join(FORMATS) + ", thd with max_ctx_len", "correct qkv_format, or pass max_ctx_len",
            )  # fmt: skip
        if new_k.device != self.device and self.is_older_form and self.cache_manager is None:
            self.device = new_k.device  # nothing is allocated before the first k and v say where they are
            self._place()
        if new_k.device != self.device:
            raise ArgumentError(
                "InferenceParams.step", f"k on {new_k.device}", f"{self.device}, where the cache is",
                "pass device= to InferenceParams",
            )  # fmt: skip
        self.input_qkv_format, self.output_qkv_format = form, _output_format(form)
        if self.is_older_form:
            return self._step_at_offset(layer_number, new_k, new_v, form)
        rows = self._rows(new_k, form)
        cu = self._cu.get(rows)
        if cu is None:
            with torch.inference_mode(False):
                cu = self._cu[rows] = (self.cu_seqlens_q[: rows + 1], self.cu_seqlens_kv[: rows + 1])
        k, v = self.cache_manager.step(layer_number, new_k, new_v, *cu, form)
        return k, v, *cu, self.max_sequence_length, self.output_qkv_format

    def _rows(self, new_k: torch.Tensor, form: str) -> int:
        """The rows of the batch, once it is clear that the new tokens fit what pre_step announced."""
        batch, token, _ = DIMENSIONS[form]
        rows, tokens = self.max_batch_size if batch is None else new_k.shape[batch], new_k.shape[token]
        counts = self._new_tokens
        least = sum(counts) if batch is None else max(counts, default=0)
        if not self.batch_size <= rows <= self.max_batch_size or tokens < least or not counts:
            raise ArgumentError(
                "InferenceParams.step", f"k {tuple(new_k.shape)} in {form}",
                f"{self.batch_size} to {self.max_batch_size} rows and at least {least} tokens, as pre_step announced",
                "call pre_step with the sequences of this step before the model",
            )  # fmt: skip
        return rows

    def _step_at_offset(self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, form: str) -> Stepped:
        """The older form: all rows from `batch_size_offset` get their tokens at `sequence_len_offset`."""
        batch, token, head = DIMENSIONS[form]
        assert batch is not None
        rows, tokens = new_k.shape[batch], new_k.shape[token]
        first, begin = self.batch_size_offset, self.sequence_len_offset
        if begin + tokens > self.max_sequence_length or first + rows > self.max_batch_size:
            raise full(
                f"rows {first} to {first + rows}, tokens {begin} to {begin + tokens}",
                f"max_batch_size={self.max_batch_size}, max_sequence_length={self.max_sequence_length}",
            )  # fmt: skip
        manager = self.cache_manager
        if manager is None:
            manager = self.cache_manager = self._manager(
                new_k.shape[head], new_k.shape[-1], new_v.shape[-1], new_k.dtype
            )
        if self._spans is None or self._spans[0] != (rows, tokens, begin):
            with torch.inference_mode(False):
                ends = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
                self._spans = ((rows, tokens, begin), ends * tokens, ends * (begin + tokens))
        _, self.cu_seqlens_q, self.cu_seqlens_kv = self._spans
        cu = (self.cu_seqlens_q, self.cu_seqlens_kv)
        k, v = manager._append(layer_number, (new_k, new_v), cu, form, first)
        return k, v, *cu, self.max_sequence_length, self.output_qkv_format

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of the live sequences [batch_size, max_sequence_length, heads, head dim], zeros behind their ends."""
        manager = self.cache_manager
        if not isinstance(manager, PagedKVCacheManager):
            raise ArgumentError(
                "InferenceParams.convert_paged_to_nonpaged", "a cache without pages", "is_paged=True",
                "read cache_manager.cache[layer_number], which is contiguous",
            )  # fmt: skip
        if layer_number not in manager.cache:
            raise ArgumentError(
                "InferenceParams.convert_paged_to_nonpaged", f"layer_number={layer_number}",
                f"a layer that has a cache: {', '.join(map(str, manager.cache)) or 'none yet'}",
                "let the layer take a step, or call allocate_memory, before",
            )  # fmt: skip
        k, v = manager.cache[layer_number]
        cache = KVCache(to_core(k), to_core(v), manager._pages(self.batch_size))
        found = ops.kv_gather(runtime_for(k), cache, to_core(self.cu_seqlens_kv[: self.batch_size + 1]))
        return to_torch(found[0]), to_torch(found[1])


# ------------------------------------------------------------------------------------------------------ helpers

_eager_step: Any = None  # InferenceParams.step for traced code: never traced, what it looks at changes in each step


@constant_at_trace
def _make_eager() -> bool:
    """Make `_eager_step`. At trace time: to import the compiler takes two seconds that others need not wait."""
    global _eager_step
    if _eager_step is None:
        import torch._dynamo

        _eager_step = torch._dynamo.disable(InferenceParams.step, reason="a KV cache runs eagerly")
    return True


def _following(sequences: Sequences, step_dict: Sequences) -> Sequences:
    """The sequences after a step, in the step's order."""
    after: Sequences = OrderedDict()
    for name, new in step_dict.items():
        had = sequences.get(name)
        if new < 0 or (had is not None and new != 1):
            raise ArgumentError(
                "InferenceParams.pre_step", f"{new} tokens for sequence {name}"
                + ("" if had is None else f", which is in the cache with {had}"),
                "any number for a new sequence, 1 for one that is in the cache: continuing it by several tokens at "
                "once is not expressible in pre_step",
                "bring the tokens one by one, or the whole sequence under a new id",
            )  # fmt: skip
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


def _running_sums(lengths: Iterable[int], size: int) -> list[int]:
    """0 and the running sums, the last one repeated up to `size`."""
    sums = [0]
    for n in lengths:
        sums.append(sums[-1] + n)
    return sums + [sums[-1]] * (size - len(sums))


def _staged(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """int32 on the host; pinned for a copy to a GPU, so that the host does not wait for it."""
    return torch.tensor(rows, dtype=torch.int32, pin_memory=device.type == "cuda")


def _device(device: torch.device | str | None) -> torch.device:
    """A device with its index."""
    found = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _strided(t: torch.Tensor) -> Tensor:
    """A core view with the tensor's strides, the last one 1."""
    if t.stride(-1) != 1:
        t = t.contiguous()
    view = to_core(t)
    view.strides = t.stride()
    return view


def _output_format(form: str) -> str:
    return f"{form}_2{CACHE_FORMAT}"


def _require(ok: bool, got: str, allowed: str, do: str) -> None:
    if not ok:
        raise AttentionArgumentError("InferenceParams", got, allowed, do)
