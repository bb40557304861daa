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
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.arguments import explained, settle
from te_core.attention_rules import fp8_refusal
from te_core.dtypes import DType
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec, on_boundary, split_options, terms_of, views
from te_core.ops import raw as ops
from te_core.ops.attention import Terms
from te_core.ops.attention_fp8 import BackwardScales, ForwardScales, Scaled
from te_core.ops.quantize import allocate
from te_core.precision import AttentionPrecision, Operand
from te_core.quantize.operands import Value, as_asked, dense
from te_core.quantize.operands import saved as keep
from te_core.quantize.state import (
    BACKWARD_SLOTS,
    FORWARD_SLOTS,
    GRAD_INPUT,
    GRAD_OUTPUT,
    INPUT,
    OUTPUT,
    Scales,
    backward_cast,
    element,
    forward_cast,
    without_state,
)
from te_core.quantized import Cast, Copy, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import META, Tensor

#: (GEMM, slot) of q, k and v, of the output, and of P; of their gradients.
QKV, OUT, P = (0, OUTPUT), (1, INPUT), (2, OUTPUT)
DQKV, DOUT, DP = (0, GRAD_OUTPUT), (1, GRAD_INPUT), (2, GRAD_INPUT)

Frames = tuple[Tensor, Tensor]  # of q and of k, v


@dataclass(frozen=True, slots=True)
class AttentionFp8Spec:
    """All that the layer's plan depends on besides shapes."""

    attention: AttentionLayerSpec
    precision: AttentionPrecision
    dtype: DType  # of what is not quantized
    quantize_output: bool = False
    quantize_grad: bool = False  # the gradient of a packed qkv is delivered quantized

    def __post_init__(self) -> None:
        settle(self, "precision", "dtype")


class AttentionFp8Saved(NamedTuple):
    """What backward reads. Inputs stand here as themselves if they came quantized, else as blocks of their codes."""

    a: Value
    b: Value | None
    c: Value | None
    bias: Tensor | None
    slopes: Tensor | None
    sink: None
    cu_q: Tensor | None
    cu_kv: Tensor | None
    cu_q_padded: Tensor | None
    cu_kv_padded: Tensor | None
    mask: Tensor | None
    pages: None
    rng: Tensor | None
    frame_q: Tensor
    frame_kv: Tensor
    out: Tensor | None  # the block of a quantized output, or the plain one
    stats: Tensor | None
    pairs: Tensor  # scale and inverse of P, and of a delayed output


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
) -> tuple[tuple[Value], AttentionFp8Saved]:
    """((out,), saved)."""
    if scales is None or scales.forward_scale is None:  # P and dS always have a history
        raise without_state("the forward of attention in FP8")
    check(spec)
    layer, rule = spec.attention, spec.precision
    frame_q = _frame(rt, a) if frame_q is None else frame_q
    if frame_kv is None:
        frame_kv = frame_q if b is None else _frame(rt, b)
    frames = frame_q, frame_kv
    inputs = AttentionInputs(a, b, c, bias, slopes, sink, cu_q, cu_kv, cu_q_padded, cu_kv_padded, mask, pages, rng)
    held = _quantized(rt, _apart(rt, (a, b, c), frames, spec), spec, scales)
    at = [element(scales.forward_scale, FORWARD_SLOTS * gemm + slot) for gemm, slot in (P, OUT)]
    out: Value
    if rule.output.scaling == "delayed":
        out = _storage(rt, _matrix(layer, frame_q), rule.output)
        pairs = ops.scale_pairs(rt, at, (None, out.scale_inv))
    else:
        out = rt.empty((*frame_q.shape[:-1], layer.heads * layer.d_v), spec.dtype)
        pairs = ops.scale_pairs(rt, at[:1], (None,))
    stats = _attend(rt, held, frames, terms_of(inputs), spec, pairs, out, scales.forward_amax)
    y: Value = out
    if isinstance(out, Tensor) and (spec.quantize_output or not rule.high_output):
        cast = forward_cast(rule.output, scales, *OUT, rowwise=True, columnwise=False)
        narrow = ops.quantize(rt, out.matrix(), cast)
        y = narrow if spec.quantize_output else out
        out = out if rule.high_output else narrow
    elif isinstance(out, QuantizedTensor) and not spec.quantize_output:
        y = ops.dequantize(rt, out, spec.dtype).reshape(*frame_q.shape[:-1], out.shape[1])
    kept = [_kept(x, came) for x, came in zip(held, (a, b, c), strict=False)]
    first, second, third = (*kept, None, None)[:3]
    inputs = inputs._replace(a=first, b=second, c=third)
    return (y,), AttentionFp8Saved(*inputs, *frames, None if layer.recompute else keep(out, True), stats, pairs)


