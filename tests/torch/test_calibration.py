"""Calibration: high precision outside, inside the maxima and scales that delayed scaling starts from."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_core.recipe import DelayedScaling, Format
from tests.backends import on_devices
from tests.covering import covering
from tests.recipes import KINDS, RECIPES, rule
from tests.reference import modules as reference
from tests.tolerances import DB, snr_db
from tests.world import GEMM_MODULES, WIDTH, differences, fp8_state, gradient_for, make, on, step, values

gemm_modules = pytest.mark.parametrize("kind", GEMM_MODULES)

RECIPE = DelayedScaling(amax_history_len=4)
MARGIN = DelayedScaling(amax_history_len=4, margin=3, fp8_format=Format.E4M3, amax_compute_algo="most_recent")


def calibrate(module: Any, x: torch.Tensor, recipe: Any = RECIPE) -> Any:
    with te.autocast(enabled=False, calibrating=True, recipe=recipe):
        return module(x)


def maxima(module: Any, x: torch.Tensor) -> list[float]:
    """Max |value| of the operands that forward would quantize, from float64 (fc2's input apart): input, weight, ..."""
    p = {n: t.detach().cpu().double() for n, t in module.named_parameters()}
    _, *normed = reference.forward(module, x.cpu().double(), p)
    first = normed[0] if normed else x.cpu().double()
    if type(module).__name__ != "LayerNormMLP":
        return [t.abs().max().item() for t in (first, p["weight"])]
    h = reference.linear(first, p["fc1_weight"], p["fc1_bias"])
    a = reference.activation(module.activation, h)
    return [t.abs().max().item() for t in (first, p["fc1_weight"], a, p["fc2_weight"])]


def slots(module: Any) -> list[int]:
    """The places of inputs and weights in the forward state."""
    return [3 * gemm + slot for gemm in range(module.gemms) for slot in (0, 1)]


recipes = pytest.mark.parametrize("recipe", [RECIPE, MARGIN], ids=["hybrid", "e4m3 margin"])


@on_devices
@recipes
@gemm_modules
def test_high_precision_outside(kind: str, recipe: Any, device: str) -> None:
    """y and every gradient as without a region, bit for bit."""
    module = make(kind, device, torch.bfloat16)
    x = values(2, 20, WIDTH, device=device, dtype=torch.bfloat16, seed=1)
    wanted = step(module, x, te.autocast(enabled=False))
    got = step(copy.deepcopy(module), x, te.autocast(enabled=False, calibrating=True, recipe=recipe))
    on(device, *got.values())
    for name in [n for n in got if n.endswith("bias") and "norm" not in n]:
        assert snr_db(got.pop(name), wanted.pop(name)) >= DB["bf16"], name  # summed by another kernel
    assert not differences(got, wanted)


@on_devices
@recipes
@gemm_modules
def test_maxima_and_scales(kind: str, recipe: Any, device: str) -> None:
    """Also under no_grad: a calibration run is an inference run."""
    module = make(kind, device)
    x = values(40, WIDTH, device=device, seed=1)
    with torch.set_grad_enabled(recipe is RECIPE):
        calibrate(module, x, recipe)
    state = module.fp8_state
    wanted = torch.tensor(maxima(module, x), dtype=torch.float64)
    found = state.amax_history_fwd[-1][slots(module)].cpu().double()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    scales = state.scale_fwd[slots(module)].cpu()
    assert torch.equal(scales, torch.tensor(448.0 / 2**recipe.margin) / found.float())
    assert not state.amax_history_fwd[:-1].any() and (state.scale_fwd[2::3] == 1).all()
    assert (state.scale_bwd == 1).all() and not state.amax_history_bwd.any(), "gradients are not looked at"


@on_devices
@gemm_modules
def test_largest_of_several_runs(kind: str, device: str) -> None:
    """The history's rule holds: the scale fits the largest of the last inputs, in one region or in several."""
    x = values(40, WIDTH, device=device, seed=1)
    spiked = x.clone()
    spiked[3, 5] = 25.0
    alone = make(kind, device)
    calibrate(alone, spiked)
    apart, together = make(kind, device), make(kind, device)
    for t in (x, spiked, x):
        calibrate(apart, t)
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        [together(t) for t in (x, spiked, x)]
    first = slice(0, 2)
    for module in (apart, together):
        assert torch.equal(module.fp8_state.scale_fwd[first], alone.fp8_state.scale_fwd[first])


@on_devices
@pytest.mark.parametrize("reentrant", [True, False])
@gemm_modules
def test_checkpoint(kind: str, reentrant: bool, device: str) -> None:
    """A recomputed forward collects nothing again and changes nothing."""
    x = values(40, WIDTH, device=device, seed=1)
    plain, module = make(kind, device), make(kind, device)
    wanted = step(plain, x, te.autocast(enabled=False, calibrating=True, recipe=RECIPE))
    leaf = x.clone().requires_grad_()
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        y = checkpoint(module, leaf, use_reentrant=reentrant)
    y.backward(gradient_for(y))
    assert torch.equal(leaf.grad, wanted["dx"]) and torch.equal(y, wanted["y"])
    assert not differences(fp8_state(module), fp8_state(plain))


@on_devices
@pytest.mark.parametrize("grad", [True, False])
@gemm_modules
def test_fp8_starts_from_it(kind: str, grad: bool, device: str) -> None:
    """The first FP8 forward is as good as a warmed-up one, and equals that of a module given these scales."""
    module, other, cold = (make(kind, device) for _ in range(3))
    x = 0.002 * values(40, WIDTH, device=device, seed=1)  # far below what scale 1 can hold
    with torch.no_grad():
        [p.mul_(0.02) for m in (module, other, cold) for n, p in m.named_parameters() if p.ndim == 2]
        calibrate(module, x)
    state = fp8_state(module)
    with te.autocast(recipe=RECIPE), torch.no_grad():
        other(values(4, WIDTH, device=device))  # makes the state
    other.load_state_dict({**other.state_dict(), **state})
    with torch.set_grad_enabled(grad):
        found = []
        for m in (module, other, cold):
            with te.autocast(recipe=RECIPE):
                found.append(m(x).detach())
    wanted = reference.results(module, x, torch.zeros_like(found[0]))["y"]
    floor = DB["fp8 mlp" if kind == "LayerNormMLP" else "fp8 linear"]
    assert torch.equal(found[0], found[1])
    assert snr_db(found[0] - last_bias(module), wanted - last_bias(module).cpu()) >= floor
    cold_db, warm_db = (snr_db(y - last_bias(module), wanted - last_bias(module).cpu()) for y in (found[2], found[0]))
    assert cold_db < warm_db - 3


def last_bias(module: Any) -> torch.Tensor:
    return (module.fc2_bias if hasattr(module, "fc2_bias") else module.bias).detach()


OTHERS = [name for name in RECIPES if not name.startswith("delayed")]


@on_devices
@covering(
    kind=GEMM_MODULES, case=[*(f"calibrating {name}" for name in OTHERS), *(f"off {name}" for name in KINDS), "on"]
)
def test_where_there_is_nothing_to_calibrate(kind: str, case: str, device: str) -> None:
    """Other recipes have no history, a disabled region that calibrates nothing collects nothing, and in one that is
    enabled `calibrating` changes nothing."""
    how, _, recipe = case.partition(" ")
    module, other = (make(kind, device, torch.bfloat16) for _ in range(2))
    x = values(40, WIDTH, device=device, dtype=torch.bfloat16, seed=1)
    for _ in range(2):
        if how == "on":
            around, plain = te.autocast(calibrating=True, recipe=RECIPE), te.autocast(recipe=RECIPE)
        else:
            around = te.autocast(enabled=False, calibrating=how == "calibrating", recipe=rule(recipe))
            plain = te.autocast(enabled=False)
        assert not differences(step(module, x, around), step(other, x, plain))
    assert not differences(fp8_state(module), fp8_state(other)) and (module.fp8_state is None) == (how != "on")
