"""How what overlaps travels between ranks: by calls of the communicator, or through memory that peers read.

Rings, pipelines and bulk transfers (te_core/layers/overlap.py) are written once, for a `Carrier`. `Calls` works with
every communicator; what its calls carry is the library's business. `PeerMemory` needs `Communicator.peers`: a rank
writes a part into its room, and the others pull it; summands are pushed into the rooms of the ranks that add them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from te_core.dtypes import DType
from te_core.layers.communicator import OPERAND, OUTPUT, Communicator, Handle, Peers, Room, Several, as_bytes
from te_core.ops import raw as ops
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_STEP = 256  # what pieces begin at a multiple of in a room
_SPARE = 16 * _STEP  # for what rounding up and the scales of small parts take


def room_bytes(kind: str, capacity: int, size: int, dtype: DType) -> int:
    """The bytes of a rank's piece of a room, where a whole tensor has up to `capacity` elements of an activation dtype:
    a part of an operand, or all ranks' summands of a part of a result. There are two rooms of either kind.
    """
    return dtype.nbytes(-(-capacity // size) if kind == OPERAND else capacity) + _SPARE


def order(comm: Communicator) -> list[int]:
    """The other ranks as a ring comes to them: r + 1, r + 2, ..."""
    return [(comm.rank + step) % comm.size for step in range(1, comm.size)]


def lanes(carrier: Carrier, rt: Runtime) -> tuple[Runtime, Runtime]:
    """The streams of a ring's products, by turns. Both see what rt has done so far, and not what it does from here."""
    side = carrier.side(rt)
    if side is not rt:
        side.wait(rt)
    return rt, side


def join(carrier: Carrier, rt: Runtime) -> None:
    """rt sees what was done on the other lane."""
    side = carrier.side(rt)
    if side is not rt:
        rt.wait(side)


def columns_of(out: Tensor, splits: int, number: int) -> Tensor:
    """One of so many pieces of the columns of a matrix, as a view of it."""
    width = out.shape[1] // splits
    ptr = out.ptr + out.dtype.nbytes(number * width)
    return Tensor(ptr, (out.shape[0], width), out.dtype, out.device, out, out.row_major_strides())


# ------------------------------------------------------------------------------------ calls of the communicator


class Calls:
    """By `send_recv`, `all_gather` and `reduce_scatter`. All work is the call's stream's, which their handles know."""

    name = "nccl"  # by which the fastest method is looked up
    through = ""  # what reports add to the name of a method

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def side(self, rt: Runtime) -> Runtime:
        """The stream with which rt takes turns for the products of a ring; rt itself where there is none."""
        return rt

    def parts(self, rt: Runtime, pieces: Sequence[Tensor], places: Mapping[int, Sequence[Tensor]]) -> _Called:
        """Have a part go to all other ranks, and theirs come, by rank, in the order in which they are multiplied."""
        comm, coming = self.comm, {}
        for source in order(comm):
            to = (2 * comm.rank - source) % comm.size
            coming[source] = Several(
                [
                    comm.send_recv(rt, as_bytes(sent), to, as_bytes(target), source)
                    for sent, target in zip(pieces, places[source], strict=True)
                ]
            )
        return _Called(coming)

    def gather(self, rt: Runtime, pairs: Sequence[tuple[Tensor, Tensor]]) -> Handle:
        """Begin to put each whole together of all ranks' parts: (part, whole)."""
        return Several([self.comm.all_gather(rt, as_bytes(part), as_bytes(out)) for part, out in pairs])

    def summands(self, rt: Runtime, out: Tensor, splits: int = 1) -> _CalledSummands:
        """Begin the sum of a result, into out [m, N]; `splits`: pieces of its columns."""
        return _CalledSummands(rt, self.comm, out, splits)


class _Called:
    """All other ranks' parts of an operand on their way, by calls."""

    def __init__(self, coming: Mapping[int, Handle]) -> None:
        self._coming = coming

    def wait(self, source: int) -> None:
        """Later work of the lane that multiplies the part of this rank sees it."""
        self._coming[source].wait()

    def end(self, rt: Runtime) -> None:
        """All parts have been waited for, and rt has waited for the lanes."""


