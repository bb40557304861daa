"""When a tape is made and when it is run: what a recording touches, what a failed one leaves, captures, devices,
threads, and what goes away between the two. On a machine that is not there (`fake_cuda.py`)."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from te_core import dtypes
from te_core.backends.cuda import gemm_run
from te_core.errors import ArgumentError, LibraryError
from te_core.kernels import loader
from te_core.plan_cache import PlanCache
from te_core.runtime import Runtime
from te_core.tape import taped
from te_core.tape.recorder import Owner, Recorder, record
from te_core.tape.tape import Drop, Tape
from te_core.tape.taped import FAILED, Taped
from te_core.tape.walk import NotRecordedError
from tests.core.covering_lists import covering_lists
from tests.core.fake_cuda import Machine, Make
from tests.core.tape_cases import MLP, Linear
from tests.core.tape_more_cases import Attention
from tests.core.tape_proof import Call, Done, Round, Tapes, compare, made, run, without_scratch
from tests.threads import ends, switching, together

FP8 = Attention(packing="qkv", fp8=True, heads=4, groups=4, d=128)
BUILDS: dict[str, Callable[[Runtime], Round]] = {
    "linear": Linear("current", sink="fp32+"),
    "mlp": MLP("delayed", activation="swiglu"),
    "checkpointed mlp": MLP("block", checkpoint=True),
    "nvfp4": Linear("nvfp4", normed="RMSNorm"),
    "attention": Attention(packing="qkv", core={"right": 0, "padded": True}),
    "fp8 attention": FP8,
}
each_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
#: For what no build does in a way of its own.
some_builds = pytest.mark.parametrize(
    "build",
    [
        pytest.param(build, id=name, marks=[] if name in ("checkpointed mlp", "nvfp4") else pytest.mark.full)
        for name, build in BUILDS.items()
    ],
)


def recorded(rt: Runtime, call: Call) -> Tape:
    """The tape of a call, which is not run."""
    return record(rt, call.name, partial(call.function, spec=call.spec), (call.args, call.options), 256)


def alike(one: list[Done], other: list[Done]) -> None:
    """What ran is the same."""
    for a, b in zip(one, other, strict=True):
        compare(a, without_scratch(b, a))


# -------------------------------------------------------------------------------------------------- recording


#: What planning and the looking up of an executor may ask the driver for: nothing that runs, waits or takes memory.
HARMLESS = {
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
}


@covering_lists(each_build, pytest.mark.parametrize("planned", [False, True]))
def test_a_recording_launches_allocates_and_waits_for_nothing(make: Make, build: Any, planned: bool) -> None:
    machine, tapes = make(), Tapes()
    rt = machine.runtime()
    if planned:
        run(machine, rt, tapes, build, "never")
    begins = build(rt)
    outputs, saved = made(machine, rt, tapes.of(begins.forward), begins.forward, "never").result
    for call in (begins.forward, begins.backward(outputs, saved)):
        blocks, asked, held = len(machine.arena.sizes), len(machine.lib.log), machine.kept()
        with machine.noting() as events:
            tape = recorded(rt, call)
        assert not events and len(machine.arena.sizes) == blocks and machine.kept() == held
        assert set(machine.lib.log[asked:]) <= HARMLESS
        assert tape.steps and not machine.faults


class Failing:
    """A layer's function that fails halfway through its recording, and runs otherwise, or fails in another way."""

    def __init__(self, call: Call, interpreted: Exception | None) -> None:
        self.call, self.interpreted = call, interpreted

    def __call__(self, rt: Runtime, *args: Any, **options: Any) -> Any:
        result = self.call.function(rt, *args, **options)
        if rt.recorder is not None:
            raise ValueError("halfway")
        if self.interpreted is not None:
            raise self.interpreted
        return result


