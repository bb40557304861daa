"""Activations forward and backward, over blocks of rows in float32.

gelu (tanh form), qgelu and silu are all x * sigmoid(z(x)), with z = 2 * 0.79788 (x + 0.044715 x^3), 1.702 x
and x: 0.5 (1 + tanh(u)) = sigmoid(2 u), and the right-hand side keeps its relative accuracy for negative x,
where the left one cancels. So one function covers the three (and clamped_swiglu, with z = alpha x), and one the
derivative s + x s (1 - s) z'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from te_core.backends.cpu import codec
from te_core.backends.cpu.executor import F32, Executor, row_blocks, scratch
from te_core.backends.cpu.matrix import store_column_sum
from te_core.backends.cpu.quantize import deliver
from te_core.runtime import Runtime

if TYPE_CHECKING:
    from te_core.ops.activation import ActivationOperands, ActivationSpec

Array = np.ndarray[Any, Any]

#: z(x) = linear * x + cubic * x^3
_SIGMOID_OF = {"gelu": (2 * 0.7978845608, 2 * 0.7978845608 * 0.044715), "qgelu": (1.702, 0.0), "silu": (1.0, 0.0)}
# gelu' is exactly 0 or 1 in float32 well before this, and x^2 does not overflow up to here.
_FLAT = 1e4


@np.errstate(all="ignore")
def activation_forward(rt: Runtime, spec: ActivationSpec, operands: ActivationOperands) -> None:
    """y = act(x), or act(a) * b for x = (a | b); then the cast."""
    x, _, y, cast, q, _ = operands
    ex, source = scratch(rt), x.numpy()
    gated, plain = spec.gated, spec.plain
    limit, alpha, offset = spec.clamp
    m, n = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    result = y.numpy() if y is not None else np.empty((m, n), x.dtype.numpy)
    for block in row_blocks(m, n):
        rows = block.stop - block.start
        value = codec.decode(ex, source[block, :n], ex.floats("act x", rows, n))
        if plain == "clamped":
            np.minimum(value, np.float32(limit), out=value)
        forward(ex, plain, value, value, alpha)
        if gated:
            gate = codec.decode(ex, source[block, n:], ex.floats("act gate", rows, n))
            if plain == "clamped":
                np.add(_between(gate, limit), np.float32(offset), out=gate)
            np.multiply(value, gate, out=value)
        codec.encode(ex, value, result[block])
    if cast is not None and q is not None:
        deliver(ex, result, cast, q)


@np.errstate(all="ignore")
def activation_backward(rt: Runtime, spec: ActivationSpec, operands: ActivationOperands) -> None:
    """dx = dy * act'(x), or (dy * b * act'(a) | dy * act(a)); then its column sums and the cast."""
    x, dy, dx, cast, q, column_sum = operands
    assert dy is not None
    ex, source, gradient = scratch(rt), x.numpy(), dy.numpy()
    gated, plain = spec.gated, spec.plain
    limit, alpha, offset = spec.clamp
    m, n = dy.shape
    result = dx.numpy() if dx is not None else np.empty(x.shape, x.dtype.numpy)
    for block in row_blocks(m, n):
        rows = block.stop - block.start
        value = codec.decode(ex, source[block, :n], ex.floats("act x", rows, n))
        grad = codec.decode(ex, gradient[block], ex.floats("act dy", rows, n))
        gate = codec.decode(ex, source[block, n:], ex.floats("act gate", rows, n)) if gated else value
        beyond = gate_beyond = None
        if plain == "clamped":
            beyond, gate_beyond = value > np.float32(limit), np.abs(gate) > np.float32(limit)
            np.minimum(value, np.float32(limit), out=value)
            np.add(_between(gate, limit), np.float32(offset), out=gate)
        slope = derivative(ex, plain, value, ex.floats("act slope", rows, n), alpha)
        if beyond is not None:
            slope[beyond] = 0
        if gated:
            np.multiply(slope, gate, out=slope)
            forward(ex, plain, value, value, alpha)
            np.multiply(value, grad, out=value)
            if gate_beyond is not None:
                value[gate_beyond] = 0
            codec.encode(ex, value, result[block, n:])
        np.multiply(slope, grad, out=slope)
        codec.encode(ex, slope, result[block, :n])
    if column_sum is not None:
        store_column_sum(ex, result, column_sum)
    if cast is not None and q is not None:
        deliver(ex, result, cast, q)


def _between(gate: F32, limit: float) -> F32:
    return np.clip(gate, np.float32(-limit), np.float32(limit), out=gate)


def forward(ex: Executor, kind: str, x: F32, out: F32, alpha: float = 1.0) -> F32:
    """out = act(x) for a plain activation; out may be x. `alpha` is that of "clamped"."""
    if kind in ("relu", "srelu"):
        np.maximum(x, 0, out=out)
        return np.multiply(out, out, out=out) if kind == "srelu" else out
    if kind == "sigmoid":
        np.copyto(out, _sigmoid(ex, (1.0, 0.0), x))
        return out
    return np.multiply(x, _sigmoid(ex, _SIGMOID_OF.get(kind, (alpha, 0.0)), x), out=out)


def derivative(ex: Executor, kind: str, x: F32, out: F32, alpha: float = 1.0) -> F32:
    """out = act'(x) for a plain activation; out may be x."""
    if kind == "relu":
        return np.greater(x, 0, out=out)
    if kind == "srelu":
        np.maximum(x, 0, out=out)
        return np.add(out, out, out=out)
    if kind == "sigmoid":  # s(x) s(-x): 1 - s would cancel for large x
        opposite = np.multiply(_sigmoid(ex, (-1.0, 0.0), x), 1, out=ex.floats("act inner", *x.shape))
        return np.multiply(_sigmoid(ex, (1.0, 0.0), x), opposite, out=out)
    linear, cubic = _SIGMOID_OF.get(kind, (alpha, 0.0))
    s = _sigmoid(ex, (linear, cubic), x)
    # s + [x (1 - s) z'] s, from the inside out
    inner = np.subtract(1, s, out=ex.floats("act inner", *x.shape))
    if cubic:
        near = np.clip(x, -_FLAT, _FLAT, out=out)
        np.multiply(inner, near, out=inner)
        np.multiply(near, near, out=near)
        np.multiply(near, np.float32(3 * cubic), out=near)
        np.add(near, np.float32(linear), out=near)
        np.multiply(inner, near, out=inner)
    else:
        np.multiply(inner, x, out=inner)
        np.multiply(inner, np.float32(linear), out=inner)
    np.multiply(inner, s, out=inner)
    return np.add(inner, s, out=out)


def _sigmoid(ex: Executor, coefficients: tuple[float, float], x: F32) -> F32:
    """sigmoid(z(x)) in scratch memory."""
    linear, cubic = coefficients
    z = ex.floats("act sigmoid", *x.shape)
    if cubic:
        np.multiply(x, x, out=z)
        np.multiply(z, np.float32(-cubic), out=z)
        np.add(z, np.float32(-linear), out=z)
        np.multiply(z, x, out=z)
    else:
        np.multiply(x, np.float32(-linear), out=z)
    np.exp(z, out=z)
    np.add(z, 1, out=z)
    return np.divide(1, z, out=z)
