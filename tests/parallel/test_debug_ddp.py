"""Statistics of a model in DistributedDataParallel: those of all ranks' batches, and training as without them."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import te_torch as te
from tests.parallel.ranks import Rank, Ranks
from tests.recipes import region

pytest.importorskip("nvdlfw_inspect", reason="the extra `debug` brings nvdlfw_inspect")

WIDTH, STEPS = 32, 2
TENSORS = ["activation", "weight", "gradient"]


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randn(16, WIDTH, generator=generator) * (rank + 1)).bfloat16()


def trained(rank: Rank, features: bool) -> tuple[dict[tuple[str, int], float], list[torch.Tensor]]:
    """What a rank logs in some steps, and the parameters they end with."""
    from nvdlfw_inspect import api

    from tests.debug.conftest import FEATURES, config

    seen: dict[tuple[str, int], float] = {}

    class Writer:
        def add_scalar(self, name: str, value: float, iteration: int) -> None:
            seen[name, iteration] = value

    if features:
        values: dict[str, Any] = {"stats": ["l1_norm", "max"], "tensors": TENSORS}
        casts: dict[str, Any] = {"stats": ["scale_inv_max"], "tensors": TENSORS}
        chosen = config(LogTensorStats=values, LogFp8TensorStats=casts)
        api.initialize(chosen, str(FEATURES), log_dir=tempfile.mkdtemp(), tb_writer=Writer())
    torch.manual_seed(0)
    layer = te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device=rank.device, name="layer")
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            with region("current"):
                out = model(batch(rank.number, step).to(rank.device))
            out.float().square().mean().backward()
            optimizer.step()
            api.step()
    finally:
        api.end_debug()
    return seen, [p.detach().cpu() for p in layer.parameters()]


def scheduled(rank: Rank) -> dict[str, list[tuple[int, float]]]:
    """What a rank logs of one tensor by two features with schedules of their own."""
    from nvdlfw_inspect import api

    from tests.debug.conftest import FEATURES, config

    seen: dict[str, list[tuple[int, float]]] = {}

    class Writer:
        def add_scalar(self, name: str, value: float, iteration: int) -> None:
            seen.setdefault(name, []).append((iteration, value))

    chosen = config(
        LogTensorStats={"stats": ["max"], "tensors": ["activation"], "freq": 3},
        LogFp8TensorStats={"stats": ["scale_inv_max"], "tensors": ["activation"], "freq": 4, "start_step": 1},
    )
    api.initialize(chosen, str(FEATURES), log_dir=tempfile.mkdtemp(), tb_writer=Writer())
    layer = te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device=rank.device, name="layer")
    try:
        for step in range(9):
            with region("current"), torch.no_grad():
                layer(batch(rank.number, step).to(rank.device))
            api.step()
    finally:
        api.end_debug()
    return seen


def test_schedules_over_ranks(pair: Ranks) -> None:
    """Each feature logs in its own iterations, and what is logged is that of all ranks."""
    first, second = pair.run(scheduled)
    assert first == second
    top = {step: max(batch(i, step).float().max().item() for i in range(2)) for step in range(9)}
    assert first["layer_activation_max"] == [(step, top[step]) for step in (0, 3, 6)]
    assert [step for step, _ in first["layer_activation_scale_inv_max"]] == [4, 8]


def test_statistics_in_ddp(two: Ranks) -> None:
    found, plain = two.run(trained, True), two.run(trained, False)
    for (seen, parameters), (_, alone) in zip(found, plain, strict=True):
        assert seen == found[0][0]
        assert all(torch.equal(a, b) for a, b in zip(parameters, alone, strict=True))
        assert len(seen) == STEPS * len(TENSORS) * 3
        for step in range(STEPS):
            batches = [batch(i, step).float() for i in range(two.world)]
            total, top = sum(b.abs().sum().item() for b in batches), max(b.abs().max().item() for b in batches)
            assert seen["layer_activation_l1_norm", step] == pytest.approx(total, rel=1e-5)
            assert seen["layer_activation_max", step] == max(b.max().item() for b in batches)
            assert seen["layer_activation_scale_inv_max", step] == pytest.approx(top / 448, rel=0.01)
