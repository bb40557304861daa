"""CUDA graphs by torch's documented recipe: three steps on a side stream, then a capture on the stream that it brings.

A replayed step equals an eager step of a copy, bit for bit, over steps whose scales and seeds change. Beside it: two
streams of one thread at once, eager code beside a replay, a capture in a new thread or of what never ran, and a
capture that fails.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling
from tests import recipes
from tests.backends import capability, requires_cuda
from tests.covering import covering
from tests.world import fp8_state

pytestmark = requires_cuda

HIDDEN, SEQ, BATCH = 256, 128, 2
BF16 = {"params_dtype": torch.bfloat16, "device": "cuda"}
RECIPES = (None, *recipes.KINDS)
FP8_ATTENTION = DelayedScaling(amax_history_len=4, fp8_dpa=True)


def layer(**options: Any) -> te.TransformerLayer:
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te.TransformerLayer(HIDDEN, 2 * HIDDEN, 2, **BF16, **quiet | options)


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(HIDDEN, HIDDEN, **BF16),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, HIDDEN, **BF16),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", **BF16),
    "GroupedLinear": lambda: te.GroupedLinear(2, HIDDEN, HIDDEN, **BF16),
    "DotProductAttention": lambda: te.DotProductAttention(2, 128, attention_dropout=0.0),
    "DotProductAttention, dropout": lambda: te.DotProductAttention(2, 128, attention_dropout=0.2),
    "DotProductAttention, soft-cap": lambda: te.DotProductAttention(2, 128, logit_softcap=20.0),
    "MultiheadAttention": lambda: te.MultiheadAttention(HIDDEN, 2, attention_dropout=0.0, **BF16),
    "TransformerLayer": layer,
    "TransformerLayer, dropout": lambda: layer(hidden_dropout=0.1, attention_dropout=0.1),
    "TransformerLayer, cached weights": layer,
    "LayerNorm": lambda: te.LayerNorm(HIDDEN, dtype=torch.bfloat16, device="cuda"),
    "RMSNorm": lambda: te.RMSNorm(HIDDEN, dtype=torch.bfloat16, device="cuda"),
}
# Norms know no recipe; plain attention only an FP8 one of its own. Others meet two recipes, and all by `--full`.
CASES: list[Any] = [
    pytest.param(name, recipe, marks=[] if alone or (i + j) % 3 == 0 else [pytest.mark.full])
    for i, name in enumerate(MODULES)
    for alone in [name in ("LayerNorm", "RMSNorm") or name.startswith("DotProduct")]
    for j, recipe in enumerate(RECIPES)
    if recipe is None or not alone
]
CASES += [(name, "fp8_dpa") for name in ("DotProductAttention", "TransformerLayer")]  # it takes no dropout


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward adds in one order, so that steps can be compared bit for bit."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def region(recipe: str | None) -> Any:
    return te.autocast(recipe=FP8_ATTENTION) if recipe == "fp8_dpa" else recipes.region(recipe)


class Step:
    """A module with static inputs, and one forward and backward of it."""

    def __init__(self, name: str, recipe: str | None, module: torch.nn.Module | None = None) -> None:
        self.recipe, self.name = recipe, name
        self.module = MODULES[name]() if module is None else module
        if name.startswith("DotProduct"):
            self.inputs = [torch.zeros(SEQ, BATCH, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        else:
            self.inputs = [torch.zeros(SEQ, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)]
        for t in self.inputs:
            t.requires_grad_()
        self.dy: torch.Tensor | None = None

    def copy(self) -> Step:
        other = Step(self.name, self.recipe, copy.deepcopy(self.module))
        other.fill(0)
        return other

    def fill(self, number: int) -> None:
        """New values, larger from step to step, and a new seed."""
        generator = torch.Generator(device="cuda").manual_seed(number)
        with torch.no_grad():
            for t in self.inputs:
                t.copy_(torch.randn(t.shape, device="cuda", generator=generator) * (1 + number))
        if self.dy is not None:
            self.dy.copy_(torch.randn(self.dy.shape, device="cuda", generator=generator) * (1 + number))
        torch.manual_seed(number)

    def forward(self) -> torch.Tensor:
        args: list[Any] = list(self.inputs)
        if self.name == "GroupedLinear":
            args.append([96, SEQ * BATCH - 96])
        options = {"is_first_microbatch": True} if self.name.endswith("cached weights") else {}
        with region(self.recipe):
            y = self.module(*args, **options)
        return y[0] if isinstance(y, tuple) else y

    def run(self) -> torch.Tensor:
        y = self.forward()
        if self.dy is None:
            self.dy = torch.ones_like(y)
        y.backward(self.dy)
        return y

    def clear(self) -> None:
        for t in (*self.inputs, *self.module.parameters()):
            t.grad = None

    def results(self, y: torch.Tensor) -> dict[str, torch.Tensor]:
        grads = {f"d{i}": t.grad for i, t in enumerate(self.inputs)}
        grads |= {n: p.grad for n, p in self.module.named_parameters()}
        return {"y": y.detach(), **{n: t for n, t in grads.items() if t is not None}, **fp8_state(self.module)}


def warm(*steps: Step) -> None:
    """torch's recipe: three steps on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in steps:
            for number in range(3):
                step.fill(number)
                step.clear()
                step.run()
            step.clear()
    torch.cuda.current_stream().wait_stream(side)


