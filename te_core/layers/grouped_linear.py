"""Several linears over groups of rows: y_i = x_i w_i^T + b_i and its gradients, in any precision.

x [T, K] holds the rows of all groups, one group after the other; y [T, N] likewise. Each group is a Linear of its own
in every respect (its scales, its gradients), so the result is that of `num_gemms` separate ones; what is shared is the
launches: one quantizes all groups of x, one all weights, one all groups of dy. The rows of the groups are an argument
of the call and no part of the spec: they change with every step. Where the host knows them, a group is a product of its
own, with the bits of a linear. Where the device has products that read running sums (`takes_offsets`), the host need
not know them: each product, and each cast of rows, is then one step for all groups. So it is in high precision, and
with a scale for each group or for blocks (`GroupedSpec.formats`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.arguments import explained
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.inspector import Inspector
from te_core.layers.product import (
    LinearSpec,
    Product,
    Sink,
    backward_weight,
    gradient_dtype,
    gradient_operand,
    input_operand,
    products,
    saved_weight,
    weight_operand,
)
from te_core.layers.watched import Made
from te_core.ops import _check
from te_core.ops import raw as ops
from te_core.ops.quantize_grouped import allocate_groups, bounds_of, groups_in
from te_core.precision import Operand, Precision
from te_core.quantize.operands import Uses, Value, dense, flattened, is_plain_rule
from te_core.quantize.state import INPUT, WEIGHT, Scales, backward_cast, forward_cast
from te_core.quantized import Format, QuantizedRows, QuantizedTensor, rows_in
from te_core.runtime import Runtime
from te_core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class GroupedSpec:
    """All that a grouped linear's plan depends on besides shapes: a Linear's spec for each group.

    They agree in `dtype` and `needs.input`. The precisions differ only under a custom recipe, which is asked for each.
    """

    parts: tuple[LinearSpec, ...]
    #: By what one launch quantizes all groups; None where they differ, or where somebody looks at one alone.
    shared: Precision | None = field(init=False, repr=False, compare=False)
    #: Whether nothing is quantized, and nobody looks at a group alone.
    plain: bool = field(init=False, repr=False, compare=False)
    #: Formats of the operands of fprop, dgrad and wgrad, where all are quantized as `ops.quantize_rows` can.
    formats: tuple[tuple[Format, Format], ...] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if any(p.turned for p in self.parts):
            do = "pass the weights as [out, in], or call a linear for each"
            raise UnsupportedError("grouped_linear", "weights [in, out] (turned=True)", "weights [out, in]", do)
        first = self.parts[0].precision
        alike = all(p.precision is first and p.inspect is None for p in self.parts)
        object.__setattr__(self, "shared", first if alike else None)
        object.__setattr__(self, "plain", alike and first is None)
        object.__setattr__(self, "formats", _formats(self.shared))

    @property
    def by_offsets(self) -> bool:
        """Whether its products can read the sizes on a device that has such."""
        return self.plain or self.formats is not None

    @property
    def dtype(self) -> DType:
        """Of activations."""
        return self.parts[0].dtype


def _formats(precision: Precision | None) -> tuple[tuple[Format, Format], ...] | None:
    if precision is None or precision.backward is not None or precision.check_finite:
        return None
    x, w, dy = precision.input, precision.weight, precision.grad
    if x is None or w is None or dy is None or not all(is_plain_rule(rule) for rule in (x, w, dy)):
        return None
    pairs = (x.format, w.format), (dy.format, w.format), (dy.format, x.format)
    alike = all(a.scaling == b.scaling in ("tensor", "block") and not a.tiled for a, b in pairs)
    return pairs if alike and w.format.tiled == (w.format.scaling == "block") and not x.format.tiled else None


class Sizes:
    """The rows of each group, which the host knows."""

    __slots__ = ("bounds", "each")
    not_recorded = "sizes of groups that the host knows"  # which are others in each call

    def __init__(self, each: Sequence[int]) -> None:
        self.each = tuple(each)
        self.bounds = bounds_of(self.each)


class _Groups(NamedTuple):
    known: Sizes | None
    out: Tensor | None
    dx: Tensor | None
    offsets: Tensor | None


class Groups(_Groups):
    """What one call depends on besides its tensors: the rows of each group, and buffers for y and dx if given.

    The rows are known to the host, or they are on the device: `offsets` int32 [groups + 1], running sums that begin
    with 0.
    """

    __slots__ = ()

    def __new__(
        cls,
        known: Sizes | Sequence[int] | None,
        out: Tensor | None = None,
        dx: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Groups:
        """Of a list of numbers, or of offsets."""
        sizes = known if known is None or isinstance(known, Sizes) else Sizes(known)
        return super().__new__(cls, sizes, out, dx, offsets)

    def read(self, rt: Runtime) -> Groups:
        """The same, known to the host, which waits for the device if it has to."""
        if self.known is not None:
            return self
        assert self.offsets is not None
        ends = rt.numpy(self.offsets).tolist()
        return self._replace(known=Sizes([stop - start for start, stop in pairwise(ends)]))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each group."""
        assert self.known is not None
        return self.known.each

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first row of each group, and the row after its last one."""
        assert self.known is not None
        return self.known.bounds


class GroupedSaved(tuple[Any, ...]):
    """What backward reads, as one flat tuple: rng, then x, weight and w of every group, as in `LinearSaved`.

    x stands once, as that of the first group, where all groups lie in one tensor: x itself or the block of its
    quantized copies. So do the quantized weights, where products read sizes on the device.
    """

    __slots__ = ()

    def __new__(cls, *tensors: Value | None) -> GroupedSaved:
        """Of the flat list of its tensors."""
        return super().__new__(cls, tensors)


@explained
def forward(
    rt: Runtime,
    x: Tensor,
    *inputs: Value | None,
    spec: GroupedSpec,
    splits: Groups,
    scales: Scales | None = None,
    inspectors: Sequence[Inspector | None] | None = None,
    ready: Sequence[QuantizedTensor | None] | None = None,
) -> tuple[tuple[Tensor], GroupedSaved]:
    """((y,), saved). `inputs` are the weights [N, K], the biases [N] or None, and the draws (or None)."""
    n = len(spec.parts)
    weights, biases = inputs[:n], inputs[n : 2 * n]
    leading, x2 = flattened(x)
    width = weights[0].shape[0]  # type: ignore[union-attr]
    out = splits.out if splits.out is not None else rt.empty((*leading, width), spec.dtype)
    if _on_device(spec, splits, weights):
        rows, matrices, saved = _device_operands(rt, x, inputs, spec, scales, splits, ready, rowwise=True)
        used = biases if any(b is not None for b in biases) else None
        options: Any = {"trans_b": True, "bias": used} | _of_product(spec, "fprop")
        ops.gemm_grouped(rt, rows, matrices, out.matrix(), splits.offsets, **options)
        return (out,), saved
    splits = splits.read(rt)
    _check_groups(spec, splits, x)
    each = products(spec.parts, scales, inspectors)
    xs, ws, saved = _operands(rt, x, inputs, spec, each, splits, ready)
    if spec.plain or spec.shared is not None:
        left, right = [uses.rows for _, uses in xs], [uses.rows for _, uses in ws]
        options = {"bias": biases} | _of_product(spec, "fprop")
        ops.gemm_grouped(rt, left, right, out.matrix(), sizes=splits.sizes, trans_b=True, **options)
    else:
        _each(rt, out, splits, lambda i, y: each[i].fprop(rt, xs[i], ws[i], y, biases[i]))  # type: ignore[arg-type]
    return (out,), saved


def kept(
    rt: Runtime,
    x: Tensor,
    *inputs: Value | None,
    spec: GroupedSpec,
    splits: Groups,
    scales: Scales | None = None,
    inspectors: Sequence[Inspector | None] | None = None,
    ready: Sequence[QuantizedTensor | None] | None = None,
) -> GroupedSaved:
    """What `forward` with these arguments saves, without its products."""
    if _on_device(spec, splits, inputs[: len(spec.parts)]):
        return _device_operands(rt, x, inputs, spec, scales, splits, ready, rowwise=False)[2]
    splits = splits.read(rt)
    return _operands(rt, x, inputs, spec, products(spec.parts, scales, inspectors), splits, ready)[2]


def _of_product(spec: GroupedSpec, gemm: str) -> dict[str, Any]:
    """What the products of all groups are told."""
    return {} if spec.shared is None else spec.shared.of_product(gemm)


def _device_operands(
    rt: Runtime,
    x: Tensor,
    inputs: Sequence[Value | None],
    spec: GroupedSpec,
    scales: Scales | None,
    splits: Groups,
    ready: Sequence[QuantizedTensor | None] | None,
    rowwise: bool,
) -> tuple[Tensor | QuantizedRows, list[Any], GroupedSaved]:
    """(x and the weights as the products read them where the device knows the sizes, what is saved)."""
    n = len(spec.parts)
    wanted, used = any(p.needs.weight for p in spec.parts), any(any(p.needs) for p in spec.parts)
    weights, rng, own = inputs[:n], inputs[2 * n], flattened(x)[1]
    assert isinstance(own, Tensor) and splits.offsets is not None
    rows: Tensor | QuantizedRows = own
    matrices, block = list(weights), own if wanted else None
    kept_w: list[Tensor | None] = [None] * n
    if not spec.plain:
        each = products(spec.parts, scales, None)
        rule, again = spec.shared.input, spec.parts[0].again  # type: ignore[union-attr]
        assert rule is not None
        if rowwise or (wanted and not again):
            columnwise = wanted and not again
            casts = [forward_cast(rule, p.scales, p.gemm, INPUT, rowwise=rowwise, columnwise=columnwise) for p in each]
            rows = ops.quantize_rows(rt, own, splits.offsets, casts)
            block = rows.block if columnwise else block
        ws, whole = _weights(rt, weights, spec, each, ready, together=True)
        matrices = [uses.rows for _, uses in ws]
        kept_w = [p.kept_weight(w) for p, w in zip(each, ws, strict=True)] if whole is None else [whole, *kept_w[1:]]
    saved = GroupedSaved(
        rng if used else None, block, *[None] * (n - 1), *(weights if used else [None] * n), *kept_w
    )  # fmt: skip
    return rows, matrices, saved


def _weights(
    rt: Runtime,
    weights: Sequence[Value | None],
    spec: GroupedSpec,
    each: Sequence[Product],
    ready: Sequence[QuantizedTensor | None] | None,
    together: bool = False,
) -> tuple[list[Made], Tensor | None]:
    """(the weight of each group as its products read it: those of empty groups too, whose maxima count; with `together`
    what is kept of all of them, where one launch has quantized them into one block)."""
    rule, override = _shared_rule(spec, "weight")
    if rule is not None and all(type(w) is Tensor for w in weights) and not any(ready or ()):
        columnwise = spec.parts[0].needs.input and override is None
        casts = [forward_cast(rule, p.scales, p.gemm, WEIGHT, rowwise=True, columnwise=columnwise) for p in each]
        outs = None
        if together:
            n, k = weights[0].shape  # type: ignore[union-attr]
            outs = allocate_groups(rt, [n] * len(weights), k, casts[0])
        qs = ops.quantize_many(rt, weights, casts, outs=outs)  # type: ignore[arg-type]
        ws: list[Made] = [(w, Uses(q, q, None)) for w, q in zip(weights, qs, strict=True)]  # type: ignore[misc]
        return ws, qs[0].block if together and columnwise else None
    operands = zip(each, weights, ready or [None] * len(each), strict=True)
    return [(w, weight_operand(rt, w, p, r)) for p, w, r in operands], None  # type: ignore[arg-type, misc]


def _operands(
    rt: Runtime,
    x: Tensor,
    inputs: Sequence[Value | None],
    spec: GroupedSpec,
    each: Sequence[Product],
    splits: Groups,
    ready: Sequence[QuantizedTensor | None] | None,
) -> tuple[list[Made], list[Made], GroupedSaved]:
    """(x and the weight of each group as the products read them, what is saved)."""
    n = len(spec.parts)
    weights, rng = inputs[:n], inputs[2 * n]
    _, x2 = flattened(x)
    assert isinstance(x2, Tensor)
    xs, whole = _inputs(rt, x2, spec, each, splits)
    ws, _ = _weights(rt, weights, spec, each, ready)
    kept_x: list[Tensor | None] = []
    kept_w: list[Tensor | None] = []
    for product, a, b, rows in zip(each, xs, ws, splits.sizes, strict=True):
        pair = product.keep(rt, a, b) if rows else (None, None)
        # A view of x is saved as x: autograd knows whole tensors.
        kept_x.append(x2 if pair[0] is not None and pair[0] is a[0] else pair[0])
        kept_w.append(pair[1])
    if whole is not None:
        kept_x = [whole, *[None] * (n - 1)]
    used = any(any(part.needs) for part in spec.parts)
    return xs, ws, GroupedSaved(rng if used else None, *kept_x, *[w if used else None for w in weights], *kept_w)


@explained
def backward(
    rt: Runtime,
    dy: Value,
    saved: GroupedSaved,
    *,
    spec: GroupedSpec,
    splits: Groups,
    scales: Scales | None = None,
    inspectors: Sequence[Inspector | None] | None = None,
    sinks: Sequence[Sink | None] | None = None,
) -> tuple[Tensor | None, ...]:
    """(dx, a dweight for each group, a dbias for each), None where `spec` or a sink says so."""
    count = len(spec.parts)
    rng, kept, weights, ws = saved[0], saved[1 : 1 + count], saved[1 + count : 1 + 2 * count], saved[1 + 2 * count :]
    weights = tuple(map(saved_weight, weights))
    each = products(spec.parts, scales, inspectors, sinks)
    leading, dy2 = flattened(dy)
    dy2 = dense(rt, dy2, spec.dtype)
    if _on_device(spec, splits, weights):
        return _backward_on_device(rt, dy2, (rng, kept[0], weights, ws), spec, each, splits, leading)
    splits = splits.read(rt)
    _check_groups(spec, splits, dy2)
    dbs = [product.bias_gradient(rt, w) for product, w in zip(each, weights, strict=True)]
    gs = _gradients(rt, dy2, spec, each, splits, dbs, rng)
    dx = None
    if spec.parts[0].needs.input:
        dx = splits.dx if splits.dx is not None else rt.empty((*leading, weights[0].shape[1]), spec.dtype)
        # One after the other: each lets go of its gradient's copy, and may make one of a weight for itself.
        _each(rt, dx, splits, lambda i, rows: each[i].dgrad(rt, gs[i][0], weights[i], ws[i], rows))
    dws: list[Tensor | None] = []
    xs = _restored_inputs(rt, kept, weights, spec, each, splits)
    for i, product in enumerate(each):
        if not product.spec.needs.weight:
            dws.append(None)
        elif not splits.sizes[i]:
            dws.append(_no_gradient(rt, weights[i], product))
        else:
            (operand, left), x = gs[i], xs[i]
            assert x is not None  # kept for every group whose weight wants a gradient
            dws.append(product.wgrad(rt, operand, x, weights[i], left))
    return dx, *dws, *dbs


def forward_of_stack(
    rt: Runtime, x: Tensor, weight: Tensor, *rest: Value | None, spec: GroupedSpec, splits: Groups, **options: Any
) -> tuple[tuple[Tensor], GroupedSaved]:
    """`forward` with the weights of all groups in one tensor [groups, N, K], which stands for them in `saved`."""
    n, weights = len(spec.parts), _of_stack(weight)
    result, saved = forward(rt, x, *weights, *rest, spec=spec, splits=splits, **options)
    xs, own = saved[1 : 1 + n], saved[1 + n]
    # A matrix of the stack is saved as the stack: autograd knows whole tensors.
    ws = tuple([weight if t is w else t for t, w in zip(saved[1 + 2 * n :], weights, strict=True)])
    if _on_device(spec, splits, weights):  # which keeps one x, and mostly one block of weights
        xs, ws = xs[:1], ws if any(ws[1:]) else ws[:1]
    return result, GroupedSaved(saved[0], *xs, None if own is None else weight, *ws)


def backward_of_stack(
    rt: Runtime,
    dy: Value,
    saved: GroupedSaved,
    *,
    spec: GroupedSpec,
    splits: Groups,
    scales: Scales | None = None,
    inspectors: Sequence[Inspector | None] | None = None,
    sinks: Sequence[Sink | None] | None = None,
) -> tuple[Tensor | None, ...]:
    """(dx, one dweight [groups, N, K], a dbias for each group)."""
    n = len(spec.parts)
    known = 1 if _on_device(spec, splits, ()) else n
    weight, ws = saved[1 + known], saved[2 + known :]
    if weight is None or len(weight.shape) != 3:
        got, allowed = f"{weight!r} as the saved weight", "the tensor that forward saved"
        raise ArgumentError("layer backward", got, allowed, "pass its `saved`")
    none = (None,) * n
    weights = _of_stack(weight)
    ws = tuple(
        [w if t is not None and t.ndim == 3 else t for t, w in zip((*ws, *none[len(ws) :]), weights, strict=True)]
    )
    full = GroupedSaved(*saved[: 1 + known], *none[known:], *weights, *ws)
    sink, dw, each, later = sinks[0] if sinks else None, None, None, list[Any]()
    if spec.parts[0].needs.weight:
        queue = None if sink is None or sink.queue is None else later
        main = None if sink is None else sink.main
        dw = main if main is not None else rt.empty(weight.shape, gradient_dtype(spec.parts[0], weight))
        adds = main is not None and sink.accumulate  # type: ignore[union-attr]
        each = [Sink(part, adds, queue) for part in _of_stack(dw)]
        dw = dw if main is None else None
    options: Any = {"scales": scales, "inspectors": inspectors, "sinks": each}
    dx, *others = backward(rt, dy, full, spec=spec, splits=splits, **options)
    if later:

        def run(rt: Runtime) -> Tensor | None:
            for product in later:
                product(rt)
            return dw

        sink.queue.append(run)  # type: ignore[union-attr]
    return dx, None if later else dw, *others[n:]


def _of_stack(stack: Tensor) -> tuple[Tensor, ...]:
    """The matrices of a tensor [groups, N, K]."""
    groups, *shape = stack.shape
    step = stack.nbytes // max(1, groups)
    return tuple(
        [Tensor(stack.ptr + i * step, (*shape,), stack.dtype, stack.device, stack.owner) for i in range(groups)]
    )


def _on_device(spec: GroupedSpec, splits: Groups, weights: Sequence[Value | None]) -> bool:
    """Whether products read the sizes on the device."""
    return splits.known is None and (
        spec.formats is not None or (spec.plain and all(type(w) is Tensor for w in weights))
    )


def _backward_on_device(
    rt: Runtime,
    dy: Tensor,
    saved: tuple[Any, Tensor | None, Sequence[Value], Sequence[Tensor | None]],
    spec: GroupedSpec,
    each: Sequence[Product],
    splits: Groups,
    leading: tuple[int, ...],
) -> tuple[Tensor | None, ...]:
    """`backward`, a launch for all groups each. Gradients of weights that go elsewhere are launches of their own kind:
    those that are added to, and those of another dtype."""
    (rng, block, weights, ws), first, offsets = saved, each[0].spec, splits.offsets
    assert offsets is not None
    # An adapter saves its caller's tensor, in his shape.
    x: Any = None if block is None or block.dtype is dtypes.uint8 else block.matrix()
    g: Any = dy
    wanted, matrices = any(p.needs.weight for p in spec.parts), list(weights)
    if not spec.plain and (wanted or first.needs.input):
        rule, grad = spec.shared.input, spec.shared.grad  # type: ignore[union-attr]
        assert rule is not None and grad is not None
        casts = [
            backward_cast(grad, p.scales, p.gemm, rowwise=first.needs.input, columnwise=wanted, rng=rng) for p in each
        ]
        g = ops.quantize_rows(rt, dy, offsets, casts)
        if x is not None:
            cast = forward_cast(rule, None, 0, INPUT, rowwise=False, columnwise=True)
            x = ops.quantize_rows(rt, x, offsets, [cast] * len(each))
        elif block is not None:
            x = rows_in(block, (dy.shape[0], weights[0].shape[1]), len(each), rule.format)
    dx = None
    if first.needs.input:
        if not spec.plain:
            matrices = _kept_weights(rt, ws, weights, spec)
        dx = splits.dx if splits.dx is not None else rt.empty((*leading, weights[0].shape[1]), first.dtype)
        ops.gemm_grouped(rt, g, matrices, dx.matrix(), offsets, **_of_product(spec, "dgrad"))
        g = g if spec.plain else g._replace(rowwise=None, rowwise_scale=None)  # backward is where memory peaks
    dbs = [product.bias_gradient(rt, w) for product, w in zip(each, weights, strict=True)]
    ops.group_sums(rt, dy, offsets, dbs)
    rules = _of_product(spec, "wgrad")
    dws: list[Tensor | None] = [None] * len(each)
    together: dict[tuple[int, bool, DType], tuple[list[Any] | None, list[Tensor | None]]] = {}
    for i, (product, w) in enumerate(zip(each, weights, strict=True)):
        sink = product.sink
        if not product.spec.needs.weight:
            continue
        main, queue, dtype = None, None, gradient_dtype(product.spec, w)
        if sink is not None:
            main, queue = sink.main, sink.queue
        if main is None and queue is not None:
            queue.append(partial(_one_weight, dy=g, x=x, offsets=offsets, at=(i, len(each)), rules=rules, like=w))
            continue
        if main is None:
            main = dws[i] = rt.empty(w.shape, dtype if dtype is first.dtype else dtypes.float32)
        key = id(queue), sink is not None and sink.accumulate, main.dtype
        together.setdefault(key, (queue, [None] * len(each)))[1][i] = main
    for (_, accumulate, _), (queue, outs) in together.items():
        options: Any = {"trans_a": True, "accumulate": accumulate, **rules}
        if queue is None:
            ops.gemm_grouped(rt, g, x, outs, offsets, **options)
        else:
            queue.append(partial(ops.gemm_grouped, a=g, b=x, out=outs, offsets=offsets, **options))
    return dx, *dws, *dbs


def _kept_weights(rt: Runtime, ws: Sequence[Tensor | None], weights: Sequence[Value], spec: GroupedSpec) -> list[Value]:
    """The weights as dgrad reads them, of what forward kept: a block for each, or one of all."""
    whole, n = ws[0], len(weights)
    if whole is not None and n > 1 and not any(ws[1:]) and all(type(w) is Tensor for w in weights):
        form = spec.shared.weight.format  # type: ignore[union-attr]
        rows, width = weights[0].shape
        return list(groups_in(whole, [rows] * n, width, form, columnwise=True))
    return [backward_weight(rt, kept, w, spec.parts[0]) for kept, w in zip(ws, weights, strict=True)]


def _one_weight(
    rt: Runtime, *, dy: Any, x: Any, offsets: Tensor, at: tuple[int, int], rules: dict[str, Any], like: Value
) -> Tensor:
    """The gradient of one group's weight, when its queue comes to it."""
    outs: list[Tensor | None] = [None] * at[1]
    dw = outs[at[0]] = rt.empty(like.shape, like.dtype)
    ops.gemm_grouped(rt, dy, x, outs, offsets, trans_a=True, **rules)
    return dw


