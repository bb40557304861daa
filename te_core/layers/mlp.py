"""norm + MLP: y = act(norm(x) w1^T + b1) w2^T + b2, norm and activation delivering their outputs quantized.

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
from typing import NamedTuple

from te_core.arguments import explained
from te_core.dtypes import DType
from te_core.layers.linear import (
    LinearSpec,
    Sink,
    Site,
    backward_weight,
    bias_dtype,
    drop_rows,
    gradient_operand,
    kept,
    multiply,
    weight_gradient,
    weight_operand,
)
from te_core.layers.norm import NormSpec
from te_core.layers.norm_linear import norm_gradients, normalize
from te_core.layers.residual import Stream, entered, left, returned_gradients
from te_core.ops import raw as ops
from te_core.ops.activation import Clamp
from te_core.ops.norm import Branch
from te_core.quantize.operands import Uses, Value, is_plain_rule, quantize_forward, quantize_gradient, restored, saved
from te_core.quantize.state import INPUT, Scales, backward_cast, forward_cast
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

FC1, FC2 = 0, 1  # the GEMMs' numbers in the scaling state


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """All that an MLP's plan depends on besides shapes."""

    fc1: LinearSpec  # its needs.input: a gradient of x, gamma or beta is wanted
    fc2: LinearSpec  # its needs.input: any gradient at or before fc1 is wanted
    norm: NormSpec
    activation: str
    return_norm: bool = False
    clamp: Clamp | None = None  # of clamped_swiglu
    stream: Stream | None = None
    checkpoint: bool = False


class MLPSaved(NamedTuple):
    """What backward reads; n and a as their wgrads read them."""

    x: Tensor | None  # None, as the next three, where no gradient goes through the norm
    gamma: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    n: Tensor | None
    h: Tensor | None
    a: Tensor | None
    w1: Value | None  # the parameters themselves
    w2: Value | None
    w1q: Tensor | None  # and as their dgrads read them; None if the parameter is quantized itself
    w2q: Tensor | None
    rng: Tensor | None
    branch_rng: Tensor | None
    beta: Tensor | None = None  # this and the next two only with `checkpoint`
    b1: Tensor | None = None
    scale: Tensor | None = None  # the scales that forward read


class _Inside(NamedTuple):
    """What forward makes before fc2."""

    normed: Tensor | None
    n: Uses
    mean: Tensor | None
    rstd: Tensor
    w1: Uses
    h: Tensor
    y: Tensor | None
    a: Uses


@explained
def forward(
    rt: Runtime,
    x: Tensor,
    gamma: Tensor,
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
    scales: Scales | None = None,
    ready: Sequence[QuantizedTensor | None] = (None, None),
) -> tuple[tuple[Tensor, ...], MLPSaved]:
    """((y,), saved); with `return_norm` the norm's output comes next, with `stream` what the norm read comes last."""
    fc2 = spec.fc2
    total, branch = entered(rt, x, spec.stream, residual, branch_bias, branch_rng)
    vs = weight_operand(rt, w2, Site(fc2, scales, FC2), ready[1])
    inside = _inside(rt, (x, gamma, beta, w1, b1), spec, scales, ready[0], branch)
    out = rt.empty((*x.shape[:-1], w2.shape[0]), fc2.dtype)
    multiply(rt, "fprop", inside.a.rows, vs.rows, out.matrix(), fc2, vector=b2)
    outputs: tuple[Tensor, ...] = (out,)
    if spec.return_norm:
        assert inside.normed is not None
        outputs = (out, inside.normed.reshape(*x.shape))
    if spec.stream is not None:
        outputs = (*outputs, total)
    if not spec.checkpoint:
        saved = _saved(spec, inside, (total, gamma, w1, w2), vs, rng)
        return outputs, saved._replace(branch_rng=branch_rng)
    scale = None
    if scales is not None and scales.forward_scale is not None:
        vector = scales.forward_scale
        scale = ops.resize(rt, vector.reshape(1, vector.size), 1, vector.size).reshape(vector.size)
    nothing = dict.fromkeys(MLPSaved._fields)
    return outputs, MLPSaved(**nothing)._replace(
        x=total, gamma=gamma, w1=w1, w2=w2, rng=rng, branch_rng=branch_rng, beta=beta, b1=b1, scale=scale
    )


_Operands = tuple[Tensor, Tensor, Tensor | None, Value, Tensor | None]  # x, gamma, beta, w1, b1


def _inside(
    rt: Runtime,
    given: _Operands,
    spec: MLPSpec,
    scales: Scales | None,
    ready: QuantizedTensor | None,
    branch: Branch | None = None,
) -> _Inside:
    """Norm, fc1 and activation."""
    x, gamma, beta, w1, b1 = given
    fc1 = spec.fc1
    first, second = Site(fc1, scales, FC1), Site(spec.fc2, scales, FC2)
    us = weight_operand(rt, w1, first, ready)
    normed, ns, mean, rstd = normalize(rt, x, gamma, beta, spec.norm, first, spec.return_norm, branch)
    h = rt.empty((ns.rows.shape[0], w1.shape[0]), fc1.dtype)
    multiply(rt, "fprop", ns.rows, us.rows, h, fc1, vector=b1)
    y, activated = _activate(rt, h, spec, second)
    return _Inside(normed, ns, mean, rstd, us, h, y, activated)


