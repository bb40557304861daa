"""Attention in float32: scores, softmax and products a tile at a time, and back through them.

Backward's D = sum_j P dP is summed from the weights themselves, not from the rounded output, unless these keys are a
part of them. On FP8 operands, as `te_core.ops.attention_fp8` states it, these are products of the values of FP8 codes:
P in FP8 gives out and dv, dS in FP8 dq and dk, and D is summed from the output as it came. A GPU multiplies the codes
and applies the scales afterwards; that differs in the last bits of float32 alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from te_core.backends.cpu import codec
from te_core.backends.cpu.attention_scores import (
    Array,
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
from te_core.backends.cpu.executor import F32, Executor, scratch
from te_core.dtypes import DType
from te_core.errors import UnsupportedError
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.attention import BackwardOperands, ForwardOperands
    from te_core.ops.attention_fp8 import Scaled
    from te_core.ops.attention_scored import ScoredAsked

_UNSCALED = SimpleNamespace(**dict.fromkeys(("q", "k", "v", "out", "dy", "s", "dp", "dq", "dk", "dv")))

plan_attention_forward = plan_attention_backward = planned


@np.errstate(all="ignore")
def attention_forward(rt: Runtime, plan: Planned, operands: ForwardOperands) -> None:
    """out = dropout(P) v, with the logs of the sums and the largest scores."""
    q, k, v, terms, out, stats, max_logit, _ = operands
    ex, problem, scales = scratch(rt), Problem(plan, terms, q, k), operands.scales or _UNSCALED
    if problem.spec.padded:
        clear(out)
    if stats is not None:
        stats.numpy()[...] = -np.inf
    largest = np.full(problem.size.heads, -np.inf, np.float32)
    for part in problem.parts():
        queries, target = load(ex, problem.queries(q, part), scales.q), problem.queries(out, part)
        keys, values = load(ex, problem.keys(k, part), scales.k), load(ex, problem.keys(v, part), scales.v)
        logs = None if stats is None else problem.statistics(stats, part)
        for tile in problem.tiles(part):
            rows, cols = tile
            s, _ = problem.scores(part, tile, np.ascontiguousarray(queries[:, :, rows]), keys[:, :, cols])
            if max_logit is not None:
                largest[part.heads] = np.maximum(largest[part.heads], s.max(axis=(0, 2, 3), initial=-np.inf))
            p, log = problem.softmax(part, s)
            p = _through(ex, p, scales.s, q.dtype)
            survives = problem.drop(part, tile)
            if survives is not None:
                np.multiply(p, survives, out=p)
            _deliver(ex, product(p, values[:, :, cols]), scales.out, target[:, :, rows])
            if logs is not None:
                logs[..., rows] = log
    if max_logit is not None:
        max_logit.numpy()[...] = largest


@np.errstate(all="ignore")
def attention_backward(rt: Runtime, plan: Planned, operands: BackwardOperands) -> None:
    """The gradients through the weights, which are worked out again from the statistics."""
    dy, q, k, v, out, stats, terms, dq, dk, dv, dbias, dsink, _ = operands
    ex, problem, scales = scratch(rt), Problem(plan, terms, q, k), operands.scales or _UNSCALED
    scale = np.float32(problem.spec.scale)
    if problem.spec.padded:
        clear(dq, dk, dv)
    bias_sum = None if dbias is None else np.zeros(dbias.shape, np.float32)
    sink_sum = np.zeros(problem.size.heads, np.float64)
    for part in problem.parts():
        queries, gradient = load(ex, problem.queries(q, part), scales.q), load(ex, problem.queries(dy, part), scales.dy)
        keys, values = load(ex, problem.keys(k, part), scales.k), load(ex, problem.keys(v, part), scales.v)
        whole: F32 | None = None  # D by the output's values
        if scales is not _UNSCALED:
            result = load(ex, problem.queries(out, part), scales.out)
            whole = np.multiply(result, gradient, out=result).sum(axis=3)
        elif problem.spec.partial:
            whole = np.einsum("bhsd,bhsd->bhs", gradient, load(ex, problem.queries(out, part)))
        logs, target = problem.statistics(stats, part), problem.queries(dq, part)
        key_sum, value_sum = np.zeros_like(keys), np.zeros_like(values)
        for tile in problem.tiles(part):
            rows, cols = tile
            q_tile, dy_tile = (np.ascontiguousarray(a[:, :, rows]) for a in (queries, gradient))
            s, slope = problem.scores(part, tile, q_tile, keys[:, :, cols])
            p = problem.weights(s, logs[..., rows])
            narrow, survives = _through(ex, p, scales.s, q.dtype), problem.drop(part, tile)
            dp = product(dy_tile, values[:, :, cols].swapaxes(2, 3))
            value_sum[:, :, cols] += folded(narrow if survives is None else narrow * survives, dy_tile, keys.shape[1])
            if survives is not None:
                np.multiply(dp, survives, out=dp)
            along = np.multiply(p, dp).sum(axis=3) if whole is None else whole[..., rows]
            if dsink is not None and problem.sink is not None:
                share = np.exp(problem.sink[part.heads, None] - logs[..., rows])
                sink_sum[part.heads] -= (share * along).sum(axis=(0, 2), dtype=np.float64)
            ds = np.multiply(p, np.subtract(dp, along[..., None], out=dp), out=p)
            if bias_sum is not None:
                _add_bias(problem, part, tile, ds, bias_sum)
            if slope is not None:
                np.multiply(ds, slope, out=ds)
            ds = _through(ex, np.multiply(ds, scale, out=ds), scales.dp, dy.dtype)
            key_sum[:, :, cols] += folded(ds, q_tile, keys.shape[1])
            _deliver(ex, product(ds, keys[:, :, cols]), scales.dq, target[:, :, rows])
        _deliver(ex, key_sum, scales.dk, problem.keys(dk, part))
        _deliver(ex, value_sum, scales.dv, problem.keys(dv, part))
    if dbias is not None and bias_sum is not None:
        codec.encode(ex, bias_sum, dbias.numpy())
    if dsink is not None:
        dsink.numpy()[...] = sink_sum


def _add_bias(problem: Problem, part: Part, tile: Tile, ds: F32, total: F32) -> None:
    """Add the tile's share of the bias gradient, summed over the dimensions that the bias is broadcast along."""
    target = problem.of_tile(total, part, tile)
    over = tuple(axis for axis in (0, 1, 2) if target.shape[axis] == 1 and ds.shape[axis] > 1)
    target += ds.sum(axis=over, keepdims=True) if over else ds


