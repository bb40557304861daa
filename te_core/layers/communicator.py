"""What layers ask of a communication library, and ranks in one process that need none.

A `Communicator` is one rank of a group. Its operations work on dense tensors, begin at once and return a `Handle`: the
tensors belong to the operation until `wait()` has returned; later work of the runtime then sees the result. As with any
collective, all ranks of a group call the same operations with tensors of the same sizes, in the same order.

`InProcessRanks` are threads of one process over host memory: no sockets, no framework. The core's tests run on them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from te_core import dtypes
from te_core.errors import LibraryError
from te_core.layers.meeting import Facts, disagreement
from te_core.runtime import Runtime
from te_core.tensor import Tensor


class Handle(Protocol):
    """An operation on its way."""

    def wait(self) -> None:
        """Return once later work of the runtime sees the result."""


class Several:
    """Operations on their way, as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        """See `Handle`."""
        handles, self._handles = self._handles, ()
        for handle in handles:
            handle.wait()


#: The kinds of rooms (`Peers.room`): of parts of an operand, and of summands of a result.
OPERAND, OUTPUT = "operand", "output"


class Room(Protocol):
    """One use of a room, as one rank has it."""

    @property
    def memory(self) -> Tensor:
        """This rank's piece, as bytes."""

    def push(self, rt: Runtime, to: int, offset: int, t: Tensor) -> Handle:
        """The bytes of t go to this offset in the piece of rank `to`, which may be this one."""

    def pull(self, rt: Runtime, source: int, offset: int, out: Tensor) -> Handle:
        """out = what stands at this offset in the piece of rank `source`."""

    def announce(self, rt: Runtime, to: int) -> None:
        """Rank `to` may go on behind its `await_`, once all that was asked for so far is done here."""

    def await_(self, rt: Runtime, source: int) -> Handle:
        """Later transfers, and what waits for this, come behind the announcement of rank `source`."""

    def leave(self, rt: Runtime) -> None:
        """Once what was asked for so far is done, this rank reads and writes no piece, and others may write into its
        own."""


class Peers(Protocol):
    """One rank of a group whose ranks read and write each other's memory.

    A communicator may offer it (`Communicator.peers`, else None). A *room* is a piece of memory on every rank, of one
    size; offsets mean the same on all of them. One *use* of a room is the way of one tensor through the group:

        room = peers.room(rt, OPERAND, capacity)   the use begins
        room.push(rt, own rank, 0, part)           into the own piece, or into that of another rank
        room.announce(rt, rank)                    to each other rank: it may see what was done so far
        room.await_(rt, rank)                      of each other rank: what follows comes behind its announcement
        room.pull(rt, rank, 0, out)
        room.leave(rt)                             the use is over, as far as this rank is concerned

    **Order.** The transfers of a rank (push, pull, announce, await_, leave) run one after another in the order in which
    they are asked for, whatever `rt` they are asked on, each behind all that its `rt` had been given by then. They run
    beside later work of `rt`. Only `wait()` of a handle has work wait for them: later work of the `rt` on which the
    transfer was asked for. The host waits for nothing. A tensor belongs to its transfer until `wait()` of its handle,
    or of a later one.

    **Uses.** All ranks begin the same uses in the same order. In each, every rank announces once to every other rank,
    awaits it once, and leaves. There are two rooms of a kind, which uses take by turns. Work of `rt` behind `room()`,
    and so all transfers of the use, wait until every other rank has left the last use of the same room. So whoever
    writes into a room, into whichever piece, destroys nothing that is still read; and a rank that is ahead waits only
    for one that is a whole use behind.

    **Nothing waits in a circle**, not even where all work of a rank runs in the order in which it was asked for: a rank
    announces before it awaits, and leaves a use before it begins the next but one of its kind.

    Give `room` the most bytes that any use of the kind takes: memory is made when more is asked for than there is, by
    all ranks together, which is refused in the capture of a graph. What memory holds when a use begins is undefined.
    """

    def room(self, rt: Runtime, kind: str, nbytes: int) -> Room:
        """Begin a use of the next room of a kind, of at least so many bytes on each rank."""


class Communicator(Protocol):
    """One rank of a group, as one layer has it."""

    met: bool  # whether the ranks have agreed on what this layer runs
    agreed: set[str]  # on what they have agreed before, in words
    around: Facts  # what the ranks compare of the module around the layer (te_core.layers.meeting)

    def peers(self, rt: Runtime) -> Peers | None:
        """Memory of this device that its ranks read without each other's help, if they have any; all of them ask alike,
        and get it or do not."""

    @property
    def rank(self) -> int:
        """Its number, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_gather(self, rt: Runtime, part: Tensor, out: Tensor) -> Handle:
        """out = the parts of all ranks behind one another, by rank; bytes are moved, whatever their type."""

    def reduce_scatter(self, rt: Runtime, whole: Tensor, out: Tensor) -> Handle:
        """out = this rank's part of the sum of all ranks' tensors."""

    def all_reduce(self, rt: Runtime, t: Tensor, operation: str = "sum", how: str | None = None) -> Handle:
        """t = the sum ("sum") or the maximum ("max") of all ranks' tensors. `how` names a way of computing it."""

    def all_to_all(self, rt: Runtime, t: Tensor, out: Tensor) -> Handle:
        """Part i of t goes to rank i, and comes from there as part i of out; all parts are of one size."""

    def send_recv(self, rt: Runtime, t: Tensor, to: int, out: Tensor, source: int) -> Handle:
        """t goes to rank `to`, while out comes from rank `source`."""

    def agree(self, rt: Runtime, operation: str, facts: Facts) -> None:
        """Raise on every rank, with what each has, where the ranks' facts differ. Waits for all of them."""


