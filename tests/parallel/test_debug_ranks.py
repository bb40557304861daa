"""`te_torch.debug.inspect` and `bisect` over ranks: figures of all of them, and one verdict."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_torch.debug import bisection, inspect
from tests.parallel.ranks import Rank
from tests.parallel.steps import alike, by_ranks, place_of, replicated
from tests.parallel.tensor_steps import H, inputs, options, piece
from tests.recipes import region
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
                with region("current"), torch.no_grad():
                    net(x)
            seen.step()
    return figures(seen)


@pytest.mark.four_ranks()
@by_ranks()
def test_the_figures_of_all_ranks(rank: Rank) -> None:
    together, alone = (looked(rank, how) for how in (False, True))
    assert len(together) == 2 and together.keys() == alone.keys()
    for name, numbers in together.items():
        torch.testing.assert_close(torch.tensor(numbers), torch.tensor(alone[name]), rtol=1e-6, atol=1e-6)


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

        return FullyShardedDataParallel(net, use_orig_params=True, device_id=place_of(rank))
    return replicated(net, rank)


def bisected(rank: Rank, how: str, compare: str | None) -> Any:
    """Each rank with its own rows, of which the second rank's are large."""
    net, x = spread(how, rank), data(rank.number).to(rank.device)

    def step(net: Any) -> torch.Tensor:
        with region("current"):
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
@by_ranks("two")
def test_bisect_where_ranks_share_weights(rank: Rank, how: str, compare: str) -> None:
    """All ranks run the same steps, however their own batches and shards are off, and name the same."""
    found = bisected(rank, how, compare)
    assert alike(found) and found[5] and set(found[0]) == {"1.up"} and found[2] == "found"


@by_ranks("pair")
def test_a_gradient_is_off_by_all_its_shards(rank: Rank) -> None:
    """Not by its worst shard: of gradients of ones the first rank's shards alone are twos."""
    net = spread("FSDP2", rank)
    steps = bisection._Steps(None, net, "gradients", ())
    want = [torch.ones_like(p.to_local()) for p in net.parameters()]
    found = steps.off((math.nan, [(2.0 - rank.number) * g for g in want]), (math.nan, want))  # type: ignore[arg-type]
    assert found == pytest.approx(0.5**0.5)


@by_ranks("pair")
def test_bisect_of_shards_is_that_of_copies(rank: Rank) -> None:
    sharded, copied = (bisected(rank, how, "gradients") for how in ("FSDP2", "DDP"))
    assert sharded[:4] == copied[:4] and sharded[4] == pytest.approx(copied[4], rel=1e-3)


class Pair(torch.nn.Module):
    """A block whose ranks have parts of the sequence."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        given = {"params_dtype": torch.bfloat16, "device": rank.device, **options(rank)}
        torch.manual_seed(rank.number)
        self.up = te.LayerNormLinear(H, 2 * H, parallel_mode="column", **given)
        self.down = te.Linear(2 * H, H, parallel_mode="row", **given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return made


@pytest.mark.parametrize(
    ("recipe", "seen_by"),
    [("current", "all"), pytest.param("block", "all", marks=pytest.mark.full), ("current", "one")],
)
@by_ranks("two")
def test_bisect_where_the_worst_rank_decides(rank: Rank, recipe: str, seen_by: str) -> None:
    """A fault planted in one layer: the parts of its input saturate. All ranks run and name the same, also one
    that finds nothing wrong with its own result."""
    model = torch.nn.Sequential(*[Pair(rank) for _ in range(3)])
    model[1].up.inspector = planted.overflowing()
    x = piece(inputs(128, H, 0), 0, rank.number, rank.world).to(rank.device)

    def run(net: torch.nn.Module) -> torch.Tensor:
        with region(recipe):
            loss = net(x).float().square().mean() * (1 + rank.number)  # each rank is off by something else
        loss.backward()
        for p in net.parameters() if seen_by == "one" and rank.number == 0 else ():
            p.grad = torch.ones_like(p)  # whatever the precision
        return loss

    found = te.debug.bisect(run, model, progress=False)
    assert found.layers == ["1.up"] and found.verdict == "found"
    assert alike((found.layers, [culprit.gemms for culprit in found.culprits], found.runs))
