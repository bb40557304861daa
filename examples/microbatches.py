"""Gradient accumulation: weights are quantized once a step, and their gradients add up in float32 as GEMMs make them.

`is_first_microbatch` says where a step begins: True quantizes the weights and overwrites `main_grad`, False takes the
quantized weights from before and adds. The optimizer works on float32 masters and reads `main_grad`. Some seconds on a
CPU core or a GPU.

    python examples/microbatches.py --recipe delayed --microbatches 8
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # for the CPU backend: its threads poll otherwise
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too

import torch
import torch.nn.functional as F

import te_torch as te
from examples.loop import learn
from te_cli.arguments import device, positive, usual_device
from te_cli.settings import RECIPES
from te_core.recipe import Recipe

WIDTH, ROWS = 128, 128  # rows of a microbatch


class Model(torch.nn.Module):
    """Two blocks with residual connections."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        options = {"device": device, "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True}
        self.blocks = torch.nn.ModuleList(te.LayerNormMLP(WIDTH, 2 * WIDTH, **options) for _ in range(2))

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x, is_first_microbatch=is_first_microbatch)
        return x


def accumulate(model: Model, x: torch.Tensor, target: torch.Tensor, count: int, recipe: Recipe | None) -> float:
    """Forward and backward of a batch in `count` microbatches; the mean loss."""
    total = 0.0
    with te.autocast(enabled=recipe is not None, recipe=recipe, emulate=True):  # one region: scales change after it
        for i, (part, wanted) in enumerate(zip(x.chunk(count), target.chunk(count), strict=True)):
            loss = F.mse_loss(model(part, is_first_microbatch=i == 0).float(), wanted.float()) / count
            loss.backward()
            total += loss.item()
    return total


def gradient(p: torch.nn.Parameter) -> torch.Tensor:
    """In float32: GEMM weights have theirs in main_grad, norms and biases in .grad."""
    return p.main_grad if hasattr(p, "main_grad") else p.grad.float()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="microbatches.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=list(RECIPES), default="block")
    parser.add_argument("--microbatches", type=positive, default=4)
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--device", type=device, default=usual_device())
    given = parser.parse_args(arguments)
    recipe, count = RECIPES[given.recipe], given.microbatches

    torch.manual_seed(0)
    model = Model(given.device)
    for p in model.parameters():
        if p.ndim == 2:  # before the first backward; never zeroed, the first microbatch overwrites
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    mix = torch.randn(WIDTH, WIDTH, device=given.device, dtype=torch.bfloat16) / WIDTH**0.5

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count * ROWS, WIDTH, device=given.device, dtype=torch.bfloat16)
        return x, x + torch.tanh(x @ mix)

    def step(number: int) -> float:
        loss = accumulate(model, *batch(), count, recipe)
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = gradient(p)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)  # the next first microbatch quantizes this
        return loss

    learn("microbatches", given.steps, step)
    x, target = batch()
    found = {}
    for parts in (1, count):
        model.zero_grad(set_to_none=True)
        accumulate(model, x, target, parts, recipe)
        found[parts] = torch.cat([p.main_grad.flatten() for p in model.parameters() if p.ndim == 2])
    error = (found[count] - found[1]).norm() / found[1].norm()
    print(f"main_grad of {count} microbatches and of one batch of the same rows differ by {error.item():.1e}")


if __name__ == "__main__":
    main()
