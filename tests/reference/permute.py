"""Tokens to experts and back from the rules, copy by copy, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

Copy = tuple[int, int, int]  # token, expert or slot, row


def mask_copies(routing: Any, pad_offsets: Any = None) -> list[Copy]:
    """In the order of the experts, and of the tokens of each."""
    tokens, experts = routing.shape
    found: list[Copy] = []
    for e in range(experts):
        for t in range(tokens):
            if routing[t, e]:
                found.append((t, e, len(found)))
    return [(t, e, row + (0 if pad_offsets is None else int(pad_offsets[e]))) for t, e, row in found]


def index_copies(ids: Any, rows: int) -> list[Copy]:
    """The slots of the tokens by expert id, ties in order; those behind the last row are left out."""
    tokens, slots = ids.shape
    order = sorted((int(ids[t, k]), t, k) for t in range(tokens) for k in range(slots))
    return [(t, k, row) for row, (_, t, k) in enumerate(order) if row < rows]


def chunk_copies(sizes: Any, order: Any, rows: int) -> list[Copy]:
    """Chunks in their new order; rows behind them stay."""
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    source = [begins[c] + i for c in order for i in range(sizes[c])]
    source += range(len(source), rows)
    return [(row, 0, to) for to, row in enumerate(source)]


def permuted(x: Any, copies: list[Copy], rows: int, probs: Any = None) -> tuple[Any, Any]:
    """(rows, their probabilities): zeros where nothing goes, and where the probability is 0."""
    out, row_probs = np.zeros((rows, x.shape[1]), x.dtype), np.zeros(rows, np.float64)
    for t, choice, row in copies:
        if row < rows and (probs is None or probs[t, choice] != 0):
            out[row] = x[t]
            row_probs[row] = 1 if probs is None else probs[t, choice]
    return out, row_probs


def unpermuted(x: Any, copies: list[Copy], tokens: int, weights: Any = None) -> Any:
    """The weighted sums."""
    out = np.zeros((tokens, x.shape[1]))
    for t, choice, row in copies:
        if row < len(x):
            out[t] += np.float64(1 if weights is None else weights[t, choice]) * x[row].astype(np.float64)
    return out


def unpermuted_gradients(dy: Any, x: Any, copies: list[Copy], weights: Any) -> tuple[Any, Any]:
    """(dx, dweights)."""
    dx, d_weights = np.zeros(x.shape), np.zeros(weights.shape)
    for t, choice, row in copies:
        if row < len(x):
            dx[row] = np.float64(weights[t, choice]) * dy[t].astype(np.float64)
            d_weights[t, choice] = (dy[t].astype(np.float64) * x[row].astype(np.float64)).sum()
    return dx, d_weights
