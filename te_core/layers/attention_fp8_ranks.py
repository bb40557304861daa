"""Attention in FP8 where each rank has a part of every sequence.

Codes of k and v (and, where heads are exchanged, of q and the gradient of the output) travel as bytes: their scale is
that of all ranks, from one history, or from the maximum that the ranks agree on. Sums are formed of values, and the
output is quantized once. See te_core/layers/attention_fp8.py and te_core/layers/context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from te_core import dtypes
from te_core.attention import DIMENSIONS
from te_core.layers.attention import AttentionLayerSpec, AttentionSaved, split_options, terms_of, views
from te_core.layers.attention_fp8_operands import (
    DP,
    DQKV,
    OUT,
    AttentionFp8Spec,
    Operands,
    P,
    frames_of,
    inverses_of,
    narrow_gradient,
    parts_of,
    restored_from,
    scaled_at,
    shaped,
    tails_of,
    three,
)
from te_core.layers.communicator import Communicator
from te_core.layers.context import layer as over_ranks
from te_core.layers.context.exchange import Exchange
from te_core.layers.context.layer import Communicators, Place, communicators
from te_core.layers.context.products import Fp8
from te_core.layers.context.rules import OPERATION, check_context
from te_core.layers.inspector import Inspector, offer
from te_core.layers.meeting import meet
from te_core.ops import raw as ops
from te_core.ops.attention_fp8 import BackwardScales, ForwardScales
from te_core.ops.quantize import allocate
from te_core.precision import AttentionPrecision, Operand
from te_core.quantize.operands import Value, dense
from te_core.quantize.operands import saved as keep
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS, Scales, backward_cast, element, forward_cast
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor


def met(
    rt: Runtime, inputs: tuple[Value | None, ...], spec: AttentionFp8Spec, comm: Communicators | None
) -> tuple[Communicator, ...]:
    """The communicators of a call, whose ranks have agreed on what they run."""
    assert spec.attention.context is not None
    ranks = communicators(spec.attention.context, comm)
    for one in ranks:
        meet(rt, one, "DotProductAttention", spec, OPERATION, **dict(zip("abc", inputs, strict=True)))
    return ranks


def forward_over_ranks(
    rt: Runtime,
    operands: Operands,
    saved: AttentionSaved,
    spec: AttentionFp8Spec,
    scales: Scales,
    comm: Communicators | None,
) -> tuple[tuple[Value], AttentionSaved]:
    """`forward` of quantized inputs where each rank has a part of every sequence."""
    layer, rule = spec.attention, spec.precision
    assert layer.context is not None and scales.forward_scale is not None
    parts = views(layer, *parts_of(layer, operands, saved))
    check_context(layer.core, layer.context, *parts)
    place = Place(rt, layer.context, comm, layer.core, terms_of(saved))
    out = rt.empty((*frames_of(saved)[0].shape[:-1], layer.heads * layer.d_v), spec.dtype)
    rows = target = out.reshape(*parts[0].shape[:-1], layer.d_v)
    held: list[Any] = [x if x is came else x.block for x, came in zip(operands, saved[:3], strict=False)]
    if place.exchange is not None:  # from here on q, k and v lie apart, some heads of more tokens
        operands, parts = _exchanged(rt, place.exchange, parts, inverses_of(operands), rule.qkv)
        held = [x.block for x in operands]
        frames = [rt.empty((*t.shape[:-2], 0), dtypes.uint8) for t in parts]
        saved = saved._replace(frame_q=frames[0], frame_kv=frames[1])
        target = rt.empty((*parts[0].shape[:-1], layer.d_v), spec.dtype)
    at = [element(scales.forward_scale, FORWARD_SLOTS * gemm + slot) for gemm, slot in (P, OUT)]
    pairs = ops.scale_pairs(rt, at, (None, None))
    stats, _ = place.attend(parts, target, _products(rt, operands, pairs, spec, scales.forward_amax))
    if place.exchange is not None:
        place.exchange.to_tokens((target,), (0,), (rows,))
    place.finish(rows, None)
    cast = forward_cast(rule.output, scales, *OUT, rowwise=True, columnwise=False)
    kept, y = _kept_output(rt, target, rule, cast), out
    if spec.quantize_output:
        given = target is rows and isinstance(kept, QuantizedTensor)
        y = kept if given else ops.quantize(rt, out.matrix(), cast)  # type: ignore[assignment]
    a, b, c = three(held)
    saved = saved._replace(a=a, b=b, c=c, pairs=pairs)
    if layer.recompute or not any(layer.needs):
        return (y,), saved
    return (y,), saved._replace(out=keep(kept, True), stats=stats)


def backward_over_ranks(
    rt: Runtime,
    dy: Value,
    saved: AttentionSaved,
    spec: AttentionFp8Spec,
    scales: Scales,
    inspector: Inspector | None,
    comm: Communicators | None,
) -> tuple[Value | None, ...]:
    """`backward` where each rank has a part of every sequence."""
    layer, rule, context = spec.attention, spec.precision, spec.attention.context
    assert context is not None and saved.pairs is not None
    place = Place(rt, context, comm, layer.core, terms_of(saved))
    inner, frames = inside(layer), frames_of(saved)
    tails = tails_of(inner)
    operands = [restored_from(x, f, prod(tail), rule.qkv) for x, f, tail in zip(saved[:3], frames, tails, strict=False)]
    parts = views(inner, *parts_of(inner, operands, saved))
    shape, stats = (*parts[0].shape[:-1], layer.d_v), saved.stats
    out: Value | None = saved.out
    if layer.recompute:
        target = rt.empty(shape, spec.dtype)
        stats, _ = place.attend(parts, target, _products(rt, operands, saved.pairs, spec, None))
        cast = Cast(rule.output.format, rowwise=True, columnwise=False)
        if rule.output.scaling == "delayed":  # with the scale of then; nothing is recorded
            cast = Cast(rule.output.format, rowwise=True, columnwise=False, scale=element(saved.pairs, 2))
        out = _kept_output(rt, target, rule, cast)
    elif isinstance(out, Tensor) and out.dtype is dtypes.uint8:
        out = restored_from(out, frames[0], inner.heads * inner.d_v, rule.output)
    assert out is not None and stats is not None
    leads = [_of_rank(f.shape[:-1], layer) for f in frames]
    made = [rt.empty((*lead, *tail), spec.dtype) for lead, tail in zip(leads, tails_of(layer), strict=False)]
    grads = views(layer, *three(made))
    rows = (*grads[0].shape[:-1], layer.d_v)
    if not rule.backward:
        dy = dense(rt, dy, spec.dtype)
        offer(rt, inspector, ("dgrad", "do"), dy)
        values = views(inner, *parts_of(inner, [ops.dequantize(rt, x, spec.dtype) for x in operands], saved))
        given = dy.reshape(*rows), dense(rt, out, spec.dtype).reshape(*shape), stats
        over_ranks.backward(values, given, grads, place)
    else:
        low = narrow_gradient(rt, dy, spec, scales, inspector, () if place.exchange is None else place.all)
        back = _backward_scales(rt, low, operands, out, saved, scales, rule)
        products = _products(rt, operands, saved.pairs, spec, None, back)
        over_ranks.backward(parts, (shaped(low, rows), shaped(out, shape), stats), grads, place, products)
    return _delivered_over_ranks(rt, made, grads, leads, spec, scales)


def _delivered_over_ranks(
    rt: Runtime,
    made: list[Tensor],
    parts: tuple[Tensor, Tensor, Tensor],
    leads: Sequence[tuple[int, ...]],
    spec: AttentionFp8Spec,
    scales: Scales,
) -> tuple[Value | None, ...]:
    """The gradients of the inputs, where they are wanted."""
    layer, rule = spec.attention, spec.precision.grad_input
    if layer.copies:
        return ops.rope_qkv_backward(rt, *parts, None, None, **split_options(layer)), None, None
    found: list[Value | None] = []
    for t, lead, wanted in zip(made, leads, layer.needs, strict=False):
        rows = t.reshape(*lead, prod(t.shape[len(lead) :]))
        low = wanted and spec.quantize_grad and layer.packing == "qkv" and rule.scaling == "delayed"
        if low:
            cast = backward_cast(rule, scales, DQKV[0], rowwise=True, columnwise=False, slot=DQKV[1])
            found.append(ops.quantize(rt, rows.matrix(), cast))
        else:
            found.append(rows if wanted else None)
    return three(found)


def _products(
    rt: Runtime,
    operands: Operands,
    pairs: Tensor,
    spec: AttentionFp8Spec,
    amax: Tensor | None,
    back: BackwardScales | None = None,
) -> Fp8:
    """How the calls of an attention over ranks are computed; they raise maxima in `amax`."""
    rule = spec.precision
    p_at, o_at = (FORWARD_SLOTS * gemm + slot for gemm, slot in (P, OUT))
    of_out = scaled_at(pairs, 1, amax, o_at) if rule.output.scaling == "delayed" else None
    given = ForwardScales(*inverses_of(operands), scaled_at(pairs, 0, amax, p_at), of_out)
    return Fp8(spec.dtype, rule.output.format, given, back, rule.grad_input.format)


def _backward_scales(
    rt: Runtime,
    dy: QuantizedTensor,
    operands: Operands,
    out: Value,
    saved: AttentionSaved,
    scales: Scales,
    rule: AttentionPrecision,
) -> BackwardScales:
    """Those of every call: codes of gradients under their slot's scale, if that has a history."""
    assert saved.pairs is not None and scales.backward_scale is not None
    dp_at, at = (BACKWARD_SLOTS * gemm + slot for gemm, slot in (DP, DQKV))
    found = ops.scale_pairs(rt, [element(scales.backward_scale, i) for i in (dp_at, at)], (None, None))
    p, dp = scaled_at(saved.pairs, 0), scaled_at(found, 0, scales.backward_amax, dp_at)
    codes = rule.grad_input.scaling == "delayed"
    scaled = scaled_at(found, 1, scales.backward_amax, at) if codes else None
    out_inverse = out.scale_inv if isinstance(out, QuantizedTensor) else None
    return BackwardScales(*inverses_of(operands), out_inverse, dy.scale_inv, p, dp, scaled, scaled, scaled)


