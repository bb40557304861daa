"""What travels beside which part of a product that overlaps, part by part."""

from __future__ import annotations

from typing import Any

import pytest

from te_core.layers.communicator import InProcessCommunicator, InProcessRanks
from te_core.ops import raw as ops
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core.peer_ranks import PeerRanks
from tests.core.test_overlap import WAYS, case_of
from tests.core.test_parallel_overlap import Handle, noted

#: `noted` has, of each rank, `events`, its number, and that of the ranks.


class Noting(InProcessCommunicator):
    """Notes transfers: from how many ranks further on something comes; sums by number."""

    sums = 0

    def send_recv(self, rt: Runtime, t: Tensor, to: int, out: Tensor, source: int) -> Any:
        return Handle(f"from{(source - self.rank) % self.size}", super().send_recv(rt, t, to, out, source))

    def all_gather(self, rt: Runtime, part: Tensor, out: Tensor) -> Any:
        return Handle("gather", super().all_gather(rt, part, out))

    def reduce_scatter(self, rt: Runtime, whole: Tensor, out: Tensor) -> Any:
        self.sums += 1
        return Handle(f"scatter{self.sums}", super().reduce_scatter(rt, whole, out))


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are noted with the rank whose rows they make, counted from this one; sums are noted, too."""

    def watch(name: str, first: str, second: str) -> None:
        function = getattr(ops, name)

        def noting(rt: Runtime, a: Any, b: Any, *rest: Any, **options: Any) -> Any:
            columns = options[first], options[second] if second == "b_columnwise" else not options[second]
            kind = {(False, False): "fprop", (False, True): "dgrad", (True, True): "wgrad"}[columns]
            out = rest[0] if rest else options["out"]
            part = ""
            memory = out.memory
            if kind != "wgrad" and out.shape[0] == noted.rows and memory is not None:
                place = (out.ptr - memory.ctypes.data) // out.nbytes
                part = str((place - noted.rank) % noted.size)
            noted.events.append(f"{kind}{part}")
            return function(rt, a, b, *rest, **options)

        monkeypatch.setattr(ops, name, noting)

    watch("gemm", "trans_a", "trans_b")
    watch("gemm_quantized", "a_columnwise", "b_columnwise")
    for name, event in (("context_sum", "place"), ("rank_sum", "sum")):
        function = getattr(ops, name)

        def adding(rt: Runtime, *given: Any, out: Tensor, event: str = event, function: Any = function) -> None:
            noted.events.append(event)
            function(rt, *given, out=out)

        monkeypatch.setattr(ops, name, adding)


class NotingRoom:
    """Notes transfers by how many ranks further on the other rank is: 0 is this one."""

    def __init__(self, room: Any) -> None:
        self.room, self.memory = room, room.memory

    def push(self, rt: Runtime, to: int, offset: int, t: Tensor) -> Any:
        return Handle(f"to{_further(to)}", self.room.push(rt, to, offset, t))

    def pull(self, rt: Runtime, source: int, offset: int, out: Tensor) -> Any:
        return Handle(f"from{_further(source)}", self.room.pull(rt, source, offset, out))

    def announce(self, rt: Runtime, to: int) -> None:
        noted.events.append(f"tell{_further(to)}")
        self.room.announce(rt, to)

    def await_(self, rt: Runtime, source: int) -> Any:
        return Handle(f"told{_further(source)}", self.room.await_(rt, source))

    def leave(self, rt: Runtime) -> None:
        noted.events.append("leave")
        self.room.leave(rt)


def _further(rank: int) -> int:
    return int((rank - noted.rank) % noted.size)


class NotingPeers(Noting):
    """The same through peer memory."""

    def peers(self, rt: Runtime) -> Any:
        return self

    def room(self, rt: Runtime, kind: str, nbytes: int) -> NotingRoom:
        noted.events.append(f"enter-{kind}")
        peers = super().peers(rt)
        assert peers is not None
        return NotingRoom(peers.room(rt, kind, nbytes))


def events(mode: str, how: str, recipe: str | None, size: int, rows: int = 128, peers: bool = False) -> str:
    """What a rank does; every rank does the same."""
    ranks, case = (PeerRanks if peers else InProcessRanks)(size), case_of(mode, recipe, size, WAYS[mode][how], rows)
    n, k = (128 * size, 256) if mode == "column" else (256, 128 * size)

    def run(comm: InProcessCommunicator) -> str:
        noted.events, noted.rank, noted.size, noted.rows = [], comm.rank, size, rows
        case.step((NotingPeers if peers else Noting)(ranks, comm.rank), n, k)
        return " ".join(noted.events)

    first, *others = ranks.run(run)
    assert all(other == first for other in others)
    return first  # type: ignore[no-any-return]


#: fprop, then dgrad and wgrad; three ranks.
GATHER = "+from1 +from2 {0}0 -from1 {0}1 -from2 {0}2"
PUSH = "{0}2 +from1 {0}1 +from2 {0}0"  # (what comes while rows go two ranks further is from one rank further)
SUM = "-from1 -from2 sum"
ORDERS = {
    ("column", "ring"): f"{GATHER.format('fprop')} +gather {PUSH.format('dgrad')} -gather wgrad {SUM}",
    ("column", "bulk"): f"{GATHER.format('fprop')} +gather dgrad +scatter1 -gather wgrad -scatter1",
    ("row", "ring"): f"{PUSH.format('fprop')} {SUM} {GATHER.format('dgrad')} wgrad",
    ("row", "pipeline"): "fprop +scatter1 fprop +scatter2 -scatter1 place -scatter2 place "
    f"{GATHER.format('dgrad')} wgrad",
}


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize(("mode", "how"), ORDERS)
def test_what_travels_beside_a_part(mode: str, how: str, recipe: str | None, interpreted: None) -> None:
    assert events(mode, how, recipe, 3) == ORDERS[mode, how]


def test_the_columns_of_a_gradient_travel_behind_its_rows(interpreted: None) -> None:
    """1x128 blocks have two copies: dgrad's rows come first, wgrad's columns beside dgrad."""
    backward = "+from1 +from1 +gather +gather dgrad0 -from1 -from1 dgrad1 -gather -gather wgrad"
    assert events("row", "ring", "block", 2) == f"fprop1 +from1 fprop0 -from1 sum {backward}"


#: The same through peer memory: the part goes into the own piece; rank r - 1, which pulls it first, is told first.
SHOW = "enter-operand +to0 tell2 tell1"
PULL = "+told1 +from1 +told2 +from2"
GATHER_THERE = f"{SHOW} {PULL} {{0}}0 -from1 {{0}}1 -from2 {{0}}2 -to0 leave"
PUSH_THERE = "enter-output {0}2 +to2 tell2 {0}1 +to1 tell1 {0}0 +told1 +told2"
SUM_THERE = "-to2 -to1 -told1 -told2 sum leave"
PIECE = "+to2{0} +to1{1} +to0"
SUM_OF_PIECES = "-to2 -to1 -to0 -told1 -told2"
ORDERS_THERE = {
    ("column", "ring"): f"{GATHER_THERE.format('fprop')} +gather {PUSH_THERE.format('dgrad')} -gather wgrad "
    f"{SUM_THERE}",
    ("column", "bulk"): f"{GATHER_THERE.format('fprop')} {SHOW} +from0 {PULL} dgrad enter-output "
    f"{PIECE.format(' tell2', ' tell1')} +told1 +told2 -from0 -from1 -from2 -to0 leave wgrad {SUM_OF_PIECES} sum leave",
    ("row", "ring"): f"{PUSH_THERE.format('fprop')} {SUM_THERE} {GATHER_THERE.format('dgrad')} wgrad",
    ("row", "pipeline"): f"enter-output fprop {PIECE.format('', '')} fprop {PIECE.format(' tell2', ' tell1')} "
    f"+told1 +told2 -to2 -to1 -to0 {SUM_OF_PIECES} sum sum leave {GATHER_THERE.format('dgrad')} wgrad",
}


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize(("mode", "how"), ORDERS_THERE)
def test_what_is_pulled_and_pushed_beside_a_part(mode: str, how: str, recipe: str | None, interpreted: None) -> None:
    assert events(mode, how, recipe, 3, peers=True) == ORDERS_THERE[mode, how]
