"""LoRA on a frozen FP8 base: the base's weights are held quantized and nothing else, adapters in bf16 learn.

The base stands for a trained network. What is to be learned is that network with a small change of low rank in each
layer. Reports of precision and memory follow on the standard output; progress goes to the error output. 2 seconds on a
CPU core; on a GPU the layers are wider.

    python examples/lora.py --recipe mxfp8 --steps 100
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace as Sizes

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # for the CPU backend: its threads poll otherwise
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too

import torch
import torch.nn.functional as F

import te_torch as te
from examples.loop import Run
from te_cli.gpt import normal
from te_cli.settings import RECIPES
from te_core.recipe import Recipe

BF16 = torch.bfloat16

SIZES = {  # by device
    "cpu": Sizes(layers=3, width=256, rank=8, rows=128, steps=60),
    "cuda": Sizes(layers=3, width=4096, rank=16, rows=8192, steps=200),
}


class Adapted(torch.nn.Module):
    """base(x) + up(down(x)): a frozen quantized linear, and what learns beside it."""

    def __init__(self, s: Sizes, recipe: Recipe, device: str) -> None:
        super().__init__()
        like_trained = {"init_method": normal(s.width**-0.5), "device": device, "params_dtype": BF16}
        with te.quantized_model_init(recipe=recipe):
            self.base = te.Linear(s.width, s.width, bias=False, **like_trained).requires_grad_(False)
        # Outside: these stay bf16, and being no modules of te they run in bf16 inside autocast as well.
        self.down = torch.nn.Linear(s.width, s.rank, bias=False, device=device, dtype=BF16)
        self.up = torch.nn.Linear(s.rank, s.width, bias=False, device=device, dtype=BF16)
        torch.nn.init.zeros_(self.up.weight)  # so that training starts at the base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def teacher(model: torch.nn.Module, s: Sizes) -> list[torch.Tensor]:
    """The base's weights with a change of low rank in each."""
    weights = []
    for layer in model:
        w = layer.base.weight.dequantize().float()
        up, down = (torch.randn(s.width, s.rank, device=w.device) for _ in range(2))
        weights.append((w + up @ down.T / s.width / s.rank**0.5).to(BF16))
    return weights


def main(arguments: list[str] | None = None) -> list[float]:
    """Train the adapters; then say what was computed in which precision, and what lies in memory."""
    run = Run("lora", __doc__, SIZES, arguments, [name for name in RECIPES if name != "none"])
    s = run.sizes
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Adapted(s, run.recipe, run.device) for _ in range(s.layers)])
    wanted = teacher(model, s)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=5e-3, weight_decay=0.0)

    def step(number: int) -> torch.Tensor:
        x = torch.randn(s.rows, s.width, device=run.device, dtype=BF16)
        with torch.no_grad():
            target = x
            for w in wanted:
                target = F.linear(target, w)
        with run.precision():
            y = model(x)
        loss = F.mse_loss(y.float(), target.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = run.learn(step)
    print(indent(str(te.precision_report(model[1])), "    "), end="\n\n")
    print(indent(str(te.memory_report(model[1])), "    "))
    # What such a training leaves behind is small: the adapters.
    saved = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.dtype == BF16 for p in saved.values()) and not any("base" in name for name in saved)
    return losses


if __name__ == "__main__":
    main()
