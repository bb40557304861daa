"""Rotary position embedding in float32 (its rule: te_core/ops/rope.py)."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from te_core.backends.cpu.executor import F32, row_blocks
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.rope import Split, Turn

Array = np.ndarray[Any, Any]

_NOWHERE = -(2**62)


@np.errstate(all="ignore")
def rope(
    rt: Runtime, turn: Turn, t: Tensor, freqs: Tensor, cu_seqlens: Tensor | None, starts: Tensor | None, out: Tensor
) -> None:
    """out = t turned (or turned back)."""
    shape = t.shape
    heads = (prod(shape[:-2]), *shape[-2:])
    source, target = t.numpy().reshape(heads), out.numpy().reshape(heads)
    own, other, row = _table(freqs, _positions(shape, turn, cu_seqlens, starts), 1, turn)
    for block in row_blocks(heads[0], shape[-2] * shape[-1]):
        _turn(source[block], target[block], own[row[block]], other[row[block]], turn.interleaved)


@np.errstate(all="ignore")
def rope_qkv(
    rt: Runtime,
    turn: Turn,
    split: Split,
    packed: Tensor,
    parts: tuple[Tensor | None, ...],
    freqs: tuple[Tensor | None, ...],
    cu_seqlens: Tensor | None,
    starts: Tensor | None,
) -> None:
    """The parts q, k, v of the packed rows; backward: the packed rows of the parts."""
    assert parts[1] is not None
    lead, groups = parts[1].shape[:-2], split.groups
    rows, per = prod(lead), split.heads // groups
    slots = _slots(packed.numpy(), rows, split)
    for part, slot, table, n in zip(parts, slots, (*freqs, None), (per, 1, 1), strict=True):
        if part is None:
            continue
        dense = part.numpy().reshape(rows, groups, n, part.shape[-1])
        source, target = (dense, slot) if turn.backward else (slot, dense)
        if table is None:
            target[...] = source
            continue
        own, other, row = _table(table, _positions((*lead, 1, 1), turn, cu_seqlens, starts), 2, turn)
        for block in row_blocks(rows, groups * n * part.shape[-1]):
            _turn(source[block], target[block], own[row[block]], other[row[block]], turn.interleaved)


def _slots(packed: Array, rows: int, split: Split) -> list[Array]:
    """Views [rows, groups, heads, d] of q, k and v in the packed rows."""
    groups, (dq, dk, dv), grouped = split.groups, split.dims, split.interleaved
    per = split.heads // groups
    sizes = (per * dq, dk, dv)
    views, first = [], 0
    row = packed.reshape(rows, groups, sum(sizes)) if grouped else packed.reshape(rows, groups * sum(sizes))
    for size, n in zip(sizes, (per, 1, 1), strict=True):
        width = size if grouped else groups * size
        part = row[..., first : first + width]
        views.append(part.reshape(rows, groups, n, size // max(n, 1)))
        first += width
    return views


def _positions(
    shape: tuple[int, ...], turn: Turn, cu_seqlens: Tensor | None, starts: Tensor | None
) -> npt.NDArray[np.int64]:
    """The position of each token in the order of memory; `_NOWHERE` for a token of no sequence."""
    fmt, cp_size, cp_rank = turn.fmt, turn.cp_size, turn.cp_rank
    if fmt == "thd":
        assert cu_seqlens is not None
        bounds = cu_seqlens.numpy().astype(np.int64) // cp_size
        row = np.arange(shape[0])
        sequence = np.searchsorted(bounds, row, side="right") - 1
        nowhere = (sequence < 0) | (sequence >= len(bounds) - 1)
        sequence[nowhere] = 0
        place, length = row - bounds[sequence], np.append(np.diff(bounds), 0)[sequence]
    else:
        tokens, sequences = (shape[0], shape[1]) if fmt == "sbhd" else (shape[1], shape[0])
        row = np.arange(tokens * sequences)
        place, sequence = (row // sequences, row % sequences) if fmt == "sbhd" else (row % tokens, row // tokens)
        length, nowhere = np.full_like(row, tokens), np.zeros(row.shape, np.bool_)
    if cp_size > 1:
        half = length // 2
        later = cp_size * length - (cp_rank + 1) * half + place - half
        place = np.where(place < half, cp_rank * half + place, later)
    if starts is not None and starts.size:
        place = place + starts.numpy()[sequence]
    return np.where(nowhere, _NOWHERE, place)


def _table(
    freqs: Tensor, positions: npt.NDArray[np.int64], heads: int, turn: Turn
) -> tuple[F32, F32, npt.NDArray[np.int64]]:
    """(what each channel [positions, 1 .., d2] is multiplied by, and its pair; each token's row of them).

    Sequences share their positions, so that cosines and sines of the distinct ones are few. NaN where `freqs` ends.
    """
    distinct, row = np.unique(positions, return_inverse=True)
    angles = freqs.numpy().reshape(freqs.shape[0], freqs.shape[-1])
    inside = (distinct >= 0) & (distinct < len(angles))
    angle = np.full((len(distinct), angles.shape[1]), np.nan, np.float32)
    angle[inside] = angles[distinct[inside]]
    angle[distinct == _NOWHERE] = 0
    angle = angle.reshape(len(distinct), *[1] * heads, angles.shape[1])
    own, sin = np.cos(angle), np.sin(angle)
    (first, second), other = _pairs(angles.shape[1], turn.interleaved), np.empty_like(sin)
    sin_a, sin_b = sin[..., first], sin[..., second]
    other[..., first], other[..., second] = (sin_b, -sin_a) if turn.backward else (-sin_a, sin_b)
    return own, other, row.reshape(-1)


def _pairs(d2: int, interleaved: bool) -> tuple[slice, slice]:
    """The first and the second channels of all pairs."""
    return (slice(0, d2, 2), slice(1, d2, 2)) if interleaved else (slice(0, d2 // 2), slice(d2 // 2, d2))


def _turn(source: Array, target: Array, own: F32, other: F32, interleaved: bool) -> None:
    """target = source turned, over the last dimension: each channel times `own` plus its pair times `other`."""
    d2 = own.shape[-1]
    first, second = _pairs(d2, interleaved)
    x = source[..., :d2].astype(np.float32)
    swapped = np.empty_like(x)
    swapped[..., first], swapped[..., second] = x[..., second], x[..., first]
    target[..., d2:] = source[..., d2:]
    target[..., :d2] = np.add(np.multiply(x, own, out=x), np.multiply(swapped, other, out=swapped), out=x)
