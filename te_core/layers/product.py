"""The three GEMMs of one weight, which every linear layer has, and their operands: `Product`.

The linear, norm+linear, MLP and grouped layers say which operands there are, and in which order their GEMMs run.

Shapes: x [.., K], w [N, K], b [N], y [.., N]; M is the product of the leading dimensions. A `turned` weight lies
[K, N], and so does its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.arguments import settle
from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.layers import watched
from te_core.layers.communicator import Communicator
from te_core.layers.gathered import turned, turns
from te_core.layers.inspector import PLAIN, Inspector, Request, offer_result
from te_core.layers.parallel import Split, Spread
from te_core.layers.watched import INPUT_POINTS, WGRAD_POINTS, Made
from te_core.ops import raw as ops
from te_core.ops.quantize import dense_columns
from te_core.precision import Gemm, Operand, Precision
from te_core.quantize.operands import (
    Uses,
    Value,
    as_asked,
    check_turned,
    dense,
    drop_rows,
    is_plain_rule,
    kept,
    one_copy,
    quantize_forward,
    quantize_gradient,
    quantize_turned,
    restored,
    saved,
    transpose_of,
)
from te_core.quantize.state import GRAD_INPUT, INPUT, OUTPUT, WEIGHT, Scales, backward_cast, forward_cast
from te_core.quantized import Cast, QuantizedTensor
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
    original_input: bool = False  # a plain x is kept as it came (where `operands.repeats` its rule)
    parallel: Split | None = None  # how the weight is spread over ranks; None: it is whole, and nothing communicates
    turned: bool = False  # the weight lies [K, N]
    #: Whether backward quantizes a plain x again. (Inspectors see each point once, so then it is not.)
    again: bool = field(init=False, repr=False, compare=False, default=False)
    #: Operands that an inspector replaces in any case: they are not quantized.
    plain: Request = field(init=False, repr=False, compare=False, default=frozenset())

    def __post_init__(self) -> None:
        settle(self, "dtype", "precision", "weight_dtype")
        if self.turned:
            check_turned(self.precision, self.parallel, self.inspect)
        if self.inspect is not None:
            marked = frozenset(point for point, mark in PLAIN.items() if mark in self.inspect)
            object.__setattr__(self, "plain", marked)
        if self.original_input and self.inspect is None and self.precision is not None:
            rule = self.precision.input
            quantized = rule is not None and rule.scaling != "calibrate"
            object.__setattr__(self, "again", quantized and self.precision.backward is None)


class Sink:
    """Where a weight gradient goes instead of a fresh tensor.

    main: written into, or added to with `accumulate`. queue: the product is not run but appended, as a function of
    the runtime that returns the gradient (None if it went into `main`).
    """

    __slots__ = ("accumulate", "main", "queue")

    def __init__(self, main: Tensor | None = None, accumulate: bool = False, queue: list[Any] | None = None) -> None:
        self.main, self.accumulate, self.queue = main, accumulate, queue
        if main is not None and not main.writable:  # here, because recordings do not ask again
            raise ArgumentError("Sink", f"main = {main!r} in read-only memory", "memory to write to", "pass a copy")


class Product(NamedTuple):
    """The three GEMMs of one weight in one call, and what stands around each of them.

    fprop  out [M, N] = x [M, K] w [N, K]^T + bias
    dgrad  out [M, K] = dy [M, N] w
    wgrad  dw  [N, K] = dy^T x

    It shows an inspector the operands and the result of each, says what backward will read, delivers quantized what the
    spec wants so, takes a weight's gradient where it goes, and gathers and scatters around a weight that is spread over
    ranks. Where the operands come from is the layers' own.
    """

    spec: LinearSpec
    scales: Scales | None = None
    gemm: int = 0  # its number in the scaling state
    inspector: Inspector | None = None
    sink: Sink | None = None
    parallel: Spread | None = None  # None: the weight is whole, and so are its operands

    def sides(self, weight: Value) -> tuple[int, ...]:
        """(N, K) of the weight."""
        return weight.shape[::-1] if self.spec.turned else weight.shape

    def keep(self, rt: Runtime, x: Made, w: Made) -> tuple[Tensor | None, Tensor | None]:
        """(x, w) as backward reads them; None for what it does not read, and for a weight that is quantized itself."""
        spec, (high_x, xs), (high_w, ws) = self.spec, x, w
        precision, kept_x, kept_w = spec.precision, xs.columns, ws.columns
        if precision is not None and precision.backward is not None:
            kept_x, kept_w = kept(high_x, xs, precision), kept(high_w, ws, precision)
        elif spec.again and isinstance(high_x, Tensor):
            kept_x = high_x
        if spec.inspect is not None:
            kept_x, kept_w = watched.kept_for_backward(rt, self, x, w, (kept_x, kept_w))
        itself = isinstance(kept_w, QuantizedTensor) and kept_w.owner is not None
        return saved(kept_x, spec.needs.weight), None if itself else saved(kept_w, spec.needs.input)

    def kept_weight(self, w: Made) -> Tensor | None:
        """w as dgrad reads it, of a product that nobody inspects and whose backward is quantized."""
        found = w[1].columns
        itself = isinstance(found, QuantizedTensor) and found.owner is not None
        return None if itself else saved(found, self.spec.needs.input)

    def kept_input(self, x: Made) -> Tensor | None:
        """x as backward reads it, of a product that nobody inspects."""
        precision, (high, uses) = self.spec.precision, x
        found = uses.columns if precision is None or precision.backward is None else kept(high, uses, precision)
        return saved(found, self.spec.needs.weight)

    def input_cast(self, source: Tensor | None = None) -> tuple[Cast | None, bool]:
        """(how what computes x quantizes it on its way, if it can, whether x is read plain, too). Of a spread weight
        `source` is that of which a norm makes x."""
        spec, precision = self.spec, self.spec.precision
        plain = spec.inspect is not None or (precision is not None and precision.backward == "high_precision")
        if precision is None or precision.input is None or not is_plain_rule(precision.input):
            return None, plain
        if not spec.plain.isdisjoint(INPUT_POINTS):
            return None, True
        columnwise = spec.needs.weight and precision.backward is None
        if self.parallel is not None and self.parallel.gathered == "input":
            rows = source.matrix().shape[0]  # type: ignore[union-attr]
            cast, too = self.parallel.input_cast(precision.input, self.forward_cast, rows, columnwise)
            return cast, plain or too
        return forward_cast(precision.input, *self[1:3], INPUT, rowwise=True, columnwise=columnwise), plain

    def computed_input(self, rt: Runtime, x: Tensor | None, q: QuantizedTensor | None, cast: Cast | None) -> Made:
        """x of what computed it, which quantized it by `cast` or leaves that to this."""
        high: Value | None = q if x is None else x
        assert high is not None
        if q is None:
            return high, input_operand(rt, high, self)
        if self.parallel is not None and self.parallel.gathered == "input":
            return high, self.parallel.uses(high, q, cast)
        return high, Uses(q, q, cast)

    def forward_cast(self, rule: Operand, rowwise: bool, columnwise: bool) -> Cast:
        """How x is quantized."""
        return forward_cast(rule, *self[1:3], INPUT, rowwise=rowwise, columnwise=columnwise)

    def fprop(self, rt: Runtime, x: Made, w: Made, out: Tensor, bias: Tensor | None) -> Tensor:
        """x w^T + bias, in `out` [.., N]."""
        if self.spec.inspect is None:
            return self._multiplied(rt, "fprop", x[1].rows, w[1].rows, out, bias)
        out = self._multiplied(rt, "fprop", *watched.shown_operands(rt, self, x, w), out, bias)
        return offer_result(rt, self.inspector, ("fprop", "output"), out)

    def dgrad(self, rt: Runtime, dy: Made, weight: Value, kept_w: Tensor | None, out: Tensor) -> Tensor:
        """dy w, in `out` [.., K]; what only dgrad reads of dy is let go of."""
        spec, (_, g) = self.spec, dy
        out = self._multiplied(rt, "dgrad", g.rows, backward_weight(rt, kept_w, weight, spec), out)
        if spec.inspect is None:  # else it may be an inspector's own
            drop_rows(g)
            return out
        if self.parallel is not None:
            self.parallel.settle()
        return offer_result(rt, self.inspector, ("dgrad", "dgrad"), out)

    def wgrad(self, rt: Runtime, dy: Made, x: Value, weight: Value, db: Tensor | None) -> Tensor | None:
        """dy^T x, fresh or in its sink; with plain operands the same GEMM sums dy into db [N]."""
        spec, sink, (_, g) = self.spec, self.sink, dy
        a = g.columns
        if db is not None and isinstance(a, QuantizedTensor) and isinstance(x, QuantizedTensor):
            ops.column_sum(rt, dense(rt, dy[0], spec.dtype), db)  # an inspector has exchanged both
            db = None
        out_dtype = gradient_dtype(spec, weight)
        if out_dtype is not spec.dtype and (isinstance(a, Tensor) or isinstance(x, Tensor)):
            out_dtype = dtypes.float32  # a product of plain halves comes in their dtype or in float32
        shape = weight.shape

        def run(rt: Runtime) -> Tensor | None:
            main = None if sink is None else sink.main
            if sink is None or main is None:
                dw = self._multiplied(rt, "wgrad", a, x, rt.empty(shape, out_dtype), db)
                return dw if spec.inspect is None else offer_result(rt, self.inspector, ("wgrad", "wgrad"), dw)
            if spec.inspect is not None and ("wgrad", "wgrad") in spec.inspect:
                watched.add_shown(rt, self, (a, x), main, db, sink.accumulate)
                return None
            self._multiplied(rt, "wgrad", a, x, main, db, sink.accumulate)
            return None

        return run(rt) if sink is None else self.in_turn(rt, run)

    def in_turn(self, rt: Runtime, run: Callable[[Runtime], Tensor | None]) -> Tensor | None:
        """A weight gradient of its function: now, or when its sink's queue comes to it."""
        if self.sink is None or self.sink.queue is None:
            return run(rt)
        self.sink.queue.append(run)
        return None

    def _multiplied(
        self,
        rt: Runtime,
        gemm: str,
        a: Value,
        b: Value,
        out: Tensor,
        vector: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """One of the three GEMMs, quantized where both operands are: a and b in the order of its formula.

        `vector` is fprop's bias. In wgrad of plain operands the GEMM sets it to the sums of a's columns.
        """
        spec, parallel = self.spec, self.parallel
        later = None
        if parallel is not None:
            if parallel.overlap is not None:
                found = self._overlapped(rt, gemm, a, b, out, vector)
                if found is not None:
                    return found
            a, b = parallel.gather(rt, gemm, a, b, self.inspector)
            if gemm == "fprop" and parallel.split.summed == "fprop":
                later, vector = vector, None  # to the sum of all ranks it is added once
        (a_columns, b_columns), c = _GEMMS[gemm], out if len(out.shape) == 2 else out.matrix()
        bias, a_sum = (None, vector) if gemm == "wgrad" else (vector, None)
        turned = None
        if spec.turned and gemm == "wgrad":
            a, b, turned = b, a, "out"
        elif spec.turned and isinstance(b, Tensor):  # it lies as it came; a quantized one was turned
            b_columns, turned = not b_columns, "b"
        if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
            precision = spec.precision
            assert precision is not None and a_sum is None
            rule: Gemm = getattr(precision, gemm)
            ops.gemm_quantized(
                rt,
                a,
                b,
                c,
                a_columnwise=a_columns,
                b_columnwise=b_columns,
                bias=bias,
                accumulate=accumulate,
                split_accumulator=rule.split_accumulator,
                emulate=precision.emulate,
                strict=precision.strict,
                turned=turned,
            )
        else:
            if spec.inspect is not None and gemm == "wgrad":
                watched.refuse_transformed(spec.precision, a, b)
            ops.gemm(
                rt,
                a if isinstance(a, Tensor) else dense_columns(rt, a, spec.dtype, a_columns),
                b if isinstance(b, Tensor) else dense_columns(rt, b, spec.dtype, b_columns),
                trans_a=a_columns,
                trans_b=not b_columns,
                bias=bias,
                a_sum=a_sum,
                out=c,
                accumulate=accumulate,
                turned=turned,
            )
        if parallel is None:
            return out
        out = parallel.scatter(rt, gemm, out)
        return out if later is None else _with_bias(rt, out, later)

    def _overlapped(
        self, rt: Runtime, gemm: str, a: Value, b: Value, out: Tensor, vector: Tensor | None
    ) -> Tensor | None:
        """The same in parts, beside what travels for it; None where it is to be computed whole."""
        parallel, here = self.parallel, self._replace(parallel=None)
        assert parallel is not None
        summed = gemm == "fprop" and parallel.split.summed == "fprop"

        def run(rt: Runtime, a: Value, b: Value, out: Tensor) -> None:
            here._multiplied(rt, gemm, a, b, out, None if summed else vector)

        made = parallel.overlapped(rt, gemm, a, b, out, run)
        return _with_bias(rt, made, vector) if summed and made is not None and vector is not None else made

    def begin(self, rt: Runtime, dy: Uses, kept_x: Tensor | None, rows: int, weight: Value) -> None:
        """Of a spread weight: have what wgrad alone reads travel beside dgrad's GEMM."""
        parallel = self.parallel
        if parallel is not None and self.spec.needs.weight and (self.sink is None or self.sink.queue is None):
            parallel.begin(rt, dy, self.restored(rt, kept_x, rows, weight))

    def restored(self, rt: Runtime, kept_x: Tensor | None, rows: int, weight: Value) -> Value:
        """x as wgrad reads it, of what `keep` kept."""
        if self.parallel is not None:
            return self.parallel.restored(rt, kept_x, rows, weight.shape[1], self.forward_cast)
        x = restored(rt, kept_x, (rows, self.sides(weight)[1]), self.spec.precision, "input", self.spec.dtype)
        if not self.spec.again or isinstance(x, QuantizedTensor):
            return x
        rule = self.spec.precision.input  # type: ignore[union-attr]
        return quantize_forward(rt, x, rule, (None, 0), INPUT, rowwise=False, columnwise=True).columns

    def bias_gradient(self, rt: Runtime, weight: Value) -> Tensor | None:
        """Memory for the bias's gradient, if it is wanted."""
        return rt.empty((self.sides(weight)[0],), gradient_dtype(self.spec, weight)) if self.spec.needs.bias else None

    def delivered(self, rt: Runtime, out: Tensor) -> Value:
        """The output as the spec wants it."""
        spec = self.spec
        if not spec.quantize_output or spec.precision is None or spec.precision.output is None:
            return out
        cast = forward_cast(spec.precision.output, self.scales, self.gemm, OUTPUT, rowwise=True, columnwise=False)
        return ops.quantize(rt, out.matrix(), cast)

    def delivered_gradient(self, rt: Runtime, dx: Tensor) -> Value:
        """The gradient of x as the spec wants it."""
        spec = self.spec
        if not spec.quantize_grad or spec.precision is None or spec.precision.grad_input is None:
            return dx
        rule = spec.precision.grad_input
        if self.parallel is not None:
            self.parallel.settle()
        cast = backward_cast(rule, self.scales, self.gemm, rowwise=True, columnwise=False, slot=GRAD_INPUT)
        return ops.quantize(rt, dx.matrix(), cast)


def _with_bias(rt: Runtime, out: Tensor, bias: Tensor) -> Tensor:
    """The sum of all ranks, with its bias."""
    made = out.matrix()
    ops.bias_dropout_add(rt, made, bias, None, p=0.0, out=made)
    return out


#: Which operands of a GEMM are contracted along their columns.
_GEMMS = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}


