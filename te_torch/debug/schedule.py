"""When a feature looks: `freq`, `start_step`, `end_step`, `start_end_list`, all ends included."""

from __future__ import annotations

from typing import Any

from te_core.errors import ArgumentError

#: The keys of a schedule.
KEYS = frozenset(("freq", "start_step", "end_step", "start_end_list"))


class EveryOne(int):
    """The next iteration, and every one behind it: a yes that needs no further question."""


def asked(config: dict[str, Any], iteration: int) -> tuple[bool, int | None]:
    """(whether this iteration is one of the configured ones, the first later one that is; None: no more)."""
    freq = config.get("freq", 1)
    if not _is_whole(freq) or freq < 1:
        raise _wrong("freq", freq, "a whole number from 1 on")
    listed = config.get("start_end_list")
    if listed:
        spans = [_span("start_end_list", pair) for pair in (listed if isinstance(listed, (list, tuple)) else [listed])]
    else:
        spans = [_span("start_step, end_step", (config.get("start_step"), config.get("end_step")))]
    now = iteration % freq == 0 and any(
        start <= iteration and (end is None or iteration <= end) for start, end in spans
    )
    later = [found for span in spans if (found := _next(iteration + 1, *span, freq)) is not None]
    if freq == 1 and any(start <= iteration and end is None for start, end in spans):
        return now, EveryOne(iteration + 1)
    return now, min(later, default=None)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(key: str, value: Any, allowed: str) -> ArgumentError:
    return ArgumentError("precision debugging", f"{key}: {value!r}", allowed, "correct the config")


def _span(key: str, pair: Any) -> tuple[int, int | None]:
    whole = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(n is None or _is_whole(n) for n in pair)
    if not whole:
        raise _wrong(key, pair, "a whole number for the first step and one for the last, or none (-1 is none, too)")
    start, end = pair
    return (0 if start is None or start < 0 else start), (None if end is None or end < 0 else end)


def _next(first: int, start: int, end: int | None, freq: int) -> int | None:
    """The first multiple of freq from `first` on inside the span."""
    begin = max(first, start)
    found = -(-begin // freq) * freq
    return found if end is None or found <= end else None
