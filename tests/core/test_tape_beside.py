"""Layers that work on other streams: their waits are steps, their memory is recorded with the streams that use it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.ops import raw
from te_core.quantized import Cast, Format
from te_core.runtime import HostAllocator, Runtime
from te_core.tape import taped
from te_core.tape.beside import Beside, Noticed, Waited
from te_core.tape.bound import Bound
from te_core.tape.recorder import record
from te_core.tape.tape import Drop, Take, Tape
from te_core.tape.taped import Taped
from te_core.tensor import Tensor
from tests.backends import requires_cuda
from tests.core.fake_cuda import Make, tensor
from tests.core.tape_cases import BF16, FP32
from tests.core.tape_proof import Call, Round, proved
from tests.recordings import tapes

SHAPE = (64, 64)


def there_and_back(rt: Runtime, x: Tensor, y: Tensor, *, spec: Any) -> Tensor:
    """A side reads what the call was given and what it made; the call reads what the side made."""
    made = raw.add(rt, x, y)
    side = rt.side()
    side.wait(rt)
    side.record(x, made)
    other = raw.add(side, x, made)
    del made
    rt.wait(side)
    rt.record(other)
    return raw.add(rt, other, y)  # type: ignore[no-any-return]


def untold(rt: Runtime, x: Tensor, y: Tensor, *, spec: Any) -> Tensor:
    """The same by a layer that holds on to everything, and so has nothing to record."""
    made = raw.add(rt, x, y)
    side = rt.side()
    side.wait(rt)
    other = raw.add(side, x, made)
    rt.wait(side)
    return raw.add(rt, other, y)  # type: ignore[no-any-return]


def several(rt: Runtime, x: Tensor, y: Tensor, *, spec: Any) -> tuple[Tensor, Tensor]:
    """Two of them and one beside one; a result lies in a side's memory."""
    one, two = rt.side("one"), rt.side("two")
    far = one.side("far")
    assert rt.side("one") is one and one.side("far") is far
    for each in (one, two):
        each.wait(rt)
        each.record(x, y)
    a = raw.add(one, x, y)
    far.wait(one)
    far.record(a)
    b = raw.add(far, a, a)
    del a
    c = raw.add(two, x, x)
    rt.wait(far)
    rt.wait(two)
    rt.record(b, c)
    made = raw.add(rt, c, b)
    del c
    return b, made


def products(rt: Runtime, x: Tensor, w: Tensor, *, spec: Any) -> tuple[Tensor, Tensor]:
    """Products and casts with scratch memory, on both streams; small temporaries of each."""
    side = rt.side()
    side.wait(rt)
    side.record(x, w)
    first = ops.gemm(rt, x, w, trans_b=True)
    second = ops.gemm(side, x, w, trans_b=True)
    for each, made in ((rt, first), (side, second)):
        cast = Cast(Format(dtypes.float8_e4m3, "tensor"), rowwise=True, columnwise=True)
        q = ops.quantize(each, made, cast)
        ops.dequantize(each, q, dtype=BF16)
        del q
    rt.wait(side)
    rt.record(second)
    return raw.add(rt, first, second), raw.add(rt, second, second)


def into_memory_of_the_call(rt: Runtime, x: Tensor, y: Tensor, *, spec: Any) -> Tensor:
    """What the call took is written by a side, which has waited since; small temporaries come and go beside it."""
    for _ in range(2):
        raw.add(rt, raw.add(rt, x, y), raw.add(rt, y, y))
    place, side = rt.empty(SHAPE, BF16), rt.side()
    side.wait(rt)
    raw.add(side, x, y, out=place)
    rt.wait(side)
    return raw.add(rt, place, y)  # type: ignore[no-any-return]


LAYERS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (there_and_back, several, products)}


def build(function: Any, rt: Runtime) -> Round:
    given = [tensor(rt, SHAPE, BF16) for _ in range(2)]
    return Round(Call(function.__name__, function, None, tuple(given), {}), None)


def build_of(rt: Runtime) -> list[Tensor]:
    return [tensor(rt, SHAPE, BF16) for _ in range(2)]


