"""FusedAttention: the core's attention layer, that is cuDNN on a GPU and te_core's own backend on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from te_core.layers import attention as core
from te_core.layers.attention import AttentionInputs
from te_torch.attention.plan import Plan
from te_torch.function import apply, of_table

ATTENTION = of_table("attention", core.AttentionSaved, outputs=2, partial=True, differentiable=1)
Results = tuple[torch.Tensor, "torch.Tensor | None"]


def run(plan: Plan, inputs: AttentionInputs) -> Results:
    """(out [.., heads * d_v] in q's format, largest logits or None)."""
    if inputs.a.is_cuda:
        # Gradients of packed sequences have to lie as their tensors do, and ours are dense.
        packed = plan.layer.packing != "qkv" and "thd" in (plan.spec.q_format, plan.spec.kv_format)
        dense = packed and any(plan.layer.needs)
        given = (inputs.a, inputs.b, inputs.c)
        a, b, c = (None if t is None else aligned(t.contiguous() if dense else t) for t in given)
        inputs = inputs._replace(a=a, b=b, c=c)
    return run_call(plan.call, plan.layer.packing, inputs, plan.bare)


def run_call(call: Any, packing: str, inputs: AttentionInputs, bare: bool = False) -> Results:
    """The same for a call, or under tracing for its key. `bare`: nothing is given but q, k and v."""
    if packing == "qkv":  # the layer reads a packed tensor by the strides of a dense one
        inputs = inputs._replace(a=inputs.a.contiguous())
    elif packing == "kv":
        inputs = inputs._replace(b=inputs.b.contiguous())
    # An autograd node's cost grows with its inputs.
    out = apply(call, None, False, inputs.a, inputs.b, inputs.c) if bare else apply(call, None, False, *inputs)
    return out[0], out[1] if len(out) > 1 else None


def aligned(t: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where cuDNN, which reads 16 bytes at a time, could not read it."""
    if t.data_ptr() & 15:
        return t.clone(memory_format=torch.contiguous_format)
    if t.is_contiguous():
        return t
    width = t.element_size()
    return t.contiguous() if any(step * width & 15 for step in t.stride()[:-1]) else t
