"""Every exchange between ranks that is a call of ours, and what it says where a rank is missing.

`prepare(rank, group)` does what comes before, with all ranks, and gives the call that is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

import te_torch as te
from te_core.errors import LibraryError
from te_core.recipe import DelayedScaling
from te_torch import exchange, offloading
from te_torch.debug import bisection, stats
from te_torch.tensors import scales, utils
from te_torch.training import collectives, fsdp
from tests.parallel.fsdp_steps import batch, build, optimizer_of, shard, step
from tests.parallel.ranks import Rank

Call = Callable[[], Any]
E4M3 = te.DType.kFloat8E4M3


def _rows(rank: Rank, width: int = 128) -> torch.Tensor:
    return torch.ones(128, width, device=rank.device, dtype=torch.bfloat16)


def gathers(make: Callable[[str], Any] | None, later: bool) -> Callable[[Rank, Any], Call]:
    def prepare(rank: Rank, group: Any) -> Call:
        x, quantizer = _rows(rank), make and make(rank.device)

        def call() -> None:
            _, handle = collectives.gather_along_first_dim(x, group, later, quantizer)
            if handle is not None:
                handle.wait()

        return call

    return prepare


def sums(name: str, later: bool) -> Callable[[Rank, Any], Call]:
    def prepare(rank: Rank, group: Any) -> Call:
        x = _rows(rank)

        def call() -> None:
            _, handle = getattr(collectives, name)(x, group, later)
            if handle is not None:
                handle.wait()

        return call

    return prepare


def pieces(rank: Rank, group: Any) -> Call:
    return lambda: collectives.gather_split_1d_tensor(torch.ones(8, device=rank.device), group)


def recomputed(rank: Rank, group: Any) -> Call:
    """The backward of a checkpoint whose input is spread over the ranks."""
    layer = te.Linear(128, 128, device=rank.device, params_dtype=torch.bfloat16)
    y = te.checkpoint(layer, _rows(rank).requires_grad_(), distribute_saved_activations=True, tp_group=group)
    return lambda: y.sum().backward()


def fsdp1(rank: Rank, group: Any) -> Call:
    """What autograd does with a weight's copy that it kept a piece of."""
    copy = torch.ones(64, dtype=torch.uint8, device=rank.device)
    setattr(copy, offloading.OF_WEIGHT, True)
    kept = fsdp._Spread(group)(copy)
    return lambda: fsdp._whole(kept)


def optimizer(fused: bool) -> Callable[[Rank, Any], Call]:
    """The step of quantized shards, together or each by itself."""

    def prepare(rank: Rank, group: Any) -> Call:
        model = shard(build("current", True, rank.device), DeviceMesh.from_group(group, rank.device))
        made = optimizer_of(model, "AdamW", **({"fused": True} if fused else {"foreach": False}))
        step(model, made, "current", batch(rank.number, 0, rank.device))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        return made.step

    return prepare


def masters(make: Callable[[str], Any]) -> Callable[[Rank, Any], Call]:
    def prepare(rank: Rank, group: Any) -> Call:
        weight, master = make(rank.device)(_rows(rank)), _rows(rank).float()
        return lambda: utils.quantize_master_weights([weight], [master.view(-1)], [0], group)

    return prepare


def start(rank: Rank, group: Any) -> Call:
    one = torch.ones((), device=rank.device)
    return lambda: scales.own_scale(torch.ones(4, device=rank.device), 448.0, 0, one, group)


def amax(backward: bool) -> Callable[[Rank, Any], Call]:
    """The maxima of delayed scaling, at the end of a region and of a backward pass."""

    def prepare(rank: Rank, group: Any) -> Call:
        layer = te.Linear(128, 128, device=rank.device, params_dtype=torch.bfloat16)

        def forward() -> torch.Tensor:
            with te.autocast(recipe=DelayedScaling(), amax_reduction_group=group):
                y: torch.Tensor = layer(_rows(rank))
            return y

        y = forward() if backward else None
        return forward if y is None else lambda: y.sum().backward()

    return prepare