def recorded(rt: Runtime, function: Any) -> Tape:
    call = build(function, rt).forward
    return record(rt, call.name, partial(function, spec=None), (call.args, {}), 256)


def slots_of(step: Any) -> set[int]:
    return {patch.slot for patch in step.patches}


@pytest.mark.parametrize("name", LAYERS)
def test_replayed_as_it_runs(make: Make, name: str) -> None:
    """The same launches on the same streams, the same waits, and events where memory is given back."""
    machine = make()
    proved(machine, partial(build, LAYERS[name]))
    assert {event.stream for event in machine.log} > {5}


def test_a_tape_belongs_to_no_stream(make: Make) -> None:
    """Each replay works on the streams beside its own."""
    machine = make()
    tape = recorded(machine.runtime(5), several)
    found = []
    for stream in (5, 9, 9):
        rt = machine.runtime(stream)
        given = [tensor(rt, SHAPE, BF16) for _ in range(2)]
        with machine.noting() as events:
            tape.replay(rt, [t.ptr for t in given], [*given], [])
        found.append({event.stream for event in events})
    assert found[1] == found[2] and len(found[0]) == len(found[1]) == 4 and not found[0] & found[1]


def test_scratch_memory_of_its_own(make: Make) -> None:
    """Of the same name, by stream: both work at the same time."""
    tape = recorded(make().runtime(), products)
    scratch = {(slot.name, slot.way) for slot in tape.slots if slot.kind == "scratch"}
    assert {name for name, way in scratch if way} == {name for name, way in scratch if not way} != set()


def with_scratch(rt: Runtime, x: Tensor, y: Tensor, *, spec: Any) -> Tensor:
    """A side with scratch memory of its own."""
    side = rt.side()
    side.wait(rt)
    side.record(x, y)
    place = Tensor(side.workspace("sums", x.nbytes), x.shape, x.dtype, rt.device, None)
    raw.add(side, x, y, out=place)
    rt.wait(side)
    return raw.add(rt, place, y)  # type: ignore[no-any-return]


