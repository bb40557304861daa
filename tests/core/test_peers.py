"""Memory that ranks of one process read and write: order, turns of rooms, and what goes wrong."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from te_core import dtypes
from te_core.layers.communicator import OPERAND, OUTPUT, InProcessCommunicator
from te_core.runtime import Runtime
from tests.core.peer_ranks import PeerRanks
from tests.covering import covering

RT = Runtime.cpu()


def use(
    comm: InProcessCommunicator, kind: str, value: int, leave: bool = True, entered: threading.Event | None = None
) -> list[Any]:
    """All parts of one use, in which each rank has its number plus a value."""
    room, others = peers_of(comm).room(RT, kind, 64), [i for i in range(comm.size) if i != comm.rank]
    if entered is not None:
        entered.set()
    part = RT.tensor(np.full(4, value + comm.rank, np.float32))
    pushed = room.push(RT, comm.rank, 16, part)
    for other in others:
        room.announce(RT, other)
    found = [RT.empty((4,), dtypes.float32) for _ in range(comm.size)]
    handles = [pushed, room.pull(RT, comm.rank, 16, found[comm.rank])]
    for other in others:
        room.await_(RT, other)
        handles.append(room.pull(RT, other, 16, found[other]))
    for handle in handles:
        handle.wait()
    if leave:
        room.leave(RT)
    return [RT.numpy(t)[0] for t in found]


def peers_of(comm: InProcessCommunicator) -> Any:
    return comm.peers(RT)


@covering(size=[2, 3, 4])
def test_each_rank_reads_all_pieces(size: int) -> None:
    ranks = PeerRanks(size)
    found = ranks.run(lambda comm: [use(comm, kind, 10 * n) for n in range(5) for kind in (OPERAND, OUTPUT)])
    wanted = [[10 * n + rank for rank in range(size)] for n in range(5) for _ in range(2)]
    assert found == [wanted] * size
    assert ranks.log[0] == [("pull", 16)] * (10 * (size - 1))  # what stays on the rank does not count


def test_a_rank_that_is_ahead_waits_for_the_use_before_the_last() -> None:
    """Rank 1 stays in the first use: rank 0 goes through the second, and not into the third."""
    ranks, entered, left = PeerRanks(2), threading.Event(), threading.Event()

    def run(comm: InProcessCommunicator) -> list[Any]:
        if comm.rank == 1:
            first = use(comm, OPERAND, 0, leave=False)
            second = use(comm, OPERAND, 10)
            assert not entered.wait(0.2)
            left.set()
            peers_of(comm).ranks.say("the end", OPERAND, 0, 1, 0)
            return [first, second, use(comm, OPERAND, 20)]
        found = [use(comm, OPERAND, 0), use(comm, OPERAND, 10)]
        third = use(comm, OPERAND, 20, entered=entered)
        assert left.is_set()
        return [*found, third]

    assert ranks.run(run) == [[[0, 1], [10, 11], [20, 21]]] * 2
