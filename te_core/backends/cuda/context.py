"""Lengths, random numbers and maxima of context parallelism on CUDA: one launch of context.cu each."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import create_string_buffer
from typing import TYPE_CHECKING

from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.context import Span

_THREADS = 256
_SPANS, _SPAN = 96, 8  # that a launch takes, and the numbers of each
_TABLE = struct.Struct(f"=3Q{4 + _SPANS * _SPAN}i")  # Spans of the kernel
_NUMBERS = 256
_DRAWS = struct.Struct(f"=2Q{_NUMBERS + 1}q")  # its Numbers


def context_lengths(
    rt: Runtime, size: int, chunk: int, spans: Sequence[Span], cu: Tensor, padded: Tensor | None, out: Tensor
) -> None:
    """A block for each span, as many of them in a launch as its table holds."""
    kernel = loader.get(rt, "context", entry="context_lengths", args="b")
    at, starts = out.ptr, cu if padded is None else padded
    sizes = (cu.shape[0] - 1, size, chunk, 0)
    for first in range(0, len(spans), _SPANS):
        some = spans[first : first + _SPANS]
        numbers = [n for span in some for n in _packed(span)]
        table = create_string_buffer(_TABLE.size)
        _TABLE.pack_into(table, 0, cu.ptr, starts.ptr, at, *sizes, *numbers, *[0] * (_SPANS * _SPAN - len(numbers)))
        kernel.by_value(rt, len(some), 1024, table, 0, (0, 8, 16))
        at += len(some) * 8 * cu.shape[0]


def _packed(span: Span) -> tuple[int, ...]:
    (low, high), (low_too, high_too) = (*span.ranges, (0, 0))[:2]
    return low, low_too, high, high_too, span.parts, span.skip, span.before, 0


def context_mark(rt: Runtime, t: Tensor, padded: Tensor, size: int) -> None:
    """A block for each sequence; nearly always it finds nothing to do."""
    kernel = loader.get(rt, "context", entry="context_mark", args="ppiiiqqq")
    (tokens, heads, width), steps, item = t.shape, t.row_major_strides(), t.dtype.itemsize
    numbers = (size, tokens, heads, width * item, steps[0] * item, steps[1] * item)
    sequences = padded.shape[0] - 1
    if sequences and t.size:
        kernel(rt, sequences, _THREADS, t, padded, *numbers)


def context_draws(rt: Runtime, rng: Tensor, numbers: tuple[int, ...], out: Tensor) -> None:
    """A thread for each number, which it mixes into the seed."""
    kernel = loader.get(rt, "context", entry="context_draws", args="b")
    for first in range(0, len(numbers), _NUMBERS):
        some = numbers[first : first + _NUMBERS]
        table = create_string_buffer(_DRAWS.size)
        _DRAWS.pack_into(table, 0, rng.ptr, out.ptr + 16 * first, len(some), *some, *[0] * (_NUMBERS - len(some)))
        kernel.by_value(rt, 1, _THREADS, table, 0, (0, 8))


def context_max(rt: Runtime, parts: Tensor, first: int, out: Tensor) -> None:
    """A thread for each column."""
    kernel = loader.get(rt, "context", entry="context_max", args="ppiiii")
    if out.size:
        kernel(rt, -(-out.size // _THREADS), _THREADS, parts, out, *parts.shape, out.size, first)
