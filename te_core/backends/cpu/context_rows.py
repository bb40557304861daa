"""Rows of tokens between ranks, by NumPy's indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from te_core.attention import DIMENSIONS
from te_core.backends.cpu.context import divided
from te_core.backends.cpu.executor import CpuPlan
from te_core.errors import ArgumentError
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.context_rows import ContextRowsSpec

Places = npt.NDArray[np.int64]


def plan_context_rows(rt: Runtime, spec: ContextRowsSpec) -> CpuPlan:
    """The plan of `context_rows`."""
    return CpuPlan(spec)


def context_rows(rt: Runtime, plan: CpuPlan, t: Tensor, cu: Tensor | None, out: Tensor) -> None:
    """Token by token."""
    spec: ContextRowsSpec = plan.spec
    source, target = (x.numpy().view(f"u{x.dtype.itemsize}") for x in (t, out))
    _, token, head = DIMENSIONS[spec.form]
    if spec.how == "heads_to_ranks":
        for rank in range(spec.size):
            first = rank // spec.repeats * spec.heads
            target[rank] = _along(source, head, slice(first, first + spec.heads))
        return
    if spec.how == "ranks_to_heads":
        for rank in range(spec.size):
            _along(target, head, slice(rank * spec.heads, (rank + 1) * spec.heads))[...] = source[rank]
        return
    for rank in range(spec.size):
        places = _places(spec, cu, rank)
        held = places >= 0
        if spec.how == "sequence_to_ranks":
            target[rank] = 0
            target[rank][_index(token, held)] = source[_index(token, places[held])]
        else:
            if rank == 0:
                target[...] = 0
            target[_index(token, places[held])] = source[rank][_index(token, held)]


def _along(a: Any, axis: int, index: Any) -> Any:
    return a[_index(axis, index)]


def _index(axis: int, index: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * axis, index)


def _places(spec: ContextRowsSpec, cu: Tensor | None, rank: int) -> Places:
    """Where each token of a rank is in sequence order; -1 for tokens of no sequence."""
    row: Places = np.arange(spec.tokens)
    if cu is None:
        chunk, begin, offset = np.full(spec.tokens, spec.tokens // 2), np.zeros(spec.tokens, np.int64), row
    else:
        sums = divided(cu, 2 * spec.size)
        if sums.min() < 0 or sums.max() // spec.parts > spec.size * spec.tokens:
            raise ArgumentError(
                "context_rows",
                f"running sums {sums.tolist()} for {spec.size * spec.tokens} tokens, 1 / {spec.parts} of all",
                "sequences within the tokens given",
                "correct cu_seqlens_padded",
            )
        begins = sums // (spec.size * spec.parts)
        sequence = np.searchsorted(begins, row, side="right") - 1
        nowhere = (sequence < 0) | (sequence >= spec.sequences)
        sequence[nowhere] = 0
        chunks = np.append(np.diff(sums) // (2 * spec.size * spec.parts), 0)
        chunk = np.where(nowhere, 0, chunks[sequence])
        begin, offset = sums[sequence] // spec.parts, row - begins[sequence]
    later = offset >= chunk
    number = np.where(later, 2 * spec.size - 1 - rank, rank)
    place = begin + number * chunk + np.where(later, offset - chunk, offset)
    return np.where(offset < 2 * chunk, place, -1)
