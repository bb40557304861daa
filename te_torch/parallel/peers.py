"""The core's `Peers` between GPUs of one host: memory that all ranks of a group have mapped, read by copy engines.

torch's symmetric memory maps it; NVLink multicast is never asked for. All transfers of a rank run on one stream beside
its own. They are copies of the driver, which take no multiprocessor, and words that streams write and wait for
(`te_torch/parallel/flags.py`). All that is here belongs to a group: its layers share it, and `let_go` gives it back.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_core import dtypes, env, libraries
from te_core.errors import LibraryError, UnsupportedError
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch.exchange import all_gather_object, telling
from te_torch.parallel.flags import Flags, new_file
from te_torch.parallel.watchdog import watchdog

OPERATION = "peer memory"
_DEVICES = ("cuda",)
_KINDS = 4  # of rooms that a group may have
_TURNS = 2
_ALIGNMENT = 512
_EVENTS = 64  # a handle that so many transfers follow waits for a later one
_SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # by which torch maps memory of ranks that share a GPU
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Mapped(NamedTuple):
    """Memory of one size on every rank of a group."""

    addresses: Sequence[int]  # of each rank's, as this rank sees it
    nbytes: int
    owner: torch.Tensor  # this rank's
    keeps: Any


# ------------------------------------------------------------------------------------------- whether there is any


_found: dict[Any, GroupPeers | None] = {}  # by group
_in_graphs: list[GroupPeers] = []


def peers_of(group: Any, rt: Runtime) -> GroupPeers | None:
    """What all layers over this group share; None where its GPUs cannot read each other's memory. The first call is one
    of all ranks together."""
    if rt.device.kind not in _DEVICES:
        return None
    if group not in _found:
        refuse_capture(rt, "whether the GPUs of a group can read each other's memory")
        _found[group] = _asked(group, libraries.driver(), rt.device.index)
    return _found[group]


def refuse_capture(rt: Runtime, what: str) -> None:
    """What all ranks do together is no part of a graph."""
    if libraries.driver().is_capturing(rt.stream):
        raise UnsupportedError(
            OPERATION,
            f"{what}, asked for the first time inside a CUDA graph's capture",
            "products over ranks that have overlapped before: memory is mapped by all ranks together",
            "run a step before the capture",
        )


def let_go() -> None:
    """Give all memory back, but what captured graphs use."""
    while _found:
        _, peers = _found.popitem()
        if peers is not None:
            peers.close()


def _asked(group: Any, driver: Any, device: int) -> GroupPeers | None:
    """All ranks say where they are and what they can read; why there is no peer memory is told."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    path = new_file(channels_of(size)) if rank == 0 else ""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text() if boot.exists() else str(uuid.getnode())
    told = all_gather_object(OPERATION, (path, host, _uuid(device)), group)
    reason = _against(rank, told, device)
    reasons = all_gather_object(OPERATION, reason, group)
    flags = None if any(reasons) else Flags(told[0][0], driver, device)
    all_gather_object(OPERATION, "mapped", group)
    if rank == 0:
        Path(path).unlink()
    if flags is not None:
        return GroupPeers(group, flags, driver, device)
    why = next(filter(None, reasons))
    warnings.warn(f"overlap without peer memory: {why}. Parts travel over {dist.get_backend(group)}", stacklevel=2)
    return None


def _uuid(device: int) -> str:
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


def _against(rank: int, told: Sequence[tuple[str, str, str]], device: int) -> str:
    """Why this rank cannot read the others' memory; "" where it can."""
    here = {_uuid(i): i for i in range(torch.cuda.device_count())}
    for other, (_, host, place) in enumerate(told):
        if other == rank:
            continue
        if host != told[rank][1]:
            return f"ranks {rank} and {other} are on different hosts"
        if place == told[rank][2]:
            if not env.switch(_SHARE):
                return f"ranks {rank} and {other} share a GPU"
        elif place not in here or not torch.cuda.can_device_access_peer(device, here[place]):
            return f"the GPU of rank {rank} has no access to that of rank {other}"
    return "" if os.access(told[0][0], os.R_OK | os.W_OK) else f"rank {rank} cannot read a file of rank 0"


