"""Overlap of products with their communication, of te_torch's modules: the bits of plain ones, and what is refused."""

from __future__ import annotations

import math
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from te_torch.parallel import overlap
from tests.covering import covering
from tests.parallel.overlap_steps import (
    NONE,
    RINGS,
    SETS,
    TOKENS,
    H,
    compared,
    each_said,
    initialised,
    make,
    reasons,
    steps,
    worst,
)  # fmt: skip
from tests.parallel.peer_steps import carried
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks, error_of, says

#: dB, by whether in a recipe. Two ranks on a CPU give all bits. A GPU's library may compute m rows by another algorithm
#: than M, and over more ranks gloo and NCCL round a sum of bf16 several times, a ring once.
AGREES = {False: 30.0, True: 20.0}
GEMMS = {
    "column": ("qkv",),
    "row": ("proj",),
    "norm column": ("fc1",),
    "mlp": ("fc1", "fc2"),
    "attention": ("qkv", "proj"),
    "layer": ("qkv", "proj", "fc1", "fc2"),
}
BESIDE = {
    "bulk": "what travels has a product beside it that does not need it",
    "external": "what dgrad gathered serves wgrad",
}
CARRIERS = ["calls", "peer memory"]


def methods(kind: str, flags: str, cfg: dict[str, Any] | None) -> dict[str, str]:
    """How each GEMM of a module is to overlap."""
    found = {}
    for name in GEMMS[kind]:
        if name in ("qkv", "fc1"):
            dgrad = {"bulk": "bulk", "rings": "ring_exchange"}[flags]
            ways = {"fprop": "ring_exchange", "dgrad": dgrad}
            if flags == "bulk":
                ways["wgrad"] = "bulk"
        else:
            ways = {"fprop": "ring_exchange" if cfg else "pipeline", "dgrad": "ring_exchange", "wgrad": "external"}
        found |= {f"{name}_{gemm}": method for gemm, method in ways.items()}
    return found


@pytest.mark.four_ranks(recipe="delayed", flags="rings")
@covering(
    turns=2,
    kind=list(GEMMS),
    recipe=[None, "delayed", "current", "block"],
    flags=list(SETS),
    cfg=[None, RINGS],
    carrier=CARRIERS,
)
@by_ranks()
def test_steps_of_changing_token_counts(
    rank: Rank, kind: str, recipe: str | None, flags: str, cfg: dict[str, Any] | None, carrier: str
) -> None:
    with carried(rank, carrier):
        found, said = compared(rank, kind, recipe, SETS[flags], cfg, (64, 32, TOKENS))
    assert found >= (math.inf if rank.device == "cpu" and rank.world == 2 else AGREES[recipe is not None])
    wanted = methods(kind, flags, cfg)
    assert said.keys() == wanted.keys()
    for gemm, method in wanted.items():
        how = f"overlapped by {method}" + (f": {BESIDE[method]}" if method in BESIDE else ",")
        assert said[gemm].startswith(how) and said[gemm].endswith("through peer memory") == (carrier == "peer memory")


@pytest.mark.four_ranks
@pytest.mark.parametrize("carrier", CARRIERS)
@by_ranks("four")
def test_two_groups_of_two(rank: Rank, carrier: str) -> None:
    """Of ranks that are no neighbours."""
    group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank.number % 2]
    with carried(rank, carrier):
        found, said = compared(rank, "mlp", "current", SETS["rings"], each_said(SETS["rings"], RINGS), (32, 64), group)
    assert found >= (math.inf if rank.device == "cpu" else AGREES[False])
    assert said["fc1_fprop"].startswith("overlapped by ring_exchange, in 2 parts")
    assert said["fc1_fprop"].endswith("through peer memory") == (carrier == "peer memory")


