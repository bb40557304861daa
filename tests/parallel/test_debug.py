"""Statistics of ranks that see different batches: those of all of them together, written by each."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from tests.parallel.ranks import Rank, Ranks

pytest.importorskip("nvdlfw_inspect", reason="the extra `debug` brings nvdlfw_inspect")

WIDTH = 32


def batch(number: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number)) * (number + 1)


def logged(rank: Rank, alone: bool) -> dict[str, float]:
    """What each rank writes; the last rank does not run the second layer."""
    from nvdlfw_inspect import api

    from tests.debug.conftest import FEATURES, config

    seen: dict[str, float] = {}

    class Writer:
        def add_scalar(self, name: str, value: float, iteration: int) -> None:
            seen[name] = value

    keys: dict[str, Any] = {"stats": ["l1_norm", "max"], "tensors": ["activation", "weight"]}
    folder = tempfile.mkdtemp()
    api.initialize(config(LogTensorStats=keys), str(FEATURES), log_dir=folder, tb_writer=Writer())
    groups = [dist.new_group([i]) for i in range(rank.world)]
    if alone:
        api.set_tensor_reduction_group(groups[rank.number])
    try:
        layers = [te.Linear(WIDTH, WIDTH, device=rank.device, name=f"layer_{i}") for i in range(2)]
        x = batch(rank.number).to(rank.device)
        for layer in layers if rank.number < rank.world - 1 else layers[:1]:
            layer(x)
        api.step()
    finally:
        api.end_debug()
    return seen


@pytest.mark.four_ranks()
def test_all_ranks_together(ranks: Ranks) -> None:
    found = ranks.run(logged, False)
    batches = [batch(i) for i in range(ranks.world)]
    for seen in found:
        assert seen["layer_0_activation_l1_norm"] == pytest.approx(sum(b.abs().sum().item() for b in batches), rel=1e-5)
        assert seen["layer_0_activation_max"] == max(b.max().item() for b in batches)
    others = sum(b.abs().sum().item() for b in batches[:-1])
    assert found[0]["layer_1_activation_l1_norm"] == pytest.approx(others, rel=1e-5)
    assert "layer_1_activation_l1_norm" not in found[-1]


def test_a_group_given_by_hand(ranks: Ranks) -> None:
    for number, seen in enumerate(ranks.run(logged, True)):
        assert seen["layer_0_activation_l1_norm"] == pytest.approx(batch(number).abs().sum().item(), rel=1e-5)
