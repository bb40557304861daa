"""What a step over ranks costs the host, counted: Python calls, messages between ranks, text that nobody reads."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_core.tape.taped import Taped
from tests.host_steps import calls, worded
from tests.parallel.fsdp_steps import batch, build, mesh_of, optimizer_of, shard, step
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks, counted
from tests.recipes import region
from tests.recordings import tapes

WEIGHTS = 2
#: Calls of a step with quantized weights beyond those of one that casts bf16 weights: for each weight, in both passes
#: and both of their all-gathers; and in a fused optimizer. Measured on the CPU, and a tenth more. An optimizer's casts
#: are interpreted, and an interpreted operation looks at all of its arguments in each call (2026-11-27: 5 calls more
#: for a weight than where a plan remembered them, 17 in mxfp8; a microsecond or two).
MORE_IN_PASSES = {"delayed": 45, "current": 49, "block": 58, "mxfp8": 84}
MORE_IN_OPTIMIZER = {"delayed": 66, "current": 90, "block": 64, "mxfp8": 88}


def counts_of(rank: Rank, name: str) -> dict[str, Any]:
    """Calls of a step's passes and of its optimizer, bf16 weights and quantized ones; and what the latter send."""
    found: dict[str, Any] = {}
    for quantized in (False, True):
        model = shard(build(name, quantized, rank.device), mesh_of(rank.device, rank.world))
        optimizer = optimizer_of(model, "AdamW", fused=True)
        x = batch(rank.number, 0, rank.device)

        def passes() -> None:
            with region(name):
                y = model(x)  # noqa: B023
            y.float().square().mean().backward()

        for _ in range(4):
            step(model, optimizer, name, x)
        counts = []
        for _ in range(2):  # as many on each rank
            counts.append((calls(passes), calls(optimizer.step)))
            optimizer.zero_grad()
        found["passes", quantized], found["optimizer", quantized] = map(min, zip(*counts, strict=True))
        found["sent"] = sent_in(lambda: step(model, optimizer, name, x))  # noqa: B023
        said = [worded(lambda: step(model, optimizer, name, x)) for _ in range(2)]  # noqa: B023
        found["worded", quantized] = min(said, key=len)
    return found


def sent_in(call: Any) -> Counter[str]:
    """How often each collective is called."""
    with counted() as calls:
        call()
    return Counter(name.split("_")[1] for name, _ in calls)  # reduce, gather, scatter


def kinds(*some: str | None) -> pytest.MarkDecorator:
    """The first of these, the others by `--full`."""
    return pytest.mark.parametrize(
        "name", [some[0], *(pytest.param(name, marks=pytest.mark.full) for name in some[1:])]
    )


@kinds("current", "delayed", "block", "mxfp8")
@by_ranks("two")
def test_a_step_of_shards(rank: Rank, name: str) -> None:
    """The weights' two all-gathers a layer, one reduce-scatter, and one message in which all shards agree."""
    with tapes("first"):
        found = counts_of(rank, name)
    more = {part: found[part, True] - found[part, False] for part in ("passes", "optimizer")}
    print(rank.device, name, more)
    if rank.device == "cpu":  # a GPU's backend makes calls of its own: its launches
        assert more["passes"] <= MORE_IN_PASSES[name] * WEIGHTS, found
        assert more["optimizer"] <= MORE_IN_OPTIMIZER[name] * WEIGHTS, found
    reductions = {"delayed": 2, "current": 1}.get(name, 0)  # at the end of both passes; in the optimizer
    wanted = {"gather": 2 * WEIGHTS, "scatter": WEIGHTS, "reduce": reductions}
    assert found["sent"] == Counter({name: count for name, count in wanted.items() if count})
    assert not found["worded", False] and not found["worded", True]


@kinds("current", None, "delayed", "block", "mxfp8")
@by_ranks("two")
def test_a_step_in_tensor_parallelism(rank: Rank, name: str | None) -> None:
    """Nothing is worded, and no call of the core's functions makes views of torch's tensors."""
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": rank.device, "fuse_qkv_params": True}
    layer = te.TransformerLayer(
        256,
        256,
        4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        set_parallel_mode=True,
        sequence_parallel=True,
        tp_group=dist.group.WORLD,
        **options,
    )
    x = torch.randn(128, 1, 256, dtype=torch.bfloat16, device=rank.device, requires_grad=True)

    def run() -> None:
        with region(name):
            y = layer(x)
        y.float().sum().backward()

    with tapes("first"):
        for _ in range(4):
            run()
        assert not min([worded(run) for _ in range(2)], key=len)
        with mock.patch.object(Taped, "ran", autospec=True, side_effect=Taped.ran) as long:
            run()
        assert long.call_count == 0
