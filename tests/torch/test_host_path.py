"""A step that has run before decides nothing anew: nothing on its way words a message that nobody will read."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.ops import _check
from tests import recipes

HIDDEN = 32
MODULES: dict[str, Any] = {
    "Linear": lambda: te.Linear(HIDDEN, HIDDEN),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, HIDDEN),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu"),
    "GroupedLinear": lambda: te.GroupedLinear(2, HIDDEN, HIDDEN),
    "TransformerLayer": lambda: te.TransformerLayer(HIDDEN, 2 * HIDDEN, 2, hidden_dropout=0.1),
    "RMSNorm": lambda: te.RMSNorm(HIDDEN),
}


@pytest.mark.parametrize("recipe", [None, *recipes.KINDS])
@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_worded(monkeypatch: pytest.MonkeyPatch, name: str, recipe: str | None) -> None:
    module = MODULES[name]().to("cpu")
    x = torch.randn(64, 1, HIDDEN, requires_grad=True)
    given = (x.view(64, HIDDEN), [32, 32]) if name == "GroupedLinear" else (x,)

    def step() -> None:
        with recipes.region(recipe):
            y = module(*given)
        y.sum().backward()

    for _ in range(4):
        step()
    worded: set[str] = set()

    def spy(ok: bool, operation: str, *parts: str) -> None:
        where = sys._getframe(1)
        worded.add(f"{where.f_code.co_filename}:{where.f_lineno} {operation}")

    monkeypatch.setattr(_check, "require", spy)
    for _ in range(8):  # memory that lies otherwise makes another plan, whose arguments are checked
        worded.clear()
        step()
        if not worded:
            return
    raise AssertionError(worded)


def test_the_check_that_is_watched_is_the_one_that_words() -> None:
    """Else the test above would see nothing."""
    operations = importlib.import_module("te_core.ops.rope")
    assert operations._check.require is _check.require
