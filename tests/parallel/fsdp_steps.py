"""Models sharded by FSDP2 and steps of them, for the ranks of test_fsdp2.py and test_distributed_checkpoint.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_torch as te
from tests.recipes import region, rule
from tests.world import values

WIDTH, ROWS, STEPS = 512, 32, 3
KINDS = ("delayed", "current", "block", "mxfp8", "nvfp4 nearest")
HELD = {
    "delayed": "Float8Tensor",
    "current": "Float8Tensor",
    "block": "Float8BlockwiseQTensor",
    "mxfp8": "MXFP8Tensor",
    "nvfp4 nearest": "NVFP4Tensor",
}


def build(name: str | None, quantized: bool, device: str, width: int = WIDTH, seed: int = 0) -> torch.nn.Sequential:
    """Two layers, with weights in bfloat16 or held in the recipe's format."""
    torch.manual_seed(seed)
    with te.quantized_model_init(recipe=rule(name)) if quantized else nullcontext():
        layers = [te.Linear(WIDTH, width, device=device, params_dtype=torch.bfloat16)]
        layers.append(te.Linear(width, WIDTH, device=device, params_dtype=torch.bfloat16))
    with torch.no_grad():
        for i, layer in enumerate(layers):
            layer.weight.copy_(0.05 * values(*layer.weight.shape, seed=100 * seed + i, device=device))
            layer.bias.zero_()
    return torch.nn.Sequential(*layers)


def mesh_of(device: str, *sizes: int) -> Any:
    return init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def shard(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh)  # type: ignore[call-overload]
    return model


def batch(rank: int, step: int, device: str) -> torch.Tensor:
    return values(ROWS, WIDTH, dtype=torch.bfloat16, seed=10 * step + rank, device=device)


def optimizer_of(model: torch.nn.Module, kind: str = "SGD", **options: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(
        model.parameters(), lr=0.1 if kind == "SGD" else 1e-3, **options
    )
    return made


def step(model: torch.nn.Module, optimizer: Any, name: str | None, x: torch.Tensor) -> torch.Tensor:
    with region(name):
        y = model(x)
    y.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def own(rank: Any) -> range:
    """This rank alone, whose batches a rank trains with."""
    return range(rank.number, rank.number + 1)


def train(model: torch.nn.Module, name: str | None, ranks: range, device: str, optimizer: Any = None) -> list[Any]:
    """The outputs of each step for the batches of these ranks."""
    optimizer = optimizer or optimizer_of(model)
    made = []
    for i in range(STEPS):
        made.append(step(model, optimizer, name, torch.cat([batch(r, i, device) for r in ranks])).cpu())
    return made


def plain(t: Any) -> torch.Tensor:
    """The values of a parameter, or of a shard."""
    t = t.to_local() if hasattr(t, "to_local") else t.detach()
    return (t.dequantize() if hasattr(t, "_quantizer") else t).float().cpu()
