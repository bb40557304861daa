"""Host times of tiny modules as multiples of `torch.nn.Linear`, and a step of six layers.

    python benchmarks/multiples.py                              # this checkout
    PYTHONPATH=OTHER_CHECKOUT python benchmarks/multiples.py    # another one, on the same machine

Only names that every release has are used, so that an old checkout can run in turns with a new one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import te_torch as te
from te_core.recipe import DelayedScaling

CALLS, ROUNDS, TURNS = 40, 9, 3
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
LAYER: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
LAYER |= {"fuse_qkv_params": True, **OPTIONS}


def cases() -> dict[str, tuple[Any, tuple[torch.Tensor, ...], Any]]:
    """By name: a module, its inputs, its recipe."""
    rows = torch.randn(128, 256, requires_grad=True, **BF16)
    x = torch.randn(128, 2, 256, requires_grad=True, **BF16)
    heads = tuple(torch.randn(128, 2, 4, 64, requires_grad=True, **BF16) for _ in range(3))
    fp8 = DelayedScaling()
    return {
        "nn.Linear": (torch.nn.Linear(256, 256, **BF16), (rows,), None),
        "Linear bf16": (te.Linear(256, 256, **OPTIONS), (rows,), None),
        "Linear FP8": (te.Linear(256, 256, **OPTIONS), (rows,), fp8),
        "LayerNormMLP FP8": (te.LayerNormMLP(256, 1024, **OPTIONS), (x,), fp8),
        "DotProductAttention": (te.DotProductAttention(4, 64, attn_mask_type="causal"), heads, None),
        "TransformerLayer bf16": (te.TransformerLayer(256, 1024, 4, **LAYER), (x,), None),
        "TransformerLayer FP8": (te.TransformerLayer(256, 1024, 4, **LAYER), (x,), fp8),
    }


def microseconds(function: Callable[[], Any]) -> float:
    """Host time of a call."""
    for _ in range(12):
        function()
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            function()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    return statistics.median(found)


def works(case: tuple[Any, tuple[torch.Tensor, ...], Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A case's forward, and its forward and backward."""
    module, inputs, recipe = case

    def forward() -> Any:
        if recipe is None:
            return module(*inputs)
        with te.autocast(recipe=recipe):
            return module(*inputs)

    gradient = torch.randn_like(forward())
    leaves = [*inputs, *module.parameters()]

    def both() -> None:
        forward().backward(gradient)
        for leaf in leaves:
            leaf.grad = None

    return forward, both


def six_layers() -> tuple[float, float]:
    """(milliseconds, MiB at the peak) of a step with SGD."""
    model = torch.nn.Sequential(*[te.TransformerLayer(1024, 4096, 16, **LAYER) for _ in range(6)])
    optimizer, recipe = torch.optim.SGD(model.parameters(), lr=1e-4), DelayedScaling()
    x = torch.randn(128, 2, 1024, **BF16)

    def step() -> None:
        with te.autocast(recipe=recipe):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(10):
        step()
    walls = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            step()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - begin) * 100)
    torch.cuda.reset_peak_memory_stats()
    step()
    return statistics.median(walls), torch.cuda.max_memory_allocated() / 2**20


def main() -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(TURNS):
        for name, case in cases().items():
            forward, both = works(case)
            found.setdefault(name, []).append((microseconds(forward), microseconds(both)))
    medians = {name: [statistics.median(times) for times in zip(*pairs, strict=True)] for name, pairs in found.items()}
    base = medians["nn.Linear"]
    for name, times in medians.items():
        multiples = [t / b for t, b in zip(times, base, strict=True)]
        print(f"{name:24} {times[0]:7.1f} / {times[1]:7.1f} us   {multiples[0]:5.2f} / {multiples[1]:5.2f} x")
    wall, peak = six_layers()
    print(f"six layers, a step: {wall:.2f} ms, peak {peak:.0f} MiB")


if __name__ == "__main__":
    main()