def test_scratch_memory_is_asked_for_where_the_layer_does(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the side has waited: in a capture it has joined by that, and its memory is the graph's."""
    machine = make()
    orders = []
    for setting in ("never", "first", "first"):
        order: list[tuple[str, int]] = []
        take, note = machine.lib._cuMemAllocFromPoolAsync, machine.note

        def taking(out: Any, nbytes: int, pool: int, stream: int) -> Any:
            order.append(("memory", stream))  # noqa: B023
            return take(out, nbytes, pool, stream)  # noqa: B023

        def noting(kind: str, what: Any, addresses: Any, stream: int) -> None:
            order.append((kind, stream))  # noqa: B023
            note(kind, what, addresses, stream)  # noqa: B023

        rt = machine.runtime(7)
        call = build_of(rt)
        with monkeypatch.context() as patch, tapes(setting):
            patch.setattr(machine.lib, "_cuMemAllocFromPoolAsync", taking)
            patch.setattr(machine, "note", noting)
            Taped("scratch", with_scratch, None)(rt, *call)
        orders.append(order)
    side = orders[0][1][1]
    assert orders[0].index(("wait", side)) < orders[0].index(("memory", side))
    assert orders[0] == orders[1] == orders[2]


def test_a_tape_of_sides_is_no_cycle(make: Make) -> None:
    """What it points at goes with it, and waits for no collector, which may come in a capture."""
    machine = make()
    tape = recorded(machine.runtime(), several)
    rt = machine.runtime()
    given = build_of(rt)
    gc.collect()
    gc.disable()
    try:
        before = sum(left.__class__ is Bound for left in gc.get_objects())  # of other tests
        tape.replay(rt, [t.ptr for t in given], [*given], [])
        del tape
        assert sum(left.__class__ is Bound for left in gc.get_objects()) == before
    finally:
        gc.enable()


def test_memory_let_go_of_is_recorded_with_who_uses_it(make: Make) -> None:
    """Once for each stream, whether the layer says so or not; memory of a side that the call reads, too."""
    machine = make()
    for function, wanted in ((untold, 2), (there_and_back, 3)):
        tape = recorded(machine.runtime(), function)
        noticed = [(slots_of(step).pop(), step.way) for step in tape.steps if isinstance(step, Noticed)]
        assert len(noticed) == len(set(noticed)) == wanted
        for slot, _ in noticed:
            used = [i for i, step in enumerate(tape.steps) if slot in slots_of(step) and not isinstance(step, Noticed)]
            drops = [i for i, step in enumerate(tape.steps) if isinstance(step, Drop) and step.slot == slot]
            assert slot < tape.inputs or used[-1] < drops[0]
        ways = {way for _, way in noticed}
        assert ways == {(), ("side",)}


def released(rt: Runtime, x: Tensor, y: Tensor, *, spec: Any) -> Tensor:
    side = rt.side()
    side.wait(rt)
    made = raw.add(side, x, y)
    x.owner = None
    rt.wait(side)
    return made  # type: ignore[no-any-return]


def test_what_the_caller_gives_up_is_recorded_too(make: Make) -> None:
    tape = recorded(make().runtime(), released)
    (drop,) = [i for i, step in enumerate(tape.steps) if isinstance(step, Drop)]
    before = tape.steps[drop - 1]
    assert tape.steps[drop].given and isinstance(before, Noticed) and before.way == ("side",)
    assert slots_of(before) == {tape.steps[drop].slot}


def test_memory_for_a_side_is_taken_before_the_side_waits(make: Make) -> None:
    """What is taken later may be what the call's stream still reads; and it shares no block with others."""
    tape = recorded(make().runtime(), into_memory_of_the_call)
    (wait,) = [i for i, step in enumerate(tape.steps) if isinstance(step, Waited) and step.way]
    (side,) = [step for step in tape.steps if isinstance(step, Beside)]
    written = max(slots_of(side))
    (take,) = [i for i, step in enumerate(tape.steps) if isinstance(step, Take) and step.slot == written]
    assert take < wait and tape.slots[written].nbytes == 2 * SHAPE[0] * SHAPE[1]
    assert [slot.name for slot in tape.slots].count("temporaries") == 1, "the others do share one"


def stranger(other: Runtime, rt: Runtime, x: Tensor, y: Tensor, *, spec: Any) -> Tensor:
    rt.wait(other)
    return raw.add(rt, x, y)  # type: ignore[no-any-return]


def foreign(other: Tensor, rt: Runtime, x: Tensor, y: Tensor, *, spec: Any) -> Tensor:
    rt.record(other)
    return raw.add(rt, x, y)  # type: ignore[no-any-return]


def test_what_is_not_beside_the_call_is_not_recorded(make: Make) -> None:
    machine = make()
    rt = machine.runtime()
    for function, what in (
        (partial(stranger, machine.runtime(9)), "a wait"),
        (partial(foreign, rt.zeros((4,), FP32)), "memory"),
    ):
        call = build_of(rt)
        with tapes("first") as ran:
            Taped("odd", function, None)(rt, *call)
        ((reason, count),) = ran.interpreted.items()
        assert reason.startswith(what) and count == 1


def test_on_the_host(interpreted: None) -> None:
    """There is one stream: nothing waits."""
    rt = Runtime.cpu(HostAllocator())
    x, y = (rt.tensor(np.random.default_rng(i).normal(size=SHAPE).astype(np.float32)) for i in range(2))
    for function in LAYERS.values():
        if function is products:
            continue  # of bf16
        tape = Taped(function.__name__, function, None)
        found = []
        for setting in ("never", "first", "first"):
            with tapes(setting):
                result = tape(rt, x, y)
            found.append([rt.numpy(t) for t in (result if isinstance(result, tuple) else (result,))])
        for one, other in zip(found[:1] * 2, found[1:], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        assert not [step for made in taped.tapes()[-1:] for step in made.steps if isinstance(step, (Beside, Waited))]


def test_shapes_alone() -> None:
    """A compiler asks for them: nothing has memory, and there is one stream."""
    torch = pytest.importorskip("torch")
    from te_torch.runtime import runtime_for, to_core_shape

    x = torch.ones(SHAPE, device="meta")
    rt = runtime_for(x)
    made = there_and_back(rt, to_core_shape(x), to_core_shape(x), spec=None)
    assert made.shape == SHAPE and rt.side() is rt


def chain(rt: Runtime, x: Tensor, one: Tensor, *, spec: Any) -> Tensor:
    """Sums that need each other's results, over streams; temporaries are let go of while a side still reads them."""
    side = rt.side()
    busy = one
    for _ in range(5):
        x = raw.add(rt, x, one)
        side.wait(rt)
        for _ in range(10):  # so that it reads x late
            busy = raw.add(side, busy, one)
        y = raw.add(side, x, one)
        raw.add(rt, raw.add(rt, one, one), raw.add(rt, one, one))  # takes what is free
        rt.wait(side)
        x = raw.add(rt, y, one)
    rt.wait(side)
    return x


@requires_cuda
@pytest.mark.parametrize("kind", ["pool", "torch"])
def test_on_two_streams_of_a_gpu(kind: str) -> None:
    """Without the waits one reads what is not there yet; without the records, what is no longer there."""
    if kind == "torch":
        torch = pytest.importorskip("torch")
        from te_torch.runtime import runtime_for

        rt = runtime_for(torch.empty(1, device="cuda"))
    else:
        rt = Runtime.cuda()
    n = 1 << 24
    one = rt.tensor(np.ones((1, n), np.float32))
    tape = Taped("chain", chain, None)
    with tapes("first") as ran:
        for start in range(4):
            x = rt.tensor(np.full((1, n), start, np.float32))
            assert (rt.numpy(tape(rt, x, one)) == start + 15.0).all()
    assert (ran.recorded, ran.replayed) == (1, 4)


@requires_cuda
@pytest.mark.parametrize("setting", ["never", "first"])
def test_captured(setting: str) -> None:
    """A side joins the graph of its call; its scratch memory is the graph's, and eager code is never given it."""
    torch = pytest.importorskip("torch")
    from te_torch.runtime import runtime_for, to_core

    x, one = (torch.full((1, 1 << 20), value, device="cuda") for value in (2.0, 1.0))
    function, graph = Taped("captured", with_scratch, None), torch.cuda.CUDAGraph()
    with tapes(setting):
        rt = runtime_for(x)
        function(rt, to_core(x), to_core(one))  # kernels are loaded
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = function(runtime_for(x), to_core(x), to_core(one)).owner
    taken = [torch.full((1, 1 << 20), 7.0, device="cuda") for _ in range(64)]
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert (out == value + 2).all() and all((t == 7).all() for t in taken)


@requires_cuda
@pytest.mark.parametrize("recipe", ["delayed", "block", "mxfp8"])
def test_quantized_memory_that_a_stream_reads_is_not_given_away(recipe: str) -> None:
    """Neither by a recorded step, which may be given a weight, nor by torch's own `record_stream`."""
    torch = pytest.importorskip("torch")
    import te_torch as te
    from te_torch.runtime import runtime_for
    from tests.recipes import rule

    with te.quantized_model_init(recipe=rule(recipe)):
        weight = te.Linear(1024, 1024, bias=False, device="cuda", params_dtype=torch.bfloat16).weight
    kept = [b for b in weight._buffers if b is not None and b.numel() > 1 << 16]
    where, rt = {b.data_ptr() for b in kept}, runtime_for(torch.empty(1, device="cuda"))
    shape, side = kept[0].shape, torch.cuda.Stream()
    del kept
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
    weight.record_stream(side)
    rt.side().record(Tensor(next(iter(where)), tuple(shape), dtypes.uint8, rt.device, weight))
    del weight
    taken = [torch.empty(shape, dtype=torch.uint8, device="cuda") for _ in range(64)]
    assert not where & {t.data_ptr() for t in taken}
    torch.cuda.synchronize()
