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
from dataclasses import dataclass, replace
from inspect import unwrap
from math import prod
from typing import Any

from te_core import dtypes
from te_core.arguments import explained, settle
from te_core.attention_rules import FP8_TAKES, fp8_refusal
from te_core.dtypes import DType
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers import attention
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec, AttentionSaved, split_options, terms_of, views
from te_core.layers.inspector import Inspector, offer
from te_core.ops import raw as ops
from te_core.ops.attention_fp8 import BackwardScales, ForwardScales, Scaled
from te_core.ops.quantize import allocate
from te_core.precision import AttentionPrecision, Operand
from te_core.quantize.operands import Value, as_asked, dense, quantize_together
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

Operands = list[QuantizedTensor]  # q, k and v, or what they are packed into

plain_backward = unwrap(attention.backward)  # what is asked of it was checked here


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
) -> tuple[tuple[Value], AttentionSaved]:
    """((out,), saved)."""
    if scales is None or scales.forward_scale is None:  # P and dS always have a history
        raise without_state("the forward of attention in FP8")
    check(spec)
    layer, rule = spec.attention, spec.precision
    if frame_q is None:
        frame_q = rt.empty((*a.shape[:-1], 0), dtypes.uint8)
    if frame_kv is None:
        frame_kv = frame_q if b is None else rt.empty((*b.shape[:-1], 0), dtypes.uint8)
    inputs = AttentionInputs(a, b, c, bias, slopes, sink, cu_q, cu_kv, cu_q_padded, cu_kv_padded, mask, pages, rng)
    operands = _quantized(rt, _apart(rt, (a, b, c), frame_q, spec), spec, scales, inspectors[0])
    at = [element(scales.forward_scale, FORWARD_SLOTS * gemm + slot) for gemm, slot in (P, OUT)]
    out = y = _room(rt, (*frame_q.shape[:-1], layer.heads * layer.d_v), rule.output, spec.dtype)
    places = [out.scale_inv] if isinstance(out, QuantizedTensor) else []
    pairs = ops.scale_pairs(rt, at[: 1 + len(places)], (None, *places))
    saved = AttentionSaved(*inputs, None, None, frame_q, frame_kv, pairs)
    stats = _attend(rt, operands, saved, spec, out, scales.forward_amax)
    if isinstance(out, Tensor) and (spec.quantize_output or not rule.high_output):
        cast = forward_cast(rule.output, scales, *OUT, rowwise=True, columnwise=False)
        narrow = ops.quantize(rt, out.matrix(), cast)
        y = narrow if spec.quantize_output else out
        out = out if rule.high_output else narrow
    elif isinstance(out, QuantizedTensor) and not spec.quantize_output:
        y = ops.dequantize(rt, out, spec.dtype).reshape(*frame_q.shape[:-1], out.shape[1])
    a, b, c = _three([x if x is came else x.block for x, came in zip(operands, (a, b, c), strict=False)])
    return (y,), saved._replace(a=a, b=b, c=c, out=None if layer.recompute else keep(out, True), stats=stats)


