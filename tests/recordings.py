"""Whether all calls of layers that went well could be recorded, or said why not; and tests that say when calls are
recorded (te_core/tape)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_core.tape.taped import Counts


@contextmanager
def going_well() -> Iterator[None]:
    """A call that goes well where its recording raised an error is a fault of the recording, which no result shows."""
    before = _failed()
    yield
    new = _failed() - before
    assert not new, f"calls that went well could not be recorded: {dict(new)}"


def _failed() -> Counter[str]:
    taped = sys.modules.get("te_core.tape.taped")  # not of a test that imports no layers
    if taped is None:
        return Counter()
    return Counter({why: n for why, n in taped.COUNTS.interpreted.items() if why.startswith(taped.FAILED)})


@contextmanager
def tapes(setting: str | None) -> Iterator[Counts]:
    """No tape is there, before and behind; those that are made are made by this setting (None: as it is). What ran is
    told at the end."""
    from te_core.tape import taped

    counts, ran, was = taped.COUNTS, taped.Counts(), taped.when()
    before = counts.replayed, counts.recorded, counts.interpreted.copy()
    taped.forget()
    taped.set_when(was if setting is None else setting)
    try:
        yield ran
    finally:
        taped.set_when(was)
        taped.forget()
        ran.replayed, ran.recorded = counts.replayed - before[0], counts.recorded - before[1]
        ran.interpreted = counts.interpreted - before[2]
