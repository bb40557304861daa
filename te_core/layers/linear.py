"""The one linear: y = x w^T + b and its gradients, in any precision. Every module's GEMMs go through this file.

Top: `forward` and `backward`, the Linear layer. Below: what the norm+linear, MLP and grouped layers share: the product
of two operands that may be plain or quantized, and where a weight's gradient goes.

Shapes: x [.., K], w [N, K], b [N], y [.., N]; M is the product of the leading dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.arguments import explained, settle
from te_core.dtypes import DType
from te_core.layers.inspector import Inspector, Request, alike, offer, offer_result
from te_core.ops import raw as ops
from te_core.precision import Gemm, Operand, Precision
from te_core.quantize.operands import Uses, Value, as_asked, dense, quantize_forward, quantize_gradient, restored, saved
from te_core.quantize.state import GRAD_INPUT, INPUT, OUTPUT, WEIGHT, Scales, backward_cast, forward_cast
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor


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
    weight_dtype: DType | None = None  # of the weight's gradient; None: the weight's own
    quantize_output: bool = False
    quantize_grad: bool = False  # the gradient of x is delivered quantized

    def __post_init__(self) -> None:
        settle(self, "dtype", "precision", "weight_dtype")


class LinearSaved(NamedTuple):
    """What backward reads. Inputs stand here as themselves; quantized operands as the copy it needs."""

    x: Tensor | None  # plain [.., K], or the block of a quantized copy
    weight: Value | None  # the parameter itself: its shape, its dtype, its version
    w: Tensor | None  # plain [N, K], or the block of a quantized copy; None if the parameter is quantized itself
    rng: Tensor | None  # the draws of stochastic rounding


class Site(NamedTuple):
    """One GEMM triple of a call: its spec, the scaling state, and its number in that state."""

    spec: LinearSpec
    scales: Scales | None
    gemm: int = 0


class Sink:
    """Where a weight gradient goes instead of a fresh tensor.

    main: written into, or added to with `accumulate`. queue: the product is not run but appended, as a function of
    the runtime that returns the gradient (None if it went into `main`).
    """

    __slots__ = ("accumulate", "main", "queue")

    def __init__(self, main: Tensor | None = None, accumulate: bool = False, queue: list[Any] | None = None) -> None:
        self.main, self.accumulate, self.queue = main, accumulate, queue


@explained
def forward(
    rt: Runtime,
    x: Value,
    weight: Value,
    bias: Tensor | None,
    rng: Tensor | None = None,
    *,
    spec: LinearSpec,
    scales: Scales | None = None,
    inspector: Inspector | None = None,
    ready: Sequence[QuantizedTensor | None] = (None,),
) -> tuple[tuple[Value], LinearSaved]:
    """((y,), saved). `scales` is the delayed-scaling state, if the recipe keeps one; `ready` the weight quantized
    before, if it is."""
    needs, precision = spec.needs, spec.precision
    leading, x2 = flattened(x)
    out = rt.empty((*leading, weight.shape[0]), spec.dtype)
    site = Site(spec, scales)
    xs, ws = input_operand(rt, x2, site), weight_operand(rt, weight, site, ready[0])
    a, b = xs.rows, ws.rows
    kept_x, kept_w = kept(x2, xs, precision), kept(weight, ws, precision)
    if spec.inspect is not None:
        high_x, high_w = dense(rt, x2, spec.dtype), dense(rt, weight, spec.dtype)
        if needs.weight:
            kept_x = offer(rt, inspector, ("wgrad", "activation"), high_x, xs.cast, kept_x)
        if needs.input:
            kept_w = offer(rt, inspector, ("dgrad", "weight"), high_w, ws.cast, kept_w)
        a = offer(rt, inspector, ("fprop", "activation"), high_x, xs.cast, a)
        b = offer(rt, inspector, ("fprop", "weight"), high_w, ws.cast, b)
        a, b = alike(rt, a, b, spec.dtype)
    multiply(rt, "fprop", a, b, out.matrix(), spec, vector=bias)
    if spec.inspect is not None:
        out = offer_result(rt, inspector, ("fprop", "output"), out)
    y: Value = out
    if spec.quantize_output and precision is not None and precision.output is not None:
        y = ops.quantize(
            rt, out.matrix(), forward_cast(precision.output, scales, 0, OUTPUT, rowwise=True, columnwise=False)
        )
    return (y,), LinearSaved(
        saved(kept_x, needs.weight),
        weight if any(needs) else None,
        None if isinstance(kept_w, QuantizedTensor) and kept_w.owner is not None else saved(kept_w, needs.input),
        rng if any(needs) else None,
    )


@explained
def backward(
    rt: Runtime,
    dy: Value,
    saved: LinearSaved,
    *,
    spec: LinearSpec,
    scales: Scales | None = None,
    inspector: Inspector | None = None,
    sinks: Sequence[Sink | None] = (None,),
) -> tuple[Value | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), None where `spec.needs` or a sink says so."""
    weight = saved.weight
    assert weight is not None  # a layer without needs has no backward
    needs, precision = spec.needs, spec.precision
    n, k = weight.shape
    leading, dy2 = flattened(dy)
    db = rt.empty((n,), bias_dtype(spec, weight)) if needs.bias else None
    g, db_left = gradient_operand(rt, dy2, Site(spec, scales), db, saved.rng, sinks[0])
    dx: Value | None = None
    dw = None
    if needs.input:
        a, b = g.rows, backward_weight(rt, saved.w, weight, spec)
        if spec.inspect is not None:
            a = offer(rt, inspector, ("dgrad", "gradient"), dense(rt, dy2, spec.dtype), g.cast, a)
            a, b = alike(rt, a, b, spec.dtype)
        plain_dx = rt.empty((*leading, k), spec.dtype)
        multiply(rt, "dgrad", a, b, plain_dx.matrix(), spec)
        if spec.inspect is not None:
            plain_dx = offer_result(rt, inspector, ("dgrad", "dgrad"), plain_dx)
        dx = plain_dx
        if spec.quantize_grad and precision is not None and precision.grad_input is not None:
            cast = backward_cast(precision.grad_input, scales, 0, rowwise=True, columnwise=False, slot=GRAD_INPUT)
            dx = ops.quantize(rt, plain_dx.matrix(), cast)
        drop_rows(g)
    if needs.weight:
        rule = None if precision is None else precision.input
        a, b = g.columns, restored(rt, saved.x, (dy2.shape[0], k), rule, precision, spec.dtype)
        if spec.inspect is not None:
            a = offer(rt, inspector, ("wgrad", "gradient"), dense(rt, dy2, spec.dtype), g.cast, a)
            a, b = alike(rt, a, b, spec.dtype)
        dw = weight_gradient(rt, a, b, (n, k), spec, db_left, sinks[0], bias_dtype(spec, weight))
        if dw is not None and spec.inspect is not None:
            dw = offer_result(rt, inspector, ("wgrad", "wgrad"), dw)
    return dx, dw, db