def capture(work: Callable[[], Any], **options: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        made = work()
    return graph, made


def unequal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert set(a) == set(b)
    return [name for name in a if not torch.equal(a[name], b[name])]


def eager_step(step: Step, number: int) -> dict[str, torch.Tensor]:
    step.fill(number)
    step.clear()
    return step.results(step.run())


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_a_replay_is_an_eager_step(name: str, recipe: str | None) -> None:
    graphed = Step(name, recipe)
    eager = graphed.copy()
    warm(graphed, eager)
    graph, y = capture(graphed.run)
    seen = set()
    for number in (1, 4, 9, 2):
        graphed.fill(number)
        graph.replay()
        got = {n: t.clone() for n, t in graphed.results(y).items()}
        assert not unequal(got, eager_step(eager, number)), number
        assert got["y"].isfinite().all()
        seen.add(got["y"].float().sum().item())
    assert len(seen) == 4
    if "dropout" in name:  # another seed draws another mask
        torch.manual_seed(77)
        graph.replay()
        assert not torch.equal(graphed.results(y)["y"], got["y"])


@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])
def test_a_whole_step_with_its_optimizer(recipe: str | None) -> None:
    """Weights, moments, scales and histories after a hundred replays are those after a hundred eager steps."""
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
    model = torch.nn.Sequential(*[te.TransformerLayer(HIDDEN, 2 * HIDDEN, 4, **options) for _ in range(2)])
    models = [model, copy.deepcopy(model)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True, capturable=True) for m in models]
    x = torch.zeros(SEQ, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def fill(number: int) -> None:
        x.copy_(torch.randn(x.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(number)))
        x.mul_(1 + number / 10)

    def one(i: int) -> torch.Tensor:
        optimizers[i].zero_grad(set_to_none=True)
        with region(recipe):
            loss = (models[i](x) - x.roll(1, 0)).float().square().mean()
        loss.backward()
        optimizers[i].step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in (0, 1):
            for number in range(3):
                fill(number)
                one(i)
    torch.cuda.current_stream().wait_stream(side)
    gc.collect()
    graph, loss = capture(lambda: one(0))
    losses = set()
    for number in range(3, 103):
        fill(number)
        graph.replay()
        assert torch.equal(loss, one(1)), number
        losses.add(loss.item())
    assert len(losses) > 90
    found, wanted = ({n: t for n, t in m.state_dict().items() if torch.is_tensor(t)} for m in models)
    assert not unequal(found, wanted) and not unequal(fp8_state(models[0]), fp8_state(models[1]))
    moments = [[t for s in o.state.values() for t in s.values()] for o in optimizers]
    assert all(torch.equal(a, b) for a, b in zip(*moments, strict=True))


@pytest.mark.parametrize("recipe", [None, "delayed", "fp8_dpa"])
def test_forward_alone(recipe: str | None) -> None:
    step = Step("TransformerLayer", recipe)
    step.module.eval()
    with torch.no_grad():
        step.fill(3)
        for _ in range(3):
            step.forward()
        graph, y = capture(step.forward)
        for number in (1, 5):
            step.fill(number)
            graph.replay()
            assert torch.equal(y, step.forward())


@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])
def test_what_never_ran_is_captured(recipe: str | None) -> None:
    """No warm-up, in a thread that has done nothing yet: handles, plans and kernels are made inside the capture."""
    size = {None: 320, "delayed": 352, "current": 384, "block": 416}[recipe]
    module = te.TransformerLayer(size, 2 * size, 2, hidden_dropout=0.0, attention_dropout=0.0, **BF16)
    x = torch.randn(48, 3, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.ones_like(x)
    eager = copy.deepcopy(module)
    made: dict[str, Any] = {}

    def work() -> None:
        def step() -> torch.Tensor:
            with region(recipe):
                y = module(x)
            y.backward(dy)
            return y

        try:
            made["graph"], made["y"] = capture(step)
        except BaseException as error:
            made["error"] = error

    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if "error" in made:
        raise made["error"]
    made["graph"].replay()
    with region(recipe):
        wanted = eager(x)
    assert torch.equal(made["y"], wanted)


class Inside(torch.nn.Module):
    """A module with its region inside, as `torch.cuda.make_graphed_callables` wants it."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step, self.module = step, step.module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        args: list[Any] = list(inputs)
        if self.step.name == "GroupedLinear":
            args.append([96, SEQ * BATCH - 96])
        with region(self.step.recipe):
            out = self.module(*args)
        return out


@covering(name=["Linear", "LayerNormMLP", "TransformerLayer"], recipe=[None, "delayed", "fp8_dpa", "current", "block"])
def test_graphed_callables(name: str, recipe: str | None) -> None:
    if recipe == "fp8_dpa" and name != "TransformerLayer":
        recipe = "delayed"
    step = Step(name, recipe)
    eager = step.copy()
    step.fill(0)
    sample = tuple(t.detach().clone().requires_grad_() for t in step.inputs)
    graphed = torch.cuda.make_graphed_callables(Inside(step), sample, num_warmup_iters=3)
    state = {n: t.clone() for n, t in step.module.state_dict().items()}
    eager.module.load_state_dict(state)
    eager.dy = torch.zeros(SEQ, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)
    for number in (1, 5):
        x = eager.inputs[0].detach().clone().requires_grad_()
        wanted = eager_step(eager, number)
        step.clear()
        with torch.no_grad():
            x.copy_(eager.inputs[0])
        y = graphed(x)
        y.backward(eager.dy)
        got = {"y": y.detach(), "d0": x.grad}
        got |= {n: p.grad for n, p in step.module.named_parameters()} | fp8_state(step.module)
        assert not unequal(got, wanted), number


@pytest.mark.parametrize("recipe", [None, "delayed", "fp8_dpa"])
def test_two_streams_of_one_thread(recipe: str | None) -> None:
    """Their work overlaps, so neither may write into scratch memory that the other one reads."""
    steps = [Step("TransformerLayer", recipe) for _ in range(2)]
    wanted = []
    for number, step in enumerate(steps):
        reference = step.copy()
        wanted.append([eager_step(reference, 3 * number + i) for i in range(4)])
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()
    got: list[list[dict[str, torch.Tensor]]] = [[], []]
    for i in range(4):
        for number, (step, stream) in enumerate(zip(steps, streams, strict=True)):
            with torch.cuda.stream(stream):
                found = eager_step(step, 3 * number + i)
                got[number].append({n: t.clone() for n, t in found.items()})
    torch.cuda.synchronize()
    for a, b in zip(wanted, got, strict=True):
        assert not [unequal(x, y) for x, y in zip(a, b, strict=True) if unequal(x, y)]


@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block", "fp8_dpa"])
def test_eager_code_beside_a_replay(recipe: str | None) -> None:
    """Eager steps on the stream of the capture, while the graph replays on another: none disturbs the other."""
    graphed, other = Step("TransformerLayer", recipe), Step("TransformerLayer", recipe)
    alone = other.copy()
    twin = graphed.copy()
    stream, replays = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for step in (graphed, twin, other, alone):
            for number in range(3):
                eager_step(step, number)
        for step in (graphed, twin):
            step.clear()
    stream.synchronize()
    graph, y = capture(graphed.run, stream=stream)
    for step in (graphed, other):
        step.fill(5)
    torch.cuda.synchronize()
    for _ in range(4):
        with torch.cuda.stream(replays):
            graph.replay()
        with torch.cuda.stream(stream):
            other.clear()
            found = other.results(other.run())
    torch.cuda.synchronize()
    for step, results in ((twin, graphed.results(y)), (alone, found)):
        step.fill(5)
        for _ in range(4):
            step.clear()
            wanted = step.results(step.run())
        assert not unequal({n: t.clone() for n, t in results.items()}, wanted)


def draws() -> torch.Tensor:
    """What a process needs of torch's generator after a failed capture."""
    with te.quantized_model_init(recipe=DelayedScaling()):
        weight = te.Linear(64, 64, **BF16).weight
    return weight.dequantize()


def test_a_refused_capture_leaves_the_process_usable() -> None:
    """What is refused in a capture is refused by an error of ours, before the capture is spoilt."""
    attention = te.DotProductAttention(2, 64, qkv_format="thd", attn_mask_type="padding_causal")
    q, k, v = (torch.randn(100, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 60, 100], dtype=torch.int32, device="cuda")
    with pytest.raises(ArgumentError, match="max_seqlen"):
        capture(lambda: attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu))
    assert draws().isfinite().all()
    step = Step("TransformerLayer, dropout", "delayed")
    warm(step)
    graph, y = capture(step.run)
    graph.replay()
    assert y.isfinite().all()