def mapped(nbytes: int, group: Any, device: int) -> Mapped:
    """Memory of this size, made by all ranks of the group together."""
    import torch.distributed._symmetric_memory as symmetric

    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        with torch.inference_mode(False):
            buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))
        driver = libraries.driver()
        with driver.on(device):  # as `spoil` will: what that needs is loaded here, where nothing waits for another rank
            driver.fill(buffer.data_ptr(), 0xFF, nbytes, 0)
        torch.cuda.synchronize(device)  # torch fills it with zeros, maybe behind work that others do not wait for
        with telling(OPERATION, group):
            handle = symmetric.rendezvous(buffer, group=group)
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before
    addresses = list(handle.buffer_ptrs)
    addresses[dist.get_rank(group)] = buffer.data_ptr()
    return Mapped(addresses, nbytes, buffer, handle)


# ------------------------------------------------------------------------------------------- a group's memory


def channels_of(size: int) -> int:
    """How many channels a group has: announcements and ends of uses, of each room, between each two ranks."""
    return size * 2 * _KINDS * _TURNS * size


class GroupPeers:
    """One rank's rooms, and its transfers: see `te_core.layers.communicator.Peers`."""

    def __init__(self, group: Any, flags: Flags, driver: Any, device: int) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.flags, self.driver, self.device = flags, driver, device
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self._mapped: dict[str, Mapped] = {}
        self._turns: dict[str, int] = {}
        self._outgrown: list[Mapped] = []  # of captured graphs
        self._captured = False
        self._lost = ""
        own = channels_of(self.size) // self.size
        self._own = range(self.rank * own, (self.rank + 1) * own)
        self._context = driver.attach(device)
        with driver.at_first_use(device):
            self.stream, self._spoiling = driver.create_stream(), driver.create_stream()
            self._events = [driver.create_event() for _ in range(_EVENTS)]
        for kind in range(_KINDS):
            for turn in range(_TURNS):
                flags.set(*[self._channel("left", kind, turn, self.rank, to) for to in self.others])
        watchdog.watch(self)

    def _channel(self, what: str, kind: int, turn: int, source: int, to: int) -> int:
        """Those that a rank takes lie side by side."""
        where = ((to * 2 + (what == "left")) * _KINDS + kind) * _TURNS + turn
        return where * self.size + source

    def channels(self, what: str, kind: str, turn: int, source: int | None, to: int | None) -> list[int]:
        """Those from one rank to another; None: to or from each other rank."""
        number = [*self._mapped].index(kind)
        sources, tos = (self.others if rank is None else [rank] for rank in (source, to))
        return [self._channel(what, number, turn, a, b) for a in sources for b in tos]

    def room(self, rt: Runtime, kind: str, nbytes: int) -> Room:
        """See `Peers`."""
        self.check()
        found = self._mapped.get(kind)
        if found is None or found.nbytes < _TURNS * nbytes:
            found = self._map(rt, kind, nbytes)
        turn = self._turns.get(kind, 0)
        self._turns[kind] = 1 - turn
        if not self._captured and self.driver.is_capturing(rt.stream):
            self._captured = True
        with self.entered():
            self.flags.take(rt.stream, *self.channels("left", kind, turn, None, self.rank))
        return Room(self, rt, kind, turn, found)

    def _map(self, rt: Runtime, kind: str, nbytes: int) -> Mapped:
        refuse_capture(rt, f"{nbytes} bytes for each {kind} that overlaps")
        old = self._mapped.get(kind)
        if old is not None:
            with self.entered():
                self.driver.synchronize(self.stream)
                self.driver.synchronize(rt.stream)
            if self._captured:
                self._outgrown.append(old)
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._mapped[kind] = found = mapped(_TURNS * size, self.group, self.device)
        return found

    @contextmanager
    def entered(self) -> Iterator[None]:
        """In the device's context."""
        entered = self.driver.enter(self._context) if self._context else False
        try:
            yield
        finally:
            if entered:
                self.driver.leave()

    @contextmanager
    def behind(self, rt: Runtime) -> Iterator[None]:
        """For a transfer behind what this runtime has been given."""
        self.check()
        with self.entered():
            self.driver.order_streams(self.device, rt.stream, self.stream)
            yield

    def handle(self, rt: Runtime, *held: Tensor) -> Transfer:
        """Of the transfer that was asked for last."""
        event = self._events.pop(0)
        self._events.append(event)
        self.driver.record(event, self.stream)
        return Transfer(self, rt, event, held)

    def close(self) -> None:
        """Let go of the memory once all work is done."""
        if self._captured:
            _in_graphs.append(self)
            return
        self.driver.synchronize_device(self.device)
        self._mapped.clear()
        self.flags.close()
        with self.entered():
            for event in self._events:
                self.driver.destroy_event(event)
            for stream in (self.stream, self._spoiling):
                self.driver.destroy_stream(stream)

    # ----------------------------------------------------------------------------------- where a rank does not come

    def check(self) -> None:
        """Raise if a rank has waited in vain."""
        if self.flags.failed:
            ranks = dist.get_process_group_ranks(self.group)
            raise LibraryError(
                OPERATION,
                f"ranks {ranks}, of which {self._lost or 'one has waited in vain for another'}",
                "ranks that are all alive and call the same modules within UB_TIMEOUT seconds",
                "look for the first error among the other ranks' outputs; results since then are NaN",
            )

    @property
    def failed(self) -> bool:
        """Whether a rank of the group has given up."""
        return self.flags.failed

    def waiting(self) -> list[int]:
        """What streams of this rank wait for now, by numbers."""
        return self.flags.waiting(self._own)

    def fail(self, waiting: int | None) -> None:
        """Give up, because of this wait or because another rank has: the next call raises."""
        if waiting is not None:
            self._lost = f"{self.rank} has waited in vain for {waiting % self.size} (numbers in the group)"
        self.flags.fail()

    def spoil(self) -> None:
        """Fill with NaNs what ranks read of one another, and wait until it is done."""
        with self.driver.on(self.device):
            for found in [*self._mapped.values(), *self._outgrown]:
                for address in found.addresses:
                    self.driver.fill(address, 0xFF, found.nbytes, self._spoiling)
            self.driver.synchronize(self._spoiling)

    def release(self) -> None:
        """End the waits that there are now."""
        self.flags.release(self._own)


