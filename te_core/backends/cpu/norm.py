"""LayerNorm, RMSNorm and the L2 norm by blocks of rows: float32 values, sums of a row in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from te_core.backends.cpu import codec
from te_core.backends.cpu.elementwise import bias_dropout_add
from te_core.backends.cpu.executor import F32, Executor, row_blocks, scratch
from te_core.backends.cpu.quantize import deliver
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.norm import NormGradients, NormOperands, NormOpSpec


@np.errstate(all="ignore")
def norm_forward(rt: Runtime, spec: NormOpSpec, operands: NormOperands) -> None:
    """y = normalised x * g + beta, with its statistics; then the cast. With a branch, x is its sum."""
    x, gamma, beta, y, cast, q, mean, rstd, eps, branch = operands
    if branch is not None:
        bias_dropout_add(rt, x, branch.bias, branch.residual, branch.sum, branch.p, branch.rng, branch.site)
        x = branch.sum
    ex, source, (m, n) = scratch(rt), x.numpy(), x.shape
    factor, offset = _gain(gamma, spec.zero_centered), None if beta is None else beta.numpy().astype(np.float32)
    result = y.numpy() if y is not None else np.empty((m, n), spec.out.numpy)
    means, rstds = None if mean is None else mean.numpy(), rstd.numpy()
    for block in row_blocks(m, n):
        v = codec.decode(ex, source[block], ex.floats("norm x", block.stop - block.start, n))
        shift = 0.0
        if means is not None:
            exact = v.sum(axis=1, dtype=np.float64) / n
            means[block] = exact
            # The variance is taken about the rounded mean, then put right in float64: no cancellation.
            shift = exact - means[block]
            np.subtract(v, means[block, None], out=v)
        square = np.multiply(v, v, out=ex.floats("norm square", *v.shape))
        variance = square.sum(axis=1, dtype=np.float64) / n - np.square(shift)
        rstds[block] = 1.0 / np.sqrt(variance + eps)
        np.multiply(v, rstds[block, None], out=v)
        np.multiply(v, factor, out=v)
        if offset is not None:
            np.add(v, offset, out=v)
        codec.encode(ex, v, result[block])
    if cast is not None and q is not None:
        deliver(ex, result, cast, q)


@np.errstate(all="ignore")
def norm_backward(rt: Runtime, spec: NormOpSpec, operands: NormGradients) -> None:
    """dx = rstd * (w - mean(w) - xhat * mean(w * xhat)) + add, w = dy * g (RMSNorm: no mean(w)); dgamma, dbeta."""
    dy, x, gamma, mean, rstd, add, dx, dgamma, dbeta = operands
    ex, source, gradient, target, (m, n) = scratch(rt), x.numpy(), dy.numpy(), dx.numpy(), x.shape
    factor = _gain(gamma, spec.zero_centered)
    means, rstds = None if mean is None else mean.numpy(), rstd.numpy()
    gamma_sum, beta_sum = np.zeros(n, np.float64), np.zeros(n, np.float64)
    for block in row_blocks(m, n):
        rows = block.stop - block.start
        xhat = codec.decode(ex, source[block], ex.floats("norm x", rows, n))
        w = codec.decode(ex, gradient[block], ex.floats("norm dy", rows, n))
        product = ex.floats("norm square", rows, n)
        if means is not None:
            np.subtract(xhat, means[block, None], out=xhat)
        np.multiply(xhat, rstds[block, None], out=xhat)
        gamma_sum += np.multiply(w, xhat, out=product).sum(axis=0)
        if dbeta is not None:
            beta_sum += w.sum(axis=0)
        np.multiply(w, factor, out=w)
        np.multiply(w, xhat, out=product)
        along = product.sum(axis=1, dtype=np.float64) / n
        np.multiply(xhat, along.astype(np.float32)[:, None], out=xhat)
        if means is not None:
            np.subtract(w, (w.sum(axis=1, dtype=np.float64) / n).astype(np.float32)[:, None], out=w)
        np.subtract(w, xhat, out=w)
        np.multiply(w, rstds[block, None], out=w)
        if add is not None:
            np.add(w, codec.decode(ex, add.numpy()[block], product), out=w)
        codec.encode(ex, w, target[block])
    _store(ex, gamma_sum, dgamma)
    if dbeta is not None:
        _store(ex, beta_sum, dbeta)


def _gain(gamma: Tensor, zero_centered: bool) -> F32:
    factor = gamma.numpy().astype(np.float32)
    return factor + np.float32(1) if zero_centered else factor


def _store(ex: Executor, sums: np.ndarray[Any, Any], out: Tensor) -> None:
    codec.encode(ex, sums.astype(np.float32), out.numpy())


@np.errstate(all="ignore")
def l2_norm_forward(rt: Runtime, x: Tensor, y: Tensor, eps: float) -> None:
    """y = x / sqrt(sum(x^2) + eps)."""
    ex, source, target, (m, n) = scratch(rt), x.numpy(), y.numpy(), x.shape
    for block in row_blocks(m, n):
        v = codec.decode(ex, source[block], ex.floats("l2 x", block.stop - block.start, n))
        np.multiply(v, _inverse(v, eps), out=v)
        codec.encode(ex, v, target[block])


@np.errstate(all="ignore")
def l2_norm_backward(rt: Runtime, dy: Tensor, x: Tensor, dx: Tensor, eps: float) -> None:
    """dx = r * (dy - x * r^2 * sum(dy * x))."""
    ex, source, gradient, target, (m, n) = scratch(rt), x.numpy(), dy.numpy(), dx.numpy(), x.shape
    for block in row_blocks(m, n):
        rows = block.stop - block.start
        v = codec.decode(ex, source[block], ex.floats("l2 x", rows, n))
        g = codec.decode(ex, gradient[block], ex.floats("l2 dy", rows, n))
        r = _inverse(v, eps)
        # Twice by r, as the kernel does: r^2 of a tiny row would overflow.
        np.multiply(v, r, out=v)
        along = np.einsum("ij,ij->i", v, g, dtype=np.float64).astype(np.float32)
        np.multiply(v, along[:, None], out=v)
        np.subtract(g, v, out=g)
        np.multiply(g, r, out=g)
        codec.encode(ex, g, target[block])


def _inverse(v: F32, eps: float) -> F32:
    """1 / sqrt(sum(v^2) + eps), a column."""
    squares = np.einsum("ij,ij->i", v, v, dtype=np.float64)
    return np.asarray(1.0 / np.sqrt(squares + eps), np.float32)[:, None]
