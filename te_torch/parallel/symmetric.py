"""All-reduces over memory that all ranks of a group have mapped (`symmetric_ar_type`)."""

from __future__ import annotations

from typing import Any

import torch

from te_core.errors import UnsupportedError
from te_core.spelling import choice_error
from te_torch.exchange import keep_for_graphs, of_group, telling

#: The documented ways, but for the one that needs NVLink's multicast.
WAYS = ("one_shot", "two_shot")
MULTICAST = "multimem_all_reduce"

_MOST_BUFFERS = 64  # of a group; all ranks make, and forget, the same ones


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
        raise choice_error(operation, "symmetric_ar_type", how, (None, *WAYS))


def _buffers() -> dict[tuple[Any, ...], torch.Tensor]:
    """Those of a group, by their size and what they are for."""
    return {}


def symmetric_buffer(numel: int, dtype: torch.dtype, device: torch.device, group: Any, tag: Any = None) -> torch.Tensor:
    """Memory of this size that all ranks of the group have mapped; made by all of them together at its first use."""
    if device.type != "cuda":
        raise UnsupportedError(
            "symmetric memory",
            f"a tensor on {device}",
            "tensors on GPUs that are connected by NVLink",
            "leave symmetric_ar_type out",
        )
    import torch.distributed._symmetric_memory as symmetric

    found = of_group(group, _buffers)
    key = (numel, dtype, device, tag)
    buffer, capturing = found.get(key), torch.cuda.is_current_stream_capturing()
    if buffer is None:
        if capturing:
            raise UnsupportedError(
                "symmetric memory",
                f"the first {numel} numbers of {dtype} inside a CUDA graph's capture",
                "sizes that all ranks have exchanged before: memory is mapped by all of them together",
                "run a step before the capture",
            )
        if len(found) >= _MOST_BUFFERS:
            found.clear()
        with torch.inference_mode(False):
            buffer = symmetric.empty(numel, dtype=dtype, device=device)
        with telling("symmetric memory", group):
            symmetric.rendezvous(buffer, group=group)
        found[key] = buffer
    if capturing:
        keep_for_graphs(buffer)
    return buffer


def symmetric_sum(t: torch.Tensor, group: Any, how: str) -> None:
    """t = the sum of all ranks' tensors, through symmetric memory."""
    flat = t.view(-1)
    width = 16 // t.element_size()  # the kernels read 16 bytes at a time
    count = -(-flat.numel() // width) * width
    # To map memory takes seconds where many processes share the GPUs: as few buffers as there are powers of two.
    buffer = symmetric_buffer(1 << (count - 1).bit_length(), t.dtype, t.device, group)[:count]
    buffer[: flat.numel()].copy_(flat)
    if how == "one_shot":
        total = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group.group_name)
    else:
        total = torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", group.group_name)
    flat.copy_(total[: flat.numel()])
