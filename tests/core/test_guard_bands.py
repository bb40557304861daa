"""Nothing is written outside of what a caller hands in, whatever that is: draws of `tests/core_draws.py`.

`python -m tests.core_draws 100000 SEED` (`--device cuda`) draws others.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.layers import linear
from te_core.plan_cache import PlanCache
from te_core.quantize.state import Scales
from te_core.recipe import DelayedScaling, resolve
from te_core.runtime import Runtime
from te_core.tape.taped import Taped, set_when
from te_core.tensor import Tensor, from_numpy
from tests import core_draws
from tests.core.face import tensor
from tests.core_draws import Bench, Call, Draw, FaultError, Tally, draw

RT = Runtime.cpu()
F32, I64 = dtypes.float32, dtypes.int64


@pytest.fixture(scope="module")
def bench() -> Any:
    made = Bench()
    set_when(None)
    return made


@pytest.mark.parametrize("count", [400, pytest.param(25_000, marks=pytest.mark.full)])
def test_draws_stay_inside_of_what_they_are_given(bench: Bench, count: int) -> None:
    tally = Tally()
    for seed in range(count):
        tally.run(bench, seed)
    assert tally.faults == {}
    # Otherwise hardly anything behind the first check was met.
    assert tally.counts["result"] > count / 4 and tally.counts["refused"] > count / 4, tally.counts


def test_draws_are_those_of_their_seed(bench: Bench) -> None:
    first = [draw(seed, bench.calls) for seed in range(400)]
    assert first == [draw(seed, bench.calls) for seed in range(400)]
    assert {d.kind for d in first} == set(core_draws.KINDS) and any(d.taped for d in first)


def beyond(rt: Runtime, out: Tensor) -> None:
    ctypes.memset(out.ptr + out.nbytes, 0, 1)


def before(rt: Runtime, out: Tensor) -> None:
    ctypes.memset(out.ptr - 1, 0, 1)


def outside_of_its_memory(rt: Runtime, out: Tensor) -> None:
    made = rt.empty((3,), F32)
    ctypes.memset(made.ptr, 0, 16)


def reads(rt: Runtime, out: Tensor) -> Tensor:
    return Tensor(out.ptr, (out.shape[0] + 1,), out.dtype, out.device, out.owner)


def fails(rt: Runtime, out: Tensor) -> None:
    raise IndexError("of our own")


@pytest.mark.parametrize("wrong", [beyond, before, outside_of_its_memory, reads, fails])
def test_what_a_draw_must_not_come_to_is_noticed(bench: Bench, wrong: Callable[..., Any]) -> None:
    leaf = core_draws.Leaf(np.zeros(20, np.uint8), (5,), F32)
    calls = {
        "wrong": Call("wrong", wrong, (leaf,), {}, ("out",)),
        "right": Call("right", ops.amax, (leaf,), {}, ("x",)),
    }
    kept, bench.calls = bench.calls, calls
    try:
        assert isinstance(bench._once(Draw(0, "right", "right", 0, False, 0), 0x5A), list)
        with pytest.raises(FaultError):
            first = bench._once(Draw(0, "wrong", "right", 0, False, 0), 0x5A)
            if first != bench._once(Draw(0, "wrong", "right", 0, False, 0), 0x3B):
                raise FaultError("read")
    finally:
        bench.calls = kept


def test_a_write_to_read_only_memory_is_noticed(bench: Bench) -> None:
    leaf = core_draws.Leaf(np.ones(20, np.uint8), (5,), F32)

    def write(rt: Runtime, out: Tensor) -> None:
        ctypes.memset(out.ptr, 0, 4)

    kept, bench.calls = bench.calls, {"write": Call("write", write, (leaf,), {}, ("out",))}
    try:
        assert bench._once(Draw(0, "write", "right", 0, False, 0), 0x5A) == []
        with pytest.raises(FaultError, match="wrote outside"):
            bench._once(Draw(0, "write", "read-only", 0, False, 0), 0x5A)
    finally:
        bench.calls = kept


def test_a_plan_hides_no_wrong_argument(bench: Bench) -> None:
    """What is refused without plans is refused as well where the right call has made one of the same shapes."""
    taken = []
    for name, call in bench.calls.items():
        if name.endswith(")"):  # a layer, which makes plans of its own
            continue
        bench.rt.plans = PlanCache()
        bench._once(Draw(0, name, "right", 0, False, 0), 0x5A)
        for leaf, kind in itertools.product(range(len(call.leaves)), ("dtype", "strided")):
            wrong = Draw(0, name, kind, leaf, False, 1)
            if isinstance(bench._once(wrong, 0x5A), str):
                continue
            known, bench.rt.plans = bench.rt.plans, PlanCache()
            if isinstance(bench._once(wrong, 0x5A), str):
                taken.append(f"{name} {call.leaves[leaf]} {kind}")
            bench.rt.plans = known
    assert taken == []


# ------------------------------------------------------------------------------------- what was found so, by name


def delayed_linear(amax: int) -> tuple[linear.LinearSpec, tuple[Tensor, ...], Scales]:
    spec = linear.LinearSpec(F32, resolve(DelayedScaling()), linear.Needs(True, True, True))
    scales = Scales(tensor(RT, 3, value=1.0), tensor(RT, amax), tensor(RT, 2, value=1.0), tensor(RT, 2))
    return spec, (tensor(RT, 4, 8), tensor(RT, 6, 8), tensor(RT, 6)), scales


@pytest.mark.parametrize("when", ["never", "first"])
def test_maxima_of_one_element_are_refused_also_where_the_layer_is_recorded(when: str) -> None:
    """The cast of the weight would raise the second element."""
    spec, given, scales = delayed_linear(3)
    recorded = Taped("linear forward", linear.forward, spec)
    set_when(when)
    try:
        for _ in range(3):
            recorded(RT, *given, scales=scales)
        memory = np.zeros(3, np.float32)
        short = Scales(scales.forward_scale, from_numpy(memory[:1]), scales.backward_scale, scales.backward_amax)
        with pytest.raises(ArgumentError, match="slot 1"):
            recorded(RT, *given, scales=short)
        assert not memory[1:].any()
    finally:
        set_when(None)


def test_lent_memory_is_not_written_to() -> None:
    """A read-only array's tensor is read; what NumPy makes of it is read-only, too."""
    array = np.zeros((2, 3), np.float32)
    array.flags.writeable = False
    t = from_numpy(array)
    assert not t.writable and not t.reshape(3, 2).rows(0, 1).writable and tensor(RT, 2).writable
    assert not t.numpy().flags.writeable and ops.transpose(RT, t).writable
