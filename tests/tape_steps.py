"""What the tests of tapes share: a program run interpreted and replayed, what it gives compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import te_torch as te
from te_core.tape.taped import Counts
from te_torch.quantized import QuantizedTorch
from tests.module_steps import randomise
from tests.recipes import region
from tests.recordings import tapes

ROWS, HIDDEN = 16, 32
MODULES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **kw: te.Linear(HIDDEN, 48, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(HIDDEN, 48, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(HIDDEN, 48, **kw),
    "LayerNormMLP gated": lambda **kw: te.LayerNormMLP(HIDDEN, 48, activation="swiglu", normalization="RMSNorm", **kw),
    "LayerNormMLP again": lambda **kw: te.LayerNormMLP(HIDDEN, 48, activation="swiglu", checkpoint=True, **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(
        HIDDEN, 64, 2, hidden_dropout=0.1, attention_dropout=0.1, **kw
    ),
}
GEMM_MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP", "LayerNormMLP gated")


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
    module = MODULES[name](device=device, **options)
    randomise(module)
    return module


def drawn(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The next normal numbers, the same on every device."""
    return torch.randn(*shape, dtype=torch.float32).to(device, dtype)


def step(module: Any, x: torch.Tensor, recipe: Any = None, *, backward: Any = None, **options: Any) -> dict[str, Any]:
    """What comes of a forward and a backward: results, gradients, scaling state."""
    x = x.detach().requires_grad_()
    with region(recipe):
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
        found.append(step(module, drawn(ROWS, 2, HIDDEN, device=device), recipe, **options))
        found[-1]["grads"] = {n: None if g is None else g.clone() for n, g in found[-1]["grads"].items()}
        learn(module)
        found.append(list(module.parameters()))
        found[-1] = [p.detach().clone() for p in found[-1]]
    return found
