"""UnfusedDotProductAttention: torch operations, for any device, dtype, format, mask and softmax.

Scores are formed in q's dtype, with a bias added in it, but in float32 where a user's function changes them; the
softmax is float32; the weights go back to q's dtype before dropout and the product with v. Dropout draws its mask from
(seed, offset) as every dropout here does, so computing an attention again gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from te_core.attention import AttentionSpec, Sizes
from te_core.layers.attention import AttentionInputs
from te_torch.attention.fused import Results
from te_torch.attention.layouts import apart
from te_torch.attention.masks import alibi_bias, hidden, token_positions
from te_torch.attention.plan import OPERATION, Plan
from te_torch.attention.score_mod import Functions, modified
from te_torch.attention.softmax import fused_softmax
from te_torch.base.residual import bias_dropout_add
from te_torch.runtime import amp_dtype, no_memory


def run(
    plan: Plan, inputs: AttentionInputs, low: Any = None, functions: Functions | None = None, sizes: Sizes | None = None
) -> Results:
    """(out [.., heads * d_v] in q's format, largest logits or None). `low` rounds P and dS as FP8 holds them.

    A function of the scores that gives -inf hides that pair, as a mask does. `sizes`: the inputs' where a compiler lets
    them vary, and the plan has numbers in their place.
    """
    size = plan.request.sizes if sizes is None else sizes
    kind = inputs.a.device.type
    if amp_dtype(kind) is not None:
        with torch.autocast(kind, enabled=False):
            return _attend(plan, size, inputs, low, functions)
    return _attend(plan, size, inputs, low, functions)


def _attend(plan: Plan, size: Sizes, inputs: AttentionInputs, low: Any, functions: Functions | None) -> Results:
    spec = plan.spec
    q, k, v = apart(plan.layer, inputs)
    for t in (q, k, v):
        if t.layout is not torch.strided:
            raise no_memory(OPERATION, f"a tensor of layout {t.layout}")
    tokens = q.shape[0]
    q = padded_rows(q, spec.q_format, size.sq, inputs.cu_q, inputs.cu_q_padded)
    if inputs.pages is not None:
        k, v = (t[inputs.pages.long()].flatten(1, 2) for t in (k, v))
    else:
        k, v = (padded_rows(t, spec.kv_format, size.skv, inputs.cu_kv, inputs.cu_kv_padded) for t in (k, v))
    # Queries of one group stand one behind another, so that no key is copied for the heads that share it.
    heads = size.batch * size.groups  # of keys; spelt out, as -1 is nothing that torch could infer of empty tensors
    times = size.heads // size.groups
    together = q.unflatten(2, (size.groups, times)).permute(0, 2, 3, 1, 4)
    together = together.reshape(heads, times * size.sq, size.d_qk)
    keys = k.transpose(1, 2).reshape(heads, size.skv, size.d_qk)
    values = v.transpose(1, 2).reshape(heads, size.skv, size.d_v)
    weights, largest = _weights(plan, size, (together, keys), inputs, low, functions)
    if low is not None:
        weights = low("weights", weights)
    if spec.dropout:
        weights = bias_dropout_add(weights, None, None, spec.dropout, True, inputs.rng)
    out = torch.bmm(weights.reshape(heads, times * size.sq, size.skv), values)
    out = out.view(size.batch, size.heads, size.sq, size.d_v).transpose(1, 2)
    if spec.q_format == "thd":
        out = packed_tokens(out, tokens, inputs)
    elif spec.q_format == "sbhd":
        out = out.transpose(0, 1)
    return out.reshape(*out.shape[:-2], size.heads * size.d_v), largest


def _weights(
    plan: Plan,
    size: Sizes,
    qk: tuple[torch.Tensor, torch.Tensor],
    inputs: AttentionInputs,
    low: Any,
    functions: Functions | None,
) -> Results:
    """P in q's dtype [b, h, sq, skv] and the largest logit of each head, if wanted."""
    (q, k), spec, cu = qk, plan.spec, (inputs.cu_q, inputs.cu_kv)
    kind = q.dtype
    if functions is not None:  # bfloat16 holds a score of 200, as a distance makes it, to the next whole number
        q, k = q.float(), k.float()
    # float16 overflows at 65504: held divided by the layer's number, scores stay small in deep layers.
    divide = plan.static.layer_number if plan.request.switches.layer_scaling and q.dtype == torch.float16 else 1
    scale = spec.scale if low is None else 1.0  # FP8 attention casts dS with the scale in it
    scores = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(1, 2), beta=0.0, alpha=scale / divide)
    scores = scores.view(size.batch, size.heads, size.sq, size.skv)
    if low is not None:
        scores = low("scores", scores) * spec.scale
    if spec.softcap:
        cap = spec.softcap / divide
        scores = (cap * torch.tanh(scores.float() / cap)).to(scores.dtype)
    removed = None
    if functions is not None:
        scores = modified(functions, scores)
        removed = scores.detach().isneginf()  # hidden, as by a mask: `softmax` says why it gets no -inf
        scores = scores.masked_fill(removed, 0.0)
    if inputs.bias is not None:
        scores = scores + (inputs.bias if divide == 1 else inputs.bias / divide)
    elif spec.bias == "alibi":
        scores = scores + (alibi_bias(spec, size, cu, inputs.slopes) / divide).to(scores.dtype)
    fuse = plan.request.switches.fused_softmax and removed is None
    unseen = None if fuse and not spec.max_logit else hidden(spec, size, cu, inputs.mask, q.device)
    if removed is not None:
        unseen = removed if unseen is None else unseen | removed
    largest = None
    if spec.max_logit:
        seen = scores.detach().float() * divide
        seen = seen if unseen is None else seen.masked_fill(unseen, -torch.inf)
        largest = seen.amax((0, 2, 3)) if seen.numel() else seen.new_full((size.heads,), -torch.inf)
    if fuse:
        return _fused_softmax(spec, scores, inputs, float(divide)), largest
    return softmax(scores, unseen, spec.softmax, inputs.sink, float(divide)).to(kind), largest


