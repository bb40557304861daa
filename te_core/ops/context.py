"""What context parallelism asks of a batch: lengths and places of chunks, random numbers of its calls, largest logits.

Each sequence of padded length n is cut into 2 * size chunks of n / (2 * size) tokens; rank r of `size` holds chunk r,
then chunk 2 * size - 1 - r. Real lengths are free: with chunk c, min(max(length - c * chunk, 0), chunk) tokens of chunk
number c are valid. Nothing here waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.ops import _check
from te_core.runtime import Runtime
from te_core.tensor import Tensor


class Span(NamedTuple):
    """Of each sequence the tokens of chunks [begin, end), in one range or two; and where they lie in packed memory:
    `skip` chunks behind the sequence's begin in a tensor that holds 1 / `parts` of each.

    With `before`, also up to so many tokens in front of the range, which begins so much earlier: the keys of a window.
    A range without a valid token then stays empty.
    """

    ranges: tuple[tuple[int, int], ...]
    parts: int = 1
    skip: int = 0
    before: int = 0


@dataclass(frozen=True, slots=True)
class ContextLengthsSpec:
    """What is asked of `context_lengths`; `chunk` is 0 where padded lengths say how long chunks are."""

    size: int
    chunk: int
    spans: tuple[Span, ...]


def context_lengths(
    rt: Runtime,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None = None,
    *,
    size: int,
    spans: Sequence[Span],
    chunk: int = 0,
) -> Tensor:
    """int32 [2 * spans, b + 1], two rows a span: running sums of its valid tokens in each sequence, and its places.

    `cu_seqlens`, `cu_seqlens_padded`: int32 [b + 1], of whole sequences. In thd a chunk has 1 / (2 * size) of the
    padded length (without `cu_seqlens_padded`: of the length itself), and a span's place in sequence i is
    padded[i] / parts + max(skip * chunk - before, 0); the last one is the end, padded[b] / parts. In dense formats
    `chunk` is given, half of a rank's tokens in a row; places then count from the begin of a row.

    A padded length that 2 * size does not divide is an error on the CPU. On a GPU nobody waits for the lengths:
    `context_mark` puts NaN into the tokens of such a sequence.
    """
    op = "context_lengths"
    check_sums(op, "cu_seqlens", cu_seqlens)
    _check.vector(op, "cu_seqlens_padded", cu_seqlens_padded, cu_seqlens.shape[0], (dtypes.int32,))
    _check_size(op, size)
    _check.require(
        chunk >= 0 and not (chunk and cu_seqlens_padded is not None),
        op,
        f"chunk={chunk}, cu_seqlens_padded {cu_seqlens_padded!r}",
        "a chunk's length in dense formats; padded lengths in thd, or none",
        "pass one of the two",
    )
    spec = ContextLengthsSpec(size, chunk, tuple(spans))
    for span in spec.spans:
        if not _is_span(span, 2 * size):
            allowed = (
                f"one or two ranges within [0, {2 * size}] (with `before` one), parts from 1 on, a skip up to there"
            )
            raise ArgumentError(op, f"{span} of {size} ranks", allowed, "correct the span")
    _check.on_device(op, rt.device, cu_seqlens, cu_seqlens_padded)
    out = rt.empty((2 * len(spec.spans), cu_seqlens.shape[0]), dtypes.int32)
    rt.backend.context_lengths(rt, spec, cu_seqlens, cu_seqlens_padded, out)
    return out


def _is_span(span: Span, chunks: int) -> bool:
    return (
        1 <= len(span.ranges) <= 2
        and all(0 <= low <= high <= chunks for low, high in span.ranges)
        and span.parts >= 1
        and 0 <= span.skip <= chunks
        and 0 <= span.before < 1 << 31
        and not (span.before and len(span.ranges) > 1)
    )


def context_mark(rt: Runtime, t: Tensor, cu_seqlens_padded: Tensor, *, size: int) -> None:
    """Put NaN (bytes 255) into a rank's tokens [t, h, d] of sequences whose padded length 2 * size does not divide.

    What was computed of such a sequence is wrong. On the CPU it is an error.
    """
    op = "context_mark"
    check_sums(op, "cu_seqlens_padded", cu_seqlens_padded)
    _check.require(
        t.ndim == 3 and (t.shape[2] < 2 or t.row_major_strides()[2] == 1) and t.dtype.is_float,
        op,
        f"t = {t!r}",
        "floats [t, h, d] whose last stride is 1",
        "correct t",
    )
    _check_size(op, size)
    _check.on_device(op, rt.device, t, cu_seqlens_padded)
    _check.written(op, "t", t)
    rt.backend.context_mark(rt, t, cu_seqlens_padded, size)


def context_draws(rt: Runtime, rng: Tensor, numbers: Sequence[int]) -> Tensor:
    """int64 [numbers, 2]: of each number a (seed, offset) of its own, from rng (seed, offset).

    The seed is the finalizer of splitmix64 of seed + (number + 1) * 0x9E3779B97F4A7C15, the offset stays: a sum would
    meet the offset of the next call.
    """
    op = "context_draws"
    given = tuple(numbers)
    _check.vector(op, "rng", rng, 2, (dtypes.int64,))
    _check.require(
        all(0 <= n < 1 << 62 for n in given), op, f"numbers {given}", "integers from 0 on", "correct the numbers"
    )
    _check.on_device(op, rt.device, rng)
    out = rt.empty((len(given), 2), dtypes.int64)
    rt.backend.context_draws(rt, rng, given, out)
    return out


def context_max(rt: Runtime, parts: Tensor, *, heads: int | None = None, first: int = 0) -> Tensor:
    """float32 [heads]: the maxima over the rows of parts, float32 [n, h], from head `first` on; -infinity elsewhere.

    Without `heads` there is nothing else. A NaN counts for nothing.
    """
    op = "context_max"
    _check.matrix(op, "parts", parts)
    _check.one_of(op, "dtype of parts", parts.dtype, (dtypes.float32,))
    width = parts.shape[1] if heads is None else heads
    _check.require(
        0 <= first and first + parts.shape[1] <= width,
        op,
        f"{parts.shape[1]} heads from {first} on, of {width}",
        "heads among the whole's",
        "correct first or heads",
    )
    _check.on_device(op, rt.device, parts)
    out = rt.empty((width,), dtypes.float32)
    rt.backend.context_max(rt, parts, first, out)
    return out


def _check_size(op: str, size: int) -> None:
    _check.require(size >= 1, op, f"size={size}", "the number of ranks", "correct size")


def check_sums(op: str, name: str, cu: Tensor) -> None:
    """Running sums of lengths, as far as the host can know."""
    _check.require(
        cu.ndim == 1 and cu.shape[0] >= 1 and cu.is_contiguous and cu.dtype is dtypes.int32,
        op,
        f"{name} = {cu!r}",
        "dense int32 running sums that begin with 0",
        f"correct {name}",
    )
