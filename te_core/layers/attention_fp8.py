"""Attention in FP8 as a layer: what is quantized on the way in, in which slot of the scaling state, and what comes out.

Inputs [.., width], a token's heads in a row, apart or packed as `te_core.layers.attention` says, plain or quantized:
a quantized one is a matrix of tokens, whose leading dimensions a frame tells, an empty tensor [.., 0]. Each input is
quantized once, and q, k and v are views of it; so are their gradients. A module with such a layer has three GEMMs'
slots: q, k and v share the one of the first's output (backward: of its output gradient), the output has the second's
input's (its gradient: input gradient's), S and dP are the third's output and input gradient.

Where scales come from the tensors themselves (current scaling), the products' results come in the activation dtype,
each input has a scale of its own, and only S and dP have slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from inspect import unwrap
from math import prod

from te_core import dtypes
from te_core.arguments import explained
from te_core.attention_rules import FP8_TAKES, fp8_refusal
from te_core.errors import UnsupportedError
from te_core.layers import attention
from te_core.layers.attention import AttentionInputs, AttentionSaved, split_options, terms_of, views
from te_core.layers.attention_fp8_operands import (
    DOUT,
    DP,
    DQKV,
    OUT,
    QKV,
    AttentionFp8Spec,
    Operands,
    P,
    apart,
    backward_scales,
    delivered,
    forward_pairs,
    forward_scales,
    frames_of,
    held_operands,
    held_output,
    names_of,
    narrow_gradient,
    parts_of,
    quantized_inputs,
    room_for,
    row_widths,
    shaped,
    three,
    unchangeable,
)
from te_core.layers.attention_fp8_ranks import backward_over_ranks, forward_over_ranks
from te_core.layers.context.layer import Communicators, communicators
from te_core.layers.context.rules import OPERATION
from te_core.layers.inspector import Inspector, offer
from te_core.layers.meeting import meet
from te_core.ops import raw as ops
from te_core.quantize.operands import Value, dense
from te_core.quantize.operands import saved as keep
from te_core.quantize.state import Scales, element, forward_cast, without_state
from te_core.quantized import Copy, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

__all__ = [
    "DOUT", "DP", "DQKV", "OUT", "QKV", "AttentionFp8Spec", "P", "backward", "check", "forward", "names_of",
    "plain_backward", "row_widths", "unchangeable",
]  # fmt: skip

plain_backward = unwrap(attention.backward)  # what is asked of it was checked here


@explained
def forward(
    rt: Runtime,
    a: Value,
    b: Value | None,
    c: Value | None,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    sink: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_kv: Tensor | None = None,
    cu_q_padded: Tensor | None = None,
    cu_kv_padded: Tensor | None = None,
    mask: Tensor | None = None,
    pages: Tensor | None = None,
    rng: Tensor | None = None,
    frame_q: Tensor | None = None,
    frame_kv: Tensor | None = None,
    *,
    spec: AttentionFp8Spec,
    scales: Scales | None = None,
    inspectors: Sequence[Inspector | None] = (None,),
    comm: Communicators | None = None,
) -> tuple[tuple[Value], AttentionSaved]:
    """((out,), saved). `comm`: the ranks that share each sequence."""
    if scales is None or scales.forward_scale is None:  # P and dS always have a history
        raise without_state("the forward of attention in FP8")
    check(spec)
    layer, rule = spec.attention, spec.precision
    frame_q = _frame(rt, a, frame_q)
    frame_kv = frame_q if b is None else _frame(rt, b, frame_kv)
    inputs = AttentionInputs(a, b, c, bias, slopes, sink, cu_q, cu_kv, cu_q_padded, cu_kv_padded, mask, pages, rng)
    ranks = () if layer.context is None else communicators(layer.context, comm)
    for one in ranks:
        meet(rt, one, "DotProductAttention", spec, OPERATION, a=a, b=b, c=c)
    operands = quantized_inputs(rt, apart(rt, (a, b, c), frame_q, spec), spec, scales, inspectors[0], ranks)
    if layer.context is not None:
        given = AttentionSaved(*inputs, None, None, frame_q, frame_kv)
        return forward_over_ranks(rt, operands, given, spec, scales, comm)
    out = y = room_for(rt, (*frame_q.shape[:-1], layer.heads * layer.d_v), rule.output, spec.dtype)
    pairs = forward_pairs(rt, scales, [out.scale_inv] if isinstance(out, QuantizedTensor) else [])
    saved = AttentionSaved(*inputs, None, None, frame_q, frame_kv, pairs)
    stats = _attend(rt, operands, saved, spec, out, scales.forward_amax)
    if isinstance(out, Tensor) and (spec.quantize_output or not rule.high_output):
        cast = forward_cast(rule.output, scales, *OUT, rowwise=True, columnwise=False)
        narrow = ops.quantize(rt, out.matrix(), cast)
        y = narrow if spec.quantize_output else out
        out = out if rule.high_output else narrow
    elif isinstance(out, QuantizedTensor) and not spec.quantize_output:
        y = ops.dequantize(rt, out, spec.dtype).reshape(*frame_q.shape[:-1], out.shape[1])
    a, b, c = three([x if x is came else x.block for x, came in zip(operands, (a, b, c), strict=False)])
    return (y,), saved._replace(a=a, b=b, c=c, out=None if layer.recompute else keep(out, True), stats=stats)


def _frame(rt: Runtime, t: Value, like: Tensor | None) -> Tensor:
    """An empty tensor that tells the leading dimensions of t: those of `like`, from which t was made perhaps. Over
    ranks t may have more rows, or fewer."""
    if like is not None and not like.size:
        return like
    if isinstance(t, Tensor) or like is None:
        return rt.empty((*t.shape[:-1], 0), dtypes.uint8)
    first, *rest = like.shape[:-1]
    return rt.empty((first * t.shape[0] // max(prod(like.shape[:-1]), 1), *rest, 0), dtypes.uint8)


@explained
def backward(
    rt: Runtime,
    dy: Value,
    saved: AttentionSaved,
    *,
    spec: AttentionFp8Spec,
    scales: Scales | None = None,
    inspectors: Sequence[Inspector | None] = (None,),
    comm: Communicators | None = None,
) -> tuple[Value | None, ...]:
    """(da, db, dc): gradients of the inputs as they came, in the activation dtype or quantized."""
    if scales is None:
        raise without_state("the backward of attention in FP8")
    if spec.attention.context is not None:
        return backward_over_ranks(rt, dy, saved, spec, scales, inspectors[0], comm)
    layer, rule = spec.attention, spec.precision
    frames, operands = frames_of(saved), held_operands(saved, layer, rule.qkv)
    if layer.recompute:  # with the scales of then; nothing is recorded
        out = room_for(rt, (*frames[0].shape[:-1], layer.heads * layer.d_v), rule.output, spec.dtype)
        if isinstance(out, QuantizedTensor):
            assert out.rowwise is not None and saved.pairs is not None
            out = QuantizedTensor(out.format, out.shape, Copy(out.rowwise, element(saved.pairs, 3), None), None)
        saved = saved._replace(stats=_attend(rt, operands, saved, spec, out, None))
    else:
        out = held_output(saved, layer, rule.output)
    if not rule.backward:
        dy = dense(rt, dy, spec.dtype)
        offer(rt, inspectors[0], ("dgrad", "do"), dy)
        # By attention in the activation dtype, from the values that forward used.
        a, b, c = parts_of(layer, [ops.dequantize(rt, x, spec.dtype) for x in operands], saved)
        plain = saved._replace(a=a, b=b, c=c, out=dense(rt, out, spec.dtype))
        found = plain_backward(rt, dy, None, plain, spec=replace(layer, recompute=False))
        rows = [(g, frame.shape[:-1]) for g, frame in zip(found, frames, strict=False)]
        return tuple([None if g is None else g.reshape(*lead, prod(g.shape[len(lead) :])) for g, lead in rows])
    dy = narrow_gradient(rt, dy, spec, scales, inspectors[0])
    grads = _fp8_backward(rt, dy, operands, out, saved, spec, scales)
    if layer.copies:
        parts = parts_of(layer, [dense(rt, g, spec.dtype) for g in grads], saved)
        return ops.rope_qkv_backward(rt, *parts, None, None, **split_options(layer)), None, None
    return delivered(rt, grads, [frame.shape[:-1] for frame in frames], spec)


def check(spec: AttentionFp8Spec) -> None:
    """The layer's parts exist in FP8."""
    layer, rule = spec.attention, spec.precision
    reason = fp8_refusal(layer.core, rule.qkv.scaling, row_widths(layer))
    if reason is not None or rule.history is None:
        raise UnsupportedError(
            "FP8 attention",
            reason or "no history for P and dS",
            FP8_TAKES,
            "leave it out, or run attention in high precision (NVTE_DPA_FP8_RECIPE=F16)",
        )


