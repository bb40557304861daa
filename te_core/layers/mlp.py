"""norm + MLP: y = act(norm(x) w1^T + b1) w2^T + b2, norm and activation delivering their outputs quantized.

Shapes: x [.., H], gamma and beta [H], w1 [F', H] with F' = F or 2 F (gated), w2 [O, F], y [.., O].
Names: n = norm(x), h = n w1^T + b1, a = act(h); M rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core import ops
from te_core.dtypes import DType
from te_core.layers.inspector import Operand
from te_core.layers.linear import Needs, dgrad, fprop, prepare_gradient, restored, saved_operand, wgrad
from te_core.layers.norm import NormSpec
from te_core.layers.norm_linear import norm_gradients, normalize
from te_core.quantize.state import INPUT, WEIGHT, Scales, backward_cast, forward_cast
from te_core.precision import Precision
from te_core.runtime import Runtime
from te_core.tensor import Tensor

FC1, FC2 = 0, 1  # the GEMMs' numbers in the scaling state


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """All that an MLP's plan depends on besides shapes."""

    dtype: DType
    precision: Precision | None
    norm: NormSpec
    activation: str
    fc1: Needs  # .input: a gradient of x, gamma or beta is wanted
    fc2: Needs  # .input: any gradient at or before fc1 is wanted
    return_norm: bool = False


class MLPSaved(NamedTuple):
    """What backward reads; n and a as their wgrads read them."""

    x: Tensor | None  # None, as the next three, where no gradient goes through the norm
    gamma: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    n: Tensor | None
    h: Tensor | None
    a: Tensor | None
    w1: Tensor | None  # the parameters themselves
    w2: Tensor | None
    w1q: Tensor | None  # and as their dgrads read them
    w2q: Tensor | None


def forward(
    rt: Runtime,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    spec: MLPSpec,
    scales: Scales | None = None,
) -> tuple[tuple[Tensor, ...], MLPSaved]:
    """((y,), saved), or ((y, norm output), saved) with `return_norm`."""
    p, fc1, fc2 = spec.precision, spec.fc1, spec.fc2
    nc = ac = None
    u: Operand = w1
    v: Operand = w2
    if p is not None:
        nc = forward_cast(p.input, scales, FC1, INPUT, rowwise=True, columnwise=fc1.weight)
        ac = forward_cast(p.input, scales, FC2, INPUT, rowwise=True, columnwise=fc2.weight)
        u = ops.quantize(rt, w1, forward_cast(p.weight, scales, FC1, WEIGHT, rowwise=True, columnwise=fc1.input))
        v = ops.quantize(rt, w2, forward_cast(p.weight, scales, FC2, WEIGHT, rowwise=True, columnwise=fc2.input))
    normed, n, mean, rstd = normalize(rt, x, gamma, beta, spec.norm, nc, spec.return_norm)
    h = rt.empty((n.shape[0], w1.shape[0]), spec.dtype)
    fprop(rt, n, u, b1, h, p)
    y, q = ops.activation_forward(rt, h, spec.activation, cast=ac)
    a = q if q is not None else y
    assert a is not None
    out = rt.empty((*x.shape[:-1], w2.shape[0]), spec.dtype)
    fprop(rt, a, v, b2, out, p)
    outputs: tuple[Tensor, ...] = (out,)
    if spec.return_norm:
        assert normed is not None
        outputs = (out, normed.reshape(*x.shape))
    through = fc1.input
    return outputs, MLPSaved(
        x if through else None, gamma if through else None, mean if through else None, rstd if through else None,
        saved_operand(n, fc1.weight), h if fc2.input else None,
        saved_operand(a, fc2.weight), w1, w2, saved_operand(u, fc1.input), saved_operand(v, fc2.input),
    )  # fmt: skip


def backward(
    rt: Runtime,
    dy: Tensor,
    dnorm: Tensor | None,
    saved: MLPSaved,
    *,
    spec: MLPSpec,
    scales: Scales | None = None,
) -> tuple[Tensor | None, ...]:
    """(dx, dgamma, dbeta, dw1, db1, dw2, db2); `dnorm` is the gradient of the returned norm output, if any."""
    p, fc1, fc2 = spec.precision, spec.fc1, spec.fc2
    w1, w2 = saved.w1, saved.w2
    assert w1 is not None and w2 is not None
    dy2 = dy.matrix()
    m, f = dy2.shape[0], w2.shape[1]
    db2 = rt.empty((w2.shape[0],), w2.dtype) if fc2.bias else None
    g, _, db2_left = prepare_gradient(rt, dy2, p, scales, FC2, fc2, db2)
    dw2 = dw1 = db1 = dx = dgamma = dbeta = None
    if fc2.weight:
        dw2 = rt.empty(w2.shape, w2.dtype)
        wgrad(rt, g, restored(saved.a, (m, f), p), dw2, db2_left, p)
    if fc2.input:
        da = rt.empty((m, f), spec.dtype)
        dgrad(rt, g, restored(saved.w2q, (w2.shape[0], f), p), da, p)
        db1 = rt.empty((w1.shape[0],), w1.dtype) if fc1.bias else None
        dh = _activation_gradient(rt, da, saved, spec, scales, db1)
        del da
        if fc1.input:
            dn = rt.empty((m, w1.shape[1]), spec.dtype)
            dgrad(rt, dh, restored(saved.w1q, (w1.shape[0], w1.shape[1]), p), dn, p)
            if dnorm is not None:
                dn = ops.add(rt, dn, dnorm.matrix(), out=dn)
            dx, dgamma, dbeta = norm_gradients(rt, dn, saved, spec.norm)
        if fc1.weight:
            dw1 = rt.empty(w1.shape, w1.dtype)
            wgrad(rt, dh, restored(saved.n, (m, w1.shape[1]), p), dw1, None, p)
    return dx, dgamma, dbeta, dw1, db1, dw2, db2


def _activation_gradient(
    rt: Runtime, da: Tensor, saved: MLPSaved, spec: MLPSpec, scales: Scales | None, db1: Tensor | None
) -> Operand:
    """dh as fc1's dgrad and wgrad read it; its column sums are b1's gradient, taken in the same pass."""
    p, fc1 = spec.precision, spec.fc1
    assert saved.h is not None
    cast = None
    if p is not None and (fc1.input or fc1.weight):
        cast = backward_cast(p.grad, scales, FC1, rowwise=fc1.input, columnwise=fc1.weight)
    dh, q = ops.activation_backward(rt, da, saved.h, spec.activation, cast=cast, column_sum=db1)
    operand = q if q is not None else dh
    assert operand is not None
    return operand

