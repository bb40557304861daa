"""Attention in float32: scores, softmax and products a tile at a time, and back through them.

Backward's D = sum_j P dP is summed from the weights themselves, not from the rounded output, unless these keys are a
part of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from te_core.backends.cpu import codec
from te_core.backends.cpu.attention_scores import (
    Part,
    Planned,
    Problem,
    Tile,
    clear,
    folded,
    load,
    planned,
    product,
    store,
)
from te_core.backends.cpu.executor import F32, scratch
from te_core.runtime import Runtime

if TYPE_CHECKING:
    from te_core.ops.attention import BackwardOperands, ForwardOperands


plan_attention_forward = plan_attention_backward = planned


@np.errstate(all="ignore")
def attention_forward(rt: Runtime, plan: Planned, operands: ForwardOperands) -> None:
    """out = dropout(P) v, with the logs of the sums and the largest scores."""
    q, k, v, terms, out, stats, max_logit = operands
    ex, problem = scratch(rt), Problem(plan, terms, q, k)
    if problem.spec.padded:
        clear(out)
    if stats is not None:
        stats.numpy()[...] = -np.inf
    largest = np.full(problem.size.heads, -np.inf, np.float32)
    for part in problem.parts():
        queries, target = load(ex, problem.queries(q, part)), problem.queries(out, part)
        keys, values = load(ex, problem.keys(k, part)), load(ex, problem.keys(v, part))
        logs = None if stats is None else problem.statistics(stats, part)
        for tile in problem.tiles(part):
            rows, cols = tile
            s, _ = problem.scores(part, tile, np.ascontiguousarray(queries[:, :, rows]), keys[:, :, cols])
            if max_logit is not None:
                largest[part.heads] = np.maximum(largest[part.heads], s.max(axis=(0, 2, 3), initial=-np.inf))
            p, log = problem.softmax(part, s)
            survives = problem.drop(part, tile)
            if survives is not None:
                np.multiply(p, survives, out=p)
            store(ex, product(p, values[:, :, cols]), target[:, :, rows])
            if logs is not None:
                logs[..., rows] = log
    if max_logit is not None:
        max_logit.numpy()[...] = largest


@np.errstate(all="ignore")
def attention_backward(rt: Runtime, plan: Planned, operands: BackwardOperands) -> None:
    """The gradients through the weights, which are worked out again from the statistics."""
    dy, q, k, v, out, stats, terms, dq, dk, dv, dbias, dsink = operands
    ex, problem = scratch(rt), Problem(plan, terms, q, k)
    scale = np.float32(problem.spec.scale)
    if problem.spec.padded:
        clear(dq, dk, dv)
    bias_sum = None if dbias is None else np.zeros(dbias.shape, np.float32)
    sink_sum = np.zeros(problem.size.heads, np.float64)
    for part in problem.parts():
        queries, gradient = load(ex, problem.queries(q, part)), load(ex, problem.queries(dy, part))
        keys, values = load(ex, problem.keys(k, part)), load(ex, problem.keys(v, part))
        whole = _along(gradient, load(ex, problem.queries(out, part))) if problem.spec.partial else None
        logs, target = problem.statistics(stats, part), problem.queries(dq, part)
        key_sum, value_sum = np.zeros_like(keys), np.zeros_like(values)
        for tile in problem.tiles(part):
            rows, cols = tile
            q_tile, dy_tile = (np.ascontiguousarray(a[:, :, rows]) for a in (queries, gradient))
            s, slope = problem.scores(part, tile, q_tile, keys[:, :, cols])
            p = problem.weights(s, logs[..., rows])
            dp, survives = product(dy_tile, values[:, :, cols].swapaxes(2, 3)), problem.drop(part, tile)
            value_sum[:, :, cols] += folded(p if survives is None else p * survives, dy_tile, keys.shape[1])
            if survives is not None:
                np.multiply(dp, survives, out=dp)
            along = np.multiply(p, dp).sum(axis=3) if whole is None else whole[..., rows]
            if problem.sink is not None:
                share = np.exp(problem.sink[part.heads, None] - logs[..., rows])
                sink_sum[part.heads] -= (share * along).sum(axis=(0, 2), dtype=np.float64)
            ds = np.multiply(p, np.subtract(dp, along[..., None], out=dp), out=p)
            if bias_sum is not None:
                _add_bias(problem, part, tile, ds, bias_sum)
            if slope is not None:
                np.multiply(ds, slope, out=ds)
            np.multiply(ds, scale, out=ds)
            key_sum[:, :, cols] += folded(ds, q_tile, keys.shape[1])
            store(ex, product(ds, keys[:, :, cols]), target[:, :, rows])
        store(ex, key_sum, problem.keys(dk, part))
        store(ex, value_sum, problem.keys(dv, part))
    if dbias is not None and bias_sum is not None:
        codec.encode(ex, bias_sum, dbias.numpy())
    if dsink is not None:
        dsink.numpy()[...] = sink_sum


def _along(dy: F32, out: F32) -> F32:
    """D of the whole attention, by the output's values."""
    found: F32 = np.einsum("bhsd,bhsd->bhs", dy, out)
    return found


def _add_bias(problem: Problem, part: Part, tile: Tile, ds: F32, total: F32) -> None:
    """Add the tile's share of the bias gradient, summed over the dimensions that the bias is broadcast along."""
    target = problem.of_tile(total, part, tile)
    over = tuple(axis for axis in (0, 1, 2) if target.shape[axis] == 1 and ds.shape[axis] > 1)
    target += ds.sum(axis=over, keepdims=True) if over else ds
