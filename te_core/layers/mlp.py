"""norm + MLP: y = act(norm(x) w1^T + b1) w2^T + b2, norm and activation delivering their outputs quantized. A
chain of te.ops may leave the norm out.

Shapes: x [.., H], gamma and beta [H], w1 [F', H] with F' = F or 2 F (gated), w2 [O, F], y [.., O].
Names: n = norm(x), h = n w1^T + b1, a = act(h); M rows. In a residual stream (te_core/layers/residual.py) also
residual [.., H] and the bias [H] of the branch that x is.

With `checkpoint` nothing between x and fc2's result is kept: backward first computes norm, fc1 and activation again,
with the scales that forward read, so bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.arguments import explained
from te_core.dtypes import DType
from te_core.layers.communicator import Communicator
from te_core.layers.inspector import Inspector
from te_core.layers.meeting import meet
from te_core.layers.norm import NormKept, NormSpec, norm_gradients, normalized
from te_core.layers.norm_linear import comes_again, kept_scale, norm_again
from te_core.layers.parallel import scattered
from te_core.layers.product import (
    LinearSpec,
    Product,
    Sink,
    gradient_dtype,
    gradient_operand,
    input_operand,
    products,
    quantized_gradient,
    saved_weight,
    shown,
    sums_of_part,
    weight_operand,
)
from te_core.layers.residual import Stream, entered, left, returned, returned_gradients
from te_core.layers.watched import Made
from te_core.ops import raw as ops
from te_core.ops.activation import Clamp
from te_core.ops.norm import Branch
from te_core.quantize.operands import Uses, Value, is_plain_rule
from te_core.quantize.state import Scales, backward_cast
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import META, Tensor

FC1, FC2 = 0, 1  # the GEMMs' numbers in the scaling state


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """All that an MLP's plan depends on besides shapes."""

    fc1: LinearSpec  # its needs.input: a gradient of x, gamma or beta is wanted
    fc2: LinearSpec  # its needs.input: any gradient at or before fc1 is wanted
    norm: NormSpec | None  # None: n is x
    activation: str
    return_norm: bool = False
    clamp: Clamp | None = None  # of clamped_swiglu
    stream: Stream | None = None
    checkpoint: bool = False
    again: bool = False  # without `checkpoint`: backward computes the norm's output again, where it can
    gather_norm: bool = False  # the norm's output that comes out is that of all ranks' rows


class MLPSaved(NamedTuple):
    """What backward reads; n and a as their wgrads read them."""

    x: Tensor | None = None  # None, as the next three, where no gradient goes through the norm
    gamma: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    n: Tensor | None = None
    h: Tensor | None = None
    a: Tensor | None = None
    w1: Value | None = None  # the parameters themselves
    w2: Value | None = None
    w1q: Tensor | None = None  # and as their dgrads read them; None if the parameter is quantized itself
    w2q: Tensor | None = None
    rng: Tensor | None = None
    branch_rng: Tensor | None = None
    beta: Tensor | None = None  # this and the next two only where something is computed again
    b1: Tensor | None = None
    scale: Tensor | None = None  # the scales that forward read