def _kept_output(rt: Runtime, out: Tensor, rule: AttentionPrecision, cast: Cast) -> Value:
    """The output as backward reads it: as a call alone would have written it."""
    matrix = out.reshape(-1, out.shape[-2] * out.shape[-1])
    return matrix if rule.output.scaling != "delayed" and rule.high_output else ops.quantize(rt, matrix, cast)


def inside(layer: AttentionLayerSpec) -> AttentionLayerSpec:
    """The layer once heads are exchanged: some of them, q, k and v apart."""
    parts = 1 if layer.context is None else layer.context.heads
    if parts == 1:
        return layer
    return replace(
        layer, heads=layer.heads // parts, groups=max(1, layer.groups // parts), packing="separate", interleaved=False
    )


def _of_rank(lead: tuple[int, ...], layer: AttentionLayerSpec) -> tuple[int, ...]:
    """The leading dimensions of a rank's tokens, of those that forward kept."""
    assert layer.context is not None
    token = DIMENSIONS[layer.core.q_format][1]
    return tuple([n // layer.context.heads if i == token else n for i, n in enumerate(lead)])


def _exchanged(
    rt: Runtime,
    exchange: Exchange,
    parts: tuple[Tensor, Tensor, Tensor],
    inverses: tuple[Tensor, Tensor, Tensor],
    rule: Operand,
) -> tuple[Operands, tuple[Tensor, Tensor, Tensor]]:
    """(q, k and v quantized as this rank attends with them, their codes): bytes have come, under the scale of all."""
    made: Operands = []
    codes = []
    for side, t, inverse in zip((0, 1, 1), parts, inverses, strict=True):
        shape = exchange.whole_shape(t, side)
        room = allocate(
            rt, (prod(shape[:-2]), shape[-2] * shape[-1]), Cast(rule.format, rowwise=True, columnwise=False)
        )
        ops.resize(rt, inverse.reshape(1, 1), 1, 1, out=room.scale_inv.reshape(1, 1))
        made.append(room)
        codes.append(shaped(room, shape))
    q, k, v = exchange.to_heads(parts, (0, 1, 1), outs=codes)
    return made, (q, k, v)
