"""LoRA on a frozen FP8 base: the base's weights are held quantized and nothing else, adapters in bf16 learn.

The base stands for a trained network. What is to be learned is that network with a small change of low rank in each
layer. Reports of precision and memory follow on the standard output; progress goes to the error output.

    python examples/lora.py --recipe mxfp8 --steps 100
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from textwrap import indent

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # for the CPU backend: its threads poll otherwise
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too

import torch
import torch.nn.functional as F

import te_torch as te
from te_cli.arguments import device, positive, usual_device
from te_cli.progress import Progress
from te_cli.settings import RECIPES
from te_core.recipe import Recipe

WIDTH, LAYERS, RANK, ROWS = 256, 3, 8, 128
BF16 = torch.bfloat16


class Adapted(torch.nn.Module):
    """base(x) + up(down(x)): a frozen quantized linear, and what learns beside it."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        super().__init__()
        place = {"device": device, "params_dtype": BF16}
        with te.quantized_model_init(recipe=recipe):
            self.base = te.Linear(WIDTH, WIDTH, bias=False, init_method=like_trained, **place).requires_grad_(False)
        # Outside: these stay bf16, and being no modules of te they run in bf16 inside autocast as well.
        self.down = torch.nn.Linear(WIDTH, RANK, bias=False, device=device, dtype=BF16)
        self.up = torch.nn.Linear(RANK, WIDTH, bias=False, device=device, dtype=BF16)
        torch.nn.init.zeros_(self.up.weight)  # so that training starts at the base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def like_trained(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, 0.0, WIDTH**-0.5)


def teacher(model: torch.nn.Module) -> list[torch.Tensor]:
    """The base's weights with a change of low rank in each."""
    weights = []
    for layer in model:
        w = layer.base.weight.dequantize().float()
        up, down = (torch.randn(WIDTH, RANK, device=w.device) for _ in range(2))
        weights.append((w + up @ down.T / WIDTH / RANK**0.5).to(BF16))
    return weights


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="lora.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=[name for name in RECIPES if name != "none"], default="current")
    parser.add_argument("--steps", type=positive, default=60)
    parser.add_argument("--device", type=device, default=usual_device())
    given = parser.parse_args(arguments)
    recipe = RECIPES[given.recipe]

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Adapted(recipe, given.device) for _ in range(LAYERS)])
    wanted = teacher(model)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=5e-3, weight_decay=0.0)
    progress = Progress("lora", given.steps, stream=sys.stderr)
    for step in range(given.steps):
        x = torch.randn(ROWS, WIDTH, device=given.device, dtype=BF16)
        with torch.no_grad():
            target = x
            for w in wanted:
                target = F.linear(target, w)
        with te.autocast(recipe=recipe, emulate=True):  # where the chip lacks the format
            y = model(x)
        loss = F.mse_loss(y.float(), target.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        progress.show(step + 1, f"loss {loss.item():.4f}")

    print(indent(str(te.precision_report(model[1])), "    "), end="\n\n")
    print(indent(str(te.memory_report(model[1])), "    "))
    # What such a training leaves behind is small: the adapters.
    saved = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.dtype == BF16 for p in saved.values()) and not any("base" in name for name in saved)


if __name__ == "__main__":
    main()
