"""make_graphed_callables in several processes: gloo on the CPU, whose graphs run their Python again, NCCL on two GPUs.

A capture reduces nothing; replays are reduced, in the region of the call, as eager steps are.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import te_torch as te
from te_core.recipe import DelayedScaling
from te_torch.training.graphs import device as seam
from tests.fake_graphs import FakeDevice
from tests.module_steps import differences
from tests.parallel.amax_steps import (
    RULE,
    RULES,
    STEPS,
    batch,
    counted,
    fp8_state,
    gradient,
    half,
    halves,
    make,
    together,
    train,
)
from tests.parallel.ranks import Rank, Ranks


def graphed(module: Any, rank: Rank, group: Any = None, **options: Any) -> Any:
    """The module with graphs, whose capture has reduced nothing."""
    rule = options.pop("rule", {})
    device = seam.device
    if rank.device == "cpu":
        seam.device = FakeDevice(module)
    try:
        with counted() as calls:
            made = te.make_graphed_callables(
                module, (batch(rank.number, 0, rank.device),), enabled=True,
                recipe=DelayedScaling(**{**RULE, **rule}), amax_reduction_group=group, **options,
            )  # fmt: skip
    finally:
        if rank.device != "cpu":
            seam.device = device
    assert calls == []
    return made


def all_ranks(rank: Rank, rule: str) -> Any:
    return train(graphed(make(rank, "Linear"), rank, rule=RULES[rule]), rank, **RULES[rule])


@pytest.mark.parametrize("rule", ["max", "most_recent", "own rank"])
def test_all_ranks(rule: str, ranks: Ranks) -> None:
    own, found = rule == "own rank", ranks.run(all_ranks, rule)
    for number, of_rank in enumerate(found):
        wanted = together((number,) if own else tuple(range(ranks.world)), rule)
        for got, state in zip(of_rank, wanted, strict=True):
            assert not differences(got["state"], state)
            assert got["reductions"] == (0 if own else 2)


def a_group(rank: Rank, at_capture: bool) -> Any:
    group = halves(rank)
    call = graphed(make(rank, "Linear"), rank, group if at_capture else None)
    return train(call, rank, group=group)


@pytest.mark.four_ranks(at_capture=True)
@pytest.mark.parametrize("at_capture", [True, False])
def test_a_group(at_capture: bool, ranks: Ranks) -> None:
    """The group is that of the region of the call, whatever the capture was given."""
    for number, of_rank in enumerate(ranks.run(a_group, at_capture)):
        for got, state in zip(of_rank, together(half(number, ranks.world)), strict=True):
            assert not differences(got["state"], state)
            assert got["reductions"] == (0 if ranks.world == 2 else 2)


def graphed_on_one(rank: Rank) -> Any:
    """The first rank replays, the others run eagerly."""
    module = make(rank, "LayerNormMLP")
    return train(graphed(module, rank) if rank.number == 0 else module, rank)


def test_ranks_that_replay_beside_ranks_that_do_not(ranks: Ranks) -> None:
    found = ranks.run(graphed_on_one)
    assert {got["reductions"] for of_rank in found for got in of_rank} == {2}
    for of_rank in found[1:]:
        for mine, first in zip(of_rank, found[0], strict=True):
            assert not differences(mine["state"], first["state"])


def steps(model: Any, rank: Rank) -> list[dict[str, torch.Tensor]]:
    found = []
    for number in range(STEPS):
        model.zero_grad()
        with te.autocast(recipe=DelayedScaling(**RULE)):
            y = model(batch(rank.number, number, rank.device))
        y.backward(gradient(y, rank.number, number))
        grads = {name.removeprefix("module."): p.grad.cpu().clone() for name, p in model.named_parameters()}
        found.append({"y": y.detach().cpu().clone(), **grads, **fp8_state(getattr(model, "module", model))})
    return found


def data_parallel(rank: Rank) -> Any:
    module = make(rank, "LayerNormMLP")
    twin = copy.deepcopy(module)
    devices = None if rank.device == "cpu" else [torch.device(rank.device)]
    call = graphed(module, rank)
    return [steps(DistributedDataParallel(m, device_ids=devices), rank) for m in (call, twin)]


def test_gradients_of_replays_are_reduced_by_ddp(ranks: Ranks) -> None:
    """As those of an eager twin, bit for bit, FP8 states too."""
    found = ranks.run(data_parallel)
    for replayed, eager in found:
        for got, wanted in zip(replayed, eager, strict=True):
            assert not differences(got, wanted)
    assert torch.equal(found[0][0][-1]["fc1_weight"], found[1][0][-1]["fc1_weight"])
