"""Replays by the library in C (TE_CORE_PLAYER=c): the launches of the layers, on the memory that Python gives them.

C's calls lead back to the machine that is not there (`fake_doors.py`), so that what it does is noted and compared as
what Python does.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from te_core.errors import ArgumentError, LibraryError
from te_core.ops import raw
from te_core.ops.quantize import ScalingState
from te_core.program import Example, tape_of
from te_core.runtime import Runtime
from te_core.tape import native, taped
from te_core.tools import doctor
from tests.backends import HARDWARE
from tests.core.c_library import built
from tests.core.fake_cuda import B200, Machine, Make
from tests.core.tape_cases import FP32, MLP, Linear, Maker
from tests.core.tape_more_cases import Attention, Norm, Softmax
from tests.core.tape_proof import Tapes, compare, made, proved, run
from tests.core.test_tape_beside import LAYERS, build
from tests.core.test_tape_cuda import ATTENTION, GROUPS, SHOWN, SMALL
from tests.core.test_tape_said import WORDS, called, failing
from tests.threads import switching, together

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason=f"{HARDWARE}no C compiler")

LARGE = MLP("current", rows=2048, hidden=256, inner=512)


@pytest.fixture
def machine(make: Make, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """One on which C plays, and did."""
    monkeypatch.setenv("TE_CORE_PLAYER", "c")
    monkeypatch.setenv("TE_CORE_LIBRARY", str(built() / "libte_core.so"))
    found = make(*getattr(request, "param", ()))
    yield found
    assert found.doors.calls and not found.faults, found.faults[:3]


@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])
def test_layers_with_products(machine: Machine, recipe: str | None) -> None:
    linear, mlp = Linear(recipe), MLP(recipe)
    for changes in ({}, {"bias": False, "sink": "fp32+"}, {"rows": 0}, {"normed": "LayerNorm"}, {"shift": 16}):
        proved(machine, replace(linear, **changes))
    for changes in ({}, {"checkpoint": True}, {"rows": 2048, "hidden": 256, "inner": 512, "activation": "swiglu"}):
        proved(machine, replace(mlp, **changes))


@pytest.mark.more
@pytest.mark.parametrize("group", [*GROUPS, *ATTENTION, *SMALL])
def test_all_layers(machine: Machine, group: str) -> None:
    """Every case that is compared with Python's player."""
    fp8 = {"fp8": True, "heads": 4, "groups": 4, "d": 128} if group == "fp8" else {}
    found = [*SMALL.get(group, ()), *(Attention(**{**fp8, **options}) for options in ATTENTION.get(group, ()))]
    recipes = [recipe for of, recipe in SHOWN if of == group]
    for case in (*found, *(case for recipe in recipes for case in GROUPS[group](recipe))):
        proved(machine, case)


@pytest.mark.parametrize("machine", [(B200,)], indirect=True)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_products_that_other_gpus_have(machine: Machine, recipe: str) -> None:
    """Alpha lies on the device."""
    for changes in ({}, {"sink": "fp32+"}, {"weight": "both"}):
        proved(machine, Linear(recipe, rows=64, **changes))


def test_steps_that_stay_python_s(machine: Machine) -> None:
    """cuDNN's graphs lie between stretches; a soft-cap's constants are memory that no call brings."""
    for options in ({}, {"core": {"softcap": 20.0, "right": 0}}, {"core": {"dropout": 0.1}}):
        proved(machine, Attention(**options))
    for case in (Norm("LayerNorm"), Softmax(sink=True)):
        proved(machine, case)


@pytest.mark.parametrize("name", LAYERS)
def test_on_other_streams(machine: Machine, name: str) -> None:
    """A wait ends a stretch: what follows in C is behind it."""
    proved(machine, partial(build, LAYERS[name]))
    assert {event.stream for event in machine.log} > {5}


