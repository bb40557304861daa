"""Which calls share a tape: two that differ in anything that a recording depends on do not, all others do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.layers.linear import Needs, Sink
from te_core.ops import raw
from te_core.runtime import ByteAllocator, HostAllocator, Runtime
from te_core.tape import taped, walk
from te_core.tape.taped import Taped
from te_core.tensor import Tensor
from tests.core import tape_cases
from tests.core.fake_cuda import B200, H200, Machine, Make
from tests.core.tape_cases import ALL, MLP, Linear, Maker, needed
from tests.core.tape_more_cases import Attention, Norm, Rope, Softmax
from tests.core.tape_proof import Call, Done, Round, Tapes, compare, run, without_scratch
from tests.recordings import tapes

Build = Callable[[Runtime], Round]


class Pair(NamedTuple):
    """Two calls of one function that differ; `forward`: its forward does, else its backward does."""

    one: Build
    other: Build
    forward: bool = True


def changed(build: Build, change: Callable[[Tensor], Tensor | None], *names: str) -> Build:
    """The same with other pieces of these names in its quantized input."""

    def other(rt: Runtime) -> Round:
        made = build(rt)
        for name in names:
            setattr(made.forward.args[0], name, change(getattr(made.forward.args[0], name)))
        return made

    return other


def no_piece(piece: Tensor) -> None:
    """It is not there."""


QUANTIZED = Linear("current", rows=64)
#: Squares, whose pieces lie on boundaries all of them: nothing but the pieces tells these apart.
SQUARE = Linear("current", rows=64, n=64, needs=Needs(False, True, True))
BLOCKS, ORDERED = Linear("block", rows=64, x="both"), Linear("mxfp8", rows=64, x="both")
FROZEN = replace(QUANTIZED, needs=ALL._replace(input=False))
PAIRS = {
    "shape": Pair(Linear(), Linear(rows=32)),
    "shape of a weight": Pair(Linear(), Linear(n=80)),
    "shape of a mask": Pair(Softmax(mask=(2, 1, 16, 64)), Softmax(mask=(1, 1, 16, 64))),
    "dtype": Pair(Norm(), Norm(gamma=dtypes.float32)),
    "stride": Pair(Rope(), Rope(strided=True)),
    "presence": Pair(Linear(), Linear(bias=False)),
    "presence of a term": Pair(Softmax(), Softmax(padded=True)),
    "presence of a gradient": Pair(Rope(split=True), Rope(split=True, some=True), forward=False),
    "presence of positions": Pair(Rope(), Rope(starts=True)),
    "alignment": Pair(Linear(shift=4), Linear(shift=2)),
    "alignment of one": Pair(Linear(), Linear(shift=8, only=1)),
    "alignment of another one": Pair(Linear(shift=8, only=1), Linear(shift=8, only=2)),
    "alignment of a gradient": Pair(Linear(), Linear(shift=8, only=5), forward=False),
    "alignment above a vector's": Pair(Linear(shift=16), Linear(shift=32)),
    "a quantized weight": Pair(QUANTIZED, replace(QUANTIZED, weight="both")),
    "copies of a weight": Pair(replace(QUANTIZED, weight="both"), replace(QUANTIZED, weight="rows")),
    "a quantized input": Pair(QUANTIZED, replace(QUANTIZED, x="rows")),
    "copies of an input": Pair(replace(QUANTIZED, x="both"), replace(QUANTIZED, x="rows")),
    "format of an input": Pair(replace(QUANTIZED, x="rows"), replace(QUANTIZED, x="rows", x_rule="grad")),
    "which copy of a gradient": Pair(replace(SQUARE, dy="rows"), replace(SQUARE, dy="columns"), forward=False),
    "which scales of an input are swizzled": Pair(
        changed(ORDERED, no_piece, "rowwise_swizzled"), changed(ORDERED, no_piece, "columnwise_swizzled")
    ),
    "a quantized gradient": Pair(QUANTIZED, replace(QUANTIZED, dy="both"), forward=False),
    "ready": Pair(QUANTIZED, replace(QUANTIZED, ready="both")),
    "copies that are ready": Pair(replace(FROZEN, ready="both"), replace(FROZEN, ready="rows")),
    "ready in a recomputation": Pair(
        MLP("current", checkpoint=True), MLP("current", checkpoint=True, ready="both"), forward=False
    ),
    "maxima": Pair(Linear("delayed"), Linear("delayed", recorded=False)),
    "counters": Pair(QUANTIZED, replace(QUANTIZED, nonfinite=True)),
    "a sink": Pair(Linear(), Linear(sink="fp32"), forward=False),
    "dtype of a sink": Pair(Linear(sink="bf16"), Linear(sink="fp32"), forward=False),
    "accumulation": Pair(Linear(sink="fp32"), Linear(sink="fp32+"), forward=False),
    "release": Pair(MLP(release=True), MLP(release=False), forward=False),
    "lengths": Pair(Attention(form="thd"), Attention(form="thd", gaps=True)),
}


def shared(machine: Machine, pair: Pair, runtimes: tuple[Runtime, Runtime]) -> list[list[Done]]:
    """Both calls, recorded by one function, twice, each compared with what runs without a tape."""
    tapes, found = Tapes(), []
    for build, rt in [*zip(pair[:2], runtimes, strict=True)] * 2:
        run(machine, rt, tapes, build, "never")
        one = run(machine, rt, tapes, build, "never")
        machine.elsewhere()
        done = run(machine, rt, tapes, build, "first")
        for a, b in zip(one, done, strict=True):
            compare(a, without_scratch(b, a))
        found.append(done)
    assert not machine.faults
    return found


#: Pairs that differ in what another pair differs in.
ALIKE = {
    "shape of a weight",
    "shape of a mask",
    "presence of a term",
    "presence of positions",
    "alignment of a gradient",
    "copies of a weight",
    "a quantized gradient",
    "copies that are ready",
    "ready in a recomputation",
    "dtype of a sink",
}
assert set(PAIRS) >= ALIKE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in ALIKE else []) for name in PAIRS]
)
def test_another_call_has_another_tape(make: Make, name: str) -> None:
    """It is recorded, and both are found again; and each replays what it does."""
    machine, pair = make(B200 if "swizzle" in name else H200), PAIRS[name]
    which = 0 if pair.forward else 1
    rt = machine.runtime()
    assert pair.one(rt).forward.spec == pair.other(rt).forward.spec, "specs alone tell these apart"
    found = shared(machine, pair, (rt, rt))
    assert [done[which].count.recorded for done in found] == [1, 1, 0, 0]
    assert all(d.count.replayed == 1 for done in found for d in done)


@pytest.mark.parametrize(
    ("wrong", "piece"),
    [
        (lambda t: t.reshape(t.size), "columnwise_scale"),
        (lambda t: Tensor(t.ptr, t.shape, dtypes.uint8, t.device, t.owner), "columnwise"),
    ],
    ids=["shape", "dtype"],
)
def test_a_recording_hides_no_wrong_piece(make: Make, wrong: Any, piece: str) -> None:
    """A quantized weight one of whose pieces has another shape or dtype is refused, also where its like is recorded."""
    machine, tapes = make(H200), Tapes()
    for _ in range(2):
        assert run(machine, machine.runtime(), tapes, BLOCKS, "first")
    with pytest.raises(ArgumentError, match=piece):
        run(machine, machine.runtime(), tapes, changed(BLOCKS, wrong, piece), "first")


@pytest.mark.parametrize("most", [1, 4])
def test_numbers_of_states_are_never_given_again(make: Make, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Also where there were so many that the older ones were forgotten: what is known by those is then made again."""
    monkeypatch.setattr(walk, "_MOST_NUMBERS", most)
    monkeypatch.setattr(walk, "_numbers", {})
    machine = make()
    rt = machine.runtime()
    found = shared(machine, PAIRS["maxima"], (rt, rt))
    again = int(most == 1)  # a state is made for each call, and numbered as the one before only where that is known
    assert [done[0].count.recorded for done in found] == [1, 1, again, again]
    kept, known = Maker(rt), []
    for gemms in range(1, 2 * most + 2):
        known.append(walk.facts_of_scales(kept.scales(gemms), rt.device).number)
        assert len(walk._numbers) <= most
    assert len(set(known)) == len(known)


