"""LayerNorm and RMSNorm in float64, from the formulas, with the sizes their errors are measured against."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Forward(NamedTuple):
    """y with its statistics; `scale` [M, 1] is what a row's errors are relative to."""

    y: Array
    mean: Array
    rstd: Array
    scale: Array


class Backward(NamedTuple):
    """Gradients, and the sums of the absolute terms that they are sums of."""

    dx: Array
    dgamma: Array
    dbeta: Array
    dx_scale: Array
    dgamma_terms: Array
    dbeta_terms: Array


def forward(x: Array, gamma: Array, beta: Array | None, *, kind: str, eps: float, zero_centered: bool) -> Forward:
    """(x - mean) / sqrt(variance + eps) * g + beta; RMSNorm has no mean and no beta."""
    x, g = x.astype(np.float64), gamma.astype(np.float64) + zero_centered
    mean = x.mean(axis=1) if kind == "LayerNorm" else np.zeros(len(x))
    centered = x - mean[:, None]
    rstd = 1 / np.sqrt((centered * centered).mean(axis=1) + eps)
    y = centered * rstd[:, None] * g
    scale = np.abs(x) * rstd[:, None] * np.abs(g)
    if beta is not None:
        y = y + beta.astype(np.float64)
        scale = scale + np.abs(beta.astype(np.float64))
    return Forward(y, mean, rstd, scale.max(axis=1, keepdims=True))


def backward(dy: Array, x: Array, gamma: Array, *, kind: str, eps: float, zero_centered: bool) -> Backward:
    """The gradients of sum(dy * y)."""
    dy, x, g = dy.astype(np.float64), x.astype(np.float64), gamma.astype(np.float64) + zero_centered
    mean = x.mean(axis=1, keepdims=True) if kind == "LayerNorm" else 0.0
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + eps)
    xhat, w = (x - mean) * rstd, dy * g
    dx = w - xhat * (w * xhat).mean(axis=1, keepdims=True)
    if kind == "LayerNorm":
        dx = dx - w.mean(axis=1, keepdims=True)
    scale = rstd * np.abs(w).max(axis=1, keepdims=True) * (1 + np.abs(xhat).max(axis=1, keepdims=True))
    return Backward(
        dx * rstd, (dy * xhat).sum(axis=0), dy.sum(axis=0), scale, np.abs(dy * xhat).sum(axis=0), np.abs(dy).sum(axis=0)
    )
