"""Rows of tokens between ranks, by NumPy's indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from te_core.attention import DIMENSIONS
from te_core.backends.cpu.context import divided
from te_core.errors import ArgumentError
from te_core.runtime import Runtime
from te_core.tensor import Tensor

Places = npt.NDArray[np.int64]


def context_rows(
    rt: Runtime, how: str, form: str, size: int, parts: int, t: Tensor, cu: Tensor | None, out: Tensor
) -> None:
    """Token by token."""
    source, target = (x.numpy().view(f"u{x.dtype.itemsize}") for x in (t, out))
    _, token, head = DIMENSIONS[form]
    ranked = target if how.endswith("to_ranks") else source
    heads = ranked.shape[1 + head]
    for rank in range(size):
        if how == "heads_to_ranks":
            first = rank * source.shape[head] // size  # several ranks have one, where heads are fewer
            target[rank] = source[_index(head, slice(first, first + heads))]
        elif how == "ranks_to_heads":
            target[_index(head, slice(rank * heads, (rank + 1) * heads))] = source[rank]
        else:
            places = _places(size, parts, ranked.shape[1 + token], cu, rank)
            held = places >= 0
            if how == "sequence_to_ranks":
                target[rank] = 0
                target[rank][_index(token, held)] = source[_index(token, places[held])]
            else:
                if rank == 0:
                    target[...] = 0
                target[_index(token, places[held])] = source[rank][_index(token, held)]


def _index(axis: int, index: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * axis, index)


def _places(size: int, parts: int, tokens: int, cu: Tensor | None, rank: int) -> Places:
    """Where each token of a rank is in sequence order; -1 for tokens of no sequence."""
    row: Places = np.arange(tokens)
    if cu is None:
        chunk, begin, offset = np.full(tokens, tokens // 2), np.zeros(tokens, np.int64), row
    else:
        sums = divided(cu, 2 * size)
        if sums.min() < 0 or sums.max() // parts > size * tokens:
            raise ArgumentError(
                "context_rows",
                f"running sums {sums.tolist()} for {size * tokens} tokens, 1 / {parts} of all",
                "sequences within the tokens given",
                "correct cu_seqlens_padded",
            )
        begins = sums // (size * parts)
        sequence = np.searchsorted(begins, row, side="right") - 1
        nowhere = (sequence < 0) | (sequence >= len(sums) - 1)
        sequence[nowhere] = 0
        chunks = np.append(np.diff(sums) // (2 * size * parts), 0)
        chunk = np.where(nowhere, 0, chunks[sequence])
        begin, offset = sums[sequence] // parts, row - begins[sequence]
    later = offset >= chunk
    number = np.where(later, 2 * size - 1 - rank, rank)
    place = begin + number * chunk + np.where(later, offset - chunk, offset)
    return np.where(offset < 2 * chunk, place, -1)
