"""Attention on FP8 values in float64: the formulas of tests/reference/attention.py with two casts between the products.

P (before dropout) is rounded as the forward type holds it under a scale, dS times the softmax scale as the gradient
type does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.reference import attention, quantize
from tests.reference.attention import Problem

Array = np.ndarray[Any, Any]


def held(x: Array, scale: float, fp8: str) -> Array:
    """The values nearest to x that FP8 holds under a scale."""
    codes = quantize.cast(np.asarray(x, np.float32), np.float32(scale), fp8)
    return codes.view(quantize.FP8[fp8]).astype(np.float64) / scale


def forward(q: Array, k: Array, v: Array, p: Problem, s_scale: float, fp8: str) -> tuple[Array, Array]:
    """(the output before its own cast, P)."""
    weights = attention.forward(q, k, v, p).weights
    return _dropped(held(weights, s_scale, fp8), p) @ _per_head(v, q), weights


def backward(
    dy: Array, q: Array, k: Array, v: Array, out: Array, p: Problem, scales: tuple[float, float], fp8: tuple[str, str]
) -> tuple[Array, Array, Array, Array]:
    """(dq, dk, dv) before their cast, and dS times the softmax scale; `out` is what forward gave after its cast.

    `scales` and `fp8` are the scales and types of P and dS.
    """
    groups = k.shape[1]
    weights = attention.forward(q, k, v, p).weights
    d_weights = _dropped(dy @ _per_head(v, q).swapaxes(2, 3), p)
    ds = weights * (d_weights - (dy * out).sum(axis=3, keepdims=True))
    if p.softcap:
        ds = ds * (1 - np.tanh(q @ _per_head(k, q).swapaxes(2, 3) * p.scale / p.softcap) ** 2)
    ds = ds * p.scale
    narrow = held(ds, scales[1], fp8[1])
    dv = _dropped(held(weights, scales[0], fp8[0]), p).swapaxes(2, 3) @ dy
    return narrow @ _per_head(k, q), _grouped(narrow.swapaxes(2, 3) @ q, groups), _grouped(dv, groups), ds


def _dropped(x: Array, p: Problem) -> Array:
    return x if p.keep is None else np.where(p.keep, x / (1 - p.p), 0.0)


def _per_head(t: Array, q: Array) -> Array:
    return np.repeat(t, q.shape[1] // t.shape[1], axis=1)


def _grouped(t: Array, groups: int) -> Array:
    b, h, s, d = t.shape
    return t.reshape(b, groups, h // groups, s, d).sum(axis=2)