def test_a_kernel_that_takes_a_table(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = machine.runtime()
    given = Maker(rt)
    states = [ScalingState(given(3, dtype=FP32), given(16, 3, dtype=FP32), given(3, dtype=FP32), 448.0) for _ in "ab"]
    tape = tape_of("update", Example(rt, raw.update_scales, (states, "max")))
    inputs = [t for state in states for t in (state.scale, state.history, state.used)]
    found = []
    for player in ("python", "c"):
        monkeypatch.setenv("TE_CORE_PLAYER", player)
        tape._bound.clear()
        with machine.noting() as events:
            tape.replay(rt, [t.ptr for t in inputs], [*inputs], ())
        found.append([event[:4] for event in events])
    assert found[0] == found[1] and len(found[0]) == 1 and machine.doors.calls == 1


def held(machine: Machine, rt: Runtime, tapes: Tapes, monkeypatch: pytest.MonkeyPatch, player: str) -> list[Any]:
    """What a round of a layer takes and gives back, in order, and its peak."""
    monkeypatch.setenv("TE_CORE_PLAYER", player)
    for tape in taped.tapes():
        tape._bound.clear()
    run(machine, rt, tapes, LARGE, "first")
    order, numbers = [], {}  # type: ignore[var-annotated]
    with monkeypatch.context() as patch:
        take, give = machine.arena.take, machine.arena.give

        def taking(nbytes: int, stream: int) -> int:
            address = take(nbytes, stream)
            numbers[address] = len(order)
            order.append(("take", nbytes))
            return address

        def giving(address: int) -> Any:
            order.append(("give", numbers.get(address, -1)))
            return give(address)

        patch.setattr(machine.arena, "take", taking)
        patch.setattr(machine.arena, "give", giving)
        done = run(machine, rt, tapes, LARGE, "first")
        peaks = [d.peak for d in done]
        del done
    return [order, peaks]


def test_memory_is_taken_and_dropped_in_the_same_order(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    rt, tapes = machine.runtime(), Tapes()
    python, c = (held(machine, rt, tapes, monkeypatch, player) for player in ("python", "c"))
    assert python == c and len(c[0]) > 40


def test_threads_have_stretches_of_their_own(machine: Machine) -> None:
    """One tape in four of them, each on a stream: nobody's addresses are in another's words."""
    tapes = Tapes()
    run(machine, machine.runtime(), tapes, Linear("delayed"), "first")
    all_there = threading.Barrier(4)

    def work(stream: int) -> None:
        rt = machine.runtime(stream)
        assert rt.executor() and all_there.wait(60) >= 0  # a thread that ends leaves its executor to the next
        for _ in range(3):
            for done in run(machine, rt, tapes, Linear("delayed"), "first"):
                assert {event.stream for event in done.events} == {stream}

    with switching():
        together(*[partial(work, stream) for stream in (5, 6, 7, 8)])
    assert len({number for tape in taped.tapes() for number in tape._bound}) == 5


@pytest.mark.parametrize("kind", ["gemm", "launch", "fill"])
def test_the_error_of_a_step(machine: Machine, kind: str) -> None:
    """A product's says what Python's player would; and the next replay goes well."""
    tapes, case = Tapes(), Linear("delayed", rows=0 if kind == "fill" else 48)
    rt = machine.runtime()
    done = run(machine, rt, tapes, case, "first")
    begins = case(rt)
    call = begins.forward
    if kind == "fill":
        assert begins.backward is not None
        call = begins.backward(*done[0].result)
    error: Any = RuntimeError()
    error.status = 15
    with failing(machine, kind, error), pytest.raises(LibraryError, match="Allowed: success") as raised:
        called(rt, tapes, call, "first")
    assert WORDS.get(kind, f"replay {kind if kind == 'fill' else ''}") in str(raised.value)
    if kind != "fill":
        assert made(machine, rt, tapes.of(call), call, "first").count == taped.Counts(1)


def test_pointers_after_an_error_and_after_interpreted_calls(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product's second pointer could not be set; then Python multiplied by the same plan, from other addresses."""
    tapes, case = Tapes(), Linear("delayed")
    rt = machine.runtime()
    run(machine, rt, tapes, case, "first")
    call, other = case(rt).forward, case(rt).forward
    one, was, count = made(machine, rt, tapes.of(call), call, "never"), machine.lt.matmul_desc_set_attribute, [0]

    def set_attribute(*arguments: int) -> None:
        count[0] += 1
        if count[0] == 2:
            raise RuntimeError("the second")
        was(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(machine.lt, "matmul_desc_set_attribute", set_attribute)
        with pytest.raises(LibraryError, match="from gemm 48 x 96 x 64"):
            called(rt, tapes, call, "first")
    for _ in range(2):
        compare(one, made(machine, rt, tapes.of(call), call, "first"))
        made(machine, rt, tapes.of(other), other, "never")


def test_what_cannot_be_had_is_said(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = make()
    rt = machine.runtime()
    monkeypatch.setenv("TE_CORE_PLAYER", "rust")
    with pytest.raises(ArgumentError, match="TE_CORE_PLAYER: got 'rust'. Allowed: python or c"):
        run(machine, rt, Tapes(), Linear(), "first")
    monkeypatch.setenv("TE_CORE_PLAYER", "c")
    monkeypatch.setenv("TE_CORE_LIBRARY", str(tmp_path / "libte_core.so"))
    with pytest.raises(LibraryError, match=r"libte_core\.so.*make -C bindings/c"):
        run(machine, rt, Tapes(), Linear(), "first")
    monkeypatch.setenv("TE_CORE_LIBRARY", str(built() / "libte_core.so"))
    monkeypatch.setattr(native, "_LAYOUT", native._LAYOUT + 8)
    with pytest.raises(LibraryError, match="a library in C of another version"):
        run(machine, rt, Tapes(), Linear(), "first")
    assert not machine.doors.calls


def test_the_doctor_says_who_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_CORE_LIBRARY", str(built() / "libte_core.so"))
    for player in ("python", "c"):
        monkeypatch.setenv("TE_CORE_PLAYER", player)
        said = "\n".join(doctor.report([]))
        assert f"library in C: {built()}/libte_core.so" in said
        assert f"replays of layers: done by {player} (TE_CORE_PLAYER)" in said


def test_calls_of_the_cpu_backend_stay_python_s(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the variable says, and without a library."""
    monkeypatch.setenv("TE_CORE_PLAYER", "c")
    monkeypatch.setenv("TE_CORE_LIBRARY", "/nowhere")
    make()
    rt = Runtime.cpu()
    add = taped.Taped("add", lambda rt, x, *, spec: raw.add(rt, x, x), None)
    taped.set_when("first")
    x = rt.tensor([1.0, 2.0], FP32)
    for _ in range(2):
        assert rt.numpy(add(rt, x)).tolist() == [2.0, 4.0]
    assert taped.COUNTS.replayed