def inspected(rank: Rank, group: Any) -> Call:
    layer = te.Linear(128, 128, device=rank.device, params_dtype=torch.bfloat16)

    def call() -> None:
        with te.debug.inspect(layer, group=group) as seen:
            layer(_rows(rank))
            seen.step()

    return call


def bisected(rank: Rank, group: Any) -> Call:
    steps: Any = SimpleNamespace(_groups=[group], _device=rank.device)
    return lambda: bisection._Steps.worst(steps, 1.0)


def statistics(rank: Rank, group: Any) -> Call:
    return lambda: stats._reduce(group, {}, {}, lambda tensor, team: True)


def others(rank: Rank, group: Any) -> Call:
    """What ranks do together by something that is none of these: to map memory, for one."""

    def call() -> None:
        with exchange.telling("another exchange", group):
            dist.barrier(group)

    return call


def mxfp8(device: str) -> Any:
    return te.MXFP8Quantizer(E4M3)


def block(device: str) -> Any:
    return te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=2)


def current(device: str) -> Any:
    return te.Float8CurrentScalingQuantizer(E4M3, device)


class Case(NamedTuple):
    """An exchange, and the operation that its error names."""

    operation: str
    prepare: Callable[[Rank, Any], Call]


CASES = {
    "gather": Case("gather_along_first_dim", gathers(None, False)),
    "gather, later": Case("gather_along_first_dim", gathers(None, True)),
    "quantized gather": Case("gather_along_first_dim", gathers(mxfp8, False)),
    "quantized gather, later": Case("gather_along_first_dim", gathers(mxfp8, True)),
    "agreed scale": Case("Float8CurrentScalingQuantizer", gathers(current, False)),
    "scatter": Case("reduce_scatter_along_first_dim", sums("reduce_scatter_along_first_dim", False)),
    "scatter, later": Case("reduce_scatter_along_first_dim", sums("reduce_scatter_along_first_dim", True)),
    "sum": Case("allreduce", sums("allreduce", False)),
    "sum, later": Case("allreduce", sums("allreduce", True)),
    "pieces": Case("gather_split_1d_tensor", pieces),
    "checkpoint": Case("gather_split_1d_tensor", recomputed),
    "FSDP1": Case("a weight's copy under FSDP1", fsdp1),
    "fused optimizer": Case("maxima of shards", optimizer(True)),
    "optimizer": Case("maxima of shards", optimizer(False)),
    "master weights": Case("quantize_master_weights", masters(current)),
    "master weights in blocks": Case("quantize_master_weights", masters(block)),
    "first scale": Case("scale of shards", start),
    "forward maxima": Case("forward amax reduction", amax(False)),
    "backward maxima": Case("backward amax reduction", amax(True)),
    "inspect": Case("inspect", inspected),
    "bisect": Case("bisect", bisected),
    "statistics": Case("debug statistics", statistics),
    "others": Case("another exchange", others),
}


def prepared(rank: Rank, names: Iterable[str], seconds: float) -> dict[str, Call]:
    """The calls, each with a group of its own: what one leaves in a group does not meet the next one."""
    found = {}
    for name in names:
        group = dist.new_group()
        found[name] = CASES[name].prepare(rank, group)
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)  # connecting takes seconds
    dist.barrier()
    return found


def said_by(call: Call) -> str:
    """What it raised."""
    try:
        call()
    except Exception as error:
        assert not isinstance(error, LibraryError) or isinstance(error, RuntimeError)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def unclear(said: dict[str, str], world: int) -> dict[str, str]:
    """Those of what was said that do not tell the operation, the ranks, and where to look."""
    found = {}
    for name, text in said.items():
        begins = f"LibraryError: {CASES[name].operation}: got a failure over ranks {list(range(world))}: "
        if not text.startswith(begins) or "first error among the other ranks' outputs" not in text:
            found[name] = text
    return found