def _fused_softmax(spec: AttentionSpec, scores: torch.Tensor, inputs: AttentionInputs, times: float) -> torch.Tensor:
    sink = inputs.sink
    if spec.softmax == "off-by-one":
        sink = scores.new_zeros(scores.shape[1], dtype=torch.float32)
    return fused_softmax(
        scores,
        scale=times,
        mask=inputs.mask,
        left=spec.left,
        right=spec.right,
        bottom_right=spec.bottom_right,
        cu_seqlens_q=inputs.cu_q,
        cu_seqlens_kv=inputs.cu_kv,
        sink=sink,
    )


def softmax(
    scores: torch.Tensor, unseen: torch.Tensor | None, kind: str, sink: torch.Tensor | None, times: float = 1.0
) -> torch.Tensor:
    """The float32 softmax of `times` x scores [b, h, sq, skv] over the seen keys, back in their dtype, by torch alone.

    A row that sees nothing is zeros. `kind` and `sink`: the term of the sum that belongs to no key.
    """
    x = scores.float() if times == 1.0 else scores.float() * times
    if unseen is not None:
        # Not -inf: a row that sees nothing would be NaN, here and in the gradient.
        x = x.masked_fill(unseen, torch.finfo(torch.float32).min)
    if kind == "vanilla":
        p = torch.softmax(x, -1)
    else:
        term = x.new_zeros(1, 1, 1, 1) if sink is None else sink.float().view(1, -1, 1, 1)
        p = torch.softmax(torch.cat([x, term.expand(*x.shape[:-1], 1)], -1), -1)[..., :-1]
    if unseen is not None:
        p = p.masked_fill(unseen, 0.0)
    return p.to(scores.dtype)


def padded_rows(
    t: torch.Tensor, form: str, rows: int, cu: torch.Tensor | None, begin: torch.Tensor | None
) -> torch.Tensor:
    """[b, s, h, d] of a tensor in any format; behind the tokens of a packed sequence are zeros."""
    if form == "bshd":
        return t
    if form == "sbhd":
        return t.transpose(0, 1)
    assert cu is not None
    places = token_positions(cu, begin, rows, t.shape[0])
    padded = torch.cat([t, t.new_zeros(1, *t.shape[1:])])
    return padded.index_select(0, places.flatten()).view(*places.shape, *t.shape[1:])


def packed_tokens(out: torch.Tensor, tokens: int, inputs: AttentionInputs) -> torch.Tensor:
    """[t, h, d] of rows [b, s, h, d]; zeros where no sequence is."""
    places = token_positions(inputs.cu_q, inputs.cu_q_padded, out.shape[1], tokens)
    packed = out.new_zeros(tokens + 1, *out.shape[2:])
    return packed.index_copy(0, places.flatten(), out.flatten(0, 1))[:tokens]
