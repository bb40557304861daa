"""The device's side of offloading: the stream of the copies, events, pinned memory.

All of it is below one small door, `Side`, of which the rest knows nothing else: a test puts another one in its place
that takes the CPU's tensors for a device's and records what is done in which order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from te_core.tensor import Device, cuda_device

#: Tensors of fewer elements are not worth a copy: they stay.
THRESHOLD = 256 * 1024

Pair = tuple[torch.Tensor, torch.Tensor]


class Side:
    """A GPU, and the stream on which its copies run beside the work of the current one. Memory is flat bytes."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self.device = device
        self.stream = stream

    def host(self, nbytes: int) -> torch.Tensor:
        """Pinned memory of the host, for copies beside other work.

        torch keeps what is given back, so that a step does not pay for pinning again.
        """
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def room(self, nbytes: int) -> torch.Tensor:
        """Memory of the current stream, on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, pairs: Sequence[Pair]) -> Any:
        """Copy each second one into the first, after the work that is on the current stream now; what to wait for.

        One wait and one event for all of them.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, ticket: Any) -> None:
        """Let what the current stream does from now on come after those copies; the host does not wait."""
        torch.cuda.current_stream(self.device).wait_event(ticket)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """The tensors' memory may be let go of before the copies of it are done, which nobody will wait for.

        torch's allocator gives it to nobody before the stream of the copies has come so far.
        """
        for t in tensors:
            if t.is_cuda:
                t.record_stream(self.stream)

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()


class Moved:
    """What goes to the host and comes back. It holds the device's memory that a copy on its way reads or writes.

    No pass holds that memory: it goes with the graph, or with the parameter.
    """

    __slots__ = ("__weakref__", "moving", "side")

    def __init__(self, side: Side) -> None:
        self.side = side
        self.moving: torch.Tensor | None = None

    def __del__(self) -> None:
        if self.moving is not None:  # nobody waits any more
            self.side.forget([self.moving])


def _stream(device: Device) -> Any:
    """The stream of a device's copies; all contexts share it, as they share the bus."""
    return torch.cuda.Stream(device.index)


def side_of(device: torch.device, stream: Any = None) -> Side | None:
    """The side of a device whose tensors travel; None for others."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    if stream is not None and stream.device.index == index:
        return Side(device, stream)
    return Side(device, cuda_device(index).of(_stream))