@explained
def backward(
    rt: Runtime,
    dy: Value,
    saved: AttentionSaved,
    *,
    spec: AttentionFp8Spec,
    scales: Scales | None = None,
    inspectors: Sequence[Inspector | None] = (None,),
) -> tuple[Value | None, ...]:
    """(da, db, dc): gradients of the inputs as they came, in the activation dtype or quantized."""
    if scales is None:
        raise without_state("the backward of attention in FP8")
    layer, rule = spec.attention, spec.precision
    frames = _frames(saved)
    parts = zip(saved[:3], frames, _tails(layer), strict=False)
    operands = [_restored(x, frame, prod(tail), rule.qkv) for x, frame, tail in parts]
    out: Value
    if layer.recompute:  # with the scales of then; nothing is recorded
        out = _room(rt, (*frames[0].shape[:-1], layer.heads * layer.d_v), rule.output, spec.dtype)
        if isinstance(out, QuantizedTensor):
            assert out.rowwise is not None and saved.pairs is not None
            out = QuantizedTensor(out.format, out.shape, Copy(out.rowwise, element(saved.pairs, 3), None), None)
        saved = saved._replace(stats=_attend(rt, operands, saved, spec, out, None))
    else:
        assert saved.out is not None
        out = saved.out
        if out.dtype is dtypes.uint8:
            out = _restored(out, frames[0], layer.heads * layer.d_v, rule.output)
    if not rule.backward:
        dy = dense(rt, dy, spec.dtype)
        offer(rt, inspectors[0], ("dgrad", "do"), dy)
        return _plain_backward(rt, dy, operands, out, saved, spec)
    dy = given = as_asked(rt, dy, rule.grad, spec.dtype)
    cast = backward_cast(rule.grad, scales, DOUT[0], rowwise=True, columnwise=False, slot=DOUT[1])
    if isinstance(dy, Tensor):
        dy = ops.quantize(rt, dy.matrix(), cast)
    _show(rt, inspectors[0], ("dgrad", "do"), given, cast, dy, spec)
    return _delivered(rt, _fp8_backward(rt, dy, operands, out, saved, spec, scales), saved, spec)


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


def row_widths(layer: AttentionLayerSpec) -> tuple[int, ...]:
    """The widths of the rows that are quantized: of the inputs, and of the output."""
    return (*map(prod, _tails(layer)), layer.heads * layer.d_v)


# ---------------------------------------------------------------------------------------------- the products


def _attend(
    rt: Runtime, operands: Operands, saved: AttentionSaved, spec: AttentionFp8Spec, out: Value, amax: Tensor | None
) -> Tensor | None:
    """Write the output; the statistics, if there will be a backward."""
    layer, pairs = spec.attention, saved.pairs
    assert pairs is not None
    q, k, v = views(layer, *_parts(layer, operands, saved))
    p_at, o_at = (FORWARD_SLOTS * gemm + slot for gemm, slot in (P, OUT))
    scaled = _scaled(pairs, 1, amax, o_at) if isinstance(out, QuantizedTensor) else None
    scales = ForwardScales(*_inverses(operands), _scaled(pairs, 0, amax, p_at), scaled)
    out = _as(out, (*q.shape[:-1], layer.d_v))
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
    q, k, v = views(layer, *_parts(layer, operands, saved))
    assert saved.stats is not None and saved.pairs is not None and scales.backward_scale is not None
    dp_at, at = (BACKWARD_SLOTS * gemm + slot for gemm, slot in (DP, DQKV))
    dp_scale, scale = element(scales.backward_scale, dp_at), element(scales.backward_scale, at)
    made = [_room(rt, x.shape, rule.grad_input, spec.dtype) for x in operands]
    places = [x.scale_inv for x in made if isinstance(x, QuantizedTensor)]
    found = ops.scale_pairs(rt, (dp_scale, *[scale] * len(places)), (None, *places))
    p, dp = _scaled(saved.pairs, 0), _scaled(found, 0, scales.backward_amax, dp_at)
    scaled = _scaled(found, 1, scales.backward_amax, at) if places else None
    out_inverse = out.scale_inv if isinstance(out, QuantizedTensor) else None
    dq, dk, dv = views(layer, *_parts(layer, made, saved))
    shape = (*q.shape[:-1], layer.d_v)
    ops.attention_fp8_backward(
        rt,
        _as(dy, shape),
        q,
        k,
        v,
        _as(out, shape),
        saved.stats,
        spec=layer.core,
        terms=terms_of(saved),
        grads=(dq, dk, dv),
        grad_dtype=dq.dtype,
        scales=BackwardScales(*_inverses(operands), out_inverse, dy.scale_inv, p, dp, scaled, scaled, scaled),
    )
    return made


