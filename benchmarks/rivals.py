"""A Transformer layer beside the same layer of plain torch, as `te bench` has it: eager, compiled, and compiled with
torchao's FP8 products.

All are measured in turns in one process: time of a forward and backward on the GPU, and its peak. Where torchao is not
installed its row is left out. `of_compiled`: time, 1 = torch's layer under torch.compile.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import harness, modules
from benchmarks.modules import LINEAR_RECIPES, RECIPES
from te_cli import layers
from tests import generators

COMPILED, TORCHAO = "torch.compile", "torchao, torch.compile"


def with_torchao(layer: torch.nn.Module) -> torch.nn.Module | None:
    """The layer with its linears in FP8, by current scaling of whole tensors; None without torchao."""
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        return None
    return convert_to_float8_training(layer)  # type: ignore[no-any-return]


def works(compiled: Callable[[torch.nn.Module], Any]) -> dict[tuple[str, str], harness.Work]:
    """(whose, recipe) -> forward and backward, all from the same weights."""
    device = harness.device()
    sizes = layers.SIZES[device.type]
    x = harness.matrix(generators.activations, sizes.batch * sizes.sequence, sizes.hidden)
    x = x.view(sizes.batch, sizes.sequence, sizes.hidden).requires_grad_()
    theirs, ours = layers.named("TransformerLayer", sizes, device, torch.bfloat16)
    models: dict[tuple[str, str], Any] = {
        ("torch", "bf16"): theirs,
        (COMPILED, "bf16"): compiled(copy.deepcopy(theirs)),
    }
    if (converted := with_torchao(copy.deepcopy(theirs))) is not None:
        models[TORCHAO, "current"] = compiled(converted)
    found = {key: modules.works(model, x, None)[1] for key, model in models.items()}
    for recipe in LINEAR_RECIPES:
        found["te-runtime", recipe] = modules.works(copy.deepcopy(ours), x, RECIPES[recipe])[1]
    return found


def measure() -> list[harness.Row]:
    """A row for each layer."""
    found = works(torch.compile if harness.gpu() else lambda layer: layer)
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
