"""Ranks in one process that read and write each other's memory (`te_core.layers.communicator.Peers`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from te_core.errors import LibraryError
from te_core.layers.communicator import Handle, InProcessRanks, Peers, Room, as_bytes
from te_core.runtime import Runtime
from te_core.tensor import Tensor, from_numpy


class PeerRanks(InProcessRanks):
    """Threads of one process that offer peer memory: each has one more thread, which does its transfers in order.

    A room is filled with NaNs when its use begins, so that nobody lives on what stood there. `before` is called before
    each transfer with the rank and the transfer's name: tests hold one up there.
    """

    def __init__(self, size: int, timeout: float = 30.0, before: Callable[[int, str], None] | None = None) -> None:
        super().__init__(size, timeout)
        self.timeout, self.before = timeout, before
        self.changed = threading.Condition()
        #: (kind, turn): each rank's piece, and how many ranks have begun a use of it.
        self.pieces: dict[tuple[str, int], list[np.ndarray[Any, Any]]] = {}
        self.begun: dict[tuple[str, int], int] = {}
        #: (what, kind, turn, source, to): announcements that nobody has awaited yet, and uses that were left.
        self.said: set[tuple[str, str, int, int, int]] = set()
        self._peers = [_ThreadPeers(self, rank) for rank in range(size)]

    def peers_of(self, rank: int) -> Peers:
        """See `InProcessRanks`."""
        return self._peers[rank]

    def others(self, rank: int) -> list[int]:
        """All ranks but this one."""
        return [other for other in range(self.size) if other != rank]

    def say(self, what: str, kind: str, turn: int, source: int, to: int) -> None:
        """An announcement, which has to be taken before the next of its kind comes."""
        with self.changed:
            said = what, kind, turn, source, to
            if said in self.said:
                raise self.lost(f"{what} of {kind} {turn} by rank {source}", f"that rank {to} has not awaited")
            self.said.add(said)
            self.changed.notify_all()

    def take(self, what: str, kind: str, turn: int, source: int, to: int) -> None:
        """Wait for an announcement; it counts once."""
        said = what, kind, turn, source, to
        with self.changed:
            end = time.monotonic() + self.timeout
            while said not in self.said:
                if self.broken or time.monotonic() > end:
                    raise self.lost(f"{what} of {kind} {turn} by rank {source}", f"that rank {to} waits for")
                self.changed.wait(0.05)
            self.said.remove(said)

    def use(self, kind: str, turn: int, nbytes: int) -> list[np.ndarray[Any, Any]]:
        """The pieces of a room; whoever comes first into a use clears it. (All have left the use before.)"""
        key = kind, turn
        with self.changed:
            count = self.begun.get(key, 0)
            self.begun[key] = count + 1
            pieces = self.pieces.get(key)
            if pieces is None or pieces[0].size < nbytes:
                pieces = self.pieces[key] = [np.empty(nbytes, np.uint8) for _ in range(self.size)]
            if count % self.size == 0:
                for piece in pieces:
                    piece[:] = 0xFF
            return pieces

    @staticmethod
    def lost(got: str, what: str) -> LibraryError:
        """Ranks that do not do the same."""
        return LibraryError(
            "peer memory", f"{got} {what}", "ranks that all run the same calls", "look for the first error of a rank"
        )


class _ThreadPeers:
    """A rank's uses of rooms, and its thread."""

    def __init__(self, ranks: PeerRanks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self._turns: dict[str, int] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._error: BaseException | None = None

    def room(self, rt: Runtime, kind: str, nbytes: int) -> Room:
        """See `Peers`."""
        count = self._turns.get(kind, 0)
        self._turns[kind] = count + 1
        turn = count % 2
        if count >= 2:  # nobody has left the first two yet
            for other in self.ranks.others(self.rank):
                self.ranks.take("the end", kind, turn, other, self.rank)
        return _ThreadRoom(self, kind, turn, self.ranks.use(kind, turn, nbytes))

    def transfer(self, name: str, function: Callable[[], None]) -> _Transfer:
        """Ask for a transfer behind those before; after an error there are no more."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1)

        def run() -> None:
            if self._error is not None:
                raise self._error
            try:
                if self.ranks.before is not None:
                    self.ranks.before(self.rank, name)
                function()
            except BaseException as error:
                self._error = error
                raise

        return _Transfer(self._worker.submit(run))


class _Transfer:
    """A transfer on its way."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """The host is what works here."""
        self._future.result()


class _ThreadRoom:
    """One rank's part in one use."""

    def __init__(self, peers: _ThreadPeers, kind: str, turn: int, pieces: list[np.ndarray[Any, Any]]) -> None:
        self._peers, self._ranks, self._rank = peers, peers.ranks, peers.rank
        self._where, self._pieces = (kind, turn), pieces
        self.memory = from_numpy(pieces[peers.rank])

    def _moved(self, name: str, rank: int, offset: int, nbytes: int) -> np.ndarray[Any, Any]:
        """The place in a rank's piece; what goes to or comes from others is noted."""
        if rank != self._rank:
            self._ranks.log[self._rank].append((name, nbytes))
        place = self._pieces[rank][offset : offset + nbytes]
        assert offset >= 0 and place.size == nbytes, (name, self._where, offset, nbytes)
        return place

    def push(self, rt: Runtime, to: int, offset: int, t: Tensor) -> Handle:
        """See `Room`."""
        place = self._moved("push", to, offset, t.nbytes)
        return self._peers.transfer("push", lambda: np.copyto(place, as_bytes(t).numpy()))

    def pull(self, rt: Runtime, source: int, offset: int, out: Tensor) -> Handle:
        """See `Room`."""
        place = self._moved("pull", source, offset, out.nbytes)
        return self._peers.transfer("pull", lambda: np.copyto(as_bytes(out).numpy(), place))

    def announce(self, rt: Runtime, to: int) -> None:
        """See `Room`."""
        said = "the announcement", *self._where, self._rank, to
        self._peers.transfer("announce", lambda: self._ranks.say(*said))

    def await_(self, rt: Runtime, source: int) -> Handle:
        """See `Room`."""
        said = "the announcement", *self._where, source, self._rank
        return self._peers.transfer("await", lambda: self._ranks.take(*said))

    def leave(self, rt: Runtime) -> None:
        """See `Room`."""

        def left() -> None:
            for other in self._ranks.others(self._rank):
                self._ranks.say("the end", *self._where, self._rank, other)

        self._peers.transfer("leave", left)
