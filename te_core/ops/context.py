"""What context parallelism asks of a batch: lengths and places of chunks, random numbers of its calls, largest logits.

Each sequence of padded length n is cut into 2 * size chunks of n / (2 * size) tokens; rank r of `size` holds chunk r,
then chunk 2 * size - 1 - r. Real lengths are free: with chunk c, min(max(length - c * chunk, 0), chunk) tokens of chunk
number c are valid. Nothing here waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from te_core import dtypes
from te_core.ops.declare import operation
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


@operation("""
    cu_seqlens [offsets] i32: Running sums of the lengths, [b + 1].
    must offsets >= 1: running sums that begin with 0; correct cu_seqlens
    cu_seqlens_padded? [offsets] i32: Running sums of the padded lengths, [b + 1]. None where nothing is padded.
    size: Number of ranks.
    must size >= 1: the number of ranks
    chunk: Half of a rank's tokens in a row, of dense formats. 0 for packed sequences.
    must chunk >= 0 and not (chunk and cu_seqlens_padded is not None): a chunk's length in dense formats, padded
        lengths in thd, or none; pass one of the two
    spans: Which chunks of the sequences, and where they lie (`Span`).
    must all(_is_span(span, 2 * size) for span in spans): spans of one or two ranges within [0, {2 * size}] (with
        `before` one), parts from 1 on, a skip up to there; correct the spans
""")
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
    out = rt.empty((2 * len(spans), cu_seqlens.shape[0]), dtypes.int32)
    rt.backend.context_lengths(rt, size, chunk, tuple(spans), cu_seqlens, cu_seqlens_padded, out)
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


@operation("""
    cu_seqlens_padded [offsets] i32: Running sums of the padded lengths, [b + 1].
    must offsets >= 1: running sums that begin with 0; correct cu_seqlens_padded
    t [tokens, h, d] rows written: Heads to be marked.
    must t.dtype.is_float: floats [t, h, d]
    must size >= 1: the number of ranks
""")
def context_mark(rt: Runtime, t: Tensor, cu_seqlens_padded: Tensor, *, size: int) -> None:
    """Put NaN (bytes 255) into a rank's tokens [t, h, d] of sequences whose padded length 2 * size does not divide.

    What was computed of such a sequence is wrong. On the CPU it is an error.
    """
    rt.backend.context_mark(rt, t, cu_seqlens_padded, size)


@operation("""
    rng [2] i64: Seed and offset.
    numbers: How many pairs are wanted.
    must all(0 <= n < 1 << 62 for n in numbers): integers from 0 on; correct the numbers
""")
def context_draws(rt: Runtime, rng: Tensor, numbers: Sequence[int]) -> Tensor:
    """int64 [numbers, 2]: of each number a (seed, offset) of its own, from rng (seed, offset).

    The seed is the finalizer of splitmix64 of seed + (number + 1) * 0x9E3779B97F4A7C15, the offset stays: a sum would
    meet the offset of the next call.
    """
    out = rt.empty((len(numbers), 2), dtypes.int64)
    rt.backend.context_draws(rt, rng, tuple(numbers), out)
    return out


@operation("""
    parts [n, h] f32: The rows that are compared.
    heads: Number of heads of the result. None is those of the parts.
    first: Head that the parts begin with.
    must 0 <= first and first + h <= (h if heads is None else heads): heads among the whole's; correct first or heads
""")
def context_max(rt: Runtime, parts: Tensor, *, heads: int | None = None, first: int = 0) -> Tensor:
    """float32 [heads]: the maxima over the rows of parts, float32 [n, h], from head `first` on; -infinity elsewhere.

    Without `heads` there is nothing else. A NaN counts for nothing.
    """
    out = rt.empty((parts.shape[1] if heads is None else heads,), dtypes.float32)
    rt.backend.context_max(rt, parts, first, out)
    return out
