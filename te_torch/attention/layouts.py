"""How q, k and v lie in memory: packed into one projection or apart, and the documented names of these layouts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from te_core.attention import FORMATS
from te_core.errors import ArgumentError
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec
from te_core.spelling import choice_error

_wrong = partial(ArgumentError, "DotProductAttention")

#: The documented names. A 3 or 2 marks tensors that are one in memory, and where they alternate.
QKV_LAYOUTS = (
    "sb3hd", "sbh3d", "sbhd_sb2hd", "sbhd_sbh2d", "sbhd_sbhd_sbhd",
    "bs3hd", "bsh3d", "bshd_bs2hd", "bshd_bsh2d", "bshd_bshd_bshd",
    "t3hd", "th3d", "thd_t2hd", "thd_th2d", "thd_thd_thd",
    "sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_bshd_bshd", "thd_sbhd_sbhd",
    "paged_kv_bshd_bshd_bshd", "paged_kv_sbhd_bshd_bshd", "paged_kv_thd_bshd_bshd",
    "paged_kv_bshd_sbhd_sbhd", "paged_kv_sbhd_sbhd_sbhd", "paged_kv_thd_sbhd_sbhd",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ packed inputs


def packed_inputs(
    q: torch.Tensor | None,
    others: tuple[Any, ...],
    qkv: torch.Tensor | None,
    kv: torch.Tensor | None,
    interleave_dim: int,
    form: str,
    cached: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, str, bool]:
    """(a, b, packing, interleaved) of qkv_layer or kv_layer; `others` are key_layer and value_layer."""
    if (qkv is not None and (kv is not None or q is not None)) or any(t is not None for t in others):
        allowed = "qkv_layer alone, or query_layer with kv_layer"
        raise _wrong("qkv_layer or kv_layer beside tensors that it holds", allowed, "pass each of q, k and v once")
    if cached:
        raise _wrong("packed inputs with inference_params", "q, k and v apart", "split the projection")
    if interleave_dim not in (-3, -2):
        raise _wrong(f"qkv_interleave_dim={interleave_dim}", "-3 (bs3hd) or -2 (bsh3d)", "correct it")
    name, t, count = ("qkv_layer", qkv, 3) if qkv is not None else ("kv_layer", kv, 2)
    assert t is not None
    dims = len(form) + 1
    if t.ndim != dims or t.shape[interleave_dim] != count:
        allowed = f"{dims} dimensions in {form} with {count} at {interleave_dim}"
        raise _wrong(f"{name} of shape {tuple(t.shape)}", allowed, "correct the shape, or qkv_interleave_dim")
    if t.stride(-1) != 1:
        raise _wrong(f"{name} with a last stride of {t.stride(-1)}", "a last stride of 1", "make it contiguous")
    if qkv is not None:
        return t, None, "qkv", interleave_dim == -2
    if q is None:
        raise _wrong("kv_layer without query_layer", "query_layer with kv_layer", "pass query_layer")
    return q, t, "kv", interleave_dim == -2


def check_packed(layer: tuple[int, int, int, int], t: torch.Tensor, packing: str, form: str) -> None:
    """The packed tensor has a row of these (heads, groups, d_qk, d_v) for each token."""
    heads, groups, d_qk, d_v = layer
    width = groups * (d_qk + d_v) + (heads * d_qk if packing == "qkv" else 0)
    row = t.shape[len(form) - 2 :].numel()
    # Of qkv_layer and kv_layer the heads are dimensions, so they have to be alike; a projection is rows only.
    alike = d_qk == d_v and (packing == "kv" or heads == groups)
    if row != width or (t.ndim >= len(form) and not (alike and t.shape[-1] == d_qk)):
        got = f"a packed tensor of shape {tuple(t.shape)} in {form}, {row} a token"
        allowed = f"{width} a token: {heads} heads and {groups} groups of widths {d_qk} and {d_v}"
        do = "check num_attention_heads, num_gqa_groups and kv_channels; pass q, k and v apart where these differ"
        raise _wrong(got, allowed, do)


def apart(layer: AttentionLayerSpec, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v [.., heads, d] as views of what they are packed into (`te_core.layers.attention` says how)."""
    if layer.packing == "separate":
        return inputs.a, inputs.b, inputs.c
    sizes = (layer.heads, layer.groups, layer.d_qk, layer.d_v)
    if layer.packing == "qkv":
        return heads_of(inputs.a, len(layer.core.q_format) - 2, sizes, layer.interleaved)
    _, k, v = heads_of(inputs.b, len(layer.core.kv_format) - 2, (0, *sizes[1:]), layer.interleaved)
    return inputs.a, k, v


