"""DTensors where layers read plain tensors: refused by what they are, wherever they come in. What is allowed works."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import te_torch as te
from te_core.errors import UnsupportedError
from te_torch.tensors import Float8CurrentScalingQuantizer
from tests.parallel.ranks import Rank, Ranks
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


def said_of(act: Callable[[], Any]) -> str:
    try:
        return f"no error: {act()}"
    except UnsupportedError as error:
        return str(error)


def refusals(rank: Rank, placement: Any) -> dict[str, str]:
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
    return {name: said_of(act) for name, act in ways.items()}


def test_dtensors_are_refused_by_name(two: Ranks) -> None:
    for placement in (Replicate(), Shard(0)):
        for found in two.run(refusals, placement):
            for way, said in found.items():
                name = "Shard" if way == "a sharded model's part" else type(placement).__name__
                text = rf"got a DTensor of shape \(\d+, .*\) with placements \({name}\(.*\),\)\."
                assert re.search(text, said), (way, said)
                assert "fully_shard" in said and "to_local()" in said and "full_tensor()" in said, (way, said)
                assert "tp_group" in said and "transform" not in said, (way, said)


def allowed(rank: Rank) -> list[torch.Tensor]:
    """What the text says to do instead: the same result each time."""
    mesh = init_device_mesh(rank.device, (rank.world,))
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device=rank.device)
    plain = linear(rank.device)
    sharded: Any = fully_shard(torch.nn.Sequential(linear(rank.device)), mesh=mesh)
    found = [plain(x), plain(distribute_tensor(x, mesh, [Replicate()]).to_local())]
    found += [plain(distribute_tensor(x, mesh, [Shard(0)]).full_tensor()), sharded(x)]
    sharded.unshard()
    return [y.detach().cpu() for y in (*found, sharded[0](x))]


def test_what_is_allowed_instead(two: Ranks) -> None:
    for first, *others in two.run(allowed):
        assert len(others) == 4 and all(torch.equal(first, y) for y in others)
