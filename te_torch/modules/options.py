"""Options whose part is not built yet: what switches them off is accepted, anything else refused with the reason."""

from __future__ import annotations

from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError

#: Constructor options of parts that are not built yet, and the value that leaves them out.
_PARALLEL = {
    "sequence_parallel": False, "tp_size": 1, "tp_group": None, "parallel_mode": None, "set_parallel_mode": False,
}  # fmt: skip
_OVERLAP = (
    "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad", "symmetric_ar_type",
    "ub_tp_comm_overlap",
)  # fmt: skip
_LATER = ("save_original_input",)


def refuse_unbuilt(operation: str, options: dict[str, Any]) -> None:
    """Raise for an option whose part is not built; a value that switches it off is accepted."""
    for name, value in options.items():
        # tp_size 1 makes every parallel mode the plain layer, as documented.
        if name in ("sequence_parallel", "parallel_mode", "set_parallel_mode") and options.get("tp_size", 1) == 1:
            if name == "parallel_mode" and value is not None and str(value).lower() not in ("column", "row"):
                raise ArgumentError(operation, f"parallel_mode={value!r}", "None, 'column' or 'row'", "correct it")
            continue
        off = _PARALLEL.get(name, False)
        if name in _PARALLEL or name in _OVERLAP or name in _LATER:
            if name == "tp_group" and _is_single(value):
                continue
            if value not in (off, None, False):
                raise UnsupportedError(
                    operation, f"{name}={value!r}", f"{name}={off!r} in this release",
                    "leave the option out; tensor parallelism and overlap come later",
                )  # fmt: skip


def mode_of(parallel_mode: str | None) -> str | None:
    """The mode as documented, in lower case."""
    return None if parallel_mode is None else str(parallel_mode).lower()


def _is_single(group: Any) -> bool:
    return group is None or (torch.distributed.is_initialized() and torch.distributed.get_world_size(group) == 1)
