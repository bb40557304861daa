"""What tests of modules share: recipes, modules, numbers, a step of training, and what differs between two.

The first half compares tensors of steps by name, the second half everything that a program gives, interpreted and
replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_core.tape.taped import Counts
from te_torch.quantized import QuantizedTorch
from tests import recipes
from tests.recordings import tapes

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
    """The region of a recipe, given by itself, by its name here or in tests/recipes.py, or as a region."""
    if hasattr(recipe, "__enter__"):
        return recipe
    if isinstance(recipe, str):
        recipe = RECIPES[recipe] if recipe in RECIPES else recipes.rule(recipe)
    return te.autocast(enabled=recipe is not None, recipe=recipe, emulate=True)


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
            if p.ndim > 1:
                p.copy_(0.2 * noise)
            else:
                p.add_(0.3 * noise)


def step(
    module: Any, x: Any, recipe: Any, *more: Any, dy: torch.Tensor | None = None, owner: Any = None, **options: Any
) -> dict[str, torch.Tensor]:
    """y, dx and all parameter gradients (by name) of one forward and backward; gradients are cleared after.

    Of several tensors `x`, and of several outputs, the others are dx1 and y1, and so on; `more` and `options` go to the
    call as they are.
    """
    owner = module if owner is None else owner
    given = x if isinstance(x, (list, tuple)) else [x]
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in given]
    with region(recipe):
        y = module(*leaves, *more, **options)
    ys = [t for t in (y if isinstance(y, tuple) else (y,)) if t is not None]
    torch.autograd.backward(ys, [gradient_for(t, 7 + i) for i, t in enumerate(ys)] if dy is None else [dy])
    found = {f"y{i or ''}": t.detach() for i, t in enumerate(ys)} | {
        f"dx{i or ''}": t.grad for i, t in enumerate(leaves)
    }
    for name, p in owner.named_parameters():
        if p.grad is not None:
            found[name] = p.grad
        p.grad = None
    return found  # type: ignore[return-value]


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


# --------------------------------------------------------------- programs, interpreted and replayed

ROWS, HIDDEN = 16, 32
TAPED: dict[str, Callable[..., Any]] = {
    "Linear": lambda **kw: te.Linear(HIDDEN, 48, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(HIDDEN, 48, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(HIDDEN, 48, **kw),
    "LayerNormMLP gated": lambda **kw: te.LayerNormMLP(HIDDEN, 48, activation="swiglu", normalization="RMSNorm", **kw),
    "LayerNormMLP again": lambda **kw: te.LayerNormMLP(HIDDEN, 48, activation="swiglu", checkpoint=True, **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(
        HIDDEN, 64, 2, hidden_dropout=0.1, attention_dropout=0.1, **kw
    ),
}
TAPED_GEMMS = ("Linear", "LayerNormLinear", "LayerNormMLP", "LayerNormMLP gated")


def same(program: Callable[[], Any], *reasons: str, replays: bool = True) -> Counts:
    """The program gives the same bits interpreted and replayed, and all its calls of layers replay, but for these
    reasons not to. Each run begins with the same random numbers."""
    with tapes("never") as ran:
        torch.manual_seed(0)
        wanted = bits(program())
    assert ran.replayed == 0
    with tapes("first") as ran:
        torch.manual_seed(0)
        got = bits(program())
    assert got.keys() == wanted.keys()
    other = [name for name in wanted if got[name] != wanted[name]]
    assert not other, other
    assert set(ran.interpreted) == set(reasons), ran
    assert bool(ran.replayed) is replays, ran
    return ran


def bits(value: Any, name: str = "") -> dict[str, tuple[Any, ...]]:
    """All tensors in a value: dtype, shape and bytes, by where they stand in it."""
    if value is None or isinstance(value, (int, float, str)):
        return {name: (value,)}
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (tuple, list)):
        parts = enumerate(value)
    elif isinstance(value, QuantizedTorch):
        parts = enumerate(value.flatten_inner())  # type: ignore[attr-defined]
    else:
        flat = value.detach().cpu().contiguous().reshape(-1)
        return {name: (value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())}
    found: dict[str, tuple[Any, ...]] = {}
    for key, part in parts:
        found |= bits(part, f"{name}.{key}" if name else str(key))
    return found


def made(name: str, device: str = "cpu", **options: Any) -> Any:
    """A module whose parameters all differ from zero and one."""
    module = TAPED[name](device=device, **options)
    randomise(module)
    return module


def drawn(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The next normal numbers, the same on every device."""
    return torch.randn(*shape, dtype=torch.float32).to(device, dtype)


def passed(module: Any, x: torch.Tensor, recipe: Any = None, *, backward: Any = None, **options: Any) -> dict[str, Any]:
    """What comes of a forward and a backward: results, gradients, scaling state."""
    x = x.detach().requires_grad_()
    with recipes.region(recipe):
        y = module(x, **options)
    outputs = [t for t in (y if isinstance(y, tuple) else (y,)) if t is not None]
    grads = [drawn(*t.shape, device=str(t.device), dtype=t.dtype) for t in outputs]
    (backward or torch.autograd.backward)([t for t in outputs if t.requires_grad], grads)
    named = {n: p.grad for n, p in module.named_parameters()}
    return {"y": outputs, "dx": x.grad, "grads": named, "state": [t.clone() for t in module.buffers()]}


def learn(module: torch.nn.Module) -> None:
    """A plain step of SGD."""
    with torch.no_grad():
        for p in module.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.01)
            p.grad = None


def training(module: Any, recipe: Any = None, steps: int = 3, **options: Any) -> list[Any]:
    """Some steps of training, and what they gave."""
    device, found = str(next(module.parameters()).device), []
    for _ in range(steps):
        found.append(passed(module, drawn(ROWS, 2, HIDDEN, device=device), recipe, **options))
        found[-1]["grads"] = {n: None if g is None else g.clone() for n, g in found[-1]["grads"].items()}
        learn(module)
        found.append(list(module.parameters()))
        found[-1] = [p.detach().clone() for p in found[-1]]
    return found
