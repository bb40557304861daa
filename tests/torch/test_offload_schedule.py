"""When layers leave the device and come back, step by step: on a device that is not there (tests/offload_side.py)."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import te_torch as te
from te_torch.training import offload
from te_torch.training.offload import OffloadableLayerState, OffloadSynchronizer
from te_torch.training.offload.device import THRESHOLD
from tests.offload_side import RecordedSide, side

__all__ = ["side"]
ROWS, WIDTH = 512, 512  # as many elements as are offloaded at least

Event = tuple[str, int]


@pytest.fixture
def events(side: RecordedSide, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What layers did, in order, with what `run` notes: "enter" and "backward"."""
    noted: list[Event] = []
    steps = {"start_offload": "copy", "release_activation_forward_gpu_memory": "release", "start_reload": "reload"}
    for name, short in steps.items():
        monkeypatch.setattr(OffloadableLayerState, name, _noting(noted, short, getattr(OffloadableLayerState, name)))
    return noted


def _noting(noted: list[Event], short: str, step: Callable[[Any], None]) -> Callable[[Any], None]:
    def noting(layer: Any) -> None:
        noted.append((short, layer.index))
        step(layer)

    return noting


def values(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def sine(x: torch.Tensor) -> torch.Tensor:
    """A layer that saves its input."""
    return torch.sin(x)


def forward(
    made: Any, layers: int, events: list[Event] | None = None, x: torch.Tensor | None = None, argument: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the leaf, the output) of a stack of sines."""
    context, sync = made[:2]
    leaf = (values() if x is None else x).requires_grad_()
    y = leaf * 1.0
    for i in range(layers):
        if events is not None:
            events.append(("enter", i))
        with context:
            y = sine(y)
        if argument:
            y = sync(y)
        else:
            assert sync() is None
        if events is not None:
            y.register_hook(lambda grad, i=i: events.append(("backward", i)))  # type: ignore[misc]
    return leaf, y


def plain(layers: int, x: torch.Tensor | None = None) -> torch.Tensor:
    """The gradient without offloading."""
    leaf = (values() if x is None else x).clone().requires_grad_()
    y = leaf * 1.0
    for _ in range(layers):
        y = sine(y)
    y.sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def context_of(*args: Any, **kw: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of num_layers = model_layers - 1
        return te.get_cpu_offload_context(True, *args, **kw)


def documented(layers: int, count: int, earlier: int = 0) -> list[Event]:
    """The schedule as it is documented."""
    expected: list[Event] = []
    for entered in range(layers):
        expected.append(("enter", entered))
        expected += [("copy", i) for i in range(count) if i + 1 == entered]
        expected += [("release", i) for i in range(count) if layers - count + i == entered]
    for layer in reversed(range(layers)):
        before = [i for i in reversed(range(count)) if layers - 1 - count + i + earlier == layer]
        expected += [("reload", i) for i in before]
        expected.append(("backward", layer))
    return expected


@pytest.mark.parametrize(("layers", "count"), [(4, 1), (4, 2), (4, 3), (7, 3), (8, 6), (12, 11), (2, 1)])
@pytest.mark.parametrize("double", [False, True])
def test_documented_schedule(events: list[Event], layers: int, count: int, double: bool) -> None:
    made = context_of(count, layers, double_buffering=double)
    for _ in range(2):
        events.clear()
        leaf, y = forward(made, layers, events)
        y.sum().backward()
        assert events == documented(layers, count, double)
        assert torch.equal(leaf.grad, plain(layers))


def test_backward_is_noticed_without_an_argument(events: list[Event]) -> None:
    leaf, y = forward(context_of(2, 5), 5, argument=False)
    y.sum().backward()
    order = [event for event in documented(5, 2) if event[0] not in ("enter", "backward")]
    assert events == order
    assert torch.equal(leaf.grad, plain(5))


def test_layers_are_counted_where_nobody_says_how_many(events: list[Event]) -> None:
    """12 layers, model_layers left out: the first pass finds out, the next ones go by the documented schedule."""
    made = te.get_cpu_offload_context(enabled=True, num_layers=12)
    leaf, y = forward(made, 12, events)
    y.sum().backward()
    assert torch.equal(leaf.grad, plain(12))
    first = [e for e in events if e[0] in ("copy", "release")]
    assert [i for what, i in first if what == "release"] == list(range(10))  # each one layer after its copy
    for _ in range(2):
        events.clear()
        leaf, y = forward(made, 12, events)
        y.sum().backward()
        assert events == documented(12, 10)
        assert torch.equal(leaf.grad, plain(12))
    events.clear()
    leaf, y = forward(made, 5, events)  # another model: counted anew
    y.sum().backward()
    assert torch.equal(leaf.grad, plain(5))


def alive(refs: list[StorageWeakRef]) -> list[bool]:
    return [not ref.expired() for ref in refs]


@pytest.mark.parametrize(("layers", "count"), [(6, 2), (6, 4)])
def test_device_memory_is_let_go_of(side: RecordedSide, layers: int, count: int) -> None:
    """At the end of forward there are model_layers - num_layers layers on the device, and the others on the host."""
    context, sync = context_of(count, layers)
    leaf = values().requires_grad_()
    y = leaf * 1.0
    saved = []
    for _ in range(layers):
        saved.append(StorageWeakRef(y.untyped_storage()))
        with context:
            y = sine(y)
        y = sync(y)
    assert alive(saved) == [i >= count for i in range(layers)]
    each = 4 * ROWS * WIDTH
    assert side.copied == [("out", each)] * count
    assert side.held == count * each
    y.sum().backward()
    assert side.copied[count:] == [("back", each)] * count
    assert side.held == 0


@pytest.mark.parametrize("layers", [4, None])
@pytest.mark.parametrize("reached", [None, 1, 2, 3])
def test_memory_goes_with_the_graph(
    side: RecordedSide, reached: int | None, layers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass holds what was saved: neither device nor host memory outlives the graph, without a garbage collection.
    Also where copies were on their way out, or back for layers that no backward reaches."""
    rooms: list[StorageWeakRef] = []
    room = side.room

    def noted(nbytes: int) -> torch.Tensor:
        made = room(nbytes)
        rooms.append(StorageWeakRef(made.untyped_storage()))
        return made

    monkeypatch.setattr(side, "room", noted)
    gc.collect()
    gc.disable()
    try:
        context, sync = context_of(2, 4) if layers else te.get_cpu_offload_context(enabled=True, num_layers=3)
        y, passed = values().requires_grad_(), []
        for _ in range(4):
            with context:
                y = sine(y)
            y = sync(y)
            passed.append(y)
        kept = [StorageWeakRef(t.untyped_storage()) for t in passed]
        assert side.held
        if reached is not None:
            torch.autograd.grad(y.sum(), passed[reached - 1])
            assert rooms or reached == 3 or not layers
        del y, passed
        assert side.held == 0
        assert all(ref.expired() for ref in (*kept, *rooms))
    finally:
        gc.enable()


def test_pass_given_up_while_copies_run(side: RecordedSide) -> None:
    context, sync = context_of(3, 6)
    y = values().requires_grad_() * 1.0
    for _ in range(2):
        with context:
            y = sine(y)
        y = sync(y)
    before = side.forgotten
    del y, context, sync
    gc.collect()
    assert side.forgotten > before  # the allocator is told that copies read that memory


def test_two_forwards_before_their_backwards(side: RecordedSide) -> None:
    made = context_of(3, 5)
    a, y = forward(made, 5, x=values(1))
    b, z = forward(made, 5, x=values(2))
    z.sum().backward()
    y.sum().backward()
    assert torch.equal(a.grad, plain(5, values(1)))
    assert torch.equal(b.grad, plain(5, values(2)))
    assert side.moved("out") == side.moved("back") == 6 * 4 * ROWS * WIDTH


def test_backward_twice(side: RecordedSide) -> None:
    leaf, y = forward(context_of(3, 5), 5)
    y.sum().backward(retain_graph=True)
    once = leaf.grad.clone()
    y.sum().backward()
    assert torch.equal(leaf.grad, 2 * once)
    assert torch.equal(once, plain(5))


def test_second_derivatives(side: RecordedSide) -> None:
    leaf, y = forward(context_of(2, 4), 4)
    (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    again = values().requires_grad_()
    z = again * 1.0
    for _ in range(4):
        z = sine(z)
    (d,) = torch.autograd.grad(z.sum(), again, create_graph=True)
    assert torch.equal(second, torch.autograd.grad(d.sum(), again)[0])


# ------------------------------------------------------------------------------------------------- mistakes


def test_entry_inside_of_an_entry(side: RecordedSide) -> None:
    context, _ = context_of(1, 3)
    with pytest.raises(RuntimeError, match="entered already"), context, context:
        pass
    leaf, y = forward((context, _), 3)
    y.sum().backward()
    assert torch.equal(leaf.grad, plain(3))


def test_sync_at_the_wrong_place(side: RecordedSide) -> None:
    context, sync = context_of(1, 3)
    x = values().requires_grad_()
    with pytest.raises(RuntimeError, match="before the context was entered"):
        sync(x)
    with pytest.raises(RuntimeError, match="inside of the context"), context:
        sync(sine(x))
    with context:
        y = sine(x)
    with pytest.raises(ValueError, match="requires no gradient"):
        sync(y.detach())
    with pytest.raises(ValueError, match="3"):
        sync(3)
    assert sync(y) is y


def test_offload_without_a_synchronizer(side: RecordedSide) -> None:
    context, sync = context_of(1, 3)
    y = values().requires_grad_()
    with context:
        y = sine(y)
    with pytest.raises(RuntimeError, match=r"without sync_fn behind layer 0.*y = sync_fn\(y\)"), context:
        pass
    leaf, y = forward((context, sync), 3)  # and it begins anew
    y.sum().backward()
    assert torch.equal(leaf.grad, plain(3))
    for i in range(3):
        with context:
            y = sine(y)
        if i < 2:
            y = sync(y)
    with pytest.raises(RuntimeError, match="backward without sync_fn behind layer 2"):
        y.sum().backward()


def test_entry_in_backward(side: RecordedSide) -> None:
    context, sync = context_of(1, 3)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with context:
            x = sine(x)
        return sync(x)  # type: ignore[no-any-return]

    y = te.checkpoint(inside, values().requires_grad_())
    with pytest.raises(RuntimeError, match=r"put the checkpoint inside of the context"):
        y.sum().backward()


def test_disabled() -> None:
    context, sync = te.get_cpu_offload_context(enabled=False, num_layers=0)
    with context, context:
        assert not offload.is_cpu_offload_enabled()
    x = torch.zeros(1)
    assert sync(x) is x
    assert sync() is None
    assert te.get_cpu_offload_context(manual_synchronization=True)[2] is None


def test_older_order() -> None:
    """(enabled, num_layers, offload_activations, offload_weights)."""
    context, _ = te.get_cpu_offload_context(True, 3, True, False)
    assert (context.num_layers, context.model_layers) == (3, None)
    assert context.rules.activations
    assert context.rules.weights is None
    context, _ = te.get_cpu_offload_context(True, 3, False, True)
    assert not context.rules.activations
    assert context.rules.weights is not None


# --------------------------------------------------------------------------------------- what does not count


def test_without_gradients_nothing_counts(side: RecordedSide, events: list[Event]) -> None:
    made = context_of(2, 4)
    with torch.no_grad():
        x, y = forward(made, 3)
    assert torch.equal(y, sine(sine(sine(values()))))
    leaf, y = forward(made, 4)
    with torch.no_grad():
        forward(made, 1)  # a look at something else between forward and backward
    y.sum().backward()
    assert torch.equal(leaf.grad, plain(4))
    assert events == [e for e in documented(4, 2) if e[0] not in ("enter", "backward")]


def test_error_in_forward(side: RecordedSide) -> None:
    context, sync = context_of(2, 4)
    y = values().requires_grad_() * 1.0
    for i in range(3):
        with pytest.raises(KeyError) if i == 2 else context:
            if i == 2:
                with context:
                    raise KeyError
            y = sine(y)
        if i < 2:
            y = sync(y)
    y.sum().backward()  # what ran before it can still be used
    leaf, y = forward((context, sync), 4)
    y.sum().backward()
    assert torch.equal(leaf.grad, plain(4))


def test_two_models_at_once(side: RecordedSide) -> None:
    one, two = context_of(2, 4), context_of(1, 3)
    a, b = values(1).requires_grad_(), values(2).requires_grad_()
    x, y = a * 1.0, b * 1.0
    for i in range(4):
        with one[0]:
            x = sine(x)
        x = one[1](x)
        if i < 3:
            with two[0]:
                y = sine(y)
            y = two[1](y)
    (x.sum() + y.sum()).backward()
    assert torch.equal(a.grad, plain(4, values(1)))
    assert torch.equal(b.grad, plain(3, values(2)))


def test_context_inside_of_another_ones() -> None:
    outer, inner = context_of(1, 3)[0], context_of(1, 3)[0]
    with outer:
        assert offload.is_cpu_offload_enabled()
        with inner:
            assert offload.is_cpu_offload_enabled()
        assert offload.is_cpu_offload_enabled()
    assert not offload.is_cpu_offload_enabled()


def test_entered_once_around_all(side: RecordedSide) -> None:
    """Without TransformerLayers nothing says where layers begin; a program that does so is told."""
    context, sync = te.get_cpu_offload_context(True, 2)
    for i in range(2):
        with pytest.warns(UserWarning, match="enter it for each layer") if i else warnings.catch_warnings(), context:
            y = sine(sine(values().requires_grad_()))
        sync()
        y.sum().backward()
    assert not side.copied


# ----------------------------------------------------------------------------------------- retained buffers


def test_buffers_are_kept(side: RecordedSide) -> None:
    made = context_of(2, 4, retain_pinned_cpu_buffers=True)
    for seed in range(3):
        leaf, y = forward(made, 4, x=values(seed))
        y.sum().backward()
        assert torch.equal(leaf.grad, plain(4, values(seed)))
    assert side.buffers == 2
    assert side.held == 2 * 4 * ROWS * WIDTH
    a, y = forward(made, 4, x=values(1))
    b, z = forward(made, 4, x=values(2))  # the first ones are still read
    (y.sum() + z.sum()).backward()
    assert side.buffers == 4
    assert torch.equal(a.grad, plain(4, values(1)))
    assert torch.equal(b.grad, plain(4, values(2)))
    with pytest.raises(ValueError, match="the same shapes in every pass"):
        forward(made, 4, x=values(0, rows=ROWS + 8))


def test_buffers_are_not_kept_unasked(side: RecordedSide) -> None:
    made = context_of(2, 4)
    for rows in (ROWS, ROWS + 8):
        forward(made, 4, x=values(0, rows))[1].sum().backward()
    assert side.buffers == 4
    assert side.held == 0


# -------------------------------------------------------------------------------------------------- manual


def manual(layers: int = 3) -> tuple[Any, torch.Tensor, torch.Tensor]:
    made = te.get_cpu_offload_context(True, model_layers=layers, manual_synchronization=True)
    leaf, y = forward(made, layers)
    return made[2], leaf, y


def test_by_hand(side: RecordedSide, events: list[Event]) -> None:
    controller, leaf, y = manual()
    assert isinstance(controller, te.ManualOffloadSynchronizer)
    assert not events  # num_layers says nothing here
    for i in (0, 2):
        controller.start_offload_layer(i)
    controller.release_activation_forward_gpu_memory(0)
    controller.start_reload_layer(0)
    y.sum().backward()  # layer 2 was copied and never left, layer 1 was not touched
    assert torch.equal(leaf.grad, plain(3))
    assert events == [("copy", 0), ("copy", 2), ("release", 0), ("reload", 0)]
    assert side.moved("back") == 4 * ROWS * WIDTH


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (("release_activation_forward_gpu_memory",), "call start_offload before"),
        (("start_reload_layer",), "call release_activation_forward_gpu_memory before"),
        (("start_offload_layer", "start_reload_layer"), "call release_activation_forward_gpu_memory before"),
        (("start_offload_layer", "start_offload_layer"), "call it once a pass"),
    ],
)
def test_wrong_order_by_hand(side: RecordedSide, steps: tuple[str, ...], says: str) -> None:
    controller, _, _ = manual()
    *before, last = steps
    for step in before:
        getattr(controller, step)(0)
    with pytest.raises(RuntimeError, match=says):
        getattr(controller, last)(0)


