"""What an optimizer or an update calls in each step, without a replay, builds no text that nobody will read."""

from __future__ import annotations

from te_core.runtime import Runtime
from tests.core.face import operations
from tests.host_steps import worded_at_last

CALLS = operations(Runtime.cpu())
IN_STEPS = ("amax", "amax_many", "dequantize", "quantize", "quantize_many", "transpose", "update_scales")


def test_nothing_is_worded() -> None:
    for name in IN_STEPS:
        for _ in range(2):
            CALLS[name].run()
    worded = {name: texts for name in IN_STEPS if (texts := worded_at_last(CALLS[name].run))}
    assert worded == {}