# ---------------------------------------------------------------------------------------------- the products


def _attend(
    rt: Runtime, operands: Operands, saved: AttentionSaved, spec: AttentionFp8Spec, out: Value, amax: Tensor | None
) -> Tensor | None:
    """Write the output; the statistics, if there will be a backward."""
    layer, pairs = spec.attention, saved.pairs
    assert pairs is not None
    q, k, v = views(layer, *parts_of(layer, operands, saved))
    scales = forward_scales(operands, pairs, amax, isinstance(out, QuantizedTensor))
    out = shaped(out, (*q.shape[:-1], layer.d_v))
    core, stats, terms = layer.core, any(layer.needs), terms_of(saved)
    return ops.attention_fp8_forward(rt, q, k, v, spec=core, terms=terms, stats=stats, out=out, scales=scales).stats


def _fp8_backward(
    rt: Runtime,
    dy: QuantizedTensor,
    operands: Operands,
    out: Value,
    saved: AttentionSaved,
    spec: AttentionFp8Spec,
    scales: Scales,
) -> list[Value]:
    """The gradients of what was held, quantized under their one scale, or plain."""
    layer, rule = spec.attention, spec.precision
    q, k, v = views(layer, *parts_of(layer, operands, saved))
    assert saved.stats is not None
    made = [room_for(rt, x.shape, rule.grad_input, spec.dtype) for x in operands]
    places = [x.scale_inv for x in made if isinstance(x, QuantizedTensor)]
    back = backward_scales(rt, dy, operands, out, saved, scales, places, bool(places))
    dq, dk, dv = views(layer, *parts_of(layer, made, saved))
    shape = (*q.shape[:-1], layer.d_v)
    ops.attention_fp8_backward(
        rt,
        shaped(dy, shape),
        q,
        k,
        v,
        shaped(out, shape),
        saved.stats,
        spec=layer.core,
        terms=terms_of(saved),
        grads=(dq, dk, dv),
        grad_dtype=dq.dtype,
        scales=back,
    )
    return made
