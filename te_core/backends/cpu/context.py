"""Lengths, random numbers and maxima of context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from te_core.errors import ArgumentError
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.context import Span

_GOLDEN, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def context_lengths(
    rt: Runtime, size: int, chunk: int, spans: Sequence[Span], cu: Tensor, padded: Tensor | None, out: Tensor
) -> None:
    """Each span's lengths added up, and its places."""
    lengths, target = np.diff(cu.numpy().astype(np.int64)), out.numpy()
    begins = np.zeros(cu.shape, np.int64)
    each: Any = chunk
    if not chunk:
        begins = divided(cu if padded is None else padded, 2 * size)
        each = np.diff(begins) // (2 * size)
    for i, span in enumerate(spans):
        sums, places = target[2 * i], target[2 * i + 1]
        counts = np.zeros_like(lengths)
        for low, high in span.ranges:
            begin, end = np.maximum(low * each - span.before, 0), np.minimum(lengths, high * each)
            counts += np.where(lengths > low * each, np.maximum(end - begin, 0), 0)
        sums[0] = 0
        np.cumsum(counts, out=sums[1:])
        places[:] = begins // span.parts
        places[: None if chunk else -1] += np.asarray(np.maximum(span.skip * each - span.before, 0), np.int32)


def divided(padded: Tensor, by: int) -> npt.NDArray[np.int64]:
    """The running sums of padded lengths, which this number has to divide."""
    sums = padded.numpy().astype(np.int64)
    wrong = np.diff(sums) % by
    if wrong.any():
        i = int(np.argmax(wrong != 0))
        raise ArgumentError(
            "context parallelism",
            f"sequence {i} of padded length {sums[i + 1] - sums[i]}",
            f"padded lengths that {by}, twice the number of ranks, divides",
            "pad the sequences (pad_thd_sequences_for_cp), and pass cu_seqlens_padded",
        )
    return sums


def context_mark(rt: Runtime, t: Tensor, padded: Tensor, size: int) -> None:
    """Nothing: lengths that do not fit are an error here."""
    divided(padded, 2 * size)


def context_draws(rt: Runtime, rng: Tensor, numbers: tuple[int, ...], out: Tensor) -> None:
    """splitmix64's finalizer of each number's seed."""
    seed, offset = rng.numpy()
    with np.errstate(over="ignore"):
        z = np.uint64(int(seed) & (1 << 64) - 1) + (np.array(numbers, np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _FIRST
        z = (z ^ (z >> np.uint64(27))) * _SECOND
        z = z ^ (z >> np.uint64(31))
    pairs = out.numpy()
    pairs[:, 0], pairs[:, 1] = z.view(np.int64), offset


def context_max(rt: Runtime, parts: Tensor, first: int, out: Tensor) -> None:
    """Of this rank's heads, among all."""
    target = out.numpy()
    target[:] = -np.inf
    target[first : first + parts.shape[1]] = np.fmax.reduce(parts.numpy(), axis=0, initial=-np.inf)
