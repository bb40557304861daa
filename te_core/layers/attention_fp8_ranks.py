"""Attention in FP8 where each rank has a part of every sequence.

Codes of k and v (and, where heads are exchanged, of q and the gradient of the output) travel as bytes: their scale is
that of all ranks, from one history, or from the maximum that the ranks agree on. Sums are formed of values, and the
output is quantized once. See te_core/layers/attention_fp8.py and te_core/layers/context.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from te_core import dtypes
from te_core.attention import DIMENSIONS
from te_core.layers.attention import AttentionLayerSpec, AttentionSaved, split_options, tails_of, terms_of, views
from te_core.layers.attention_fp8_operands import (
    DQKV,
    OUT,
    AttentionFp8Spec,
    Operands,
    backward_scales,
    delivered,
    forward_pairs,
    forward_scales,
    frames_of,
    held_operands,
    held_output,
    inverses_of,
    narrow_gradient,
    parts_of,
    shaped,
    three,
)
from te_core.layers.context import layer as over_ranks
from te_core.layers.context.exchange import Exchange
from te_core.layers.context.layer import Communicators, Place
from te_core.layers.context.products import Fp8
from te_core.layers.context.rules import check_context
from te_core.layers.inspector import Inspector, offer
from te_core.ops import raw as ops
from te_core.ops.attention_fp8 import BackwardScales
from te_core.ops.quantize import allocate
from te_core.precision import AttentionPrecision, Operand
from te_core.quantize.operands import Value, dense
from te_core.quantize.operands import saved as keep
from te_core.quantize.state import Scales, backward_cast, element, forward_cast
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor


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
    pairs = forward_pairs(rt, scales, [None])
    stats, _ = place.attend(parts, target, _products(operands, pairs, spec, scales.forward_amax))
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
    codes = rule.grad_input.scaling == "delayed"
    assert context is not None and saved.pairs is not None
    place = Place(rt, context, comm, layer.core, terms_of(saved))
    inner = inside(layer)
    operands = held_operands(saved, inner, rule.qkv)
    parts = views(inner, *parts_of(inner, operands, saved))
    shape, stats = (*parts[0].shape[:-1], layer.d_v), saved.stats
    if layer.recompute:
        target = rt.empty(shape, spec.dtype)
        stats, _ = place.attend(parts, target, _products(operands, saved.pairs, spec, None))
        cast = Cast(rule.output.format, rowwise=True, columnwise=False)
        if rule.output.scaling == "delayed":  # with the scale of then; nothing is recorded
            cast = Cast(rule.output.format, rowwise=True, columnwise=False, scale=element(saved.pairs, 2))
        out = _kept_output(rt, target, rule, cast)
    else:
        out = held_output(saved, inner, rule.output)
    assert stats is not None
    token = DIMENSIONS[layer.core.q_format][1]  # of which forward has kept those of all that exchange heads
    leads = [f.shape[:token] + (f.shape[token] // context.heads,) + f.shape[token + 1 : -1] for f in frames_of(saved)]
    made: list[Any] = [rt.empty((*lead, *tail), spec.dtype) for lead, tail in zip(leads, tails_of(layer), strict=False)]
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
        # Every call writes codes of gradients under their slot's scale, if that has a history.
        back = backward_scales(rt, low, operands, out, saved, scales, [None], codes)
        products = _products(operands, saved.pairs, spec, None, back)
        over_ranks.backward(parts, (shaped(low, rows), shaped(out, shape), stats), grads, place, products)
    if layer.copies:
        return ops.rope_qkv_backward(rt, *grads, None, None, **split_options(layer)), None, None
    if codes and spec.quantize_grad and layer.packing == "qkv" and layer.needs.q:
        cast = backward_cast(rule.grad_input, scales, DQKV[0], rowwise=True, columnwise=False, slot=DQKV[1])
        made = [ops.quantize(rt, made[0].matrix(), cast)]
    return delivered(rt, made, leads, spec)


def _products(
    operands: Operands, pairs: Tensor, spec: AttentionFp8Spec, amax: Tensor | None, back: BackwardScales | None = None
) -> Fp8:
    """How the calls of an attention over ranks are computed; they raise maxima in `amax`."""
    output, grad = spec.precision.output, spec.precision.grad_input
    given = forward_scales(operands, pairs, amax, output.scaling == "delayed")
    return Fp8(spec.dtype, output.format, given, back, grad.format)


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


def _exchanged(
    rt: Runtime,
    exchange: Exchange,
    parts: tuple[Tensor, Tensor, Tensor],
    inverses: tuple[Tensor, Tensor, Tensor],
    rule: Operand,
) -> tuple[Operands, tuple[Tensor, Tensor, Tensor]]:
    """(q, k and v quantized as this rank attends with them, their codes): bytes have come, under the scale of all."""
    made: Operands = []
    codes, cast = [], Cast(rule.format, rowwise=True, columnwise=False)
    for side, t, inverse in zip((0, 1, 1), parts, inverses, strict=True):
        shape = exchange.whole_shape(t, side)
        room = allocate(rt, (prod(shape[:-2]), shape[-2] * shape[-1]), cast)
        ops.resize(rt, inverse.reshape(1, 1), 1, 1, out=room.scale_inv.reshape(1, 1))
        made.append(room)
        codes.append(shaped(room, shape))
    q, k, v = exchange.to_heads(parts, (0, 1, 1), outs=codes)
    return made, (q, k, v)
