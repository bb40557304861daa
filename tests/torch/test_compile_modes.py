"""Compiled modules under torch's own modes, and copies of them: as eager ones, one program for all steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import te_torch as te
from tests.backends import devices
from tests.module_steps import WIDTH, differences, fp8_state, make, randomise, region, step, values

BF16 = torch.bfloat16
on_devices = pytest.mark.parametrize("device", devices())
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")


def some(*often: tuple[str, str]) -> pytest.MarkDecorator:
    """Modules and recipes: these by default, others in full."""
    return pytest.mark.parametrize(
        ("kind", "recipe"),
        [
            pytest.param(kind, recipe, marks=[] if (kind, recipe) in often else [pytest.mark.full])
            for kind in KINDS
            for recipe in ("plain", "delayed", "current")
        ],
    )


class Grouped(torch.nn.Module):
    """A grouped linear with its splits."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = te.GroupedLinear(2, WIDTH, 64, params_dtype=dtype, device=device)
        randomise(self)

    def forward(self, x: torch.Tensor) -> Any:
        return self.experts(x, [16, 16])


def build(kind: str, device: str, dtype: torch.dtype = BF16) -> Any:
    return Grouped(device, dtype) if kind == "GroupedLinear" else make(kind, device, dtype)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def compiled(module: Any) -> tuple[Any, CompileCounterWithBackend]:
    other, counter = copy.deepcopy(module), CompileCounterWithBackend("aot_eager")
    other.compile(fullgraph=True, backend=counter)
    return other, counter


@on_devices
@some(("LayerNormMLP", "current"), ("GroupedLinear", "delayed"))
def test_autocast(kind: str, recipe: str, device: str) -> None:
    """Parameters and inputs in float32, products in bfloat16."""
    eager = build(kind, device, torch.float32)
    module, counter = compiled(eager)
    for i in range(3):
        x = values(32, WIDTH, device=device, seed=i) * (1 + i)
        with torch.autocast(device, dtype=BF16):
            assert not differences(step(module, x, recipe), step(eager, x, recipe)), i
        assert not differences(fp8_state(module), fp8_state(eager)), i
    assert counter.frame_count == 1


@on_devices
@some(("LayerNormLinear", "delayed"))
def test_inference_mode(kind: str, recipe: str, device: str) -> None:
    """Before, between and after steps of training: one program more."""
    eager = build(kind, device)
    module, counter = compiled(eager)
    for i in range(3):
        x = values(32, WIDTH, device=device, dtype=BF16, seed=i) * (1 + i)
        with torch.inference_mode(), region(recipe):
            mine, theirs = module(x.clone()), eager(x.clone())
            assert mine.is_inference() and torch.equal(mine, theirs), i
        assert not differences(step(module, x, recipe), step(eager, x, recipe)), i
        assert not differences(fp8_state(module), fp8_state(eager)), i
    assert counter.frame_count == 2


@on_devices
@some(("LayerNormMLP", "delayed"))
def test_copies_of_compiled_modules(kind: str, recipe: str, device: str) -> None:
    """A copy goes its own way, eager or compiled, and takes the program of the one that it is a copy of."""
    eager = build(kind, device)
    module, counter = compiled(eager)
    x = values(32, WIDTH, device=device, dtype=BF16)
    assert not differences(step(module, x, recipe), step(eager, x, recipe))
    again, other = copy.deepcopy(module), copy.deepcopy(eager)
    for i in range(2):  # it runs eagerly, and leaves the other alone
        assert not differences(step(again, (2 + i) * x, recipe), step(other, (2 + i) * x, recipe))
    assert not differences(fp8_state(again), fp8_state(other))
    assert not differences(fp8_state(module), fp8_state(eager))
    again.compile(fullgraph=True, backend=counter)
    for i in range(2):
        assert not differences(step(again, (4 + i) * x, recipe), step(other, (4 + i) * x, recipe))
        assert not differences(step(module, (2 + i) * x, recipe), step(eager, (2 + i) * x, recipe))
    assert not differences(fp8_state(again), fp8_state(other))
    assert not differences(fp8_state(module), fp8_state(eager))
    assert counter.frame_count == 1
