"""Activations and their derivatives in float64, from the formulas."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

GATED = {"geglu": "gelu", "glu": "sigmoid", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
_C = 0.7978845608


def _sigmoid(z: np.ndarray) -> np.ndarray:
    # 0.5 (1 + tanh(z / 2)) cancels for negative z even in float64; this does not.
    e = np.exp(-np.abs(z))
    return np.where(z >= 0, 1 / (1 + e), e / (1 + e))


def value(kind: str, x: np.ndarray) -> np.ndarray:
    """act(x) of a plain activation."""
    x = x.astype(np.float64)
    if kind == "gelu":  # 0.5 (1 + tanh(u)) = sigmoid(2u)
        return x * _sigmoid(2 * _C * (x + 0.044715 * x**3))
    if kind == "qgelu":
        return x * _sigmoid(1.702 * x)
    if kind == "silu":
        return x * _sigmoid(x)
    if kind == "sigmoid":
        return _sigmoid(x)
    return np.maximum(x, 0) ** (2 if kind == "srelu" else 1)


def slope(kind: str, x: np.ndarray) -> np.ndarray:
    """act'(x) of a plain activation."""
    x = x.astype(np.float64)
    if kind == "relu":
        return (x > 0).astype(np.float64)
    if kind == "srelu":
        return 2 * np.maximum(x, 0)
    if kind == "sigmoid":
        return _sigmoid(x) * _sigmoid(-x)
    z, dz = {
        "gelu": (2 * _C * (x + 0.044715 * x**3), 2 * _C * (1 + 3 * 0.044715 * x**2)),
        "qgelu": (1.702 * x, np.full_like(x, 1.702)),
        "silu": (x, np.ones_like(x)),
    }[kind]
    s = _sigmoid(z)
    return s + x * s * _sigmoid(-z) * dz


class Clamped(NamedTuple):
    """clamped_swiglu with its documented defaults."""

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    def forward(self, x: np.ndarray) -> np.ndarray:
        """min(a, limit) sigmoid(alpha min(a, limit)) * (b between the limits + offset)."""
        a, b = self._limited(x)
        return a * _sigmoid(self.alpha * a) * (b + self.offset)

    def backward(self, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        """The gradient of x; none beyond the limits."""
        first, second = np.split(x.astype(np.float64), 2, axis=1)
        a, b = self._limited(x)
        s = _sigmoid(self.alpha * a)
        da = dy * (b + self.offset) * (s + self.alpha * a * s * _sigmoid(-self.alpha * a))
        db = dy * a * s
        return np.concatenate(
            [np.where(first > self.limit, 0, da), np.where(np.abs(second) > self.limit, 0, db)], axis=1
        )

    def _limited(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a, b = np.split(x.astype(np.float64), 2, axis=1)
        return np.minimum(a, self.limit), np.clip(b, -self.limit, self.limit)


def forward(kind: str, x: np.ndarray) -> np.ndarray:
    """act(x), or act(a) * b for x = (a | b)."""
    if kind == "clamped_swiglu":
        return Clamped().forward(x)
    if kind not in GATED:
        return value(kind, x)
    a, b = np.split(x.astype(np.float64), 2, axis=1)
    return value(GATED[kind], a) * b


def backward(kind: str, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The gradient of x."""
    dy = dy.astype(np.float64)
    if kind == "clamped_swiglu":
        return Clamped().backward(dy, x)
    if kind not in GATED:
        return dy * slope(kind, x)
    a, b = np.split(x.astype(np.float64), 2, axis=1)
    return np.concatenate([dy * b * slope(GATED[kind], a), dy * value(GATED[kind], a)], axis=1)
