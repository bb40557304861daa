"""norm + linear: y = norm(x) w^T + b, the norm delivering its output already quantized.

Shapes: x [.., K], gamma and beta [K], w [N, K], b [N], y [.., N]. In a residual stream (te_core/layers/residual.py)
also residual [.., K] and the bias [K] of the branch that x is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_core.arguments import explained
from te_core.layers.communicator import Communicator
from te_core.layers.inspector import Inspector
from te_core.layers.meeting import meet
from te_core.layers.norm import NormKept, NormSpec, norm_gradients, normalized
from te_core.layers.parallel import Spread, scattered
from te_core.layers.product import LinearSpec, Product, Sink, gradient_operand, saved_weight, weight_operand
from te_core.layers.residual import Stream, entered, left, returned, returned_gradients
from te_core.ops import raw as ops
from te_core.quantize.operands import Value
from te_core.quantize.state import Scales
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class NormLinearSpec:
    """A norm, a linear, and what comes out besides: the norm's output, the residual stream."""

    norm: NormSpec
    linear: LinearSpec  # needs.input: a gradient of x, gamma or beta is wanted
    return_norm: bool = False
    stream: Stream | None = None
    again: bool = False  # backward computes the norm's output again, where it has what that takes
    gather_norm: bool = False  # the norm's output that comes out is that of all ranks' rows


class NormLinearSaved(NamedTuple):
    """What backward reads; `n` is the norm's output as wgrad reads it."""

    x: Tensor | None  # None, as the next three, where no gradient goes through the norm
    gamma: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    n: Tensor | None
    weight: Value | None
    w: Tensor | None
    rng: Tensor | None
    branch_rng: Tensor | None
    beta: Tensor | None = None  # this and the next only where n is computed again
    scale: Tensor | None = None  # what forward read


@explained
def forward(
    rt: Runtime,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    weight: Value,
    bias: Tensor | None,
    rng: Tensor | None = None,
    residual: Tensor | None = None,
    branch_bias: Tensor | None = None,
    branch_rng: Tensor | None = None,
    *,
    spec: NormLinearSpec,
    scales: Scales | None = None,
    inspectors: Sequence[Inspector | None] = (None,),
    ready: Sequence[QuantizedTensor | None] = (None,),
    comm: Communicator | None = None,
) -> tuple[tuple[Value, ...], NormLinearSaved]:
    """((y,), saved); with `return_norm` the norm's output comes next, with `stream` what the norm read comes last."""
    linear = spec.linear
    leading, parallel = x.shape[:-1], None
    if comm is not None:
        parallel = Spread(linear, comm, (scales, 0))
        meet(rt, comm, "LayerNormLinear", spec, input=x, weight=weight, bias=bias)
        leading = parallel.leading("fprop", leading)
    product = Product(linear, scales, 0, inspectors[0], None, parallel)
    total, branch = entered(rt, x, spec.stream, residual, branch_bias, branch_rng)
    cast, plain = product.input_cast(x)
    normed, q, mean, rstd = normalized(rt, x, gamma, beta, spec.norm, cast, plain or spec.return_norm, branch)
    ns = product.computed_input(rt, normed, q, cast)
    if parallel is not None:
        parallel.send(rt, ns[1])
    ws = weight, weight_operand(rt, weight, product, ready[0])
    n, w = product.keep(rt, ns, ws)
    out = rt.empty((*leading, product.sides(weight)[0]), linear.dtype)
    y = product.delivered(rt, product.fprop(rt, ns, ws, out, bias))
    used = any(linear.needs)
    norm: NormKept = (total, gamma, mean, rstd) if linear.needs.input else (None, None, None, None)
    kept = NormLinearSaved(
        *norm, n, weight if used else None, w, rng if used else None, branch_rng if linear.needs.input else None
    )
    if spec.again and comes_again(linear):
        kept = kept._replace(n=None, beta=beta, scale=kept_scale(rt, scales))
    return returned(rt, y, normed, total, spec, comm), kept