def _check_groups(spec: GroupedSpec, splits: Groups, x: Value) -> None:
    """The sizes are those of the spec's groups, and of all rows."""
    rows, sizes = prod(x.shape[:-1]), splits.sizes
    if len(sizes) != len(spec.parts) or min(sizes, default=0) < 0 or sum(sizes) != rows:
        raise ArgumentError(
            "grouped_linear",
            f"groups of {list(sizes)} rows, of {rows} rows and {len(spec.parts)} weights",
            "a count of rows, 0 or more, for each weight, which add up to the rows",
            "correct the sizes",
        )


def _each(rt: Runtime, out: Tensor, splits: Groups, run: Callable[[int, Tensor], Tensor]) -> None:
    """A product for each group that has rows, into its rows of `out`."""
    for i, (start, stop) in enumerate(splits.bounds):
        if start < stop:
            rows = out.matrix().rows(start, stop)
            made = run(i, rows)
            if made is not rows:  # an inspector's
                ops.resize(rt, made.matrix(), *rows.shape, out=rows)


# ---------------------------------------------------------------------------------------- operands of all groups


def _shared_rule(spec: GroupedSpec, role: str) -> tuple[Operand | None, str | None]:
    """(the rule by which one launch quantizes all groups of an operand, if there is one, its `backward_override`)."""
    precision = spec.shared
    rule: Operand | None = getattr(precision, role, None)
    return (None, None) if precision is None or rule is None or not is_plain_rule(rule) else (rule, precision.backward)


