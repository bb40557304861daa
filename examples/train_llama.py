"""A Llama-shaped model on several GPUs, its weights sharded by FSDP2.

    torchrun --nproc-per-node 2 examples/train_llama.py --recipe current --quantized
    torchrun --nproc-per-node 4 examples/train_llama.py --replicas 2       # a mesh of 2 x 2: shards, and copies of them
    torchrun --nproc-per-node 2 examples/train_llama.py --save folder      # and --load it on any number of ranks
    torchrun --nproc-per-node 2 examples/train_llama.py --weights Llama-3.2-1B --export out   # folders of Hugging Face

It learns random tokens by heart, so that its loss falls. Ranks are tp x (replicas x shards): those of a tensor-parallel
group (`--tp`) share each layer. Without a GPU it runs on the CPU over gloo, in the sizes of a test: 10 seconds on two
cores. On GPUs it has 8 layers of Llama 8B's width.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_torch as te
from examples.llama import Llama, LlamaConfig, load_folder, save_folder
from examples.loop import OUT, learn
from examples.ranks import ended, group_of_torchrun
from te_cli.arguments import UserError, positive, writable
from te_cli.settings import RECIPES

#: By device: the model, and a rank's batch and sequence.
SIZES = {
    "cuda": (LlamaConfig(32000, 8, 4096, 14336, 32, 8), 1, 4096),
    "cpu": (LlamaConfig(256, 2, 256, 512, 4, 2), 2, 16),
}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="current", help="precision of the layers")
    parser.add_argument("--quantized", action="store_true", help="hold the layers' weights in the recipe's format")
    parser.add_argument("--tp", type=positive, default=1, help="ranks that share each layer (1)")
    parser.add_argument(
        "--replicas", type=positive, default=1, help="copies of the shards, for a mesh of two dimensions"
    )
    parser.add_argument("--steps", type=positive, default=10)
    parser.add_argument("--save", type=Path, help="folder to save a distributed checkpoint in, at the end")
    parser.add_argument("--load", type=Path, help="folder to load one from, at the start")
    parser.add_argument(
        "--weights", type=Path, help="folder of Hugging Face's to begin with: config.json, *.safetensors"
    )
    parser.add_argument("--export", type=Path, help="folder to write such weights in, at the end")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the picture ({OUT})")
    return parser.parse_args(arguments)


def groups_of(given: argparse.Namespace, kind: str) -> tuple[DeviceMesh, dict[str, Any]]:
    """The mesh that FSDP2 shards over, and what the modules are told of tensor parallelism."""
    world = dist.get_world_size()
    shards, rest = divmod(world, given.replicas * given.tp)
    if rest or not shards:
        raise UserError(f"{world} ranks are no {given.tp} (--tp) x {given.replicas} (--replicas) x shards")
    mesh = init_device_mesh(kind, (given.replicas, shards, given.tp), mesh_dim_names=("replicate", "shard", "tp"))
    data = mesh["shard"] if given.replicas == 1 else mesh["replicate", "shard"]
    if given.tp == 1:
        return data, {}
    return data, {"set_parallel_mode": True, "tp_group": mesh["tp"].get_group(), "tp_size": given.tp}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; each rank is one process of torchrun."""
    given = parsed(arguments)
    with group_of_torchrun("train_llama.py") as kind:
        train(given, kind)
    return 0


def train(given: argparse.Namespace, kind: str) -> None:
    """The run on this rank."""
    data, tp = groups_of(given, kind)
    (config, batch, sequence), recipe = SIZES[kind], RECIPES[given.recipe]
    if given.quantized and recipe is None:
        raise UserError("--quantized needs a --recipe whose format the weights are held in")
    if config.groups % given.tp:
        raise UserError(f"--tp {given.tp} does not divide the {config.groups} groups of heads of the model")
    if given.tp > 1 and (given.save or given.load or given.weights or given.export):
        raise UserError(
            "--save, --load, --weights and --export without --tp: parts of a layer on several ranks have one name in a "
            "checkpoint"
        )
    for option in ("save", "export"):
        if folder := getattr(given, option):
            writable(folder, option=f"--{option}")
    torch.manual_seed(0)  # every rank makes the same weights, of which it keeps its shard
    with te.quantized_model_init(recipe=recipe) if given.quantized else nullcontext():
        model = load_folder(given.weights, kind) if given.weights else Llama(config, kind, **tp)
    for part in (*model.layers, model):
        fully_shard(part, mesh=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if recipe is not None:
        te.prepare_state(model, recipe)  # the FP8 entries that a checkpoint has
    if given.load:
        load(model, optimizer, given.load)
    generator = torch.Generator().manual_seed(dist.get_rank() // given.tp)
    tokens = torch.randint(model.config.vocabulary, (batch, sequence + 1), generator=generator).to(kind)

    def step(number: int) -> torch.Tensor:
        with te.autocast(enabled=recipe is not None, recipe=recipe, emulate=True):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean

    learn("train_llama", given.steps, step, given.out, shown=dist.get_rank() == 0)
    if given.save:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(given.save))
    if given.export:
        whole = {name: gathered(p) for name, p in model.named_parameters()}  # on all ranks: one of them writes
        if dist.get_rank() == 0:
            save_folder(model.config, whole, given.export)


def gathered(parameter: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded parameter, in high precision."""
    whole = parameter.detach().full_tensor()
    return whole.dequantize() if isinstance(whole, te.QuantizedTensor) else whole


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Go on from a checkpoint of any number of ranks."""
    if not (folder / ".metadata").exists():
        raise UserError(f"{folder} holds no distributed checkpoint: --load names the folder of a --save")
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


if __name__ == "__main__":
    ended(main)
