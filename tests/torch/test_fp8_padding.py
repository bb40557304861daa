"""Fp8Padding and Fp8Unpadding: the rows, the zeros, the sizes, the gradients, against a loop over groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import CustomRecipe, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from te_torch.modules.padding import Fp8Padding, Fp8Unpadding
from tests.backends import devices
from tests.module_steps import on, values

on_devices = pytest.mark.parametrize("device", devices())


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
    (Float8CurrentScaling(), 16),
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