class _CalledSummands:
    """The summands of a result [m, N] on their way from all ranks. The library sums pieces; what a ring brings is added
    here."""

    def __init__(self, rt: Runtime, comm: Communicator, out: Tensor, splits: int) -> None:
        self._rt, self._comm, self._out, self._splits = rt, comm, out, splits
        self._slots: Tensor | None = None  # [p, m, N] of a ring
        self._coming: list[tuple[Handle, Tensor | None]] = []

    @property
    def own(self) -> Tensor:
        """Where the product of the own rows goes, in a ring."""
        return self._slot(self._comm.rank)

    def _slot(self, rank: int) -> Tensor:
        if self._slots is None:
            self._slots = self._rt.empty((self._comm.size, *self._out.shape), self._out.dtype)
        return self._slots.rows(rank, rank + 1).reshape(*self._out.shape)

    def send(self, rt: Runtime, to: int, made: Tensor) -> None:
        """The rows [m, N] of rank `to`, in a ring: to the farthest rank first."""
        source = (2 * self._comm.rank - to) % self._comm.size
        self._coming.append((self._comm.send_recv(rt, made, to, self._slot(source), source), None))

    def piece(self, rt: Runtime, number: int, made: Tensor) -> None:
        """All rows [M, N / splits] of one piece of the columns, in their order."""
        whole = self._splits == 1
        part = self._out if whole else rt.empty((self._out.shape[0], made.shape[1]), made.dtype)
        self._coming.append((self._comm.reduce_scatter(rt, made, part), None if whole else part))

    def arrive(self, rt: Runtime) -> None:
        """All was sent, and rt has waited for the lanes."""

    def wait(self) -> None:
        """See `Handle`: adds them."""
        coming, self._coming = self._coming, []
        for number, (handle, part) in enumerate(coming):
            handle.wait()
            if part is not None:
                ops.context_sum(self._rt, part, None, out=columns_of(self._out, self._splits, number))
        slots, self._slots = self._slots, None
        if slots is not None:
            ops.rank_sum(self._rt, slots, out=self._out)


# --------------------------------------------------------------------------------------------- peer memory


class PeerMemory:
    """Through rooms. Products of a ring take turns between the call's stream and another one, so that the tail of one
    fills with the head of the next."""

    name, through = "peer memory", ", through peer memory"

    def __init__(self, comm: Communicator, peers: Peers, capacity: int, dtype: DType) -> None:
        self.comm, self.peers = comm, peers
        self._bytes = {kind: room_bytes(kind, capacity, comm.size, dtype) for kind in (OPERAND, OUTPUT)}

    def side(self, rt: Runtime) -> Runtime:
        """See `Calls`."""
        return rt.side("ring")

    def use(self, rt: Runtime, kind: str) -> _Use:
        """Begin a use of a room."""
        return _Use(self.comm, self.peers.room(rt, kind, self._bytes[kind]))

    def parts(self, rt: Runtime, pieces: Sequence[Tensor], places: Mapping[int, Sequence[Tensor]]) -> _Use:
        """See `Calls`."""
        use = self.use(rt, OPERAND)
        use.show(rt, pieces)
        streams = lanes(self, rt)
        for number, source in enumerate(order(self.comm), 1):
            use.fetch(streams[number % 2], source, places[source])
        return use

    def gather(self, rt: Runtime, pairs: Sequence[tuple[Tensor, Tensor]]) -> Handle:
        """See `Calls`."""
        use = self.use(rt, OPERAND)
        use.show(rt, [part for part, _ in pairs])
        for source in (self.comm.rank, *order(self.comm)):
            cut = [as_bytes(out) for _, out in pairs]
            sizes = [part.nbytes for part, _ in pairs]
            use.fetch(rt, source, [out.rows(source * n, (source + 1) * n) for out, n in zip(cut, sizes, strict=True)])
        return _Gathered(rt, use, self.comm)

    def summands(self, rt: Runtime, out: Tensor, splits: int = 1) -> _PushedSummands:
        """See `Calls`."""
        return _PushedSummands(rt, self, out, splits)


