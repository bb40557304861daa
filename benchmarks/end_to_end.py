"""A Llama of 1.1 billion parameters trained on one GPU: what a step costs with torch's parts and with this package's.

A step is forward, backward and AdamW; parameters and moments are in bf16, without masters. `parts` says what of it is
te_torch's: nothing but the layers (torch's cross entropy on logits in float32, torch's fused AdamW), or te's
linear_cross_entropy (`loss`) and FusedAdam (`optimizer`), too. One more row has the layers' weights in FP8
(quantized_model_init) and float32 masters beside them. The models of a recipe take their steps in turns in one process.

    python -m benchmarks.run end_to_end
    END_TO_END_PARTS=loss,loss+optimizer END_TO_END_RECIPES=block python -m benchmarks.run end_to_end

As environment variables say, the second command measures block scaling alone, with a row for the loss without the
optimizer, so that the rows tell what each part brings.

- `of_torch's`: time of a step, 1 = with torch's parts. `of_before`: 1 = the step at 5669511 on an H100 (2026-11-26);
  an H100 alone is compared and judged.
- `peak GiB`: all that is asked for at the peak of a step, of this model alone. `held GiB`: what its weights and its
  optimizer hold between steps; `predicted GiB`: the same, by formats and numbers of elements.
- The columns from `products` to `other` are milliseconds of kernels in one step (benchmarks/kernel_groups.py).
- The utilization (MFU) is of the bf16 peak of an H100, whatever the recipe.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import te_torch as te
from benchmarks import harness
from benchmarks.kernel_groups import by_group
from benchmarks.modules import BF16, LINEAR_RECIPES, RECIPES
from te_core.tape import taped

WARM, ROUNDS, STEPS = 5, 3, 4  # steps before any is measured; turns, and steps of each
PEAK = 989e12  # bf16 FLOP/s of an H100
#: Milliseconds of a step at 5669511 on an H100, with torch's parts; of it, what a step shall take; GiB at most.
BEFORE = {"bf16": 227.8, "delayed": 172.5, "current": 185.2, "block": 195.7}
TARGETS = {"delayed": 0.95, "current": 0.94, "block": 0.86}
MOST_GIB = 26.0
LOSS, OPTIMIZER = PARTS = ("loss", "optimizer")


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


#: Without a GPU.
SMALL = Size(layers=1, hidden=64, inside=128, heads=4, groups=2, words=256, batch=2, sequence=128)


class Llama(torch.nn.Module):
    """Embedding, layers, norm and head."""

    def __init__(self, size: Size, own_loss: bool = False) -> None:
        super().__init__()
        self.own_loss = own_loss
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
        if self.own_loss:
            return te.linear_cross_entropy(self.norm(x), self.head.weight, following)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), following.flatten())


def flops(model: Llama, size: Size) -> float:
    """Of a step: six for each weight of a product and token, and those of causal attention."""
    weights = sum(p.numel() for p in model.parameters()) - model.embed.weight.numel()
    return size.tokens * (6 * weights + 12 * size.layers * size.hidden * size.sequence / 2)


class Training:
    """A model, its optimizer, and what was found of its steps."""

    def __init__(self, size: Size, recipe: str, parts: Sequence[str], masters: bool = False) -> None:
        torch.manual_seed(0)
        self.size, self.recipe, self.masters = size, recipe, masters
        self.name = (", ".join(parts) or "torch's") + (", FP8 weights" if masters else "")
        with te.quantized_model_init(recipe=RECIPES[recipe]) if masters else nullcontext():
            self.model = Llama(size, LOSS in parts)
        common: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
        moments = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
        self.optimizer: torch.optim.Optimizer = (
            te.optimizers.FusedAdam(self.model.parameters(), **common, **moments, master_weights=masters)
            if OPTIMIZER in parts
            else torch.optim.AdamW(self.model.parameters(), **common, fused=harness.gpu())
        )
        self.words = torch.randint(0, size.words, (size.batch, size.sequence + 1), device=harness.device())
        self.losses: list[torch.Tensor] = []
        self.times: list[float] = []

    def step(self) -> None:
        """One step."""
        recipe = RECIPES[self.recipe]
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = self.model(self.words[:, :-1], self.words[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def turn(self) -> None:
        """Some steps, which follow one another, and what one of them took."""
        harness.wait()
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        harness.wait()
        self.times.append((time.perf_counter() - start) / STEPS * 1e3)

    def held(self) -> int:
        """Bytes of the weights and of the optimizer's tensors."""
        tensors: list[Any] = list(self.model.parameters())
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(part.nbytes for tensor in tensors for part in stored(tensor))

    def predicted(self) -> int:
        """The same by formats, without scales: a weight in bf16 or FP8, two moments in bf16, a float32 master."""
        return sum(p.numel() * ((1 if quantized(p) else 2) + 4 + 4 * self.masters) for p in self.model.parameters())

    def peak(self, beside: int) -> float:
        """GiB at the peak of a step, without what others hold.

        What torch counts as allocated has the ends of blocks in it that it does not divide; what was asked for has not.
        """
        if not harness.gpu():
            return float("nan")
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return (int(torch.cuda.memory_stats()["requested_bytes.all.peak"]) - beside) / 2**30

    def row(self, today: float, beside: int) -> harness.Row:
        """What was found, beside the milliseconds of a step with torch's parts and the bytes that others hold."""
        full, ms = self.size == Size(), statistics.median(self.times)
        comparable = full and "H100" in harness.device_name()
        row: harness.Row = {"case": "Llama 1.1B" if full else "a small Llama", "recipe": self.recipe}
        row |= {"parts": self.name, "ms": ms, "of_torch's": ms / today}
        row |= {"of_before": ms / BEFORE[self.recipe]} if comparable else {}
        row |= {"tokens/s": self.size.tokens / ms * 1e3, "MFU": flops(self.model, self.size) / ms * 1e3 / PEAK}
        row |= {"peak GiB": self.peak(beside), "held GiB": self.held() / 2**30}
        row |= {"predicted GiB": self.predicted() / 2**30}
        row |= by_group(harness.trace(self.step)) if harness.gpu() else {}
        row |= {"first loss": self.losses[0].item(), "last loss": self.losses[-1].item()}
        if comparable and self.name == ", ".join(PARTS) and self.recipe in TARGETS:
            row["target"] = f"{TARGETS[self.recipe]} of_before, {MOST_GIB} GiB"
            row["ok"] = row["of_before"] <= TARGETS[self.recipe] and row["peak GiB"] <= MOST_GIB
        return row