def test_scales_in_the_order_of_products(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantized weight that gains them needs no launch that makes them."""
    machine, tapes, case = make(B200), Tapes(), Linear("mxfp8", rows=64, weight="both")
    rt = machine.runtime()
    launches = []
    for swizzled in (True, False, True, False):
        monkeypatch.setattr(tape_cases, "SWIZZLED", swizzled)
        done = run(machine, rt, tapes, case, "first")
        launches.append((len(done[0].events), done[0].count.recorded))
    assert launches[0][0] == launches[1][0] - 1 and launches[2:] == [(n, 0) for n, _ in launches[:2]]


@pytest.mark.parametrize("build", [Linear("current"), MLP("delayed"), Attention(packing="qkv"), Rope(strided=True)])
def test_an_equal_call_has_the_same_tape(make: Make, build: Build) -> None:
    """Other memory, another stream, another runtime of the device: none of these is in a key."""
    machine, tapes = make(), Tapes()
    first = machine.runtime(5)
    for number, rt in enumerate((first, first, machine.runtime(5), machine.runtime(9), first.fresh())):
        machine.elsewhere()
        done = run(machine, rt, tapes, build, "first")
        assert [d.count.recorded for d in done] == [int(not number)] * 2
    assert len(taped.tapes()) == 2


def test_a_tensor_of_another_device_is_refused_as_ever(make: Make) -> None:
    """No tape stands between a wrong tensor and its error."""
    machine, tapes = make(devices=2), Tapes()
    here, there = machine.runtime(index=0), machine.runtime(index=1)
    run(machine, here, tapes, Linear(), "first")
    call = Linear()(here).forward
    words = []
    for place in range(3):
        args = [*call.args]
        args[place] = Linear()(there).forward.args[place]
        for setting in ("never", "first"):
            taped.set_when(setting)
            with pytest.raises(ArgumentError, match="cuda:1") as error:
                tapes.of(call)(here, *args, **call.options)
            words.append(str(error.value))
    assert words[::2] == words[1::2]


def test_results_that_share_blocks_or_do_not(make: Make) -> None:
    machine = make()
    rt = machine.runtime()
    found = shared(machine, Pair(Linear("current"), Linear("current")), (rt, rt.apart()))
    assert [[d.count.recorded for d in done] for done in found] == [[1, 1], [1, 1], [0, 0], [0, 0]]
    forwards = [tape.slots for tape in taped.tapes() if "forward" in tape.what]
    blocks = [sum(slot.kind == "memory" and slot.name != "temporaries" for slot in slots) for slots in forwards]
    assert blocks[1] == blocks[0] + 2, "the copies of x, and those of w"


def test_what_an_allocator_promises(make: Make) -> None:
    machine = make()
    rt = machine.runtime()
    machine.arena.grain, driver = 16, machine.driver
    machine.allocator = lambda device: ByteAllocator(device, partial(driver.allocate, 0), partial(driver.free, 0))
    other = machine.runtime()
    assert (rt.alignment, other.alignment) == (256, 16)
    machine.arena.grain, tapes = 256, Tapes()
    found = [run(machine, one, tapes, Linear(), "first") for one in (rt, other, rt, other)]
    assert [[d.count.recorded for d in done] for done in found] == [[1, 1], [1, 1], [0, 0], [0, 0]]
    planned = {plan.spec.alignment for tape in taped.tapes() for plan in tape.keeps}
    assert planned == {16, 256}


def test_each_spec_has_its_own(make: Make) -> None:
    """Of equal arguments: which gradients are wanted stands in the spec."""
    machine = make()
    rt = machine.runtime()
    tapes: list[Any] = [(Tapes(), replace(Linear("current"), needs=needs)) for needs in needed()]
    for known in (False, True):
        for own, case in tapes:
            done = run(machine, rt, own, case, "first")
            assert all(d.count.recorded == (not known) for d in done)
    assert len(taped.tapes()) == 2 * len(tapes) - 1  # where none is wanted there is no backward


def _sum(rt: Runtime, x: Tensor, *, spec: Any) -> Tensor:
    return raw.add(rt, x, x)  # type: ignore[no-any-return]


def test_what_is_met_once_takes_no_tapes_place() -> None:
    """However many shapes come by: one that comes again is replayed."""
    rt = Runtime.cpu(HostAllocator())
    function, often = Taped("sum", _sum, None), rt.zeros((2, 3), tape_cases.FP32)
    with tapes("second"):
        for _ in range(2):
            function(rt, often)
        for n in range(2 * taped._MOST_TAPES):
            function(rt, rt.zeros((1, n + 1), tape_cases.FP32))
        before = taped.COUNTS.replayed
        function(rt, often)
        assert taped.COUNTS.replayed == before + 1


@pytest.mark.parametrize("kind", ["queue", "stranger", "another runtime"])
def test_what_cannot_be_recorded_says_why(make: Make, kind: str) -> None:
    """And runs, each time, without being recorded again."""
    machine = make()
    rt = machine.runtime()
    call = Linear()(rt).forward
    wanted = {
        "queue": "weight gradients that are computed later",
        "stranger": "an argument of type Stranger",
        "another runtime": "a runtime of its own, or work on the host",
    }[kind]
    queue: list[Any] = []
    options = {"sinks": (Sink(None, False, queue),)} if kind == "queue" else {}
    options |= {"stranger": Stranger()} if kind == "stranger" else {}
    function = Taped("strange", partial(_strange, call, kind), call.spec)
    taped.set_when("first")
    for number in range(3):
        with machine.noting() as events:
            function(rt, *call.args, **call.options, **options)
        assert events and dict(taped.COUNTS.interpreted) == {wanted: number + 1}
    assert not taped.tapes() and not taped.COUNTS.replayed


@pytest.mark.parametrize("name", ["copy_to_host", "copy_from_host", "stream", "order"])
def test_what_waits_for_the_device_is_not_recorded(make: Make, name: str) -> None:
    """Of a backend that a layer asks for it itself (the runtime's own ways there are refused before)."""
    rt = make().runtime()
    call = Linear()(rt).forward

    def function(rt: Runtime, *args: Any, spec: Any, **options: Any) -> Any:
        assert callable(getattr(rt.backend, name))
        return call.function(rt, *args, spec=spec, **options)

    taped.set_when("first")
    Taped("curious", function, call.spec)(rt, *call.args, **call.options)
    assert dict(taped.COUNTS.interpreted) == {f"{name} in a layer": 1} and not taped.tapes()


class Stranger:
    """An argument that no key knows."""


def _strange(call: Call, kind: str, rt: Runtime, *args: Any, spec: Any, **options: Any) -> Any:
    for name in ("stranger", "sinks"):
        options.pop(name, None)
    if kind == "another runtime":
        rt = rt.fresh()
    return call.function(rt, *args, spec=spec, **options)
