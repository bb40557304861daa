"""What torch.compile makes of tiny modules: host time of a step, eager, compiled, and compiled as CUDA graphs.

All forms of a case are measured in turns in one process. On a CPU there are no CUDA graphs.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from math import prod

import torch

import te_torch as te
from benchmarks import harness, modules
from benchmarks.modules import BF16, RECIPES, Case
from tests import generators

_LAYER = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **BF16}
CASES = [
    Case("Linear tiny", partial(te.Linear, 256, 256, **BF16), (128, 256)),
    Case("LayerNormMLP tiny", partial(te.LayerNormMLP, 256, 1024, **BF16), (128, 256)),
    Case("TransformerLayer tiny", partial(te.TransformerLayer, 256, 1024, 4, **_LAYER), (128, 1, 256)),
]
RECIPES_HERE = ("bf16", "delayed", "current")
#: What compiling costs where nothing is ours.
TORCH = Case(
    "torch.nn.Linear", lambda: torch.nn.Linear(256, 256, dtype=torch.bfloat16, device=harness.device()), (128, 256)
)


def _row(case: Case, recipe: str) -> harness.Row:
    torch._dynamo.reset()
    torch.manual_seed(0)
    *lead, width = case.shape
    x = harness.matrix(generators.activations, prod(lead), width).view(*case.shape).requires_grad_()
    eager = case.make()
    forms = {"eager": eager, "compiled": torch.compile(copy.deepcopy(eager), fullgraph=True)}
    if harness.gpu():
        forms["graphs"] = torch.compile(copy.deepcopy(eager), fullgraph=True, mode="reduce-overhead")
    works = [modules.works(module, x, RECIPES[recipe])[1] for module in forms.values()]
    times = dict(zip(forms, harness.host_us(*works), strict=True))
    row: harness.Row = {"case": case.name, "recipe": recipe} | {f"{name} us": us for name, us in times.items()}
    row["of_eager"] = times["compiled"] / times["eager"]
    judged = harness.gpu() and case is not TORCH
    return row | {"target": 1.0, "ok": row["of_eager"] <= 1.0} if judged else row


def measure() -> list[harness.Row]:
    """Forward and backward of every case in every recipe."""
    return [_row(TORCH, "bf16"), *[_row(case, recipe) for case in CASES for recipe in RECIPES_HERE]]


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["compiled", *sys.argv[1:]]))
