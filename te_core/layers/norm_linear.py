"""norm + linear: y = norm(x) w^T + b, the norm delivering its output already quantized.

Shapes: x [.., K], gamma and beta [K], w [N, K], b [N], y [.., N]. In a residual stream (te_core/layers/residual.py)
also residual [.., K] and the bias [K] of the branch that x is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from te_core.arguments import explained
from te_core.layers.inspector import Inspector, alike, offer, offer_result
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
from te_core.layers.residual import Stream, entered, left, returned_gradients
from te_core.ops import raw as ops
from te_core.ops.norm import Branch
from te_core.quantize.operands import Uses, Value, dense, is_plain_rule, quantize_forward, restored, saved
from te_core.quantize.state import GRAD_INPUT, INPUT, OUTPUT, Scales, backward_cast, forward_cast
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.layers.mlp import MLPSaved


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


def normalize(
    rt: Runtime,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    norm: NormSpec,
    site: Site,
    keep: bool,
    branch: Branch | None = None,
) -> tuple[Tensor | None, Uses, Tensor | None, Tensor]:
    """(plain norm output if asked for or unquantized, the first GEMM's operand, mean, rstd)."""
    precision = site.spec.precision
    rule = None if precision is None else precision.input
    columnwise = site.spec.needs.weight and (precision is None or precision.backward is None)
    keep = keep or (precision is not None and precision.backward == "high_precision")
    cast = None
    if rule is not None and is_plain_rule(rule):
        cast = forward_cast(rule, site.scales, site.gemm, INPUT, rowwise=True, columnwise=columnwise)
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
        return y, Uses(q, q, cast), mean, rstd
    assert y is not None
    return y, quantize_forward(rt, y, rule, site[1:], INPUT, rowwise=True, columnwise=columnwise), mean, rstd


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
    inspector: Inspector | None = None,
    ready: Sequence[QuantizedTensor | None] = (None,),
) -> tuple[tuple[Value, ...], NormLinearSaved]:
    """((y,), saved); with `return_norm` the norm's output comes next, with `stream` what the norm read comes last."""
    linear = spec.linear
    needs, precision, inspect = linear.needs, linear.precision, linear.inspect
    site = Site(linear, scales)
    ws = weight_operand(rt, weight, site, ready[0])
    total, branch = entered(rt, x, spec.stream, residual, branch_bias, branch_rng)
    keep = spec.return_norm or inspect is not None
    normed, ns, mean, rstd = normalize(rt, x, gamma, beta, spec.norm, site, keep, branch)
    a, b = ns.rows, ws.rows
    kept_n, kept_w = kept(ns.rows if normed is None else normed, ns, precision), kept(weight, ws, precision)
    if inspect is not None:
        assert normed is not None
        high_w = dense(rt, weight, linear.dtype)
        kept_n = offer(rt, inspector, ("wgrad", "activation"), normed, ns.cast, kept_n)
        kept_w = offer(rt, inspector, ("dgrad", "weight"), high_w, ws.cast, kept_w)
        a = offer(rt, inspector, ("fprop", "activation"), normed, ns.cast, a)
        b = offer(rt, inspector, ("fprop", "weight"), high_w, ws.cast, b)
        a, b = alike(rt, a, b, linear.dtype)
    out = rt.empty((*x.shape[:-1], weight.shape[0]), linear.dtype)
    multiply(rt, "fprop", a, b, out.matrix(), linear, vector=bias)
    if inspect is not None:
        out = offer_result(rt, inspector, ("fprop", "output"), out)
    y: Value = out
    if linear.quantize_output and precision is not None and precision.output is not None:
        y = ops.quantize(
            rt, out.matrix(), forward_cast(precision.output, scales, 0, OUTPUT, rowwise=True, columnwise=False)
        )
    outputs: tuple[Value, ...] = (y,)
    if spec.return_norm:
        assert normed is not None
        outputs = (y, normed.reshape(*x.shape))
    if spec.stream is not None:
        outputs = (*outputs, total)
    through = needs.input
    return outputs, NormLinearSaved(
        total if through else None,
        gamma if through else None,
        mean if through else None,
        rstd if through else None,
        saved(kept_n, needs.weight),
        weight if any(needs) else None,
        None if isinstance(kept_w, QuantizedTensor) and kept_w.owner is not None else saved(kept_w, needs.input),
        rng if any(needs) else None,
        branch_rng if through else None,
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
    inspector: Inspector | None = None,
    sinks: Sequence[Sink | None] = (None,),
) -> tuple[Value | None, ...]:
    """(dx, dgamma, dbeta, dweight, dbias, None, dresidual, dbranch_bias); `second` and `third` are the gradients of
    the outputs beside y, in their order."""
    linear, weight = spec.linear, saved.weight
    dnorm, dstream = returned_gradients(second, third, spec.return_norm, spec.stream)
    assert weight is not None
    needs, precision, inspect = linear.needs, linear.precision, linear.inspect
    n, k = weight.shape
    dy2: Value = dy.matrix() if isinstance(dy, Tensor) else dy
    db = rt.empty((n,), bias_dtype(linear, weight)) if needs.bias else None
    g, db_left = gradient_operand(rt, dy2, Site(linear, scales), db, saved.rng, sinks[0])
    dx: Value | None = None
    dgamma = dbeta = dw = dresidual = dbranch_bias = None
    if needs.input:
        a, b = g.rows, backward_weight(rt, saved.w, weight, linear)
        if inspect is not None:
            a = offer(rt, inspector, ("dgrad", "gradient"), dense(rt, dy2, linear.dtype), g.cast, a)
            a, b = alike(rt, a, b, linear.dtype)
        dn = rt.empty((dy2.shape[0], k), linear.dtype)
        multiply(rt, "dgrad", a, b, dn, linear)
        if inspect is not None:
            dn = offer_result(rt, inspector, ("dgrad", "dgrad"), dn)
        if dnorm is not None:
            dn = ops.add(rt, dn, dnorm.matrix(), out=dn)
        drop_rows(g)
        del a, b
        plain_dx, dgamma, dbeta = norm_gradients(rt, dn, saved, spec.norm, dstream)
        del dn
        dx, dresidual, dbranch_bias = left(rt, plain_dx, spec.stream, saved.branch_rng)
        if linear.quantize_grad and precision is not None and precision.grad_input is not None:
            quantized = backward_cast(precision.grad_input, scales, 0, rowwise=True, columnwise=False, slot=GRAD_INPUT)
            dx = ops.quantize(rt, plain_dx.matrix(), quantized)
    if needs.weight:
        rule = None if precision is None else precision.input
        a, b = g.columns, restored(rt, saved.n, (dy2.shape[0], k), rule, precision, linear.dtype)
        if inspect is not None:
            a = offer(rt, inspector, ("wgrad", "gradient"), dense(rt, dy2, linear.dtype), g.cast, a)
            a, b = alike(rt, a, b, linear.dtype)
        dw = weight_gradient(rt, a, b, (n, k), linear, db_left, sinks[0], bias_dtype(linear, weight))
        if dw is not None and inspect is not None:
            dw = offer_result(rt, inspector, ("wgrad", "wgrad"), dw)
    return dx, dgamma, dbeta, dw, db, None, dresidual, dbranch_bias


def norm_gradients(
    rt: Runtime, dn: Tensor, saved: NormLinearSaved | MLPSaved, norm: NormSpec, dstream: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dgamma, dbeta) from the gradients of the norm's output and of its input round the norm."""
    assert saved.x is not None and saved.gamma is not None and saved.rstd is not None
    dx = rt.empty(saved.x.shape, saved.x.dtype)
    _, dgamma, dbeta = ops.norm_backward(
        rt,
        dn,
        saved.x.matrix(),
        saved.gamma,
        saved.mean,
        saved.rstd,
        kind=norm.kind,
        zero_centered=norm.zero_centered,
        sm_margin=norm.backward_margin,
        add=None if dstream is None else dstream.matrix(),
        out=dx.matrix(),
    )
    return dx, dgamma, dbeta