def products(
    specs: Sequence[LinearSpec],
    scales: Scales | tuple[Scales | None, ...] | None,
    inspectors: Sequence[Inspector | None] | None,
    sinks: Sequence[Sink | None] | None = None,
    comm: Communicator | None = None,
) -> list[Product]:
    """The products of a layer's weights, numbered in this order in its state, or each with a state of its own."""
    none = (None,) * len(specs)
    states: Any = scales if type(scales) is tuple else repeat(scales)
    numbers = repeat(0) if type(scales) is tuple else count()
    each = zip(specs, states, numbers, inspectors or none, sinks or none)  # noqa: B905  two do not end
    made = [Product(*given) for given in each]
    if comm is None:
        return made
    return [product._replace(parallel=Spread(product.spec, comm, product[1:3])) for product in made]


# --------------------------------------------------------------------------------------- their operands


def saved_weight(weight: Value | None) -> Value:
    """The weight among what a forward saved, which saves none if nothing wants a gradient."""
    if weight is None or len(weight.shape) != 2:
        raise ArgumentError(
            "layer backward", f"{weight!r} as the saved weight", "the matrix that forward saved", "pass its `saved`"
        )
    return weight


def input_operand(rt: Runtime, x: Value, product: Product) -> Uses:
    """x as fprop and wgrad read it."""
    spec, precision = product.spec, product.spec.precision
    if precision is None:
        plain = dense(rt, x, spec.dtype)
        return Uses(plain, plain, None)
    alone = precision.backward is None  # else backward reads what this call has made
    if product.parallel is not None and product.parallel.gathered == "input":
        rule, part = precision.input, dense(rt, x, spec.dtype)
        if rule is not None and rule.scaling != "calibrate":
            wanted = True, alone and spec.needs.weight and not spec.again
            if spec.plain:
                wanted = watched.still_quantized(spec.plain, "activation", *wanted)
            return product.parallel.quantized(rt, part, rule, product.forward_cast, wanted)
        return quantize_forward(rt, part, rule, product[1:3], INPUT, rowwise=True, columnwise=False)
    value = as_asked(rt, x, precision.input, spec.dtype) if alone else dense(rt, x, spec.dtype)
    columnwise = alone and spec.needs.weight and not (spec.again and isinstance(x, Tensor))
    if spec.plain:
        return watched.partly_quantized(rt, value, precision.input, product[1:3], spec.plain, "activation", columnwise)
    return quantize_forward(rt, value, precision.input, product[1:3], INPUT, rowwise=True, columnwise=columnwise)