@explained
def forward(
    rt: Runtime,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    w1: Value,
    b1: Tensor | None,
    w2: Value,
    b2: Tensor | None,
    rng: Tensor | None = None,
    residual: Tensor | None = None,
    branch_bias: Tensor | None = None,
    branch_rng: Tensor | None = None,
    *,
    spec: MLPSpec,
    scales: Scales | tuple[Scales | None, ...] | None = None,
    inspectors: Sequence[Inspector | None] = (None, None),
    ready: Sequence[QuantizedTensor | None] = (None, None),
    comm: Communicator | None = None,
) -> tuple[tuple[Value, ...], MLPSaved]:
    """((y,), saved); with `return_norm` the norm's output comes next, with `stream` what the norm read comes last.
    `scales`: the state of both products, or one for each."""
    fc1, fc2 = products((spec.fc1, spec.fc2), scales, inspectors, None, comm)
    leading = x.shape[:-1]
    if comm is not None:
        operands = {"fc1_weight": w1, "fc1_bias": b1, "fc2_weight": w2, "fc2_bias": b2}
        meet(rt, comm, "LayerNormMLP", spec, input=x, **operands)
        leading = fc1.parallel.leading("fprop", leading)  # type: ignore[union-attr]
    total, branch = entered(rt, x, spec.stream, residual, branch_bias, branch_rng)
    given = x, gamma, beta, w1, b1, w2
    normed, a, w2_made, saved = _inside(rt, given, spec, (fc1, fc2), ready, branch, keep=not spec.checkpoint)
    out = fc2.fprop(rt, a, w2_made, rt.empty((*leading, fc2.sides(w2)[0]), spec.fc2.dtype), b2)
    outputs = returned(rt, out, normed, total, spec, comm)

    if not spec.checkpoint:
        saved = saved._replace(x=None if saved.gamma is None else total, rng=rng, branch_rng=branch_rng)
        if spec.again and comes_again(spec.fc1):
            saved = saved._replace(
                n=None, beta=beta, scale=kept_scale(rt, scales if isinstance(scales, Scales) else None)
            )
        return outputs, saved
    kept = MLPSaved(x=total, gamma=gamma, w1=w1, w2=w2, rng=rng, branch_rng=branch_rng, beta=beta, b1=b1)
    return outputs, kept._replace(scale=kept_scale(rt, scales if isinstance(scales, Scales) else None))


def _inside(
    rt: Runtime,
    given: tuple[Any, ...],  # x, gamma, beta, w1, b1, w2
    spec: MLPSpec,
    both: tuple[Product, Product],
    ready: Sequence[QuantizedTensor | None],
    branch: Branch | None = None,
    *,
    keep: bool,
) -> tuple[Tensor | None, Made, Made, MLPSaved]:
    """Norm, fc1 and activation: (the norm's output, fc2's operands, what backward reads, if it is to be kept)."""
    x, gamma, beta, w1, b1, w2 = given
    fc1, fc2 = both
    parallel = fc1.parallel
    normed = mean = rstd = None
    if spec.norm is None:
        ns: Made = x.matrix(), input_operand(rt, x.matrix(), fc1)
    else:
        cast, plain = fc1.input_cast(x)
        normed, q, mean, rstd = normalized(rt, x, gamma, beta, spec.norm, cast, plain or spec.return_norm, branch)
        ns = fc1.computed_input(rt, normed, q, cast)
    if parallel is not None:
        parallel.send(rt, ns[1])
    us, vs = (w1, weight_operand(rt, w1, fc1, ready[FC1])), (w2, weight_operand(rt, w2, fc2, ready[FC2]))
    n, w1q = fc1.keep(rt, ns, us) if keep else (None, None)
    rows = ns[1].rows.shape[0]
    if parallel is not None:
        (rows,) = parallel.leading("fprop", (prod(x.shape[:-1]),))
    h = fc1.fprop(rt, ns, us, rt.empty((rows, fc1.sides(w1)[0]), spec.fc1.dtype), b1)
    cast, plain = fc2.input_cast()
    activated, q = ops.activation_forward(rt, h, spec.activation, clamp=spec.clamp, cast=cast, keep=plain)
    made = fc2.computed_input(rt, activated, q, cast)
    a, w2q = fc2.keep(rt, made, vs) if keep else (None, None)
    if w2q is not None and w2q.dtype is dtypes.uint8 and vs[1].cast is None:
        w2q = w2q.reshape(*w2q.shape)  # a caller's weight: backward lets go of this view of it
    goes_through = spec.norm is not None and spec.fc1.needs.input
    norm: NormKept = (x, gamma, mean, rstd) if goes_through else (None, None, None, None)
    return normed, made, vs, MLPSaved(*norm, n, h if spec.fc2.needs.input else None, a, w1, w2, w1q, w2q)


