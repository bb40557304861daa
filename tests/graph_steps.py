"""A pipeline's schedule, run by graphed functions or eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import te_torch as te
from te_core.recipe import Recipe
from tests.module_steps import fp8_state


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
