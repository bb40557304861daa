"""What examples/train.c prints, by te_torch: `python bindings/c/tests/losses.py [cpu|cuda [STEPS]]`.

The same numbers, layers, recipe and updates; sums in float32, in the order of memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch

import te_torch as te
from te_core.recipe import DelayedScaling

ROWS, WIDTH, INNER, RATE, FACTOR = 32, 64, 128, 0.5, 0.25


def draw(seed: int, *shape: int, factor: float = FACTOR, offset: float = 0.0) -> Any:
    """Numbers from -0.5 to 0.5, times a factor, plus an offset."""
    found = np.empty(prod(shape), np.float32)
    for i in range(found.size):
        seed = (seed * 1664525 + 1013904223) & 0xFFFFFFFF
        found[i] = np.float32(seed >> 8) / np.float32(16777216) - np.float32(0.5)
    return torch.tensor((found * np.float32(factor) + np.float32(offset)).reshape(shape))


def losses(device: str, steps: int) -> list[float]:
    """Of each step; the host's time of layers and updates is printed."""
    linear = te.Linear(WIDTH, WIDTH, params_dtype=torch.float32, device=device)
    mlp = te.LayerNormMLP(WIDTH, INNER, activation="gelu", params_dtype=torch.float32, device=device)
    names = "layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"
    parameters = [linear.weight, linear.bias, *[getattr(mlp, name) for name in names]]
    values = []
    for p, seed in zip(parameters, (2, 3, 5, 6, 7, 8, 9, 10), strict=True):
        values.append(draw(seed, *p.shape, offset=float(seed == 5)))
    x, target = draw(1, ROWS, WIDTH, factor=2.0).to(device), draw(99, ROWS, WIDTH, factor=1.0).numpy()
    recipe, found, took = DelayedScaling(), [], []
    for _ in range(steps):
        with torch.no_grad():
            for p, value in zip(parameters, values, strict=True):
                p.copy_(value)
        begin = time.perf_counter()
        with te.autocast(enabled=True, recipe=recipe):
            y = mlp(linear(x))
        forward = time.perf_counter() - begin
        left = y.detach().cpu().numpy() - target
        found.append(float(np.cumsum((left * left).ravel(), dtype=np.float32)[-1] / np.float32(left.size)))
        dy = torch.tensor(left * np.float32(2 / left.size)).to(device)
        begin = time.perf_counter()
        y.backward(dy)
        took.append(forward + time.perf_counter() - begin)
        for i, p in enumerate(parameters):
            values[i] = values[i] - np.float32(RATE) * p.grad.cpu()
            p.grad = None
    print(f"{statistics.median(took) * 1e6:.1f} us of the host's time for the layers of a step", file=sys.stderr)
    return found


if __name__ == "__main__":
    for i, loss in enumerate(losses((sys.argv[1:] or ["cpu"])[0], int((sys.argv[2:] or ["50"])[0]))):
        print(f"step {i} loss {loss:.9g}")
