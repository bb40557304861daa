"""Tapes in a host's memory on a GPU that is not there: they launch what the call does, inside of what was brought."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core.ops import raw as ops
from te_core.ops.quantize import ScalingState
from te_core.runtime import Runtime
from te_core.tape.hosted import hosted
from te_core.tape.recorder import record
from te_core.tape.walk import tensors_of
from te_core.tensor import Tensor
from tests.core.fake_cuda import Make
from tests.core.tape_cases import MLP, Linear
from tests.core.tape_proof import Tapes, run


def replayed(machine: Any, rt: Runtime, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """(events of a replay in memory that is brought, that memory)."""
    made = hosted(rt, record(rt.apart(), "layer", function, (arguments, options), 256))
    given = tensors_of((*arguments, *options.values()))
    brought = [rt.empty((max(1, s.nbytes),), dtypes.uint8) for s in made.tape.slots[len(given) :]]
    before = machine.arena.bytes
    with machine.noting() as events:
        made.tape.replay(rt, [t.ptr for t in (*given, *brought)], [None] * len(made.tape.slots), ())
    assert machine.arena.bytes == before, "memory was taken"
    assert not machine.faults, machine.faults[:3]
    return events, brought


@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])
@pytest.mark.parametrize("case", [Linear, MLP])
def test_a_layer_launches_what_it_does(make: Make, case: Any, recipe: str | None) -> None:
    machine = make()
    rt = machine.runtime()
    build = case(recipe)
    tapes = Tapes()
    run(machine, rt, tapes, build, "never")  # makes plans and scratch memory
    interpreted = run(machine, rt.apart(), tapes, build, "never")
    call = build(rt).forward
    events, brought = replayed(machine, rt, partial(call.function, spec=call.spec), call.args, call.options)
    wanted = [(e.kind, e.what) for e in interpreted[0].events if e.kind != "fill"]
    assert [(e.kind, e.what) for e in events if e.kind != "fill"] == wanted
    serials = {machine.place(t.ptr).serial for t in brought}  # type: ignore[union-attr]
    given = {machine.place(t.ptr).serial for t in tensors_of((*call.args, *call.options.values())) if t.size}
    assert {p.serial for e in events for _, p in e.places if p is not None} <= serials | given


def test_an_update_of_scales(make: Make) -> None:
    machine = make()
    rt = machine.runtime()

    def update(rt: Runtime, scale: Tensor, history: Tensor, used: Tensor) -> tuple[()]:
        ops.update_scales(rt, [ScalingState(scale, history, used, 448.0)], "max")
        return ()

    state = (
        rt.tensor(np.ones(6, np.float32)),
        rt.tensor(np.zeros((4, 6), np.float32)),
        rt.tensor(np.ones(6, np.float32)),
    )
    with machine.noting() as wanted:
        update(rt, *state)
    events, _ = replayed(machine, rt, update, state, {})
    assert [(e.kind, e.places) for e in events] == [(e.kind, e.places) for e in wanted]
    assert len(events) == 1 and len([place for _, place in events[0].places if place is not None]) >= 3
