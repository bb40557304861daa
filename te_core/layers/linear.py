"""The one linear: y = x w^T + b and its gradients, in any precision. Every module's GEMMs go through this file.

Top: `forward` and `backward`, the Linear layer. Below: the three GEMMs on operands that may be plain or
quantized, which the norm+linear and MLP layers share, and the quantizing of a weight and of an output gradient.

Shapes: x [.., K], w [N, K], b [N], y [.., N]; M is the product of the leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core import dtypes, ops
from te_core.dtypes import DType
from te_core.layers.inspector import Inspector, Operand, Request, alike, offer, offer_result
from te_core.quantize.state import INPUT, WEIGHT, Scales, backward_cast, forward_cast
from te_core.quantized import Cast, QuantizedTensor, padded
from te_core.precision import Gemm, Precision
from te_core.runtime import Runtime
from te_core.tensor import META, Tensor


class Needs(NamedTuple):
    """Which gradients the caller wants; nothing is quantized or kept for the others."""

    input: bool
    weight: bool
    bias: bool


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """All that a Linear's plan depends on besides shapes."""

    dtype: DType  # of activations
    precision: Precision | None  # None: everything in `dtype`
    needs: Needs
    inspect: Request | None = None


class LinearSaved(NamedTuple):
    """What backward reads. Inputs stand here as themselves; quantized operands as the orientation it needs."""

    x: Tensor | None  # plain [.., K], or the block of a columnwise FP8 copy
    weight: Tensor | None  # the parameter itself: its shape, its dtype, its version
    w: Tensor | None  # plain [N, K], or the block of a columnwise FP8 copy


def forward(
    rt: Runtime,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    spec: LinearSpec,
    scales: Scales | None = None,
    inspector: Inspector | None = None,
) -> tuple[tuple[Tensor], LinearSaved]:
    """((y,), saved). `scales` is the delayed-scaling state, if the recipe keeps one."""
    needs, precision = spec.needs, spec.precision
    out = rt.empty((*x.shape[:-1], weight.shape[0]), spec.dtype)
    x2 = x.matrix()
    a: Operand = x2
    b: Operand = weight
    xc = wc = None
    if precision is not None:
        xc = forward_cast(precision.input, scales, 0, INPUT, rowwise=True, columnwise=needs.weight)
        wc = forward_cast(precision.weight, scales, 0, WEIGHT, rowwise=True, columnwise=needs.input)
        a, b = ops.quantize(rt, x2, xc), ops.quantize(rt, weight, wc)
    kept_x, kept_w = a, b
    if spec.inspect is not None:
        if needs.weight:
            kept_x = offer(rt, inspector, ("wgrad", "activation"), x2, xc, a)
        if needs.input:
            kept_w = offer(rt, inspector, ("dgrad", "weight"), weight, wc, b)
        a = offer(rt, inspector, ("fprop", "activation"), x2, xc, a)
        b = offer(rt, inspector, ("fprop", "weight"), weight, wc, b)
        a, b = alike(rt, a, b, spec.dtype)
    fprop(rt, a, b, bias, out, precision)
    if spec.inspect is not None:
        out = offer_result(rt, inspector, ("fprop", "output"), out)
    return (out,), LinearSaved(
        saved_operand(kept_x, needs.weight), weight if any(needs) else None, saved_operand(kept_w, needs.input)
    )


