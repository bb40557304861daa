"""Tokens to experts and back, by indices of whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.permute import Operands, PermuteSpec, RowMapSpec

Array = npt.NDArray[Any]


# ---------------------------------------------------------------------------------------------------- maps


def row_map(rt: Runtime, spec: RowMapSpec, source: Tensor, beside: Tensor | None, out: Tensor, rows: int) -> None:
    """Number the entries; `beside` are the order of chunks, or the starts that a mask's map shall give."""
    if spec.kind == "mask":
        routed = source.numpy() != 0
        out.numpy()[...] = _mask_map(routed)
        if beside is not None:
            beside.numpy()[...] = np.concatenate(([0], np.cumsum(routed.sum(0))))
    elif spec.kind == "index":
        ids = source.numpy()
        places = np.empty(ids.size, np.int64)
        places[np.argsort(ids.reshape(-1), kind="stable")] = np.arange(ids.size)
        out.numpy()[...] = np.where(places < rows, places, -1).reshape(ids.shape).T.reshape(-1)
    elif beside is not None:
        out.numpy()[...] = _chunk_map(source.numpy().astype(np.int64), beside.numpy().astype(np.int64), rows)


def _mask_map(routed: Array) -> Array:
    """The last expert of a token first; what is undefined is -1."""
    tokens, experts = routed.shape
    made = np.full((tokens, 2 * experts + 1), -1, np.int32)
    place = np.zeros((tokens, experts), np.int32)
    place.T[routed.T] = np.arange(np.count_nonzero(routed))
    token, expert = np.nonzero(routed[:, ::-1])
    expert = experts - 1 - expert
    counts = routed.sum(1)
    nth = np.arange(token.size) - np.repeat(np.cumsum(counts) - counts, counts)
    made[token, nth] = place[token, expert]
    made[token, experts + nth] = expert
    made[:, 2 * experts] = counts
    return made


def _chunk_map(sizes: Array, order: Array, rows: int) -> Array:
    """Row by row where it goes; here, unlike on a GPU, the values can be looked at."""
    if not np.array_equal(np.sort(order), np.arange(order.size)) or sizes.min(initial=0) < 0 or sizes.sum() > rows:
        raise ArgumentError(
            "chunk_row_map",
            f"sizes {sizes.tolist()} in the order {order.tolist()} for {rows} rows",
            "sizes whose sum is at most the rows, each chunk named once in the order",
            "correct them",
        )
    made = np.arange(rows, dtype=np.int32)
    begins, target = np.cumsum(sizes) - sizes, 0
    for chunk in order:
        made[begins[chunk] : begins[chunk] + sizes[chunk]] = np.arange(target, target + sizes[chunk])
        target += sizes[chunk]
    return made


# --------------------------------------------------------------------------------------------------- moves


def _copies(spec: PermuteSpec, operands: Operands) -> Iterator[tuple[Array, Array, Array]]:
    """(tokens, their rows, for which expert or slot) of the first copies of all tokens, then of the second ones ..."""
    rows = operands.row_map.numpy()
    pad = None if operands.pad_offsets is None else operands.pad_offsets.numpy()
    counts = rows[:, -1] if spec.masked else np.full(spec.tokens, spec.choices)
    for j in range(int(counts.max(initial=0))):
        token = np.nonzero(counts > j)[0]
        if spec.masked:
            choice = rows[token, spec.choices + j]
            row = rows[token, j].astype(np.int64) + (0 if pad is None else pad[choice])
        else:
            choice, row = np.full(token.size, j), rows[j * spec.tokens + token]
        there = (row >= 0) & (row < spec.rows)
        yield token[there], row[there], choice[there]


def _bytes(t: Tensor) -> Array:
    """Rows as whole numbers, which are moved as they are."""
    found: Array = t.numpy().view(dtypes.UNSIGNED[t.dtype.itemsize])
    return found


def permute(rt: Runtime, spec: PermuteSpec, operands: Operands, out: Tensor, row_probs: Tensor | None) -> None:
    """Copy rows; what no token goes to is zeros."""
    x, moved = _bytes(operands.x), _bytes(out)
    moved[...] = 0
    if row_probs is not None:
        row_probs.numpy()[...] = 0
    for token, row, choice in _copies(spec, operands):
        moved[row] = x[token]
        if row_probs is not None and operands.probs is not None:
            prob = operands.probs.numpy()[token, choice]
            row_probs.numpy()[row] = prob
            moved[row[prob == 0]] = 0


def unpermute(
    rt: Runtime, spec: PermuteSpec, operands: Operands, row_probs: Tensor | None, out: Tensor, probs: Tensor | None
) -> None:
    """Add up rows, the copies of a token one after the other, each sum rounded once."""
    x, given = operands.x.numpy(), None if operands.probs is None else operands.probs.numpy()
    in_values = spec.mode == "weighted" and not spec.masked
    kind = x.dtype if in_values else np.dtype(np.float32)
    total = np.zeros((spec.tokens, spec.columns), kind)
    if probs is not None:
        probs.numpy()[...] = 0
    for token, row, choice in _copies(spec, operands):
        if probs is not None and row_probs is not None:
            probs.numpy()[token, choice] = row_probs.numpy()[row]
        if given is None:
            total[token] += x[row].astype(np.float32)
            continue
        weight = given[token, choice]
        if spec.mode == "gated":
            on = weight != 0
            total[token[on]] += x[row[on]].astype(np.float32)
        else:
            weight = (weight.astype(kind) if in_values else weight)[:, None].astype(np.float64)
            total[token] = _rounded(total[token].astype(np.float64) + weight * x[row].astype(np.float64), kind)
    out.numpy()[...] = total.astype(x.dtype)


def _rounded(value: Array, kind: Any) -> Array:
    """float64 rounded once. To bf16 it would go by way of float32: that one is rounded to odd, so that the second
    rounding is the only one that counts.
    """
    if kind != dtypes.bfloat16.numpy:
        return value.astype(kind)
    single = value.astype(np.float32)
    bits = single.view(np.uint32)
    away = np.abs(single.astype(np.float64)) > np.abs(value)
    odd = (bits - away.astype(np.uint32)) | (single.astype(np.float64) != value)
    rounded: Array = odd.astype(np.uint32).view(np.float32).astype(kind)
    return rounded


def unpermute_backward(
    rt: Runtime, spec: PermuteSpec, dy: Tensor, operands: Operands, dx: Tensor, d_weights: Tensor
) -> None:
    """Weighted gradients to all places, zeros elsewhere; and the weights' own."""
    weights = operands.probs
    x, gradient = operands.x.numpy(), dy.numpy().astype(np.float32)
    moved, found = dx.numpy(), d_weights.numpy()
    moved[...] = 0
    found[...] = 0
    for token, row, choice in _copies(spec, operands):
        if weights is not None:
            weight = weights.numpy()[token, choice]
            weight = (weight if spec.masked else weight.astype(x.dtype)).astype(np.float32)
            moved[row] = (weight[:, None] * gradient[token]).astype(x.dtype)
            found[token, choice] = (gradient[token] * x[row].astype(np.float32)).sum(1).astype(found.dtype)
