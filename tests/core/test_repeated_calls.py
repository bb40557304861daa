"""An operation or layer that has run before builds no text that nobody will read: no message before it is needed."""

from __future__ import annotations

import pytest

from te_core.runtime import Runtime
from tests.core.face import layers, operations
from tests.host_steps import worded_at_last

CALLS = {**operations(Runtime.cpu()), **layers(Runtime.cpu())}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_worded(name: str) -> None:
    call = CALLS[name]
    for _ in range(2):
        call.run()
    assert not worded_at_last(call.run)
