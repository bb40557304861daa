"""Lengths, random numbers and maxima of context parallelism on CUDA: one launch of context.cu each."""

from __future__ import annotations

import struct
from ctypes import create_string_buffer
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.context import ContextLengthsSpec, ContextMarkSpec, Span

_THREADS = 256
_SPANS, _SPAN = 96, 8  # that a launch takes, and the numbers of each
_TABLE = struct.Struct(f"=3Q{4 + _SPANS * _SPAN}i")  # Spans of the kernel
_NUMBERS = 256
_DRAWS = struct.Struct(f"=2Q{_NUMBERS + 1}q")  # its Numbers


@dataclass(frozen=True, slots=True)
class LengthsPlan:
    """The tables of its launches without addresses, each with how many spans it has."""

    kernel: Kernel
    tables: tuple[tuple[bytes, int], ...]
    places: int  # the bytes of a span's rows
    family: str = "context_lengths"


@dataclass(frozen=True, slots=True)
class DrawsPlan:
    """The numbers of its launches."""

    kernel: Kernel
    numbers: tuple[tuple[int, ...], ...]
    family: str = "context_draws"


@dataclass(frozen=True, slots=True)
class GridPlan:
    """One launch, and the numbers behind its pointers."""

    kernel: Kernel
    blocks: int
    numbers: tuple[int, ...]
    family: str = "context"


def plan_context_lengths(rt: Runtime, spec: ContextLengthsSpec) -> LengthsPlan:
    """A block for each span, as many of them in a launch as its table holds."""
    kernel = loader.get(rt, "context", entry="context_lengths", args="b")
    tables = []
    for first in range(0, len(spec.spans), _SPANS):
        some = spec.spans[first : first + _SPANS]
        numbers = [n for span in some for n in _packed(span)]
        head = (0, 0, 0, spec.sequences, spec.size, spec.chunk, 0)
        tables.append((_TABLE.pack(*head, *numbers, *[0] * (_SPANS * _SPAN - len(numbers))), len(some)))
    return LengthsPlan(kernel, tuple(tables), 8 * (spec.sequences + 1))


def _packed(span: Span) -> tuple[int, ...]:
    (low, high), (low_too, high_too) = (*span.ranges, (0, 0))[:2]
    return low, low_too, high, high_too, span.parts, span.skip, span.before, 0


def context_lengths(rt: Runtime, plan: LengthsPlan, cu: Tensor, padded: Tensor | None, out: Tensor) -> None:
    """Each span's lengths added up, and its places."""
    at, starts = out.ptr, cu.ptr if padded is None else padded.ptr
    for content, count in plan.tables:
        table = create_string_buffer(content, len(content))
        struct.pack_into("=3Q", table, 0, cu.ptr, starts, at)
        plan.kernel.by_value(rt, count, 1024, table, 0, (0, 8, 16))
        at += count * plan.places


def plan_context_mark(rt: Runtime, spec: ContextMarkSpec) -> GridPlan:
    """A block for each sequence; nearly always it finds nothing to do."""
    kernel = loader.get(rt, "context", entry="context_mark", args="ppiiiqqq")
    blocks = spec.sequences if spec.tokens * spec.heads * spec.width else 0
    return GridPlan(kernel, blocks, (spec.size, spec.tokens, spec.heads, spec.width, *spec.steps))


def context_mark(rt: Runtime, plan: GridPlan, t: Tensor, padded: Tensor) -> None:
    """Fill what cannot be right."""
    if plan.blocks:
        plan.kernel(rt, plan.blocks, _THREADS, t.ptr, padded.ptr, *plan.numbers)


def plan_context_draws(rt: Runtime, numbers: tuple[int, ...]) -> DrawsPlan:
    """A thread for each number."""
    kernel = loader.get(rt, "context", entry="context_draws", args="b")
    some = tuple(numbers[first : first + _NUMBERS] for first in range(0, len(numbers), _NUMBERS))
    return DrawsPlan(kernel, some)


def context_draws(rt: Runtime, plan: DrawsPlan, rng: Tensor, out: Tensor) -> None:
    """Mix each number into the seed."""
    at = out.ptr
    for numbers in plan.numbers:
        table = create_string_buffer(_DRAWS.size)
        _DRAWS.pack_into(table, 0, rng.ptr, at, len(numbers), *numbers, *[0] * (_NUMBERS - len(numbers)))
        plan.kernel.by_value(rt, 1, _THREADS, table, 0, (0, 8))
        at += 16 * len(numbers)


def plan_context_max(rt: Runtime, sizes: tuple[int, int, int, int]) -> GridPlan:
    """A thread for each column."""
    kernel = loader.get(rt, "context", entry="context_max", args="ppiiii")
    return GridPlan(kernel, -(-sizes[2] // _THREADS), sizes)


def context_max(rt: Runtime, plan: GridPlan, parts: Tensor, out: Tensor) -> None:
    """Of this rank's heads, among all."""
    if plan.blocks:
        plan.kernel(rt, plan.blocks, _THREADS, parts.ptr, out.ptr, *plan.numbers)
