"""What spread layers exchange: collectives and bytes of a step, symmetric memory, and the documented collectives."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_torch.parallel import communicator
from tests.backends import requires_gpus
from tests.covering import covering
from tests.parallel.ranks import Rank, Ranks
from tests.parallel.tensor_steps import BATCH, H, counted, inputs, make, options, shapes
from tests.recipes import region
from tests.tolerances import snr_db

ROWS = 64


# --------------------------------------------------------------------------------------------- what is exchanged


def exchanged(rank: Rank, recipe: str | None, sequence: bool) -> dict[str, tuple[int, int]]:
    """How often, and how many bytes, this rank hands to each collective in a step of a layer that has run before."""
    module = make("layer", rank.device, **options(rank, sequence))
    for _ in range(2):
        with counted() as calls:
            x = inputs(ROWS // (rank.world if sequence else 1), H, 0).to(rank.device).requires_grad_()
            with region(recipe):
                y = module(x)
            y.float().square().sum().backward()
    names = sorted({name for name, _ in calls})
    return {n: (sum(name == n for name, _ in calls), sum(b for name, b in calls if name == n)) for n in names}


@pytest.mark.parametrize("recipe", [None, "delayed", "current", "mxfp8"])
def test_collectives_of_a_layer(two: Ranks, recipe: str | None) -> None:
    """As docs/parallel.md has them: two column-parallel and two row-parallel products."""
    tokens, part = ROWS * BATCH, ROWS * BATCH // 2
    sums = (4, 4 * 2 * tokens * H)
    for found in two.run(exchanged, recipe, False):
        maxima = found.pop("all_reduce")
        reduced = maxima[0] - sums[0]  # delayed scaling reduces its maxima, once forward and once backward
        assert reduced == (2 if recipe == "delayed" else 0) and not found
        assert recipe == "delayed" or maxima == sums
    for found in two.run(exchanged, recipe, True):
        assert found["reduce_scatter"] == sums
        if recipe is None:
            assert found["all_gather"] == (6, 6 * 2 * part * H)  # x twice in two layers, dy once in two
        elif recipe == "mxfp8":  # data and scales, for fprop and wgrad or dgrad and wgrad; scales are padded
            rowwise, columnwise = part * 4, part // 32 * 128
            assert found["all_gather"] == (16, 8 * part * H + 4 * (rowwise + columnwise))
        else:
            assert found["all_gather"] == (6, 6 * part * H)
        agreed = found.get("all_reduce", (0, 0))
        assert agreed == ((4, 16) if recipe == "current" else (2, agreed[1]) if recipe == "delayed" else (0, 0))


def symmetric(rank: Rank, how: str | None) -> Any:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.manual_seed(rank.number)
    module = te.Linear(
        256, 512, parallel_mode="row", symmetric_ar_type=how, device=rank.device, params_dtype=torch.bfloat16,
        **options(rank, False),
    )  # fmt: skip
    found = []
    for rows in (1, 7, 64, 64):
        x = torch.randn(rows, 256 // rank.world, device=rank.device, dtype=torch.bfloat16).requires_grad_()
        y = module(x)
        y.sum().backward()
        found += [y.detach().cpu(), x.grad.cpu()]  # type: ignore[union-attr]
    return found


@requires_gpus(2)
@pytest.mark.parametrize("how", ["one_shot", "two_shot"])
def test_symmetric_memory(ranks_of: Any, how: str) -> None:
    """The same sums, another way."""
    gpus: Ranks = ranks_of(2, "cuda")
    for made, one in zip(gpus.run(symmetric, how), gpus.run(symmetric, None), strict=True):
        assert all(snr_db(a, b) > 40 for a, b in zip(made, one, strict=True))


def ways(rank: Rank, kind: str, how: str | None, sequence: bool) -> Any:
    """The ways that a layer's sums are asked for in three steps, of which the last are replayed, and its outputs.

    (Gloo's sum stands in for that in symmetric memory.)
    """
    asked: list[str] = []

    def summed(t: torch.Tensor, group: Any, way: str) -> None:
        asked.append(way)
        dist.all_reduce(t, group=group)

    module = make(kind, rank.device, symmetric_ar_type=how, **options(rank, sequence))
    width = H // rank.world if kind == "row" else shapes(kind)[0]
    outputs = []
    with mock.patch.object(communicator, "symmetric_sum", summed):
        for number in range(3):
            x = inputs(ROWS, width, number).to(rank.device).requires_grad_()
            y = module(x)
            y.float().sum().backward()
            outputs.append(y.detach().cpu())
    return asked, outputs


@covering(
    case=["column", "row", "norm column", "mlp", "mlp again", "row sequence", "mlp sequence"],
    how=["one_shot", "two_shot"],
)
def test_the_way_of_a_sum(pair: Ranks, case: str, how: str) -> None:
    """It is asked for once a step, for a row-parallel output that is summed whole, and for nothing else."""
    kind, sequence = case.removesuffix(" sequence"), case.endswith(" sequence")
    takes = not sequence and kind in ("row", "mlp", "mlp again")
    found, others = pair.run(ways, kind, how, sequence), pair.run(ways, kind, None, sequence)
    for (asked, made), (unasked, one) in zip(found, others, strict=True):
        assert asked == [how] * 3 * takes and unasked == []
        assert all(torch.equal(a, b) for a, b in zip(made, one, strict=True))


# ------------------------------------------------------------------------------------- documented collectives
