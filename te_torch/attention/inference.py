"""Keys and values kept between calls of a model that generates: `InferenceParams`, over the caches of kv_cache.py.

Before each call of the model `pre_step` says which sequences there are and how many new tokens each has; each layer's
attention calls `step`. Row i of the batch is the i-th sequence of that step. Lengths, page tables and caches keep their
addresses, and a step depends on no value that the host knows: captured once, it serves all steps of the same shape.

The older form, `InferenceParams(max_batch_size, max_sequence_length)`, learns the sizes at the first use. All its
sequences are equally long, and the caller advances `sequence_len_offset`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from te_core.attention import DIMENSIONS, FORMATS
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import KVCache
from te_core.ops import raw as ops
from te_core.spelling import choice_error
from te_torch.attention.kv_cache import (
    CACHE_FORMAT,
    DeviceCacheManager,
    KVCacheManager,
    NonPagedKVCacheManager,
    PagedKVCacheManager,
    Sequences,
    device_of,
    full,
    staged,
)
from te_torch.attention.masks import AttentionArgumentError
from te_torch.base.module import wants_grad
from te_torch.base.options import check_values
from te_torch.doors import never_traced
from te_torch.likeness import of_token
from te_torch.module_names import name_of
from te_torch.runtime import runtime_for, to_core, to_torch
from te_torch.values import NamedOptions

Stepped = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, str]

_wrong = partial(AttentionArgumentError, "InferenceParams")
_eager = never_traced("a KV cache runs eagerly")  # what it looks at changes in each step
_ALIGNED = 64  # elements: each of the lengths that share a buffer begins at a round address


class InferenceParams(NamedOptions):
    """The KV cache of a model's layers, and the lengths of the sequences in it.

    Raises:
        AttentionArgumentError: Sizes or pages do not fit together.

    Example:
        cache = te.InferenceParams(2, 64, num_heads_kv=4, head_dim_k=64, dtype=torch.float32, device="cpu")
        layer = te.MultiheadAttention(256, 4, layer_number=1, attn_mask_type="padding_causal", qkv_format="bshd",
                                      attention_dropout=0.0, device="cpu").eval()
        cache.pre_step({0: 16, 1: 16})  # two sequences bring 16 tokens each
        with torch.no_grad():
            y = layer(torch.randn(2, 16, 256), inference_params=cache)
    """

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
        check_values("InferenceParams", {k: v for k, v in locals().items() if k not in ("self", "__class__")})
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k, self.dtype = num_heads_kv, head_dim_k, dtype
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        if isinstance(custom_cache_manager, PagedKVCacheManager):
            is_paged, page_size = True, custom_cache_manager.page_size
            total_num_pages = custom_cache_manager.total_num_pages
        self.is_paged, self.total_num_pages, self.page_size = is_paged, total_num_pages, page_size
        self.max_ctx_len = max_ctx_len
        self.device = device_of(device)
        sizes = (num_heads_kv, head_dim_k, dtype)
        #: The two-argument form: the caller advances `sequence_len_offset`, and sizes are those of the first k and v.
        self.is_older_form = sizes == (None, None, None) and custom_cache_manager is None
        self.sequence_len_offset = 0
        self.batch_size_offset = 0
        self._check(sizes, qkv_format, custom_cache_manager is not None)
        self.input_qkv_format, self.cache_qkv_format = qkv_format, CACHE_FORMAT
        self.output_qkv_format = f"{qkv_format}_2{CACHE_FORMAT}"
        self.sequences: Sequences = OrderedDict()
        self.batch_size = 0
        self.max_seqlen_q = max_ctx_len or 0  # thd: no sequence of this step has more new tokens
        self._new_tokens: list[int] = []
        self._owners: dict[int, int] = {}  # by layer_number, the attention that steps, by its token
        self._place()
        self.cache_manager: Any = custom_cache_manager
        if custom_cache_manager is None and not self.is_older_form:
            self.cache_manager = self._manager(num_heads_kv, head_dim_k, self.head_dim_v, dtype)

    def _check(self, sizes: tuple[object, ...], qkv_format: str, custom: bool) -> None:
        """The documented conditions, and that the format exists."""
        if not self.is_older_form and None in sizes:
            allowed = "all three of them (or only max_batch_size and max_sequence_length, the older form)"
            raise _wrong(f"num_heads_kv, head_dim_k, dtype = {sizes}", allowed, "pass all three")
        if qkv_format not in FORMATS:
            raise choice_error("InferenceParams", "qkv_format", qkv_format, FORMATS, AttentionArgumentError)
        if qkv_format == "thd" and (self.max_ctx_len is None or self.is_older_form):
            got, do = f"'thd' with max_ctx_len={self.max_ctx_len}", "pass max_ctx_len, and the sizes of the cache"
            raise _wrong(f"qkv_format={got}", "the longest context of a new sequence", do)
        if not self.is_paged or custom:
            return
        size, count = self.page_size, self.total_num_pages
        if self.is_older_form:
            do = "pass num_heads_kv, head_dim_k and dtype"
            raise _wrong("is_paged in the two-argument form", "a contiguous cache", do)
        if size is None or size <= 0 or self.max_sequence_length % size:
            got = f"max_sequence_length={self.max_sequence_length} with page_size={size}"
            raise _wrong(got, "whole pages", "choose a page_size that divides max_sequence_length")
        wanted = self.max_batch_size * self.max_sequence_length // size
        if count != wanted:
            allowed = f"{wanted}: max_batch_size * max_sequence_length / page_size"
            do = "pass this number, or a PagedKVCacheManager with fewer pages as custom_cache_manager"
            raise _wrong(f"total_num_pages={count}", allowed, do)

    def _place(self) -> None:
        """Memory for the lengths, on the device."""
        room = -(-(self.max_batch_size + 1) // _ALIGNED) * _ALIGNED
        with torch.inference_mode(False):
            self._lengths = torch.zeros((3, room), dtype=torch.int32, device=self.device)
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
        self.__dict__.update(state, _owners={})
        self._divide()  # pickled views are not views any more

    def _manager(self, heads: Any, head_dim_k: Any, head_dim_v: Any, dtype: Any) -> DeviceCacheManager:
        sizes = (self.max_batch_size, self.max_sequence_length, heads, head_dim_k, dtype, head_dim_v, self.device)
        if not self.is_paged:
            return NonPagedKVCacheManager(*sizes)
        pages: dict[str, Any] = {"total_num_pages": self.total_num_pages, "page_size": self.page_size}
        return PagedKVCacheManager(*sizes, **pages)

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        self.sequences, self.batch_size, self._new_tokens = OrderedDict(), 0, []
        self.sequence_len_offset = self.batch_size_offset = 0
        self._owners = {}
        self._lengths.zero_()
        if self.cache_manager is not None:
            self.cache_manager.reset()

    def allocate_memory(self, layer_number: int) -> None:
        """Make the caches of a layer; its first `step` does it otherwise."""
        if self.cache_manager is None:
            do = "leave it to the first step, or pass num_heads_kv, head_dim_k and dtype"
            raise _refused("allocate_memory", "the two-argument form", "sizes that are known", do)
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: Sequences) -> None:
        """Say what the next call of the model brings: {sequence id: new tokens}, in the order of the batch's rows.

        An id that is not there any more has finished, a new one brings its context, and every other one brings
        exactly one token. If there is no room, nothing has changed.
        """
        if self.is_older_form:
            do = "pass num_heads_kv, head_dim_k and dtype, or advance sequence_len_offset instead"
            raise _refused("pre_step", "the two-argument form", "the form with sizes", do)
        if self.max_ctx_len is not None:
            most = max(step_dict.values(), default=0)
            if most > self.max_ctx_len:
                allowed = f"at most max_ctx_len={self.max_ctx_len}"
                raise _refused("pre_step", f"{most} new tokens", allowed, "raise max_ctx_len")
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
        self._lengths.copy_(staged(rows, self.device), non_blocking=True)

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

    @_eager
    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str | None = None
    ) -> Stepped:
        """Append a layer's new k and v: (k cache, v cache, cu_seqlens_q, cu_seqlens_kv, capacity, their formats).

        In sbhd and bshd the caches and lengths are those of the batch's rows, which may be more than there are
        sequences; in thd those of `max_batch_size` rows, so that shapes do not change while sequences come and go.
        """
        form = self.input_qkv_format if qkv_format is None else qkv_format
        if form not in FORMATS or (form == "thd" and self.max_ctx_len is None):
            got, allowed = f"qkv_format={form!r}, max_ctx_len={self.max_ctx_len}", " or ".join(FORMATS)
            raise _refused("step", got, f"{allowed}, thd with max_ctx_len", "correct qkv_format, or pass max_ctx_len")
        if new_k.device != self.device and self.is_older_form and self.cache_manager is None:
            self.device = new_k.device  # nothing is allocated before the first k and v say where they are
            self._place()
        if new_k.device != self.device:
            allowed = f"{self.device}, where the cache is"
            raise _refused("step", f"k on {new_k.device}", allowed, "pass device= to InferenceParams")
        self.input_qkv_format, self.output_qkv_format = form, f"{form}_2{CACHE_FORMAT}"
        if self.is_older_form:
            return self._step_at_offset(layer_number, new_k, new_v, form)
        batch, token, _ = DIMENSIONS[form]
        rows, tokens = self.max_batch_size if batch is None else new_k.shape[batch], new_k.shape[token]
        counts = self._new_tokens
        least = sum(counts) if batch is None else max(counts, default=0)
        if not self.batch_size <= rows <= self.max_batch_size or tokens < least or not counts:
            allowed = f"{self.batch_size} to {self.max_batch_size} rows and at least {least} tokens"
            do = "call pre_step with the sequences of this step before the model"
            raise _refused("step", f"k {tuple(new_k.shape)} in {form}", f"{allowed}, as pre_step announced", do)
        cu = self._cu.get(rows)
        if cu is None:
            with torch.inference_mode(False):
                cu = self._cu[rows] = (self.cu_seqlens_q[: rows + 1], self.cu_seqlens_kv[: rows + 1])
        k, v = self.cache_manager.step(layer_number, new_k, new_v, *cu, form)
        return k, v, *cu, self.max_sequence_length, self.output_qkv_format

    @_eager
    def step_of(self, module: Any, new_k: torch.Tensor, new_v: torch.Tensor, form: str) -> Stepped:
        """The `step` of an attention, whose number no other one has."""
        number = module.layer_number
        owner = self._owners.setdefault(number, module._token)
        other = None if owner == module._token else of_token(owner)
        if other is not None:  # each would overwrite what the other one has cached
            got = f"layer_number={number} from {name_of(module)}, after {name_of(other)} has used it"
            do = "pass layer_number=1, 2, ... to the layers' constructors; reset() before another model takes the cache"
            raise _refused("step", got, "one layer for each layer_number: each has its own cache", do)
        self._owners[number] = module._token
        return self.step(number, new_k, new_v, form)

    def _step_at_offset(self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, form: str) -> Stepped:
        """The older form: all rows from `batch_size_offset` get their tokens at `sequence_len_offset`."""
        batch, token, head = DIMENSIONS[form]
        assert batch is not None
        rows, tokens = new_k.shape[batch], new_k.shape[token]
        first, begin = self.batch_size_offset, self.sequence_len_offset
        if begin + tokens > self.max_sequence_length or first + rows > self.max_batch_size:
            room = f"max_batch_size={self.max_batch_size}, max_sequence_length={self.max_sequence_length}"
            raise full(f"rows {first} to {first + rows}, tokens {begin} to {begin + tokens}", room)
        if self.cache_manager is None:
            sizes = new_k.shape[head], new_k.shape[-1], new_v.shape[-1]
            self.cache_manager = self._manager(*sizes, new_k.dtype)
        if self._spans is None or self._spans[0] != (rows, tokens, begin):
            with torch.inference_mode(False):
                ends = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
                self._spans = ((rows, tokens, begin), ends * tokens, ends * (begin + tokens))
        _, self.cu_seqlens_q, self.cu_seqlens_kv = self._spans
        cu = (self.cu_seqlens_q, self.cu_seqlens_kv)
        k, v = self.cache_manager.step(layer_number, new_k, new_v, *cu, form, first)
        return k, v, *cu, self.max_sequence_length, self.output_qkv_format

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of the live sequences [batch_size, max_sequence_length, heads, head dim], zeros behind their ends."""
        manager = self.cache_manager
        if not isinstance(manager, PagedKVCacheManager):
            do = "read cache_manager.cache[layer_number], which is contiguous"
            raise _refused("convert_paged_to_nonpaged", "a cache without pages", "is_paged=True", do)
        if layer_number not in manager.cache:
            allowed = f"a layer that has a cache: {', '.join(map(str, manager.cache)) or 'none yet'}"
            do = "let the layer take a step, or call allocate_memory, before"
            raise _refused("convert_paged_to_nonpaged", f"layer_number={layer_number}", allowed, do)
        k, v = manager.cache[layer_number]
        cache = KVCache(to_core(k), to_core(v), manager._pages(self.batch_size))
        found = ops.kv_gather(runtime_for(k), cache, to_core(self.cu_seqlens_kv[: self.batch_size + 1]))
        return to_torch(found[0]), to_torch(found[1])