def comes_again(linear: LinearSpec) -> bool:
    """Whether wgrad's operand can be made again: what the norm read is kept, and nobody looks on."""
    return linear.needs.input and linear.needs.weight and linear.inspect is None


def kept_scale(rt: Runtime, scales: Scales | None) -> Tensor | None:
    """A copy of the scales that this forward reads: they may be updated before backward."""
    if scales is None or scales.forward_scale is None:
        return None
    vector = scales.forward_scale
    return ops.resize(rt, vector.reshape(1, vector.size), 1, vector.size).reshape(vector.size)


def norm_again(
    rt: Runtime, saved: Any, norm: NormSpec, linear: LinearSpec, comm: Communicator | None = None
) -> Tensor | None:
    """The norm's output as wgrad reads it, of the x, gamma, beta and scale that were saved. Nothing is recorded."""
    x, gamma, beta = saved.x, saved.gamma, saved.beta
    assert x is not None and gamma is not None
    scales = None if saved.scale is None else Scales(saved.scale, None, None, None)
    parallel = None if comm is None else Spread(linear, comm, (scales, 0))
    product = Product(linear, scales, 0, None, None, parallel)
    cast, plain = product.input_cast(x)
    normed, q, _, _ = normalized(rt, x, gamma, beta, norm, cast, plain)
    return product.kept_input(product.computed_input(rt, normed, q, cast))


@explained
def backward(
    rt: Runtime,
    dy: Value,
    second: Tensor | None,
    third: Tensor | None,
    saved: NormLinearSaved,
    *,
    spec: NormLinearSpec,
    scales: Scales | None = None,
    inspectors: Sequence[Inspector | None] = (None,),
    sinks: Sequence[Sink | None] = (None,),
    comm: Communicator | None = None,
) -> tuple[Value | None, ...]:
    """(dx, dgamma, dbeta, dweight, dbias, None, dresidual, dbranch_bias); `second` and `third` are the gradients of
    the outputs beside y, in their order."""
    linear, weight = spec.linear, saved_weight(saved.weight)
    dnorm, dstream = returned_gradients(second, third, spec.return_norm, spec.stream)
    parallel = None if comm is None else Spread(linear, comm, (scales, 0))
    product = Product(linear, scales, 0, inspectors[0], sinks[0], parallel)
    dy2: Value = dy.matrix() if isinstance(dy, Tensor) else dy
    rows = dy2.shape[0]
    db = product.bias_gradient(rt, weight)
    if parallel is not None:
        parallel.rng = saved.rng
    g, db_left = gradient_operand(rt, dy2, product, db, saved.rng)
    n = saved.n
    dx: Value | None = None
    dgamma = dbeta = dw = dn = dresidual = dbranch_bias = None
    if parallel is not None and linear.needs.weight:
        if spec.again and comes_again(linear):
            n = norm_again(rt, saved, spec.norm, linear, comm)
        product.begin(rt, g, n, rows, weight)
    if linear.needs.input:
        out = rt.empty((rows, product.sides(weight)[1]), linear.dtype)
        dn = product.dgrad(rt, (dy2, g), weight, saved.w, out)
    if parallel is not None:  # before anybody waits for dgrad's sum
        if linear.needs.weight:
            dw = product.wgrad(rt, (dy2, g), product.restored(rt, n, rows, weight), weight, db_left)
        parallel.settle()
        if spec.gather_norm and dnorm is not None:
            dnorm = scattered(rt, parallel.comm, dnorm)
    if dn is not None:
        total, dgamma, dbeta = norm_gradients(rt, dn, saved[:4], spec.norm, dnorm, dstream)
        del dn
        plain_dx, dbranch_bias, dresidual = left(rt, total, spec.stream, saved.branch_rng)
        dx = None if plain_dx is None else product.delivered_gradient(rt, plain_dx)
    if linear.needs.weight and parallel is None:
        if spec.again and comes_again(linear):
            n = norm_again(rt, saved, spec.norm, linear)
        dw = product.wgrad(rt, (dy2, g), product.restored(rt, n, rows, weight), weight, db_left)
    return dx, dgamma, dbeta, dw, db, None, dresidual, dbranch_bias
