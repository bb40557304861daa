"""What tapes cost in memory and in decisions: a replay's peak, what lives on after a call, how many tapes there are."""

from __future__ import annotations

import gc
import random
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import te_torch as te
from te_core.tape import recorder, taped
from te_core.tape.walk import NotRecordedError
from te_torch import replays, runtime
from tests.covering import covering
from tests.null_device import null_device
from tests.recipes import KINDS, RECIPES, region
from tests.recordings import tapes
from tests.world import HIDDEN, ROWS, TAPED, drawn, made

# ----------------------------------------------------------------------------------------------------- the peak


class Counting:
    """torch's allocator, with the bytes that live at once. Each piece of memory counts as torch rounds it on a GPU."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.peak, self._alive = inner, 0, []  # type: ignore[var-annotated]

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: int) -> Any:
        """Memory that counts as long as anything lies in it."""
        made = self.inner.empty(shape, dtype, stream)
        storage = made.owner.untyped_storage()
        self._alive = [(ref, n) for ref, n in self._alive if not ref.expired()]
        self._alive.append((StorageWeakRef(storage), -(-max(storage.nbytes(), 1) // 512) * 512))
        self.peak = max(self.peak, sum(n for _, n in self._alive))
        return made

    def forget(self) -> None:
        """What lives now does not count."""
        self._alive = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def counting() -> Iterator[Counting]:
    """The CPU's memory is counted."""
    rt = runtime.runtime_for(torch.empty(0))
    rt.allocator = account = Counting(rt.allocator)
    try:
        yield account
    finally:
        rt.allocator = account.inner


def peaks(name: str, recipe: str | None, rows: int, how: str, setting: str) -> list[int]:
    """Of forward and backward, when both have run before."""
    module, found = made(name, params_dtype=torch.bfloat16), []
    with tapes(setting), counting() as account, torch.set_grad_enabled(how != "no gradients"):
        for _ in range(2):
            found.clear()
            account.forget()  # the backend's own memory
            x = drawn(rows, 2, HIDDEN, dtype=torch.bfloat16).requires_grad_(how != "no gradients")
            account.peak = 0
            with region(recipe):
                y = module(x)
            found.append(account.peak)
            if how != "no gradients":
                dy, account.peak = torch.ones_like(y), 0
                y.backward(dy, retain_graph=how == "kept")
                found.append(account.peak)
            del x, y
            module.zero_grad(set_to_none=True)
    return found


@covering(name=TAPED, recipe=[None, *KINDS], rows=[ROWS, 500], how=["released", "kept", "no gradients"])
def test_a_replay_never_takes_more_at_the_peak(name: str, recipe: str | None, rows: int, how: str) -> None:
    replayed, interpreted = (peaks(name, recipe, rows, how, setting) for setting in ("first", "never"))
    assert all(a <= b for a, b in zip(replayed, interpreted, strict=True)), (replayed, interpreted)


# ------------------------------------------------------------------------------------------- what lives on


