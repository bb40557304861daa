"""A layer over several ranks whose products overlap with their communication: userbuffers, three steps.

    torchrun --nproc-per-node 2 examples/overlap.py
    torchrun --nproc-per-node 2 examples/overlap.py --method pipeline --recipe none

On GPUs of one host that can read each other's memory parts travel by copy engines, elsewhere over NCCL or gloo: some 10
seconds on two CPU cores. The report in the end says for each GEMM how it ran.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too

import torch
import torch.distributed as dist

import te_torch as te
from examples.ranks import ended, group_of_torchrun
from te_cli.arguments import UserError, positive
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Recipe

RECIPES: dict[str, Recipe | None] = {"none": None, "current": Float8CurrentScaling(), "delayed": DelayedScaling()}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=3)
    parser.add_argument("--tokens", type=positive, default=256, help="of all ranks (256)")
    parser.add_argument("--hidden", type=positive, default=128)
    parser.add_argument("--heads", type=positive, default=8)
    parser.add_argument("--recipe", choices=RECIPES, default="current")
    parser.add_argument("--method", choices=("ring_exchange", "pipeline"), help="of the sums of forward")
    return parser.parse_args(arguments)


def check(given: argparse.Namespace, world: int) -> None:
    """Whether tokens, heads and widths go into one another."""
    if given.tokens % (16 * world):
        raise UserError(f"--tokens {given.tokens}: a multiple of {16 * world} has parts of 16 rows on {world} ranks")
    if given.heads % world or given.hidden % given.heads:
        raise UserError(f"--heads {given.heads}: a multiple of {world} ranks that divides --hidden {given.hidden}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; each rank is one process of torchrun."""
    given = parsed(arguments)
    with group_of_torchrun("overlap.py") as kind:
        check(given, dist.get_world_size())
        train(given, kind)
    return 0


def train(given: argparse.Namespace, kind: str) -> None:
    """Three steps of a layer."""
    world, recipe = dist.get_world_size(), RECIPES[given.recipe]
    modes = te.UserBufferQuantizationMode
    te.initialize_ub(
        [given.tokens, given.hidden],  # the most that overlaps
        world,
        quantization_modes=[modes.NONE if recipe is None else modes.FP8],
        dtype=torch.bfloat16,
        ub_cfgs=given.method and {f"{name}_fprop": {"method": given.method} for name in ("proj", "fc2")},
    )
    torch.manual_seed(1 + dist.get_rank())
    layer = te.TransformerLayer(
        given.hidden,
        4 * given.hidden,
        given.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=torch.bfloat16,
        device=kind,
        set_parallel_mode=True,
        sequence_parallel=True,
        tp_group=dist.group.WORLD,
        ub_tp_comm_overlap=True,
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    x = torch.randn(given.tokens // world, 1, given.hidden, dtype=torch.bfloat16, device=kind)
    for step in range(given.steps):
        start = time.perf_counter()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        y.float().square().mean().backward()
        for p in layer.parameters():
            if getattr(p, "sequence_parallel", False):  # it has seen the tokens of this rank only
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        size = y.detach().float().square().mean().item()
        if dist.get_rank() == 0:
            print(f"step {step}: mean square {size:.4f}, {1e3 * (time.perf_counter() - start):.0f} ms", flush=True)
    if dist.get_rank() == 0:
        print(te.precision_report(layer))
    te.destroy_ub()


if __name__ == "__main__":
    ended(main)
