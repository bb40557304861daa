"""A small Llama-shaped model over several ranks: tensor and sequence parallel within a group, data parallel across.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py                  # tp 2
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --tp 2           # tp 2 x dp 2

On GPUs it runs over NCCL, elsewhere over gloo: 20 steps take some 10 s on two cores. Ranks of a tensor-parallel group
read the same tokens and hold parts of one model; groups read other tokens and hold the same model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_torch as te
from examples.loop import OUT, learn
from examples.ranks import ended, group_of_torchrun
from te_cli.arguments import UserError, positive
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Recipe

RECIPES: dict[str, Recipe | None] = {"none": None, "current": Float8CurrentScaling(), "delayed": DelayedScaling()}
SEQUENCE, BATCH, VOCABULARY = 64, 2, 256


class Model(torch.nn.Module):
    """Embedding, layers, a norm and a head. The layers' weights are spread; the rest is whole on every rank."""

    def __init__(self, layers: int, hidden: int, heads: int, tp: Any, device: torch.device) -> None:
        super().__init__()
        self.rank, self.size = tp.get_local_rank(), tp.size()
        self.embedding = torch.nn.Embedding(VOCABULARY, hidden, device=device)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                hidden,
                4 * hidden,
                heads,
                num_gqa_groups=heads // 2,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                fuse_qkv_params=True,
                layer_number=i + 1,
                device=device,
                set_parallel_mode=True,
                sequence_parallel=True,
                tp_group=tp.get_group(),
            )
            for i in range(layers)
        )
        self.norm = te.RMSNorm(hidden, device=device, sequence_parallel=True)
        self.head = te.Linear(
            hidden,
            VOCABULARY,
            bias=False,
            device=device,
            parallel_mode="column",
            sequence_parallel=True,
            tp_group=tp.get_group(),
        )

    def forward(self, tokens: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Scores [sequence, batch, vocabulary / tp] of tokens [sequence, batch]."""
        x = self.embedding(tokens.chunk(self.size)[self.rank])  # from here on each rank has a part of the sequence
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores


def loss_of(scores: torch.Tensor, targets: torch.Tensor, model: Model) -> torch.Tensor:
    """The mean cross entropy, of scores whose columns are spread: each rank's share of the gradient is its columns'."""
    whole = [torch.empty_like(scores) for _ in range(model.size)]
    dist.all_gather(whole, scores.detach().contiguous(), group=model.head.tp_group)
    whole[model.rank] = scores
    return torch.nn.functional.cross_entropy(torch.cat(whole, -1).flatten(0, 1).float(), targets.flatten())


def reduce_gradients(model: Model, tp: Any, dp: Any) -> None:
    """What the layers leave to the trainer: the sum over parts of sequences, and over the tokens of other groups."""
    for name, p in model.named_parameters():
        if getattr(p, "sequence_parallel", False) or name.startswith("embedding"):
            dist.all_reduce(p.grad, group=tp.get_group())
        dist.all_reduce(p.grad, group=dp.get_group())
        p.grad.div_(dp.size())  # type: ignore[union-attr]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=positive, default=2, help="ranks of a tensor-parallel group (2)")
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--hidden", type=positive, default=64)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--recipe", choices=RECIPES, default="current")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the picture ({OUT})")
    return parser.parse_args(arguments)


def check(given: argparse.Namespace, world: int) -> None:
    """Whether ranks, heads and widths go into one another."""
    if world % given.tp:
        raise UserError(f"{world} ranks are no {given.tp} (--tp) x groups: start a multiple of --tp, or change it")
    if SEQUENCE % given.tp:
        raise UserError(f"--tp {given.tp} does not divide a sequence of {SEQUENCE} tokens: take a power of 2")
    if given.heads % (2 * given.tp):
        raise UserError(f"--heads {given.heads}: a multiple of {2 * given.tp}, twice --tp, has two heads a group")
    if given.hidden % (2 * given.heads):
        raise UserError(f"--hidden {given.hidden}: a multiple of {2 * given.heads}, twice --heads, has heads to rotate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; each rank is one process of torchrun."""
    given = parsed(arguments)
    with group_of_torchrun("tensor_parallel.py") as kind:
        check(given, dist.get_world_size())
        train(given, kind)
    return 0


def train(given: argparse.Namespace, kind: str) -> None:
    """Train for some steps on numbers that count up."""
    mesh = init_device_mesh(kind, (dist.get_world_size() // given.tp, given.tp), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]

    # What is whole on every rank begins alike everywhere; parts of weights are drawn from streams of their own.
    torch.manual_seed(1 + tp.get_local_rank())
    device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)
    model = Model(given.layers, given.hidden, given.heads, tp, device).to(torch.bfloat16)
    dist.broadcast(model.embedding.weight.data, dist.get_global_rank(tp.get_group(), 0), group=tp.get_group())
    angles = te.RotaryPositionEmbedding(given.hidden // given.heads)(SEQUENCE).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    recipe = RECIPES[given.recipe]

    def step(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * number + dp.get_local_rank())
        start = torch.randint(VOCABULARY, (1, BATCH), generator=generator)
        tokens = ((start + torch.arange(SEQUENCE + 1)[:, None]) % VOCABULARY).to(device)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = loss_of(model(tokens[:-1], angles), tokens[1:], model)
        loss.backward()
        reduce_gradients(model, tp, dp)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    learn("tensor_parallel", given.steps, step, given.out, shown=dist.get_rank() == 0)


if __name__ == "__main__":
    ended(main)