# --------------------------------------------------------------------------------------- the three GEMMs


#: Which operands of a GEMM are contracted along their columns.
_COLUMNS = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}


def multiply(
    rt: Runtime,
    gemm: str,
    a: Value,
    b: Value,
    out: Tensor,
    spec: LinearSpec,
    *,
    vector: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """One of the three products, quantized where both operands are.

    fprop  out [M, N] = a [M, K] b [N, K]^T + vector
    dgrad  out [M, K] = a [M, N] b [N, K]
    wgrad  out [N, K] = a [M, N]^T b [M, K]; with plain operands the same GEMM sums a into vector [N]
    """
    columns = _COLUMNS[gemm]
    bias, a_sum = (None, vector) if gemm == "wgrad" else (vector, None)
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        precision = spec.precision
        assert precision is not None and a_sum is None
        rule: Gemm = getattr(precision, gemm)
        ops.gemm_quantized(
            rt,
            a,
            b,
            out,
            a_columnwise=columns[0],
            b_columnwise=columns[1],
            bias=bias,
            accumulate=accumulate,
            split_accumulator=rule.split_accumulator,
            emulate=precision.emulate,
            strict=precision.strict,
        )
        return
    left, right = dense_columns(rt, a, spec.dtype, columns[0]), dense_columns(rt, b, spec.dtype, columns[1])
    ops.gemm(
        rt,
        left,
        right,
        trans_a=columns[0],
        trans_b=not columns[1],
        bias=bias,
        a_sum=a_sum,
        out=out,
        accumulate=accumulate,
    )


def dense_columns(rt: Runtime, x: Value, dtype: DType, columns: bool) -> Tensor:
    """The values of an operand that meets a plain one, from the copy that the GEMM would have read."""
    if isinstance(x, Tensor):
        return x
    held = x.columnwise is not None if columns else x.rowwise is not None
    return ops.dequantize(rt, x, dtype, columnwise=columns if held else not columns).rows(0, x.shape[0])


def weight_gradient(
    rt: Runtime,
    dy: Value,
    x: Value,
    shape: tuple[int, int],
    spec: LinearSpec,
    db: Tensor | None,
    sink: Sink | None,
    out_dtype: DType,
) -> Tensor | None:
    """dw [N, K] = dy^T x, fresh or into its sink; with plain operands the same GEMM sums dy into db [N]."""
    if out_dtype is not spec.dtype and (isinstance(dy, Tensor) or isinstance(x, Tensor)):
        out_dtype = dtypes.float32  # a product of plain halves comes in their dtype or in float32

    def run(rt: Runtime) -> Tensor | None:
        main = None if sink is None else sink.main
        dw = rt.empty(shape, out_dtype) if main is None else main
        into = sink is not None and main is not None and sink.accumulate
        multiply(rt, "wgrad", dy, x, dw, spec, vector=db, accumulate=into)
        return dw if main is None else None

    if sink is not None and sink.queue is not None:
        sink.queue.append(run)
        return None
    return run(rt)


def drop_rows(uses: Uses) -> None:
    """Free the rowwise copy of a gradient once dgrad has read it: backward is where memory peaks."""
    q = uses.columns
    if isinstance(q, QuantizedTensor) and q.columnwise is not None:
        q.rowwise = q.rowwise_scale = q.rowwise_amax = None


# --------------------------------------------------------------------------------------- their operands


def flattened(x: Value) -> tuple[tuple[int, ...], Value]:
    """(leading dimensions, x as a matrix)."""
    return (x.shape[:-1], x.matrix()) if isinstance(x, Tensor) else ((x.shape[0],), x)


def input_operand(rt: Runtime, x: Value, site: Site) -> Uses:
    """x as fprop and wgrad read it."""
    spec = site.spec
    precision = spec.precision
    if precision is None:
        values = dense(rt, x, spec.dtype)
        return Uses(values, values, None)
    rule = precision.input
    if precision.backward is not None:  # backward reads what this call has made, in a block of its own
        value: Value = dense(rt, x, spec.dtype)
        return quantize_forward(rt, value, rule, site[1:], INPUT, rowwise=True, columnwise=False)
    value = as_asked(rt, x, rule, spec.dtype)
    return quantize_forward(rt, value, rule, site[1:], INPUT, rowwise=True, columnwise=spec.needs.weight)


def weight_operand(rt: Runtime, weight: Value, site: Site, ready: QuantizedTensor | None) -> Uses:
    """A weight as fprop and dgrad read it: quantized before (`ready`), itself quantized, or quantized now."""
    spec = site.spec
    precision = spec.precision
    if precision is None:
        return Uses(dense(rt, weight, spec.dtype), weight, None)
    if ready is not None:
        return Uses(ready, ready, None)
    rule: Operand | None = precision.weight
    if isinstance(weight, QuantizedTensor):
        value = as_asked(rt, weight, rule, spec.dtype)
        if isinstance(value, QuantizedTensor):  # backward makes the columnwise copy, if there is none, and drops it
            return Uses(value, value, None)
        weight = value
    columnwise = spec.needs.input and precision.backward is None
    return quantize_forward(rt, weight, rule, site[1:], WEIGHT, rowwise=True, columnwise=columnwise)


def kept(high: Value, uses: Uses, precision: Precision | None) -> Value:
    """What backward will read of an operand, by the recipe's `backward_override`."""
    if precision is None or precision.backward is None:
        return uses.columns  # type: ignore[no-any-return]
    if precision.backward == "high_precision" and isinstance(high, Tensor):
        return high
    return uses.rows  # type: ignore[no-any-return]


def backward_weight(rt: Runtime, kept_w: Tensor | None, weight: Value, spec: LinearSpec) -> Value:
    """The weight as dgrad reads it."""
    precision = spec.precision
    if kept_w is not None:
        rule = None if precision is None else precision.weight
        return restored(rt, kept_w, weight.shape, rule, precision, spec.dtype)  # type: ignore[arg-type]
    if isinstance(weight, Tensor):
        return weight
    if precision is None or precision.backward is not None:
        return ops.dequantize(rt, weight, spec.dtype)
    uses = quantize_forward(rt, weight, precision.weight, (None, 0), WEIGHT, rowwise=False, columnwise=True)
    return uses.columns  # type: ignore[no-any-return]


def bias_dtype(spec: LinearSpec, weight: Value) -> DType:
    """The dtype of a weight's and its bias's gradient."""
    return spec.weight_dtype or (weight.dtype if isinstance(weight, Tensor) else spec.dtype)


def gradient_operand(
    rt: Runtime, dy: Value, site: Site, db: Tensor | None, rng: Tensor | None, sink: Sink | None
) -> tuple[Uses, Tensor | None]:
    """(dy as dgrad and wgrad read it, the db that wgrad still has to fill).

    The bias gradient costs no pass of its own: it is summed while dy is quantized or by the wgrad GEMM.
    """
    spec = site.spec
    needs, precision = spec.needs, spec.precision
    if not (needs.input or needs.weight):
        if db is not None:
            ops.column_sum(rt, dense(rt, dy, spec.dtype), db)
        return Uses(dy, dy, None), None
    if precision is None or precision.backward is not None or precision.grad is None:
        plain = dense(rt, dy, spec.dtype)
        by_wgrad = needs.weight and (sink is None or sink.queue is None) and precision is None
        if db is not None and not by_wgrad:
            ops.column_sum(rt, plain, db)
            db = None
        return Uses(plain, plain, None), db
    value = as_asked(rt, dy, precision.grad, spec.dtype)
    uses = quantize_gradient(
        rt, value, precision.grad, site[1:], rowwise=needs.input, columnwise=needs.weight, column_sum=db, rng=rng
    )
    return uses, None
