"""Rows divided by their length: float32 values, sums of a row in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from te_core.backends.cpu import codec
from te_core.backends.cpu.executor import F32, row_blocks, scratch
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.l2_norm import L2NormOpSpec


@np.errstate(all="ignore")
def l2_norm_forward(rt: Runtime, spec: L2NormOpSpec, x: Tensor, y: Tensor, eps: float) -> None:
    """y = x / sqrt(sum(x^2) + eps)."""
    ex, source, target, (m, n) = scratch(rt), x.numpy(), y.numpy(), x.shape
    for block in row_blocks(m, n):
        v = codec.decode(ex, source[block], ex.floats("l2 x", block.stop - block.start, n))
        np.multiply(v, _inverse(v, eps), out=v)
        codec.encode(ex, v, target[block])


@np.errstate(all="ignore")
def l2_norm_backward(rt: Runtime, spec: L2NormOpSpec, dy: Tensor, x: Tensor, dx: Tensor, eps: float) -> None:
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
