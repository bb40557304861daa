"""The documented helpers of attention under their documented names (`attention.dot_product_attention.utils`).

Layouts and masks come from the modules that use them; here is what exists for callers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_core import attention as core
from te_core.attention import AttentionSpec, Sizes, canonical_mask, diagonal_is_bottom_right, with_mask
from te_core.errors import ArgumentError
from te_torch.attention import choose, env
from te_torch.attention import masks as _masks
from te_torch.attention.compact import back_in_pairs, orders_of
from te_torch.attention.layouts import QKV_LAYOUTS, get_qkv_format, get_qkv_layout
from te_torch.attention.masks import (
    check_set_window_size,
    get_cu_seqlens,
    get_cu_seqlens_and_indices,
    get_full_cu_seqlens,
)
from te_torch.attention.plan import Fact, Key, Static, device_info, spec_of
from te_torch.doors import either
from te_torch.runtime import TO_CORE, default_device

QKVLayouts = QKV_LAYOUTS


def get_padding_mask(
    batch_size: int,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attention_type: str = "self",
) -> Any:
    """True where padding is: [b, 1, 1, s], for cross attention a tuple of two, one for q and one for k."""

    def mask(cu: torch.Tensor, longest: int) -> torch.Tensor:
        lengths = (cu[1 : batch_size + 1] - cu[:batch_size]).view(-1, 1, 1, 1)
        return torch.arange(longest, device=cu.device).view(1, 1, 1, -1) >= lengths

    q = mask(cu_seqlens_q, max_seqlen_q)
    return q if attention_type == "self" else (q, mask(cu_seqlens_kv, max_seqlen_kv))


def get_full_mask(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_mask_type: str = "no_mask",
    attention_mask: Any = None,
    window_size: tuple[int, int] | None = None,
    attention_type: str = "self",
    bottom_right_alignment: bool = True,
) -> tuple[str, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(effective mask type, mask of all that is hidden or None, lengths of q, of k): padding, diagonal and window.

    Padding may lie anywhere; diagonal and window count the tokens between.
    """
    name = canonical_mask("get_full_mask", attn_mask_type)
    window = check_set_window_size(name, window_size)
    spec = with_mask(AttentionSpec(1.0), name, window, diagonal_is_bottom_right(name, bottom_right_alignment))
    batch, device, orders = 1, torch.device("cpu"), None
    cu: _masks.Sums = (None, None)
    if spec.padded:
        if attention_mask is None:
            raise ArgumentError(
                "get_full_mask",
                f"attn_mask_type={attn_mask_type!r} without attention_mask",
                "a padding mask [b, 1, 1, s], or a tuple of two",
                "pass attention_mask",
            )
        given = attention_mask if isinstance(attention_mask, (tuple, list)) else (attention_mask,) * 2
        given = tuple(m.bool() for m in given)
        cu = cu_q, cu_kv = get_cu_seqlens(given[0]), get_cu_seqlens(given[1])
        batch, device = cu_q.shape[0] - 1, cu_q.device
        orders = orders_of(given, "bshd", cu_q, either(False, True))
    elif attention_mask is not None and not isinstance(attention_mask, (tuple, list)):
        device = attention_mask.device
    size = Sizes(batch, max_seqlen_q, max_seqlen_kv, 1, 1, 1, 1)
    found = _masks.hidden(spec, size, cu, attention_mask if name == "arbitrary" else None, device)
    if orders is not None and found is not None:
        found = back_in_pairs(found, orders)
    if window not in ((-1, -1), (-1, 0)):
        name = "arbitrary"
    q, kv = (None if sums is None else sums[1:] - sums[:-1] for sums in cu)
    return name, found, q, kv


