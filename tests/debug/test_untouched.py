"""A layer that no feature touches: what its forward does more while nvdlfw_inspect is initialised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.core.covering_lists import covering_lists
from tests.debug.conftest import config
from tests.host_steps import opcodes

HIDDEN = 32
MODULES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **kw: te.Linear(HIDDEN, HIDDEN, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(HIDDEN, HIDDEN, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **kw),
    "GroupedLinear": lambda **kw: te.GroupedLinear(2, HIDDEN, HIDDEN, **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(HIDDEN, 2 * HIDDEN, 2, **kw),
}
RECIPES = {
    "none": None,
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "attention": Float8CurrentScaling(fp8_dpa=True),
}


def forward_of(kind: str, recipe: Any) -> tuple[Any, Callable[[], Any]]:
    torch.manual_seed(0)
    module, x = MODULES[kind](device="cpu", name="layer"), torch.randn(64, 1, HIDDEN)
    given = (x.view(64, HIDDEN), [32, 32]) if kind == "GroupedLinear" else (x,)

    def run() -> None:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            module(*given)

    return module, run


@covering_lists(pytest.mark.parametrize("kind", MODULES), pytest.mark.parametrize("recipe", RECIPES))
def test_it_costs_an_attribute_test(debugging: Any, kind: str, recipe: str) -> None:
    def counted(run: Callable[[], Any]) -> int:
        for _ in range(3):
            run()
        return min(opcodes(run) for _ in range(3))

    counted(forward_of(kind, RECIPES[recipe])[1])  # what is made once in a process
    before = counted(forward_of(kind, RECIPES[recipe])[1])
    session = debugging(config({"layer_types": ["another"]}, LogTensorStats={"stats": ["max"], "tensors": ["weight"]}))
    _, run = forward_of(kind, RECIPES[recipe])
    assert counted(run) <= before + 40
    first = []
    for _ in range(4):  # a plan that is met anew, say in an older generation of its cache, costs instructions
        session.step()
        first.append(opcodes(run))
    assert min(first) <= before + 40, "the first forward of a step, too"
