"""A step that has run before decides nothing anew: nothing on its way builds text that nobody will read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_core import dtypes
from te_core.ops import _check
from te_core.tensor import CPU, Tensor
from tests import recipes
from tests.host_steps import worded, worded_at_last

HIDDEN = 32
SPLIT: dict[str, Any] = {"parameters_split": {"first_": HIDDEN // 2, "second_": HIDDEN // 2}}
MODULES: dict[str, Any] = {
    "Linear": lambda: te.Linear(HIDDEN, HIDDEN),
    "Linear in parts": lambda: te.Linear(HIDDEN, HIDDEN, **SPLIT),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, HIDDEN),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu"),
    "GroupedLinear": lambda: te.GroupedLinear(2, HIDDEN, HIDDEN),
    "TransformerLayer": lambda: te.TransformerLayer(HIDDEN, 2 * HIDDEN, 2, hidden_dropout=0.1),
    "RMSNorm": lambda: te.RMSNorm(HIDDEN),
}


@pytest.mark.parametrize("recipe", [None, *recipes.KINDS])
@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_worded(name: str, recipe: str | None) -> None:
    module = MODULES[name]().to("cpu")
    x = torch.randn(64, 1, HIDDEN, requires_grad=True)
    given = (x.view(64, HIDDEN), [32, 32]) if name == "GroupedLinear" else (x,)

    def step() -> None:
        with recipes.region(recipe):
            y = module(*given)
        y.sum().backward()

    for _ in range(4):
        step()
    assert not worded_at_last(step)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", recipes.KINDS)
def test_nothing_is_worded_for_quantized_weights(recipe: str, fused: bool) -> None:
    with te.quantized_model_init(recipe=recipes.rule(recipe)):
        module = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, params_dtype=torch.bfloat16, device="cpu")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused)
    x = torch.randn(64, 1, HIDDEN, dtype=torch.bfloat16)

    def step() -> None:
        with recipes.region(recipe):
            y = module(x)
        y.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    assert not worded_at_last(step)


def test_what_words_is_seen() -> None:
    """Else the tests above would see nothing."""
    t = Tensor(16, (2,), dtypes.float32, CPU, None)
    assert not worded(lambda: _check.vector("op", "x", t, 2, (dtypes.float32,)))
    assert "tensor.py" in worded(lambda: repr(t)).pop()