def weight_operand(rt: Runtime, weight: Value, product: Product, ready: QuantizedTensor | None) -> Uses:
    """A weight as fprop and dgrad read it: quantized before (`ready`), itself quantized, or quantized now.

    What is quantized comes as [N, K]; a plain weight as it lies.
    """
    spec, precision = product.spec, product.spec.precision
    if precision is None:
        return Uses(dense(rt, weight, spec.dtype), weight, None)
    value = as_asked(rt, weight, precision.weight, spec.dtype) if ready is None else ready
    if isinstance(value, QuantizedTensor):  # backward makes the columnwise copy, if there is none, and drops it
        value = transpose_of(value) if spec.turned else value
        reads = (ready is not None or spec.turned) and spec.needs.input and precision.backward is None
        lacks = value.columnwise is None or spec.turned  # then its block begins with the rowwise copy
        columns = one_copy(rt, value, columns=True) if reads and lacks else value
        if precision.backward is not None and value.columnwise is not None and value.owner is None:
            value = one_copy(rt, value, columns=False)  # which backward finds at the beginning of its block
        return Uses(value, columns, None)
    columnwise = spec.needs.input and precision.backward is None
    if spec.plain:
        return watched.partly_quantized(rt, value, precision.weight, product[1:3], spec.plain, "weight", columnwise)
    quantized = quantize_turned if spec.turned else quantize_forward
    return quantized(rt, value, precision.weight, product[1:3], WEIGHT, rowwise=True, columnwise=columnwise)


