"""Cross entropy in float32 with float64 sums (its rule: te_core/ops/loss.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from te_core.backends.cpu import codec
from te_core.backends.cpu.executor import row_blocks, scratch
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.loss import LossOperands, LossTerms

Array = np.ndarray[Any, Any]


@np.errstate(all="ignore")
def loss_rows(rt: Runtime, terms: LossTerms, operands: LossOperands) -> None:
    """The facts of rows, their gradient, or both."""
    logits, target, facts, known, grad, out = operands
    ex, (m, n), source = scratch(rt), logits.shape, logits.numpy()
    goal = target.numpy().astype(np.int64)
    ignored = goal == terms.ignore_index
    wrong = ~ignored & ((goal < 0) | (goal >= terms.classes))
    at = goal - terms.first
    here = ~ignored & ~wrong & (at >= 0) & (at < n)
    g = np.ones(m, np.float32) if grad is None else np.broadcast_to(grad.numpy(), (m,)).copy()
    g[wrong] = np.nan
    lse = np.empty(m, np.float32) if known is None else _log_sum(known.numpy()[..., 0])
    for block in row_blocks(m, n):
        v = codec.decode(ex, source[block], ex.floats("loss x", block.stop - block.start, n))
        mine = np.flatnonzero(here[block])
        if known is None:
            found = facts.numpy()[block]
            found[:, 0] = lse[block] = _log_sum(v.T)
            found[:, 1] = v.sum(axis=1, dtype=np.float64)
            found[:, 2] = np.where(wrong[block], np.nan, 0)
            found[mine, 2] = v[mine, at[block][mine]]
            found[ignored[block]] = 0
        if out is None:
            continue
        factor = g[block] * (1 + np.float32(2 * terms.z_loss) * lse[block])
        np.exp(np.subtract(v, lse[block][:, None], out=v), out=v)
        np.multiply(v, factor[:, None], out=v)
        if terms.label_smoothing:
            v -= (g[block] * np.float32(terms.label_smoothing / terms.classes))[:, None]
        v[mine, at[block][mine]] -= g[block][mine] * np.float32(1 - terms.label_smoothing)
        v[wrong[block]] = np.nan
        v[ignored[block]] = 0
        codec.encode(ex, v, out.numpy()[block])


@np.errstate(all="ignore")
def loss_values(
    rt: Runtime, terms: LossTerms, total: str, facts: Tensor, target: Tensor, losses: Tensor, both: Tensor
) -> None:
    """The loss of each row, and their total."""
    known, counted = facts.numpy(), target.numpy() != terms.ignore_index
    lse = _log_sum(known[..., 0])
    every, seen = (known[..., i].sum(axis=0, dtype=np.float32) for i in (1, 2))
    smoothing, z = np.float32(terms.label_smoothing), np.float32(terms.z_loss)
    values = lse - (1 - smoothing) * seen + z * lse * lse
    if terms.label_smoothing:  # a class that is masked by minus infinity counts where it is smoothed only
        values -= smoothing / np.float32(terms.classes) * every
    losses.numpy()[...] = np.where(counted, values, 0)
    count = int(np.count_nonzero(counted))
    summed = np.float64(losses.numpy().sum(dtype=np.float64))
    result = both.numpy()
    result[0] = summed if total == "sum" or (total == "mean of some" and not count) else summed / count
    result[1] = 1 if total == "sum" else 1 / max(count, 1)


def _log_sum(values: Array) -> Array:
    """log(sum(exp(values))) over the first dimension."""
    if len(values) == 1:
        return np.asarray(values[0], np.float32)
    top = np.fmax.reduce(values, axis=0)
    base = np.where(np.isneginf(top), np.float32(0), top)
    return np.asarray(base + np.log(np.exp(values - base).sum(axis=0, dtype=np.float64)), np.float32)
