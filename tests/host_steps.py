"""What a repeated call costs the host, counted: functions, instructions, and text that is built though nobody reads it.

Counts are the same on every machine, which times are not.
"""

from __future__ import annotations

import dis
import sys
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
def traced(trace: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Within it Python tells this function what it runs."""
    # Python 3.12 tells of instructions only if a frame has asked for them before the trace is set.
    sys._getframe().f_trace_opcodes = True
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def opcodes_by_file(call: Callable[[], Any]) -> Counter[str]:
    """How many instructions of Python a call runs, by the file that they are in."""
    found: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found[frame.f_code.co_filename] += event == "opcode"
        return trace

    with traced(trace):
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
    """The instructions of a function that build text."""
    return frozenset(i.offset for i in dis.get_instructions(code) if i.opname in _WORDING)


def worded(call: Callable[[], Any]) -> set[str]:
    """The lines of ours that build text while a call runs."""
    found: set[str] = set()

    def inside(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _wording(frame.f_code):
            found.add(f"{frame.f_code.co_filename.removeprefix(str(ROOT))}:{frame.f_lineno} in {frame.f_code.co_name}")
        return inside

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS) or not _wording(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    with traced(trace):
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
