"""make_graphed_callables on a GPU: every module in every native recipe replays as it runs eagerly, bit for bit, scales
and histories included. What needs no GPU is in test_graphs_replay.py and test_graphs_arguments.py.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import Recipe
from te_torch.training.graphs.make import graph_pool_handle
from tests import recipes
from tests.backends import requires_cuda
from tests.covering import covering
from tests.graph_steps import PIPELINES, Pipeline
from tests.torch.test_capture import BATCH, BF16, FP8_ATTENTION, HIDDEN, MODULES, SEQ
from tests.world import differences, fp8_state

pytestmark = requires_cuda


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward adds in one order. (Garbage is collected once before the captures, not before each.)"""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    with contextlib.suppress(AttributeError):
        monkeypatch.setattr(torch.compiler.config, "force_cudagraph_gc", False)


def rule(recipe: str | None) -> Recipe | None:
    return FP8_ATTENTION if recipe == "fp8_dpa" else recipes.rule(recipe)


def region(recipe: str | None) -> te.autocast:
    return te.autocast(enabled=recipe is not None, recipe=rule(recipe))


class Tensors(torch.nn.Module):
    """A module whose arguments are tensors alone."""

    def __init__(self, name: str, inner: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.inner = MODULES[name]() if inner is None else inner
        self.more: list[Any] = [[96, SEQ * BATCH - 96]] if name == "GroupedLinear" else []
        self.shape = (SEQ, BATCH, 2, 128) if "Dot" in name else (SEQ, BATCH, HIDDEN)
        self.count = 3 if "Dot" in name else 1

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.inner(*tensors, *self.more)

    def sample(self, number: int = 0, factor: float = 1.0) -> tuple[torch.Tensor, ...]:
        """Inputs that require grad."""
        generator = torch.Generator(device="cuda").manual_seed(number)
        made = [torch.randn(self.shape, device="cuda", generator=generator) * factor for _ in range(self.count)]
        return tuple(t.bfloat16().requires_grad_() for t in made)


def graphed(module: Any, recipe: str | None, sample: Any, **options: Any) -> Any:
    return te.make_graphed_callables(module, sample, enabled=recipe is not None, recipe=rule(recipe), **options)


def step(call: Any, owner: Tensors, recipe: str | None, number: int, **options: Any) -> dict[str, torch.Tensor]:
    """A step of larger numbers than the last, with random numbers of its own."""
    inputs = owner.sample(number, 1 + number)
    generator = torch.Generator(device="cuda").manual_seed(1000 + number)
    torch.manual_seed(number)
    with region(recipe):
        y = call(*inputs, **options)
    y = y[0] if isinstance(y, tuple) else y
    dy = torch.randn(y.shape, device="cuda", generator=generator) * (1 + number)
    y.backward(dy.to(y.dtype))
    found = {"y": y.detach().clone(), **{f"d{i}": t.grad.clone() for i, t in enumerate(inputs) if t.grad is not None}}
    found |= {n: p.grad.clone() for n, p in owner.named_parameters() if p.grad is not None}
    owner.zero_grad(set_to_none=True)
    return found | fp8_state(owner)


def compare(name: str, recipe: str | None, numbers: range) -> None:
    module = Tensors(name)
    eager = copy.deepcopy(module)
    call = graphed(module, recipe, module.sample())
    first: list[torch.Tensor] = []
    for number in numbers:
        got, wanted = step(call, module, recipe, number), step(eager, eager, recipe, number)
        assert not differences(got, wanted), number
        assert got["y"].isfinite().all()
        first.append(got["y"])
    assert not torch.equal(first[0], first[-1])
    scales = [t for n, t in fp8_state(module).items() if "scale" in n]
    assert all((t != 1).any() for t in scales)
    assert bool(scales) is (recipe in ("delayed", "fp8_dpa"))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("TransformerLayer", "delayed"), ("LayerNormMLP", "delayed"), ("TransformerLayer, dropout", "current")],
)
def test_a_hundred_steps(name: str, recipe: str) -> None:
    """Inputs grow a hundredfold; every scale and every history agrees in every step."""
    compare(name, recipe, range(100))


