"""What attention in FP8 reads and writes: its spec, the slots of the scaling state, and inputs and gradients as codes.

See te_core/layers/attention_fp8.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from te_core import dtypes
from te_core.arguments import settle
from te_core.dtypes import DType
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.attention import AttentionLayerSpec, AttentionSaved, split_options, tails_of
from te_core.layers.communicator import Communicator
from te_core.layers.inspector import Inspector, offer
from te_core.ops import raw as ops
from te_core.ops.attention_fp8 import BackwardScales, ForwardScales, Scaled
from te_core.ops.quantize import allocate
from te_core.precision import AttentionPrecision, Operand
from te_core.quantize.operands import Value, as_asked, dense, quantize_together
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
)
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import META, Tensor

#: (GEMM, slot) of q, k and v, of the output, and of P; of their gradients.
QKV, OUT, P = (0, OUTPUT), (1, INPUT), (2, OUTPUT)
DQKV, DOUT, DP = (0, GRAD_OUTPUT), (1, GRAD_INPUT), (2, GRAD_INPUT)

Operands = list[QuantizedTensor]  # q, k and v, or what they are packed into


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


def row_widths(layer: AttentionLayerSpec) -> tuple[int, ...]:
    """The widths of the rows that are quantized: of the inputs, and of the output."""
    return (*map(prod, tails_of(layer)), layer.heads * layer.d_v)


def apart(rt: Runtime, inputs: tuple[Value | None, ...], frame: Tensor, spec: AttentionFp8Spec) -> list[Value]:
    """What will be quantized: the inputs, or q, k and v copied apart where no strides lead to them."""
    if not spec.attention.copies:
        return [x for x in inputs if x is not None]
    assert inputs[0] is not None
    packed = dense(rt, inputs[0], spec.dtype)
    packed = packed.reshape(*frame.shape[:-1], packed.shape[-1])
    return [x for x in ops.rope_qkv(rt, packed, None, None, **split_options(spec.attention)) if x is not None]


def agreed(rt: Runtime, values: Sequence[Tensor], cast: Cast, ranks: Sequence[Communicator]) -> list[Cast]:
    """The cast of each value with the maximum over all ranks: their codes meet under one scale."""
    maxima = rt.empty((len(values),), dtypes.float32)
    for i, x in enumerate(values):
        ops.context_sum(rt, ops.amax(rt, x), None, out=element(maxima, i))
    for comm in ranks:
        comm.all_reduce(rt, maxima, "max").wait()
    return [cast.scaled_by(element(maxima, i)) for i in range(len(values))]


def narrow_gradient(
    rt: Runtime,
    dy: Value,
    spec: AttentionFp8Spec,
    scales: Scales,
    inspector: Inspector | None,
    ranks: Sequence[Communicator] = (),
) -> QuantizedTensor:
    """The gradient of the output, quantized, and shown. `ranks`: those that have to have one scale."""
    rule = spec.precision.grad
    dy = given = as_asked(rt, dy, rule, spec.dtype)
    cast = backward_cast(rule, scales, DOUT[0], rowwise=True, columnwise=False, slot=DOUT[1])
    if isinstance(dy, Tensor):
        if ranks and rule.scaling == "current":
            (cast,) = agreed(rt, [dy.matrix()], cast, ranks)
        dy = ops.quantize(rt, dy.matrix(), cast)
    show(rt, inspector, ("dgrad", "do"), given, cast, dy, spec)
    return dy


def frames_of(saved: AttentionSaved) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and v."""
    assert saved.frame_q is not None and saved.frame_kv is not None
    return saved.frame_q, saved.frame_kv, saved.frame_kv


def names_of(packing: str) -> tuple[str, ...]:
    """What an inspector knows the inputs by."""
    return {"separate": ("q", "k", "v"), "kv": ("q", "kv"), "qkv": ("qkv",)}[packing]


