"""One rank of the tests of sharded parameters: `python -m tests.parallel.sharded_ranks RANK WORLD FOLDER`.

Trains layers whose weights are held quantized and sharded by FSDP2, and writes what it found to FOLDER/RANK.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from te_core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.module_steps import values

RECIPES: dict[str, Any] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
STEPS, ROWS, WIDTH = 3, 32, 256


def build(recipe: Any) -> torch.nn.Sequential:
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe):
        layers = [te.Linear(WIDTH, WIDTH, device="cpu", params_dtype=torch.bfloat16) for _ in range(2)]
    return torch.nn.Sequential(*layers)


def batch(rank: int, step: int) -> torch.Tensor:
    return values(ROWS, WIDTH, dtype=torch.bfloat16, seed=10 * step + rank)


def train(model: torch.nn.Module, recipe: Any, ranks: range) -> list[torch.Tensor]:
    """The outputs of each step for the batches of these ranks."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        with te.autocast(recipe=recipe, emulate=True):
            y = model(torch.cat([batch(r, step) for r in ranks]))
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(y.detach())
    return found


def run(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, found = init_device_mesh("cpu", (world,)), {}
    for name, recipe in RECIPES.items():
        for reshard in (True, False):
            model = build(recipe)
            for part in (*model, model):
                fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
            weight: Any = model[0].weight
            outputs = train(model, recipe, range(rank, rank + 1))
            shard = weight.to_local()
            found[f"{name} {reshard}"] = {
                "y": outputs,
                "class": type(shard).__name__,
                "shard": shard.dequantize(),
                "scale": getattr(shard, "_scale_inv", torch.ones(1)),
                "sharded": model[0].is_fsdp2,
            }
    return found


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.save(run(rank, world), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
