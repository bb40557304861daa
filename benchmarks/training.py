"""Whether training in low precision gives the loss of training in bf16, and whether this check would notice if not.

A small GPT (te_cli/gpt.py) is trained on the shipped text from several seeds. The mean loss of the last steps, over
the seeds, must be within 1 % of bf16's (NVFP4: 2.5 %); bf16's own held-out loss must lie far below the unigram entropy
of the text, or there was nothing to lose. The same training with the scales of all gradients frozen at 2^-12, where FP8
has no bits left for them, must miss the 1 %. Formats that the device cannot multiply are emulated exactly. NVFP4 runs
as it is used, with the first block in bf16; in every block it is a row of its own, which is not judged.

On a GPU: 300 steps, 4 layers, hidden 256, three seeds. On a CPU: a reduction to 60 steps, 2 layers, hidden 128 and
one seed, which reaches less, so less is asked of bf16.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks import harness
from benchmarks.optimizer import FORMATS
from te_cli.gpt import GPT
from te_cli.settings import TEXT, Settings
from te_cli.training import PLAIN_BLOCKS, Text, Trainer
from te_core.recipe import Float8BlockScaling, Float8CurrentScaling, Format, QParams, Recipe
from te_torch.optimizers import FusedAdam

WITHIN = {"nvfp4": 0.025}  # of bf16's loss; 1 % for the others
CHECKED = ("delayed", "current", "block", "mxfp8", "nvfp4")
FREEZABLE = ("delayed", "current", "block")  # the others have no scale that could be held
FROZEN_SCALE = 2.0**-12
EVERYWHERE = ", every block"  # of recipes that usually leave some out (te_cli/training.py: PLAIN_BLOCKS); not judged


@dataclass(frozen=True)
class Size:
    """One size of the check."""

    settings: Settings
    seeds: tuple[int, ...]
    last: int  # steps whose mean is compared
    below_unigram: float  # what bf16's held-out loss must reach


SIZES = {
    "cuda": Size(
        Settings(steps=300, layers=4, hidden=256, heads=4, batch=32, sequence=256, rate=2e-3),
        seeds=(0, 1, 2),
        last=30,
        below_unigram=0.35,
    ),
    "cpu": Size(
        Settings(steps=60, layers=2, hidden=128, heads=4, batch=8, sequence=64, rate=3e-3),
        seeds=(0,),
        last=10,
        below_unigram=0.15,
    ),
}


def freeze_delayed(model: GPT) -> None:
    """Overwrite what delayed scaling has worked out for the gradients of the coming backward."""
    for module in model.modules():
        state = getattr(module, "fp8_state", None)
        if state is not None:
            state.scale_bwd.fill_(FROZEN_SCALE)


def frozen(name: str) -> Recipe | None:
    """The recipe with 2^-12 for every gradient: limit / max(amax, epsilon), the epsilon above any amax."""
    recipe: Any
    if name == "current":
        recipe, limit = Float8CurrentScaling(), Format.E5M2.value.max_bwd
    elif name == "block":
        recipe, limit = Float8BlockScaling(), Format.E4M3.value.max_bwd
    else:
        return None  # delayed scaling: see freeze_delayed
    recipe.fp8_quant_bwd_grad = QParams(power_2_scale=True, amax_epsilon=limit / FROZEN_SCALE)
    return recipe  # type: ignore[no-any-return]


def train(
    size: Size,
    recipe: str,
    seed: int,
    text: Text,
    device: torch.device,
    freeze: bool = False,
    everywhere: bool = False,
    optimizer: Callable[..., Any] = FusedAdam,
) -> harness.Row:
    """One training run as a row: its last loss, its held-out loss, all its losses."""
    start = time.perf_counter()
    settings = replace(size.settings, recipe=recipe, seed=seed)
    trainer = Trainer(
        settings,
        text,
        device,
        recipe=frozen(recipe) if freeze else None,
        before_backward=freeze_delayed if freeze and recipe == "delayed" else None,
        plain_blocks=0 if everywhere else None,
        optimizer=optimizer,
    )
    trainer.train()
    held_out = trainer.held_out_loss()
    name = "bf16" if recipe == "none" else recipe
    name += ", gradient scales frozen" if freeze else EVERYWHERE if everywhere else ""
    return {
        "case": "GPT",
        "recipe": name,
        "seed": seed,
        "held-out loss": held_out,
        "last loss": sum(trainer.losses[-size.last :]) / size.last,
        "below unigram": 1 - held_out / text.unigram_entropy,
        "seconds": time.perf_counter() - start,
        "losses": trainer.losses,
    }


def shown(row: harness.Row, bf16: harness.Row, size: Size) -> harness.Row:
    """The row beside the bf16 run of its seed; printed at once, for the runs take their time."""
    row["of_bf16"] = row["last loss"] / bf16["last loss"]
    if row is bf16:
        row["ok"] = row["below unigram"] >= size.below_unigram
    print(
        f"{row['recipe']:32s} seed {row['seed']}: last loss {row['last loss']:.4f} ({row['of_bf16'] - 1:+.2%}), "
        f"held out {row['held-out loss']:.4f} ({row['below unigram']:.1%} below unigram), {row['seconds']:.0f} s",
        flush=True,
    )
    return row


def verdict(rows: list[harness.Row], recipe: str) -> harness.Row:
    """The mean over the seeds of a recipe, which is what is judged; a frozen run is right if it is found out."""
    found = [row for row in rows if row["recipe"] == recipe]
    ratio = sum(row["of_bf16"] for row in found) / len(found)
    close = abs(ratio - 1) <= WITHIN.get(recipe, 0.01)  # False for nan
    row: harness.Row = {"case": "GPT, mean", "recipe": recipe, "of_bf16": ratio}
    return row if EVERYWHERE in recipe else row | {"ok": close != ("frozen" in recipe)}


def measure(
    size: Size | None = None, device: torch.device | None = None, recipes: Sequence[str] = CHECKED
) -> list[harness.Row]:
    """All runs: bf16 and every recipe from every seed, the frozen ones from the first; then the means."""
    device = device or harness.device()
    size = size or SIZES[device.type]
    text = Text(TEXT, device)
    rows: list[harness.Row] = []
    for seed in size.seeds:
        bf16 = train(size, "none", seed, text, device)
        rows.append(shown(bf16, bf16, size))
        for freeze in (False, True) if seed == size.seeds[0] else (False,):
            for recipe in recipes:
                if recipe in FREEZABLE or not freeze:
                    rows.append(shown(train(size, recipe, seed, text, device, freeze), bf16, size))
        for recipe in recipes:
            if recipe in PLAIN_BLOCKS:
                rows.append(shown(train(size, recipe, seed, text, device, everywhere=True), bf16, size))
    return rows + [verdict(rows, recipe) for recipe in dict.fromkeys(r["recipe"] for r in rows) if recipe != "bf16"]


# ------------------------------------------------------------------------------------------- the optimizer's formats


class TorchAdamW(torch.optim.AdamW):
    """torch's own, whose gradients are multiplied before."""

    def step(self, closure: Any = None, *, grad_scale: torch.Tensor | None = None) -> Any:
        """One step."""
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.mul_(1.0 if grad_scale is None else grad_scale)
        return super().step(closure)