# ------------------------------------------------------------------------------------------------------ helpers


class _CutOff(torch.autograd.Function):
    """A result whose gradient nobody can have: what it was computed of lies in a cache, as numbers."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *made_of: torch.Tensor | None) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        raise UnsupportedError(
            "DotProductAttention",
            "a backward through inference_params, whose cache holds keys and values without their gradients",
            "a KV cache in inference",
            "leave inference_params out where gradients are wanted, or call the model in torch.no_grad()",
        )


def cut_off(found: Any, *made_of: torch.Tensor | None) -> Any:
    """What attention over a cache gave, so that a backward says that there is none; forward alone goes on as ever."""
    return _cut(found, *made_of) if wants_grad(*made_of) else found


@_eager
def _cut(found: Any, *made_of: torch.Tensor | None) -> Any:
    out, *others = found if isinstance(found, tuple) else (found,)
    cut = _CutOff.apply(out, *made_of)
    return (cut, *others) if others else cut


def _running_sums(lengths: Iterable[int], size: int) -> list[int]:
    """0 and the running sums, the last one repeated up to `size`."""
    sums = [0, *accumulate(lengths)]
    return sums + [sums[-1]] * (size - len(sums))


def _refused(method: str, *said: str) -> ArgumentError:
    return ArgumentError(f"InferenceParams.{method}", *said)