@explained
def backward(
    rt: Runtime, dy: Value, saved: AttentionFp8Saved, *, spec: AttentionFp8Spec, scales: Scales | None = None
) -> tuple[Value | None, Value | None, Value | None]:
    """(da, db, dc): gradients of the inputs as they came, in the activation dtype or quantized."""
    if scales is None:
        raise without_state("the backward of attention in FP8")
    s, layer, rule = saved, spec.attention, spec.precision
    frames = s.frame_q, s.frame_kv
    terms = terms_of(s)
    held = [
        _restored(x, _matrix(layer, frames[which], tail), rule.qkv)
        for x, (which, tail) in zip((s.a, s.b, s.c), _tails(layer), strict=False)
    ]
    stats = s.stats
    if layer.recompute:
        out, stats = _again(rt, held, frames, terms, spec, s.pairs)
    else:
        assert s.out is not None
        out = _restored(s.out, _matrix(layer, s.frame_q), rule.output) if s.out.dtype is dtypes.uint8 else s.out
    assert stats is not None
    done = Done(held, frames, terms, out, stats)
    if not rule.backward:
        return _delivered(rt, _plain_backward(rt, dense(rt, dy, spec.dtype), done, spec), done, spec)
    dy = as_asked(rt, dy, rule.grad, spec.dtype)
    if isinstance(dy, Tensor):
        dy = ops.quantize(
            rt, dy.matrix(), backward_cast(rule.grad, scales, DOUT[0], rowwise=True, columnwise=False, slot=DOUT[1])
        )
    return _delivered(rt, _fp8_backward(rt, dy, done, s.pairs, spec, scales), done, spec)


class Done(NamedTuple):
    """What a forward has left."""

    held: list[QuantizedTensor]
    frames: Frames
    terms: Terms
    out: Value
    stats: Tensor


def check(spec: AttentionFp8Spec) -> None:
    """The layer's parts exist in FP8."""
    layer, rule = spec.attention, spec.precision
    reason = fp8_refusal(layer.core, rule.qkv.scaling, row_widths(layer))
    if reason is not None or rule.history is None:
        raise UnsupportedError(
            "FP8 attention",
            reason or "no history for P and dS",
            "what docs/attention.md lists under FP8",
            "leave it out, or run attention in high precision (NVTE_DPA_FP8_RECIPE=F16)",
        )


def row_widths(layer: AttentionLayerSpec) -> tuple[int, ...]:
    """The widths of the rows that are quantized: of the inputs, and of the output."""
    return (*[prod(tail) for _, tail in _tails(layer)], layer.heads * layer.d_v)


# ---------------------------------------------------------------------------------------------- the products


def _attend(
    rt: Runtime,
    held: list[QuantizedTensor],
    frames: Frames,
    terms: Terms,
    spec: AttentionFp8Spec,
    pairs: Tensor,
    out: Value,
    amax: Tensor | None,
) -> Tensor | None:
    """Write the output; the statistics, if there will be a backward."""
    layer = spec.attention
    core, q, k, v = views(layer, *_views(layer, held, frames))
    p_amax, o_amax = (_amax(amax, FORWARD_SLOTS * gemm + slot) for gemm, slot in (P, OUT))
    done = ops.attention_fp8_forward(
        rt,
        q,
        k,
        v,
        spec=core,
        terms=terms,
        stats=any(layer.needs),
        out=_as(out, (*q.shape[:-1], layer.d_v)),
        scales=ForwardScales(
            *_inverses(held),
            _scaled(pairs, 0, p_amax),
            _scaled(pairs, 1, o_amax) if isinstance(out, QuantizedTensor) else None,
        ),
    )
    return done.stats


def _again(
    rt: Runtime, held: list[QuantizedTensor], frames: Frames, terms: Terms, spec: AttentionFp8Spec, pairs: Tensor
) -> tuple[Value, Tensor | None]:
    """The output and the statistics once more, with the scales of then; nothing is recorded."""
    layer, rule = spec.attention, spec.precision.output
    out: Value
    if rule.scaling == "delayed":
        made = _storage(rt, _matrix(layer, frames[0]), rule)
        assert made.rowwise is not None
        out = QuantizedTensor(made.format, made.shape, Copy(made.rowwise, element(pairs, 3), None), None)
    else:
        out = rt.empty((*frames[0].shape[:-1], layer.heads * layer.d_v), spec.dtype)
    return out, _attend(rt, held, frames, terms, spec, pairs, out, None)