class _Use:
    """One use of a room of operands: each rank's part lies in its own piece."""

    def __init__(self, comm: Communicator, room: Room) -> None:
        self.comm, self.room = comm, room
        self._offsets: list[int] = []
        self._shown: Handle = Several(())
        self._coming: dict[int, Handle] = {}

    def show(self, rt: Runtime, pieces: Sequence[Tensor]) -> None:
        """Write the own part, and tell the others."""
        at = 0
        for piece in pieces:
            self._offsets.append(at)
            at += -(-piece.nbytes // _STEP) * _STEP
        rank = self.comm.rank
        self._shown = Several(
            [self.room.push(rt, rank, o, piece) for o, piece in zip(self._offsets, pieces, strict=True)]
        )
        for other in reversed(order(self.comm)):  # rank r - 1 fetches this part first
            self.room.announce(rt, other)

    def fetch(self, rt: Runtime, source: int, places: Sequence[Tensor]) -> None:
        """Have the part of a rank come."""
        if source != self.comm.rank:
            self.room.await_(rt, source)
        pulled = [self.room.pull(rt, source, o, place) for o, place in zip(self._offsets, places, strict=True)]
        self._coming[source] = Several(pulled)

    def wait(self, source: int) -> None:
        """See `_Called`."""
        self._coming[source].wait()

    def end(self, rt: Runtime) -> None:
        """See `_Called`."""
        self._shown.wait()
        self.room.leave(rt)


class _Gathered:
    """All parts on their way to one stream."""

    def __init__(self, rt: Runtime, use: _Use, comm: Communicator) -> None:
        self._rt, self._use, self._comm = rt, use, comm

    def wait(self) -> None:
        """See `Handle`."""
        for source in (self._comm.rank, *order(self._comm)):
            self._use.wait(source)
        self._use.end(self._rt)


class _PushedSummands:
    """In the own piece of a room: [splits, p, m, N / splits], by the ranks that they come from."""

    def __init__(self, rt: Runtime, carrier: PeerMemory, out: Tensor, splits: int) -> None:
        self._rt, self._carrier, self._comm, self._out, self._splits = rt, carrier, carrier.comm, out, splits
        self._room = carrier.use(rt, OUTPUT).room
        self._pushed: list[Handle] = []
        self._beside = False  # whether the other lane has pushed
        self._come: list[Handle] = []

    def _slots(self, number: int) -> Tensor:
        """The summands of a piece [p, m, N / splits]."""
        out, memory = self._out, self._room.memory
        shape = self._comm.size, out.shape[0], out.shape[1] // self._splits
        place = memory.ptr + number * out.dtype.nbytes(shape[0] * shape[1] * shape[2])
        return Tensor(place, shape, out.dtype, out.device, memory)

    @property
    def own(self) -> Tensor:
        """See `_CalledSummands`."""
        rank = self._comm.rank
        return self._slots(0).rows(rank, rank + 1).reshape(*self._out.shape)

    def _push(self, rt: Runtime, to: int, number: int, made: Tensor) -> None:
        at = (number * self._comm.size + self._comm.rank) * made.nbytes
        self._beside |= rt is not self._rt
        self._pushed.append(self._room.push(rt, to, at, made))

    def send(self, rt: Runtime, to: int, made: Tensor) -> None:
        """See `_CalledSummands`."""
        self._push(rt, to, 0, made)
        self._room.announce(rt, to)

    def piece(self, rt: Runtime, number: int, made: Tensor) -> None:
        """See `_CalledSummands`."""
        m = self._out.shape[0]
        for to in (*reversed(order(self._comm)), self._comm.rank):
            self._push(rt, to, number, made.rows(to * m, (to + 1) * m))
            if number == self._splits - 1 and to != self._comm.rank:
                self._room.announce(rt, to)

    def arrive(self, rt: Runtime) -> None:
        """See `_CalledSummands`."""
        self._come = [self._room.await_(rt, source) for source in order(self._comm)]

    def wait(self) -> None:
        """See `_CalledSummands`."""
        rt = self._rt
        pushed, self._pushed = self._pushed, []
        for handle in pushed:
            handle.wait()
        if self._beside:  # a capture refuses a wait for a stream outside of the capture
            join(self._carrier, rt)
        for handle in self._come:
            handle.wait()
        for number in range(self._splits):
            ops.rank_sum(rt, self._slots(number), out=columns_of(self._out, self._splits, number))
        self._room.leave(rt)


#: How parts and summands travel, as one rank has it.
Carrier = Calls | PeerMemory
Summands = _CalledSummands | _PushedSummands


def carrier_of(rt: Runtime, comm: Communicator, capacity: int, dtype: DType) -> Carrier:
    """How what overlaps travels in this group: whole tensors have up to so many elements."""
    peers = comm.peers(rt)
    return Calls(comm) if peers is None else PeerMemory(comm, peers, capacity, dtype)
