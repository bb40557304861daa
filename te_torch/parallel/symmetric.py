"""All-reduces over memory that all ranks of a group have mapped (`symmetric_ar_type`)."""

from __future__ import annotations

from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError

#: The documented ways, but for the one that needs NVLink's multicast.
WAYS = ("one_shot", "two_shot")
MULTICAST = "multimem_all_reduce"

_buffers: dict[tuple[Any, ...], torch.Tensor] = {}


def check_way(operation: str, how: Any) -> None:
    """A constructor's `symmetric_ar_type`."""
    if how == MULTICAST:
        raise UnsupportedError(
            operation,
            f"symmetric_ar_type={how!r}",
            " or ".join(map(repr, WAYS)),
            "choose one of these: this way needs NVLink multicast, which is left off",
        )
    if how is not None and how not in WAYS:
        raise ArgumentError(
            operation, f"symmetric_ar_type={how!r}", f"None, {', '.join(map(repr, WAYS))}", "choose one of these"
        )


def symmetric_sum(t: torch.Tensor, group: Any, how: str) -> None:
    """t = the sum of all ranks' tensors, through symmetric memory."""
    if not t.is_cuda:
        raise UnsupportedError(
            "symmetric_ar_type",
            f"{how!r} of a tensor on {t.device}",
            "tensors on GPUs that are connected by NVLink",
            "leave symmetric_ar_type out",
        )
    import torch.distributed._symmetric_memory as symmetric

    name = group.group_name
    key = (name, t.device, t.dtype, t.numel())
    buffer = _buffers.get(key)
    if buffer is None:  # made by all ranks together: what they sum has one size
        buffer = symmetric.empty(t.numel(), dtype=t.dtype, device=t.device)
        symmetric.rendezvous(buffer, group=group)
        _buffers[key] = buffer
    flat = t.view(-1)
    buffer.copy_(flat)
    if how == "one_shot":
        torch.ops.symm_mem.one_shot_all_reduce_out(buffer, "sum", name, flat)
    else:
        torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", name)
        flat.copy_(buffer)
