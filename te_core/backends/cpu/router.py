"""The router in float32 (its rules: te_core/ops/router.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.router import Routed, RouterTerms, Weighed

Array = np.ndarray[Any, Any]
_TINY = np.float32(1e-20)


@np.errstate(all="ignore")
def router_forward(rt: Runtime, terms: RouterTerms, form: str, dense: bool, given: Routed) -> None:
    """Gates of the chosen experts, or, `dense`, scores of all."""
    x = given.logits.numpy().astype(np.float32)
    tokens, experts = x.shape
    score = _scores(terms, x)
    if dense or terms.pre_softmax:
        score = _shares(terms, score, True)
    bias = np.float32(0) if given.bias is None else given.bias.numpy()
    value = score + bias
    keys = _keys(value)
    if terms.groups:
        parts = value.reshape(tokens, terms.groups, experts // terms.groups)
        best = np.take_along_axis(parts, _order(_keys(parts)), -1)[..., : terms.topk // terms.group_topk]
        worst = _order(_keys(best.sum(-1)))[:, terms.group_topk :]
        grouped = keys.reshape(parts.shape)  # of the same memory
        np.put_along_axis(grouped, np.broadcast_to(worst[..., None], (*worst.shape, parts.shape[-1])), 0, 1)
    order = _order(keys)
    chosen = np.zeros(x.shape, bool)
    np.put_along_axis(chosen, order[:, : terms.topk], True, 1)
    if dense:
        given.out.numpy()[...] = score
    else:
        gates = value - bias
        if not terms.pre_softmax and (terms.score == "softmax" or terms.topk > 1):
            gates = _shares(terms, gates, chosen)
        gates = np.where(chosen, gates * np.float32(terms.scale), np.float32(0))
        given.out.numpy()[...] = gates.astype(given.out.dtype.numpy)
    if form == "bytemap":
        given.routing.numpy()[...] = chosen
    elif form == "bitmap_u8":
        given.routing.numpy()[...] = np.packbits(chosen, axis=1, bitorder="little")
    else:
        given.routing.numpy()[...] = np.nonzero(chosen)[1].reshape(tokens, terms.topk)
    rows = chosen.sum(0)
    if given.counts is not None:
        given.counts.numpy()[...] = rows
    if given.offsets is not None:
        given.offsets.numpy()[...] = np.concatenate(([0], np.cumsum(-(-rows // given.align) * given.align)))
    if given.histogram is not None and given.bounds is not None:
        counts, (lower, upper) = given.histogram.numpy(), given.bounds.numpy()
        bins = counts.shape[1]
        cutoff = np.take_along_axis(value, order[:, terms.topk, None], 1)
        place = np.floor((cutoff - score - lower) * (np.float32(bins) / (upper - lower)))
        place = np.fmin(np.fmax(place, 0), bins - 1).astype(np.int64)
        np.add.at(counts, (np.broadcast_to(np.arange(experts), x.shape), place), 1)


@np.errstate(all="ignore")
def router_backward(
    rt: Runtime, terms: RouterTerms, form: str, grad: Tensor, logits: Tensor, routing: Tensor | None, out: Tensor
) -> None:
    """The gradient of logits from that of the gates; without a routing from that of all scores."""
    x, g = logits.numpy().astype(np.float32), grad.numpy().astype(np.float32)
    chosen: Any = True
    if routing is not None:
        chosen, g = _chosen(routing.numpy(), form, x.shape), g * np.float32(terms.scale)
    g = np.where(chosen, g, 0)
    y = _scores(terms, x)
    if terms.score == "softmax":
        p = _shares(terms, y, True if terms.pre_softmax else chosen)
        dx = p * (g - (p * g).sum(1, keepdims=True))
    else:
        if routing is None or terms.topk > 1:
            total = np.where(chosen, y, 0).sum(1, keepdims=True) + _TINY
            g = np.where(chosen, (g - (g * y).sum(1, keepdims=True) / total) / total, 0)
        dx = g * y * (1 - y)
        if terms.score == "sqrtsoftplus":
            dx = g * np.where(x > 20, np.float32(1), _sigmoid(x)) / (2 * y + _TINY)
    out.numpy()[...] = dx.astype(out.dtype.numpy)


@np.errstate(all="ignore")
def router_aux_loss(rt: Runtime, given: Weighed, probs: Tensor, loss: Tensor) -> None:
    """Sums in float64."""
    sums = probs.numpy().astype(np.float32).sum(0, dtype=np.float64) * given.weights.numpy().astype(np.float64)
    loss.numpy()[0] = np.float32(_factor(given) * sums.sum())


@np.errstate(all="ignore")
def router_aux_loss_backward(rt: Runtime, given: Weighed, dloss: Tensor, out: Tensor) -> None:
    """One row for all tokens."""
    row = _factor(given) * given.weights.numpy().astype(np.float32) * dloss.numpy().astype(np.float32)
    out.numpy()[...] = row.astype(out.dtype.numpy)


def _factor(given: Weighed) -> np.float32:
    tokens = np.float32(given.total.numpy()[0])
    factor = np.float32(given.coeff) * np.float32(given.experts) / np.float32(given.topk) / tokens / tokens
    return np.float32(factor)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def _scores(terms: RouterTerms, x: Array) -> Array:
    """Each expert's own; of softmax the logit."""
    if terms.score == "sigmoid":
        return _sigmoid(x)
    return x if terms.score == "softmax" else np.sqrt(np.where(x > 20, x, np.log1p(np.exp(x))))


def _shares(terms: RouterTerms, score: Array, among: Any) -> Array:
    """The scores as parts of their sum among these experts; those of others count for nothing."""
    if terms.score == "softmax":
        score = np.where(among, score, np.float32(-np.inf))
        score = np.exp(score - np.fmax.reduce(score, axis=1, keepdims=True))
        return np.asarray(score / score.sum(1, keepdims=True), np.float32)
    return np.asarray(score / (np.where(among, score, 0).sum(1, keepdims=True) + _TINY), np.float32)


def _keys(values: Array) -> Array:
    """Unsigned numbers in the order of values: from minus infinity on more than 0, NaN the largest."""
    bits = (values + np.float32(0)).view(np.uint32)
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return np.where(np.isnan(values), ~np.uint32(0), keys)


def _order(keys: Array) -> Array:
    """The places of the last dimension, the largest key first, and of equal ones the first."""
    return np.argsort(~keys, axis=-1, kind="stable")


def _chosen(routing: Array, form: str, shape: tuple[int, ...]) -> Array:
    """Which experts were chosen, by a byte each."""
    if form == "bytemap":
        return routing
    if form == "bitmap_u8":
        return np.unpackbits(routing, axis=1, count=shape[1], bitorder="little").view(bool)
    chosen = np.zeros(shape, bool)
    token, slot = np.nonzero((routing >= 0) & (routing < shape[1]))
    chosen[token, routing[token, slot]] = True
    return chosen