def backward_weight(rt: Runtime, kept_w: Tensor | None, weight: Value, spec: LinearSpec) -> Value:
    """The weight as dgrad reads it, as `weight_operand` has it."""
    precision = spec.precision
    if kept_w is not None:
        return restored(rt, kept_w, weight.shape, precision, "weight", spec.dtype, spec.turned)  # type: ignore[arg-type]
    if isinstance(weight, Tensor):
        return weight
    if precision is None or precision.backward is not None:
        return ops.dequantize(rt, weight, spec.dtype)
    rule = precision.weight
    if weight.columnwise is None and turns(weight.format) and rule is not None and rule.scaling != "calibrate":
        return turned(rt, weight)  # read at once: unlike what is saved it needs no block of its own
    return quantize_forward(rt, weight, rule, (None, 0), WEIGHT, rowwise=False, columnwise=True).columns


def gradient_dtype(spec: LinearSpec, weight: Value) -> DType:
    """The dtype of a weight's and its bias's gradient."""
    return spec.weight_dtype or (weight.dtype if isinstance(weight, Tensor) else spec.dtype)


def sums_of_part(rt: Runtime, dy: Value, product: Product, db: Tensor | None, rng: Tensor | None) -> Tensor | None:
    """Of a weight that is spread: the db that `gradient_operand` still has to fill.

    A bias's gradient is the sum over the rows that this rank was given.
    """
    parallel, spec = product.parallel, product.spec
    assert parallel is not None
    parallel.rng = rng
    if db is None or parallel.gathered != "grad" or spec.precision is not None:
        return db
    ops.column_sum(rt, dense(rt, dy, spec.dtype), db)
    return None