def _raise(values: F32, scaled: Scaled) -> None:
    """Raise the amax to the largest of the values."""
    if scaled.amax is not None:
        amax = scaled.amax.numpy()
        amax[0] = np.fmax(amax[0], codec.amax(values))


def _through(ex: Executor, values: F32, scaled: Scaled | None, dtype: DType) -> F32:
    """The values as FP8 holds them under a scale; without one, as they are."""
    if scaled is None:
        return values
    _raise(values, scaled)
    codes = np.empty(values.shape, dtype.numpy)
    codec.encode(ex, values, codes, scaled.scale.numpy()[0])
    return load(ex, codes, scaled.inverse)


def _deliver(ex: Executor, values: F32, scaled: Scaled | None, view: Array) -> None:
    """Write values under a scale, or, without one, rounded to the view's type."""
    if scaled is None:
        store(ex, values, view)
        return
    _raise(values, scaled)
    store(ex, values, view, scaled.scale.numpy()[0])


def plan_attention_scored(rt: Runtime, asked: ScoredAsked) -> Any:
    """Refuse: the functions build a graph that only cuDNN runs."""
    raise UnsupportedError(
        "attention_scored",
        "functions of a cuDNN graph (score_mod) on the CPU",
        "a GPU with cuDNN",
        "write the function on torch tensors: torch_score_mod of DotProductAttention",
    )


def attention_scored(rt: Runtime, graph: Any, operands: dict[str, Tensor | None]) -> None:
    """Never reached: there is no plan."""
