"""The public surface is what tests/surface.txt says: nobody's program breaks by accident."""

from __future__ import annotations

import enum
import subprocess
import sys

from tools import surface


def test_the_surface_is_as_it_was() -> None:
    """In a process of its own: where the alias was imported, classes say that they are of its modules."""
    made = subprocess.run([sys.executable, surface.__file__], capture_output=True, text=True, check=True).stdout
    kept, now = surface.KEPT.read_text().splitlines(), made.splitlines()
    gone, new = [line for line in kept if line not in now], [line for line in now if line not in kept]
    assert kept == now, f"gone: {gone}, new: {new}. If it is meant: python tools/surface.py write, and tell users"


def test_what_a_line_says() -> None:
    class Kind(enum.Enum):
        __module__ = "te_core.made_up"
        ONE = 1

    def function(a: int, /, b: float = 0.5, *rest: int, kind: Kind = Kind.ONE, call: object = print) -> None: ...

    class Thing:
        __module__ = "te_core.made_up"

        def __init__(self, size: int = 3) -> None: ...

        @property
        def width(self) -> int:
            return 1

        @staticmethod
        def made(x: int) -> None: ...

        def _own(self) -> None: ...

    assert list(surface._lines("f", function)) == [
        "f(a, /, b=0.5, *rest, kind=Kind.ONE, call=<built-in function print>)"
    ]
    assert list(surface._lines("Thing", Thing)) == ["Thing(size=3)", "  .made(x)", "  .width"]
    assert list(surface._lines("Kind", Kind))[1:] == ["  ONE"] and list(surface._lines("limit", 3)) == ["limit"]
