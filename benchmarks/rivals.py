"""A Llama's layer beside the same layer of plain torch: eager, compiled, and compiled with torchao's FP8 products.

All are measured in turns in one process: time of a forward and backward on the GPU, and its peak. Where torchao is not
installed its row is left out. `of_compiled`: time, 1 = torch's layer under torch.compile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import attention, harness, modules
from benchmarks.modules import RECIPES
from tests import generators

COMPILED, TORCHAO = "torch.compile", "torchao, torch.compile"
#: hidden, inside, heads, groups, sequence, batch
SIZES = {"cuda": (4096, 14336, 32, 8, 4096, 2), "cpu": (64, 128, 4, 2, 16, 2)}


class Layer(torch.nn.Module):
    """Attention and a gated MLP, each behind a norm and beside a residual, as a user of torch writes them."""

    def __init__(self, hidden: int, inside: int, heads: int, groups: int, **place: Any) -> None:
        super().__init__()
        self.split = (heads, groups, groups)
        width = hidden // heads
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden, **place) for _ in range(2))
        self.qkv = torch.nn.Linear(hidden, sum(self.split) * width, bias=False, **place)
        self.proj = torch.nn.Linear(hidden, hidden, bias=False, **place)
        self.up = torch.nn.Linear(hidden, 2 * inside, bias=False, **place)
        self.down = torch.nn.Linear(inside, hidden, bias=False, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, B, H] as [S, B, H]."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (sum(self.split), -1)).permute(1, 2, 0, 3)
        q, k, v = heads.split(self.split, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(out.permute(2, 0, 1, 3).flatten(2))
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)  # type: ignore[no-any-return]


def with_torchao(layer: torch.nn.Module) -> torch.nn.Module | None:
    """The layer with its linears in FP8, by current scaling of whole tensors; None without torchao."""
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        return None
    return convert_to_float8_training(layer)  # type: ignore[no-any-return]


def works(size: tuple[int, ...], compiled: Callable[[torch.nn.Module], Any]) -> dict[tuple[str, str], harness.Work]:
    """(whose, recipe) -> forward and backward."""
    hidden, inside, heads, groups, tokens, batch = size
    x = harness.matrix(generators.activations, tokens * batch, hidden).view(tokens, batch, hidden).requires_grad_()
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": harness.device()}

    def theirs() -> torch.nn.Module:
        torch.manual_seed(0)
        return Layer(hidden, inside, heads, groups, **place)

    models: dict[tuple[str, str], Any] = {("torch", "bf16"): theirs(), (COMPILED, "bf16"): compiled(theirs())}
    if (converted := with_torchao(theirs())) is not None:
        models[TORCHAO, "current"] = compiled(converted)
    found = {key: modules.works(model, x, None)[1] for key, model in models.items()}
    options = attention.LLAMA | {"num_gqa_groups": groups, "device": harness.device()}
    for recipe in ("bf16", "delayed", "current", "block"):
        ours = attention.layer(hidden, inside, heads, **options)
        found["te-runtime", recipe] = modules.works(ours, x, RECIPES[recipe])[1]
    return found


def measure() -> list[harness.Row]:
    """A row for each layer."""
    on_gpu = harness.gpu()
    found = works(SIZES[harness.device().type], torch.compile if on_gpu else lambda layer: layer)
    times = dict(zip(found, harness.gpu_us(*found.values()), strict=True))
    return [
        {
            "case": whose,
            "recipe": recipe,
            "fwd+bwd us": us,
            "peak MiB": harness.peak_mib(found[whose, recipe]),
            "of_compiled": us / times[COMPILED, "bf16"],
        }
        for (whose, recipe), us in times.items()
    ]


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["rivals", *sys.argv[1:]]))
