"""The modules in bf16 and FP8: GPU time, host time and peak memory, beside the peer's figures.

benchmarks/peer_h200.json holds those figures, taken on an H200 by the same method; of_peer is our time over the
peer's (lower is better) and only means something on that GPU. Host times are stated as multiples of
`torch.nn.Linear`, forward or forward + backward, at the same time in the same process (of_linear).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch

import te_torch as te
from benchmarks import harness
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from tests import generators

RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "delayed, fp8_dpa": DelayedScaling(fp8_dpa=True),
}
LINEAR_RECIPES = ("bf16", "delayed", "current", "block")  # the last one is about attention
BF16: dict[str, Any] = {"params_dtype": torch.bfloat16}
PEER = harness.ROOT / "benchmarks" / "peer_h200.json"


@dataclass(frozen=True)
class Case:
    """A module with an input, and what is asked of it, by recipe."""

    name: str  # as in the peer's file
    make: Callable[[], torch.nn.Module]  # called with one input of this shape
    shape: tuple[int, ...]
    recipes: tuple[str, ...] = LINEAR_RECIPES
    targets: dict[str, float] | None = None  # fwd+bwd GPU time as a share of the peer's
    host: dict[str, tuple[float, float]] | None = None  # forward, fwd+bwd host time in nn.Linears


def swiglu(hidden: int, ffn: int) -> torch.nn.Module:
    """The MLP of a Llama."""
    return te.LayerNormMLP(hidden, ffn, activation="swiglu", normalization="RMSNorm", bias=False, **BF16)


class Experts(torch.nn.Module):
    """The experts of a layer, each with as many rows."""

    def __init__(self, count: int, rows: int, width: int, out: int) -> None:
        super().__init__()
        self.experts = te.GroupedLinear(count, width, out, bias=False, **BF16)
        self.splits = [rows // count] * count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of rows sorted by expert."""
        return self.experts(x, self.splits)


FP8_TARGETS = {"bf16": 1.00, "delayed": 0.95, "current": 0.92, "block": 0.92}

# fmt: off
LARGE = [
    Case("Linear 8192x4096->4096", partial(te.Linear, 4096, 4096, **BF16), (8192, 4096),
         targets={"bf16": 1.00, "delayed": 0.97, "current": 0.92, "block": 0.92}),
    Case("LayerNormLinear 8192x4096->12288", partial(te.LayerNormLinear, 4096, 12288, **BF16), (8192, 4096),
         targets=FP8_TARGETS),
    Case("LayerNormMLP swiglu/rms 8192x4096x14336", partial(swiglu, 4096, 14336), (8192, 4096), targets=FP8_TARGETS),
    Case("GroupedLinear 8x(2048x4096->8192)", partial(Experts, 8, 16384, 4096, 8192), (16384, 4096),
         targets=dict.fromkeys(LINEAR_RECIPES, 1.02)),
    Case("LayerNorm 8192x4096", partial(te.LayerNorm, 4096, **BF16), (8192, 4096), ("bf16",)),
    Case("RMSNorm 8192x4096", partial(te.RMSNorm, 4096, **BF16), (8192, 4096), ("bf16",)),
]
TINY = [
    Case("Linear tiny 128x256->256", partial(te.Linear, 256, 256, **BF16), (128, 256),
         host={"bf16": (1.4, 1.4), "delayed": (2.5, 2.2), "current": (2.5, 2.2), "block": (2.5, 2.2)}),
    Case("LayerNormLinear tiny", partial(te.LayerNormLinear, 256, 768, **BF16), (128, 256),
         host={"bf16": (2.2, 1.7), "delayed": (3.0, 2.5), "current": (3.0, 2.5), "block": (3.0, 2.5)}),
    Case("LayerNormMLP tiny", partial(te.LayerNormMLP, 256, 1024, **BF16), (128, 256),
         host={"bf16": (4.0, 2.7), "delayed": (5.0, 3.7), "current": (5.0, 3.7), "block": (5.0, 3.7)}),
    Case("LayerNorm tiny", partial(te.LayerNorm, 4096, **BF16), (128, 4096), ("bf16",), host={"bf16": (1.2, 1.2)}),
    Case("RMSNorm tiny", partial(te.RMSNorm, 4096, **BF16), (128, 4096), ("bf16",), host={"bf16": (1.2, 1.2)}),
]
# fmt: on
#: The peer's host times of the norms stand under the name of their only shape in its file.
PEER_NAMES = {"LayerNorm tiny": "LayerNorm 8192x4096", "RMSNorm tiny": "RMSNorm 8192x4096"}


