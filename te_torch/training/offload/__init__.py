"""Offloading to the host: `get_cpu_offload_context`, and what it is made of under the documented names."""

from te_torch.training.offload.context import (
    get_cpu_offload_context,
    is_cpu_offload_enabled,
    mark_activation_offload,
    mark_not_offload,
    start_offload,
)
from te_torch.training.offload.layers import OffloadableLayerState
from te_torch.training.offload.synchronizers import (
    DefaultOffloadSynchronizer,
    ManualOffloadSynchronizer,
    OffloadSynchronizer,
)

__all__ = [
    "DefaultOffloadSynchronizer", "ManualOffloadSynchronizer", "OffloadSynchronizer", "OffloadableLayerState",
    "get_cpu_offload_context", "is_cpu_offload_enabled", "mark_activation_offload", "mark_not_offload", "start_offload",
]  # fmt: skip
