"""Ranks that have other tokens of the same experts: loads and reports are those of all tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import te_torch as te
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks
from tests.world import values

TOKENS, HIDDEN, EXPERTS, TOP = 24, 32, 4, 2


def made(device: str) -> te.MoELayer:
    torch.manual_seed(0)
    options = {"score_function": "sigmoid", "expert_bias": True, "expert_bias_rate": 0.5}
    return te.MoELayer(HIDDEN, 16, EXPERTS, TOP, **options, device=device)


@by_ranks()
def test_loads_of_all_ranks(rank: Rank) -> None:
    """As one rank has them that has all tokens, also below DistributedDataParallel; so have the gradients."""
    ours, alone, world = made(rank.device), made(rank.device), rank.world
    spread = DistributedDataParallel(ours)
    tokens = [values(TOKENS, HIDDEN, seed=r, device=rank.device) for r in range(world)]
    reports = [te.expert_report(layer) for layer in (ours, alone)]
    for _ in range(2):
        spread(tokens[rank.number]).sum().backward()
        (alone(torch.cat(tokens)).sum() / world).backward()
    ours.update_expert_bias(dist.group.WORLD)
    alone.update_expert_bias()
    assert torch.equal(ours.router.expert_bias, alone.router.expert_bias) and alone.router.expert_bias.any()
    (found,), (wanted,) = reports[0].step(dist.group.WORLD), reports[1].step()
    assert found.load == wanted.load and sum(found.load) == 2 * world * TOKENS * TOP
    assert abs(found.entropy - wanted.entropy) < 1e-6
    for a, b in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
