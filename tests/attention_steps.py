"""What tests of `DotProductAttention` as a module share: the module, inputs, a step, and the choice of a backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_torch.attention import DotProductAttention
from te_torch.attention.choose import FUSED, UNFUSED

HEADS, GROUPS, WIDTH, SEQ, BATCH = 4, 2, 16, 6, 3


def only(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Let one backend through."""
    for variable, name in (("NVTE_FUSED_ATTN", FUSED), ("NVTE_UNFUSED_ATTN", UNFUSED)):
        monkeypatch.setenv(variable, "1" if name == backend else "0")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")


def make(**options: Any) -> DotProductAttention:
    return DotProductAttention(HEADS, WIDTH, **{"num_gqa_groups": GROUPS, "qkv_format": "bshd", **options}).cpu()


def inputs(device: str = "cpu", form: str = "bshd", dtype: torch.dtype | None = None, skv: int = SEQ) -> list[Any]:
    """q, k and v; the same numbers in sbhd and bshd."""
    torch.manual_seed(7)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    shapes = [(BATCH, SEQ, HEADS, WIDTH), (BATCH, skv, GROUPS, WIDTH), (BATCH, skv, GROUPS, WIDTH)]
    made = [torch.randn(shape).to(device, dtype) for shape in shapes]
    if form == "sbhd":
        made = [t.transpose(0, 1).contiguous() for t in made]
    return [t.requires_grad_() for t in made]


def padding(lengths: list[int], longest: int = SEQ, device: str = "cpu") -> torch.Tensor:
    ends = torch.tensor(lengths, device=device).view(-1, 1, 1, 1)
    return torch.arange(longest, device=device).view(1, 1, 1, -1) >= ends


def sums(lengths: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32)


def step(module: DotProductAttention, tensors: list[Any], *args: Any, **options: Any) -> list[torch.Tensor]:
    """Output and gradients."""
    out = module(*tensors, *args, **options)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    grads = torch.autograd.grad((out.float() * weights).sum(), [t for t in tensors if t.requires_grad])
    return [out, *grads]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def near(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Equal but for the order of sums; on a GPU in bfloat16 but for roundings."""
    bound = 3e-2 if a[0].dtype == torch.bfloat16 else 2e-5
    return all(
        (x.float() - y.float()).abs().max() <= bound * max(1.0, y.float().abs().max())
        for x, y in zip(a, b, strict=True)
    )


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Equal steps. A GPU's backward adds in any order: there only the outputs have the same bits."""
    return same(a, b) if not a[0].is_cuda else torch.equal(a[0], b[0]) and near(a, b)
