"""Partial attention outputs put together, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from te_core.backends.cpu.executor import F32
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.attention_merge import MergeOperands

#: The axes of statistics as those of an output: [b, h, s] in the order of its format.
_AXES = {"sbhd": (2, 0, 1), "bshd": (0, 2, 1), "thd": (0, 1)}


@np.errstate(all="ignore")
def attention_merge(rt: Runtime, form: str, softmax: str, operands: MergeOperands) -> None:
    """Weights relative to the largest exponent; rows of no key are left out, not multiplied by zero."""
    a, a_stats, b, b_stats, out, stats, sink = operands
    partials: list[tuple[Any, F32]] = [(a.numpy(), _logs(a_stats, form))]
    if b is not None and b_stats is not None:
        partials.append((b.numpy(), _logs(b_stats, form)))
    top = np.maximum.reduce([logs for _, logs in partials])
    seen = ~np.isneginf(top)
    term: Any = None
    if softmax != "vanilla":
        term = np.float32(0) if sink is None else sink.numpy()
        top = np.maximum(top, term)
    top = np.where(np.isneginf(top), np.float32(0), top)
    shares = [np.exp(logs - top) for _, logs in partials]
    total = sum(shares[1:], shares[0])
    if term is not None:
        total = total + np.exp(term - top)
    made = np.zeros(a.shape, np.float32)
    for (values, logs), share in zip(partials, shares, strict=True):
        weighted = values.astype(np.float32) * (share / np.where(seen, total, np.float32(1)))[..., None]
        made += np.where(np.isneginf(logs)[..., None], np.float32(0), weighted)
    out.numpy()[...] = made.astype(out.dtype.numpy)
    if stats is not None:
        _of_output(stats, form)[...] = np.where(seen, top + np.log(total), np.float32(np.inf))


@np.errstate(all="ignore")
def context_sum(rt: Runtime, a: Tensor, b: Tensor | None, out: Tensor) -> None:
    """In float32, rounded once."""
    made = a.numpy().astype(np.float32)
    if b is not None:
        made += b.numpy().astype(np.float32)
    out.numpy()[...] = made.astype(out.dtype.numpy)


@np.errstate(all="ignore")
def attention_sink_grad(
    rt: Runtime, form: str, dy: Tensor, out: Tensor, stats: Tensor, sink: Tensor, dsink: Tensor
) -> None:
    """Sums of a head in float64."""
    logs = _of_output(stats, form)
    along = (dy.numpy().astype(np.float32) * out.numpy().astype(np.float32)).sum(axis=-1)
    terms = np.where(np.isinf(logs), np.float32(0), np.exp(sink.numpy() - logs) * along)
    dsink.numpy()[...] = -terms.sum(axis=tuple(range(terms.ndim - 1)), dtype=np.float64)


def _of_output(stats: Tensor, form: str) -> F32:
    """The statistics in the order of an output's tokens and heads, as a view."""
    return stats.numpy().transpose(_AXES[form])


def _logs(stats: Tensor, form: str) -> F32:
    """The same, -infinity where no key was seen."""
    values = _of_output(stats, form)
    return np.where(np.isinf(values), np.float32(-np.inf), values)
