"""`te_torch.attention.softmax` and L2Normalization: against plain torch, gradients, tracing, documented conditions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_torch.attention import softmax as module
from te_torch.attention.softmax import FusedScaleMaskSoftmax
from te_torch.modules.norm import L2Normalization
from tests.backends import devices

DEVICES = devices()
HIDE = -1e30  # what hides a score in plain torch, where minus infinity would make NaN of a row that sees nothing


def plain(x: torch.Tensor, scale: float, hidden: torch.Tensor | None) -> torch.Tensor:
    """In float64; a row that sees nothing is zeros."""
    v = x.double() * scale
    if hidden is not None:
        v = v.masked_fill(hidden, HIDE)
    p = torch.softmax(v, dim=-1)
    return p if hidden is None else p.masked_fill(hidden, 0)


def triangle(sq: int, sk: int, device: str, shift: int = 0) -> torch.Tensor:
    return torch.ones(sq, sk, dtype=torch.bool, device=device).triu(1 + shift)


NAMES = {
    "scaled_softmax": None,
    "scaled_masked_softmax": None,
    "scaled_upper_triang_masked_softmax": 0,
    "scaled_aligned_causal_masked_softmax": 12,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_operators(device: str, name: str) -> None:
    """Values, the explicit backward operator, autograd, fake kernels."""
    forward, backward = (getattr(torch.ops.te_softmax, f"{name}_{half}") for half in ("fwd", "bwd"))
    flat = name == "scaled_upper_triang_masked_softmax"
    shape = (3, 8, 8) if flat else (2, 2, 4, 16)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 5e-3)):
        x = torch.randn(*shape, device=device).to(dtype).requires_grad_()
        mask = (torch.rand(2, 1, 4, 16, device=device) < 0.4) if "_masked" in name and NAMES[name] is None else None
        hidden = mask if NAMES[name] is None else triangle(*shape[-2:], device, NAMES[name])
        given = (x, 0.7) if mask is None else (x, mask, 0.7)
        y = forward(*given)
        lifted = x if not flat else x[:, None]
        expected = plain(lifted, 0.7, hidden).reshape(shape)
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * 0.1)
        g = torch.randn_like(x)
        (gradient,) = torch.autograd.grad(y, x, g)
        torch.testing.assert_close(gradient, backward(g, y.detach(), 0.7), rtol=0, atol=0)
        (want,) = torch.autograd.grad(expected, x, g.double())
        torch.testing.assert_close(gradient.double(), want.double(), rtol=0, atol=4 * tolerance)
        torch.library.opcheck(
            forward, given, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
        )
        torch.library.opcheck(backward, (g, y.detach(), 0.7), test_utils=("test_schema", "test_faketensor"))


def fill(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(mask, -10000.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "mask_type", "masked", "dtype", "fused"),
    [
        ((2, 2, 8, 24), "no_mask", False, torch.bfloat16, True),
        ((2, 2, 8, 24), "padding", True, torch.float16, True),
        ((1, 4, 24, 24), "causal", False, torch.bfloat16, True),
        ((1, 4, 24, 24), "padding_causal", True, torch.bfloat16, True),
        ((1, 4, 8, 24), "causal", False, torch.bfloat16, False),
        ((1, 4, 8, 24), "causal_bottom_right", False, torch.float16, False),
        ((2, 2, 8, 24), "padding", True, torch.float32, False),
        ((1, 3, 8, 24), "no_mask", False, torch.bfloat16, False),
        ((2, 2, 6, 24), "no_mask", False, torch.bfloat16, False),
        ((2, 2, 8, 16), "no_mask", False, torch.bfloat16, False),
        ((2, 2, 8, 20), "no_mask", False, torch.bfloat16, False),
    ],
    ids=str,
)
def test_module(
    device: str,
    shape: Any,
    mask_type: str,
    masked: bool,
    dtype: torch.dtype,
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Either path gives the same probabilities; which one ran is what the conditions say."""
    calls = []
    real = module.fused_softmax
    monkeypatch.setattr(module, "fused_softmax", lambda *a, **k: calls.append(1) or real(*a, **k))
    softmax = FusedScaleMaskSoftmax(fill)
    x = torch.randn(*shape, device=device).to(dtype)
    mask = None
    if masked:
        mask = torch.rand(shape[0], 1, *shape[2:], device=device) < 0.2
        mask[..., 0] = False
    y = softmax(x, mask, mask_type, 0.5)
    assert bool(calls) == fused
    assert y.dtype == dtype
    hidden = mask
    if "causal" in mask_type:
        shift = shape[3] - shape[2] if "bottom_right" in mask_type else 0
        behind = triangle(*shape[2:], device, shift)
        hidden = behind if mask is None else mask | behind
    torch.testing.assert_close(y.double(), plain(x, 0.5, hidden), rtol=8e-3, atol=1e-3)
    monkeypatch.setenv("NVTE_MASKED_SOFTMAX_FUSION", "0")
    calls.clear()
    torch.testing.assert_close(softmax(x, mask, mask_type, 0.5), y, rtol=8e-3, atol=1e-3)
    assert not calls


@pytest.mark.parametrize("device", DEVICES)
def test_l2_normalization(device: str) -> None:
    """Over the heads of any layout, a sum and not a mean; no parameters."""
    norm = L2Normalization(eps=0.1)
    assert not list(norm.parameters())
    assert not norm.state_dict()
    x = torch.randn(3, 2, 4, 24, device=device).transpose(0, 1).requires_grad_()
    y = norm(x)
    expected = x / (x.square().sum(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    g = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(t, x, g)[0] for t in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
