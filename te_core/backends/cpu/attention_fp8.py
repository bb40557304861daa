"""Attention on FP8 operands, as `te_core.ops.attention_fp8` states it: float32 products of the values of FP8 codes.

A GPU multiplies the codes and applies the scales afterwards; that differs in the last bits of float32 alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from te_core.backends.cpu import codec
from te_core.backends.cpu.attention_scores import Array, Planned, Problem, clear, folded, load, planned, product, store
from te_core.backends.cpu.executor import F32, Executor, scratch
from te_core.dtypes import DType
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.attention_fp8 import Fp8BackwardOperands, Fp8ForwardOperands, Scaled


@np.errstate(all="ignore")
def scale_pairs(rt: Runtime, scales: Sequence[Tensor], places: Sequence[Tensor | None], out: Tensor) -> None:
    """Each scale and its inverse."""
    for pair, scale, place in zip(out.numpy(), scales, places, strict=True):
        pair[0] = scale.numpy()[0]
        pair[1] = np.float32(1) / pair[0]
        if place is not None:
            place.numpy()[0] = pair[1]


plan_attention_fp8_forward = plan_attention_fp8_backward = planned


@np.errstate(all="ignore")
def attention_fp8_forward(rt: Runtime, plan: Planned, operands: Fp8ForwardOperands) -> None:
    """out = dropout(P in FP8) v."""
    q, k, v, terms, scales, out, stats = operands
    ex, problem = scratch(rt), Problem(plan, terms, q, k)
    if problem.spec.padded:
        clear(out)
    if stats is not None:
        stats.numpy()[...] = -np.inf
    for part in problem.parts():
        queries = load(ex, problem.queries(q, part), scales.q.numpy())
        keys = load(ex, problem.keys(k, part), scales.k.numpy())
        values = load(ex, problem.keys(v, part), scales.v.numpy())
        target, logs = problem.queries(out, part), None if stats is None else problem.statistics(stats, part)
        for tile in problem.tiles(part):
            rows, cols = tile
            s, _ = problem.scores(part, tile, np.ascontiguousarray(queries[:, :, rows]), keys[:, :, cols])
            p, log = problem.softmax(part, s)
            p = _through(ex, p, scales.s, q.dtype)
            survives = problem.drop(part, tile)
            if survives is not None:
                np.multiply(p, survives, out=p)
            _deliver(ex, product(p, values[:, :, cols]), scales.out, target[:, :, rows])
            if logs is not None:
                logs[..., rows] = log


@np.errstate(all="ignore")
def attention_fp8_backward(rt: Runtime, plan: Planned, operands: Fp8BackwardOperands) -> None:
    """Gradients by P in FP8 for dv, and dS in FP8 for dq and dk; D is summed from the output as it came."""
    dy, q, k, v, out, stats, terms, scales, dq, dk, dv = operands
    ex, problem = scratch(rt), Problem(plan, terms, q, k)
    scale = np.float32(problem.spec.scale)
    if problem.spec.padded:
        clear(dq, dk, dv)
    for part in problem.parts():
        queries = load(ex, problem.queries(q, part), scales.q.numpy())
        gradient = load(ex, problem.queries(dy, part), scales.dy.numpy())
        result = load(ex, problem.queries(out, part), None if scales.out is None else scales.out.numpy())
        keys = load(ex, problem.keys(k, part), scales.k.numpy())
        values = load(ex, problem.keys(v, part), scales.v.numpy())
        logs, target = problem.statistics(stats, part), problem.queries(dq, part)
        along = np.multiply(result, gradient, out=result).sum(axis=3)
        key_sum, value_sum = np.zeros_like(keys), np.zeros_like(values)
        for tile in problem.tiles(part):
            rows, cols = tile
            q_tile, dy_tile = (np.ascontiguousarray(a[:, :, rows]) for a in (queries, gradient))
            s, slope = problem.scores(part, tile, q_tile, keys[:, :, cols])
            p = problem.weights(s, logs[..., rows])
            narrow, survives = _through(ex, p, scales.s, q.dtype), problem.drop(part, tile)
            dp = product(dy_tile, values[:, :, cols].swapaxes(2, 3))
            if survives is not None:
                np.multiply(narrow, survives, out=narrow)
                np.multiply(dp, survives, out=dp)
            value_sum[:, :, cols] += folded(narrow, dy_tile, keys.shape[1])
            ds = np.multiply(p, np.subtract(dp, along[:, :, rows, None], out=dp), out=p)
            if slope is not None:
                np.multiply(ds, slope, out=ds)
            ds = _through(ex, np.multiply(ds, scale, out=ds), scales.dp, dy.dtype)
            key_sum[:, :, cols] += folded(ds, q_tile, keys.shape[1])
            _deliver(ex, product(ds, keys[:, :, cols]), scales.dq, target[:, :, rows])
        _deliver(ex, key_sum, scales.dk, problem.keys(dk, part))
        _deliver(ex, value_sum, scales.dv, problem.keys(dv, part))


def _raise(values: F32, scaled: Scaled) -> None:
    """Raise the amax to the largest of the values."""
    if scaled.amax is not None:
        amax = scaled.amax.numpy()
        amax[0] = np.fmax(amax[0], codec.amax(values))


def _through(ex: Executor, values: F32, scaled: Scaled, dtype: DType) -> F32:
    """The values as FP8 holds them under a scale."""
    _raise(values, scaled)
    codes = np.empty(values.shape, dtype.numpy)
    codec.encode(ex, values, codes, scaled.scale.numpy()[0])
    return load(ex, codes, scaled.inverse.numpy())


def _deliver(ex: Executor, values: F32, scaled: Scaled | None, view: Array) -> None:
    """Write values under a scale, or, without one, rounded to the view's type."""
    if scaled is None:
        store(ex, values, view)
        return
    _raise(values, scaled)
    store(ex, values, view, scaled.scale.numpy()[0])