def _plain_backward(
    rt: Runtime, dy: Tensor, operands: Operands, out: Value, saved: AttentionSaved, spec: AttentionFp8Spec
) -> tuple[Value | None, ...]:
    """The gradients by attention in the activation dtype, from the values that forward used."""
    a, b, c = _parts(spec.attention, [ops.dequantize(rt, x, spec.dtype) for x in operands], saved)
    plain = saved._replace(a=a, b=b, c=c, out=dense(rt, out, spec.dtype))
    grads = plain_backward(rt, dy, None, plain, spec=replace(spec.attention, recompute=False))
    rows = [(g, frame.shape[:-1]) for g, frame in zip(grads, _frames(saved), strict=False)]
    return tuple([None if g is None else g.reshape(*lead, prod(g.shape[len(lead) :])) for g, lead in rows])


def _delivered(
    rt: Runtime, grads: list[Value], saved: AttentionSaved, spec: AttentionFp8Spec
) -> tuple[Value | None, ...]:
    """The gradients of the inputs, where they are wanted."""
    layer = spec.attention
    if layer.copies:
        parts = _parts(layer, [dense(rt, g, spec.dtype) for g in grads], saved)
        return ops.rope_qkv_backward(rt, *parts, None, None, **split_options(layer)), None, None
    found: list[Value | None] = []
    for g, frame, wanted in zip(grads, _frames(saved), layer.needs, strict=False):
        if not wanted:
            found.append(None)
        elif spec.quantize_grad and layer.packing == "qkv" and isinstance(g, QuantizedTensor):
            found.append(g)
        else:
            found.append(dense(rt, g, spec.dtype).reshape(*frame.shape[:-1], g.shape[1]))
    return _three(found)


# ------------------------------------------------------------------------------------------- their operands


def _tails(layer: AttentionLayerSpec) -> list[tuple[int, ...]]:
    """What a token has of each tensor that is quantized."""
    h, g, dk, dv = layer.heads, layer.groups, layer.d_qk, layer.d_v
    if layer.packing == "separate" or layer.copies:
        return [(h, dk), (g, dk), (g, dv)]
    if layer.packing == "kv":
        return [(h, dk), (g * (dk + dv),)]
    return [(h * dk + g * (dk + dv),)]


