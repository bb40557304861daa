"""Sizes that no FP8 GEMM takes: the result equals, bit for bit, the one with zero rows and columns added by hand; and
Fp8Padding and Fp8Unpadding, against a loop over groups.

The values of the former are small integers, so that every product and sum is exact and no order of adding can tell two
calls apart.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from te_torch.modules.padding import Fp8Padding, Fp8Unpadding
from tests.backends import on_devices
from tests.covering import covering
from tests.world import FP8, on, region, values

SIZES = (1, 3, 8, 15, 16, 17, 24, 40)
#: Every pair of sizes in every two of the three places; all triples under --full.
PAIRS = [(a, b, SIZES[(i + j) % 8]) for i, a in enumerate(SIZES) for j, b in enumerate(SIZES)]
SHAPES = {"pairs": PAIRS, "all": list(product(SIZES, SIZES, SIZES))}
BF16 = torch.bfloat16


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


def reference(x: torch.Tensor, splits: list[int], align: int) -> tuple[torch.Tensor, list[int]]:
    """Row by row."""
    rows, sizes, at = [], [], 0
    for m in splits:
        rows += [x[at + i] for i in range(m)]
        at += m
        sizes.append(m)
        while sizes[-1] % align:
            rows.append(torch.zeros_like(x[0]))
            sizes[-1] += 1
    return torch.stack(rows), sizes


@on_devices
@pytest.mark.parametrize("splits", [[3, 0, 16, 17], [1], [0, 5], [33, 31, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back(splits: list[int], dtype: torch.dtype, device: str) -> None:
    x = values(sum(splits), 24, device=device, dtype=dtype).requires_grad_()
    padded, sizes = Fp8Padding(len(splits), align_size=16)(x, splits)
    expected, expected_sizes = reference(x.detach(), splits, 16)
    on(device, padded)
    assert sizes == expected_sizes and torch.equal(padded, expected) and padded.dtype == dtype
    back = Fp8Unpadding(len(splits), align_size=16)(padded, splits)
    assert torch.equal(back, x)
    dy = values(*x.shape, device=device, dtype=dtype, seed=1)
    back.backward(dy)
    assert torch.equal(x.grad, dy)


@on_devices
def test_gradients(device: str) -> None:
    """Padding drops the gradients of its zeros; unpadding gives zeros to the rows that it takes out."""
    splits = [3, 0, 9]
    x = values(12, 4, device=device).requires_grad_()
    padded, sizes = Fp8Padding(3, 8)(x, splits)
    dy = values(*padded.shape, device=device, seed=2)
    (dx,) = torch.autograd.grad(padded, x, dy)
    assert torch.equal(dx, torch.cat([dy[:3], dy[8:17]]))
    full = padded.detach().requires_grad_()
    (d_full,) = torch.autograd.grad(Fp8Unpadding(3, 8)(full, splits), full, dx)
    assert torch.equal(d_full, reference(dx, splits, 8)[0])


@on_devices
def test_aligned_is_unchanged(device: str) -> None:
    x, splits = values(48, 4, device=device), [16, 0, 32]
    padded, sizes = Fp8Padding(3, 16)(x, splits)
    assert padded is x and sizes is splits and Fp8Unpadding(3, 16)(x, splits) is x


@on_devices
def test_splits_as_a_tensor(device: str) -> None:
    """The sizes come back as the same kind of tensor, and are what a list gives."""
    x, splits = values(20, 4, device=device), torch.tensor([3, 17], dtype=torch.int32, device=device)
    padded, sizes = Fp8Padding(2, 16)(x, splits)
    assert isinstance(sizes, torch.Tensor) and sizes.dtype == torch.int32 and sizes.device == splits.device
    assert sizes.tolist() == [16, 32] and torch.equal(padded, reference(x, [3, 17], 16)[0])
    assert torch.equal(Fp8Unpadding(2, 16)(padded, splits), x)


ALIGNMENT = [
    (DelayedScaling(), 16),
    (Float8CurrentScaling(), 16),
    (Float8BlockScaling(), 16),
    (MXFP8BlockScaling(), 32),
    (NVFP4BlockScaling(), 128),
    (CustomRecipe(qfactory=lambda role: None, quantization_alignment=40), 40),
]


@pytest.mark.parametrize(("recipe", "align"), ALIGNMENT, ids=lambda v: type(v).__name__)
def test_alignment_of_the_region(recipe: Any, align: int) -> None:
    """Of the first forward's region, and of that one only."""
    pad, unpad, x = Fp8Padding(2), Fp8Unpadding(2), values(4, 2)
    with te.autocast(recipe=recipe):
        padded, sizes = pad(x, [1, 3])
        assert torch.equal(unpad(padded, [1, 3]), x)
    assert sizes == [align, align]
    with te.autocast(recipe=NVFP4BlockScaling()):
        assert pad(x, [1, 3])[1] == [align, align]
    assert Fp8Padding(1)(x, [4])[0].shape[0] in (16, 32), "outside of a region: the default recipe's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_under_torch_autocast(dtype: torch.dtype) -> None:
    """Rows are moved, not computed with: they keep their dtype, and torch's rule for mixed dtypes is not asked."""
    x = values(30, 16).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        padded, sizes = Fp8Padding(2, 16)(x, [10, 20])
        back = Fp8Unpadding(2, 16)(padded, [10, 20])
    assert list(sizes) == [16, 32] and padded.dtype == dtype and torch.equal(back, x)