def _inputs(
    rt: Runtime, x: Tensor, spec: GroupedSpec, each: Sequence[Product], splits: Groups
) -> tuple[list[Made], Tensor | None]:
    """(x of each group as fprop and wgrad read it, what is kept of all of them if that is one tensor)."""
    wanted = any(part.needs.weight for part in spec.parts)
    rule, override = _shared_rule(spec, "input")
    if rule is not None:
        again = spec.parts[0].again
        columnwise = wanted and override is None and not again
        casts = [forward_cast(rule, p.scales, p.gemm, INPUT, rowwise=True, columnwise=columnwise) for p in each]
        qs = ops.quantize_grouped(rt, x, splits.sizes, casts)
        whole = x if again or override == "high_precision" else qs[0].block
        return [(q, Uses(q, q, None)) for q in qs], whole if wanted else None
    made: list[Made] = []
    for product, (start, stop) in zip(each, splits.bounds, strict=True):
        rows = x.rows(start, stop)
        unread = product.spec.precision is None or start == stop
        made.append((rows, Uses(rows, rows, None) if unread else input_operand(rt, rows, product)))
    return made, x if wanted and spec.plain else None


def _restored_inputs(
    rt: Runtime,
    kept: Sequence[Tensor | None],
    weights: Sequence[Value],
    spec: GroupedSpec,
    each: Sequence[Product],
    splits: Groups,
) -> Sequence[Value | None]:
    """x of each group as wgrad reads it, of what forward kept."""
    rule, override = _shared_rule(spec, "input")
    whole = kept[0]
    if rule is not None and whole is not None and spec.parts[0].again:
        cast = forward_cast(rule, None, 0, INPUT, rowwise=False, columnwise=True)
        return ops.quantize_grouped(rt, whole.matrix(), splits.sizes, [cast] * len(each))
    if rule is not None and whole is not None and override != "high_precision":
        groups = groups_in(whole, splits.sizes, weights[0].shape[1], rule.format, override is None)
        if override is None:
            return groups
        return [ops.dequantize(rt, q, spec.dtype) if q.shape[0] else None for q in groups]
    if rule is not None or spec.plain:
        kept = [whole] * len(kept)
    found: list[Value | None] = []
    for product, kept_x, weight, (start, stop) in zip(each, kept, weights, splits.bounds, strict=True):
        value = None
        if product.spec.needs.weight and start < stop:
            if kept_x is not None and kept_x.dtype is not dtypes.uint8 and kept_x.matrix().shape[0] != stop - start:
                kept_x = kept_x.matrix().rows(start, stop)  # of all of x
            value = product.restored(rt, kept_x, stop - start, weight)
        found.append(value)
    return found


