"""Tokens, masks and probabilities of the tests of MoE, and what is done with them."""

from __future__ import annotations

import torch

import te_torch as te

T, E, H, K = 37, 6, 40, 2


def routing(device: str, tokens: int = T, experts: int = E) -> torch.Tensor:
    """Tokens without an expert, with some, with all; the second expert gets none."""
    g = torch.Generator().manual_seed(tokens)
    chance = torch.tensor([0.0, 0.3, 1.0])[torch.randint(3, (tokens, 1), generator=g)]
    made = (torch.rand(tokens, experts, generator=g) < chance).int()
    made[:, 1] = 0
    return made.to(device)


def normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def probabilities(mask: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of the routed pairs, two of them exactly 0."""
    made = (normal(*mask.shape).abs().to(mask.device) + 0.1) * mask
    made[2::7] = 0
    return made.to(dtype)


def pairs(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, expert) of each row, by expert and token."""
    expert, token = mask.t().nonzero(as_tuple=True)
    return token, expert


def through_experts(x: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, rows: int) -> torch.Tensor:
    out, row_probs, row_map = te.moe_permute_with_probs(x, probs, mask, rows)
    return te.moe_unpermute(torch.tanh(out) * row_probs[:, None], row_map, probs, restore_shape=x.shape)


def by_index(x: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, rows: int) -> torch.Tensor:
    ids = mask[:, :K].contiguous()
    out, row_map = te.moe_permute(x, ids, rows, map_type="index")
    return te.moe_unpermute(torch.tanh(out), row_map, probs[:, :K].contiguous(), map_type="index")
