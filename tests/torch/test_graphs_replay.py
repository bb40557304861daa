"""make_graphed_callables on a device that runs the captured Python again (tests/fake_graphs.py): what replays mark and
refuse, what capture leaves behind. What only a GPU shows is in test_graphs.py.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe import DelayedScaling
from te_torch import state as scaling
from te_torch import updates
from te_torch.training.graphs import make as graphs
from te_torch.training.rng import get_all_rng_states
from tests.covering import covering
from tests.fake_graphs import FakeDevice
from tests.graph_steps import DELAYED, RECIPES, WIDTH, fake, graph, linear, mlp, number, region, step
from tests.world import differences, fp8_state, values

__all__ = ["fake"]


class Two(torch.nn.Module):
    """Modules of torch around two of ours, and an output without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = linear(), torch.nn.LayerNorm(WIDTH), mlp()

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.second(self.norm(self.first(x)) + shift)
        return {"y": y, "where": y.detach().argmax(-1)}


class Inside(torch.nn.Module):
    """A module that enters its own region."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=DELAYED):
            return self.inner(x)


class Again(torch.nn.Module):
    """A module that computes its inside again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = mlp(), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return te.checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("recipe", RECIPES)
def test_containers_and_keyword_arguments(recipe: str | None, fake: FakeDevice) -> None:
    module = Two()
    eager = copy.deepcopy(module)
    graphed = graph(fake, module, recipe, sample_kwargs={"shift": torch.zeros(WIDTH)})
    for i in range(3):
        shift = values(WIDTH, seed=50 + i)
        a, b = (step(call, call, i, recipe, shift=shift) for call in (graphed, eager))
        assert not differences(a, b), i


