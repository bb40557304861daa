"""Rotary position embedding in float64, token by token, from the documented formula t cos + rotate_half(t) sin."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def rows_of_rank(length: int, cp_size: int, cp_rank: int) -> list[int]:
    """The positions of a rank's local tokens: chunks r and 2 * cp - 1 - r of the 2 * cp of the whole sequence."""
    if cp_size == 1:
        return list(range(length))
    half = length // 2
    chunks = [list(range(c * half, (c + 1) * half)) for c in range(2 * cp_size)]
    return chunks[cp_rank] + chunks[2 * cp_size - 1 - cp_rank]


def matrix(angles: Array, d: int, interleaved: bool) -> Array:
    """The d x d matrix that turns one head of a token with these d2 angles."""
    d2 = len(angles)
    half, turned = np.zeros((d2, d2)), np.eye(d)
    for i in range(d2 // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + d2 // 2)
        half[a, b], half[b, a] = -1, 1
    angles = angles.astype(np.float64)
    turned[:d2, :d2] = np.diag(np.cos(angles)) + np.diag(np.sin(angles)) @ half
    return turned


def turn(
    t: Array,
    freqs: Array,
    fmt: str,
    *,
    interleaved: bool = False,
    cu_seqlens: Any = None,
    starts: Any = None,
    cp: tuple[int, int] = (1, 0),
    backward: bool = False,
) -> Array:
    """t turned, or a gradient turned back; tokens of no sequence (thd) stay as they are."""
    table = freqs.reshape(freqs.shape[0], -1)
    out = t.astype(np.float64)
    if fmt == "thd":
        bounds = [int(c) // cp[0] for c in cu_seqlens]
        places = [[(slice(i, i + 1),) for i in range(a, b)] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    elif fmt == "sbhd":
        places = [[(slice(s, s + 1), slice(b, b + 1)) for s in range(t.shape[0])] for b in range(t.shape[1])]
    else:
        places = [[(slice(b, b + 1), slice(s, s + 1)) for s in range(t.shape[1])] for b in range(t.shape[0])]
    for number, sequence in enumerate(places):
        positions = rows_of_rank(len(sequence), *cp)
        for where, position in zip(sequence, positions, strict=True):
            position += 0 if starts is None else int(starts[number])
            m = matrix(table[position], t.shape[-1], interleaved)
            out[where] = out[where] @ (m if backward else m.T)
    return out


def split(row: Array, heads: int, groups: int, dims: tuple[int, int, int], interleaved_groups: bool) -> list[Array]:
    """q, k, v [tokens, heads, d] of packed rows [tokens, width], picked head by head."""
    dq, dk, dv = dims
    per = heads // groups
    q, k, v = [], [], []
    for g in range(groups):
        first = g * (per * dq + dk + dv)
        for j in range(per):
            at = first + j * dq if interleaved_groups else (g * per + j) * dq
            q.append(row[:, at : at + dq])
        at = first + per * dq if interleaved_groups else heads * dq + g * dk
        k.append(row[:, at : at + dk])
        at = first + per * dq + dk if interleaved_groups else heads * dq + groups * dk + g * dv
        v.append(row[:, at : at + dv])
    tokens = len(row)
    return [np.stack(p, axis=1) if p else np.zeros((tokens, 0, d), row.dtype) for p, d in ((q, dq), (k, dk), (v, dv))]
