"""Overlap of products with their communication, of te_torch's modules: the bits of plain ones, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.covering import covering
from tests.parallel.overlap_steps import (
    RINGS,
    SETS,
    TOKENS,
    beside_others,
    come_and_gone,
    compared,
    compared_by_calls,
    in_groups_of_two,
    on_two_hosts,
    refused,
)
from tests.parallel.ranks import Ranks

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
@covering(kind=list(GEMMS), recipe=[None, "delayed", "current", "block"], flags=list(SETS), cfg=[None, RINGS])
def test_steps_of_changing_token_counts(
    ranks: Ranks, kind: str, recipe: str | None, flags: str, cfg: dict[str, Any] | None
) -> None:
    for found, said in ranks.run(compared_by_calls, kind, recipe, SETS[flags], cfg, (64, 32, TOKENS)):
        exact = ranks.device == "cpu" and ranks.world == 2
        assert found >= (math.inf if exact else AGREES[recipe is not None])
        assert {name: how.split(",")[0] for name, how in said.items()} == {
            name: f"overlapped by {method}"
            if method not in ("bulk", "external")
            else f"overlapped by {method}: {BESIDE[method]}"
            for name, method in methods(kind, flags, cfg).items()
        }


BESIDE = {
    "bulk": "what travels has a product beside it that does not need it",
    "external": "what dgrad gathered serves wgrad",
}


def test_a_call_beyond_the_capacity_runs_plain(pair: Ranks) -> None:
    for found, said in pair.run(compared, "mlp", None, SETS["rings"], RINGS, (TOKENS, 2 * TOKENS)):
        assert found == math.inf
        elements = 2 * 2 * TOKENS * 64
        reason = f"a tensor of {elements} elements, and initialize_ub made room for {elements // 2}"
        assert said["fc1_fprop"] == f"not overlapped by ring_exchange: {reason}"
        assert said["fc2_fprop"] == said["fc2_dgrad"] == said["fc1_dgrad"] == said["fc1_fprop"]


@pytest.mark.four_ranks
def test_two_groups_of_two(four: Ranks) -> None:
    for found, said in four.run(in_groups_of_two):
        assert found >= (math.inf if four.device == "cpu" else AGREES[False])
        assert said["fc1_fprop"].startswith("overlapped by ring_exchange, in 2 parts")


@pytest.mark.parametrize("how", ["mlp again", "row, wgrad later", "checkpoint", "mlp"])
def test_beside_what_computes_again_or_later(pair: Ranks, how: str) -> None:
    for found, said in pair.run(beside_others, how):
        assert found == math.inf
        assert all(how.startswith("overlapped") for how in said.values()) and said


def test_settings_come_and_go(pair: Ranks) -> None:
    """Also of calls that run as plans."""
    for before, rings, gone, pieces, other_mode, other_dtype in pair.run(come_and_gone):
        assert "without initialize_ub" in before and "call initialize_ub before the first forward" in before
        assert rings["fc2_fprop"] == "overlapped by ring_exchange, in 2 parts"
        assert set(gone.values()) == {"not overlapped: destroy_ub was called"}
        assert pieces == "overlapped by pipeline, in 2 parts"
        assert other_mode == "not overlapped: initialize_ub was not told of the mode FP8, in which this call runs"
        assert other_dtype.startswith("not overlapped: initialize_ub was told of torch.float16")


def test_what_a_module_refuses(pair: Ranks) -> None:
    for size, method, idle in pair.run(refused):
        assert "a group of 2 ranks, and initialize_ub(tp_size=1)" in size and "To do: correct tp_size" in size
        assert "ub_bulk_dgrad=True, and ub_cfgs with qkv_dgrad of method 'ring_exchange'" in method
        assert idle == "not overlapped: ub_overlap_ag=True without effect: sequence_parallel is off"


def test_a_group_of_several_hosts(pair: Ranks) -> None:
    for said in pair.run(on_two_hosts):
        assert "overlap over a group on 2 hosts" in said and "stays within NVLink" in said and "leave the ub_" in said