def gradient_operand(
    rt: Runtime, dy: Value, product: Product, db: Tensor | None, rng: Tensor | None
) -> tuple[Uses, Tensor | None]:
    """(dy as dgrad and wgrad read it, the db that wgrad still has to fill).

    The bias gradient costs no pass of its own: it is summed while dy is quantized or by the wgrad GEMM.
    """
    uses, left = _gradient_operand(rt, dy, product, db, rng)
    return (uses if product.spec.inspect is None else shown(rt, dy, uses, product)), left


def shown(rt: Runtime, dy: Value, uses: Uses, product: Product) -> Uses:
    """A gradient as its GEMMs read it after the product's inspector has seen it."""
    return watched.shown_gradient(rt, product, dense(rt, dy, product.spec.dtype), uses)


def quantized_gradient(
    rt: Runtime, dy: Value, rule: Operand | None, product: Product, db: Tensor | None, rng: Tensor | None
) -> Uses:
    """dy by a recipe's rule, for the GEMMs that read it quantized; db [N] is set to the sums of its columns."""
    spec, where = product.spec, product[1:3]
    rows, columns = spec.needs.input, spec.needs.weight
    if not spec.plain:
        return quantize_gradient(rt, dy, rule, where, rowwise=rows, columnwise=columns, column_sum=db, rng=rng)
    return watched.partly_quantized_gradient(rt, dy, rule, where, spec.plain, spec.needs[:2], (spec.dtype, db), rng)


