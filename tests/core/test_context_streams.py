"""The two streams of a ring: who has waited for whom, and when memory is let go of, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from te_core.layers.context import ring
from te_core.layers.context.schedule import Context
from te_core.runtime import Runtime
from tests.core.context_cases import Case
from tests.core.fake_cuda import Machine, Make
from tests.core.test_context_launches import launched, spec_of
from tests.core.test_context_parallel import LAYOUTS, judge
from tests.covering import covering

OWN = 5  # the stream of the call


#: Of kernels on the steps' streams, the arguments that they only read, or raise by atomic operations.
READ = {
    "attention_rows": "0123",
    "attention_lengths": "0123",
    "dequantize": "01",
    "attention_amax": "1234",
    "context_sum": "01",
}


def writes(kind: str, what: Any, name: str, names: Any) -> bool:
    """Whether an event changes what it is given by this name."""
    if kind == "cudnn":
        grads = {"dq", "dk", "dv"}
        return name in (grads if "dy" in names else {"out", "stats"}) or name[-5:] in ("_amax", "space")
    return kind != "copy" and not (kind == "launch" and name in READ.get(what[0], ()))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rings have two streams."""
    monkeypatch.setattr(ring, "two_streams", lambda *_: True)


class Order:
    """What is sure to be done before what: of each stream, how far it has seen the others."""

    def __init__(self, machine: Machine, patch: Any) -> None:
        self.machine = machine
        self.clock: dict[int, dict[int, int]] = {}  # by stream
        self.signal: dict[int, int] = {}
        self.used: dict[int, dict[tuple[int, bool], int]] = {}  # by block: of each stream its last use, and last write
        self.raced: list[str] = []  # who works on a block while another stream does
        self.early: list[int] = []  # blocks that are given back while a stream works on them
        note, free = machine.note, machine.lib._cuMemFreeAsync
        patch.setattr(machine, "note", lambda *event: (note(*event), self.see(*event)))
        patch.setattr(machine.lib, "_cuMemFreeAsync", lambda at, stream: (self.freed(at, stream), free(at, stream))[1])

    def of(self, stream: int) -> dict[int, int]:
        return self.clock.setdefault(stream, {stream: 0})

    def see(self, kind: str, what: Any, addresses: dict[str, int], stream: int) -> None:
        mine = self.of(stream)
        mine[stream] += 1
        if kind == "record":
            self.signal = dict(mine)
        elif kind == "wait":
            for other, at in self.signal.items():
                mine[other] = max(mine.get(other, 0), at)
        for name, address in addresses.items():
            found = self.machine.arena.find(address) if address else None
            if found is None:
                continue
            used, written = self.used.setdefault(found[0].serial, {}), writes(kind, what, name, addresses)
            for (other, wrote), at in used.items():
                if at > mine.get(other, 0) and (wrote or written):
                    self.raced.append(f"{kind} {what} {name}")
            used[stream, written] = mine[stream]

    def freed(self, address: int, stream: int) -> None:
        serial = self.machine.arena.blocks[address].serial
        if any(at > self.of(stream).get(other, 0) for (other, _), at in self.used.get(serial, {}).items()):
            self.early.append(serial)


CASES = [("p2p", 2, 1, 0), ("p2p", 2, 1, 1), ("p2p", 4, 1, 2), ("p2p", 5, 1, 0), ("a2a+p2p", 4, 2, 3)]


@covering(
    case=CASES, form=["sbhd", "bshd", "thd"], mask=["causal", "no_mask"], fp8=[False, True], tapes=["never", "first"]
)
def test_streams_wait_and_memory_stays(
    make: Make, two: None, monkeypatch: pytest.MonkeyPatch, case: Any, form: str, mask: str, fp8: bool, tapes: str
) -> None:
    """What a stream writes, no other one reads before; nothing is let go of while a stream works on it."""
    if form == "thd":
        mask, fp8 = {"causal": "padding_causal", "no_mask": "padding"}[mask], False
    machine = make()
    order, (mode, size, inner, rank) = Order(machine, monkeypatch), case
    launched(machine, spec_of(form, mask), Context(mode, size, inner), rank, fp8=fp8, tapes=tapes)
    streams = {event.stream for event in machine.log if event.kind == "cudnn"}
    assert len(streams) == 2 and OWN not in streams
    assert not order.raced and not order.early


def test_who_has_two_streams(make: Make) -> None:
    machine = make()
    found = launched(machine, spec_of("sbhd", "causal"), Context("p2p", 4), 0)
    assert {event.stream for event in machine.log if event.kind == "cudnn"} == {OWN} and not found["wait"]
    rows = [1 << n for n in (17, 18, 19, 20)]
    assert [ring.two_streams(4, n) for n in rows] == [False, True, True, False]
    assert not any(ring.two_streams(2, n) for n in rows)


def test_the_second_stream_is_the_callers(make: Make, two: None) -> None:
    machine = make()
    launched(machine, spec_of("sbhd", "causal"), Context("p2p", 4, stream="0x1f"), 0)
    by_stream = [event.stream for event in machine.log if event.kind == "cudnn"]
    assert by_stream[1::2] == [31] * 4 and by_stream[::2] == [by_stream[0]] * 4 and by_stream[0] not in (OWN, 31)


def test_an_error_waits_for_both_streams(make: Make, two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = make()
    order = Order(machine, monkeypatch)
    finish, waits = ring.Turns._finish, []

    def fails(turns: ring.Turns, left: int) -> None:
        if turns.number == 2:
            wait = Runtime.wait
            monkeypatch.setattr(Runtime, "wait", lambda rt, other: (waits.append(other), wait(rt, other))[1])
            raise KeyError("in between")
        finish(turns, left)

    monkeypatch.setattr(ring.Turns, "_finish", fails)
    with pytest.raises(KeyError, match="in between"):
        launched(machine, spec_of("sbhd", "causal"), Context("p2p", 2), 0)
    assert len(waits) == 2 and not order.early


TERMS: list[dict[str, Any]] = [{}, {"softmax": "learnable"}, {"recompute": True, "max_logit": True}]


@covering(choice=[("p2p", 2, 1), ("p2p", 3, 1), ("p2p", 8, 1), ("a2a+p2p", 6, 2)], layout=LAYOUTS, terms=TERMS)
def test_steps_that_are_finished_later(monkeypatch: pytest.MonkeyPatch, choice: Any, layout: Any, terms: Any) -> None:
    """Behind the beginning of the next one, as on two streams: the sums stay the same."""
    made = ring.Turns.__init__

    def with_two(turns: ring.Turns, *given: Any) -> None:
        made(turns, *given)
        turns.ahead = 1

    monkeypatch.setattr(ring.Turns, "__init__", with_two)
    (mode, size, inner), (form, mask) = choice, layout
    bias = {"bias": "post_scale_bias"} if mode == "p2p" and "padding" not in mask else {}
    judge(Case(mode=mode, size=size, inner=inner, form=form, mask=mask, lengths="odd", **terms, **bias))
