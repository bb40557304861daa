"""Process groups as users give them: torch's own, or a mesh of one dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from te_core.errors import ArgumentError
from te_core.precision import History


def group_of(operation: str, given: Any, name: str = "tp_group") -> Any:
    """The process group that was given, or that of a mesh of one dimension."""
    if not dist.is_available() or given is None or isinstance(given, dist.ProcessGroup):
        return given
    if isinstance(given, int) and given == dist.GroupMember.NON_GROUP_MEMBER:  # of a group without this process
        return given
    allowed, do = "a process group, or a DeviceMesh of one dimension", 'pass mesh["tp"].get_group(), say'
    if not isinstance(given, dist.device_mesh.DeviceMesh):
        raise ArgumentError(operation, f"{name} of type {type(given).__name__}", allowed, do)
    if given.ndim != 1:
        names = given.mesh_dim_names or given.mesh.shape
        raise ArgumentError(operation, f"{name}=DeviceMesh of {given.ndim} dimensions {tuple(names)}", allowed, do)
    return given.get_group()


def check_reduction(operation: str, history: History, over: Any, groups: Sequence[Any], kind: str, use: str) -> None:
    """Ranks that exchange codes have one scale only if maxima are reduced over all of these ranks.

    `over`: the group that maxima are reduced over; None: all ranks. `groups`, of this kind, exchange codes in `use`.
    """
    if not history.reduce_amax:
        raise ArgumentError(
            operation,
            f"DelayedScaling(reduce_amax=False) with {use}",
            "reduce_amax=True: the ranks send one another codes, so their scales have to be equal",
            "leave reduce_amax out",
        )
    if over is None:
        return
    ranks = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
    missing = ranks - set(dist.get_process_group_ranks(over))
    if missing:
        raise ArgumentError(
            operation,
            f"an amax_reduction_group without ranks {sorted(missing)} of the {kind} group",
            f"a group that contains the {kind} one",
            "make a larger group, or leave amax_reduction_group out",
        )
