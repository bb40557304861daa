"""DTensors where layers read plain tensors: refused by what they are, wherever they come in. What is allowed works."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import te_torch as te
from te_core.errors import UnsupportedError
from te_torch.tensors import Float8CurrentScalingQuantizer
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks, error_of, says
from tests.recipes import region

WIDTH, ROWS = 64, 32


def linear(device: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device, **options)


def distributed(module: Any, spread: Callable[[Any], Any]) -> Any:
    """The module with DTensors as its parameters, as a user makes them by hand."""
    for name, p in list(module.named_parameters(recurse=False)):
        setattr(module, name, torch.nn.Parameter(spread(p.data)))
    return module


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
@by_ranks("two")
def test_dtensors_are_refused_by_name(rank: Rank, placement: Any) -> None:
    mesh = init_device_mesh(rank.device, (rank.world,))
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device=rank.device)

    def spread(t: torch.Tensor) -> Any:
        return distribute_tensor(t, mesh, [placement])

    def in_fp8(module: Any) -> Any:
        with region("current"):
            return module(x)

    def into_main_grad() -> None:
        module = linear(rank.device, fuse_wgrad_accumulation=True)
        module.weight.main_grad = spread(torch.zeros(WIDTH, WIDTH, device=rank.device))
        module(x).sum().backward()

    def without_its_unit() -> None:
        model = fully_shard(torch.nn.Sequential(linear(rank.device)), mesh=mesh)
        model[0](x)

    def gradient() -> None:
        y = linear(rank.device)(x)
        y.backward(spread(torch.ones_like(y)))

    heads = spread(torch.randn(16, 2, 4, 16, dtype=torch.bfloat16, device=rank.device))
    index = torch.zeros(ROWS, 1, dtype=torch.int32, device=rank.device)
    quantizer = Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=rank.device)
    ways: dict[str, Callable[[], Any]] = {
        "parameters": lambda: distributed(linear(rank.device), spread)(x),
        "parameters, fp8": lambda: in_fp8(distributed(linear(rank.device), spread)),
        "x": lambda: linear(rank.device)(spread(x)),
        "x, transposed": lambda: linear(rank.device)(spread(x.t().contiguous()).t()),
        "x, empty": lambda: linear(rank.device)(spread(x[:0])),
        "a gradient": gradient,
        "main_grad": into_main_grad,
        "attention": lambda: te.DotProductAttention(4, 16)(heads, heads, heads),
        "rows of experts": lambda: te.moe_permute(spread(x), index),
        "a quantizer": lambda: quantizer(spread(x)),
        "a sharded model's part": without_its_unit,
    }
    for way, act in ways.items():
        said = error_of(act, UnsupportedError)
        name = "Shard" if way == "a sharded model's part" else type(placement).__name__
        text = rf"got a DTensor of shape \(\d+, .*\) with placements \({name}\(.*\),\)\."
        assert re.search(text, said) and "transform" not in said, (way, said)
        says(said, "fully_shard", "to_local()", "full_tensor()", "tp_group")


@by_ranks("two")
def test_what_is_allowed_instead(rank: Rank) -> None:
    """What the text says to do: the same result each time."""
    mesh = init_device_mesh(rank.device, (rank.world,))
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device=rank.device)
    plain = linear(rank.device)
    sharded: Any = fully_shard(torch.nn.Sequential(linear(rank.device)), mesh=mesh)
    found = [plain(x), plain(distribute_tensor(x, mesh, [Replicate()]).to_local())]
    found += [plain(distribute_tensor(x, mesh, [Shard(0)]).full_tensor()), sharded(x)]
    sharded.unshard()
    assert all(torch.equal(found[0], y) for y in (*found[1:], sharded[0](x)))
