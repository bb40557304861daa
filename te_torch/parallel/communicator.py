"""The core's `Communicator` over a process group of torch: gloo on the CPU, NCCL on GPUs.

Tensors are exchanged where they lie: a collective reads and writes torch's own views of the core's memory. It is begun
on torch's current stream, which is the runtime's, and a handle's `wait` has that stream wait, not the host (gloo's has
the host wait). Until then the handle holds the tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from te_core import dtypes
from te_core.errors import UnsupportedError
from te_core.layers.communicator import Handle, Several, as_bytes
from te_core.layers.meeting import Facts, disagreement
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch.exchange import ALL_GATHER, PASSING, REDUCE_SCATTER, REDUCTIONS, all_gather_object, failed, telling
from te_torch.parallel.peers import GroupPeers, peers_of
from te_torch.parallel.symmetric import symmetric_sum
from te_torch.runtime import TO_TORCH, piece_to_torch


def view(t: Tensor) -> torch.Tensor:
    """torch's view of a dense tensor of the core, as a vector."""
    return piece_to_torch(t.reshape(t.size), TO_TORCH[t.dtype]).detach()


def moved(t: Tensor) -> torch.Tensor:
    """The same for what travels as it is: codes of FP8 as bytes, for gloo knows no such type."""
    return view(as_bytes(t) if t.dtype.itemsize == 1 else t)


class Work:
    """A collective on its way, and what it reads and writes."""

    __slots__ = ("_group", "_held", "_name", "_work")

    def __init__(self, name: str, group: Any, work: Any, *held: torch.Tensor) -> None:
        self._name, self._group, self._work, self._held = name, group, work, held

    def wait(self) -> None:
        """Have the current stream (or, with gloo, the host) wait for the result."""
        work, self._work = self._work, None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise failed(self._name, self._group, error) from error
        self._held = ()


class GroupCommunicator:
    """This process's rank of a group, as one layer has it."""

    def __init__(self, group: Any, agreed: set[str], around: Facts | None = None) -> None:
        self.group, self.agreed, self.around = group, agreed, around or {}
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.met = False

    def peers(self, rt: Runtime) -> GroupPeers | None:
        """See `Communicator`."""
        return peers_of(self.group, rt)

    def _begin(self, name: str, function: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Handle:
        try:
            work = function(*tensors, group=self.group, async_op=True, **options)
        except PASSING:
            raise
        except RuntimeError as error:
            raise failed(name, self.group, error) from error
        return Work(name, self.group, work, *tensors)

    def all_gather(self, rt: Runtime, part: Tensor, out: Tensor) -> Handle:
        """See `Communicator`."""
        return self._begin("all-gather", getattr(dist, ALL_GATHER), moved(out), moved(part))

    def reduce_scatter(self, rt: Runtime, whole: Tensor, out: Tensor) -> Handle:
        """See `Communicator`."""
        return self._begin("reduce-scatter", getattr(dist, REDUCE_SCATTER), view(out), view(whole))

    def all_reduce(self, rt: Runtime, t: Tensor, operation: str = "sum", how: str | None = None) -> Handle:
        """See `Communicator`; `how` is a `symmetric_ar_type`."""
        if how is not None:
            symmetric_sum(view(t), self.group, how)
            return Work("all-reduce", self.group, None)
        return self._begin("all-reduce", dist.all_reduce, view(t), op=REDUCTIONS[operation])

    def all_to_all(self, rt: Runtime, t: Tensor, out: Tensor) -> Handle:
        """See `Communicator`."""
        return self._begin("all-to-all", dist.all_to_all_single, moved(out), moved(t))

    def send_recv(self, rt: Runtime, t: Tensor, to: int, out: Tensor, source: int) -> Handle:
        """See `Communicator`."""
        given, taken = moved(t), moved(out)
        if to == self.rank == source:
            taken.copy_(given)
            return Work("send", self.group, None)
        moves = [
            dist.P2POp(dist.isend, given, group=self.group, group_peer=to),
            dist.P2POp(dist.irecv, taken, group=self.group, group_peer=source),
        ]
        with telling("send and receive", self.group):
            works: list[Any] = dist.batch_isend_irecv(moves)
        return Work("send and receive", self.group, Several(works), given, taken)

    def agree(self, rt: Runtime, operation: str, facts: Facts) -> None:
        """See `Communicator`: digests first, and what they are of only where they differ."""
        if rt.device.kind == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                operation,
                "the first forward of a module over ranks inside a CUDA graph's capture",
                "modules that all ranks have run together before",
                "run a step before the capture",
            )
        digest = list(hashlib.sha256(repr(facts).encode()).digest())
        # By an operation that no layer has: gloo pairs calls of one kind, whoever makes them, and ends the process
        # where their lengths differ. So a rank that alone comes here, or does not, meets nobody.
        mine = rt.tensor(digest * self.size, dtypes.uint8)
        everyone = rt.empty((self.size, len(digest)), dtypes.uint8)
        name = "comparing what the ranks of a group run"
        self._begin(name, dist.all_to_all_single, view(everyone), view(mine)).wait()
        found = rt.numpy(everyone)
        if (found != found[0]).any():
            raise disagreement(operation, all_gather_object(operation, facts, self.group))
