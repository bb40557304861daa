"""What one node of autograd for each layer does to DDP's overlap: a step of 12 layers on two or more GPUs.

    torchrun --nproc-per-node 2 -m benchmarks.one_node_ddp

Gradients of a layer that runs as one arrive together, so that DDP's buckets fill later; the host is done earlier.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from te_core.recipe import DelayedScaling

LAYERS, HIDDEN, TOKENS, BATCH = 12, 2048, 1024, 2
STEPS, ROUNDS = 10, 5


class Training:
    """The layers with or without one node each, as DDP trains them."""

    def __init__(self, one_node: bool, device: torch.device) -> None:
        options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
        options |= {"fuse_qkv_params": True, "params_dtype": torch.bfloat16, "device": device}
        layers = [te.TransformerLayer(HIDDEN, 4 * HIDDEN, HIDDEN // 128, **options) for _ in range(LAYERS)]
        for layer in layers:
            layer.one_node = one_node
        self.alone = torch.nn.Sequential(*layers)
        self.spread = torch.nn.parallel.DistributedDataParallel(
            self.alone, device_ids=[device.index], gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.SGD(self.alone.parameters(), lr=1e-5)
        self.recipe = DelayedScaling()
        self.x = torch.randn(TOKENS, BATCH, HIDDEN, device=device, dtype=torch.bfloat16)

    def step(self, module: torch.nn.Module) -> None:
        """Forward, backward, update."""
        with te.autocast(recipe=self.recipe):
            y = module(self.x)
        y.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def milliseconds(self, module: torch.nn.Module) -> float:
        """Wall time of a step."""
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.step(module)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / STEPS * 1e3


def main() -> None:
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    trainings = {one: Training(one, device) for one in (True, False)}
    for training in trainings.values():
        for _ in range(6):
            training.step(training.spread)
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS):
        for one, training in trainings.items():
            found[one].append(training.milliseconds(training.spread))
    for one, training in trainings.items():
        alone = statistics.median(training.milliseconds(training.alone) for _ in range(3))
        torch.cuda.reset_peak_memory_stats()
        training.step(training.spread)
        peak = torch.cuda.max_memory_allocated() / 2**20
        if dist.get_rank() == 0:
            spread = statistics.median(found[one])
            print(f"one_node={one}: {spread:.2f} ms with DDP, {alone:.2f} ms without, peak {peak:.0f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
