"""A small Llama-shaped model over several ranks, each with a part of every sequence: context parallelism.

    torchrun --nproc-per-node 2 examples/context_parallel.py
    torchrun --nproc-per-node 2 examples/context_parallel.py --mode a2a --recipe delayed
    torchrun --nproc-per-node 1 examples/context_parallel.py                            # the same loss, on one rank

On GPUs it runs over NCCL, elsewhere over gloo: 20 steps take some 10 s on two cores. Ranks hold the same model and read
the same sequences, which have different lengths. A rank keeps two chunks of each, and attention exchanges keys and
values. The loss is the mean over all tokens of all ranks, and gradients are summed, as over data-parallel ranks.
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

import te_torch as te
from examples.loop import OUT, learn
from examples.ranks import ended, group_of_torchrun
from te_cli.arguments import UserError, positive
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Recipe

RECIPES: dict[str, Recipe | None] = {"none": None, "current": Float8CurrentScaling(), "delayed": DelayedScaling()}
MODES = ("p2p", "all_gather", "a2a")
BATCH, VOCABULARY, IGNORED = 2, 256, -100


class Model(torch.nn.Module):
    """Embedding, layers, a norm and a head, whole on every rank."""

    def __init__(self, given: argparse.Namespace, group: Any, device: torch.device) -> None:
        super().__init__()
        hidden, heads = given.hidden, given.heads
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
                self_attn_mask_type="padding_causal",
                layer_number=i + 1,
                device=device,
            )
            for i in range(given.layers)
        )
        for layer in self.layers:
            layer.set_context_parallel_group(group, cp_comm_type=given.mode)
        self.norm = te.RMSNorm(hidden, device=device)
        self.head = te.Linear(hidden, VOCABULARY, bias=False, device=device)

    def forward(self, tokens: torch.Tensor, angles: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Scores [sequence, batch, vocabulary] of this rank's tokens; `lengths`: running sums of whole sequences'."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores


def batch_of(step: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, targets, running sums of lengths) of whole sequences that count up; those behind an end are ignored."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (1, BATCH), generator=generator)
    lengths = torch.randint(tokens // 2, tokens + 1, (BATCH,), generator=generator)
    numbers = (start + torch.arange(tokens + 1)[:, None]) % VOCABULARY
    behind = torch.arange(tokens)[:, None] >= lengths
    sums = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)))
    return numbers[:-1], numbers[1:].masked_fill(behind, IGNORED), sums


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's summand of the mean over the tokens of all ranks, and that mean."""
    count = (targets != IGNORED).sum()
    dist.all_reduce(count)
    summed = torch.nn.functional.cross_entropy(
        scores.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    mean = summed.detach() / count
    dist.all_reduce(mean)
    return summed / count, mean


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="p2p", help="how ranks attend to one another's tokens (p2p)")
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--tokens", type=positive, default=128, help="of the longest sequence (128)")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--hidden", type=positive, default=64)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--recipe", choices=RECIPES, default="current")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the picture ({OUT})")
    return parser.parse_args(arguments)


def check(given: argparse.Namespace, world: int) -> None:
    """Whether ranks, heads and widths go into one another."""
    if given.tokens % (2 * world):
        raise UserError(f"--tokens {given.tokens}: a multiple of {2 * world}, twice the ranks, has chunks of one size")
    if given.heads % 2 or (given.mode == "a2a" and given.heads // 2 % world):
        wanted = 2 * world if given.mode == "a2a" else 2
        raise UserError(f"--heads {given.heads}: a multiple of {wanted} has two heads a group, and a group a rank")
    if given.hidden % (2 * given.heads):
        raise UserError(f"--hidden {given.hidden}: a multiple of {2 * given.heads}, twice --heads, has heads to rotate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; each rank is one process of torchrun."""
    given = parsed(arguments)
    with group_of_torchrun("context_parallel.py") as kind:
        check(given, dist.get_world_size())
        train(given, kind)
    return 0


def train(given: argparse.Namespace, kind: str) -> None:
    """Train for some steps on numbers that count up."""
    group = dist.group.WORLD
    torch.manual_seed(1)  # one model on all ranks
    device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)
    model = Model(given, group, device).to(torch.bfloat16)
    angles = te.RotaryPositionEmbedding(given.hidden // given.heads)(given.tokens).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    recipe = RECIPES[given.recipe]

    def step(number: int) -> torch.Tensor:
        tokens, targets, lengths = (t.to(device) for t in batch_of(number, given.tokens))
        tokens, targets = (te.context_part(t, group, seq_dim=0) for t in (tokens, targets))
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss, mean = loss_of(model(tokens, angles, lengths), targets)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        return mean

    learn("context_parallel", given.steps, step, given.out, shown=dist.get_rank() == 0)


if __name__ == "__main__":
    ended(main)
