"""The amax reduction in processes of their own: gloo on the CPU, NCCL on several GPUs.

What several ranks reduce equals the state of one process that sees the batches of all of them in one region: casts
keep the largest value there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling
from tests.backends import requires_gpus
from tests.module_steps import differences, fp8_state, make
from tests.parallel.amax_ranks import RULE, RULES, STEPS, batch, gradient

ROOT = Path(__file__).parents[2]
FACE = [name for name in ("lo", "lo0") if Path(f"/sys/class/net/{name}").exists()]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, "cpu"), id="2 ranks"),
        pytest.param((4, "cpu"), id="4 ranks"),
        pytest.param((2, "cuda"), id="2 GPUs", marks=requires_gpus(2)),
    ],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by case."""
    (world, device), folder = request.param, tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if FACE:
        env["GLOO_SOCKET_IFNAME"] = FACE[0]
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # torch.compile asks for a stream, and four processes more crowd a GPU
    command = [sys.executable, "-m", "tests.parallel.amax_ranks"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder), device], cwd=ROOT, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [p.returncode for p in started] == [0] * world, "\n".join(outputs)[-6000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


@cache
def together(of: tuple[int, ...], rule: str = "max", seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """State after each step of one process with the batches of these ranks."""
    module, found = make("Linear", seed=seed), []
    for step in range(STEPS):
        with te.autocast(recipe=DelayedScaling(**RULE, **RULES[rule])):
            ys = [module(batch(rank, step)) for rank in of]
        torch.autograd.backward(ys, [gradient(y, rank, step) for y, rank in zip(ys, of, strict=True)])
        found.append(fp8_state(module))
    return found


def half(rank: int, world: int) -> tuple[int, ...]:
    start = rank // (world // 2) * (world // 2)
    return tuple(range(start, start + world // 2))


def agree(found: list[dict[str, Any]], wanted: list[dict[str, torch.Tensor]], reductions: int) -> None:
    for got, state in zip(found, wanted, strict=True):
        named = {name.replace("_orig_mod.", ""): t for name, t in got["state"].items()}
        assert not differences(named, state)
        assert got["reductions"] == reductions


@pytest.mark.parametrize("rule", RULES)
def test_all_ranks(rule: str, ranks: list[dict[str, Any]]) -> None:
    """Without a group: over all, once forward and once backward; with reduce_amax=False each keeps its own."""
    everyone = tuple(range(len(ranks)))
    for rank, found in enumerate(ranks):
        own = rule == "own rank"
        agree(found["default_group"][rule], together((rank,) if own else everyone, rule), 0 if own else 2)
    scales = {r["default_group"][rule][-1]["state"]["fp8_state.scale_fwd"][0].item() for r in ranks}
    assert (len(scales) == 1) == (rule != "own rank")


def test_subgroups(ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    for rank, found in enumerate(ranks):
        agree(found["subgroups"], together(half(rank, world)), 0 if world == 2 else 2)


def test_backward_inside_the_region(ranks: list[dict[str, Any]]) -> None:
    """The group is known before the region ends. (Gradient scales are updated first: it makes no difference here.)"""
    for found in ranks:
        agree(found["backward_inside"], together(tuple(range(len(ranks)))), 2)


def test_one_reduction_for_all_modules(ranks: list[dict[str, Any]]) -> None:
    """And every rank has the same scales after it."""
    steps = [found["many_modules"] for found in ranks]
    assert {step["reductions"] for found in steps for step in found} == {2}
    for found in steps[1:]:
        for mine, first in zip(found, steps[0], strict=True):
            assert not differences(mine["state"], first["state"])
    assert sum("scale_fwd" in name for name in steps[0][-1]["state"]) == 2


def test_states_of_different_groups(ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    for rank, found in enumerate(ranks):
        for step, got in enumerate(found["groups_of_two_modules"]):
            assert not differences(got["first"], together(half(rank, world))[step])
            assert not differences(got["second"], together(tuple(range(world)), seed=1)[step])
            assert got["reductions"] == (2 if world == 2 else 4)


def test_no_communication(ranks: list[dict[str, Any]]) -> None:
    """With a group of one rank, without gradients, and without a history."""
    assert all(set(found["no_communication"]) == {0} for found in ranks)


@pytest.mark.parametrize("inside", [False, True])
def test_compiled_modules(inside: bool, ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    for rank, found in enumerate(ranks):
        agree(found["compiled"][inside], together(half(rank, world)), 0 if world == 2 else 2)


def test_a_region_inside_compiled_code_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all(found["region_in_compiled_code"] for found in ranks)


def test_ranks_that_run_different_modules(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        forward, untouched, backward = found["other_modules_on_a_rank"]
        assert untouched
        assert "different modules" in forward and "different modules" in backward