@by_ranks("pair")
def test_a_call_beyond_the_capacity_runs_plain(rank: Rank) -> None:
    found, said = compared(rank, "mlp", None, SETS["rings"], RINGS, (TOKENS, 2 * TOKENS))
    assert found == math.inf
    elements = 2 * 2 * TOKENS * H
    reason = f"a tensor of {elements} elements, and initialize_ub made room for {elements // 2}"
    assert said["fc1_fprop"] == f"not overlapped by ring_exchange: {reason}"
    assert said["fc2_fprop"] == said["fc2_dgrad"] == said["fc1_dgrad"] == said["fc1_fprop"]


@pytest.mark.parametrize("how", ["mlp again", "row, wgrad later", "checkpoint", "mlp"])
@by_ranks("pair")
def test_beside_what_computes_again_or_later(rank: Rank, how: str) -> None:
    group = dist.group.WORLD
    results = []
    for flags in ({}, SETS["rings"]):
        with initialised(rank.world, ub_cfgs=RINGS):
            module = make("mlp" if how == "checkpoint" else how, rank, group, **flags)
            if how == "mlp":  # frozen weights of fc1
                module.fc1_weight.requires_grad_(False)
            results.append(steps(module, rank, "delayed", (64, 32, 64), group, how == "checkpoint"))
    assert worst(*results) == math.inf
    said = reasons(module)
    assert all(how.startswith("overlapped") for how in said.values()) and said


@by_ranks("pair")
def test_settings_come_and_go(rank: Rank) -> None:
    """What a module says before initialize_ub, after it, after destroy_ub, and after another one; of plans, too."""
    group = dist.group.WORLD
    module = make("mlp", rank, group, **SETS["bulk"])

    def step() -> dict[str, str]:
        steps(module, rank, None, (32,) * 3, group)  # often enough to run as a plan
        return reasons(module)

    overlap._process.destroyed = False  # as in a process that never had any
    says(error_of(step), "without initialize_ub", "call initialize_ub before the first forward")
    with initialised(rank.world, ub_cfgs=RINGS):
        assert step()["fc2_fprop"] == "overlapped by ring_exchange, in 2 parts"
    assert set(step().values()) == {"not overlapped: destroy_ub was called"}
    with initialised(rank.world, ub_cfgs={"fc2_fprop": {"num_splits": 2}}, quantization_modes=[NONE]):
        assert step()["fc2_fprop"] == "overlapped by pipeline, in 2 parts"
        steps(module, rank, "current", (32,), group)
        reason = "not overlapped: initialize_ub was not told of the mode FP8, in which this call runs"
        assert reasons(module)["fc2_fprop"] == reason
    with initialised(rank.world, dtype=torch.float16):
        assert step()["fc2_fprop"].startswith("not overlapped: initialize_ub was told of torch.float16")


@by_ranks("pair")
def test_what_a_module_refuses(rank: Rank) -> None:
    """In its first forward; and what flags say that do nothing."""
    group = dist.group.WORLD

    def said(**flags: bool) -> str:
        module = make("column", rank, group, **flags)
        return error_of(lambda: steps(module, rank, None, (32,), group))

    with initialised(1):  # groups of one rank
        says(said(ub_overlap_ag=True), "a group of 2 ranks, and initialize_ub(tp_size=1)", "To do: correct tp_size")
    with initialised(rank.world, ub_cfgs={"qkv_dgrad": {"method": "ring_exchange"}}):
        says(said(ub_bulk_dgrad=True), "ub_bulk_dgrad=True, and ub_cfgs with qkv_dgrad of method 'ring_exchange'")
    with (
        patch.dict(os.environ, LOCAL_WORLD_SIZE="1"),
        initialised(rank.world),
    ):  # as of a launcher with a process a host
        text = said(ub_overlap_ag=True)
    says(text, "overlap over a group on 2 hosts", "stays within NVLink", "leave the ub_")
    module = make("column", rank, group, ub_overlap_ag=True)
    module.sequence_parallel = False
    module(torch.zeros(4, 1, H, dtype=torch.bfloat16, device=rank.device))
    idle = "not overlapped: ub_overlap_ag=True without effect: sequence_parallel is off"
    assert reasons(module)["qkv_fprop"] == idle
