"""Bytes that each weight takes while a model trains, counted on a CPU, as docs/guides/13-memory.md shows them.

python tools/memory_table.py
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

import te_torch as te
from te_core.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling

SIZE = 1024  # of a square weight: large enough for scales to vanish in the second decimal
KINDS = ("parameters", "rowwise", "columnwise", "scales")  # of te.memory_report: what a weight is held in
BF16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
MASTERS: dict[str, Any] = {"master_weights": True}
HALVES = MASTERS | {"store_param_remainders": True}
#: What a row says, the recipe that weights are held in (None: bf16), the arguments of FusedAdam.
WAYS: list[tuple[str, Any, dict[str, Any]]] = [
    ("bf16, moments in bf16", None, BF16),
    ("bf16, moments in float32", None, {}),
    ("bf16, float32 masters, moments in float32", None, MASTERS),
    ("bf16, masters as remainders, moments in float32", None, HALVES),
    ("bf16, masters as remainders, moments in bf16", None, HALVES | BF16),
    (
        "bf16, masters as remainders, moments in FP8 and float16",
        None,
        HALVES | {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
    ),
    ("FP8 (current scaling), float32 masters, moments in float32", Float8CurrentScaling(), MASTERS),
    ("FP8 (current scaling), float32 masters, moments in bf16", Float8CurrentScaling(), MASTERS | BF16),
    ("FP8 (block scaling), float32 masters, moments in bf16", Float8BlockScaling(), MASTERS | BF16),
    ("MXFP8, float32 masters, moments in bf16", MXFP8BlockScaling(), MASTERS | BF16),
]


def counted(recipe: Any, options: dict[str, Any]) -> list[float]:
    """Bytes of a weight, its gradient and its state in the optimizer, after a step."""
    with nullcontext() if recipe is None else te.quantized_model_init(recipe=recipe):
        layer = te.Linear(SIZE, SIZE, bias=False, device="cpu", params_dtype=torch.bfloat16)
    optimizer = te.optimizers.FusedAdam(layer.parameters(), **options)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        layer(torch.randn(32, SIZE, dtype=torch.bfloat16)).sum().backward()
    held = te.memory_report(layer).totals
    optimizer.step()
    states = [t for t in optimizer.state[layer.weight].values() if isinstance(t, torch.Tensor)]
    found = sum(held[kind] for kind in KINDS), held["gradients"], sum(t.nbytes for t in states)
    return [size / SIZE**2 for size in found]


def table() -> str:
    """A row for each way."""
    lines = ["| Weights and optimizer | weight | gradient | optimizer | together |", "|---|---|---|---|---|"]
    for name, recipe, options in WAYS:
        found = counted(recipe, options)
        lines.append(f"| {name} | {' | '.join(f'{size:.2f}' for size in (*found, sum(found)))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