def test_a_spoilt_capture_leaves_modules_usable() -> None:
    """A synchronisation in the middle ends a capture; torch's generator then has to be told (2.11 does not)."""
    step = Step("TransformerLayer, dropout", "delayed")
    warm(step)

    def spoil() -> None:
        step.run().sum().item()

    with pytest.raises(RuntimeError):
        capture(spoil)
    torch.cuda.synchronize()
    assert draws().isfinite().all()
    step.fill(1)
    step.clear()
    assert step.run().isfinite().all()
    graph, y = capture(step.run)
    graph.replay()
    assert y.isfinite().all()


def test_memory_of_captures_is_shared() -> None:
    """Scratch memory of a capture lies in its pool: captures that share a pool share it."""
    step = Step("TransformerLayer", "current")
    warm(step)
    gc.collect()
    torch.cuda.empty_cache()  # as a capture does first: what others left does not count
    before = torch.cuda.memory_reserved()
    graph, y = capture(step.run)
    one = torch.cuda.memory_reserved() - before
    keep = [(graph, y)]
    for _ in range(4):
        step.clear()
        keep.append(capture(step.run, pool=graph.pool()))
    assert torch.cuda.memory_reserved() - before <= 2 * one


def test_native_recipes_are_native_here() -> None:
    """So that a capture of what is emulated cannot pass for one of what is native."""
    if capability()[0] == 9:
        for recipe in ("delayed", "current", "block"):
            step = Step("Linear", recipe)
            step.fill(0)
            step.run()
            rows = te.precision_report(step.module).as_dict()["gemms"]
            assert rows and all("cublasLt" in row["family"] for row in rows), rows