class Room:
    """One use of a room: see `te_core.layers.communicator.Room`."""

    def __init__(self, peers: GroupPeers, rt: Runtime, kind: str, turn: int, found: Mapped) -> None:
        self._peers, self._kind, self._turn = peers, kind, turn
        self._nbytes = found.nbytes // _TURNS
        self._addresses = [address + turn * self._nbytes for address in found.addresses]
        self.memory = Tensor(self._addresses[peers.rank], (self._nbytes,), dtypes.uint8, rt.device, found.owner)

    def _copy(self, rt: Runtime, to: int, source: int, t: Tensor) -> Transfer:
        peers = self._peers
        with peers.behind(rt):
            if t.nbytes:
                peers.driver.copy(to, source, t.nbytes, peers.stream)
            return peers.handle(rt, t)

    def push(self, rt: Runtime, to: int, offset: int, t: Tensor) -> Transfer:
        """See `Room` of the core, as for the others."""
        return self._copy(rt, self._addresses[to] + offset, t.ptr, t)

    def pull(self, rt: Runtime, source: int, offset: int, out: Tensor) -> Transfer:
        """As said there."""
        return self._copy(rt, out.ptr, self._addresses[source] + offset, out)

    def announce(self, rt: Runtime, to: int) -> None:
        """As said there."""
        peers = self._peers
        with peers.behind(rt):
            peers.flags.say(peers.stream, *peers.channels("announced", self._kind, self._turn, peers.rank, to))

    def await_(self, rt: Runtime, source: int) -> Transfer:
        """As said there."""
        peers = self._peers
        with peers.behind(rt):
            peers.flags.take(peers.stream, *peers.channels("announced", self._kind, self._turn, source, peers.rank))
            return peers.handle(rt)

    def leave(self, rt: Runtime) -> None:
        """As said there. A capture has to end with all its streams joined."""
        peers = self._peers
        with peers.behind(rt):
            peers.flags.say(peers.stream, *peers.channels("left", self._kind, self._turn, peers.rank, None))
            if peers.driver.is_capturing(peers.stream):
                peers.driver.order_streams(peers.device, peers.stream, rt.stream)


class Transfer:
    """A transfer on its way, and what it reads or writes."""

    __slots__ = ("_event", "_held", "_peers", "_rt")

    def __init__(self, peers: GroupPeers, rt: Runtime, event: int, held: tuple[Tensor, ...]) -> None:
        self._peers, self._rt, self._event, self._held = peers, rt, event, held

    def wait(self) -> None:
        """Later work of the runtime comes behind it."""
        peers, held, self._held = self._peers, self._held, ()
        with peers.entered():
            peers.driver.wait(self._rt.stream, self._event)
        del held
