"""The two streams of a ring over peer memory, without a GPU: who has waited for whom."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from te_core import dtypes
from te_core.layers import linear
from te_core.layers.overlap import Overlap, Way
from te_core.layers.parallel import Split
from te_core.runtime import Runtime
from te_core.tape import taped
from te_core.tape.taped import Taped
from te_core.tensor import Tensor
from tests.core import test_parallel_launches as launches
from tests.core.fake_cuda import Machine, Make
from tests.core.test_context_streams import OWN, Order
from tests.covering import covering
from tests.recordings import tapes

SIZE = launches.SIZE
COMPUTING = ("launch", "gemm", "fill")
TRANSFERS = ("push", "pull", "announce", "await", "leave")
RING, BULK = Way("ring_exchange"), Way("bulk")
RINGS = Overlap("fc", RING, RING, None, 1 << 20)
#: By how x and w are cut: what has no ring.
WAYS = {
    "column": {"bulk": Overlap("fc", None, BULK, BULK, 1 << 20)},
    "row": {"pipeline": Overlap("fc", Way("pipeline", 2), None, None, 1 << 20)},
}


class Transfer:
    """A transfer on its stream; who waits for it sees what that stream had seen by then."""

    def __init__(self, order: Order, rt: Runtime, seen: dict[int, int]) -> None:
        self.order, self.rt, self.seen = order, rt, seen

    def wait(self) -> None:
        mine = self.order.of(self.rt.stream)
        for stream, at in self.seen.items():
            mine[stream] = max(mine.get(stream, 0), at)


class Room:
    """One rank's part in a use, of which there is one rank only."""

    def __init__(self, peers: Peers, memory: Tensor) -> None:
        self.peers, self.memory = peers, memory

    def _asked(self, rt: Runtime, name: str) -> Transfer:
        transfers = rt.side("transfers")
        transfers.wait(rt)
        self.peers.machine.note(name, None, {}, transfers.stream)
        return Transfer(self.peers.order, rt, dict(self.peers.order.of(transfers.stream)))

    def push(self, rt: Runtime, *_: Any) -> Transfer:
        return self._asked(rt, "push")

    def pull(self, rt: Runtime, *_: Any) -> Transfer:
        return self._asked(rt, "pull")

    def announce(self, rt: Runtime, *_: Any) -> None:
        self._asked(rt, "announce")

    def await_(self, rt: Runtime, *_: Any) -> Transfer:
        return self._asked(rt, "await")

    def leave(self, rt: Runtime) -> None:
        self._asked(rt, "leave")


class Peers:
    """Rooms in the memory of this rank."""

    def __init__(self, machine: Machine, order: Order) -> None:
        self.machine, self.order = machine, order
        self.rooms: dict[str, Tensor] = {}

    def room(self, rt: Runtime, kind: str, nbytes: int) -> Room:
        if kind not in self.rooms:
            self.rooms[kind] = self.machine.runtime().empty((nbytes,), dtypes.uint8)
        return Room(self, self.rooms[kind])


class Layer:
    """A linear, whose calls are interpreted, or recorded and replayed; each is an event of its own."""

    def __init__(self, machine: Machine, recorded: bool) -> None:
        self.machine, self.recorded = machine, recorded

    def forward(self, rt: Runtime, *given: Any, **options: Any) -> Any:
        return self._call("forward", rt, *given, **options)

    def backward(self, rt: Runtime, *given: Any, **options: Any) -> Any:
        return self._call("backward", rt, *given, **options)

    def _call(self, name: str, rt: Runtime, *given: Any, spec: Any, **options: Any) -> Any:
        self.machine.note("call", name, {}, rt.stream)
        if self.recorded:
            return Taped(name, getattr(linear, name), spec)(rt, *given, **options)
        return getattr(linear, name)(rt, *given, spec=spec, **options)


