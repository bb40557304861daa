"""A progress bar of twenty lines: redrawn in place on a terminal, a line now and then in a file or a pipe."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 28  # of the bar, in characters
LINES = 10  # printed over a whole run when the output is no terminal


class Progress:
    """Shows how far `total` steps have come."""

    def __init__(self, label: str, total: int, done: int = 0, stream: TextIO | None = None, lines: int = LINES) -> None:
        stream = stream or sys.stdout  # where the standard output now goes
        self.label, self.total, self.stream, self.lines = label, total, stream, lines
        self.live = stream.isatty()
        self._first = done
        self._start = time.perf_counter()
        self._drawn = 0.0
        self._printed = done * lines // max(total, 1)

    def show(self, done: int, note: str) -> None:
        """`done` steps are finished; `note` says how it goes."""
        now, end = time.perf_counter(), done >= self.total
        if self.live:
            if now - self._drawn < 0.1 and not end:
                return
            self._drawn = now
            filled = WIDTH * done // max(self.total, 1)
            bar = "█" * filled + "·" * (WIDTH - filled)
            line = f"\r{self.label:8s} {bar} {done}/{self.total}  {note}  {self._left(now, done)}\x1b[K"
            self.stream.write(line + "\n" * end)
        elif end or done * self.lines // max(self.total, 1) > self._printed:
            self._printed = done * self.lines // max(self.total, 1)
            self.stream.write(f"{self.label:8s} {done:5d}/{self.total}  {note}  {self._left(now, done)}\n")
        self.stream.flush()

    def stop(self) -> None:
        """Leave the line, if the bar stands in one that is not finished."""
        if self.live and self._drawn:
            self.stream.write("\n")
            self.stream.flush()

    def _left(self, now: float, done: int) -> str:
        spent, steps = now - self._start, done - self._first
        if done >= self.total:
            return f"{spent:.0f} s"
        return f"{spent * (self.total - done) / steps:.0f} s left" if steps else ""
