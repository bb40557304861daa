"""Process groups as users give them: torch's own, or a mesh of one dimension."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from te_core.errors import ArgumentError


def group_of(operation: str, given: Any, name: str = "tp_group") -> Any:
    """The process group that was given, or that of a mesh of one dimension."""
    if not dist.is_available() or given is None or isinstance(given, (dist.ProcessGroup, int)):
        return given  # an int: torch's own mark of a group that this process is not in
    allowed, do = "a process group, or a DeviceMesh of one dimension", 'pass mesh["tp"].get_group(), say'
    if not isinstance(given, dist.device_mesh.DeviceMesh):
        raise ArgumentError(operation, f"{name} of type {type(given).__name__}", allowed, do)
    if given.ndim != 1:
        names = given.mesh_dim_names or given.mesh.shape
        raise ArgumentError(operation, f"{name}=DeviceMesh of {given.ndim} dimensions {tuple(names)}", allowed, do)
    return given.get_group()