class Watched:
    """Tensors by name, of which none is held."""

    def __init__(self) -> None:
        self._refs: list[tuple[str, Any]] = []

    def __call__(self, **tensors: torch.Tensor | None) -> None:
        self._refs += [(name, weakref.ref(t)) for name, t in tensors.items() if t is not None]

    @property
    def alive(self) -> list[str]:
        """Those that somebody holds."""
        return [name for name, ref in self._refs if ref() is not None]


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Nothing is let go of but by counting references."""
    gc.disable()
    yield
    gc.enable()


def use(module: Any, recipe: str | None, watched: Watched, grad: bool) -> None:
    """A call whose every tensor is watched."""
    x = drawn(ROWS, 2, HIDDEN).requires_grad_(grad)
    watched(x=x)
    with region(recipe), torch.set_grad_enabled(grad):
        y = module(x)
    watched(y=y)
    if grad:
        dy = torch.ones_like(y)
        watched(dy=dy)
        y.backward(dy)
        watched(dx=x.grad, **{f"d{n}": p.grad for n, p in module.named_parameters()})


@pytest.mark.usefixtures("no_gc")
@covering(name=TAPED, recipe=[None, *KINDS], held=["plain", "quantized"])
def test_nothing_of_a_call_lives_on(name: str, recipe: str | None, held: str) -> None:
    """Neither of those that recorded nor of replays; and when the module has gone, nothing of it."""
    options = {"fuse_qkv_params": True} if name == "TransformerLayer" else {}
    with te.quantized_model_init(enabled=held == "quantized" and recipe is not None, recipe=RECIPES.get(recipe)):
        module = TAPED[name](device="cpu", **options)
    with tapes("first") as ran:
        watched = Watched()
        for grad in (False, True, False, True):
            use(module, recipe, watched, grad)
            module.zero_grad(set_to_none=True)
            assert not watched.alive
        watched(**dict(module.named_parameters()), **dict(module.named_buffers()))
        del module
        gc.collect(0)  # a module is in circles of its own; all that is here is young, for nothing was collected yet
        assert not watched.alive and taped.tapes()
    assert ran.recorded and not ran.interpreted


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("error", [NotRecordedError("not this one"), ValueError("no")], ids=["refused", "failed"])
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP gated"])
def test_nothing_lives_on_of_a_recording_that_fails(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, add, steps = made(name), recorder.Recorder.add_call, []

    def fails(self: Any, *arguments: Any) -> None:
        steps.append(len(self.steps))
        if len(self.steps) == 1:
            raise error
        add(self, *arguments)

    monkeypatch.setattr(recorder.Recorder, "add_call", fails)
    with tapes("first") as ran:
        watched = Watched()
        for grad in (False, True):
            use(module, "current", watched, grad)
            module.zero_grad(set_to_none=True)
            error.__traceback__ = None
            assert not watched.alive
        assert not taped.tapes() and 1 in steps
    reason = str(error) if isinstance(error, NotRecordedError) else f"{taped.FAILED}: {error!r}"
    assert dict(ran.interpreted) == {reason: 3} and not ran.replayed
    taped.COUNTS.interpreted.pop(reason)  # this one is no fault


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP gated"])
def test_nothing_lives_on_of_a_replay_that_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one gives what the layer gives."""
    module, run, left = made(name), recorder.Called._call, [1 << 30]

    def fails(self: Any, *arguments: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise MemoryError
        run(self, *arguments)

    monkeypatch.setattr(recorder.Called, "_call", fails)
    with tapes("first") as ran:
        watched = Watched()
        use(module, "current", watched, True)
        for after in (1, 2, 3, 5, 6):  # the last ones in backward
            left[0] = after
            with pytest.raises(MemoryError):
                use(module, "current", watched, True)
            left[0] = 1 << 30
            module.zero_grad(set_to_none=True)
            assert not watched.alive, after
        use(module, "current", watched, True)
    assert ran.recorded == 2


# ----------------------------------------------------------------------------------------------- how many tapes


def test_shapes_that_come_again_are_all_recorded_in_the_end() -> None:
    with tapes("second") as ran:
        module = made("Linear")
        with torch.no_grad():
            for _ in range(20):
                for n in range(20):
                    module(torch.ones(n + 1, HIDDEN))
        assert len(taped.tapes()) == 20
    assert ran.replayed == 20 * 19 and ran.recorded == 20


@pytest.mark.more
@pytest.mark.usefixtures("no_gc")  # or calls count that let go of what other tests left
@pytest.mark.parametrize(
    ("name", "recipe", "layers", "before"),
    [
        ("LayerNormLinear", "delayed", 2, 50),
        ("TransformerLayer", None, 1, 0),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in product(TAPED, (None, "delayed", "current", "block"), (1, 2), (0, 50))
            if case not in (("LayerNormLinear", "delayed", 2, 50), ("TransformerLayer", None, 1, 0))
        ),
    ],
)
def test_ever_new_shapes_cost_little(
    name: str, recipe: str | None, layers: int, before: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 24 shapes at most 1.3 times the Python calls of a program without tapes, also after steps of one shape: what
    a layer meets once is not recorded, though another layer met the same."""
    monkeypatch.setattr(taped, "ALIGNED", 64)  # a GPU's memory is aligned to 256 bytes, the host's to 64
    spent: dict[str, int] = {}
    with null_device(tmp_path) as null:
        modules = [made(name, params_dtype=torch.bfloat16) for _ in range(layers)]

        def step(rows: int) -> None:
            x = torch.ones(rows, 2, HIDDEN, dtype=torch.bfloat16)
            for module in modules:
                with region(recipe):
                    y = module(x.requires_grad_())
                y.backward(torch.ones_like(y))

        shapes = [64 * n for n in range(1, 25)]
        for warming in ("first", "never"):  # plans, those that recordings ask for too
            with tapes(warming):
                for rows in shapes:
                    step(rows)
        for setting in ("never", "second"):
            with tapes(setting):
                for _ in range(before):
                    step(64 * 40)
                recorded = taped.COUNTS.recorded
                spent[setting] = sum(null.counted(lambda rows=rows: step(rows), 1).python for rows in shapes)
        assert taped.COUNTS.recorded == recorded
    assert spent["second"] <= 1.3 * spent["never"], spent


def test_there_are_so_many_tapes_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were not used for long go first."""
    monkeypatch.setattr(taped, "_MOST_TAPES", 16)
    module = made("Linear")

    def use(rows: int) -> None:
        with torch.no_grad():
            module(torch.ones(rows, HIDDEN))

    with tapes("first"):
        counts = taped.COUNTS
        for rows in range(1, 60):
            use(rows)
            use(1)  # always in use
            assert len(taped.tapes()) <= 16
        before = counts.recorded
        use(1)
        use(59)
        use(55)
        assert counts.recorded == before
        use(20)
        assert counts.recorded == before + 1


@pytest.mark.more
def test_changing_shapes_hold_memory_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of training over inputs of many lengths; there is room for few tapes here.

    How many are kept at the end of an epoch varies, in a period of three, and Python's lists of free objects fill up
    slowly, with tapes or without: so the least of three epochs is compared, when some have passed.
    """
    monkeypatch.setattr(taped, "_MOST_TAPES", 12)
    monkeypatch.setattr(replays, "_MOST", 4)
    draw = random.Random(0)
    lengths = draw.sample(range(1, 100), 20)
    module = made("LayerNormMLP gated")

    def held() -> int:
        """The bytes of Python's objects after an epoch."""
        for n in lengths:
            with region("delayed"):
                module(torch.ones(n, HIDDEN)).sum().backward()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with tapes("never"):
        held()  # what is kept of shapes besides tapes
    with tapes("first") as ran:
        held()
        tracemalloc.start()
        try:
            found = [held() for _ in range(9)]
        finally:
            tracemalloc.stop()
    assert ran.recorded > 40 and min(found[6:]) < min(found[3:6]) + 32_000, found
