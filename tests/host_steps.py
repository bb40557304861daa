"""What a repeated call costs the host, counted: functions, instructions, and text that is built though nobody reads it.

Counts are the same on every machine, which times are not.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_OURS = tuple(f"{ROOT / name}/" for name in ("te_core", "te_torch"))
#: What NumPy computes where a GPU would: calls of the reference backend, and below it, are no cost of the host path.
_REFERENCE = f"{ROOT / 'te_core' / 'backends' / 'cpu'}/"
#: Of f-strings, by any Python's name.
_WORDING = ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE", "BUILD_STRING")


@contextmanager
def each_instruction(note: Callable[[CodeType, int], None]) -> Iterator[None]:
    """Within it `note(code, offset)` is told of each instruction of Python that this thread runs."""
    with _monitored(note) if sys.version_info >= (3, 12) else _traced(note):
        yield


@contextmanager
def _traced(note: Callable[[CodeType, int], None]) -> Iterator[None]:
    """By a trace function, which Python 3.12 leaves out of a process's first run, and 3.13 out of some frames."""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            note(frame.f_code, frame.f_lasti)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _monitored(note: Callable[[CodeType, int], None]) -> Iterator[None]:
    """By Python's monitoring, of all threads."""
    if sys.version_info < (3, 12):
        raise RuntimeError("Python has sys.monitoring from 3.12 on")
    monitoring, here = sys.monitoring, threading.get_ident()
    tool, event = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION

    def told(code: CodeType, offset: int) -> None:
        if threading.get_ident() == here:
            note(code, offset)

    monitoring.use_tool_id(tool, "counts of instructions")
    monitoring.register_callback(tool, event, told)
    monitoring.set_events(tool, event)
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)


def opcodes_by_file(call: Callable[[], Any]) -> Counter[str]:
    """How many instructions of Python a call runs, by the file that they are in."""
    found: Counter[str] = Counter()

    def note(code: CodeType, offset: int) -> None:
        found[code.co_filename] += 1

    with each_instruction(note):
        call()
    return found


def opcodes(call: Callable[[], Any]) -> int:
    """How many instructions of Python a call runs."""
    return opcodes_by_file(call).total()


def calls(call: Callable[[], Any]) -> int:
    """How many functions of Python a call runs, but for what the reference backend does."""
    count = below = 0

    def note(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count, below
        if event == "call":
            below += bool(below) or frame.f_code.co_filename.startswith(_REFERENCE)
            count += not below
        elif event == "return":
            below -= bool(below)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


@cache
def _wording(code: CodeType) -> frozenset[int]:
    """The instructions that build text, of a function of ours."""
    if not code.co_filename.startswith(_OURS):
        return frozenset()
    return frozenset(i.offset for i in dis.get_instructions(code) if i.opname in _WORDING)


def line_of(code: CodeType, offset: int) -> int:
    """The line that an instruction is of."""
    return _lines(code).get(offset) or code.co_firstlineno


@cache
def _lines(code: CodeType) -> dict[int, int | None]:
    return {offset: line for start, end, line in code.co_lines() for offset in range(start, end, 2)}


def worded(call: Callable[[], Any]) -> set[str]:
    """The lines of ours that build text while a call runs."""
    found: set[str] = set()

    def note(code: CodeType, offset: int) -> None:
        if offset in _wording(code):
            found.add(f"{code.co_filename.removeprefix(str(ROOT))}:{line_of(code, offset)} in {code.co_name}")

    with each_instruction(note):
        call()
    return found


def worded_at_last(call: Callable[[], Any], tries: int = 8) -> set[str]:
    """The same of a call that repeats: memory that lies otherwise makes another plan, whose arguments are checked."""
    found: set[str] = set()
    for _ in range(tries):
        found = worded(call)
        if not found:
            break
    return found
