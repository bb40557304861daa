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
from te_core.ops.attention import Terms
from te_torch.attention import choose
from te_torch.attention.fused import Results
from te_torch.attention.layouts import apart
from te_torch.attention.masks import loose_tokens
from te_torch.attention.plan import Plan
from te_torch.runtime import runtime_for, to_core, to_torch


def run(plan: Plan, inputs: AttentionInputs) -> Results:
    """(out [.., heads * d_v] in q's format, None)."""
    q, k, v = apart(plan.layer, inputs)
    swap = plan.spec.q_format == "sbhd"
    if swap:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    if plan.spec.q_format != "thd":
        out = _ATTEND[plan.backend](plan, q, k, v, inputs)
        return (out.transpose(0, 1) if swap else out).flatten(-2), None
    # They write no token that belongs to no sequence, neither in the output nor in gradients: memory as it was found.
    loose = loose_kv = loose_tokens(inputs.cu_q, inputs.cu_q_padded, q.shape[0])
    if inputs.cu_kv is not inputs.cu_q or k.shape[0] != q.shape[0]:
        loose_kv = loose_tokens(inputs.cu_kv, inputs.cu_kv_padded, k.shape[0])
    q, k, v = _Held.apply(q, loose), _Held.apply(k, loose_kv), _Held.apply(v, loose_kv)
    return _ATTEND[plan.backend](plan, q, k, v, inputs).masked_fill(loose, 0.0).flatten(-2), None


class _Held(torch.autograd.Function):
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


def _flash2(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
    module, spec = import_module("flash_attn"), plan.spec
    options: dict[str, Any] = {"dropout_p": spec.dropout, "softmax_scale": spec.scale, "causal": spec.causal}
    version = plan.request.installed.flash2 or (0,)
    if version >= (2, 3):
        options["window_size"] = _window(spec)
    if version >= (2, 4):
        options["alibi_slopes"] = inputs.slopes
    if version >= (2, 4, 1):
        options["deterministic"] = spec.deterministic
    if version >= (2, 6):
        options["softcap"] = spec.softcap
    if spec.q_format == "thd":
        return module.flash_attn_varlen_func(q, k, v, inputs.cu_q, inputs.cu_kv, spec.max_q, spec.max_kv, **options)
    return module.flash_attn_func(q, k, v, **options)


def _flash3(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
    module, spec = import_module("flash_attn_interface"), plan.spec
    options: dict[str, Any] = {
        "softmax_scale": spec.scale,
        "causal": spec.causal,
        "window_size": _window(spec),
        "softcap": spec.softcap,
        "deterministic": spec.deterministic,
        "num_splits": plan.request.num_splits,
    }
    if spec.q_format != "thd":
        return _first(module.flash_attn_func(q, k, v, **options))
    if plan.request.gaps:
        # Sequences begin where memory says, and are as long as they are.
        options["seqused_q"], options["seqused_k"] = (cu[1:] - cu[:-1] for cu in (inputs.cu_q, inputs.cu_kv))
        begin_q, begin_k = inputs.cu_q_padded, inputs.cu_kv_padded
    else:
        begin_q, begin_k = inputs.cu_q, inputs.cu_kv
    return _first(module.flash_attn_varlen_func(q, k, v, begin_q, begin_k, spec.max_q, spec.max_kv, **options))


def _flash4(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
    module, spec = import_module("flash_attn.cute"), plan.spec
    left, right = (None if bound < 0 else bound for bound in _window(spec))
    options: dict[str, Any] = {
        "softmax_scale": spec.scale,
        "causal": spec.causal,
        "softcap": spec.softcap,
        "window_size": (left, None if spec.causal else right),
        "num_splits": plan.request.num_splits,
    }
    if spec.q_format == "thd":
        return _first(
            module.flash_attn_varlen_func(q, k, v, cu_seqlens_q=inputs.cu_q, cu_seqlens_k=inputs.cu_kv, **options)
        )
    return _first(module.flash_attn_func(q, k, v, **options))


def _first(result: Any) -> torch.Tensor:
    """The output of versions that also return the logs of the sums."""
    return result[0] if isinstance(result, tuple) else result


def _torch(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
    spec = plan.spec
    left, right = (None if bound < 0 else bound for bound in _window(spec))
    if spec.q_format == "thd":
        where = (inputs.cu_q, inputs.cu_kv, spec.max_q, spec.max_kv)
    else:
        where = (None, None, q.shape[1], k.shape[1])
    return torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *where,
        spec.dropout,
        spec.causal,
        False,
        scale=spec.scale,
        window_size_left=left,
        window_size_right=right,
    )[0]


# ------------------------------------------------------------------------------- forward fused, backward here


def takes_backward(plan: Plan) -> bool:
    """Whether NVTE_FUSED_ATTN_USE_FAv2_BWD=1 applies: flash-attn 2 is here and could compute this attention itself.

    From 2.7 on, whose backward takes the statistics of another forward; dense sequences without dropout.
    """
    request = plan.request
    return (
        request.switches.flash2_backward
        and (request.installed.flash2 or (0,)) >= (2, 7)
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
        spec = ctx.plan.spec
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        tensors = (dout.contiguous(), q, k, v, out, *grads)
        if spec.q_format == "sbhd":
            tensors = tuple(t.transpose(0, 1) for t in tensors)
        *given, dq, dk, dv = tensors
        left, right = _window(spec)
        import_module("flash_attn.flash_attn_interface")._flash_attn_backward(
            *given,
            stats,
            dq,
            dk,
            dv,
            dropout_p=0.0,
            softmax_scale=spec.scale,
            causal=spec.causal,
            window_size_left=left,
            window_size_right=right,
            softcap=spec.softcap,
            alibi_slopes=slopes,
            deterministic=spec.deterministic,
        )
        return (None, *grads, None)


_ATTEND = {choose.FLASH2: _flash2, choose.FLASH3: _flash3, choose.FLASH4: _flash4, choose.FLASH_TORCH: _torch}