def test_backward_before_the_reload_by_hand(side: RecordedSide) -> None:
    controller, _, y = manual()
    controller.start_offload_layer(0)
    controller.release_activation_forward_gpu_memory(0)
    with pytest.raises(RuntimeError, match=r"layer 0 in state 'offload_finished'.*call start_reload before"):
        y.sum().backward()


def test_layer_that_is_not_there(side: RecordedSide) -> None:
    controller, _, _ = manual()
    with pytest.raises(ValueError, match="0 to 2"):
        controller.start_offload_layer(3)
    context, _, controller = te.get_cpu_offload_context(True, manual_synchronization=True)
    with context, pytest.raises(RuntimeError, match="which still runs"):
        controller.start_offload_layer(0)


def test_states_of_a_layer(side: RecordedSide) -> None:
    layer = OffloadableLayerState()
    t = values()
    expected = t.clone()
    held = layer.push_tensor(t)
    states = [layer.state]
    layer.start_offload()
    states.append(layer.state)
    layer.release_activation_forward_gpu_memory()
    states.append(layer.state)
    layer.start_reload()
    states.append(layer.state)
    back = layer.pop_tensor(held)
    states.append(layer.state)
    assert states == ["not_offloaded", "offload_started", "offload_finished", "reload_started", "not_offloaded"]
    assert back is not t
    assert torch.equal(back, expected)
    assert layer.offloaded_bytes == t.numel() * 4
    layer.release_all_memory()
    assert t.numel() >= THRESHOLD
    assert issubclass(te.ManualOffloadSynchronizer, OffloadSynchronizer)
