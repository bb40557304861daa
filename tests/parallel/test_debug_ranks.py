"""`te_torch.debug.inspect` with a group: every rank has the figures of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from te_torch.debug import inspect
from tests import recipes
from tests.parallel.ranks import Rank, Ranks
from tests.torch import planted


def figures(seen: Any) -> dict[str, tuple[float, ...]]:
    found = {}
    for s in seen.report().series:
        if s.tensor == "activation":
            found[s.name] = tuple(float(x) for x in (*s.count, *s.amax, *s.underflow, *s.snr, *s.scale))
    return found


def data(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(16, planted.WIDTH, generator=generator) * 10.0**rank).bfloat16()


def looked(rank: Rank, alone: bool) -> Any:
    """Each rank with its own data; or, `alone`, one with all of it as microbatches."""
    net = planted.model(rank.device, blocks=1)
    with inspect(net, group=None if alone else dist.group.WORLD) as seen:
        for i in range(2):
            numbers = range(rank.world) if alone else [rank.number]
            # In the second step one rank alone has something to do.
            for x in [data(number).to(rank.device) for number in numbers if i == 0 or number == 0]:
                with recipes.region("current"), torch.no_grad():
                    net(x)
            seen.step()
    return figures(seen)


@pytest.mark.four_ranks()
def test_the_figures_of_all_ranks(ranks: Ranks) -> None:
    together, alone = ranks.run(looked, False), ranks.run(looked, True)
    assert len(together[0]) == 2
    for found in together:
        assert found.keys() == alone[0].keys()
        for name, numbers in found.items():
            torch.testing.assert_close(torch.tensor(numbers), torch.tensor(alone[0][name]), rtol=1e-6, atol=1e-6)
