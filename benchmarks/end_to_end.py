"""A Llama of 1.1 billion parameters trained on one GPU: milliseconds a step, tokens a second, utilization, peak memory.

A step is forward, backward and AdamW. Each recipe's model takes its steps interpreted and with its layers' calls
replayed (te_core/tape) in turns; the utilization (MFU) is of the bf16 peak of an H200, whatever the recipe.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import te_torch as te
from benchmarks import harness
from benchmarks.modules import BF16, LINEAR_RECIPES, RECIPES
from benchmarks.replay import INTERPRETED, REPLAYED, restored
from te_core.tape import taped

WARM, ROUNDS, STEPS = 5, 3, 4  # steps before any is measured; turns, and steps of each
PEAK = 989e12  # bf16 FLOP/s of an H200
#: Milliseconds of a step before calls were replayed. Runs differ by 2 %.
BEFORE = {"bf16": 220, "delayed": 163, "current": 176, "block": 186}


@dataclass(frozen=True)
class Size:
    """The sizes of a model and of what it is given."""

    layers: int = 16
    hidden: int = 2048
    inside: int = 8192
    heads: int = 32
    groups: int = 8
    words: int = 32000
    batch: int = 4
    sequence: int = 4096

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.sequence


class Llama(torch.nn.Module):
    """Embedding, layers, norm and head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        place: Any = {"dtype": torch.bfloat16, "device": harness.device()}
        self.embed = torch.nn.Embedding(size.words, size.hidden, **place)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                size.hidden,
                size.inside,
                size.heads,
                num_gqa_groups=size.groups,
                layer_number=number,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                activation="swiglu",
                normalization="RMSNorm",
                bias=False,
                self_attn_mask_type="causal",
                fuse_qkv_params=True,
                attn_input_format="bshd",
                device=harness.device(),
                **BF16,
            )
            for number in range(1, size.layers + 1)
        )
        self.norm = te.RMSNorm(size.hidden, **place)
        self.head = torch.nn.Linear(size.hidden, size.words, bias=False, **place)
        self.angles = te.RotaryPositionEmbedding(size.hidden // size.heads)(size.sequence).to(harness.device())

    def forward(self, words: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), following.flatten())


def flops(model: Llama, size: Size) -> float:
    """Of a step: six for each weight of a product and token, and those of causal attention."""
    weights = sum(p.numel() for p in model.parameters()) - model.embed.weight.numel()
    return size.tokens * (6 * weights + 12 * size.layers * size.hidden * size.sequence / 2)


def train(size: Size, name: str) -> harness.Row:
    """Steps of one recipe, both ways in turns."""
    torch.manual_seed(0)
    recipe, model = RECIPES[name], Llama(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=harness.gpu())
    words = torch.randint(0, size.words, (size.batch, size.sequence + 1), device=harness.device())
    losses = []

    def step() -> None:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = model(words[:, :-1], words[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    ways: dict[str, list[float]] = {INTERPRETED: [], REPLAYED: []}
    peaks = {}
    for turn in range(ROUNDS + 1):
        for way, times in ways.items():
            taped.set_when(way)
            if not turn:
                for _ in range(WARM):
                    step()
                peaks[way] = peak_gib(step)
            else:
                times.append(wall_ms(step))
    before, now = (statistics.median(times) for times in ways.values())
    row: harness.Row = {"case": "Llama 1.1B" if size == Size() else "a small Llama", "recipe": name}
    row |= {"interpreted ms": before, "ms": now, "of_interpreted": now / before, "tokens/s": size.tokens / now * 1e3}
    row |= {"MFU": flops(model, size) / now * 1e3 / PEAK, "interpreted peak GiB": peaks[INTERPRETED]}
    row |= {"peak GiB": peaks[REPLAYED], "first loss": losses[0].item(), "last loss": losses[-1].item()}
    if size == Size():
        row |= {"target": f"{BEFORE[name]} ms", "ok": now <= 1.02 * BEFORE[name]}
    return row


def wall_ms(step: harness.Work) -> float:
    """Of a step, where steps follow one another."""
    harness.wait()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    harness.wait()
    return (time.perf_counter() - start) / STEPS * 1e3


def peak_gib(step: harness.Work) -> float:
    """All that is asked for at the peak of a step: weights, gradients and the optimizer's numbers too.

    What torch counts as allocated has the ends of blocks in it that it does not divide, by what was freed before: some
    MiB that differ by whether a recipe's steps are taken first interpreted or first replayed.
    """
    if not harness.gpu():
        return float("nan")
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] / 2**30


def measure(size: Size | None = None) -> list[harness.Row]:
    """All recipes, with a line for each as it is found."""
    begin = time.perf_counter()
    rows = []
    with restored():
        for name in LINEAR_RECIPES:
            rows.append(train(size or Size(), name))
            harness.free()
            print(f"{time.perf_counter() - begin:6.1f} s  {harness.table(rows[-1:])}", flush=True)
    return rows


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["end_to_end", *sys.argv[1:]]))