def fused_adam(groups: list[dict[str, Any]], **options: Any) -> FusedAdam:
    """FusedAdam on the parameters as they are; with masters on parameters in bf16, their masters' rounding."""
    optimizer = FusedAdam(groups, **options)
    if optimizer.master_weights:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            exact = p.data
            p.data = exact.to(torch.bfloat16)
            optimizer.initialize_state(p)
            if not optimizer.store_param_remainders:
                optimizer.set_scaled_state(p, "master_param", exact)
    return optimizer


def compare_optimizers(
    recipe: str, size: Size | None = None, device: torch.device | None = None, formats: Sequence[str] = tuple(FORMATS)
) -> list[harness.Row]:
    """A row for each format of FusedAdam's state: its last loss, 1 = torch's AdamW on float32 parameters, the mean over
    the seeds. They are as close as a recipe's loss has to be to bf16's."""
    device = device or harness.device()
    size, text = size or SIZES[device.type], Text(TEXT, device)
    ratios: dict[str, list[float]] = {name: [] for name in formats}
    for seed in size.seeds:
        run = partial(train, size, recipe, seed, text, device)
        torchs = run(optimizer=TorchAdamW)["last loss"]
        for name, found in ratios.items():
            found.append(run(optimizer=partial(fused_adam, **FORMATS[name][0]))["last loss"] / torchs)
            print(f"{recipe}, {name}, seed {seed}: last loss {found[-1] - 1:+.2%} of torch's {torchs:.4f}", flush=True)
    rows: list[harness.Row] = []
    for name, found in ratios.items():
        mean = sum(found) / len(found)
        ok = abs(mean - 1) <= WITHIN.get(recipe, 0.01)
        rows.append({"case": f"FusedAdam, {name}", "recipe": recipe, "of_torch's": mean, "ok": ok})
    return rows


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["training", *sys.argv[1:]]))