def ringing(
    make: Make, patch: pytest.MonkeyPatch, mode: str, recipe: str | None, recorded: bool, ways: Overlap | None = RINGS
) -> tuple[Machine, Counter[str]]:
    """A step of a rank, and the kernels, products and transfers of it."""
    machine = make()
    patch.setattr(launches, "linear", Layer(machine, recorded))
    order = Order(machine, patch)
    seen: list[tuple[str, int, dict[int, int]]] = []
    note = machine.note
    patch.setattr(machine, "note", lambda *e: (note(*e), seen.append((e[0], e[3], dict(order.of(e[3])))))[0])
    peers = Peers(machine, order)
    patch.setattr(launches.Silent, "peers", lambda self, rt: peers)
    machine.seen = seen  # type: ignore[attr-defined]
    with tapes("first"):
        before = taped.COUNTS.replayed
        found = launches.launched(machine, mode, Split(mode, SIZE, True, overlap=ways), recipe)
        assert taped.COUNTS.replayed - before == 2 * recorded
    return machine, found


@covering(mode=["column", "row"], recipe=[None, "delayed", "current"], recorded=[False, True])
def test_products_take_turns(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: str, recipe: str | None, recorded: bool
) -> None:
    """Of two products of a ring the second has a stream of its own, and does not wait for the first; whatever comes
    behind the ring waits for both."""
    machine, found = ringing(make, monkeypatch, mode, recipe, recorded)
    assert found["pull"] == 1 and found["push"] == 2 and found["leave"] == 2
    seen = machine.seen  # type: ignore[attr-defined]
    products = [(i, stream, clock) for i, (kind, stream, clock) in enumerate(seen) if kind == "gemm"]
    (side,) = {stream for _, stream, _ in products} - {OWN}
    assert [stream for _, stream, _ in products] == [OWN, side, OWN, side, OWN]
    for (begin, _, first), (at, _, second) in ((products[0], products[1]), (products[2], products[3])):
        assert second[OWN] < first[OWN]  # the side has not seen the own stream's product,
        before = [clock[OWN] for kind, stream, clock in seen[:begin] if stream == OWN and kind in COMPUTING]
        assert second[OWN] >= max(before, default=0)  # but all that came before the ring
        behind = [clock for kind, stream, clock in seen[at:] if stream == OWN and kind in COMPUTING]
        assert all(clock.get(side, 0) >= second[side] for clock in behind) and behind


@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_replay_does_the_same(make: Make, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The same kernels, products and transfers, on the same streams, in the same order."""
    done = []
    for recorded in (False, True):
        machine, _ = ringing(make, monkeypatch, mode, "delayed", recorded)
        seen = machine.seen  # type: ignore[attr-defined]
        names = {stream: "transfers" for kind, stream, _ in seen if kind == "pull"} | {OWN: "own"}
        done.append([(kind, names.get(stream, "side")) for kind, stream, _ in seen if kind in (*COMPUTING, *TRANSFERS)])
    interpreted, replayed = done
    assert interpreted == replayed


@pytest.mark.parametrize("mode", ["column", "row"])
def test_what_runs_plain_by_default_is_the_plain_call(make: Make, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The table that ships is for larger layers: there is nothing of overlap in this one."""
    ring, bulk = (Way(way.method, chosen=False) for way in (RING, BULK))
    asked = {
        "column": Overlap("fc", ring, bulk, bulk, 1 << 20),
        "row": Overlap("fc", ring, ring, Way("external", chosen=False), 1 << 20),
    }
    done = []
    for ways in (asked[mode], None):
        machine, found = ringing(make, monkeypatch, mode, "delayed", True, ways)
        seen = machine.seen  # type: ignore[attr-defined]
        done.append(([(kind, stream) for kind, stream, _ in seen], found))
    assert done[0] == done[1] and not done[0][1]["push"]


@pytest.mark.parametrize(("mode", "how"), [(mode, how) for mode in WAYS for how in ("rings", *WAYS[mode])])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_capture_takes_what_streams_wait_for(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: str, how: str, recorded: bool
) -> None:
    """A stream is waited for only if it has waited for one of the call before, in a forward and in a backward."""
    machine, found = ringing(make, monkeypatch, mode, None, recorded, WAYS[mode].get(how, RINGS))
    assert found["push"] and found["leave"]
    of_call, recorded_by, waits = {OWN}, OWN, 0
    for kind, stream, _ in machine.seen:  # type: ignore[attr-defined]
        if kind == "call":
            of_call = {OWN}
        elif kind == "record":
            recorded_by = stream
        elif kind == "wait":
            assert recorded_by in of_call
            of_call.add(stream)
            waits += 1
    assert waits
