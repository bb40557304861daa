"""Router, token by token, in float64: which experts are chosen, their gates, gradients by whole Jacobians."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def own(x: Array, score: str) -> tuple[Array, Array]:
    """(each expert's own score, its derivative); of softmax the exponential of the distance to the largest logit."""
    s = 1 / (1 + np.exp(-x))
    if score == "sigmoid":
        return s, s * (1 - s)
    if score == "sqrtsoftplus":
        y = np.sqrt(np.logaddexp(0, x))
        return y, s / (2 * y)
    y = np.exp(x - x.max(-1, keepdims=True))
    return y, y


def shares(x: Array, score: str, among: Array) -> tuple[Array, Array]:
    """([tokens, experts] parts of the sum among these experts; [tokens, experts, experts] their derivatives by x).

    Of very many experts no derivatives.
    """
    y, dy = own(x, score)
    y, dy = y * among, dy * among
    total = y.sum(-1, keepdims=True)
    if x.shape[1] > 2000:
        return y / total, np.zeros((x.shape[0], 1, 1))
    jacobian = np.eye(x.shape[1]) * (dy / total)[:, None] - (y / total**2)[:, :, None] * dy[:, None, :]
    return y / total, jacobian


def best(values: Array, count: int, groups: int = 0, group_topk: int = 0) -> Array:
    """Where the best are, of equal ones the first."""
    tokens, experts = values.shape
    chosen = np.zeros(values.shape, bool)
    for t, row in enumerate(values.tolist()):
        able = range(experts)
        if groups:
            size, each = experts // groups, count // group_topk
            parts = [sum(sorted(row[g * size : (g + 1) * size])[-each:]) for g in range(groups)]
            kept = sorted(range(groups), key=lambda g: (-parts[g], g))[:group_topk]
            able = [e for e in able if e // size in kept]
        chosen[t, sorted(able, key=lambda e: (-row[e], e))[:count]] = True
    return chosen


def topk(
    logits: Array,
    count: int,
    score: str = "softmax",
    pre: bool = False,
    groups: int = 0,
    group_topk: int = 0,
    scale: float = 1.0,
    bias: Any = None,
) -> tuple[Array, Array, Array]:
    """(gates, which experts are chosen, the gates' derivatives by the logits [tokens, experts, experts])."""
    x = logits.astype(np.float64)
    every = np.ones(x.shape, bool)
    values, jacobian = shares(x, score, every) if pre else (x if score == "softmax" else own(x, score)[0], None)
    chosen = best(values + (0 if bias is None else bias), count, groups, group_topk)
    gates = values
    if jacobian is None and score != "softmax" and count == 1:
        jacobian = np.eye(x.shape[1]) * own(x, score)[1][:, None]
    elif jacobian is None:
        gates, jacobian = shares(x, score, chosen)
    return scale * gates * chosen, chosen, scale * jacobian * chosen[:, :, None]


def scores(logits: Array, count: int, score: str) -> tuple[Array, Array, Array]:
    """The same of scores of all experts, for the auxiliary loss."""
    values, jacobian = shares(logits.astype(np.float64), score, np.ones(logits.shape, bool))
    return values, best(values, count), jacobian


def histogram(logits: Array, count: int, bias: Array, bounds: tuple[float, float], bins: int) -> Array:
    """How many tokens each expert has in each bin, in float32."""
    x = logits.astype(np.float32)
    s = (1 / (1 + np.exp(-x))).astype(np.float32)
    cutoff = np.sort(s + bias, axis=1)[:, -count - 1]
    found, (lower, upper) = np.zeros((x.shape[1], bins), np.int32), map(np.float32, bounds)
    for t, e in np.ndindex(*x.shape):
        place = np.floor((cutoff[t] - s[t, e] - lower) * (np.float32(bins) / (upper - lower)))
        found[e, int(min(max(place, 0), bins - 1))] += 1
    return found


def written(chosen: Array, form: str, count: int) -> Array:
    """A map of experts, or their numbers, so many."""
    if form == "bytemap":
        return chosen
    tokens, experts = chosen.shape
    if form == "bitmap_u8":
        found = np.zeros((tokens, -(-experts // 8)), np.uint8)
        for t, e in zip(*np.nonzero(chosen), strict=True):
            found[t, e // 8] |= 1 << e % 8
        return found
    return np.array([np.flatnonzero(row) for row in chosen], form).reshape(tokens, count)


def aux_loss(probs: Array, weights: Array, tokens: int, experts: int, count: int, coeff: float) -> float:
    """The auxiliary loss."""
    sums = probs.astype(np.float64).sum(0) * weights.astype(np.float64)
    return float(coeff * experts / count / tokens**2 * sums.sum())
