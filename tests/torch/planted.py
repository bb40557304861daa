"""A small model, and faults of precision that tests and the document plant in one of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import te_torch as te
from te_core import ops
from te_core.quantized import Cast, QuantizedTensor
from te_torch.runtime import to_core, to_torch
from tests import recipes

WIDTH, ROWS = 64, 48
BF16: dict[str, Any] = {"params_dtype": torch.bfloat16}


def large(weight: torch.Tensor) -> torch.Tensor:
    """Every layer counts in the result."""
    return torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)


LARGE: dict[str, Any] = {**BF16, "init_method": large}
OF_INPUT = (("fprop", "activation"), ("wgrad", "activation"))
OF_GRADIENT = (("dgrad", "gradient"), ("wgrad", "gradient"))


class Block(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.up = te.LayerNormLinear(WIDTH, 2 * WIDTH, device=device, **LARGE)
        self.down = te.Linear(2 * WIDTH, WIDTH, device=device, **LARGE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def model(device: str = "cpu", blocks: int = 3) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Block(device) for _ in range(blocks)])


def step_of(recipe: str | None, device: str = "cpu") -> Callable[[torch.nn.Module], torch.Tensor]:
    """A step: the same data each time, gradients are left."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(device, torch.bfloat16)
    target = torch.randn(ROWS, WIDTH, generator=generator).to(device)

    def step(net: torch.nn.Module) -> torch.Tensor:
        with recipes.region(recipe):
            loss = (net(x).float() - target).square().mean()
        loss.backward()
        return loss

    return step


class Fault:
    """An inspector that spoils values before they are quantized, in the layer's own format."""

    def __init__(self, points: tuple[tuple[str, str], ...], spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.request = frozenset(points)
        self._spoil = spoil

    def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> Any:
        if not isinstance(out, QuantizedTensor):
            return None
        x = to_torch(value)
        low = to_core(self._spoil(x.float()).to(x.dtype).contiguous())
        copies = {"rowwise": out.rowwise is not None, "columnwise": out.columnwise is not None}
        return ops.quantize(rt, low.matrix(), Cast(out.format, **copies))


def overflowing() -> Fault:
    """Activations beyond a 50th of the largest saturate, as by a scale that is 50 times too large."""
    return Fault(OF_INPUT, lambda x: x.clamp(-x.abs().max() / 50, x.abs().max() / 50))


def underflowing() -> Fault:
    """Gradients below a quarter of the largest are flushed to zero, as by a scale that is far too small."""
    return Fault(OF_GRADIENT, lambda g: torch.where(g.abs() < g.abs().max() / 4, 0.0, g))


def frozen(first: float = 0.1) -> Fault:
    """Activations meet the scale of long ago, when the largest of them was `first`."""
    scale = 448 / first

    def spoil(x: torch.Tensor) -> torch.Tensor:
        codes = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.float() / scale

    return Fault(OF_INPUT, spoil)


FAULTS = {"overflow": overflowing, "underflow": underflowing, "frozen scale": frozen}
