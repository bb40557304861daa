"""What threads share in the modules: each comes out as if it were alone.

Where one thread has to come between two steps of another, the first waits there (`pausing`).
"""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import te_torch as te
from te_core import tokens
from te_core.recipe import DelayedScaling, Float8CurrentScaling, resolve
from te_torch import likeness, nonfinite, precisions, updates
from te_torch import state as scaling
from te_torch.tensors.storage import QuantizedTensorStorage
from te_torch.training import fsdp
from te_torch.training.graphs import make as graphs
from tests.threads import switching, together
from tests.world import values

WIDTH = 32
NEWEST = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")


def linear(**options: Any) -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="cpu", **options)


@contextmanager
def pausing(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> Iterator[None]:
    """A function whose callers stand still for a while before it."""
    real: Callable[..., Any] = getattr(where, name)

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, slow)
        yield


def test_one_number_of_one_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that can be forgotten, as those of a user's functions are."""
    recipe = DelayedScaling(amax_compute_algo=lambda history: history[0])
    with pausing(monkeypatch, copy, "copy"):
        first, second = together(*[lambda: precisions.number_of(recipe)] * 2)
    assert first == second
    for _ in range(precisions._KEPT + 1):
        precisions.number_of(DelayedScaling(amax_compute_algo=lambda history: history[0]))
    assert first not in precisions._by_number and not resolve(recipe).kept


def test_one_state_of_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module, rule = linear(), resolve(NEWEST)
    with pausing(monkeypatch, scaling, "ScalingState"):
        first, second = together(*[lambda: scaling.make_state(module, torch.device("cpu"), rule)] * 2)
    assert first is second is module.fp8_state


def test_views_are_of_the_buffers_that_they_are_said_to_be_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread makes them anew for buffers that have moved; another one asks meanwhile."""
    state = scaling.ScalingState(1, 4, torch.device("cpu"))
    state.scales(False)
    state.scale_fwd.data = torch.full_like(state.scale_fwd, 3.0)
    real = scaling.to_core
    with monkeypatch.context() as patch:
        patch.setattr(scaling, "to_core", lambda t: (time.sleep(0.02), real(t))[1])
        found = together(*[lambda: state.scales(False)] * 2)
    assert [scales.forward_scale.ptr for scales in found] == [state.scale_fwd.data_ptr()] * 2


def test_one_counter_of_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = linear()
    with pausing(monkeypatch, nonfinite, "check_surroundings"):
        first, second = together(*[lambda: nonfinite.counted(module, None, torch.device("cpu"), False)] * 2)
    assert first is second


def test_a_module_that_is_being_made_is_like_none() -> None:
    """Another thread has it half made as this one compiles."""
    whole = te.LayerNorm(WIDTH, device="cpu")
    half = te.LayerNorm.__new__(te.LayerNorm)
    torch.nn.Module.__init__(half)
    tokens.enrolled(half)
    assert half in tokens.living(torch.nn.Module)
    found = likeness.alike(whole._kind, whole._facts())
    assert whole in found and half not in found


def test_modules_are_made_while_others_are_looked_for() -> None:
    done = threading.Event()

    def make() -> None:
        for _ in range(150):
            te.LayerNorm(WIDTH, device="cpu")
        done.set()

    def look() -> None:
        while not done.is_set():
            tokens.living(torch.nn.Module)

    with switching():
        together(make, look, look)


def test_nobody_reads_half_a_transpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written anew by whoever needs it first after a write in another shape, and the others wait."""
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        weight: Any = linear().weight
    weight.update_usage(columnwise_usage=True)
    with torch.no_grad():
        weight.view(-1)[: 8 * WIDTH].copy_(0.02 * values(8 * WIDTH, dtype=torch.bfloat16))
    wanted = weight._row_data.t().contiguous()

    def right(delay: float) -> bool:
        time.sleep(delay)
        weight.to_core()
        return torch.equal(weight._col_data, wanted)

    with pausing(monkeypatch, QuantizedTensorStorage, "_shown"):
        assert together(lambda: right(0), lambda: right(0.02), lambda: right(0.07)) == [True] * 3