def _computed_again(
    rt: Runtime,
    kept: MLPSaved,
    spec: MLPSpec,
    scales: Scales | None,
    ready: Sequence[QuantizedTensor | None],
    comm: Communicator | None,
) -> MLPSaved:
    """What forward would have saved without `checkpoint`. Nothing is recorded: the maxima were taken before."""
    assert kept.x is not None and kept.gamma is not None and kept.w1 is not None and kept.w2 is not None
    if scales is not None:
        scales = Scales(kept.scale, None, scales.backward_scale, scales.backward_amax, None, scales.backward_nonfinite)
    given = kept.x, kept.gamma, kept.beta, kept.w1, kept.b1, kept.w2
    fc1, fc2 = products((spec.fc1, spec.fc2), scales, None, None, comm)
    *_, found = _inside(rt, given, spec, (fc1, fc2), ready, keep=True)
    # Views of their own: backward lets go of them, and what is behind them may be a cache's.
    w1q, w2q = (None if t is None else t.reshape(*t.shape) for t in (found.w1q, found.w2q))
    return found._replace(w1q=w1q, w2q=w2q, rng=kept.rng, branch_rng=kept.branch_rng)


@explained
def backward(
    rt: Runtime,
    dy: Value,
    second: Tensor | None,
    third: Tensor | None,
    saved: MLPSaved,
    *,
    spec: MLPSpec,
    scales: Scales | tuple[Scales | None, ...] | None = None,
    inspectors: Sequence[Inspector | None] = (None, None),
    sinks: Sequence[Sink | None] = (None, None),
    release: bool = False,
    ready: Sequence[QuantizedTensor | None] = (None, None),
    comm: Communicator | None = None,
) -> tuple[Tensor | None, ...]:
    """(dx, dgamma, dbeta, dw1, db1, dw2, db2, None, dresidual, dbranch_bias); `second` and `third` are the gradients
    of the outputs beside y, in their order.

    With `release` nobody will read `saved` again: its tensors are let go of as soon as they were read.
    """
    fc1, fc2 = products((spec.fc1, spec.fc2), scales, inspectors, sinks, comm)
    dnorm, dstream = returned_gradients(second, third, spec.return_norm, spec.stream)
    if spec.checkpoint:
        own = scales if isinstance(scales, Scales) else None
        saved, release = _computed_again(rt, saved, spec, own, ready, comm), True
    w1, w2 = saved_weight(saved.w1), saved_weight(saved.w2)
    dy2: Value = dy.matrix() if isinstance(dy, Tensor) else dy
    m = dy2.shape[0]
    left_db = db2 = fc2.bias_gradient(rt, w2)
    if comm is not None:
        (m,) = fc2.parallel.leading("dgrad", (m,))  # type: ignore[union-attr]
        left_db = sums_of_part(rt, dy2, fc2, db2, saved.rng)
    g, db2_left = gradient_operand(rt, dy2, fc2, left_db, saved.rng)
    if comm is not None:
        fc2.begin(rt, g, saved.a, dy2.shape[0], w2)
    dw2 = dw1 = db1 = dx = dgamma = dbeta = dresidual = dbranch_bias = dh = dn = None
    early = (
        release
        and spec.fc2.needs.weight
        and comm is None  # ranks put dy together for dgrad; wgrad has it then
        and _frees_more(saved.a, w2.shape, gradient_dtype(spec.fc2, w2), fc2.sink)
    )
    if early:
        dw2 = _fc2_weight_gradient(rt, (dy2, g), saved, fc2, db2_left, release)
    if spec.fc2.needs.input:
        da = [fc2.dgrad(rt, (dy2, g), w2, saved.w2q, rt.empty((m, fc2.sides(w2)[1]), spec.fc2.dtype))]
        db1 = fc1.bias_gradient(rt, w1)
        dh = _activation_gradient(rt, da, saved, spec, fc1, db1)
        if release:
            quantized = saved.w2q is not None and saved.w2q.dtype is dtypes.uint8  # a plain one is the caller's own
            _let_go(saved.h, saved.w2q if quantized else None)
    if spec.fc2.needs.weight and not early:
        dw2 = _fc2_weight_gradient(rt, (dy2, g), saved, fc2, db2_left, release)
    del g
    if comm is not None and spec.fc1.needs.weight:
        assert dh is not None
        n = _norm_output(rt, saved, spec, comm)
        fc1.begin(rt, dh[1], n, m, w1)
    if spec.fc1.needs.input:
        assert dh is not None
        dn = fc1.dgrad(rt, dh, w1, saved.w1q, rt.empty((m, fc1.sides(w1)[1]), spec.fc1.dtype))
    if comm is not None:  # before anybody waits for dgrad's sum
        if spec.fc1.needs.weight:
            dw1 = fc1.wgrad(rt, dh, fc1.restored(rt, n, m, w1), w1, None)  # type: ignore[arg-type]
        fc1.parallel.settle()  # type: ignore[union-attr]
        if spec.gather_norm and dnorm is not None:
            dnorm = scattered(rt, comm, dnorm)
    if spec.norm is None:
        dx = None if dn is None else dn.reshape(*dy.shape[:-1], dn.shape[1])
    elif dn is not None:
        dx, dgamma, dbeta = norm_gradients(rt, dn, saved[:4], spec.norm, dnorm, dstream)
        del dn
        dx, dbranch_bias, dresidual = left(rt, dx, spec.stream, saved.branch_rng)
    if spec.fc1.needs.weight and comm is None:
        assert dh is not None
        dw1 = fc1.wgrad(rt, dh, fc1.restored(rt, _norm_output(rt, saved, spec), m, w1), w1, None)
    return dx, dgamma, dbeta, dw1, db1, dw2, db2, None, dresidual, dbranch_bias