def get_alibi(
    alibi_cache: dict[str, Any] | None,
    num_heads: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    alibi_slopes: torch.Tensor | None = None,
    actual_seqlens_q: torch.Tensor | None = None,
    actual_seqlens_kv: torch.Tensor | None = None,
    bias_dtype: torch.dtype | None = None,
    bottom_right_alignment: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slopes, bias [b|1, heads, sq, skv]) of ALiBi; lengths of sequences shift the diagonal. No cache is needed."""
    device = next((t.device for t in (alibi_slopes, actual_seqlens_q) if t is not None), torch.device("cpu"))
    if alibi_slopes is None:
        alibi_slopes = torch.tensor(core.alibi_slopes(num_heads), dtype=torch.float32, device=device)
    cu: _masks.Sums = (None, None)
    if actual_seqlens_q is not None and actual_seqlens_kv is not None:
        q, kv = (torch.nn.functional.pad(n.flatten().cumsum(0), (1, 0)) for n in (actual_seqlens_q, actual_seqlens_kv))
        cu = q, kv
    spec = AttentionSpec(1.0, padded=cu[0] is not None, bottom_right=bottom_right_alignment)
    size = Sizes(1, max_seqlen_q, max_seqlen_kv, num_heads, num_heads, 1, 1)
    return alibi_slopes, _masks.alibi_bias(spec, size, cu, alibi_slopes).to(bias_dtype or torch.float32)


@dataclass(eq=True)
class AttentionParams:
    """One attention, as `get_attention_backend` is asked about it."""

    qkv_type: Any = torch.Tensor
    qkv_dtype: torch.dtype = torch.bfloat16
    qkv_layout: str = "sbh3d"
    batch_size: int = 1
    num_heads: int = 16
    num_gqa_groups: int = 16
    max_seqlen_q: int = 128
    max_seqlen_kv: int = 128
    head_dim_qk: int = 64
    head_dim_v: int = 64
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    alibi_slopes_shape: Any = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias_shape: str | None = None
    core_attention_bias_requires_grad: bool = True
    pad_between_seqs: bool = False
    attention_dropout: float = 0.0
    context_parallel: bool = False
    cp_comm_type: str = "p2p"
    deterministic: bool = False
    is_training: bool = True
    fp8: bool = False
    fp8_meta: dict[str, Any] | None = None
    inference_params: Any = None
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    cuda_graph: bool = False
    num_splits: int = 1
    logit_softcap: float = 0.0

    def request(self) -> choose.Request:
        """The same as the rules of `choose` know it, on the GPU where there is one, else on the CPU."""
        heads = (self.num_heads, self.num_gqa_groups, self.head_dim_qk, self.head_dim_v)
        sizes = Sizes(self.batch_size, self.max_seqlen_q, self.max_seqlen_kv, *heads)
        weights = (self.head_dim_qk**-0.5, self.softmax_type, self.attention_dropout, self.return_max_logit)
        q = Fact((), self.qkv_dtype, default_device(), False)
        _, q_format, kv_format = get_qkv_format(self.qkv_layout, self.inference_params)
        key = Key(
            q,
            None,
            None,
            slopes=self.alibi_slopes_shape,
            form=q_format,
            kv_form=kv_format,
            mask_type=canonical_mask("AttentionParams", self.attn_mask_type),
            window=self.window_size,
            bottom_right=self.bottom_right_diagonal,
            bias_type=self.core_attention_bias_type,
            softcap=self.logit_softcap,
        )
        switches = env.now()
        spec = spec_of(Static(*heads, *weights, 1), key, sizes, self.deterministic or switches.deterministic)
        return choose.Request(
            device_info(q.device),
            TO_CORE[q.dtype],
            spec,
            sizes,
            key.mask_type,
            training=self.is_training,
            fp8="delayed" if self.fp8 else "",
            cached=self.inference_params is not None,
            paged=self.qkv_layout.startswith("paged_kv"),
            bias_grad=self.core_attention_bias_requires_grad and spec.bias == "post_scale_bias",
            gaps=self.pad_between_seqs,
            same_lengths=self.max_seqlen_q == self.max_seqlen_kv,
            num_splits=self.num_splits,
            switches=switches,
            installed=choose.installed(),
        )


def get_attention_backend(
    attention_params: AttentionParams,
) -> tuple[bool, str | None, bool, str | None, bool, list[bool]]:
    """(is FlashAttention used, which, is FusedAttention used, its kind, is Unfused used, [which of them could be])."""
    found = choose.decide(attention_params.request())
    able = [name for name, reason in found.reasons.items() if reason is None]
    if attention_params.context_parallel:  # one backend takes it
        able = [name for name in able if name == choose.FUSED]
        found = found._replace(backend=able[0] if able else None)
    flash = found.backend if found.backend in choose.FLASH else None
    fused = None
    if choose.FUSED in able:
        fused = "FP8" if attention_params.fp8 else "F16_arbitrary_seqlen"
    available = [any(name in choose.FLASH for name in able), choose.FUSED in able, choose.UNFUSED in able]
    return (flash is not None, flash, found.backend == choose.FUSED, fused, found.backend == choose.UNFUSED, available)


class _FlashAttentionUtils:
    """Which flash-attn packages this process has."""

    version = property(lambda self: choose.installed().flash2, doc="The version of flash-attn 2.")
    is_installed = property(lambda self: choose.installed().flash2 is not None, doc="flash-attn 2.")
    v3_is_installed = property(lambda self: choose.installed().flash3 is not None, doc="flash-attn 3.")
    v4_is_installed = property(lambda self: choose.installed().flash4 is not None, doc="flash-attn 4.")


FlashAttentionUtils = _FlashAttentionUtils()

__all__ = [
    "AttentionParams",
    "FlashAttentionUtils",
    "QKVLayouts",
    "check_set_window_size",
    "get_alibi",
    "get_attention_backend",
    "get_cu_seqlens",
    "get_cu_seqlens_and_indices",
    "get_full_cu_seqlens",
    "get_full_mask",
    "get_padding_mask",
    "get_qkv_format",
    "get_qkv_layout",
]
