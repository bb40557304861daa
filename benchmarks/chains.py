"""Norm, linear, GELU and linear, forward and backward: a chain of `te.ops`, `LayerNormMLP`, plain and compiled torch.

`host us` is the least time that the host takes for a step of few rows, `gpu us` what the GPU computes in one of many.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import te_torch as te
from benchmarks import harness
from benchmarks.experts import BF16, RECIPES
from te_torch import ops

#: Rows, hidden, inside, steps that are timed.
FEW, MANY = (128, 256, 1024, 60), (8192, 4096, 16384, 10)
TURNS = 2


def sides(hidden: int, inside: int, recipe: str) -> dict[str, Callable[[torch.Tensor], Any]]:
    """What is timed, by name."""
    linears = (hidden, inside), (inside, hidden)
    found: dict[str, Any] = {
        "module": te.LayerNormMLP(hidden, inside, params_dtype=torch.bfloat16, device="cuda"),
        "chain": ops.Sequential(
            ops.LayerNorm(hidden, **BF16), ops.Linear(*linears[0], **BF16), ops.GELU(), ops.Linear(*linears[1], **BF16)
        ),
    }
    if recipe == "bf16":
        parts = [nn.LayerNorm(hidden, **BF16), nn.Linear(*linears[0], **BF16), nn.GELU("tanh")]
        found["torch"] = nn.Sequential(*parts, nn.Linear(*linears[1], **BF16))
        found["torch, compiled"] = torch.compile(found["torch"])
    return found


def _timed(call: Any, x: torch.Tensor, rule: Any, steps: int) -> tuple[float, float]:
    """(the least host time of a step, its GPU time), in microseconds."""
    leaves = [x, *call.parameters()]

    def step() -> None:
        with te.autocast(enabled=rule is not None, recipe=rule):
            y = call(x)
        y.backward(y.detach())
        for leaf in leaves:
            leaf.grad = None

    for _ in range(10):
        step()
    walls = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        walls.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    return min(walls) * 1e6, sum(event.self_device_time_total for event in profile.key_averages()) / 5


def measure() -> list[dict[str, Any]]:
    """Each side in each recipe, in turns."""
    rows = []
    for recipe, rule in RECIPES.items():
        found: dict[str, dict[str, float]] = {}
        for (count, hidden, inside, steps), key in ((FEW, 0), (MANY, 1)):
            x = torch.randn(count, hidden, requires_grad=True, **BF16)
            given = sides(hidden, inside, recipe)
            times = [
                {name: _timed(c, x, rule and rule(), steps)[key] for name, c in given.items()} for _ in range(TURNS)
            ]
            for name in given:
                found.setdefault(name, {})[("host us", "gpu us")[key]] = statistics.median(t[name] for t in times)
            del given
            harness.free()
        for name, one in found.items():
            host, gpu = (one[key] / found["module"][key] for key in ("host us", "gpu us"))
            rows.append({"case": name, "recipe": recipe, **one, "of_module host": host, "of_module": gpu})
    return rows


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["chains", *sys.argv[1:]]))