def heads_of(
    packed: torch.Tensor, lead: int, sizes: tuple[int, ...], interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v [.., heads, d] as views of a row each behind `lead` dimensions; of (0, groups, d_qk, d_v) no q."""
    h, g, dk, dv = sizes
    row, times = packed.flatten(lead), h // g
    if interleaved:
        q, k, v = row.unflatten(-1, (g, times * dk + dk + dv)).split((times * dk, dk, dv), -1)
        return q.unflatten(-1, (times, dk)).flatten(-3, -2), k, v
    q, k, v = row.split((h * dk, g * dk, g * dv), -1)
    return q.unflatten(-1, (h, dk)), k.unflatten(-1, (g, dk)), v.unflatten(-1, (g, dv))


# -------------------------------------------------------------------------------------------- documented helpers


def get_qkv_layout(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qkv_format: str = "sbhd", inference_params: Any = None
) -> tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, str, str]:
    """(layout, q, k, v, format of q, format of k and v): how the three lie in memory, told by addresses and strides.

    A tensor whose last stride is not 1 is copied first. With inference_params k and v come from a cache (bshd).
    """
    if qkv_format not in FORMATS:
        raise choice_error("get_qkv_layout", "qkv_format", qkv_format, FORMATS)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    if inference_params is not None:
        layout = f"{qkv_format}_bshd_bshd"
        if getattr(inference_params, "is_paged", False):
            layout = f"paged_kv_{layout}"
        return layout, q, k, v, qkv_format, "bshd"
    lead = qkv_format[:-2]  # "sb", "bs" or "t"
    for packed, tensors in (((f"{lead}3hd", f"{lead}h3d"), (q, k, v)), ((f"{lead}2hd", f"{lead}h2d"), (k, v))):
        which = _packed_as(tensors)
        if which is not None:
            layout = packed[which] if len(tensors) == 3 else f"{qkv_format}_{packed[which]}"
            return layout, q, k, v, qkv_format, qkv_format
    return "_".join([qkv_format] * 3), q, k, v, qkv_format, qkv_format


def _packed_as(tensors: tuple[torch.Tensor, ...]) -> int | None:
    """0 if these are the parts of one dense tensor that alternate before the heads, 1 behind them; None if neither."""
    first, n = tensors[0], len(tensors)
    same = all(
        t.shape == first.shape
        and t.stride() == first.stride()
        and t.dtype == first.dtype
        and t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for t in tensors
    )
    if not same:
        return None
    heads, width = first.shape[-2:]
    steps = [b.storage_offset() - a.storage_offset() for a, b in zip(tensors, tensors[1:], strict=False)]
    for which, (step, head_stride) in enumerate(((heads * width, width), (width, n * width))):
        strides, token = [1, head_stride], n * heads * width
        for size in reversed(first.shape[:-2]):
            strides.append(token)
            token *= size
        if steps == [step] * (n - 1) and list(first.stride()) == strides[::-1]:
            return which
    return None


def get_qkv_format(qkv_layout: str = "bshd_bshd_bshd", inference_params: Any = None) -> tuple[str, str, str]:
    """(format of all, of q, of k and v) of a layout's name; the first is "thd_2bshd", say, where these differ."""
    parts = ["".join(c for c in part if c.isalpha()) for part in qkv_layout.replace("paged_kv_", "").split("_")]
    q_format, kv_format = parts[0], parts[-1]
    both = q_format if q_format == kv_format and inference_params is None else f"{q_format}_2{kv_format}"
    return both, q_format, kv_format
