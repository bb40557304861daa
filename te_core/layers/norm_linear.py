"""norm + linear: y = norm(x) w^T + b, the norm delivering its output already quantized.

Shapes: x [.., K], gamma and beta [K], w [N, K], b [N], y [.., N].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from te_core import ops
from te_core.layers.inspector import Inspector, Operand, alike, offer, offer_result
from te_core.layers.linear import (
    LinearSpec,
    dgrad,
    fprop,
    prepare_gradient,
    restored,
    saved_operand,
    wgrad,
)
from te_core.layers.norm import NormSpec
from te_core.quantize.state import INPUT, WEIGHT, Scales, forward_cast
from te_core.quantized import Cast
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.layers.mlp import MLPSaved


@dataclass(frozen=True, slots=True)
class NormLinearSpec:
    """A norm, a linear, and whether the norm's output is an output too."""

    norm: NormSpec
    linear: LinearSpec  # needs.input: a gradient of x, gamma or beta is wanted
    return_norm: bool = False


class NormLinearSaved(NamedTuple):
    """What backward reads; `n` is the norm's output as wgrad reads it."""

    x: Tensor | None  # None, as the next three, where no gradient goes through the norm
    gamma: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    n: Tensor | None
    weight: Tensor | None
    w: Tensor | None


def normalize(
    rt: Runtime, x: Tensor, gamma: Tensor, beta: Tensor | None, norm: NormSpec, cast: Cast | None, keep: bool
) -> tuple[Tensor | None, Operand, Tensor | None, Tensor]:
    """(plain norm output if asked for or unquantized, the GEMM's operand, mean, rstd)."""
    y, q, mean, rstd = ops.norm_forward(
        rt, x.matrix(), gamma, beta, kind=norm.kind, eps=norm.eps, zero_centered=norm.zero_centered,
        out_dtype=norm.dtype, cast=cast, keep=keep, sm_margin=norm.forward_margin,
    )  # fmt: skip
    operand = q if q is not None else y
    assert operand is not None
    return y, operand, mean, rstd


def forward(
    rt: Runtime,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    spec: NormLinearSpec,
    scales: Scales | None = None,
    inspector: Inspector | None = None,
) -> tuple[tuple[Tensor, ...], NormLinearSaved]:
    """((y,), saved), or ((y, norm output), saved) with `return_norm`."""
    linear = spec.linear
    needs, precision, inspect = linear.needs, linear.precision, linear.inspect
    nc = wc = None
    b: Operand = weight
    if precision is not None:
        nc = forward_cast(precision.input, scales, 0, INPUT, rowwise=True, columnwise=needs.weight)
        wc = forward_cast(precision.weight, scales, 0, WEIGHT, rowwise=True, columnwise=needs.input)
        b = ops.quantize(rt, weight, wc)
    normed, a, mean, rstd = normalize(
        rt, x, gamma, beta, spec.norm, nc, spec.return_norm or inspect is not None
    )
    kept_n, kept_w = a, b
    if inspect is not None:
        assert normed is not None
        kept_n = offer(rt, inspector, ("wgrad", "activation"), normed, nc, a)
        kept_w = offer(rt, inspector, ("dgrad", "weight"), weight, wc, b)
        a = offer(rt, inspector, ("fprop", "activation"), normed, nc, a)
        b = offer(rt, inspector, ("fprop", "weight"), weight, wc, b)
        a, b = alike(rt, a, b, linear.dtype)
    out = rt.empty((*x.shape[:-1], weight.shape[0]), linear.dtype)
    fprop(rt, a, b, bias, out, precision)
    if inspect is not None:
        out = offer_result(rt, inspector, ("fprop", "output"), out)
    outputs: tuple[Tensor, ...] = (out,)
    if spec.return_norm:
        assert normed is not None
        outputs = (out, normed.reshape(*x.shape))
    through = needs.input
    return outputs, NormLinearSaved(
        x if through else None, gamma if through else None, mean if through else None, rstd if through else None,
        saved_operand(kept_n, needs.weight), weight if any(needs) else None,
        saved_operand(kept_w, needs.input),
    )  # fmt: skip


def backward(
    rt: Runtime,
    dy: Tensor,
    dnorm: Tensor | None,
    saved: NormLinearSaved,
    *,
    spec: NormLinearSpec,
    scales: Scales | None = None,
    inspector: Inspector | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dgamma, dbeta, dweight, dbias); `dnorm` is the gradient of the returned norm output, if there is one."""
    linear, weight = spec.linear, saved.weight
    assert weight is not None
    needs, precision, inspect = linear.needs, linear.precision, linear.inspect
    k = weight.shape[1]
    dy2 = dy.matrix()
    db = rt.empty((weight.shape[0],), weight.dtype) if needs.bias else None
    g, cast, db_left = prepare_gradient(rt, dy2, precision, scales, 0, needs, db)
    dx = dgamma = dbeta = dw = None
    if needs.input:
        a, b = g, restored(saved.w, (weight.shape[0], k), precision)
        if inspect is not None:
            a = offer(rt, inspector, ("dgrad", "gradient"), dy2, cast, g)
            a, b = alike(rt, a, b, linear.dtype)
        dn = rt.empty((dy2.shape[0], k), linear.dtype)
        dgrad(rt, a, b, dn, precision)
        if inspect is not None:
            dn = offer_result(rt, inspector, ("dgrad", "dgrad"), dn)
        if dnorm is not None:
            dn = ops.add(rt, dn, dnorm.matrix(), out=dn)
        dx, dgamma, dbeta = norm_gradients(rt, dn, saved, spec.norm)
    if needs.weight:
        a, b = g, restored(saved.n, (dy2.shape[0], k), precision)
        if inspect is not None:
            a = offer(rt, inspector, ("wgrad", "gradient"), dy2, cast, g)
            a, b = alike(rt, a, b, linear.dtype)
        dw = rt.empty(weight.shape, weight.dtype)
        wgrad(rt, a, b, dw, db_left, precision)
        if inspect is not None:
            dw = offer_result(rt, inspector, ("wgrad", "wgrad"), dw)
    return dx, dgamma, dbeta, dw, db


def norm_gradients(
    rt: Runtime, dn: Tensor, saved: NormLinearSaved | MLPSaved, norm: NormSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dx, dgamma, dbeta) from the gradient of the norm's output."""
    assert saved.x is not None and saved.gamma is not None and saved.rstd is not None
    dx, dgamma, dbeta = ops.norm_backward(
        rt, dn, saved.x.matrix(), saved.gamma, saved.mean, saved.rstd, kind=norm.kind,
        zero_centered=norm.zero_centered, sm_margin=norm.backward_margin,
    )  # fmt: skip
    return dx.reshape(*saved.x.shape), dgamma, dbeta

