"""`te.ops` over ranks: exchanges of rows, linears whose weights are spread, scales of delayed scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_core.recipe import DelayedScaling
from te_torch import ops
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks
from tests.tolerances import snr_db
from tests.world import gradient_for, randomise, region, values

ROWS, WIDTH = 64, 64


@by_ranks("pair")
def test_rows_are_exchanged(rank: Rank) -> None:
    mine, n = slice(8 * rank.number, 8 * rank.number + 8), rank.world
    whole = [values(8 * n, 4, seed=i, device=rank.device) for i in range(n)]
    for op, given, wanted, dy, dx in (
        (ops.AllGather(), whole[0][mine], whole[0], whole[rank.number], sum(whole)[mine]),  # type: ignore[index]
        (ops.ReduceScatter(), whole[rank.number], sum(whole)[mine], whole[0][mine], whole[0]),  # type: ignore[index]
        (ops.AllReduce(), whole[rank.number], sum(whole), whole[0], whole[0]),
    ):
        x = given.clone().requires_grad_()
        y = ops.Sequential(ops.ConstantScale(1.0), op)(x)
        y.backward(dy)
        torch.testing.assert_close(y.detach(), wanted)
        torch.testing.assert_close(x.grad, dx)


def part(t: torch.Tensor, dim: int, rank: Rank) -> torch.Tensor:
    return t.chunk(rank.world, dim)[rank.number]


@pytest.mark.parametrize("recipe", [None, "delayed", "mxfp8", "nvfp4 nearest"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("mode", ["column", "row"])
@by_ranks("pair")
def test_a_linear_is_spread(rank: Rank, mode: str, sequence: bool, recipe: str | None) -> None:
    """The biases of a row-parallel one are summed over the ranks."""
    model = ops.Sequential(
        ops.Linear(
            WIDTH, 2 * WIDTH, tensor_parallel_mode=mode, tensor_parallel_group=dist.group.WORLD,
            sequence_parallel=sequence, device=rank.device,
        )
    )  # fmt: skip
    weight, biases = (
        values(2 * WIDTH, WIDTH, device=rank.device),
        values(rank.world, 2 * WIDTH, seed=1, device=rank.device),
    )
    column = mode == "column"
    with torch.no_grad():
        model[0].weight.copy_(part(weight, 0 if column else 1, rank))
        model[0].bias.copy_(part(biases[0], 0, rank) if column else biases[rank.number])
    x, dy = values(ROWS, WIDTH, seed=2, device=rank.device), values(ROWS, 2 * WIDTH, seed=3, device=rank.device)
    given = (part(x, 0, rank) if sequence else x) if column else part(x, 1, rank)
    grad = part(dy, 1, rank) if column else (part(dy, 0, rank) if sequence else dy)
    for _ in range(2 if recipe == "delayed" else 1):
        leaf = given.clone().requires_grad_()
        model.zero_grad()
        with region(recipe):
            y = model(leaf)
        y.backward(grad)
    bias = biases[0] if column else biases.sum(0)
    y_whole, dx_whole, dw_whole = x @ weight.T + bias, dy @ weight, dy.T @ x
    db = dy.sum(0)
    wanted = {
        "y": part(y_whole, 1, rank) if column else (part(y_whole, 0, rank) if sequence else y_whole),
        "dx": (part(dx_whole, 0, rank) if sequence else dx_whole) if column else part(dx_whole, 1, rank),
        "dw": part(dw_whole, 0 if column else 1, rank),
        "db": part(db, 0, rank) if column else db,
    }
    found = {"y": y, "dx": leaf.grad, "dw": model[0].weight.grad, "db": model[0].bias.grad}
    least = {None: 100.0, "nvfp4 nearest": 10.0}.get(recipe, 20.0)
    for name, t in found.items():
        assert t is not None and snr_db(t.detach().cpu(), wanted[name].cpu()) > least, name


@by_ranks("pair")
def test_ranks_agree_on_scales(rank: Rank) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    op = ops.BasicLinear(32, 32, device=rank.device)
    for i in range(2):
        x = torch.full((16, 32), float(1 + i + rank.number), device=rank.device, requires_grad=True)
        with te.autocast(recipe=recipe, emulate=True):
            y = op(x)
        y.backward(torch.full_like(y, 3.0 + rank.number))
    assert op.get_quantizer("forward", 0).scale.item() == pytest.approx(448.0 / (1 + rank.world))
    assert op.get_quantizer("backward", 0).scale.item() == pytest.approx(57344.0 / (2 + rank.world))


@pytest.mark.parametrize("mode", ["column", "row"])
@by_ranks("pair")
def test_what_travels_is_rounded_once(rank: Rank, mode: str) -> None:
    """Neighbours in a chain quantize nothing that is gathered first: a module between them changes no bit."""
    options = {"tensor_parallel_mode": mode, "tensor_parallel_group": dist.group.WORLD, "sequence_parallel": True}
    linear = ops.BasicLinear(WIDTH, WIDTH, device=rank.device, **options)  # type: ignore[arg-type]
    randomise(linear)
    found = []
    for between in ([], [torch.nn.Identity()]):
        model = ops.Sequential(ops.GELU(), *between, linear, *between, ops.GELU())
        x = values(16, WIDTH // (1 if mode == "column" else rank.world), seed=rank.number, device=rank.device)
        with region("current"):
            y = model(x.requires_grad_())
        y.backward(gradient_for(y, rank.number))
        found.append([y, x.grad, linear.weight.grad])
        linear.weight.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@by_ranks("pair")
def test_an_mlp_is_spread(rank: Rank) -> None:
    """GELU, column, GELU, row, GELU with the rows spread between."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"tensor_parallel_group": dist.group.WORLD, "sequence_parallel": True, "bias": False}
    options["device"] = rank.device
    one = ops.Linear(WIDTH, 2 * WIDTH, tensor_parallel_mode="column", **options)
    two = ops.Linear(2 * WIDTH, WIDTH, tensor_parallel_mode="row", **options)
    model = ops.Sequential(ops.GELU(), one, ops.GELU(), two, ops.GELU())
    whole = ops.Sequential(
        ops.GELU(), ops.Linear(WIDTH, 2 * WIDTH, bias=False, device=rank.device), ops.GELU(),
        ops.Linear(2 * WIDTH, WIDTH, bias=False, device=rank.device), ops.GELU(),
    )  # fmt: skip
    randomise(whole)
    with torch.no_grad():
        one.weight.copy_(part(whole[1].weight, 0, rank)), two.weight.copy_(part(whole[3].weight, 1, rank))
    x = values(ROWS, WIDTH, device=rank.device).requires_grad_()
    mine = part(x.detach(), 0, rank).clone().requires_grad_()
    y = whole(x)
    dy = gradient_for(y)
    y.backward(dy), model(mine).backward(part(dy, 0, rank))
    torch.testing.assert_close(mine.grad, part(x.grad, 0, rank))
    torch.testing.assert_close(one.weight.grad, part(whole[1].weight.grad, 0, rank))
    torch.testing.assert_close(two.weight.grad, part(whole[3].weight.grad, 1, rank))