def show(
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


def quantized_inputs(
    rt: Runtime,
    inputs: list[Value],
    spec: AttentionFp8Spec,
    scales: Scales,
    inspector: Inspector | None,
    ranks: Sequence[Communicator],
) -> list[QuantizedTensor]:
    """Each input quantized, those that came so as they are. `ranks`: those that have to have one scale."""
    rule = spec.precision.qkv
    cast = forward_cast(rule, scales, *QKV, rowwise=True, columnwise=False)
    given = [as_asked(rt, x, rule, spec.dtype) for x in inputs]
    tails = tails_of(spec.attention)
    if len(given) != len(tails):
        raise ArgumentError(
            "attention_fp8.forward",
            f"{len(given)} tensors",
            f"{len(tails)} of packing={spec.attention.packing!r}",
            "pass q, k and v as the spec's packing has them",
        )
    values = [x.reshape(-1, prod(tail)) if isinstance(x, Tensor) else x for x, tail in zip(given, tails, strict=True)]
    if ranks and rule.scaling == "current":
        plain = [dense(rt, x, spec.dtype) for x in values]  # who came with a scale has one of its own rank
        made = [ops.quantize(rt, x, one) for x, one in zip(plain, agreed(rt, plain, cast, ranks), strict=True)]
    else:
        made = quantize_together(rt, values, cast)
    if inspector is not None:
        names = names_of("separate" if spec.attention.copies else spec.attention.packing)
        for name, value, q in zip(names, values, made, strict=True):
            show(rt, inspector, ("fprop", name), value, cast, q, spec)
    return made


def room_for(rt: Runtime, shape: tuple[int, ...], rule: Operand, dtype: DType) -> Value:
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


def shaped(x: Value, shape: tuple[int, ...]) -> Tensor:
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


def three(found: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Of each input; None in the place of what a packed one holds."""
    first, second, third = (*found, None, None)[:3]
    return first, second, third


def parts_of(layer: AttentionLayerSpec, operands: Sequence[Value], saved: AttentionSaved) -> tuple[Tensor, Any, Any]:
    """The matrices as the tensors that `views` takes."""
    parts = zip(operands, frames_of(saved), tails_of(layer), strict=False)
    return three([shaped(x, (*frame.shape[:-1], *tail)) for x, frame, tail in parts])


def restored_from(x: Value | None, frame: Tensor, width: int, rule: Operand) -> QuantizedTensor:
    """A matrix that was kept: as its block, or as itself."""
    if isinstance(x, QuantizedTensor):
        return x
    assert x is not None
    return QuantizedTensor.rowwise_in(x, (prod(frame.shape[:-1]), width), rule.format)


def inverses_of(operands: list[QuantizedTensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse scales of q, k and v."""
    return operands[0].scale_inv, operands[min(1, len(operands) - 1)].scale_inv, operands[-1].scale_inv


def held_operands(saved: AttentionSaved, layer: AttentionLayerSpec, rule: Operand) -> Operands:
    """The inputs as forward kept them."""
    parts = zip(saved[:3], frames_of(saved), tails_of(layer), strict=False)
    return [restored_from(x, frame, prod(tail), rule) for x, frame, tail in parts]


def held_output(saved: AttentionSaved, layer: AttentionLayerSpec, rule: Operand) -> Value:
    """The output as forward kept it: plain or quantized."""
    out = saved.out
    assert out is not None
    if out.dtype is not dtypes.uint8:
        return out
    return restored_from(out, frames_of(saved)[0], layer.heads * layer.d_v, rule)


def delivered(
    rt: Runtime, grads: Sequence[Value], leads: Sequence[tuple[int, ...]], spec: AttentionFp8Spec
) -> tuple[Value | None, ...]:
    """The gradients of the inputs, where they are wanted, in these leading dimensions."""
    layer, found = spec.attention, list[Value | None]()
    for g, lead, tail, wanted in zip(grads, leads, tails_of(layer), layer.needs, strict=False):
        if not wanted:
            found.append(None)
        elif spec.quantize_grad and layer.packing == "qkv" and isinstance(g, QuantizedTensor):
            found.append(g)
        else:
            found.append(dense(rt, g, spec.dtype).reshape(*lead, prod(tail)))
    return three(found)


def forward_pairs(rt: Runtime, scales: Scales, places: Sequence[Tensor | None]) -> Tensor:
    """The scales of P, and of the output where its inverse has a place, with their inverses, as they are now."""
    assert scales.forward_scale is not None
    at = [element(scales.forward_scale, FORWARD_SLOTS * gemm + slot) for gemm, slot in (P, OUT)]
    return ops.scale_pairs(rt, at[: 1 + len(places)], (None, *places))


def forward_scales(operands: Operands, pairs: Tensor, amax: Tensor | None, codes: bool) -> ForwardScales:
    """Those of a product, whose maxima are raised in `amax`. `codes`: it writes its output as codes."""
    p_at, o_at = (FORWARD_SLOTS * gemm + slot for gemm, slot in (P, OUT))
    out = scaled_at(pairs, 1, amax, o_at) if codes else None
    return ForwardScales(*inverses_of(operands), scaled_at(pairs, 0, amax, p_at), out)


def backward_scales(
    rt: Runtime,
    dy: QuantizedTensor,
    operands: Operands,
    out: Value,
    saved: AttentionSaved,
    scales: Scales,
    places: Sequence[Tensor | None],
    codes: bool,
) -> BackwardScales:
    """The same of backward, whose gradients have one scale. `places`: where its inverse goes besides."""
    assert saved.pairs is not None and scales.backward_scale is not None
    dp_at, at = (BACKWARD_SLOTS * gemm + slot for gemm, slot in (DP, DQKV))
    dp_scale, scale = element(scales.backward_scale, dp_at), element(scales.backward_scale, at)
    found = ops.scale_pairs(rt, (dp_scale, *[scale] * len(places)), (None, *places))
    p, dp = scaled_at(saved.pairs, 0), scaled_at(found, 0, scales.backward_amax, dp_at)
    scaled = scaled_at(found, 1, scales.backward_amax, at) if codes else None
    out_inverse = out.scale_inv if isinstance(out, QuantizedTensor) else None
    return BackwardScales(*inverses_of(operands), out_inverse, dy.scale_inv, p, dp, scaled, scaled, scaled)


def scaled_at(pairs: Tensor, row: int, maxima: Tensor | None = None, slot: int = 0) -> Scaled:
    """The scale and its inverse in a row of pairs; the maximum in its slot, if maxima are noted."""
    amax = None if maxima is None else element(maxima, slot)
    return Scaled(element(pairs, 2 * row), element(pairs, 2 * row + 1), amax)