def _frames(saved: AttentionSaved) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and v."""
    assert saved.frame_q is not None and saved.frame_kv is not None
    return saved.frame_q, saved.frame_kv, saved.frame_kv


def _apart(rt: Runtime, inputs: tuple[Value | None, ...], frame: Tensor, spec: AttentionFp8Spec) -> list[Value]:
    """What will be quantized: the inputs, or q, k and v copied apart where no strides lead to them."""
    if not spec.attention.copies:
        return [x for x in inputs if x is not None]
    assert inputs[0] is not None
    packed = dense(rt, inputs[0], spec.dtype)
    packed = packed.reshape(*frame.shape[:-1], packed.shape[-1])
    return [x for x in ops.rope_qkv(rt, packed, None, None, **split_options(spec.attention)) if x is not None]


def names_of(packing: str) -> tuple[str, ...]:
    """What an inspector knows the inputs by."""
    return {"separate": ("q", "k", "v"), "kv": ("q", "kv"), "qkv": ("qkv",)}[packing]


def _show(
    rt: Runtime,
    inspector: Inspector | None,
    point: tuple[str, str],
    given: Value,
    cast: Cast,
    made: QuantizedTensor,
    spec: AttentionFp8Spec,
) -> None:
    """A tensor and its cast to who wants to see it; what came quantized as the values that it holds."""
    if inspector is not None and point in inspector.request:
        left = offer(rt, inspector, point, dense(rt, given, spec.dtype).matrix(), cast, made)
        if left is not made:
            raise unchangeable(point[1])


def unchangeable(tensor: str) -> UnsupportedError:
    """The error for a tensor of fused attention that an inspector would exchange."""
    return UnsupportedError(
        "FP8 attention",
        f"another {tensor} from an inspector or a feature (modify_tensor)",
        "looking at it, the layer in high precision (DisableQuantizationLayer), changes in UnfusedDotProductAttention",
        "leave attention out of the feature's tensors, or set NVTE_FUSED_ATTN=0 and NVTE_UnfusedDPA_Emulate_FP8=1",
    )


def _quantized(
    rt: Runtime, inputs: list[Value], spec: AttentionFp8Spec, scales: Scales, inspector: Inspector | None
) -> list[QuantizedTensor]:
    """Each input quantized, those that came so as they are."""
    rule = spec.precision.qkv
    cast = forward_cast(rule, scales, *QKV, rowwise=True, columnwise=False)
    given = [as_asked(rt, x, rule, spec.dtype) for x in inputs]
    tails = _tails(spec.attention)
    if len(given) != len(tails):
        raise ArgumentError(
            "attention_fp8.forward",
            f"{len(given)} tensors",
            f"{len(tails)} of packing={spec.attention.packing!r}",
            "pass q, k and v as the spec's packing has them",
        )
    values = [x.reshape(-1, prod(tail)) if isinstance(x, Tensor) else x for x, tail in zip(given, tails, strict=True)]
    made = quantize_together(rt, values, cast)
    if inspector is not None:
        names = names_of("separate" if spec.attention.copies else spec.attention.packing)
        for name, value, q in zip(names, values, made, strict=True):
            _show(rt, inspector, ("fprop", name), value, cast, q, spec)
    return made


def _room(rt: Runtime, shape: tuple[int, ...], rule: Operand, dtype: DType) -> Value:
    """Memory for a matrix that attention writes: under the history's scale, if there is one, or plain.

    Rows of padding are zeros.
    """
    if rule.scaling != "delayed":
        return rt.empty(shape, dtype)
    rows = prod(shape[:-1])
    made = allocate(rt, (rows, shape[-1]), Cast(rule.format, rowwise=True, columnwise=False))
    data = made.rowwise
    assert data is not None
    if rt.device is not META and data.shape[0] > rows:
        rt.backend.zero(rt, data.rows(rows, data.shape[0]))
    return made


def _as(x: Value, shape: tuple[int, ...]) -> Tensor:
    """The values, or the codes of a quantized matrix without its padding, in another shape."""
    if isinstance(x, Tensor):
        return x.reshape(*shape)
    data = x.rowwise
    if data is None or (data.device is not META and (data.shape[1] != x.shape[1] or prod(shape) != prod(x.shape))):
        raise ArgumentError(
            "attention_fp8",
            f"{x!r} as {tuple(shape)}",
            "a tensor that holds its rowwise copy, a row for each token of the frame, of the spec's heads",
            "correct the tensor, its frame or the spec",
        )
    return Tensor(data.ptr, shape, data.dtype, data.device, data)


def _three(found: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Of each input; None in the place of what a packed one holds."""
    first, second, third = (*found, None, None)[:3]
    return first, second, third


def _parts(layer: AttentionLayerSpec, operands: Sequence[Value], saved: AttentionSaved) -> tuple[Tensor, Any, Any]:
    """The matrices as the tensors that `views` takes."""
    parts = zip(operands, _frames(saved), _tails(layer), strict=False)
    return _three([_as(x, (*frame.shape[:-1], *tail)) for x, frame, tail in parts])


def _restored(x: Value | None, frame: Tensor, width: int, rule: Operand) -> QuantizedTensor:
    """A matrix that was kept: as its block, or as itself."""
    if isinstance(x, QuantizedTensor):
        return x
    assert x is not None
    return QuantizedTensor.rowwise_in(x, (prod(frame.shape[:-1]), width), rule.format)


def _inverses(operands: list[QuantizedTensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse scales of q, k and v."""
    return operands[0].scale_inv, operands[min(1, len(operands) - 1)].scale_inv, operands[-1].scale_inv


def _scaled(pairs: Tensor, row: int, maxima: Tensor | None = None, slot: int = 0) -> Scaled:
    amax = None if maxima is None else element(maxima, slot)
    return Scaled(element(pairs, 2 * row), element(pairs, 2 * row + 1), amax)
