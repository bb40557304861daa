"""A compiled wrapper around layers of ours: what breaks its graph is the wrapper. (Layers that are compiled before:
test_ways.py.)"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist

import te_torch as te
from tests.backends import more_without_gpu
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks, replicated, same
from tests.world import WIDTH, fp8_state, randomise, region, values

LAYERS = 3
pytestmark = more_without_gpu
FULL = pytest.mark.full


class Stack(torch.nn.Module):
    """A model with a forward of its own: what a compiler begins with behind the wrapper."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[make() for _ in range(LAYERS)])
        randomise(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) * 2


def train(rank: Rank, model: Any, recipe: str) -> list[torch.Tensor]:
    """The losses of steps of an optimizer, with two microbatches each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for i in range(8):
        x = values(32, WIDTH, device=rank.device, seed=100 * rank.number + i) * (1 + i // 2)
        x.requires_grad_()  # as the inputs of the layers behind the first one do: another program otherwise
        with region(recipe):
            y = model(x)
        losses.append(y.square().mean())
        losses[-1].backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("small", [pytest.param(False, marks=FULL), True])
@pytest.mark.parametrize("recipe", [pytest.param("plain", marks=FULL), "delayed", pytest.param("current", marks=FULL)])
@by_ranks("two")
def test_what_breaks_the_graph_of_a_wrapped_model_is_the_wrapper(rank: Rank, recipe: str, small: bool) -> None:
    """As many breaks as of a model of torch's own layers; with small buckets torch cuts the graph besides."""
    plain, model = (Stack(lambda: te.LayerNormMLP(WIDTH, 80, device=rank.device)) for _ in range(2))
    torchs, breaks = Stack(lambda: torch.nn.Linear(WIDTH, WIDTH, device=rank.device)), []
    with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000) if small else nullcontext():
        wrap = lambda each: replicated(each, rank, bucket_cap_mb=0.001 if small else 25)  # noqa: E731
        theirs = train(rank, wrap(plain), recipe)
        for each in (torchs, model):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            mine = train(rank, torch.compile(wrap(each), backend="aot_eager"), recipe)
            breaks.append(sum(torch._dynamo.utils.counters["graph_break"].values()))
    assert same(mine, theirs) and same(fp8_state(model), fp8_state(plain))
    assert breaks[0] == breaks[1] > 0  # torch's have become none: say so in the guide on torch.compile
