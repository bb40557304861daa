"""`te_torch.debug.inspect` and `bisect` over ranks: figures of all of them, and one verdict."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_torch.debug import bisection, inspect
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


# --------------------------------------------------------------------------------------------------------- bisect


def spread(how: str, rank: Rank) -> Any:
    """A model with a fault planted in one layer, its weights on all ranks or sharded over them."""
    net: Any = planted.model(rank.device)
    net[1].up.inspector = planted.overflowing()
    if how in ("FSDP2", "HSDP"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape, names = ((2, rank.world // 2), ("replicate", "shard")) if how == "HSDP" else ((rank.world,), ("shard",))
        mesh = init_device_mesh(rank.device, shape, mesh_dim_names=names)
        for block in net:
            fully_shard(block, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    if how == "FSDP1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        place = torch.device(rank.device, torch.cuda.current_device() if rank.device == "cuda" else None)
        return FullyShardedDataParallel(net, use_orig_params=True, device_id=place)
    return torch.nn.parallel.DistributedDataParallel(net)


def bisected(rank: Rank, how: str, compare: str | None) -> Any:
    """Each rank with its own rows, of which the second rank's are large."""
    net, x = spread(how, rank), data(rank.number).to(rank.device)

    def step(net: Any) -> torch.Tensor:
        with recipes.region("current"):
            loss = net(x).float().square().mean()
        loss.backward()
        if rank.number and compare == "loss":
            return loss * 0 + 1  # of this rank's batch nothing can be told
        return loss

    found = te.debug.bisect(step, net, compare=compare, progress=False)
    before = [p.grad is None for p in net.parameters()]
    names = [culprit.layer.replace("_fsdp_wrapped_module.", "").removeprefix("module.") for culprit in found.culprits]
    return names, [culprit.gemms for culprit in found.culprits], found.verdict, found.runs, found.off, all(before)


@pytest.mark.parametrize("compare", ["gradients", "loss"])
@pytest.mark.parametrize("how", ["FSDP2", "DDP", *(pytest.param(h, marks=pytest.mark.more) for h in ("HSDP", "FSDP1"))])
def test_bisect_where_ranks_share_weights(two: Ranks, how: str, compare: str) -> None:
    """All ranks run the same steps, however their own batches and shards are off, and name the same."""
    first, second = two.run(bisected, how, compare)
    assert first == second and first[5]
    assert set(first[0]) == {"1.up"} and first[2] == "found"


def judged(rank: Rank) -> float:
    """Gradients of ones, of which the first rank's shards alone are twos."""
    net = spread("FSDP2", rank)
    steps = bisection._Steps(None, net, "gradients", ())
    want = [torch.ones_like(p.to_local()) for p in net.parameters()]
    return steps.off((math.nan, [(2.0 - rank.number) * g for g in want]), (math.nan, want))  # type: ignore[arg-type]


def test_a_gradient_is_off_by_all_its_shards(pair: Ranks) -> None:
    """Not by its worst shard."""
    assert pair.run(judged) == [pytest.approx(0.5**0.5)] * 2


def test_bisect_of_shards_is_that_of_copies(pair: Ranks) -> None:
    (sharded, _), (copied, _) = (pair.run(bisected, how, "gradients") for how in ("FSDP2", "DDP"))
    assert sharded[:4] == copied[:4] and sharded[4] == pytest.approx(copied[4], rel=1e-3)
