"""What ranks exchange, as steps: a recorded layer over ranks begins and awaits its collectives where it did.

Transfers through peer memory are such steps, too. A use of a room is a slot: which of the two rooms of its kind it is,
and so its address, each replay is told anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from te_core.runtime import Runtime
from te_core.symbols import Patch, patches, slot_of
from te_core.tensor import Tensor


class Collective:
    """A collective, or a transfer of a room, begins; its handle is held in a slot until `Awaited`."""

    __slots__ = ("comm", "handle", "name", "options", "patches", "room", "tensors")

    def __init__(
        self, name: str, of: tuple[int, int | None], handle: int, tensors: Sequence[Tensor], options: Any, bases: Any
    ) -> None:
        self.name, self.handle, self.options = name, handle, options
        self.comm, self.room = of  # the communicator, by its number; the room, by its slot
        self.tensors = [(t.shape, t.dtype, t.device, t.strides) for t in tensors]
        self.patches = patches([t.ptr for t in tensors], bases)

    def bind(self, bound: Any, rt: Runtime) -> None:
        """See `te_core.tape.tape.Step`."""
        blocks = [bound.blocks[slot] for _, slot, _ in self.patches]
        bound.run(partial(self._begin, blocks))

    def _begin(self, blocks: list[Any], rt: Runtime, executor: Any, at: Sequence[Any], held: list[Any]) -> None:
        """Begin it with this call's communicator. `blocks`: what memory its tensors are pieces of."""
        tensors = []
        for (_, slot, offset), block, (shape, dtype, device, strides) in zip(
            self.patches, blocks, self.tensors, strict=True
        ):
            owner = held[slot]
            if owner.__class__ is not Tensor:
                owner = Tensor(at[slot], block[0], block[1], device, owner)
            tensors.append(Tensor(at[slot] + offset, shape, dtype, device, owner, strides))
        begin = getattr(held[-1][self.comm] if self.room is None else held[self.room], self.name)
        if self.name == "send_recv":  # what goes and where to, what comes and where from
            (sent, coming), (to, source) = tensors, self.options
            held[self.handle] = begin(rt, sent, to, coming, source)
        elif self.room is not None:  # which rank, where in its piece, what
            held[self.handle] = begin(rt, *self.options, *tensors)
        else:
            held[self.handle] = begin(rt, *tensors, *self.options)

    def __repr__(self) -> str:
        return f"begin {self.name} t{self.handle}"


class Awaited:
    """Later steps see a collective's result. Until then its tensors belong to it, so it counts as their reader."""

    __slots__ = ("handle", "patches")

    def __init__(self, handle: int, tensors: tuple[Patch, ...]) -> None:
        self.handle, self.patches = handle, tensors

    def bind(self, bound: Any, rt: Runtime) -> None:
        """See `te_core.tape.tape.Step`."""
        bound.run(self._wait)

    def _wait(self, rt: Runtime, executor: Any, at: Sequence[Any], held: list[Any]) -> None:
        """Wait."""
        held[self.handle].wait()
        held[self.handle] = None

    def __repr__(self) -> str:
        return f"await t{self.handle}"


class Entered:
    """A use of a room begins; its slot has the memory of this rank, and what holds it is the use."""

    __slots__ = ("asked", "comm", "slot")
    patches: tuple[Patch, ...] = ()

    def __init__(self, comm: int, slot: int, *asked: Any) -> None:
        self.comm, self.slot, self.asked = comm, slot, asked

    def bind(self, bound: Any, rt: Runtime) -> None:
        """See `te_core.tape.tape.Step`."""
        bound.take_by(self.slot, self._enter)

    def _enter(self, rt: Runtime, executor: Any, at: list[Any], held: list[Any]) -> None:
        """Ask this call's communicator."""
        held[self.slot] = room = held[-1][self.comm].peers(rt).room(rt, *self.asked)
        at[self.slot] = room.memory.ptr

    def __repr__(self) -> str:
        return f"enter {self.asked[0]} room t{self.slot}"


