"""Sizes that no FP8 GEMM takes: the result equals, bit for bit, the one with zero rows and columns added by hand.

The values are small integers, so that every product and sum is exact and no order of adding can tell two calls apart.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

import te_torch as te
from tests.backends import devices
from tests.covering import covering
from tests.module_steps import FP8, on, region

SIZES = (1, 3, 8, 15, 16, 17, 24, 40)
#: Every pair of sizes in every two of the three places; all triples under --full.
PAIRS = [(a, b, SIZES[(i + j) % 8]) for i, a in enumerate(SIZES) for j, b in enumerate(SIZES)]
SHAPES = {"pairs": PAIRS, "all": list(product(SIZES, SIZES, SIZES))}
BF16 = torch.bfloat16
on_devices = pytest.mark.parametrize("device", devices())


def integers(*shape: int, device: str, seed: int) -> torch.Tensor:
    """-7 .. 7, the largest among them: FP8 at a scale of 448 / 7 or 57344 / 7 holds them all exactly."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-7, 8, shape, generator=generator)
    values.view(-1)[0] = 7
    return values.to(device, BF16)


def signs(*shape: int, device: str, seed: int) -> torch.Tensor:
    """+-1: what RMSNorm leaves as it is."""
    return (2 * torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)) - 1).to(device, BF16)


def up(n: int) -> int:
    return -(-n // 16) * 16


def pad(t: torch.Tensor) -> torch.Tensor:
    """Zeros up to multiples of 16."""
    grown = t.new_zeros([up(n) for n in t.shape])
    grown[tuple(slice(n) for n in t.shape)] = t
    return grown


class Padded(torch.nn.Module):
    """A linear with the same parameters, called with everything padded by hand."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.shape = weight.shape
        n, k = pad(weight).shape
        self.inner = te.Linear(k, n, params_dtype=BF16, device=weight.device)
        with torch.no_grad():
            self.inner.weight.copy_(pad(weight))
            self.inner.bias.copy_(pad(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, k = self.shape
        m = x.shape[0]
        x = torch.nn.functional.pad(x, (0, up(k) - k, 0, up(m) - m))
        return self.inner(x)[:m, :n]

    def grads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the real part; the rest has none."""
        n, k = self.shape
        dw, db = self.inner.weight.grad, self.inner.bias.grad
        assert not dw[n:].any() and not dw[:, k:].any() and not db[n:].any()
        return dw[:n, :k], db[:n]


class ByHand(torch.nn.Module):
    """norm, padded linear (, relu, padded linear): the fused modules in separate steps."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        kind, p = type(module).__name__, dict(module.named_parameters())
        self.norm = None
        if kind != "Linear":
            self.norm = te.RMSNorm(len(module.layer_norm_weight), dtype=BF16, device=module.layer_norm_weight.device)
            with torch.no_grad():
                self.norm.weight.copy_(module.layer_norm_weight)
        names = ("fc1_", "fc2_") if kind == "LayerNormMLP" else ("",)
        self.linears = torch.nn.ModuleList(Padded(p[f"{n}weight"].detach(), p[f"{n}bias"].detach()) for n in names)
        self.names = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm is not None:
            x = self.norm(x)
        x = self.linears[0](x)
        return self.linears[1](torch.relu(x)) if len(self.linears) > 1 else x

    def grads(self) -> dict[str, torch.Tensor]:
        found = {} if self.norm is None else {"layer_norm_weight": self.norm.weight.grad}
        for name, linear in zip(self.names, self.linears, strict=True):
            found[f"{name}weight"], found[f"{name}bias"] = linear.grads()
        return found


def build(kind: str, k: int, n: int, device: str) -> torch.nn.Module:
    """K wide, N wide; the MLP K wide with N inside."""
    options = {"params_dtype": BF16, "device": device}
    if kind == "Linear":
        module = te.Linear(k, n, **options)
    elif kind == "LayerNormLinear":
        module = te.LayerNormLinear(k, n, normalization="RMSNorm", **options)
    else:
        module = te.LayerNormMLP(k, n, normalization="RMSNorm", activation="relu", **options)
    with torch.no_grad():
        for i, (name, p) in enumerate(module.named_parameters()):
            p.copy_(2.0 ** (torch.arange(k) % 3) if "norm" in name else integers(*p.shape, device=device, seed=i))
    return module


@on_devices
@pytest.mark.parametrize("shapes", ["pairs", pytest.param("all", marks=pytest.mark.full)])
@covering(kind=["Linear", "LayerNormLinear", "LayerNormMLP"], recipe=FP8)
def test_equals_the_padded_call(kind: str, recipe: str, shapes: str, device: str) -> None:
    """M, K, N of SIZES; delayed scaling takes two steps and casts with scales of its own finding in the second."""
    for m, k, n in SHAPES[shapes]:
        module = build(kind, k, n, device)
        other = ByHand(module)
        x = (integers if kind == "Linear" else signs)(m, k, device=device, seed=7)
        for step in range(2 if recipe == "delayed" else 1):
            leaves = [x.clone().requires_grad_() for _ in range(2)]
            module.zero_grad(), other.zero_grad()
            with region(recipe):
                ours, wanted = module(leaves[0]), other(leaves[1])
            dy = integers(*ours.shape, device=device, seed=8)
            torch.autograd.backward([ours, wanted], [dy, dy])
            where = f"M, K, N = {m}, {k}, {n}, step {step}"
            on(device, ours, leaves[0].grad)
            assert torch.equal(ours, wanted), f"y of {where}"
            assert torch.equal(leaves[0].grad, leaves[1].grad), f"dx of {where}"
            for name, grad in other.grads().items():
                assert torch.equal(getattr(module, name).grad, grad), f"{name} of {where}"
            assert ours.any()
        if recipe == "delayed":
            for i, linear in enumerate(other.linears):
                mine, theirs = module.fp8_state, linear.inner.fp8_state
                assert torch.equal(mine.scale_fwd[3 * i : 3 * i + 2], theirs.scale_fwd[:2]), f"scales of {where}"
                assert torch.equal(mine.scale_bwd[2 * i], theirs.scale_bwd[0]), f"scales of {where}"
