"""Whether all calls of layers that went well could be recorded, or said why not (te_core/tape)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


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
