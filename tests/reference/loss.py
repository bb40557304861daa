"""Cross entropy in float64 of the values as they are, written out."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def loss(
    x: Array, target: Array, grad: Array, ignore: int = -100, smoothing: float = 0.0, z: float = 0.0
) -> tuple[Array, Array]:
    """(the loss of each row, the gradient of x where that of the losses is `grad`)."""
    losses, terms, goal = _parts(x, target, ignore, smoothing, z)
    return losses, np.where(target != ignore, grad, 0)[:, None] * (terms - goal)


def sizes(x: Array, target: Array, grad: Array, ignore: int = -100, smoothing: float = 0.0, z: float = 0.0) -> Array:
    """How large the terms of the gradient are."""
    _, terms, goal = _parts(x, target, ignore, smoothing, z)
    return np.where(target != ignore, np.abs(grad), 0)[:, None] * (terms + goal)


def _parts(x: Array, target: Array, ignore: int, smoothing: float, z: float) -> tuple[Array, Array, Array]:
    """(the losses, and the two terms of a gradient: powers, and what is aimed at)."""
    x = x.astype(np.float64)
    (rows, classes), kept = x.shape, target != ignore
    at = np.where(kept, target, 0)
    top = x.max(axis=1, keepdims=True)
    lse = np.log(np.exp(x - top).sum(axis=1)) + top[:, 0]
    goal = np.full((rows, classes), smoothing / classes)
    goal[np.arange(rows), at] += 1 - smoothing
    losses = lse - (goal * x).sum(axis=1) + z * lse**2
    return np.where(kept, losses, 0), np.exp(x - lse[:, None]) * (1 + 2 * z * lse)[:, None], goal