def quantized(tensor: torch.Tensor) -> bool:
    """Whether its values are stored in FP8."""
    return isinstance(tensor, te.QuantizedTensor)


def stored(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors of a tensor: itself, or the parts of a quantized one."""
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if quantized(tensor) else [tensor]


def asked(name: str, usual: str, allowed: Sequence[str]) -> list[list[str]]:
    """What an environment variable lists: words with plus signs between them, in turn with commas between them."""
    found = [[w for w in one.split("+") if w] for one in os.environ.get(name, usual).replace(" ", "").split(",")]
    if wrong := {word for words in found for word in words} - set(allowed):
        raise ValueError(f"{name} has {', '.join(sorted(wrong))} in it: choose from {', '.join(allowed)}")
    return found


def train(size: Size, recipe: str, ways: Sequence[Sequence[str]]) -> list[harness.Row]:
    """A row for torch's parts, for each way, and for FP8 weights, all in turns."""
    trainings = [Training(size, recipe, parts) for parts in ((), *ways)]
    if RECIPES[recipe] is not None:
        trainings.append(Training(size, recipe, PARTS, masters=True))
    for training in trainings:
        for _ in range(WARM):
            training.step()
    for _ in range(ROUNDS):
        for training in trainings:
            training.turn()
    held = sum(training.held() for training in trainings)
    today = statistics.median(trainings[0].times)
    return [training.row(today, held - training.held()) for training in trainings]


def measure(size: Size | None = None) -> list[harness.Row]:
    """All recipes, with the lines of each as they are found. A recipe that fails costs no other's figures."""
    begin, rows = time.perf_counter(), []
    ways = asked("END_TO_END_PARTS", "+".join(PARTS), PARTS)
    for name in (n for (n,) in asked("END_TO_END_RECIPES", ",".join(LINEAR_RECIPES), LINEAR_RECIPES)):
        try:
            found = train(size or (Size() if harness.gpu() else SMALL), name, ways)
        except Exception as error:
            traceback.print_exc()
            found = [{"case": "Llama 1.1B", "recipe": name, "reason": repr(error)[:200], "ok": False}]
        rows += found
        taped.forget()
        harness.free()
        print(f"{time.perf_counter() - begin:6.1f} s\n{harness.table(found)}", flush=True)
    return rows


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["end_to_end", *sys.argv[1:]]))
