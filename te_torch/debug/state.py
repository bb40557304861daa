"""What scripts ask and set of precision debugging by a configuration file."""

from __future__ import annotations

import sys
from typing import Any

from te_core.errors import ArgumentError


def _api() -> Any:
    """nvdlfw_inspect.api, if a program uses it."""
    return sys.modules.get("nvdlfw_inspect.api")


class TEDebugState:
    """Whether precision debugging is on, and in which iteration: read only."""

    weight_tensor_tp_group_reduce = True

    @classmethod
    def is_enabled(cls) -> bool:
        """Whether nvdlfw_inspect is initialised."""
        return getattr(_api(), "DEBUG_MANAGER", None) is not None

    @classmethod
    def get_iteration(cls) -> int:
        """How often nvdlfw_inspect.api.step() was called; 0 where it is not initialised."""
        return int(_api().DEBUG_MANAGER._trainer_iteration_count) if cls.is_enabled() else 0


def set_weight_tensor_tp_group_reduce(enabled: bool) -> None:
    """Whether statistics of weights are those of all ranks of their tensor-parallel group, or those of the rank's own
    part."""
    if enabled is not True and enabled is not False:
        operation = "set_weight_tensor_tp_group_reduce"
        raise ArgumentError(operation, f"enabled={enabled!r}", "True or False", "pass one of these")
    TEDebugState.weight_tensor_tp_group_reduce = enabled
