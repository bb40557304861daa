"""Attention as an exporter sees it: UnfusedDotProductAttention's rules in four dimensions, whose sizes may be symbols.

Keys and values are spread over the heads that share them. Folding heads into the batch would spare that, but
onnxscript's optimizer takes the reshapes around such a product for removable where sizes happen to agree.
A padding mask is read where it lies: nothing is sorted, and no length is asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from te_core.attention import AttentionSpec, Sizes
from te_core.layers.attention import AttentionInputs
from te_torch.attention import choose, env
from te_torch.attention.exported_fp8 import Rounding, rounding
from te_torch.attention.inputs import Given, layer_inputs, new_slopes
from te_torch.attention.layouts import apart
from te_torch.attention.masks import check_padding_mask, diagonal, hidden
from te_torch.attention.plan import Key, Plan, make_plan, wrong
from te_torch.attention.unfused import packed_tokens, padded_rows, softmax
from te_torch.export.layers import dropout_refused
from te_torch.runtime import outside_autocast


def attention(module: Any, key: Key, given: Given) -> Any:
    """What DotProductAttention gives for this call."""
    if key.score_mod:
        raise wrong("score_mod in an export", "attention without it", "leave score_mod out of what is exported")
    if module._static.context is not None:
        raise wrong("context parallelism in an export", "whole sequences", "export a module without a cp_group")
    plan = make_plan(module._static, key, env.now(), choose.UNFUSED)
    if plan.spec.dropout:
        raise dropout_refused()
    low = rounding(module, plan, given.a) if key.fp8 else None
    masks, prepare = None, plan.prepare
    if prepare.lengths in ("mask", "masks"):  # the padding of queries and of keys [b, s]
        mask = given.attention_mask
        both = mask if isinstance(mask, (tuple, list)) else (mask, mask)
        for one in both:
            check_padding_mask(one)
        q, kv = (one.flatten(1) for one in both)
        masks, prepare = (q, kv), prepare._replace(lengths="")
    inputs = layer_inputs(module, given, prepare, slopes_of=new_slopes)
    with outside_autocast(given.a):
        out, largest = _attend(plan, inputs, masks, low)
        if low is not None:
            out = low.output(out, given.fp8_output)
    return out if largest is None else (out, largest)


def _attend(
    plan: Plan, inputs: AttentionInputs, masks: tuple[torch.Tensor, torch.Tensor] | None, low: Rounding | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    spec, size = plan.spec, plan.request.sizes
    q, k, v = apart(plan.layer, inputs) if low is None else low.operands(plan.layer, inputs)
    tokens = q.shape[0]
    q = padded_rows(q, spec.q_format, size.sq, inputs.cu_q, inputs.cu_q_padded).transpose(1, 2)
    k, v = (padded_rows(t, spec.kv_format, size.skv, inputs.cu_kv, inputs.cu_kv_padded) for t in (k, v))
    times = size.heads // size.groups
    if times > 1:  # before heads and tokens change places: torch 2.11 guards on the strides of a copy made after it
        k, v = (t.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3) for t in (k, v))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    # Before the product, where float16 has room; in FP8 behind it, as eager code has it.
    scores = (q * spec.scale) @ k.transpose(-1, -2) if low is None else (q @ k.transpose(-1, -2)) * spec.scale
    if spec.softcap:
        scores = (spec.softcap * torch.tanh(scores.float() / spec.softcap)).to(scores.dtype)
    unseen, distance = _pairs(spec, size, inputs, masks)
    if inputs.bias is not None:
        scores = scores + inputs.bias
    elif spec.bias == "alibi":
        assert distance is not None
        slopes = inputs.slopes.view(-1, inputs.slopes.shape[-1], 1, 1)
        scores = scores + (-slopes * distance.abs()).to(scores.dtype)
    largest = None
    if spec.max_logit:
        seen = scores.float()
        seen = seen if unseen is None else seen.masked_fill(unseen, -torch.inf)
        largest = seen.amax((0, 2, 3))
    weights = softmax(scores, unseen, spec.softmax, inputs.sink)
    weights = weights if low is None else low.probabilities(weights)
    out = (weights @ v).transpose(1, 2)
    if spec.q_format == "thd":
        out = packed_tokens(out, tokens, inputs)
    elif spec.q_format == "sbhd":
        out = out.transpose(0, 1)
    return out.flatten(-2), largest


def _pairs(
    spec: AttentionSpec, size: Sizes, inputs: AttentionInputs, masks: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of pairs of a query and a key, [b|1, h|1, sq|1, skv]: which are not seen (None: each is), and their distance from
    the diagonal, None where nothing asks for it."""
    if masks is None:
        cu, device = (inputs.cu_q, inputs.cu_kv), inputs.a.device
        distance = diagonal(spec, size, cu, device) if spec.bias == "alibi" else None
        return hidden(spec, size, cu, inputs.mask, device), distance
    q, kv = masks
    # A token's place is that among the tokens before it that are no padding.
    q_place, kv_place = ((~m).cumsum(1, dtype=torch.int64) for m in masks)
    distance = kv_place[:, None, None, :] - q_place[:, None, :, None]
    if spec.bottom_right:
        distance = distance - (kv_place[:, -1] - q_place[:, -1]).view(-1, 1, 1, 1)
    unseen = q[:, None, :, None] | kv[:, None, None, :]
    if spec.left >= 0:
        unseen = unseen | (distance < -spec.left)
    if spec.right >= 0:
        unseen = unseen | (distance > spec.right)
    return unseen, distance