@pytest.mark.parametrize("around", [False, True])
def test_a_region_of_its_own(around: bool, fake: FakeDevice) -> None:
    """A callable that enters its region itself: its end updates, or that of the one around it, not both."""
    module = Inside()
    eager = copy.deepcopy(module)
    graphed = graph(fake, module, None)
    for i in range(3):
        recipe = "delayed" if around else None
        assert not differences(step(graphed, module, i, recipe), step(eager, eager, i, recipe)), i
    with torch.no_grad():  # nothing is updated
        before = fp8_state(module)["inner.fp8_state.scale_fwd"]
        graphed(number(9))
        assert torch.equal(before, module.inner.fp8_state.scale_fwd)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_call_outside_of_every_region(recipe: str, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replays what was captured, as in a region of its own."""
    module = linear()
    eager = copy.deepcopy(module)
    graphed = graph(fake, module, recipe)
    for i in range(3):
        with monkeypatch.context() as patch:
            patch.setattr("tests.graph_steps.region", lambda recipe: nullcontext())
            got = step(graphed, module, i, recipe)
        assert not differences(got, step(eager, eager, i, recipe)), i
    assert fake.graphs[0].replays == 3


def test_a_region_of_its_own_and_none_around(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.graph_steps.region", lambda recipe: nullcontext())
    module = Inside()
    eager = copy.deepcopy(module)
    graphed = graph(fake, module, None)
    for i in range(3):
        assert not differences(step(graphed, module, i, None), step(eager, eager, i, None)), i
    assert all((t != 1).any() for n, t in fp8_state(module).items() if "scale" in n)


@covering(how=["around", "in place", "inside"], recipe=RECIPES)
def test_compiled_modules(how: str, recipe: str | None, fake: FakeDevice) -> None:
    """A compiled module is captured: graphs hold what the compiler made, and tell which states it ran."""
    torch._dynamo.reset()
    module = mlp()
    eager = copy.deepcopy(module)
    given: torch.nn.Module = module
    if how == "in place":
        module.compile(backend="aot_eager")
    else:
        compiled: Any = torch.compile(module, backend="aot_eager")
        given = compiled if how == "around" else torch.nn.Sequential(compiled, torch.nn.Identity())
    graphed = graph(fake, given, recipe)
    for i in range(3):
        assert not differences(step(graphed, module, i, recipe), step(eager, eager, i, recipe)), i
    assert [g.replays for g in fake.graphs] == [3, 3]
    torch._dynamo.reset()


def test_several_microbatches_in_one_region(fake: FakeDevice) -> None:
    """One update, of the maxima of all."""
    module = mlp()
    eager = copy.deepcopy(module)
    graphed = graph(fake, module)
    for i in range(3):
        for call in (graphed, eager):
            with region("delayed"):
                for j in range(2):
                    y = call(number(2 * i + j).requires_grad_())
                    y.sum().backward()
        assert not differences(fp8_state(module), fp8_state(eager))


@pytest.mark.parametrize("ran_before", [False, True])
def test_capture_leaves_nothing_behind(ran_before: bool, fake: FakeDevice) -> None:
    updates._pending.clear()  # passes of other tests that an exception ended
    module = Two()
    if ran_before:
        for i in range(2):
            step(module, module, i, "delayed", shift=torch.zeros(WIDTH))
        with region("delayed"):
            module(number(3), shift=torch.zeros(WIDTH))
        module.first.fp8_state.due = True  # as where an exception ended the region
    state = {n: t.clone() for n, t in module.state_dict().items()}
    used = {n: t.clone() for n, t in module.named_buffers()}
    grads = {}
    for n, p in module.named_parameters():
        p.grad = grads[n] = torch.full_like(p, 3.0)
    random = torch.get_rng_state()
    graph(fake, module, "delayed", sample_kwargs={"shift": torch.zeros(WIDTH)})
    assert torch.equal(random, torch.get_rng_state())
    for n, t in module.state_dict().items():
        assert torch.equal(t, state.get(n, torch.ones_like(t) if "scale" in n else torch.zeros_like(t))), n
    for n, t in module.named_buffers():
        assert torch.equal(t, used.get(n, torch.ones_like(t) if "history" not in n else torch.zeros_like(t))), n
    assert all(p.grad is grads[n] and (p.grad == 3).all() for n, p in module.named_parameters())
    assert module.first.fp8_state.due is ran_before and not module.second.fp8_state.due
    assert not scaling.noted and not updates._pending


def test_a_step_updates_once(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a capture not at all: what it captured would reduce over processes, and update, inside of the graph."""
    directions: list[int] = []
    monkeypatch.setattr(updates.amax_reduction, "reduce", lambda states, direction, key: directions.append(direction))
    module = mlp()
    graphed = graph(fake, module)
    assert directions == []
    step(graphed, module, 1, "delayed")
    assert directions == [scaling.FORWARD, scaling.BACKWARD]


def test_random_numbers_of_a_tracker_are_put_back(fake: FakeDevice) -> None:
    class Tracker:
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(5)

        def get_states(self) -> dict[str, torch.Generator]:
            return {"mine": self.generator}

        def set_states(self, states: Any) -> None:
            self.set = states

    tracker = Tracker()
    module = linear()
    module.get_rng_state_tracker = lambda: tracker
    whole = torch.nn.Sequential(module, torch.nn.Dropout(0.5))
    before = tracker.generator.get_state()
    graph(fake, whole, None, pre_warmup_hook=lambda: torch.rand(3, generator=tracker.generator))
    assert torch.equal(before, tracker.generator.get_state())
    assert tracker.set == {"mine": tracker.generator}
    assert all(g.generators == [tracker.generator] for g in fake.graphs)


def test_graphs_know_all_trackers(fake: FakeDevice) -> None:
    """Also one that the module draws from by itself, as a trainer's global one; names stay whose they were."""
    tracker, other = te.CudaRNGStatesTracker(device="cpu"), te.CudaRNGStatesTracker(device="cpu")
    tracker.add("ranks", 5)
    other.add("experts", 6)
    generator = torch.Generator().manual_seed(7)
    other.states_["held"] = generator  # as all are on CUDA

    class Draws(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with tracker.fork("ranks"):
                first = torch.rand(x.shape)
            return x * first * torch.rand(x.shape) * torch.rand(x.shape, generator=generator)

    states = {name: state.clone() for name, state in get_all_rng_states().items() if isinstance(state, torch.Tensor)}
    numbers, before = generator.get_state(), torch.get_rng_state()
    module = Draws()
    graphed = graph(fake, module, None)
    assert all(generator in g.generators for g in fake.graphs)
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(numbers, generator.get_state())
    assert {"ranks", "experts"} <= set(states) == {n for n in get_all_rng_states() if n != "held"}
    assert all(torch.equal(state, get_all_rng_states()[name]) for name, state in states.items())
    seen = [graphed(number(1)).clone() for _ in range(2)]
    assert not torch.equal(*seen)
    torch.set_rng_state(before)
    generator.set_state(numbers)
    tracker.states_["ranks"] = states["ranks"]
    assert all(torch.equal(module.forward.does.eager(number(1)), y) for y in seen), "what eager code would draw"


# ------------------------------------------------------------------------------------ what is refused, and what is not


def test_another_region_is_refused(fake: FakeDevice) -> None:
    module = linear()
    graphed = graph(fake, module)
    x = number(1)
    with region(None), pytest.raises(ArgumentError, match="a call in high precision.*captured in: DelayedScaling"):
        graphed(x)
    with region("current"), pytest.raises(ArgumentError, match="a call in Float8CurrentScaling"):
        graphed(x)
    with te.autocast(recipe=DelayedScaling(amax_history_len=3)):  # another object that says the same
        graphed(x)
    high = graph(fake, linear(), None)
    with region("delayed"):  # as a module with enabled=False among others in one region
        high(x)


def test_another_shape_is_refused(fake: FakeDevice) -> None:
    graphed = graph(fake, linear())
    with region("delayed"):
        with pytest.raises(ArgumentError, match=r"argument 0 \[4, 32\].*what was captured: \[6, 32\].*To do: capture"):
            graphed(number(1, rows=4))
        with pytest.raises(ArgumentError, match="argument 0 .*torch.float64"):
            graphed(number(1).double())
        with pytest.raises(TypeError, match="another structure"):
            graphed(number(1), number(1))
        with pytest.raises(TypeError, match="as argument 0"):
            graphed(3)


def test_a_gradient_that_was_not_captured_is_refused(fake: FakeDevice) -> None:
    graphed = graph(fake, linear(), sample=(number(0),))
    with region("delayed"):
        graphed(number(1))
        with pytest.raises(ArgumentError, match="argument 0, which requires grad"):
            graphed(number(1).requires_grad_())
        with torch.no_grad():
            graphed(number(1).requires_grad_())


@pytest.mark.parametrize("all_", [False, True])
def test_a_parameter_that_is_unfrozen_is_refused(all_: bool, fake: FakeDevice) -> None:
    """Its gradient was not captured; without any there is no graph of a backward at all."""
    module = linear().requires_grad_(not all_)
    module.weight.requires_grad_(False)
    graphed = graph(fake, module, sample=(number(0),))
    with region("delayed"):
        graphed(number(1))
        module.weight.requires_grad_()
        with pytest.raises(ArgumentError, match="parameter weight, which requires grad"):
            graphed(number(1))
        with torch.no_grad():
            graphed(number(1))
        module.weight.requires_grad_(False)
        if all_:
            with pytest.raises(ArgumentError, match="argument 0, which requires grad"):
                graphed(number(1).requires_grad_())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "loaded by assignment": lambda m: m.load_state_dict({n: t.clone() for n, t in m.state_dict().items()}, assign=True),
    "another weight": lambda m: setattr(m, "weight", torch.nn.Parameter(m.weight.detach().clone())),
    "other memory": lambda m: setattr(m.weight, "data", m.weight.data.clone()),
    "moved": lambda m: m.fp8_state._apply(torch.clone),
    "another state": lambda m: setattr(m, "fp8_state", copy.deepcopy(m.fp8_state)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_memory_that_moved_is_refused(change: str, fake: FakeDevice) -> None:
    module = linear()
    graphed = graph(fake, module)
    step(graphed, module, 1, "delayed")
    with region("delayed"):
        y = graphed(number(1))
    CHANGES[change](module)
    for use in (lambda: graphed(number(1)), lambda: y.sum().backward()):
        with region("delayed"), pytest.raises(UnsupportedError, match="To do: call reset"):
            use()
    module.reset()
    step(module, module, 1, "delayed")
    graph(fake, module)
    step(module, module, 1, "delayed")


def run_eagerly(module: torch.nn.Module) -> None:
    """In another recipe with a history of that length, and in the one of the capture."""
    module.eval()
    for recipe in (DelayedScaling(amax_history_len=3, margin=2), DELAYED):
        with te.autocast(recipe=recipe), torch.no_grad():
            module(number(4))
    module.train()


def test_memory_that_stays_is_replayed(fake: FakeDevice) -> None:
    """What eager code, an optimizer and a checkpoint do without moving anything."""
    module = mlp()
    eager = copy.deepcopy(module)
    graphed = graph(fake, module)
    saved = {n: t.clone() for n, t in module.state_dict().items()}
    for round_ in range(3):
        for owner in (module, eager):
            if round_ == 1:
                run_eagerly(owner)
            if round_ == 2:
                owner.load_state_dict(saved)
            torch._foreach_mul_([p.detach() for p in owner.parameters()], 0.9)
        assert not differences(step(graphed, module, round_, "delayed"), step(eager, eager, round_, "delayed")), round_


def test_histories_of_another_length_are_refused(fake: FakeDevice) -> None:
    module = linear()
    graphed = graph(fake, module)
    module.fp8_state.resize_history(7, quiet=True)
    with pytest.warns(UserWarning, match="another length"), region("delayed"):
        with pytest.raises(UnsupportedError, match="FP8 state has other buffers"):
            graphed(number(1))


def test_backwards_of_earlier_calls_are_refused(fake: FakeDevice) -> None:
    module = linear()
    graphed = graph(fake, module)
    with region("delayed"):
        first, second = graphed(number(1)), graphed(number(2))
    with pytest.raises(UnsupportedError, match="a backward of an earlier call"):
        first.sum().backward()
    second.sum().backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="has run already"):
        second.sum().backward()
    with region("delayed"):
        third = graphed(number(1))
    module.reset()
    with pytest.raises(UnsupportedError, match=r"let go of by reset\(\)"):
        third.sum().backward()


def test_a_backward_may_be_repeated_if_asked_for(fake: FakeDevice) -> None:
    module = linear()
    graphed = graph(fake, module, retain_graph_in_backward=True)
    with region("delayed"):
        y = graphed(number(1))
    y.sum().backward(retain_graph=True)
    once = module.weight.grad.clone()
    y.sum().backward()
    assert torch.equal(module.weight.grad, 2 * once)


@pytest.mark.parametrize("checkpoint", [te.checkpoint, torch.utils.checkpoint.checkpoint])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_it_is_refused(checkpoint: Any, use_reentrant: bool, fake: FakeDevice) -> None:
    graphed = graph(fake, linear())
    with region("delayed"), pytest.raises(UnsupportedError, match="inside of a checkpoint"):
        checkpoint(graphed, number(1).requires_grad_(), use_reentrant=use_reentrant).sum().backward()


# --------------------------------------------------------------------------------------------- what comes back


def test_the_other_mode_runs_eagerly(fake: FakeDevice) -> None:
    module = torch.nn.Sequential(linear(), torch.nn.Dropout(0.5))
    graphed = graph(fake, module, None)
    graphed(number(1))
    replays = fake.graphs[0].replays
    graphed.eval()
    assert torch.equal(graphed(number(2, rows=3)), module[0](number(2, rows=3))), "any shape"
    assert fake.graphs[0].replays == replays
    graphed.train()
    graphed(number(1))
    assert fake.graphs[0].replays == replays + 1


def test_eval_is_captured_without_a_backward(fake: FakeDevice) -> None:
    module = mlp().eval()
    graphed = graph(fake, module, "delayed")
    assert len(fake.graphs) == 1
    with region("delayed"):
        y = graphed(number(1))
        assert not y.requires_grad
        assert torch.equal(y, copy.deepcopy(module)(number(1)))
    graphed.train()
    with region("delayed"):
        assert graphed(number(1)).requires_grad


def test_state_dict_and_copies(fake: FakeDevice) -> None:
    """A copy, and a module from a file, is the module without graphs."""
    module = mlp()
    graphed = graph(fake, module)
    step(graphed, module, 1, "delayed")
    assert list(graphed.state_dict()) == list(module.state_dict())
    file = io.BytesIO()
    torch.save(graphed, file)
    file.seek(0)
    replays = fake.graphs[0].replays
    for other in (copy.deepcopy(graphed), torch.load(file, weights_only=False)):
        eager = mlp()
        eager.load_state_dict(other.state_dict())
        assert not differences(step(other, other, 2, "delayed"), step(eager, eager, 2, "delayed"))
        other.reset(), other.backward_dw()
        with torch.no_grad():
            other.fc1_weight.add_(1)
    assert fake.graphs[0].replays == replays
    assert not torch.equal(module.fc1_weight, other.fc1_weight)


def test_reset_lets_go(fake: FakeDevice) -> None:
    module = mlp()
    graphed = graph(fake, module)
    graphed.reset()
    assert all(g.work is None for g in fake.graphs)
    assert "forward" not in module.__dict__ and not hasattr(module, "reset")
    step(module, module, 1, "delayed")


def test_gradients_are_copies_unless_asked_for(fake: FakeDevice) -> None:
    for clone in (True, False):
        module = linear()
        module.bias.skip_backward_post_hook = True
        graphed = graph(fake, module, None, clone_param_grads_on_return=clone)
        graphed(number(1)).sum().backward()
        weight, bias = module.weight.grad, module.bias.grad
        before = weight.clone()
        with torch.no_grad():
            module.weight.grad = module.bias.grad = None
        graphed(number(2)).sum().backward()
        assert torch.equal(weight, before) is clone
        assert bias.data_ptr() == module.bias.grad.data_ptr()


def test_streams_and_events_reach_the_device(fake: FakeDevice) -> None:
    graphed = graph(fake, linear(), None)
    graphed(number(1), cuda_graph_stream="stream", cuda_graph_event="event").sum().backward()
    assert fake.streams == [("stream", "event")] * 2
    graphed.eval()
    graphed(number(1), cuda_graph_stream="stream", cuda_graph_event="event")


def test_hooks(fake: FakeDevice) -> None:
    seen: list[Any] = []

    def note(kind: str) -> Callable[[Any], None]:
        return lambda module: seen.append((kind, module, fake.inside))

    module = linear()
    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    hooks = {kind: {1: note(kind)} for kind in kinds}
    around = {"pre_warmup_hook": lambda: seen.append("before"), "post_warmup_hook": lambda: seen.append("behind")}
    graphed = graph(fake, module, None, num_warmup_iters=2, capture_time_hooks=[hooks], **around)
    once = [(kind, module, None) for kind in kinds]
    assert seen == ["before", *once, *once, "behind", *once]
    graphed(number(1)).sum().backward()
    assert len(seen) == 14, "none at a replay"
    with pytest.raises(UnsupportedError, match="a result of one of the forward_hooks"):
        graph(fake, linear(), None, capture_time_hooks=[{"forward_hooks": {0: lambda module: 1}}])
    assert not graphs.is_graph_capturing()


def test_is_graph_capturing(fake: FakeDevice) -> None:
    seen = []

    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(graphs.is_graph_capturing())
            return 2 * x

    graph(fake, Asks(), None, num_warmup_iters=1)
    assert seen == [True, True] and not graphs.is_graph_capturing()
    graphs.set_capture_start()
    assert graphs.is_graph_capturing()
    graphs.set_capture_end()
    assert not graphs.is_graph_capturing()


@pytest.mark.parametrize("count", [0, 1])
def test_no_warm_up(count: int, fake: FakeDevice) -> None:
    """Unused parameters are found at the capture, and what a checkpoint inside reads is kept for all."""
    for make in (lambda: Again(False), linear):
        module = make()
        module.unused = torch.nn.Parameter(torch.ones(3))
        eager = copy.deepcopy(module)
        graphed = graph(fake, module, num_warmup_iters=count)
        for i in range(2):
            assert not differences(step(graphed, module, i, "delayed"), step(eager, eager, i, "delayed"))


def test_unused_inputs(fake: FakeDevice) -> None:
    class First(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return 2 * x

    sample = (number(0).requires_grad_(), number(1).requires_grad_())
    with pytest.raises(UnsupportedError, match="require grad and get none.*allow_unused_input"):
        graph(fake, First(), None, sample=sample)
    graphed = graph(fake, First(), None, sample=sample, allow_unused_input=True)
    x, y = number(2).requires_grad_(), number(3).requires_grad_()
    graphed(x, y).sum().backward()
    assert (x.grad == 2).all() and y.grad is None
