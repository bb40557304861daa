"""`recompute_norm_output = True`: a norm's output is computed again in backward, and no bit changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_torch as te
from te_torch.base.residual import Branch
from tests import recipes
from tests.backends import devices
from tests.covering import covering
from tests.module_steps import WIDTH, differences, fp8_state, gradient_for, make, values

on_devices = pytest.mark.parametrize("device", devices())
MODULES = {
    "linear": ("LayerNormLinear", {}),
    "linear, RMSNorm": ("LayerNormLinear", {"normalization": "RMSNorm", "bias": False}),
    "linear, norm too": ("LayerNormLinear", {"return_layernorm_output": True}),
    "MLP": ("LayerNormMLP", {}),
    "MLP, swiglu": ("LayerNormMLP", {"activation": "swiglu", "normalization": "RMSNorm"}),
    "MLP, checkpoint": ("LayerNormMLP", {"checkpoint": True}),
}


def pair(name: str, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """(the module that computes again, its twin that keeps)."""
    kind, options = MODULES[name]
    twin = make(kind, device, dtype, **options)
    module = copy.deepcopy(twin)
    module.recompute_norm_output = True
    return module, twin


def steps(module: Any, recipe: str | None, x: torch.Tensor, **more: Any) -> list[dict[str, torch.Tensor]]:
    """Everything that three steps of growing inputs leave behind; scales change between forward and backward."""
    found = []
    for number in (1, 3, 9):
        torch.manual_seed(number)
        leaf = (number * x).requires_grad_()
        with recipes.region(recipe):
            outputs = module(leaf, **more)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum((t * gradient_for(t, seed=i)).sum() for i, t in enumerate(outputs)).backward()
        grads = {name: p.grad for name, p in module.named_parameters()}
        found.append({"y": outputs[0].detach(), "dx": leaf.grad, **grads, **fp8_state(module)})
        module.zero_grad()
    return found


@on_devices
@covering(recipe=[None, *recipes.RECIPES, *recipes.OVERRIDES], name=MODULES)
def test_no_bit_changes(recipe: str | None, name: str, device: str) -> None:
    module, twin = pair(name, device)
    x = values(2, 24, WIDTH, device=device, dtype=torch.bfloat16, seed=1)
    for got, want in zip(steps(module, recipe, x), steps(twin, recipe, x), strict=True):
        assert not differences(got, want)


@on_devices
@pytest.mark.parametrize("name", ["linear", "MLP"])
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_in_a_stream_and_in_microbatches(recipe: str | None, name: str, device: str) -> None:
    """The norm of a sum that it formed itself; weights that are quantized once for several forwards."""
    results = []
    for module in pair(name, device):
        x, residual = (values(24, WIDTH, device=device, dtype=torch.bfloat16, seed=s).requires_grad_() for s in (1, 2))
        with recipes.region(recipe):
            for first in (True, False):
                y, total = module(Branch(x, residual, None, 0.3, rng_of(device)), is_first_microbatch=first)
                (y.sum() + (total * gradient_for(total)).sum()).backward()
        grads = {name: p.grad for name, p in module.named_parameters()}
        results.append({"y": y.detach(), "dx": x.grad, "dr": residual.grad, **grads, **fp8_state(module)})
    assert not differences(*results)


def rng_of(device: str) -> torch.Tensor:
    return torch.tensor([11, 12], dtype=torch.int64, device=device)


@on_devices
@pytest.mark.parametrize("name", ["linear", "MLP"])
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_what_is_not_kept(recipe: str | None, name: str, device: str) -> None:
    """The norm's output: in FP8 a byte an element for wgrad, and one where fprop's copy lies in the same memory."""
    kept = []
    for module in pair(name, device):
        x = values(64, WIDTH, device=device, dtype=torch.bfloat16, seed=1).requires_grad_()
        with te.measure_saved(module) as saved, recipes.region(recipe):
            y = module(x)
        kept.append(te.memory_report(module, saved).totals["saved"])
        del y
    less, elements, small = kept[1] - kept[0], 64 * WIDTH, 64  # scales are small
    least = 2 if recipe is None else 1
    assert least * elements - small <= less <= 2 * elements + small


@on_devices
@pytest.mark.parametrize("name", ["linear", "MLP"])
def test_frozen_parts_and_changes(name: str, device: str) -> None:
    """Where the input, or the weight, wants no gradient; and the attribute set between two steps."""
    for frozen in ("input", "weights", "norm"):
        results = []
        for module in pair(name, device):
            for parameter_name, p in module.named_parameters():
                p.requires_grad_(
                    parameter_name.startswith("layer_norm") != (frozen == "norm") if frozen != "input" else True
                )
            x = values(24, WIDTH, device=device, dtype=torch.bfloat16, seed=1).requires_grad_(frozen != "input")
            with recipes.region("delayed"):
                y = module(x)
            y.sum().backward()
            module.recompute_norm_output = not module.recompute_norm_output
            with recipes.region("delayed"):
                z = module(x)
            z.sum().backward()
            grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            results.append({"y": y.detach(), "z": z.detach(), **grads, **fp8_state(module)})
        assert not differences(*results)


@on_devices
@pytest.mark.parametrize("recipe", [pytest.param(None, marks=pytest.mark.full), "delayed"])
def test_compiled(recipe: str | None, device: str) -> None:
    torch._dynamo.reset()
    module, twin = pair("MLP", device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = values(24, WIDTH, device=device, dtype=torch.bfloat16, seed=1)
    results = []
    for each in (compiled, twin):
        leaf = x.clone().requires_grad_()
        with recipes.region(recipe):
            y = each(leaf)
        y.sum().backward()
        owner = module if each is compiled else twin
        grads = {name: p.grad for name, p in owner.named_parameters()}
        results.append({"y": y.detach(), "dx": leaf.grad, **grads, **fp8_state(owner)})
    assert not differences(*results)


@on_devices
def test_a_whole_layer(device: str) -> None:
    """Its parts each have the attribute."""
    kept = []
    for again in (True, False):
        torch.manual_seed(0)
        layer = te.TransformerLayer(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device)
        parts = [module for module in layer.modules() if hasattr(module, "recompute_norm_output")]
        assert len(parts) == 2
        for part in parts:
            part.recompute_norm_output = again
        x = values(32, 2, 64, device=device, seed=1).requires_grad_()
        with te.measure_saved(layer) as saved:
            y = layer(x)
        y.sum().backward()
        kept.append((te.memory_report(layer, saved).totals["saved"], y.detach(), x.grad))
    assert kept[1][0] - kept[0][0] == 2 * 32 * 2 * 64 * 4
    assert torch.equal(kept[0][1], kept[1][1]) and torch.equal(kept[0][2], kept[1][2])
