"""Softmax in float32 with float64 sums (its rule: te_core/ops/softmax.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from te_core.backends.cpu.executor import row_blocks
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.softmax import Band

Array = np.ndarray[Any, Any]
Pair = tuple[Tensor | None, Tensor | None]


@np.errstate(all="ignore")
def softmax_forward(
    rt: Runtime, band: Band, x: Tensor, mask: Tensor | None, lengths: Pair, sinks: Pair, out: Tensor, scale: float
) -> None:
    """out = softmax(scale * x) over what is seen; of `sinks` the second, the share, is written."""
    (sink, share), source, target = sinks, x.numpy(), out.numpy()
    hidden = None if mask is None else np.broadcast_to(mask.numpy(), x.shape)
    for at, seen in _blocks(band, x.shape, lengths):
        b, h, rows = at
        v = source[at].astype(np.float32) * np.float32(scale)
        v[~seen] = -np.inf
        if hidden is not None:
            v[hidden[at] != 0] = -np.inf
        # fmax ignores a NaN, which then shows in the exponentials.
        top = np.fmax.reduce(v, axis=1, initial=-np.inf if sink is None else sink.numpy()[h])
        base = np.where(np.isneginf(top), np.float32(0), top)
        e = np.exp(v - base[:, None])
        total = e.sum(axis=1, dtype=np.float64)
        if sink is not None and share is not None:
            own = np.exp(sink.numpy()[h] - base)
            total += own
            share.numpy()[b, rows, h] = own / total
        inverse = np.where(total == 0, 0, 1 / total).astype(np.float32)
        target[at] = e * inverse[:, None]


@np.errstate(all="ignore")
def softmax_backward(
    rt: Runtime, band: Band, dy: Tensor, y: Tensor, lengths: Pair, sinks: Pair, dx: Tensor, scale: float
) -> None:
    """dx = scale * y * (dy - sum(dy * y)); of `sinks`, (share, dsink), dsink = - sum of share * sum(dy * y)."""
    share, dsink = sinks
    weights, gradient, target = y.numpy(), dy.numpy(), dx.numpy()
    sums = np.zeros(y.shape[1], np.float64)
    for at, seen in _blocks(band, y.shape, lengths):
        b, h, rows = at
        p, g = (np.where(seen, t[at], 0).astype(np.float32) for t in (weights, gradient))
        along = (p * g).sum(axis=1, dtype=np.float64).astype(np.float32)
        target[at] = np.float32(scale) * (p * (g - along[:, None]))
        if share is not None:
            sums[h] -= (share.numpy()[b, rows, h] * along).sum(dtype=np.float64)
    if dsink is not None:
        dsink.numpy()[...] = sums


def _blocks(band: Band, shape: tuple[int, ...], lengths: Pair) -> Iterator[tuple[tuple[int, int, slice], Array]]:
    """Index (batch, head, rows) and what those rows see by place and length, [rows, sk]."""
    batch, heads, sq, sk = shape
    column = np.arange(sk)
    for b in range(batch):
        len_q, len_kv = (
            n if cu is None else int(np.diff(cu.numpy()[b : b + 2])[0]) for cu, n in zip(lengths, (sq, sk), strict=True)
        )
        for rows in row_blocks(sq, sk):
            row = np.arange(rows.start, rows.stop)[:, None]
            diagonal = row + (len_kv - len_q if band.bottom_right else 0)
            seen = (row < len_q) & (column < len_kv)
            if band.left >= 0:
                seen &= column >= diagonal - band.left
            if band.right >= 0:
                seen &= column <= diagonal + band.right
            for h in range(heads):
                yield (b, h, rows), seen