def test_emulated_recipes() -> None:
    """`emulate` is that of the region around make_graphed_callables."""
    module = Tensors("Linear")
    eager = copy.deepcopy(module)
    with recipes.region("mxfp8"):
        call = te.make_graphed_callables(module, module.sample(), enabled=True, recipe=recipes.rule("mxfp8"))
    (x,) = module.sample(1)
    with recipes.region("mxfp8"):
        assert torch.equal(call(x), eager(x))
    with region("mxfp8"), pytest.raises(ArgumentError, match="emulated"):
        call(x)


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_training_with_an_optimizer(recipe: str) -> None:
    """A fused AdamW between the replays of three layers, evaluation between, and a checkpoint in the middle."""
    layers = tuple(Tensors("TransformerLayer") for _ in range(3))
    model = torch.nn.Sequential(*layers)
    eager = copy.deepcopy(model)
    graphed(layers, recipe, tuple(one.sample() for one in layers))
    steps = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (model, eager)]
    (x,) = layers[0].sample(3)
    losses: list[list[float]] = [[], []]
    for i in range(12):
        for m, optimizer, seen in zip((model, eager), steps, losses, strict=True):
            with region(recipe):
                loss = (m(x) - x.detach().roll(1, 0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
            if i == 6:
                m.load_state_dict({n: t.clone() for n, t in m.state_dict().items()})
            if i % 4 == 3:
                m.eval()
                with torch.no_grad(), region(recipe):
                    seen.append(m(x[: SEQ // 2]).float().sum().item())
                m.train()
    assert losses[0] == losses[1] and losses[0][-2] < losses[0][0]
    assert not differences(fp8_state(model), fp8_state(eager))


@pytest.mark.timeout(600)  # a compiler of kernels
@covering(how=["around", "inside"], recipe=[None, "delayed", "current"])
def test_compiled_modules(how: str, recipe: str | None) -> None:
    """Graphs of compiled code, whose replays update the states that it ran."""
    torch._dynamo.reset()
    module = Tensors("LayerNormMLP")
    eager = copy.deepcopy(module)
    torch.manual_seed(0)
    call: Any = torch.compile(module) if how == "around" else Outside(torch.compile(module))
    graphed(call, recipe, module.sample())
    for number in range(4):
        got, wanted = step(call, module, recipe, number), step(eager, eager, recipe, number)
        assert got.keys() == wanted.keys()
        for name, t in wanted.items():  # compiled code may round in another place
            noise = (got[name].float() - t.float()).norm() / t.float().norm().clamp_min(1e-6)
            assert noise < 0.02, (number, name, noise)
    torch._dynamo.reset()


class Outside(torch.nn.Module):
    """A module around a compiled one."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------- microbatches and pipelines


@covering(name=PIPELINES, reuse=[False, True])
def test_pipelines(name: str, reuse: bool) -> None:
    chunks, given, order = PIPELINES[name]
    delayed = "apart" in name
    layers = tuple(te.Linear(HIDDEN, HIDDEN, delay_wgrad_compute=delayed, **BF16) for _ in range(sum(chunks)))
    eager = copy.deepcopy(layers)

    def number(i: int) -> torch.Tensor:
        generator = torch.Generator(device="cuda").manual_seed(i)
        x = torch.randn(SEQ, HIDDEN, device="cuda", generator=generator) * (1 + i)
        return x.bfloat16().requires_grad_()

    pipeline = Pipeline(list(layers), chunks, order, rule("delayed"), number)
    samples = tuple((number(0),) for _ in range(len(layers) * pipeline.microbatches))
    options = {"_order": order, "_num_layers_per_chunk": given, "_reuse_graph_input_output_buffers": reuse}
    functions = graphed(layers, "delayed", samples, **options)
    other = Pipeline(list(eager), chunks, order, rule("delayed"), number)
    for _ in range(3):
        assert not differences(pipeline.run(functions), other.run(None))


# ---------------------------------------------------------------------------------------- random numbers, memory


def test_dropout_draws_anew() -> None:
    module = Tensors("TransformerLayer, dropout")
    call = graphed(module, "current", module.sample())
    (x,) = module.sample(1)
    torch.manual_seed(3)
    with region("current"):
        seen = [call(x).clone() for _ in range(3)]
        torch.manual_seed(3)
        again = [call(x).clone() for _ in range(3)]
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert all(torch.equal(a, b) for a, b in zip(seen, again, strict=True))


def test_a_tracker_draws_anew() -> None:
    """Generators of a tracker take part: each replay advances them, and the capture does not."""

    class Tracker:
        def __init__(self) -> None:
            self.states = {"mine": torch.Generator(device="cuda").manual_seed(5)}

        def get_states(self) -> dict[str, torch.Generator]:
            return dict(self.states)

        def set_states(self, states: dict[str, torch.Generator]) -> None:
            self.states = states

    class Draws(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tracker = Tracker()

        def get_rng_state_tracker(self) -> Tracker:
            return self.tracker

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(x.shape, device="cuda", generator=self.tracker.states["mine"])

    module = Draws()
    x = torch.zeros(64, device="cuda")
    wanted_from = torch.Generator(device="cuda").manual_seed(5)
    call = te.make_graphed_callables(module, (x,))
    for _ in range(3):
        assert torch.equal(call(x), torch.rand(64, device="cuda", generator=wanted_from))


def test_layers_and_modules_draw_from_trackers() -> None:
    """Attention's dropout by a layer that was given a tracker, a fork in a module's own code, torch's own generator:
    replays are the eager steps of a twin whose streams stand where these did, and go on from step to step.
    """

    class Draws(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            given, self.untold = te.CudaRNGStatesTracker(), te.CudaRNGStatesTracker()
            given.add("model-parallel-rng", 11)
            self.untold.add("mine", 12)
            options = {"attention_dropout": 0.2, "hidden_dropout": 0.2, "get_rng_state_tracker": lambda: given}
            self.layer = te.TransformerLayer(HIDDEN, 2 * HIDDEN, 4, **options, **BF16)
            self.streams = [s for t in (given, self.untold) for s in t.get_states().values()]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.untold.fork("mine"):
                x = torch.nn.functional.dropout(x, 0.5)
            return torch.nn.functional.dropout(self.layer(x), 0.1)

    inner, eager = Draws(), Draws()
    eager.load_state_dict(inner.state_dict())
    pairs = list(zip(inner.streams, eager.streams, strict=True))
    for mine, other in pairs:
        other.set_state(mine.get_state())
    before = [mine.get_state() for mine, _ in pairs]
    module = Tensors("TransformerLayer", inner)
    call = graphed(module, "current", module.sample())
    assert all(torch.equal(a, mine.get_state()) for a, (mine, _) in zip(before, pairs, strict=True))
    (x,) = module.sample(1)
    seen = []
    for run in (call, eager):
        torch.manual_seed(3)
        for _ in range(3):
            with region("current"):
                seen.append(run(x).detach().clone())
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert all(torch.equal(mine.get_state(), other.get_state()) for mine, other in pairs)


def test_another_stream() -> None:
    module = Tensors("TransformerLayer")
    eager = copy.deepcopy(module)
    call = graphed(module, "delayed", module.sample())
    stream = torch.cuda.Stream()
    for number, event in enumerate((None, torch.cuda.Event(), None, torch.cuda.Event())):
        options = {"cuda_graph_stream": stream} | ({} if event is None else {"cuda_graph_event": event})
        got = step(call, module, "delayed", number, **options)
        assert not differences(got, step(eager, eager, "delayed", number))


def test_memory() -> None:
    """Callables of one pool share it, and reset() gives it back."""

    def held() -> int:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    modules = [Tensors("TransformerLayer") for _ in range(4)]
    samples = [m.sample() for m in modules]
    for m in modules:
        step(m, m, "current", 1)
    before = held()
    pool = graph_pool_handle()
    graphed(modules[0], "current", samples[0], pool=pool)
    one = held() - before
    for m, sample in zip(modules[1:], samples[1:], strict=True):
        graphed(m, "current", sample, pool=pool)
    shared = held() - before
    for m in modules:
        m.reset()
    assert 0 < shared <= 4 * one
    assert held() - before < one
