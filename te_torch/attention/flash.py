"""FlashAttention: the flash-attn 2, 3 and 4 packages by their documented functions, and torch's own flash kernels.

All of them read bshd (sbhd through a view) or packed sequences, end the diagonal bottom-right, and differentiate
themselves. What one of them cannot do is a rule of `choose.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from te_core.attention import AttentionSpec
from te_core.layers.attention import AttentionInputs
from te_core.ops import raw as ops
from te_core.ops.attention_terms import Terms
from te_torch.attention import choose
from te_torch.attention.fused import Results
from te_torch.attention.layouts import apart
from te_torch.attention.masks import loose_tokens
from te_torch.attention.plan import Plan
from te_torch.runtime import runtime_for, to_core, to_torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v


def run(plan: Plan, inputs: AttentionInputs) -> Results:
    """(out [.., heads * d_v] in q's format, None)."""
    q, k, v = apart(plan.layer, inputs)
    swap = plan.spec.q_format == "sbhd"
    if swap:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    if plan.spec.q_format != "thd":
        out = _ATTEND[plan.backend](plan, (q, k, v), inputs)
        return (out.transpose(0, 1) if swap else out).flatten(-2), None
    # They write no token that belongs to no sequence, neither in the output nor in gradients: memory as it was found.
    loose = loose_kv = loose_tokens(inputs.cu_q, inputs.cu_q_padded, q.shape[0])
    if inputs.cu_kv is not inputs.cu_q or k.shape[0] != q.shape[0]:
        loose_kv = loose_tokens(inputs.cu_kv, inputs.cu_kv_padded, k.shape[0])
    q, k, v = _WithoutLoose.apply(q, loose), _WithoutLoose.apply(k, loose_kv), _WithoutLoose.apply(v, loose_kv)
    return _ATTEND[plan.backend](plan, (q, k, v), inputs).masked_fill(loose, 0.0).flatten(-2), None


class _WithoutLoose(torch.autograd.Function):
    """The tensor as it is; gradients of tokens that belong to no sequence are zeros."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, loose: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loose)
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, dt: torch.Tensor) -> Any:
        (loose,) = ctx.saved_tensors
        return dt.masked_fill(loose, 0.0), None


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """The window as the packages take it: causality is a right bound of 0."""
    return spec.left, spec.right


def _bounds(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """The same where None is no bound."""
    left, right = (None if bound < 0 else bound for bound in _window(spec))
    return left, right


def _called(module: Any, plan: Plan, tensors: Tensors, options: dict[str, Any], *packed: Any) -> torch.Tensor:
    """What a package's function gives; `packed`: what it takes besides of packed sequences."""
    if plan.spec.q_format == "thd":
        found = module.flash_attn_varlen_func(*tensors, *packed, **options)
    else:
        found = module.flash_attn_func(*tensors, **options)
    return found[0] if isinstance(found, tuple) else found  # some versions also return the logs of the sums


def _flash2_options(spec: AttentionSpec, version: choose.Version, slopes: torch.Tensor | None) -> dict[str, Any]:
    options: dict[str, Any] = {"dropout_p": spec.dropout, "softmax_scale": spec.scale, "causal": spec.causal}
    younger = {
        "window_size": _window(spec),
        "alibi_slopes": slopes,
        "deterministic": spec.deterministic,
        "softcap": spec.softcap,
    }
    return options | {name: value for name, value in younger.items() if version >= choose.FLASH2_SINCE[name]}


def _flash2(plan: Plan, tensors: Tensors, inputs: AttentionInputs) -> torch.Tensor:
    options = _flash2_options(plan.spec, plan.request.installed.flash2 or (0,), inputs.slopes)
    places = inputs.cu_q, inputs.cu_kv, plan.spec.max_q, plan.spec.max_kv
    return _called(import_module("flash_attn"), plan, tensors, options, *places)


def _common(plan: Plan) -> dict[str, Any]:
    """What flash-attn 3 and 4 are told alike."""
    spec, splits = plan.spec, plan.request.num_splits
    return {"softmax_scale": spec.scale, "causal": spec.causal, "softcap": spec.softcap, "num_splits": splits}


def _flash3(plan: Plan, tensors: Tensors, inputs: AttentionInputs) -> torch.Tensor:
    spec = plan.spec
    options = {**_common(plan), "window_size": _window(spec), "deterministic": spec.deterministic}
    begin_q, begin_k = inputs.cu_q, inputs.cu_kv
    if plan.request.gaps:
        # Sequences begin where memory says, and are as long as they are.
        options["seqused_q"], options["seqused_k"] = (cu[1:] - cu[:-1] for cu in (begin_q, begin_k))
        begin_q, begin_k = inputs.cu_q_padded, inputs.cu_kv_padded
    module = import_module("flash_attn_interface")
    return _called(module, plan, tensors, options, begin_q, begin_k, spec.max_q, spec.max_kv)


def _flash4(plan: Plan, tensors: Tensors, inputs: AttentionInputs) -> torch.Tensor:
    left, right = _bounds(plan.spec)
    options = {**_common(plan), "window_size": (left, None if plan.spec.causal else right)}
    if plan.spec.q_format == "thd":
        options |= {"cu_seqlens_q": inputs.cu_q, "cu_seqlens_k": inputs.cu_kv}
    return _called(import_module("flash_attn.cute"), plan, tensors, options)


def _torch(plan: Plan, tensors: Tensors, inputs: AttentionInputs) -> torch.Tensor:
    q, k, _ = tensors
    spec, (left, right) = plan.spec, _bounds(plan.spec)
    where = (None, None, q.shape[1], k.shape[1])
    if spec.q_format == "thd":
        where = (inputs.cu_q, inputs.cu_kv, spec.max_q, spec.max_kv)
    window = {"window_size_left": left, "window_size_right": right}
    found = torch.ops.aten._flash_attention_forward(
        *tensors, *where, spec.dropout, spec.causal, False, scale=spec.scale, **window
    )
    return found[0]


# ------------------------------------------------------------------------------- forward fused, backward here


_TAKES_STATISTICS = (2, 7)  # flash-attn's backward, of another forward


def takes_backward(plan: Plan) -> bool:
    """Whether NVTE_FUSED_ATTN_USE_FAv2_BWD=1 applies: flash-attn 2 is here and could compute this attention itself.

    Dense sequences without dropout.
    """
    request = plan.request
    return (
        request.switches.flash2_backward
        and (request.installed.flash2 or (0,)) >= _TAKES_STATISTICS
        and any(plan.layer.needs)
        and not request.packed
        and not plan.spec.dropout
        and not plan.layer.recompute
        and choose.decide(request).reasons[choose.FLASH2] is None
    )


def run_backward_only(plan: Plan, inputs: AttentionInputs) -> Results:
    """FusedAttention forward, flash-attn 2 backward."""
    q, k, v = (t.contiguous() for t in apart(plan.layer, inputs))
    return _Backward.apply(plan, q, k, v, inputs.slopes).flatten(-2), None


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None
    ) -> torch.Tensor:
        terms = Terms(slopes=None if slopes is None else to_core(slopes))
        done = ops.attention_forward(runtime_for(q), to_core(q), to_core(k), to_core(v), spec=plan.spec, terms=terms)
        assert done.stats is not None
        out = to_torch(done.out)
        ctx.save_for_backward(q, k, v, out, to_torch(done.stats), slopes)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        q, k, v, out, stats, slopes = ctx.saved_tensors
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        tensors = (dout.contiguous(), q, k, v, out, *grads)
        if ctx.plan.spec.q_format == "sbhd":
            tensors = tuple(t.transpose(0, 1) for t in tensors)
        *given, dq, dk, dv = tensors
        options = _flash2_options(ctx.plan.spec, _TAKES_STATISTICS, slopes)
        left, right = options.pop("window_size")
        options |= {"window_size_left": left, "window_size_right": right}
        module = import_module("flash_attn.flash_attn_interface")
        module._flash_attn_backward(*given, stats, dq, dk, dv, **options)
        return (None, *grads, None)


_ATTEND = {choose.FLASH2: _flash2, choose.FLASH3: _flash3, choose.FLASH4: _flash4, choose.FLASH_TORCH: _torch}