def _norm_output(rt: Runtime, saved: MLPSaved, spec: MLPSpec, comm: Communicator | None = None) -> Tensor | None:
    """The norm's output as fc1's wgrad reads it, kept or computed again."""
    if spec.norm is not None and spec.again and not spec.checkpoint and comes_again(spec.fc1):
        return norm_again(rt, saved, spec.norm, spec.fc1, comm)
    return saved.n


def _fc2_weight_gradient(
    rt: Runtime, dy: Made, saved: MLPSaved, fc2: Product, db2: Tensor | None, release: bool
) -> Tensor | None:
    assert saved.w2 is not None
    found = fc2.wgrad(rt, dy, fc2.restored(rt, saved.a, dy[0].shape[0], saved.w2), saved.w2, db2)
    if release and (fc2.sink is None or fc2.sink.queue is None):
        _let_go(saved.a)
    return found


def _frees_more(a: Tensor | None, w2: tuple[int, ...], dtype: DType, sink: Sink | None) -> bool:
    """Whether fc2's weight gradient is smaller than what is let go of after it, so that it should come first: memory
    peaks at the activation's gradient."""
    if a is None or a.device is META:  # of shapes alone: a compiler would have a program for small ones
        return False
    made = dtype.nbytes(prod(w2)) if sink is None or sink.main is None else 0
    return a.nbytes > made and (sink is None or sink.queue is None)


def _let_go(*tensors: Tensor | None) -> None:
    """Drop the owners of tensors that were read for the last time; activations between fc1 and fc2 are the largest."""
    for t in tensors:
        if t is not None:
            t.owner = None


def _activation_gradient(
    rt: Runtime, da: list[Tensor], saved: MLPSaved, spec: MLPSpec, fc1: Product, db1: Tensor | None
) -> Made:
    """dh as fc1's dgrad and wgrad read it; its column sums are b1's gradient, taken in the same pass.

    `da` comes in a list, from which it is taken: where dh is quantized by a launch of its own, da is freed before.
    Plain values are handed on to an inspector only.
    """
    p, needs, inspected = fc1.spec.precision, fc1.spec.needs, fc1.spec.inspect is not None
    assert saved.h is not None
    rule = None
    if p is not None and p.backward is None and (needs.input or needs.weight):
        rule = p.grad
    in_its_pass = rule is not None and rule.scaling in ("delayed", "current", "block") and is_plain_rule(rule)
    fused = rule is None or (in_its_pass and not inspected)
    cast = None
    if rule is not None and fused:
        cast = backward_cast(rule, *fc1[1:3], rowwise=needs.input, columnwise=needs.weight)
    dh, q = ops.activation_backward(
        rt, da.pop(), saved.h, spec.activation, clamp=spec.clamp, cast=cast, column_sum=db1 if fused else None
    )
    if fused:
        operand = dh if q is None else q
        assert operand is not None
        uses = Uses(operand, operand, cast)
        return operand, shown(rt, operand, uses, fc1) if inspected else uses
    assert dh is not None
    uses = quantized_gradient(rt, dh, rule, fc1, db1, saved.rng)
    return (dh, shown(rt, dh, uses, fc1)) if inspected else (uses.columns if needs.weight else uses.rows, uses)