@some_builds
def test_a_recording_that_fails_leaves_no_tape(make: Make, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call runs as it always has, and says why it was not recorded; nothing of the recording stays."""
    machine, tapes = make(), Tapes()
    rt = machine.runtime()
    for _ in range(2):
        one = run(machine, rt, tapes, build, "never")[:1]
    before = machine.kept()
    call = build(rt).forward
    failing = Taped(call.name, Failing(call, None), call.spec)
    found = made(machine, rt, failing, call, "first")
    assert not taped.tapes() and found.count.replayed == found.count.recorded == 0
    assert [reason.startswith(FAILED) for reason in found.count.interpreted] == [True]
    compare(one[0], found)
    del found, call, failing
    assert machine.kept() == before and not machine.faults
    monkeypatch.setattr(taped, "COUNTS", taped.Counts())  # as asked for


def test_an_owner_that_is_half_made_goes_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt comes anywhere, also before its slot is noted."""
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    owner: Any = Owner.__new__(Owner)
    assert not hasattr(owner, "recorder")
    owner.slot = 3
    del owner
    recorder = Recorder(Runtime.cpu(), 64)
    owner = Owner(2, recorder)
    with pytest.raises(NotRecordedError):
        owner.data_ptr()
    del owner
    assert not told and recorder.ends == {2: 0}


def test_the_error_of_a_call_is_the_interpreted_ones(make: Make) -> None:
    machine = make()
    rt = machine.runtime()
    call = Linear("current")(rt).forward
    failing = Taped(call.name, Failing(call, KeyError("interpreted")), call.spec)
    taped.set_when("first")
    for _ in range(2):
        with pytest.raises(KeyError, match="interpreted"):
            failing(rt, *call.args, **call.options)
    assert not taped.tapes() and not taped.COUNTS.interpreted and not taped.COUNTS.replayed


def test_wrong_arguments_are_refused_as_ever(make: Make) -> None:
    """The same words, nothing launched, and the same again where a tape of right ones is there."""
    machine, tapes, words = make(), Tapes(), []
    rt = machine.runtime()
    for setting in ("never", "first", "first"):
        call = Linear("delayed")(rt).forward
        x, w, *rest = call.args
        wrong = call._replace(args=(x, w.rows(0, 40).reshape(20, 128), *rest))
        with machine.noting() as events, pytest.raises(ArgumentError) as error:
            made(machine, rt, tapes.of(wrong), wrong, setting)
        words.append((str(error.value), len(events)))
        assert not taped.COUNTS.interpreted and not taped.COUNTS.replayed
        made(machine, rt, tapes.of(call), call, setting)
    assert words[0] == words[1] == words[2]


@some_builds
def test_a_tape_knows_its_peak(make: Make, build: Any) -> None:
    """The most bytes that a replay takes at once, as an allocator counts them; less where its caller gives some up."""
    machine, tapes = make(), Tapes()
    rt = machine.runtime()
    run(machine, rt, tapes, build, "first")
    done = run(machine, rt, tapes, build, "first")
    for tape, found in zip(taped.tapes(), done, strict=True):
        gives_up = any(isinstance(step, Drop) and step.given for step in tape.steps)
        assert found.peak <= tape.peak if gives_up else found.peak == tape.peak


# -------------------------------------------------------------------------------------------------- captures


@pytest.mark.parametrize("capturing", [False, True])
def test_nothing_is_tuned_in_a_capture(make: Make, monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    """A recording plans as any call does: with autotuning its products are timed, but never in a capture."""
    monkeypatch.setenv("TE_CORE_AUTOTUNE", "1")
    machine, build = make(), Linear("current")
    rt, tapes = machine.runtime(6), Tapes()
    machine.lib.captured = {6} if capturing else set()
    done = run(machine, rt, tapes, build, "first")
    kinds = {event.kind for event in machine.log}
    timed = {"record", "synchronize", "copy"} & kinds
    assert timed == (set() if capturing else {"record", "copy"}) and not machine.faults
    assert all(d.count == taped.Counts(1, 1) for d in done)
    plans = [p for tape in taped.tapes() for p in tape.keeps if isinstance(p, gemm_run.LtPlan)]
    assert plans and all(("timing" in p.source) is not capturing for p in plans)


@some_builds
def test_a_call_that_is_met_again_in_a_capture(make: Make, monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    """It was tuned when it was met outside, and is recorded with the plans of then. It is replayed here and there."""
    monkeypatch.setenv("TE_CORE_AUTOTUNE", "1")
    machine, tapes = make(), Tapes()
    rt = machine.runtime(6)
    for _ in range(2):
        one = run(machine, rt, tapes, build, "never")
    met = run(machine, rt, tapes, build, "second")
    assert [d.count for d in met] == [taped.Counts(interpreted=Counter({"met for the first time": 1}))] * 2
    for captured, recorded in (({6}, 1), ({6}, 0), (set(), 0)):
        machine.lib.captured, known = captured, len(rt.plans)
        done = run(machine, rt, tapes, build, "second")
        assert [d.count for d in done] == [taped.Counts(1, recorded)] * 2 and len(rt.plans) == known
        alike(one, done)
    assert len(taped.tapes()) == 2 and not machine.faults
    plans = [p for tape in taped.tapes() for p in tape.keeps if isinstance(p, gemm_run.LtPlan)]
    assert all("timing" in plan.source for plan in plans)
    assert {id(plan) for plan in plans} <= {id(plan) for plan in rt.plans.values()}


def test_a_capture_has_scratch_memory_of_its_own(make: Make) -> None:
    """A tape that was recorded outside is replayed in a capture, and the other way round."""
    machine, tapes = make(), Tapes()
    rt = machine.runtime(6)
    run(machine, rt, tapes, FP8, "first")
    blocks = []
    for captured in (set(), {6}, set()):
        machine.lib.captured = captured
        fresh = rt.fresh() if captured else rt
        done = run(machine, fresh, tapes, FP8, "first")
        assert all(d.count == taped.Counts(1) for d in done)
        blocks.append(scratch_blocks(e for d in done for e in d.events))
        if captured:
            kept = fresh
    assert blocks[0] == blocks[2] and not blocks[0] & blocks[1] and kept is not rt


def scratch_blocks(events: Any) -> set[int]:
    """The blocks of scratch memory that events were given."""
    return {place.serial for event in events for _, place in event.places if place is not None and place.scratch}


# -------------------------------------------------------------------------------------------------- devices


@covering_lists(each_build, pytest.mark.parametrize("current", [0, 1000, 1001]))
def test_each_device_has_its_context_and_its_tape(make: Make, build: Any, current: int) -> None:
    """Of two devices: whichever the thread has chosen stays chosen, also where a step fails."""
    machine, tapes = make(devices=2), Tapes()
    machine.lib.stack[-1] = current
    for index in (0, 1, 0):
        rt = machine.runtime(index=index)
        run(machine, rt, tapes, build, "never")
        one = run(machine, rt, tapes, build, "never")
        first, second = (run(machine, rt, tapes, build, "first") for _ in range(2))
        alike(one, first)
        alike(one, second)
        assert {e.context for d in (*first, *second) for e in d.events} == {1000 + index}
        assert machine.lib.stack == [current]
    assert len(taped.tapes()) == 4 and not machine.faults
    machine.lib.fails["alloc"] = 2
    with pytest.raises(LibraryError, match="allocate"):
        call = one[0].call
        tapes.of(call)(rt, *call.args, **call.options)
    assert machine.lib.stack == [current]


def test_a_replay_sets_its_kernels_up_on_their_device(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that asks for more shared memory than one may without saying so, and that was recorded before it ran."""
    monkeypatch.setattr(loader, "_SHARED_LIMIT", 0)
    machine, tapes = make(devices=2), Tapes()
    for index in (0, 1):
        machine.lib.stack[-1] = 1001 - index  # the thread has chosen the other one
        first = run(machine, machine.runtime(index=index), tapes, Linear("delayed"), "first")
        assert all(done.count == taped.Counts(1, 1) for done in first)
    assert not machine.faults


# -------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), 2])
@some_builds
def test_one_tape_in_many_threads(make: Make, build: Any, devices: int) -> None:
    """Eight threads with two streams on each device, none of which writes where another one does. What was let go of
    is as good as poisoned: the machine gives no address twice, and notes where one is used that is nobody's."""
    machine, tapes = make(devices=devices), Tapes()
    one = []
    for index in range(devices):
        rt = machine.runtime(index=index)
        one.append([run(machine, rt, tapes, build, setting) for setting in ("never", "never", "first")][1])
    runtimes = {(index, stream): machine.runtime(stream, index) for stream in (20, 21) for index in range(devices)}
    behind = threading.Barrier(8)

    def work() -> list[Any]:
        done = [(where, run(machine, runtimes[where], tapes, build, "first")) for where in (*runtimes, *runtimes)]
        behind.wait()
        return done

    with switching():
        found = [done for of_thread in together(*[work] * 8) for done in of_thread]
    assert len(found) == 32 * devices and len(taped.tapes()) == 2 * devices
    owners: dict[int, set[Any]] = {}
    for (index, stream), done in found:
        for a, b in zip(one[index], done, strict=True):
            assert all((event.stream, event.context) == (stream, 1000 + index) for event in b.events)
            events = [event._replace(stream=5) for event in b.events]
            compare(a, without_scratch(replace(b, events=events), a))
            for event in b.events:
                for block in scratch_blocks([event]):
                    owners.setdefault(block, set()).add((event.thread, index, stream))
    assert all(len(users) == 1 for users in owners.values()), "scratch memory of two threads, devices or streams"
    assert all(len(users) == 1 for users in machine.lt.users.values()), "descriptors of two threads"
    assert not machine.faults, machine.faults[:3]


def test_what_a_thread_leaves_goes_to_its_device(make: Make) -> None:
    """The next thread replays with handles and descriptors of an earlier one, on each device with that one's."""
    machine, tapes, build = make(devices=2), Tapes(), MLP("delayed")
    runtimes, handles = [machine.runtime(index=index) for index in (0, 1)], []

    def work() -> None:
        for rt in runtimes:
            run(machine, rt, tapes, build, "first")

    for _ in range(3):
        ends(work)
        gc.collect()  # the thread's own
        handles.append(sorted(machine.lt.handles.values()))
    assert handles == [[1000, 1001]] * 3 and not machine.faults


def test_threads_that_record_at_once_agree(make: Make) -> None:
    """Several may record the same call; each replays a tape of it, and one stays."""
    machine, tapes, build = make(), Tapes(), MLP("current")
    rt = machine.runtime()
    for _ in range(2):
        one = run(machine, rt, tapes, build, "never")
    behind = threading.Barrier(4)

    def work() -> list[Done]:
        done = run(machine, rt, tapes, build, "first")
        behind.wait()
        return done

    with switching():
        found = together(*[work] * 4)
    assert len(taped.tapes()) == 2 and not machine.faults
    for done in found:
        alike(one, done)


# -------------------------------------------------------------------------------------------------- what goes away


def names_of_scratch(done: list[Done]) -> set[str]:
    """The scratch memory that calls use."""
    return {place.scratch for d in done for e in d.events for _, place in e.places if place is not None} - {""}


@some_builds
def test_scratch_memory_may_be_outgrown(make: Make, build: Any) -> None:
    """Between the recording and a replay it moves: the replay is given the new one; and one that is too small grows."""
    machine, tapes = make(), Tapes()
    rt = machine.runtime()
    for _ in range(2):
        one = run(machine, rt, tapes, build, "never")
    run(machine, rt, tapes, build, "first")
    names = names_of_scratch(one)
    for name in names:
        old = machine.arena.find(rt.workspace(name, 1))
        new = rt.workspace(name, 64 << 20, zeroed=name == "attention maxima")
        assert old is not None and old[0].start != new
    now = {name: machine.arena.find(rt.workspace(name, 1)) for name in names}
    done = run(machine, rt, tapes, build, "first")
    alike(one, done)
    used = scratch_blocks(e for d in done for e in d.events)
    assert used <= {place[0].serial for place in now.values() if place is not None}
    small = machine.runtime()
    for name in names:
        small.workspace(name, 1, zeroed=name == "attention maxima")
    alike(one, run(machine, small, tapes, build, "first"))
    assert not machine.faults


def test_scratch_memory_is_asked_for_in_full(make: Make) -> None:
    """A tape asks for the most that a call asks for under a name, wherever in it: here for the weight's maxima."""
    machine, tapes = make(), Tapes()
    build = Linear("current", rows=64, k=512, n=4096)
    rt = machine.runtime()
    for _ in range(2):
        one = run(machine, rt, tapes, build, "never")
    run(machine, rt, tapes, build, "first")
    for tape, done in zip(taped.tapes(), one, strict=True):
        asked = {slot.name: slot.nbytes for slot in tape.slots if slot.kind == "scratch"}
        assert asked == done.asked
    assert one[0].asked["amax"] > 4 * 64, "of the input there are fewer"


def test_descriptors_may_be_evicted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor keeps a few, and a tape those of its products. With the tape they go."""
    machine, tapes, build = make(), Tapes(), MLP("delayed")
    rt = machine.runtime()
    for _ in range(2):
        one = run(machine, rt, tapes, build, "never")
    monkeypatch.setattr(gemm_run, "_PREPARED", 1)
    rt.executor().gemms._prepared.clear()
    before = machine.lt.counts["descriptor"]
    for _ in range(3):
        alike(one, run(machine, rt, tapes, build, "first"))
        rt.executor().gemms._prepared.clear()
    assert machine.lt.counts["descriptor"] == before + 6  # of six products
    assert len(machine.lt.made) == 6 * 4  # of each a descriptor and three layouts
    taped.forget()
    gc.collect()
    assert not machine.lt.made


class Interrupting:
    """Does something in the middle of a call: when the machine notes this event."""

    def __init__(self, machine: Machine, at: int, act: Callable[[], None]) -> None:
        self._note, self._left, self._act, self.machine = machine.note, at, act, machine
        machine.note = self.note  # type: ignore[method-assign]

    def note(self, *args: Any) -> None:
        """As the machine, and it happens."""
        self._note(*args)
        self._left -= 1
        if self._left == 0:
            self.machine.note = self._note  # type: ignore[method-assign]
            self._act()


@some_builds
def test_tapes_and_plans_may_be_evicted(make: Make, build: Any) -> None:
    """Before a replay, which then records again, or in its middle, as by another thread: what runs holds what it needs.
    (A plan's algorithm is memory of the plan: a product reads it as it runs.)"""
    machine, tapes = make(), Tapes()
    rt = machine.runtime()
    rt.plans = PlanCache(2)
    for _ in range(2):
        one = run(machine, rt, tapes, build, "never")

    def evict() -> None:
        taped.forget()
        for number in range(8):
            rt.plans.put(number, None)
        executor = rt.executor()
        if executor.gemms is not None:
            executor.gemms._prepared.clear()
        gc.collect()

    first = run(machine, rt, tapes, build, "first")
    assert all(d.count == taped.Counts(1, 1) for d in first)
    evict()
    again = run(machine, rt, tapes, build, "first")
    assert all(d.count == taped.Counts(1, 1) for d in again)
    alike(one, again)
    for at in (1, 2, 4):
        Interrupting(machine, at, evict)
        alike(one, run(machine, rt, tapes, build, "first"))
    assert not machine.faults


def test_as_many_tapes_as_may_be(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were not used for long go, and with them what they keep."""
    monkeypatch.setattr(taped, "_MOST_TAPES", 8)
    taped.forget()
    machine, tapes = make(), Tapes()
    rt = machine.runtime()
    for rows in range(16, 16 * 12, 16):
        done = run(machine, rt, tapes, Linear(rows=rows), "first")
        assert all(d.count.recorded == 1 for d in done) and len(taped.tapes()) <= 8
    assert {tape.slots[0].shape[1] for tape in taped.tapes()} >= {80, 88}


def test_a_replay_that_fails_holds_nothing(make: Make) -> None:
    """Memory ends in the middle: what was taken goes back, and the next call goes well."""
    machine, tapes, build = make(), Tapes(), MLP("current", rows=2048, hidden=256, inner=512)
    rt = machine.runtime()
    for _ in range(2):
        one = run(machine, rt, tapes, build, "never")
    run(machine, rt, tapes, build, "first")
    before, call = machine.kept(), build(rt).forward
    machine.lib.fails["alloc"] = 0
    fails = machine.lib.fails

    def run_out() -> None:
        fails["alloc"] = 2

    Interrupting(machine, 1, run_out)
    with pytest.raises(LibraryError, match="allocate"):
        tapes.of(call)(rt, *call.args, **call.options)
    fails.clear()
    del call
    assert machine.kept() == before
    alike(one, run(machine, rt, tapes, build, "first"))


def test_memory_that_is_not_as_aligned_as_promised(make: Make) -> None:
    """A tape was planned for what the allocator promises: it says so rather than read beside it."""
    machine, tapes, build = make(), Tapes(), Linear(dtype=dtypes.float32, weight_dtype=dtypes.float32)
    rt = machine.runtime()
    run(machine, rt, tapes, build, "first")
    call = build(rt).forward
    machine.arena.grain = 64
    with pytest.raises(LibraryError, match="multiples of 256 bytes, as its `alignment` promises"):
        tapes.of(call)(rt, *call.args, **call.options)