class Groups(NamedTuple):
    """Whom a composed layer works with: ranks that share its weights, and ranks that share its sequences."""

    tensor: Communicator | None = None
    context: Communicator | Sequence[Communicator] | None = None  # two of a2a+p2p (te_core.layers.context)


def groups_of(comm: Communicator | Groups | None) -> Groups:
    """The same of what a composed layer is given: of a communicator alone, ranks that share its weights."""
    return comm if isinstance(comm, Groups) else Groups(comm)


def as_bytes(t: Tensor) -> Tensor:
    """The memory of a dense tensor as a vector of bytes: what travels."""
    return Tensor(t.ptr, (t.nbytes,), dtypes.uint8, t.device, t)


_done = Several(())  # what was complete when it was called


class InProcessRanks:
    """A group of `size` threads; `of(rank)` is the communicator of each. One that fails ends all that wait for it."""

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout)
        self._given: list[Any] = [None] * size
        #: Of each rank, the operations so far and the bytes that it gave to each.
        self.log: list[list[tuple[str, int]]] = [[] for _ in range(size)]

    def of(self, rank: int) -> InProcessCommunicator:
        """The communicator of a rank."""
        return InProcessCommunicator(self, rank)

    def peers_of(self, rank: int) -> Peers | None:
        """Memory that ranks read without each other's help: none here; tests have ranks with it."""
        return None

    @property
    def broken(self) -> bool:
        """Whether a rank has failed."""
        return self._barrier.broken

    def run(self, function: Callable[[InProcessCommunicator], Any]) -> list[Any]:
        """What the function returns on each rank, in a thread of its own; the first error, if one raises."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                results[rank] = function(self.of(rank))
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            self._barrier.reset()
            raise errors[0]
        return results

    def exchange(self, operation: str, rank: int, given: Any) -> list[Any]:
        """What each rank gave, by rank. All of them have to have read it before one goes on: see `leave`."""
        self._given[rank] = given
        self._wait(operation)
        return list(self._given)

    def leave(self, operation: str) -> None:
        """The rank has read what it wanted."""
        self._wait(operation)

    def _wait(self, operation: str) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise LibraryError(
                operation,
                "a rank that did not come",
                "ranks that are all alive and call the same operations",
                "look for the first error among the other ranks",
            ) from None


class InProcessCommunicator:
    """One thread of `InProcessRanks`."""

    def __init__(self, ranks: InProcessRanks, rank: int) -> None:
        self._ranks, self.rank, self.size = ranks, rank, ranks.size
        self.met, self.agreed = False, set[str]()
        self.around: Facts = {}

    def peers(self, rt: Runtime) -> Peers | None:
        """See `Communicator`."""
        return self._ranks.peers_of(self.rank)

    def _collective(self, name: str, t: Tensor, fill: Callable[[list[np.ndarray[Any, Any]]], None]) -> Handle:
        self._ranks.log[self.rank].append((name, t.nbytes))
        values = t.numpy()
        fill(self._ranks.exchange(name, self.rank, values))
        self._ranks.leave(name)
        return _done

    def all_gather(self, rt: Runtime, part: Tensor, out: Tensor) -> Handle:
        """See `Communicator`."""
        return self._placed("all_gather", part, out, lambda values: values)

    def _placed(self, name: str, t: Tensor, out: Tensor, part: Callable[[Any], Any]) -> Handle:
        target = as_bytes(out).numpy().reshape(self.size, -1)

        def fill(given: list[np.ndarray[Any, Any]]) -> None:
            for i, values in enumerate(given):
                target[i] = part(values)

        return self._collective(name, as_bytes(t), fill)

    def reduce_scatter(self, rt: Runtime, whole: Tensor, out: Tensor) -> Handle:
        """See `Communicator`."""
        target = out.numpy()

        def fill(given: list[np.ndarray[Any, Any]]) -> None:
            parts = [values.reshape(self.size, *target.shape)[self.rank] for values in given]
            target[...] = _sum(parts)

        return self._collective("reduce_scatter", whole, fill)

    def all_reduce(self, rt: Runtime, t: Tensor, operation: str = "sum", how: str | None = None) -> Handle:
        """See `Communicator`."""
        target = t.numpy()

        def fill(given: list[np.ndarray[Any, Any]]) -> None:
            made = _sum(given) if operation == "sum" else np.fmax.reduce(given)
            self._ranks.leave("all_reduce")
            target[...] = made

        return self._collective("all_reduce", t, fill)

    def all_to_all(self, rt: Runtime, t: Tensor, out: Tensor) -> Handle:
        """See `Communicator`."""
        return self._placed("all_to_all", t, out, lambda values: values.reshape(self.size, -1)[self.rank])

    def send_recv(self, rt: Runtime, t: Tensor, to: int, out: Tensor, source: int) -> Handle:
        """See `Communicator`; here all ranks of the group take part."""
        self._ranks.log[self.rank].append(("send_recv", t.nbytes))
        given = self._ranks.exchange("send_recv", self.rank, (to, as_bytes(t).numpy()))
        if given[source][0] == self.rank:
            as_bytes(out).numpy()[...] = given[source][1]
        self._ranks.leave("send_recv")
        return _done

    def agree(self, rt: Runtime, operation: str, facts: Facts) -> None:
        """See `Communicator`."""
        everyone = self._ranks.exchange("agree", self.rank, facts)
        self._ranks.leave("agree")
        if any(theirs != facts for theirs in everyone):
            raise disagreement(operation, everyone)


def _sum(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The sum in float32, rounded once."""
    total = np.zeros(parts[0].shape, np.float32)
    for part in parts:
        total += part.astype(np.float32)
    return total.astype(parts[0].dtype)
