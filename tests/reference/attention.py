"""Attention in float64, one formula at a time, forward and backward; arrays are [b, h, s, d], packed ones unpacked.

S = cap tanh(q k^T scale / cap) + bias - slope |i + shift - j|      P = exp(S) / (sum over the seen + exp(sink))
out = (keep P / (1 - p)) v
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Problem:
    """All that takes part besides q, k and v; None or -1 where it does not."""

    scale: float
    left: int = -1
    right: int = -1
    bottom_right: bool = False
    len_q: Array | None = None  # [b]
    len_kv: Array | None = None
    mask: Array | None = None  # [b|1, h|1, sq|1, skv], True where hidden
    bias: Array | None = None  # [b|1, h|1, sq|1, skv]
    slopes: Array | None = None  # [h] or [b, h]
    softmax: str = "vanilla"
    sink: Array | None = None  # [h]
    softcap: float = 0.0
    keep: Array | None = None  # [b, h, sq, skv], True where dropout keeps
    p: float = 0.0


class Forward(NamedTuple):
    """The output with what it is made of; `lse` is -inf in rows that see nothing (and have no sink)."""

    out: Array
    weights: Array  # [b, h, sq, skv], before dropout
    lse: Array  # [b, h, sq]
    max_logit: Array  # [h]
    seen: Array  # bool [b, h, sq, skv]


class Backward(NamedTuple):
    """The gradients of sum(dy * out)."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsink: Array | None
    sink_terms: float  # the sum of the squares of what dsink sums up


def seen_keys(batch: int, sq: int, skv: int, p: Problem) -> Array:
    """[b, 1|h, sq, skv]: whether query i sees key j."""
    i, j = np.arange(sq)[:, None], np.arange(skv)[None, :]
    len_q = np.full(batch, sq) if p.len_q is None else np.asarray(p.len_q)
    len_kv = np.full(batch, skv) if p.len_kv is None else np.asarray(p.len_kv)
    rows = []
    for n_q, n_kv in zip(len_q, len_kv, strict=True):
        diagonal = i + (n_kv - n_q if p.bottom_right else 0)
        sees = (i < n_q) & (j < n_kv)
        if p.left >= 0:
            sees = sees & (j >= diagonal - p.left)
        if p.right >= 0:
            sees = sees & (j <= diagonal + p.right)
        rows.append(sees)
    seen = np.stack(rows)[:, None]
    return seen if p.mask is None else seen & ~np.asarray(p.mask, bool)


def alibi(batch: int, sq: int, skv: int, p: Problem) -> Array:
    """[b, h, sq, skv]: what the distance to the diagonal takes from a score."""
    slopes = np.asarray(p.slopes, np.float64)
    slopes = np.broadcast_to(slopes, (batch, slopes.shape[-1]))
    shift = np.zeros(batch)
    if p.bottom_right:
        shift = shift + (skv if p.len_kv is None else p.len_kv) - (sq if p.len_q is None else p.len_q)
    i, j = np.arange(sq)[None, :, None], np.arange(skv)[None, None, :]
    distance = np.abs(i + shift[:, None, None] - j)
    return -slopes[:, :, None, None] * distance[:, None]


def forward(q: Array, k: Array, v: Array, p: Problem) -> Forward:
    """The output [b, h, sq, d_v] and its parts."""
    q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
    (batch, heads, sq, _), skv = q.shape, k.shape[2]
    k, v = (np.repeat(t, heads // t.shape[1], axis=1) for t in (k, v))
    scores = q @ k.swapaxes(2, 3) * p.scale
    if p.softcap:
        scores = p.softcap * np.tanh(scores / p.softcap)
    if p.bias is not None:
        scores = scores + np.asarray(p.bias, np.float64)
    if p.slopes is not None:
        scores = scores + alibi(batch, sq, skv, p)
    seen = np.broadcast_to(seen_keys(batch, sq, skv, p), scores.shape)
    scores = np.where(seen, scores, -np.inf)
    sink = _sink(heads, p)
    top = np.max(scores, axis=3, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    if sink is not None:
        top = np.maximum(top, sink[None, :, None])
    e = np.exp(scores - top[..., None])
    total = e.sum(axis=3)
    if sink is not None:
        total = total + np.exp(sink[None, :, None] - top)
    weights = e / np.where(total > 0, total, 1.0)[..., None]
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    return Forward(_dropped(weights, p) @ v, weights, lse, scores.max(axis=(0, 2, 3)), seen)


def backward(dy: Array, q: Array, k: Array, v: Array, p: Problem, *, centred: bool = True) -> Backward:
    """The gradients; not `centred` leaves out the mean that softmax's gradient subtracts.

    That subtraction can cancel to nothing (a query that sees one key), so errors are measured against both sizes.
    """
    dy, q, k, v = (np.asarray(t, np.float64) for t in (dy, q, k, v))
    heads, groups = q.shape[1], k.shape[1]
    k_all, v_all = (np.repeat(t, heads // groups, axis=1) for t in (k, v))
    f = forward(q, k, v, p)
    d_weights = _dropped(dy @ v_all.swapaxes(2, 3), p)
    mean = (f.weights * d_weights).sum(axis=3, keepdims=True)
    d_scores = f.weights * (d_weights - mean * centred)
    d_logits = d_scores * p.scale
    if p.softcap:
        d_logits = d_logits * (1 - np.tanh(q @ k_all.swapaxes(2, 3) * p.scale / p.softcap) ** 2)
    dk = d_logits.swapaxes(2, 3) @ q
    dv = _dropped(f.weights, p).swapaxes(2, 3) @ dy
    dbias = dsink = None
    sink_terms = 0.0
    if p.bias is not None:
        shape = np.shape(p.bias)
        dbias = d_scores.sum(axis=tuple(i for i in range(4) if shape[i] < d_scores.shape[i]), keepdims=True)
    sink = _sink(heads, p)
    if p.sink is not None and sink is not None:
        # The sink's value is zero, so only the mean is left of (d_weight - mean).
        share = np.exp(sink[None, :, None] - f.lse)[..., None]
        dsink = -(share * mean).sum(axis=(0, 2, 3))
        sink_terms = float(np.square(share * f.weights * d_weights).sum())
    return Backward(d_logits @ k_all, _grouped(dk, groups), _grouped(dv, groups), dbias, dsink, sink_terms)


def _sink(heads: int, p: Problem) -> Array | None:
    if p.softmax == "vanilla":
        return None
    return np.zeros(heads) if p.softmax == "off-by-one" else np.asarray(p.sink, np.float64)


def _dropped(t: Array, p: Problem) -> Array:
    return t if p.keep is None else np.where(p.keep, t, 0.0) / (1 - p.p)


def _grouped(t: Array, groups: int) -> Array:
    """The sum over the query heads that share a key head."""
    b, heads, s, d = t.shape
    return t.reshape(b, groups, heads // groups, s, d).sum(axis=2)


def unpack(t: Array, starts: Array, lengths: Array, longest: int) -> Array:
    """[t, h, d] to [b, h, longest, d], zeros behind each sequence."""
    out = np.zeros((len(lengths), t.shape[1], longest, t.shape[2]), t.dtype)
    for i, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        out[i, :, :n] = t[start : start + n].swapaxes(0, 1)
    return out


def pack(t: Array, starts: Array, lengths: Array, total: int) -> Array:
    """The inverse of `unpack`, zeros between the sequences."""
    out = np.zeros((total, t.shape[1], t.shape[3]), t.dtype)
    for i, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        out[start : start + n] = t[i, :, :n].swapaxes(0, 1)
    return out
