"""What the tests of modules share: recipes by name, modules by name, one step, and comparing steps."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling

RECIPES = {"plain": None, "delayed": DelayedScaling(amax_history_len=4), "current": Float8CurrentScaling()}
FP8 = ("delayed", "current")

# Input width 48 for all; the widths that a module makes are 64 (LayerNormLinear, Linear) and 80 (the MLP's inside).
WIDTH = 48
MODULES: dict[str, Any] = {
    "Linear": lambda **kw: te.Linear(WIDTH, 64, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(WIDTH, 64, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(WIDTH, 80, **kw),
    "LayerNorm": lambda **kw: te.LayerNorm(WIDTH, **kw),
    "RMSNorm": lambda **kw: te.RMSNorm(WIDTH, **kw),
}
GEMM_MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP")


NO_REGION = contextlib.nullcontext()


def region(recipe: Any) -> Any:
    """The region of a recipe, given by itself or by its name here; or a region as it is."""
    if hasattr(recipe, "__enter__"):
        return recipe
    rule = RECIPES[recipe] if isinstance(recipe, str) else recipe
    return te.autocast(enabled=rule is not None, recipe=rule, emulate=True)


def values(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def make(kind: str, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0, **kw: Any) -> Any:
    """A module whose every parameter is drawn at random, so that no gradient path is hidden by a one or a zero."""
    module = MODULES[kind](**{"params_dtype" if kind in GEMM_MODULES else "dtype": dtype}, device=device, **kw)
    randomise(module, seed)
    return module


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    """Weights of matrices like the default, gains around their start, biases away from zero."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            noise = values(*p.shape, device=str(p.device), seed=1000 * seed + i)
            if p.ndim == 2:
                p.copy_(0.2 * noise)
            else:
                p.add_(0.3 * noise)


def step(
    module: Any, x: torch.Tensor, recipe: Any, *, dy: torch.Tensor | None = None, owner: Any = None
) -> dict[str, torch.Tensor]:
    """y, dx and all parameter gradients (by name) of one forward and backward; gradients are cleared after."""
    owner = module if owner is None else owner
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with region(recipe):
        y = module(leaf)
    y.backward(gradient_for(y) if dy is None else dy)
    found = {"y": y.detach(), "dx": leaf.grad}
    for name, p in owner.named_parameters():
        if p.grad is not None:
            found[name] = p.grad
        p.grad = None
    return found


def gradient_for(y: torch.Tensor, seed: int = 7) -> torch.Tensor:
    """A fixed random gradient for an output."""
    return values(*y.shape, device=str(y.device), dtype=y.dtype, seed=seed)


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """The names under which two steps are not equal bit for bit."""
    assert set(a) == set(b), set(a) ^ set(b)
    return [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]


def fp8_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all scales and histories in a module."""
    return {name: t.clone() for name, t in module.named_buffers() if "fp8_state." in name and "used" not in name}


def on(device: str, *tensors: torch.Tensor | None) -> None:
    """The tensors are where the test says it runs."""
    for t in tensors:
        assert t is None or t.device.type == device, f"on {t.device}, not {device}"