def _fp8_backward(
    rt: Runtime, dy: QuantizedTensor, done: Done, pairs: Tensor, spec: AttentionFp8Spec, scales: Scales
) -> list[Value]:
    """The gradients of what was held, quantized under their one scale, or plain."""
    layer, rule = spec.attention, spec.precision
    core, q, k, v = views(layer, *_views(layer, done.held, done.frames))
    dp_at, at = (BACKWARD_SLOTS * gemm + slot for gemm, slot in (DP, DQKV))
    assert scales.backward_scale is not None
    dp_scale, scale = element(scales.backward_scale, dp_at), element(scales.backward_scale, at)
    made: list[Value] = []
    scaled = None
    if rule.grad_input.scaling == "delayed":
        stores = [_storage(rt, x.shape, rule.grad_input) for x in done.held]
        found = ops.scale_pairs(rt, (dp_scale, *[scale] * len(stores)), (None, *[store.scale_inv for store in stores]))
        scaled = _scaled(found, 1, _amax(scales.backward_amax, at))
        made += stores
    else:
        found = ops.scale_pairs(rt, (dp_scale,), (None,))
        made += [rt.empty(x.shape, spec.dtype) for x in done.held]
    whole = views(layer, *_views(layer, made, done.frames))
    shape = (*q.shape[:-1], layer.d_v)
    ops.attention_fp8_backward(
        rt,
        _as(dy, shape),
        q,
        k,
        v,
        _as(done.out, shape),
        done.stats,
        spec=core,
        terms=done.terms,
        grads=whole[1:],
        grad_dtype=whole[1].dtype,
        scales=BackwardScales(
            *_inverses(done.held),
            done.out.scale_inv if isinstance(done.out, QuantizedTensor) else None,
            dy.scale_inv,
            _scaled(pairs, 0, None),
            _scaled(found, 0, _amax(scales.backward_amax, dp_at)),
            scaled,
            scaled,
            scaled,
        ),
    )
    return made


def _plain_backward(rt: Runtime, dy: Tensor, done: Done, spec: AttentionFp8Spec) -> list[Value]:
    """The gradients by attention in the activation dtype, from the values that forward used."""
    layer = spec.attention
    values = _views(layer, [ops.dequantize(rt, x, spec.dtype) for x in done.held], done.frames)
    core, q, k, v = views(layer, *values)
    made: list[Value] = [rt.empty(x.shape, spec.dtype) for x in done.held]
    whole = views(layer, *_views(layer, made, done.frames))
    shape = (*q.shape[:-1], layer.d_v)
    ops.attention_backward(
        rt,
        on_boundary(rt, dy).reshape(*shape),
        q,
        k,
        v,
        dense(rt, done.out, spec.dtype).reshape(*shape),
        done.stats,
        spec=core,
        terms=done.terms,
        grads=whole[1:],
    )
    return made


def _delivered(
    rt: Runtime, grads: list[Value], done: Done, spec: AttentionFp8Spec
) -> tuple[Value | None, Value | None, Value | None]:
    """The gradients of the inputs, where they are wanted."""
    layer, frames = spec.attention, done.frames
    if layer.copies:
        parts = _views(layer, [dense(rt, g, spec.dtype) for g in grads], frames)
        return ops.rope_qkv_backward(rt, *parts, None, None, **split_options(layer)), None, None
    found: list[Value | None] = []
    for g, (which, _), wanted in zip(grads, _tails(layer), layer.needs, strict=False):
        if not wanted:
            found.append(None)
        elif spec.quantize_grad and layer.packing == "qkv" and isinstance(g, QuantizedTensor):
            found.append(g)
        else:
            found.append(dense(rt, g, spec.dtype).reshape(*frames[which].shape[:-1], g.shape[1]))
    first, second, third = (*found, None, None)[:3]
    return first, second, third


# ------------------------------------------------------------------------------------------- their operands


def _tails(layer: AttentionLayerSpec) -> list[tuple[int, tuple[int, ...]]]:
    """(whose frame, what a token has) of each tensor that is quantized: 0 for q's tokens, 1 for those of k and v."""
    h, g, dk, dv = layer.heads, layer.groups, layer.d_qk, layer.d_v
    if layer.packing == "separate" or layer.copies:
        return [(0, (h, dk)), (1, (g, dk)), (1, (g, dv))]
    if layer.packing == "kv":
        return [(0, (h, dk)), (1, (g * (dk + dv),))]
    return [(0, (h * dk + g * (dk + dv),))]


