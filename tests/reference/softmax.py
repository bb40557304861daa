"""Softmax of attention scores in float64, row by row, from the formulas; and rows divided by their length."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def seen(
    shape: tuple[int, ...],
    *,
    left: int = -1,
    right: int = -1,
    bottom_right: bool = False,
    lengths: Any = None,
    mask: Array | None = None,
) -> Array:
    """[b, h, sq, sk]: whether row i sees column j. `lengths`: one pair (queries, keys) for each batch entry."""
    b, h, sq, sk = shape
    out = np.zeros(shape, np.bool_)
    for n in range(b):
        len_q, len_kv = (sq, sk) if lengths is None else lengths[n]
        for i in range(len_q):
            diagonal = i + (len_kv - len_q if bottom_right else 0)
            for j in range(len_kv):
                out[n, :, i, j] = (left < 0 or diagonal - j <= left) and (right < 0 or j - diagonal <= right)
    return out if mask is None else out & ~np.broadcast_to(mask.astype(np.bool_), shape)


def softmax(x: Array, visible: Array, scale: float, sink: Array | None = None) -> tuple[Array, Array]:
    """(y, the sink's share [b, h, sq]): exp / (sum + exp(sink)); a row that sees nothing is zeros."""
    v = np.where(visible, x.astype(np.float64) * scale, -np.inf)
    off = np.full(x.shape[1], -np.inf) if sink is None else sink.astype(np.float64)
    off = np.broadcast_to(off[None, :, None], x.shape[:3])
    top = np.maximum(v.max(axis=-1, initial=-np.inf), off)
    top = np.where(np.isfinite(top), top, 0)
    e, own = np.exp(v - top[..., None]), np.exp(off - top)
    total = e.sum(axis=-1) + own
    safe = np.where(total > 0, total, 1)
    return e / safe[..., None], own / safe


def gradients(dy: Array, y: Array, share: Array, scale: float) -> tuple[Array, Array]:
    """(dx, dsink) by the Jacobian: dy_j/dx_k = y_j (1[j = k] - y_k) scale, dy_j/dsink = - y_j share."""
    dy = dy.astype(np.float64)
    dx = scale * (y * dy - y * (y * dy).sum(axis=-1, keepdims=True))
    return dx, -(y * dy * share[..., None]).sum(axis=(0, 2, 3))


def l2_norm(x: Array, eps: float) -> Array:
    """x / sqrt(sum(x^2) + eps) over the rows."""
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + eps)


def l2_norm_gradient(dy: Array, x: Array, eps: float) -> Array:
    """The gradient of sum(dy * y): by the Jacobian (1 / n) (I - x x^T / n^2) of x / n, n = sqrt(sum(x^2) + eps)."""
    out = []
    for g, row in zip(dy.astype(np.float64), x.astype(np.float64), strict=True):
        n = np.sqrt((row * row).sum() + eps)
        out.append((np.eye(len(row)) - np.outer(row, row) / n**2) @ g / n)
    return np.array(out).reshape(x.shape)