def _gradients(
    rt: Runtime,
    dy: Tensor,
    spec: GroupedSpec,
    each: Sequence[Product],
    splits: Groups,
    dbs: Sequence[Tensor | None],
    rng: Tensor | None,
) -> list[tuple[Made, Tensor | None]]:
    """For each group (dy as dgrad and wgrad read it, the db that wgrad still has to fill)."""
    rule, override = _shared_rule(spec, "grad")
    wanted = any(part.needs.weight for part in spec.parts)
    rowwise = spec.parts[0].needs.input
    if rule is not None and override is None and (rowwise or wanted):
        casts = [backward_cast(rule, p.scales, p.gemm, rowwise=rowwise, columnwise=wanted, rng=rng) for p in each]
        like = next((db for db in dbs if db is not None), None)
        sums = None if like is None else [rt.empty(like.shape, like.dtype) if db is None else db for db in dbs]
        qs = ops.quantize_grouped(rt, dy, splits.sizes, casts, sums)  # the columns of all are added, or of none
        return [((q, Uses(q, q, cast)), None) for q, cast in zip(qs, casts, strict=True)]
    made: list[tuple[Made, Tensor | None]] = []
    for product, db, (start, stop) in zip(each, dbs, splits.bounds, strict=True):
        rows = dy.rows(start, stop)
        if start < stop:
            uses, left = gradient_operand(rt, rows, product, db, rng)
            made.append(((rows, uses), left))
            continue
        if db is not None:
            rt.backend.zero(rt, db)
        made.append(((rows, Uses(rows, rows, None)), None))
    return made


def _no_gradient(rt: Runtime, weight: Value, product: Product) -> Tensor | None:
    """The weight gradient of an empty group: zeros, fresh or in its sink."""
    sink = product.sink

    def run(rt: Runtime) -> Tensor | None:
        if sink is None or sink.main is None:
            return rt.zeros(weight.shape, gradient_dtype(product.spec, weight))
        kinds = ACTIVATION_DTYPES
        _check.result("grouped_linear", rt.device, "the main of a sink", sink.main, tuple(weight.shape), kinds)
        if not sink.accumulate:
            rt.backend.zero(rt, sink.main)
        return None

    return product.in_turn(rt, run)