@cache
def peer_cases() -> dict[str, Any]:
    """The peer's figures; none where they do not apply."""
    return dict(json.loads(PEER.read_text())["cases"])


def peer(case: str, recipe: str, what: str) -> float:
    """One of the peer's figures; nan if it has none, and beside a CPU's."""
    if not harness.gpu():
        return float("nan")
    value = peer_cases().get(f"{PEER_NAMES.get(case, case)} {recipe} {what}")
    return float(value) if isinstance(value, (int, float)) else float("nan")


def works(module: torch.nn.Module, x: torch.Tensor, recipe: Recipe | None) -> tuple[harness.Work, harness.Work]:
    """(forward, forward and backward) of a module on an input that wants its gradient too."""

    def forward() -> torch.Tensor:
        if recipe is None and isinstance(module, torch.nn.Linear):  # the yardstick stands alone
            return module(x)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return module(x)

    *lead, width = forward().shape
    dy = harness.matrix(generators.gradients, prod(lead), width).view(*lead, width)

    def both() -> None:
        forward().backward(dy)
        x.grad = None
        module.zero_grad(set_to_none=True)

    return forward, both


def build(case: Case, recipe: str) -> tuple[harness.Work, harness.Work]:
    """The works of a case."""
    torch.manual_seed(0)
    *lead, width = case.shape
    x = harness.matrix(generators.activations, prod(lead), width).view(*case.shape).requires_grad_()
    return works(case.make(), x, RECIPES[recipe])


def forward_only(forward: harness.Work) -> harness.Work:
    """As at inference."""

    def run() -> None:
        with torch.no_grad():
            forward()

    return run


def gpu_row(case: Case, recipe: str) -> harness.Row:
    """GPU times and peak memory of one case."""
    forward, both = build(case, recipe)
    (fwd,), (total,) = harness.gpu_us(forward_only(forward)), harness.gpu_us(both)
    row: harness.Row = {"case": case.name, "recipe": recipe, "fwd us": fwd, "fwd+bwd us": total}
    row["peak MiB"] = harness.peak_mib(both)
    for ours, theirs in (("fwd us", "fwd gpu_us"), ("fwd+bwd us", "fwd+bwd gpu_us"), ("peak MiB", "fwd+bwd peak_MiB")):
        row[f"peer {ours}"] = peer(case.name, recipe, theirs)
    row["of_peer"] = total / row["peer fwd+bwd us"]
    if case.targets:
        row |= {"target": case.targets[recipe], "ok": row["of_peer"] <= case.targets[recipe]}
    return row


def host_row(case: Case, recipe: str, calls: int = harness.HOST_CALLS) -> harness.Row:
    """Host times of one case, in turns with those of nn.Linear."""
    forward, both = build(case, recipe)
    linear = torch.nn.Linear(256, 256, device=harness.device(), dtype=torch.bfloat16)
    x = harness.matrix(generators.activations, 128, 256).requires_grad_()
    plain, plain_both = works(linear, x, None)
    fwd, linear_fwd = harness.host_us(forward, plain, calls=calls)
    total, linear_total = harness.host_us(both, plain_both, calls=calls)
    row: harness.Row = {
        "case": f"host: {case.name}",
        "recipe": recipe,
        "fwd us": fwd,
        "fwd+bwd us": total,
        "nn.Linear fwd us": linear_fwd,
        "nn.Linear fwd+bwd us": linear_total,
        "peer fwd us": peer(case.name, recipe, "fwd host_us"),
        "peer fwd+bwd us": peer(case.name, recipe, "fwd+bwd host_us"),
        "of_linear fwd": fwd / linear_fwd,
        "of_linear": total / linear_total,
    }
    if case.host and harness.gpu():
        limits = case.host[recipe]
        row["target"] = f"{limits[0]}, {limits[1]}"
        row["ok"] = row["of_linear fwd"] <= limits[0] and row["of_linear"] <= limits[1]
    return row


def measure_all(large: Sequence[Case], tiny: Sequence[Case], calls: int = harness.HOST_CALLS) -> list[harness.Row]:
    """GPU times and memory of the large cases (not on a CPU), host times of the tiny ones."""
    rows = []
    for case in large if harness.gpu() else []:
        for recipe in case.recipes:
            rows.append(gpu_row(case, recipe))
            harness.free()
    for case in tiny:
        for recipe in case.recipes:
            rows.append(host_row(case, recipe, calls))
    return rows


def measure() -> list[harness.Row]:
    """All cases; on a CPU only the tiny ones."""
    return measure_all(LARGE, TINY)


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["modules", *sys.argv[1:]]))
