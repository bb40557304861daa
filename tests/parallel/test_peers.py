"""Memory that ranks read without each other's help: on two GPUs, or in files that ranks on the CPU map."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.covering import covering
from tests.parallel.conftest import NCCL
from tests.parallel.overlap_steps import RINGS, SETS, TOKENS, H
from tests.parallel.peer_steps import (
    compared_with_plain,
    first_in_a_capture,
    in_two_groups,
    left_alone,
    long,
    memory,
    uses,
    with_graphs,
    without,
)
from tests.parallel.ranks import Ranks
from tests.parallel.test_overlap import AGREES, GEMMS, methods


@pytest.mark.four_ranks
def test_what_goes_around(ranks: Ranks) -> None:
    for skewed in (False, True):
        assert ranks.run(uses, 24, (512, 24, 4096, 8), skewed) == [0] * ranks.world


def test_one_queue_is_enough(pair: Ranks) -> None:
    """Where a GPU has one, nothing may wait for what stands behind it."""
    assert pair.run(uses, 24, (512, 24, 4096, 8), True, True) == [0, 0]


@pytest.mark.four_ranks(recipe="delayed", flags="rings")
@covering(kind=list(GEMMS), recipe=[None, "delayed", "current", "block"], flags=list(SETS), cfg=[None, RINGS])
def test_steps_of_changing_token_counts(
    ranks: Ranks, kind: str, recipe: str | None, flags: str, cfg: dict[str, Any] | None
) -> None:
    for found, said in ranks.run(compared_with_plain, kind, recipe, SETS[flags], cfg, (64, 32, TOKENS)):
        exact = ranks.device == "cpu" and ranks.world == 2
        assert found >= (math.inf if exact else AGREES[recipe is not None])
        for gemm, method in methods(kind, flags, cfg).items():
            assert said[gemm].startswith(f"overlapped by {method}") and said[gemm].endswith("through peer memory")


def test_gpus_that_cannot_read_each_other(pair: Ranks) -> None:
    """It is told once."""
    for shared, why in ((True, "share a GPU"), (False, "has no access to that of rank")):
        for there, told in pair.run(without, shared):
            assert not there and len(told) == 1 and why in told[0] and "Parts travel over gloo" in told[0]


def test_a_rank_that_dies_ends_the_wait(two: Ranks) -> None:
    waiting, dead = two.outcomes(left_alone, 1)
    assert dead.how == "died", dead
    if waiting.how == "died" and two.device == "cuda":  # a GPU that takes no work beside the wait
        assert "a rank has waited in vain for another one" in waiting.output
        return
    assert waiting.how == "returned", waiting
    spoiled, seconds, said = waiting.value
    assert spoiled and 1 <= seconds < 60
    for error in said:
        assert "0 has waited in vain for 1" in error and "results since then are NaN" in error


@pytest.mark.four_ranks
def test_two_groups_of_two(four: Ranks) -> None:
    """Of ranks that are no neighbours."""
    for found, said in four.run(in_two_groups):
        assert found >= (math.inf if four.device == "cpu" else AGREES[False])
        assert said["fc1_fprop"] == "overlapped by ring_exchange, in 2 parts, through peer memory"


@pytest.mark.parametrize(
    ("kind", "recipe", "how"),
    [
        ("mlp", None, "rings"),
        ("mlp", None, "pipeline"),
        ("mlp", "delayed", "bulk"),
        pytest.param("attention", "current", "rings", marks=pytest.mark.more),
        pytest.param("layer", "delayed", "rings", marks=pytest.mark.more),
    ],
)
def test_graphs_give_the_bits_of_eager_steps(two: Ranks, kind: str, recipe: str | None, how: str) -> None:
    for found, said in two.run(with_graphs, kind, recipe, how):
        assert not found and all(how.endswith("through peer memory") for how in said.values()) and said


@NCCL
def test_memory_is_not_mapped_in_a_capture(ranks_of: Any) -> None:
    for said in ranks_of(2, "cuda").run(first_in_a_capture):
        assert "inside a CUDA graph's capture" in said and "run a step before the capture" in said


def test_memory_is_what_the_documents_say(two: Ranks) -> None:
    """Of two rooms of a kind, whatever the layers and token counts; given back in the end."""
    capacity, size = 2 * TOKENS * H, 2  # elements, bytes of each
    pieces = [capacity // 2 * size + 4096, capacity * size + 4096]
    for rooms, _, left in two.run(memory, 24):
        assert rooms == [sum(2 * -(-piece // 512) * 512 for piece in pieces)] * 4
        assert left == 0


@pytest.mark.full  # alone on the GPUs: their free memory is what is compared
@NCCL
def test_a_gpu_gets_its_memory_back(ranks_of: Any) -> None:
    """It gives whole pages of 2 MiB."""
    for _, (inside, outside, *again), _ in ranks_of(2, "cuda").run(memory, 24):
        assert again == [inside, outside] and outside - inside >= 2 * (2 << 20)


@pytest.mark.full
@NCCL
def test_a_thousand_steps() -> None:
    """However many hardware queues there are, nothing waits for what stands behind it."""
    started = [Ranks(2, "cuda", CUDA_DEVICE_MAX_CONNECTIONS=connections) for connections in ("1", "8", "32")]
    try:
        with ThreadPoolExecutor(len(started)) as beside:
            for found in beside.map(lambda ranks: ranks.run(long, 1000), started):
                for count, wrong, said in found:
                    assert count == 1000 and wrong == 0
                    assert said and all("through peer memory" in how for how in said.values())
    finally:
        for ranks in started:
            ranks.close()