def _matrix(layer: AttentionLayerSpec, frame: Tensor, tail: tuple[int, ...] | None = None) -> tuple[int, int]:
    """The shape of a tensor with a row for each token; of the output, unless a tail is given."""
    return prod(frame.shape[:-1]), layer.heads * layer.d_v if tail is None else prod(tail)


def _frame(rt: Runtime, x: Value) -> Tensor:
    """An empty tensor that keeps an input's leading dimensions."""
    return rt.empty((*x.shape[:-1], 0), dtypes.uint8)


def _apart(rt: Runtime, inputs: tuple[Value | None, ...], frames: Frames, spec: AttentionFp8Spec) -> list[Value]:
    """What will be quantized: the inputs, or q, k and v copied apart where no strides lead to them."""
    if not spec.attention.copies:
        return [x for x in inputs if x is not None]
    assert inputs[0] is not None
    packed = dense(rt, inputs[0], spec.dtype)
    packed = packed.reshape(*frames[0].shape[:-1], packed.shape[-1])
    q, k, v = ops.rope_qkv(rt, packed, None, None, **split_options(spec.attention))
    assert q is not None
    return [q, k, v]


def _quantized(rt: Runtime, inputs: list[Value], spec: AttentionFp8Spec, scales: Scales) -> list[QuantizedTensor]:
    """Each input quantized, all in one launch where their widths agree; those that came so as they are."""
    rule = spec.precision.qkv
    cast = forward_cast(rule, scales, *QKV, rowwise=True, columnwise=False)
    given = [as_asked(rt, x, rule, spec.dtype) for x in inputs]
    tails = _tails(spec.attention)
    try:
        shapes = [(prod(x.shape) // prod(tail), prod(tail)) for x, (_, tail) in zip(given, tails, strict=True)]
    except ValueError as error:
        raise ArgumentError(
            "attention_fp8.forward",
            f"{len(given)} tensors",
            f"{len(tails)} of packing={spec.attention.packing!r}",
            "pass q, k and v as the spec's packing has them",
        ) from error
    plain = [x.reshape(*shape) for x, shape in zip(given, shapes, strict=True) if isinstance(x, Tensor)]
    if len(plain) > 1 and len({x.shape[1] for x in plain}) == 1:
        made = iter(ops.quantize_many(rt, plain, [cast] * len(plain)))
    else:
        made = iter([ops.quantize(rt, x, cast) for x in plain])
    return [x if isinstance(x, QuantizedTensor) else next(made) for x in given]


def _storage(rt: Runtime, shape: tuple[int, int], rule: Operand) -> QuantizedTensor:
    """Memory for a quantized matrix that attention writes; rows of padding are zeros."""
    made = allocate(rt, shape, Cast(rule.format, rowwise=True, columnwise=False))
    data = made.rowwise
    assert data is not None
    if rt.device is not META and data.shape[0] > shape[0]:
        rt.backend.zero(rt, data.rows(shape[0], data.shape[0]))
    return made


def _as(x: Value, shape: tuple[int, ...]) -> Tensor:
    """The values, or the codes of a quantized matrix without its padding, in another shape."""
    if isinstance(x, Tensor):
        return x.reshape(*shape)
    data = x.rowwise
    assert data is not None
    return Tensor(data.ptr, shape, data.dtype, data.device, data)


def _views(layer: AttentionLayerSpec, held: Sequence[Value], frames: Frames) -> tuple[Tensor, Any, Any]:
    """The matrices as the tensors that `views` takes."""
    found = [_as(x, (*frames[which].shape[:-1], *tail)) for x, (which, tail) in zip(held, _tails(layer), strict=True)]
    first, second, third = (*found, None, None)[:3]
    assert first is not None
    return first, second, third


def _kept(x: QuantizedTensor, given: Value | None) -> Value | None:
    return x if x is given else x.block


def _restored(x: Value | None, shape: tuple[int, int], rule: Operand) -> QuantizedTensor:
    """A matrix that was kept: as its block, or as itself."""
    if isinstance(x, QuantizedTensor):
        return x
    assert x is not None
    return QuantizedTensor.rowwise_in(x, shape, rule.format)


def _inverses(held: list[QuantizedTensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse scales of q, k and v."""
    return held[0].scale_inv, held[min(1, len(held) - 1)].scale_inv, held[-1].scale_inv


def _scaled(pairs: Tensor, row: int, amax: Tensor | None) -> Scaled:
    return Scaled(element(pairs, 2 * row), element(pairs, 2 * row + 1), amax)


def _amax(vector: Tensor | None, slot: int) -> Tensor | None:
    return None if vector is None else element(vector, slot)