def test_compiled_models_of_two_threads() -> None:
    """A region's end takes what ran in it: not what another thread's region, which is open, was told of."""
    models = [linear(), linear()]
    compiled = [torch.compile(model, backend="aot_eager") for model in models]
    x = values(WIDTH, WIDTH, dtype=torch.bfloat16)
    for run in compiled:
        for _ in range(2):
            with te.autocast(recipe=NEWEST):
                run(x)
    begun, inside, go = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        begun.wait(20)
        with te.autocast(recipe=NEWEST):
            compiled[0](2 * x)
            inside.set()
            go.wait(20)
            compiled[0](8 * x)  # a second microbatch

    def second() -> None:
        with te.autocast(recipe=NEWEST):  # ends while that one is open
            begun.set()
            compiled[1](x)
            inside.wait(20)
        with te.autocast(recipe=NEWEST):  # and so does this one, which begins in it
            compiled[1](x)
        go.set()

    together(first, second)
    histories = [model.fp8_state.amax_history_fwd[1:, 0].tolist() for model in models]  # type: ignore[union-attr]
    largest = float(x.abs().max())
    assert histories == [[largest, largest, 8 * largest], [largest] * 3]


def test_captures_that_overlap() -> None:
    traces: Any = SimpleNamespace(put_back=lambda: None)
    one, other = graphs._capture_time(traces), graphs._capture_time(traces)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert graphs.is_graph_capturing() and not gc.isenabled()
    other.__exit__(None, None, None)
    assert not graphs.is_graph_capturing() and gc.isenabled()


def test_one_class_of_wrapped_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    vars(fsdp.FullyShardedDataParallel).pop("made", None)
    with pausing(monkeypatch, fsdp, "_wrapper"):
        first, second = together(fsdp._prepared, fsdp._prepared)
    assert first is second and first.__name__ == "FullyShardedDataParallel"


def test_a_backward_pass_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd has a thread for each device, and all of a pass note what ran in one list."""
    calls: list[Any] = []
    monkeypatch.setattr(updates, "_pending", pending := Meeting())
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 5)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", SimpleNamespace(queue_callback=calls.append))
    states: Any = [SimpleNamespace(token=1), SimpleNamespace(token=2)]
    together(*[lambda state=state: updates.ran_backward(state) for state in states])
    assert sorted(pending[5]) == [1, 2] and len(calls) == 1


class Meeting(dict[int, list[int]]):
    """Both threads find that nothing has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Barrier(2)

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        self.looked.wait(20)
        return found


class Entering:
    """A user's function in a recipe, in whose hash a region is entered."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def __hash__(self) -> int:
        if threading.current_thread().name == "entering":
            self.entered.set()
            self.go.wait(20)
            precisions.number_of(DelayedScaling(amax_compute_algo=lambda history: history[0]))
        return 7

    def __call__(self, history: torch.Tensor) -> torch.Tensor:
        return history[0]


def test_no_lock_inside_of_another() -> None:
    """One thread is among the precisions, and wants a number; another one has given a number, and wants a precision."""
    function, plain = Entering(), DelayedScaling(margin=11)
    resolve(plain)

    def first() -> None:
        threading.current_thread().name = "entering"
        precisions.number_of(DelayedScaling(amax_compute_algo=function))

    def second() -> None:
        function.entered.wait(20)
        threading.Timer(0.2, function.go.set).start()
        precisions.number_of(plain, precisions.STRICT)

    together(first, second)


def test_a_capture_that_ends_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while garbage is collected."""
    traces: Any = SimpleNamespace(put_back=lambda: None)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gc, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            graphs._capture_time(traces).__enter__()
    with graphs._capture_time(traces):
        pass
    assert gc.isenabled() and not graphs.is_graph_capturing()
