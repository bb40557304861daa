"""What the tests of graphed callables share: small modules and steps of them, a pipeline's schedule."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from te_torch.training.graphs import device as seam
from te_torch.training.graphs import make as graphs
from tests.fake_graphs import FakeDevice
from tests.world import fp8_state, randomise, values

WIDTH = 32
DELAYED = DelayedScaling(amax_history_len=3)
CURRENT = Float8CurrentScaling()
RECIPES = {None: None, "delayed": DELAYED, "current": CURRENT}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """In the place of CUDA. A capture collects no garbage before: a fake one need not, and each time takes 0.1 s."""
    found = FakeDevice()
    monkeypatch.setattr(seam, "device", found)
    switches = {name: getattr(gc, name) for name in ("isenabled", "enable", "disable")}
    monkeypatch.setattr(graphs, "gc", SimpleNamespace(collect=lambda: 0, **switches))
    return found


def region(recipe: str | None, **options: Any) -> te.autocast:
    return te.autocast(enabled=recipe is not None, recipe=RECIPES[recipe], **options)


def linear(**options: Any) -> te.Linear:
    module = te.Linear(WIDTH, WIDTH, device="cpu", **options)
    randomise(module)
    return module


def mlp(**options: Any) -> te.LayerNormMLP:
    module = te.LayerNormMLP(WIDTH, 48, device="cpu", **options)
    randomise(module)
    return module


def number(i: int, rows: int = 6) -> torch.Tensor:
    """An input, larger from step to step."""
    return values(rows, WIDTH, seed=i) * (1 + i)


def graph(fake: FakeDevice, module: Any, recipe: str | None = "delayed", sample: Any = None, **options: Any) -> Any:
    fake.roots = module if isinstance(module, tuple) else (module,)
    sample = (number(0).requires_grad_(),) if sample is None else sample
    return te.make_graphed_callables(module, sample, enabled=recipe is not None, recipe=RECIPES[recipe], **options)


def step(call: Any, owner: torch.nn.Module, i: int, recipe: str | None, late: bool = True, **kwargs: Any) -> Any:
    """Everything that one step gives and leaves; its backward is behind the region, or (not late) inside."""
    x = number(i).requires_grad_()
    with region(recipe):
        out = call(x, **kwargs)
        y = out["y"] if isinstance(out, dict) else out
        if not late:
            y.backward(values(*y.shape, seed=100 + i) * (1 + i))
    if late:
        y.backward(values(*y.shape, seed=100 + i) * (1 + i))
    found = {"y": y.detach().clone(), "dx": x.grad}
    if isinstance(out, dict):
        found["where"] = out["where"].clone()
    found |= {n: p.grad.clone() for n, p in owner.named_parameters() if p.grad is not None}
    owner.zero_grad(set_to_none=True)
    return found | fp8_state(owner)


class Pipeline:
    """Layers in chunks, run in an order, by functions or eagerly."""

    def __init__(
        self,
        layers: list[torch.nn.Module],
        chunks: list[int],
        order: list[float],
        recipe: Recipe | None,
        number: Callable[[int], torch.Tensor],
    ) -> None:
        self.layers, self.order, self.recipe, self.number = layers, order, recipe, number
        self.firsts = [sum(chunks[:c]) for c in range(len(chunks))]
        self.chunks = chunks
        self.microbatches = order.count(1)

    def run(self, functions: Any) -> dict[str, torch.Tensor]:
        """One step: outputs, gradients, FP8 state. `functions` are those of make_graphed_callables, or None."""
        done: dict[Any, int] = {}
        inputs: dict[Any, torch.Tensor] = {}
        outputs: dict[Any, torch.Tensor] = {}
        found: dict[str, torch.Tensor] = {}
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            for entry in self.order:
                c = int(abs(entry)) if entry == int(entry) else abs(-int(-entry // 1))
                kind = "w" if entry != int(entry) else "f" if entry > 0 else "b"
                m = done[kind, c] = done.get((kind, c), -1) + 1
                calls = [self.call(functions, c - 1, m, k) for k in range(self.chunks[c - 1])]
                if kind == "f":
                    inputs[c, m] = y = self.number(10 * c + m).requires_grad_()
                    for call in calls:
                        y = call(y)
                    outputs[c, m] = y
                    found[f"y{c}{m}"] = y.detach().clone()
                elif kind == "b":
                    outputs.pop((c, m)).sum().mul(m + 1).backward()
                    found[f"dx{c}{m}"] = inputs[c, m].grad.clone()
                else:
                    for call in calls:
                        call.backward_dw()
        for i, layer in enumerate(self.layers):
            found |= {f"{i}.{n}": p.grad.clone() for n, p in layer.named_parameters()} | {
                f"{i}.{n}": t for n, t in fp8_state(layer).items()
            }
            layer.zero_grad(set_to_none=True)
        return found

    def call(self, functions: Any, c: int, m: int, k: int) -> Any:
        """Layer k of chunk c, for microbatch m."""
        if functions is None:
            return self.layers[self.firsts[c] + k]
        return functions[self.firsts[c] * self.microbatches + m * self.chunks[c] + k]


#: Layers of each chunk, _num_layers_per_chunk, _order.
PIPELINES: dict[str, tuple[list[int], Any, list[float]]] = {
    "1F1B": ([2], None, [1, 1, -1, 1, -1, -1]),
    "interleaved": ([1, 1], None, [1, 1, 2, 2, -2, -2, -1, -1]),
    "unequal": ([2, 1], [2, 1], [1, 2, -2, -1, 1, 2, -2, -1]),
    "apart": ([1, 1], 1, [1, 1, 2, 2, -2, -2.5, -2, -1, -2.5, -1, -1.5, -1.5]),
    "apart, by forwards": ([1], None, [1, -1, 0.5, 1, -1, 0.5]),
}
