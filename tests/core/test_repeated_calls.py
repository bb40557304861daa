"""An operation or layer that has run before builds no text that nobody will read: no message before it is needed."""

from __future__ import annotations

from te_core.runtime import Runtime
from tests.core.face import layers, operations
from tests.host_steps import worded_at_last

CALLS = {**operations(Runtime.cpu()), **layers(Runtime.cpu())}


def test_nothing_is_worded() -> None:
    for call in CALLS.values():
        for _ in range(2):
            call.run()
    worded = {name: texts for name, call in CALLS.items() if (texts := worded_at_last(call.run))}
    assert worded == {}
