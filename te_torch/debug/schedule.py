"""When a feature looks: `freq`, `start_step`, `end_step`, `start_end_list`, all ends included."""

from __future__ import annotations

from typing import Any

from te_core.errors import ArgumentError


class EveryOne(int):
    """The next iteration, and every one behind it: a yes that needs no further question."""


def asked(config: dict[str, Any], iteration: int) -> tuple[bool, int | None]:
    """(whether this iteration is one of the configured ones, the first later one that is; None: no more)."""
    freq = config.get("freq", 1)
    if not isinstance(freq, int) or freq < 1:
        raise ArgumentError("precision debugging", f"freq: {freq!r}", "a whole number from 1 on", "correct the config")
    spans = [
        _span(pair) for pair in config.get("start_end_list") or [(config.get("start_step"), config.get("end_step"))]
    ]
    now = iteration % freq == 0 and any(
        start <= iteration and (end is None or iteration <= end) for start, end in spans
    )
    later = [found for span in spans if (found := _next(iteration + 1, *span, freq)) is not None]
    if freq == 1 and any(start <= iteration and end is None for start, end in spans):
        return now, EveryOne(iteration + 1)
    return now, min(later, default=None)


def _span(pair: Any) -> tuple[int, int | None]:
    start, end = pair
    return (0 if start is None or start < 0 else int(start)), (None if end is None or end < 0 else int(end))


def _next(first: int, start: int, end: int | None, freq: int) -> int | None:
    """The first multiple of freq from `first` on inside the span."""
    begin = max(first, start)
    found = -(-begin // freq) * freq
    return found if end is None or found <= end else None
