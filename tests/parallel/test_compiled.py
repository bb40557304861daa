"""Compiled layers under DDP and FSDP2: as eager ones, without graph breaks, without compiling from step to step."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.backends import more_without_gpu
from tests.module_steps import WIDTH, fp8_state, randomise, region, values
from tests.parallel.ranks import Rank, Ranks

RECIPES = {"plain": None, "delayed": DelayedScaling(amax_history_len=4), "current": Float8CurrentScaling()}
LAYERS = 3
pytestmark = more_without_gpu
FULL = pytest.mark.full


def layers(device: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[te.LayerNormMLP(WIDTH, 80, device=device) for _ in range(LAYERS)])
    randomise(model)
    return model


def train(rank: Rank, model: Any, recipe: str) -> list[torch.Tensor]:
    """Steps of an optimizer, with two microbatches each; losses, and what the model then is."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for i in range(4):
        for j in range(2):
            x = values(32, WIDTH, device=rank.device, seed=100 * rank.number + 10 * i + j) * (1 + i)
            x.requires_grad_()  # as the inputs of the layers behind the first one do: another program otherwise
            with region(RECIPES[recipe]):
                y = model(x)
            loss = y.square().mean()
            loss.backward()
            losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def as_compiled_and_eager(rank: Rank, recipe: str, spread: Any, one_by_one: bool) -> tuple[bool, bool, bool, int, int]:
    """(losses, parameters and FP8 states are alike; programs compiled, and graph breaks)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    plain, model = layers(rank.device), layers(rank.device)
    theirs = train(rank, spread(plain, rank), recipe)
    if one_by_one:
        compiled: Any = torch.nn.Sequential(*[torch.compile(m, fullgraph=True, backend=counter) for m in model])
    else:
        compiled = torch.compile(model, fullgraph=True, backend=counter)
    mine = train(rank, spread(compiled, rank), recipe)

    def whole(module: Any) -> list[torch.Tensor]:
        return [t.full_tensor() if hasattr(t, "full_tensor") else t.detach() for t in module.parameters()]

    states = [list(fp8_state(module).values()) for module in (plain, model)]
    assert bool(states[0]) == (recipe == "delayed")
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return equal(mine, theirs), equal(whole(model), whole(plain)), equal(*states), counter.frame_count, breaks


def replicated(model: Any, rank: Rank) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model, device_ids=own_gpu(rank))


def own_gpu(rank: Rank) -> list[int] | None:
    return [torch.cuda.current_device()] if rank.device == "cuda" else None


def sharded(model: Any, rank: Rank) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(rank.device, (dist.get_world_size(),))
    for part in model:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def under_ddp(rank: Rank, recipe: str, one_by_one: bool) -> Any:
    return as_compiled_and_eager(rank, recipe, replicated, one_by_one)


def under_fsdp(rank: Rank, recipe: str) -> Any:
    return as_compiled_and_eager(rank, recipe, sharded, True)


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("recipe", [pytest.param("plain", marks=FULL), "delayed", pytest.param("current", marks=FULL)])
def test_ddp(recipe: str, one_by_one: bool, two: Ranks) -> None:
    """Layers that are compiled each by itself, or the model as a whole, before it is wrapped."""
    for found in two.run(under_ddp, recipe, one_by_one):
        assert found == (True, True, True, 1, 0)


@pytest.mark.parametrize("recipe", [*(pytest.param(name, marks=FULL) for name in ("plain", "current")), "delayed"])
def test_fsdp(recipe: str, two: Ranks) -> None:
    for found in two.run(under_fsdp, recipe):
        assert found == (True, True, True, 1, 0)


# ------------------------------------------------------- a wrapped model compiled, instead of the other way round


class Stack(torch.nn.Module):
    """A model with a forward of its own: what a compiler begins with behind the wrapper."""

    def __init__(self, model: torch.nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) * 2


def wrapped_first(rank: Rank, recipe: str, small: bool) -> Any:
    """(losses, and FP8 states, are those of eager code; as many breaks as around layers of torch's own; how many)."""

    def spread(model: torch.nn.Module) -> Any:
        options: dict[str, Any] = {"device_ids": own_gpu(rank), "bucket_cap_mb": 0.001 if small else 25}
        return torch.nn.parallel.DistributedDataParallel(model, **options)

    def breaks() -> int:
        return sum(torch._dynamo.utils.counters["graph_break"].values())

    found: list[int] = []
    plain, model = Stack(layers(rank.device)), Stack(layers(rank.device))
    theirs = train(rank, spread(plain), recipe)
    torchs = Stack(torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, device=rank.device) for _ in range(LAYERS)]))
    for each in (torchs, model):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        mine = train(rank, torch.compile(spread(each), backend="aot_eager"), recipe)
        found.append(breaks())
    states = [list(fp8_state(module).values()) for module in (plain, model)]
    return equal(mine, theirs), equal(*states), found[1] == found[0], found[0]


def with_small_buckets(rank: Rank, recipe: str, small: bool) -> Any:
    with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000):
        return wrapped_first(rank, recipe, small)


@pytest.mark.parametrize("small", [pytest.param(False, marks=FULL), True])
@pytest.mark.parametrize("recipe", [pytest.param("plain", marks=FULL), "delayed", pytest.param("current", marks=FULL)])
def test_what_breaks_the_graph_of_a_wrapped_model_is_the_wrapper(recipe: str, small: bool, two: Ranks) -> None:
    """As many breaks as of a model of torch's own layers; with small buckets torch cuts the graph besides."""
    for found in two.run(with_small_buckets if small else wrapped_first, recipe, small):
        assert found[:3] == (True, True, True), found
        assert found[3] > 0  # torch's have become none: say so in the guide on torch.compile
