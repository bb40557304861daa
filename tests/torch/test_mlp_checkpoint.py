"""`LayerNormMLP(checkpoint=True)`: forward keeps nothing but its input, and no bit changes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import te_torch as te
from te_torch.base.residual import Branch
from tests import recipes as every
from tests.backends import devices
from tests.covering import covering
from tests.module_steps import RECIPES, WIDTH, differences, fp8_state, gradient_for, make, region, values

on_devices = pytest.mark.parametrize("device", devices())
recipes = pytest.mark.parametrize("recipe", RECIPES)

CHECKPOINTED = {
    "gelu": {},
    "swiglu": {"activation": "swiglu", "normalization": "RMSNorm"},
    "no bias": {"bias": False},
    "norm too": {"return_layernorm_output": True},
    "clamped": {"activation": "clamped_swiglu"},
}


def total(outputs: Any) -> torch.Tensor:
    """All outputs as one number that each of them counts in differently."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum((t * gradient_for(t, seed=30 + i)).sum() for i, t in enumerate(outputs))


def several_steps(module: Any, recipe: Any, x: torch.Tensor, **kw: Any) -> list[dict[str, torch.Tensor]]:
    """Outputs, gradients and FP8 state of three steps; scales are updated between forward and backward."""
    found = []
    for i in range(3):
        leaf = (x * (1 + i)).requires_grad_()
        with region(recipe):
            outputs = module(leaf, **kw)
        total(outputs).backward()
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        found.append({"y": first.detach(), "dx": leaf.grad, **grads, **fp8_state(module)})
        module.zero_grad()
    return found


@on_devices
@covering(turns=2, recipe=RECIPES, options=CHECKPOINTED, dtype=["float32", "bfloat16"])
def test_checkpoint_changes_no_bit(recipe: str, options: str, dtype: str, device: str) -> None:
    number = getattr(torch, dtype)
    kept, again = (make("LayerNormMLP", device, number, checkpoint=c, **CHECKPOINTED[options]) for c in (False, True))
    x = values(2, 24, WIDTH, device=device, dtype=number, seed=1)
    for a, b in zip(several_steps(again, recipe, x), several_steps(kept, recipe, x), strict=True):
        assert not differences(a, b)


@on_devices
@pytest.mark.parametrize(
    "recipe", [*every.KINDS, *(pytest.param(name, marks=pytest.mark.full) for name in every.OVERRIDES)]
)
def test_checkpoint_in_every_recipe(recipe: str, device: str) -> None:
    """Also with weights cached by microbatches, and with weight gradients fused or put off."""
    x = values(2, 32, 64, device=device, dtype=torch.bfloat16, seed=1)
    for kw in ({}, {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}):
        modules = []
        for checkpoint in (True, False):
            torch.manual_seed(4)
            module = te.LayerNormMLP(64, 128, params_dtype=torch.bfloat16, checkpoint=checkpoint, device=device, **kw)
            for name in module._weight_names():
                weight = getattr(module, name)
                weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            modules.append(module)
        for first in (True, False):
            found = []
            for module in modules:
                torch.manual_seed(9)
                found.append(step_with(module, x, recipe, first))
            assert not differences(*found), kw


@on_devices
@covering(turns=2, recipe=["delayed", "block"], around=[None, True, False], quantized=[False, True])
def test_checkpoint_inside_of_another(recipe: str, around: bool | None, quantized: bool, device: str) -> None:
    """Also below torch's own (reentrant or not), and with weights held quantized."""
    found = []
    for checkpoint in (True, False):
        torch.manual_seed(4)
        init = te.quantized_model_init(recipe=every.rule(recipe)) if quantized else contextlib.nullcontext()
        with init:
            module = te.LayerNormMLP(64, 128, params_dtype=torch.bfloat16, checkpoint=checkpoint, device=device)
        for seed in range(3):
            leaf = values(32, 64, device=device, dtype=torch.bfloat16, seed=seed).requires_grad_()
            with every.region(recipe):
                if around is None:
                    y = module(leaf)
                else:
                    y = torch.utils.checkpoint.checkpoint(module, leaf, use_reentrant=around)
            y.backward(gradient_for(y))
        grads = {name: p.grad for name, p in module.named_parameters()}
        found.append({"y": y.detach(), "dx": leaf.grad, **grads, **fp8_state(module)})
    assert not differences(*found)


def step_with(module: Any, x: torch.Tensor, recipe: str, first: bool) -> dict[str, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    with every.region(recipe):
        y = module(leaf, is_first_microbatch=first)
    y.backward(gradient_for(y))
    module.backward_dw()
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    mains = {f"main {name}": getattr(module, name).main_grad.clone() for name in module._weight_names()}
    module.zero_grad()
    return {"y": y.detach(), "dx": leaf.grad, **grads, **mains, **fp8_state(module)}


@on_devices
@pytest.mark.parametrize("frozen", ["fc1_weight", "fc2_weight", "fc1_bias", "layer_norm_weight", "all but fc2", "x"])
def test_checkpoint_of_frozen_parts(frozen: str, device: str) -> None:
    found = []
    for checkpoint in (True, False):
        module = make("LayerNormMLP", device, checkpoint=checkpoint)
        for name, p in module.named_parameters():
            p.requires_grad_(not ("fc2" not in name if frozen == "all but fc2" else name == frozen))
        leaf = values(8, WIDTH, device=device, seed=1).requires_grad_(frozen not in ("x", "all but fc2"))
        y = module(leaf)
        y.backward(gradient_for(y))
        grads = {name: t.grad for name, t in (("x", leaf), *module.named_parameters()) if t.grad is not None}
        found.append({"y": y.detach(), **grads})
    assert not differences(*found)


@on_devices
@recipes
def test_checkpoint_keeps_its_input_only(recipe: str, device: str) -> None:
    """Saved are the input and a few scales, and the graph may be kept for a second backward."""
    saved = {}
    for checkpoint in (True, False):
        module = make("LayerNormMLP", device, torch.bfloat16, checkpoint=checkpoint)
        x = values(512, WIDTH, device=device, dtype=torch.bfloat16, seed=1).requires_grad_() * 1
        with region(recipe), te.measure_saved(module) as measured:
            y = module(x)
        saved[checkpoint] = measured.total
        loss = y.float().sum()
        loss.backward(retain_graph=True)
        once = module.fc1_weight.grad.clone()
        module.zero_grad()
        loss.backward()
        assert torch.equal(module.fc1_weight.grad, once) or recipe == "delayed"  # whose gradient scale has moved
    size = 512 * WIDTH * 2
    assert size <= saved[True] <= size + 64 and saved[True] < saved[False] / 3


@on_devices
@pytest.mark.parametrize(
    "recipe", [name if name == "delayed" else pytest.param(name, marks=pytest.mark.full) for name in RECIPES]
)
def test_checkpoint_with_a_branch_and_compiled(recipe: str, device: str) -> None:
    """The sum is what is kept; under a compiler the same bits."""
    found = []
    for checkpoint, compiled in ((True, False), (False, False), (True, True)):
        torch._dynamo.reset()
        module = make("LayerNormMLP", device, checkpoint=checkpoint)
        x, residual = (values(2, 8, WIDTH, device=device, seed=s).requires_grad_() for s in (1, 2))
        run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
        for _ in range(2):
            with region(recipe):
                out, stream = run(Branch(x, residual))
            total((out, stream)).backward()
        grads = {name: t.grad for name, t in (("x", x), ("residual", residual), *module.named_parameters())}
        found.append({"y": out.detach(), **grads})
    assert not differences(found[0], found[1]) and not differences(found[0], found[2])