def _saved(
    spec: MLPSpec, inside: _Inside, given: tuple[Tensor, Tensor, Value, Value], vs: Uses, rng: Tensor | None
) -> MLPSaved:
    fc1, fc2 = spec.fc1, spec.fc2
    x, gamma, w1, w2 = given
    through = fc1.needs.input
    kept_n = kept(inside.n.rows if inside.normed is None else inside.normed, inside.n, fc1.precision)
    kept_a = kept(inside.a.rows if inside.y is None else inside.y, inside.a, fc2.precision)
    return MLPSaved(
        x if through else None,
        gamma if through else None,
        inside.mean if through else None,
        inside.rstd if through else None,
        saved(kept_n, fc1.needs.weight),
        inside.h if fc2.needs.input else None,
        saved(kept_a, fc2.needs.weight),
        w1,
        w2,
        _saved_weight(w1, inside.w1, fc1),
        _saved_weight(w2, vs, fc2),
        rng,
        None,
    )


def _computed_again(
    rt: Runtime, kept: MLPSaved, spec: MLPSpec, scales: Scales | None, ready: Sequence[QuantizedTensor | None]
) -> MLPSaved:
    """What forward would have saved without `checkpoint`. Nothing is recorded: the maxima were taken before."""
    assert kept.x is not None and kept.gamma is not None and kept.w1 is not None and kept.w2 is not None
    if scales is not None:
        scales = Scales(kept.scale, None, scales.backward_scale, scales.backward_amax, None, scales.backward_nonfinite)
    inside = _inside(rt, (kept.x, kept.gamma, kept.beta, kept.w1, kept.b1), spec, scales, ready[0])
    vs = weight_operand(rt, kept.w2, Site(spec.fc2, scales, FC2), ready[1])
    found = _saved(spec, inside, (kept.x, kept.gamma, kept.w1, kept.w2), vs, kept.rng)
    # Views of their own: backward lets go of them, and what is behind them may be a cache's.
    w1q, w2q = (None if t is None else t.reshape(*t.shape) for t in (found.w1q, found.w2q))
    return found._replace(w1q=w1q, w2q=w2q, branch_rng=kept.branch_rng)


def _saved_weight(w: Value, uses: Uses, spec: LinearSpec) -> Tensor | None:
    value = kept(w, uses, spec.precision)
    itself = isinstance(value, QuantizedTensor) and value.owner is not None
    return None if itself else saved(value, spec.needs.input)


def _activate(rt: Runtime, h: Tensor, spec: MLPSpec, site: Site) -> tuple[Tensor | None, Uses]:
    """(plain activation output if it is needed as such, fc2's operand)."""
    p, needs = site.spec.precision, site.spec.needs
    rule = None if p is None else p.input
    columnwise = needs.weight and (p is None or p.backward is None)
    keep = p is not None and p.backward == "high_precision"
    cast = None
    if rule is not None and is_plain_rule(rule):
        cast = forward_cast(rule, site.scales, FC2, INPUT, rowwise=True, columnwise=columnwise)
    y, q = ops.activation_forward(rt, h, spec.activation, clamp=spec.clamp, cast=cast, keep=keep)
    if q is not None:
        return y, Uses(q, q, cast)
    assert y is not None
    return y, quantize_forward(rt, y, rule, site[1:], INPUT, rowwise=True, columnwise=columnwise)


