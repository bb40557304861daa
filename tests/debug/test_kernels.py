"""The kernels that a GPU runs for GEMMs that features keep in high precision: none of FP8."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.backends import requires_cuda
from tests.core.covering_lists import covering_lists
from tests.debug.conftest import config

WIDTH, ROWS = 512, 512
GEMMS = ["fprop", "dgrad", "wgrad"]
RECIPES = {"delayed": DelayedScaling(), "current": Float8CurrentScaling()}
MODULES: dict[str, Any] = {
    "Linear": lambda **kw: te.Linear(WIDTH, WIDTH, bias=False, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(WIDTH, WIDTH, bias=False, **kw),
}
#: What a product's name has for FP8: cuBLASLt's say q for E4M3 and r for E5M2.
NARROW = re.compile(r"nvjet_sm\d+_[qr]{2}|e4m3|e5m2|qgmma|fp8")


def kernels(module: Any, recipe: Any) -> set[str]:
    """The names of all kernels of a step."""
    x = torch.randn(ROWS, WIDTH, device="cuda").bfloat16().requires_grad_()

    def step() -> None:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x)
        y.backward(torch.ones_like(y))

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    found = {event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA}
    return {name for name in found if not name.startswith(("Memcpy", "Memset"))}


def products(names: set[str]) -> set[str]:
    """The matrix products among kernels."""
    return {name for name in names if re.search("gemm|nvjet|cutlass|xmma", name.lower())}


def narrow(names: set[str]) -> set[str]:
    return {name for name in names if NARROW.search(name.lower())}


def made(kind: str, name: str) -> Any:
    torch.manual_seed(0)
    return MODULES[kind](params_dtype=torch.bfloat16, device="cuda", name=name)


@requires_cuda
@covering_lists(pytest.mark.parametrize("kind", MODULES), pytest.mark.parametrize("recipe", RECIPES))
def test_a_disabled_gemm_runs_a_kernel_of_bf16(debugging: Any, kind: str, recipe: str) -> None:
    plain, low = (kernels(made(kind, "free"), r) for r in (None, RECIPES[recipe]))
    debugging(config({"layer_types": ["watched"]}, DisableQuantizationGEMM={"gemms": GEMMS}))
    off, other = (kernels(made(kind, name), RECIPES[recipe]) for name in ("watched", "other"))
    assert products(low) - products(off), "the trace of FP8 has kernels that this one has not"
    assert narrow(products(low)) and not narrow(products(off)), sorted(off)
    assert products(off) == products(plain), sorted(off)
    assert products(other) == products(low), "a layer that was not named runs the same kernels"


@requires_cuda
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_disabled_gemm(debugging: Any, recipe: str) -> None:
    """fprop runs a bf16 kernel beside FP8 ones of backward."""
    plain, low = (kernels(made("Linear", "free"), r) for r in (None, RECIPES[recipe]))
    debugging(config({"layer_types": ["watched"]}, DisableFP8GEMM={"gemms": ["fprop"]}))
    with pytest.warns(DeprecationWarning):
        off = kernels(made("Linear", "watched"), RECIPES[recipe])
    assert narrow(products(off)) and products(off) - narrow(products(off)) <= products(plain)
    assert products(off) - narrow(products(off)), "one of bf16"
    assert products(off) - products(low)


@requires_cuda
def test_nothing_is_cast_for_a_disabled_layer(debugging: Any) -> None:
    """Its step launches the kernels of the layer in bf16, and no more."""
    plain = kernels(made("Linear", "free"), None)
    debugging(config({"layer_types": ["watched"]}, DisableQuantizationLayer={}))
    off = kernels(made("Linear", "watched"), RECIPES["current"])
    assert off == plain, sorted(off ^ plain)
