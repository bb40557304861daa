"""norm + linear: y = norm(x) w^T + b, the norm delivering its output already quantized.

Shapes: x [.., K], gamma and beta [K], w [N, K], b [N], y [.., N]. In a residual stream (te_core/layers/residual.py)
also residual [.., K] and the bias [K] of the branch that x is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from te_core.arguments import explained
from te_core.layers.inspector import Inspector
from te_core.layers.linear import LinearSpec, Made, Product, Sink, gradient_operand, weight_operand
from te_core.layers.norm import NormSpec
from te_core.layers.residual import Stream, entered, left, returned_gradients
from te_core.ops import raw as ops
from te_core.ops.norm import Branch
from te_core.quantize.operands import Uses, Value, is_plain_rule, quantize_forward
from te_core.quantize.state import INPUT, Scales, forward_cast
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


#: x, gamma, mean and rstd, where a gradient goes through the norm.
NormKept = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def normalize(
    rt: Runtime,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    norm: NormSpec,
    product: Product,
    keep: bool,
    branch: Branch | None = None,
) -> tuple[Tensor | None, Made, Tensor | None, Tensor]:
    """(plain norm output if asked for or unquantized, the product's operand, mean, rstd)."""
    spec = product.spec
    precision = spec.precision
    rule = None if precision is None else precision.input
    columnwise = spec.needs.weight and (precision is None or precision.backward is None)
    keep = keep or spec.inspect is not None or (precision is not None and precision.backward == "high_precision")
    cast = None
    if rule is not None and is_plain_rule(rule):
        cast = forward_cast(rule, product.scales, product.gemm, INPUT, rowwise=True, columnwise=columnwise)
    y, q, mean, rstd = ops.norm_forward(
        rt,
        x.matrix(),
        gamma,
        beta,
        kind=norm.kind,
        eps=norm.eps,
        zero_centered=norm.zero_centered,
        out_dtype=norm.dtype,
        cast=cast,
        keep=keep,
        sm_margin=norm.forward_margin,
        branch=branch,
    )
    if q is not None:
        return y, (q if y is None else y, Uses(q, q, cast)), mean, rstd
    assert y is not None
    uses = quantize_forward(rt, y, rule, product[1:3], INPUT, rowwise=True, columnwise=columnwise)
    return y, (y, uses), mean, rstd


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
) -> tuple[tuple[Value, ...], NormLinearSaved]:
    """((y,), saved); with `return_norm` the norm's output comes next, with `stream` what the norm read comes last."""
    linear = spec.linear
    product = Product(linear, scales, 0, inspectors[0])
    ws = weight, weight_operand(rt, weight, product, ready[0])
    total, branch = entered(rt, x, spec.stream, residual, branch_bias, branch_rng)
    normed, ns, mean, rstd = normalize(rt, x, gamma, beta, spec.norm, product, spec.return_norm, branch)
    n, w = product.keep(rt, ns, ws)
    out = rt.empty((*x.shape[:-1], weight.shape[0]), linear.dtype)
    outputs: tuple[Value, ...] = (product.delivered(rt, product.fprop(rt, ns, ws, out, bias)),)
    if spec.return_norm:
        assert normed is not None
        outputs = (*outputs, normed.reshape(*x.shape))
    if spec.stream is not None:
        outputs = (*outputs, total)
    used = any(linear.needs)
    norm: NormKept = (total, gamma, mean, rstd) if linear.needs.input else (None, None, None, None)
    return outputs, NormLinearSaved(
        *norm, n, weight if used else None, w, rng if used else None, branch_rng if linear.needs.input else None
    )


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
) -> tuple[Value | None, ...]:
    """(dx, dgamma, dbeta, dweight, dbias, None, dresidual, dbranch_bias); `second` and `third` are the gradients of
    the outputs beside y, in their order."""
    linear, weight = spec.linear, saved.weight
    dnorm, dstream = returned_gradients(second, third, spec.return_norm, spec.stream)
    assert weight is not None
    product = Product(linear, scales, 0, inspectors[0], sinks[0])
    dy2: Value = dy.matrix() if isinstance(dy, Tensor) else dy
    rows = dy2.shape[0]
    db = product.bias_gradient(rt, weight)
    g, db_left = gradient_operand(rt, dy2, product, db, saved.rng)
    dx: Value | None = None
    dgamma = dbeta = dw = dresidual = dbranch_bias = None
    if linear.needs.input:
        dn = product.dgrad(rt, (dy2, g), weight, saved.w, rt.empty((rows, weight.shape[1]), linear.dtype))
        if dnorm is not None:
            dn = ops.add(rt, dn, dnorm.matrix(), out=dn)
        total, dgamma, dbeta = norm_gradients(rt, dn, saved[:4], spec.norm, dstream)
        del dn
        plain_dx, dresidual, dbranch_bias = left(rt, total, spec.stream, saved.branch_rng)
        dx = None if plain_dx is None else product.delivered_gradient(rt, plain_dx)
    if linear.needs.weight:
        dw = product.wgrad(rt, (dy2, g), product.restored(rt, saved.n, rows, weight), weight, db_left)
    return dx, dgamma, dbeta, dw, db, None, dresidual, dbranch_bias


def norm_gradients(
    rt: Runtime, dn: Tensor, kept: NormKept, norm: NormSpec, dstream: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dgamma, dbeta) from the gradients of the norm's output and of its input round the norm."""
    x, gamma, mean, rstd = kept
    assert x is not None and gamma is not None and rstd is not None
    dx = rt.empty(x.shape, x.dtype)
    _, dgamma, dbeta = ops.norm_backward(
        rt,
        dn,
        x.matrix(),
        gamma,
        mean,
        rstd,
        kind=norm.kind,
        zero_centered=norm.zero_centered,
        sm_margin=norm.backward_margin,
        add=None if dstream is None else dstream.matrix(),
        out=dx.matrix(),
    )
    return dx, dgamma, dbeta