@explained
def backward(
    rt: Runtime,
    dy: Value,
    second: Tensor | None,
    third: Tensor | None,
    saved: MLPSaved,
    *,
    spec: MLPSpec,
    scales: Scales | None = None,
    sinks: Sequence[Sink | None] = (None, None),
    release: bool = False,
    ready: Sequence[QuantizedTensor | None] = (None, None),
) -> tuple[Tensor | None, ...]:
    """(dx, dgamma, dbeta, dw1, db1, dw2, db2, None, dresidual, dbranch_bias); `second` and `third` are the gradients
    of the outputs beside y, in their order.

    With `release` nobody will read `saved` again: its tensors are let go of as soon as they were read.
    """
    fc1, fc2 = spec.fc1, spec.fc2
    dnorm, dstream = returned_gradients(second, third, spec.return_norm, spec.stream)
    if spec.checkpoint:
        saved, release = _computed_again(rt, saved, spec, scales, ready), True
    w1, w2 = saved.w1, saved.w2
    assert w1 is not None and w2 is not None
    dy2: Value = dy.matrix() if isinstance(dy, Tensor) else dy
    m, f = dy2.shape[0], w2.shape[1]
    db2 = rt.empty((w2.shape[0],), bias_dtype(fc2, w2)) if fc2.needs.bias else None
    g, db2_left = gradient_operand(rt, dy2, Site(fc2, scales, FC2), db2, saved.rng, sinks[1])
    dw2 = dw1 = db1 = dx = dgamma = dbeta = dresidual = dbranch_bias = None
    dh = Uses(None, None, None)
    first = release and fc2.needs.weight and _frees_more(saved.a, w2.shape, bias_dtype(fc2, w2), sinks[1])
    if first:
        dw2 = _fc2_weight_gradient(rt, g.columns, saved, m, fc2, db2_left, sinks[1], release)
    if fc2.needs.input:
        da = [rt.empty((m, f), fc2.dtype)]
        multiply(rt, "dgrad", g.rows, backward_weight(rt, saved.w2q, w2, fc2), da[0], fc2)
        drop_rows(g)
        db1 = rt.empty((w1.shape[0],), bias_dtype(fc1, w1)) if fc1.needs.bias else None
        dh = _activation_gradient(rt, da, saved, spec, scales, db1)
        if release:
            _let_go(saved.h, None if saved.w2q is w2 else saved.w2q)  # a plain weight is the caller's
    if fc2.needs.weight and not first:
        dw2 = _fc2_weight_gradient(rt, g.columns, saved, m, fc2, db2_left, sinks[1], release)
    del g
    if fc1.needs.input:
        dn = rt.empty((m, w1.shape[1]), fc1.dtype)
        multiply(rt, "dgrad", dh.rows, backward_weight(rt, saved.w1q, w1, fc1), dn, fc1)
        drop_rows(dh)
        if dnorm is not None:
            dn = ops.add(rt, dn, dnorm.matrix(), out=dn)
        dx, dgamma, dbeta = norm_gradients(rt, dn, saved, spec.norm, dstream)
        del dn
        dx, dresidual, dbranch_bias = left(rt, dx, spec.stream, saved.branch_rng)
    if fc1.needs.weight:
        rule = None if fc1.precision is None else fc1.precision.input
        n = restored(rt, saved.n, (m, w1.shape[1]), rule, fc1.precision, fc1.dtype)
        dw1 = weight_gradient(rt, dh.columns, n, w1.shape, fc1, None, sinks[0], bias_dtype(fc1, w1))  # type: ignore[arg-type]
    return dx, dgamma, dbeta, dw1, db1, dw2, db2, None, dresidual, dbranch_bias


def _fc2_weight_gradient(
    rt: Runtime,
    dy: Value,
    saved: MLPSaved,
    rows: int,
    fc2: LinearSpec,
    db2: Tensor | None,
    sink: Sink | None,
    release: bool,
) -> Tensor | None:
    assert saved.w2 is not None
    shape, rule = saved.w2.shape, None if fc2.precision is None else fc2.precision.input
    a = restored(rt, saved.a, (rows, shape[1]), rule, fc2.precision, fc2.dtype)
    found = weight_gradient(rt, dy, a, shape, fc2, db2, sink, bias_dtype(fc2, saved.w2))  # type: ignore[arg-type]
    if release and (sink is None or sink.queue is None):
        _let_go(saved.a)
    return found


def _frees_more(a: Tensor | None, w2: tuple[int, ...], dtype: DType, sink: Sink | None) -> bool:
    """Whether fc2's weight gradient is smaller than what is let go of after it, so that it should come first: memory
    peaks at the activation's gradient."""
    made = dtype.nbytes(prod(w2)) if sink is None or sink.main is None else 0
    return a is not None and a.nbytes > made and (sink is None or sink.queue is None)


def _let_go(*tensors: Tensor | None) -> None:
    """Drop the owners of tensors that were read for the last time; activations between fc1 and fc2 are the largest."""
    for t in tensors:
        if t is not None:
            t.owner = None


def _activation_gradient(
    rt: Runtime, da: list[Tensor], saved: MLPSaved, spec: MLPSpec, scales: Scales | None, db1: Tensor | None
) -> Uses:
    """dh as fc1's dgrad and wgrad read it; its column sums are b1's gradient, taken in the same pass.

    `da` comes in a list, from which it is taken: where dh is quantized by a launch of its own, da is freed before.
    """
    p, needs = spec.fc1.precision, spec.fc1.needs
    assert saved.h is not None
    rule = None
    if p is not None and p.backward is None and (needs.input or needs.weight):
        rule = p.grad
    if rule is None or rule.scaling in ("delayed", "current"):
        cast = None
        if rule is not None:
            cast = backward_cast(rule, scales, FC1, rowwise=needs.input, columnwise=needs.weight)
        dh, q = ops.activation_backward(
            rt, da.pop(), saved.h, spec.activation, clamp=spec.clamp, cast=cast, column_sum=db1
        )
        operand = q if q is not None else dh
        return Uses(operand, operand, cast)
    dh, _ = ops.activation_backward(rt, da.pop(), saved.h, spec.activation, clamp=spec.clamp)
    assert dh is not None
    return quantize_gradient(
        rt, dh, rule, (scales, FC1), rowwise=needs.input, columnwise=needs.weight, column_sum=db1, rng=saved.rng
    )