def backward(
    rt: Runtime,
    dy: Tensor,
    saved: LinearSaved,
    *,
    spec: LinearSpec,
    scales: Scales | None = None,
    inspector: Inspector | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), None where `spec.needs` says so."""
    weight = saved.weight
    assert weight is not None  # a layer without needs has no backward
    needs, precision = spec.needs, spec.precision
    k = weight.shape[1]
    dy2 = dy.matrix()
    db = rt.empty((weight.shape[0],), weight.dtype) if needs.bias else None
    g, cast, db_left = prepare_gradient(rt, dy2, precision, scales, 0, needs, db)
    dx = dw = None
    if needs.input:
        a, b = g, restored(saved.w, (dy2.shape[1], k), precision)
        if spec.inspect is not None:
            a = offer(rt, inspector, ("dgrad", "gradient"), dy2, cast, g)
            a, b = alike(rt, a, b, spec.dtype)
        dx = rt.empty((*dy.shape[:-1], k), spec.dtype)
        dgrad(rt, a, b, dx, precision)
        if spec.inspect is not None:
            dx = offer_result(rt, inspector, ("dgrad", "dgrad"), dx)
    if needs.weight:
        a, b = g, restored(saved.x, (dy2.shape[0], k), precision)
        if spec.inspect is not None:
            a = offer(rt, inspector, ("wgrad", "gradient"), dy2, cast, g)
            a, b = alike(rt, a, b, spec.dtype)
        dw = rt.empty(weight.shape, weight.dtype)
        wgrad(rt, a, b, dw, db_left, precision)
        if spec.inspect is not None:
            dw = offer_result(rt, inspector, ("wgrad", "wgrad"), dw)
    return dx, dw, db


# ---------------------------------------------------------------------- the three GEMMs, plain or quantized


def fprop(rt: Runtime, x: Operand, w: Operand, bias: Tensor | None, out: Tensor, precision: Precision | None) -> None:
    """out [.., N] = x w^T + bias."""
    if isinstance(x, QuantizedTensor):
        assert isinstance(w, QuantizedTensor) and precision is not None
        if x.dtype is w.dtype is dtypes.float8_e5m2:
            fprop(rt, *plain(rt, x, w, out.dtype), bias, out, None)
            return
        fp8_gemm(rt, (x.rowwise, x.scale_inv), (w.rowwise, w.scale_inv), out.matrix(), precision.fprop, bias)
    else:
        assert isinstance(w, Tensor)
        ops.gemm(rt, x, w, trans_b=True, bias=bias, out=out.matrix())


def dgrad(rt: Runtime, dy: Operand, w: Operand, dx: Tensor, precision: Precision | None) -> None:
    """dx [.., K] = dy w."""
    if isinstance(dy, QuantizedTensor):
        assert isinstance(w, QuantizedTensor) and precision is not None
        if dy.dtype is w.dtype is dtypes.float8_e5m2:
            dgrad(rt, *plain(rt, dy, w, dx.dtype), dx, None)
            return
        fp8_gemm(rt, (dy.rowwise, dy.scale_inv), (w.columnwise, w.scale_inv), dx.matrix(), precision.dgrad)
    else:
        assert isinstance(w, Tensor)
        ops.gemm(rt, dy, w, out=dx.matrix())


def wgrad(
    rt: Runtime, dy: Operand, x: Operand, dw: Tensor, db: Tensor | None, precision: Precision | None
) -> None:
    """dw [N, K] = dy^T x; with plain operands the same GEMM sums dy into db [N]."""
    if isinstance(dy, QuantizedTensor):
        assert isinstance(x, QuantizedTensor) and precision is not None and db is None
        if dy.dtype is x.dtype is dtypes.float8_e5m2:
            wgrad(rt, *plain(rt, dy, x, dw.dtype), dw, None, None)
            return
        fp8_gemm(rt, (dy.columnwise, dy.scale_inv), (x.columnwise, x.scale_inv), dw, precision.wgrad)
    else:
        assert isinstance(x, Tensor)
        ops.gemm(rt, dy, x.matrix(), trans_a=True, a_sum=db, out=dw)


def plain(rt: Runtime, a: QuantizedTensor, b: QuantizedTensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """Both operands dequantized: no tensor core multiplies E5M2 by E5M2, so Format.E5M2 saves memory, not time."""
    return ops.dequantize(rt, a, dtype), ops.dequantize(rt, b, dtype)


def fp8_gemm(
    rt: Runtime,
    a: tuple[Tensor | None, Tensor],
    b: tuple[Tensor | None, Tensor],
    out: Tensor,
    gemm: Gemm,
    bias: Tensor | None = None,
) -> None:
    """out [rows, cols] = a [pad rows, P] b [pad cols, P]^T, with each operand's dequantization scale.

    A GEMM takes any number of rows but columns by 16 only, so an odd width goes through a padded result.
    """
    (a_data, a_scale), (b_data, b_scale) = a, b
    assert a_data is not None and b_data is not None  # the casts asked for these orientations
    rows, cols = out.shape
    if rt.device is META or rows != a_data.shape[0]:  # no test of a symbolic size, which would be compiled in
        a_data = a_data.rows(0, rows)
    wide = padded(cols)
    if wide == cols:
        ops.gemm(
            rt, a_data, b_data, trans_b=True, a_scale=a_scale, b_scale=b_scale, bias=bias, out=out,
            split_accumulator=gemm.split_accumulator,
        )  # fmt: skip
        return
    if bias is not None:
        bias = ops.resize(rt, bias.reshape(1, cols), 1, wide).reshape(wide)
    full = ops.gemm(
        rt, a_data, b_data, trans_b=True, a_scale=a_scale, b_scale=b_scale, bias=bias, out_dtype=out.dtype,
        split_accumulator=gemm.split_accumulator,
    )  # fmt: skip
    ops.resize(rt, full, rows, cols, out=out)


# --------------------------------------------------------------------------------------- their operands


def prepare_gradient(
    rt: Runtime, dy: Tensor, precision: Precision | None, scales: Scales | None, gemm: int, needs: Needs,
    db: Tensor | None,
) -> tuple[Operand, Cast | None, Tensor | None]:  # fmt: skip
    """(dy as dgrad and wgrad read it, how it was cast, the db that wgrad still has to fill).

    The bias gradient costs no pass of its own: it is summed while dy is quantized or by the wgrad GEMM.
    """
    if not (needs.input or needs.weight):
        if db is not None:
            ops.column_sum(rt, dy, db)
        return dy, None, None
    if precision is None:
        if db is not None and not needs.weight:
            ops.column_sum(rt, dy, db)
            db = None
        return dy, None, db
    cast = backward_cast(precision.grad, scales, gemm, rowwise=needs.input, columnwise=needs.weight)
    return ops.quantize(rt, dy, cast, column_sum=db), cast, None


def saved_operand(operand: Operand | None, wanted: bool) -> Tensor | None:
    """An operand as backward will read it: a quantized one as the block of its columnwise copy."""
    if not wanted or operand is None:
        return None
    return operand.block if isinstance(operand, QuantizedTensor) else operand


def restored(kept: Tensor | None, shape: tuple[int, int], precision: Precision | None) -> Operand:
    """The operand that `saved_operand` kept (inputs and weights have one format)."""
    assert kept is not None
    if kept.dtype is not dtypes.uint8:
        return kept
    assert precision is not None
    return QuantizedTensor.columnwise_in(kept, shape, precision.input.format)