class _Handle:
    """A collective on its way, in a recording (`recorder`: the one of recorder.py)."""

    def __init__(self, recorder: Any, begun: Collective) -> None:
        self._recorder, self._begun = recorder, begun

    def wait(self) -> None:
        """Recorded once: later waits have nothing to wait for."""
        begun, self._begun = self._begun, None  # type: ignore[assignment]
        if begun is not None:
            self._recorder.add(Awaited(begun.handle, begun.patches))


def _begun(rt: Runtime, name: str, of: tuple[int, int | None], tensors: Sequence[Tensor], *options: Any) -> _Handle:
    recorder = rt.recorder  # of the stream on which it is asked for
    step = Collective(name, of, recorder.handle(name), tensors, options, recorder.bases)
    recorder.add(step)
    return _Handle(recorder, step)


class RecordedCommunicator:
    """One rank of a group in a recording: what it is asked for becomes steps."""

    met = True  # or nothing is recorded

    def __init__(self, recorder: Any, number: int, like: Any) -> None:
        self._recorder, self._number, self._like = recorder, number, like  # its number among the objects of a call
        self.rank, self.size = like.rank, like.size

    def peers(self, rt: Any) -> RecordedPeers | None:
        """See te_core/layers/communicator.py, as for the others."""
        return None if self._like.peers(rt.real) is None else RecordedPeers(self._number)

    def _begin(self, rt: Runtime, name: str, tensors: Sequence[Tensor], *options: Any) -> _Handle:
        return _begun(rt, name, (self._number, None), tensors, *options)

    def all_gather(self, rt: Runtime, part: Tensor, out: Tensor) -> _Handle:
        """As said there."""
        return self._begin(rt, "all_gather", (part, out))

    def reduce_scatter(self, rt: Runtime, whole: Tensor, out: Tensor) -> _Handle:
        """As said there."""
        return self._begin(rt, "reduce_scatter", (whole, out))

    def all_reduce(self, rt: Runtime, t: Tensor, operation: str = "sum", how: str | None = None) -> _Handle:
        """As said there."""
        return self._begin(rt, "all_reduce", (t,), operation, how)

    def all_to_all(self, rt: Runtime, t: Tensor, out: Tensor) -> _Handle:
        """As said there."""
        return self._begin(rt, "all_to_all", (t, out))

    def send_recv(self, rt: Runtime, t: Tensor, to: int, out: Tensor, source: int) -> _Handle:
        """As said there."""
        return self._begin(rt, "send_recv", (t, out), to, source)

    def agree(self, rt: Runtime, operation: str, facts: Any) -> None:
        """Ranks that have met do not ask again."""
        raise self._recorder.refused("ranks that have not met")


class RecordedPeers:
    """One rank's memory that others read, in a recording."""

    def __init__(self, number: int) -> None:
        self._number = number

    def room(self, rt: Any, kind: str, nbytes: int) -> RecordedRoom:
        """See te_core/layers/communicator.py, as for the others."""
        memory = rt.whole.room(kind, nbytes, rt.device)
        slot = slot_of(memory.ptr)
        rt.recorder.add(Entered(self._number, slot, kind, nbytes))
        return RecordedRoom((self._number, slot), memory)


class RecordedRoom:
    """A use of a room in a recording."""

    def __init__(self, of: tuple[int, int], memory: Tensor) -> None:
        self._of, self.memory = of, memory

    def push(self, rt: Runtime, to: int, offset: int, t: Tensor) -> _Handle:
        """As said there."""
        return _begun(rt, "push", self._of, (t,), to, offset)

    def pull(self, rt: Runtime, source: int, offset: int, out: Tensor) -> _Handle:
        """As said there."""
        return _begun(rt, "pull", self._of, (out,), source, offset)

    def announce(self, rt: Runtime, to: int) -> None:
        """As said there."""
        _begun(rt, "announce", self._of, (), to)

    def await_(self, rt: Runtime, source: int) -> _Handle:
        """As said there."""
        return _begun(rt, "await_", self._of, (), source)

    def leave(self, rt: Runtime) -> None:
        """As said there."""
        _begun(rt, "leave", self._of, ())