def _gradient_operand(
    rt: Runtime, dy: Value, product: Product, db: Tensor | None, rng: Tensor | None
) -> tuple[Uses, Tensor | None]:
    spec, needs, precision = product.spec, product.spec.needs, product.spec.precision
    read = needs.input or needs.weight
    if not read or precision is None or precision.backward is not None or precision.grad is None:
        plain = dense(rt, dy, spec.dtype)
        by_wgrad = needs.weight and precision is None and not (_queued(product) or spec.turned)
        if db is not None and not by_wgrad:
            ops.column_sum(rt, plain, db)
            db = None
        return Uses(plain, plain, None), db
    if product.parallel is not None and product.parallel.gathered == "grad" and precision.grad.scaling != "calibrate":

        def cast_of(rule: Operand, rowwise: bool, columnwise: bool) -> Cast:
            return backward_cast(rule, *product[1:3], rowwise=rowwise, columnwise=columnwise, rng=rng)

        part, wanted = dense(rt, dy, spec.dtype), (needs.input, needs.weight)
        if spec.plain:
            wanted = watched.still_quantized(spec.plain, "gradient", *wanted)
        return product.parallel.quantized(rt, part, precision.grad, cast_of, wanted, db), None
    value = as_asked(rt, dy, precision.grad, spec.dtype)
    # A wgrad that stays plain sums the columns as that of a layer without a precision does.
    left = db if needs.weight and spec.plain >= WGRAD_POINTS and not _queued(product) else None
    return quantized_gradient(rt, value, precision.grad, product, None if left is not None else db, rng), left


def _queued(product: Product) -> bool:
    return product.sink is not None and product.sink.queue is not None
