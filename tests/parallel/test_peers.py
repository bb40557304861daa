"""Memory that ranks read without each other's help: on two GPUs, or in files that ranks on the CPU map."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.covering import covering
from tests.parallel.overlap_steps import RINGS, SETS, TOKENS
from tests.parallel.peer_steps import compared_with_plain, left_alone, uses
from tests.parallel.ranks import Ranks
from tests.parallel.test_overlap import AGREES, GEMMS, methods


@pytest.mark.four_ranks
def test_what_goes_around(ranks: Ranks) -> None:
    assert ranks.run(uses, 40, (512, 24, 4096, 8), False) == [0] * ranks.world
    assert ranks.run(uses, 40, (512, 24, 4096, 8), True) == [0] * ranks.world


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


def test_a_rank_that_dies_ends_the_wait(two: Ranks) -> None:
    waiting, dead = two.outcomes(left_alone, 1)
    assert dead.how == "died", dead
    assert waiting.how == "returned", waiting
    spoiled, seconds, said = waiting.value
    assert spoiled and 1 <= seconds < 5
    for error in said:
        assert "0 has waited in vain for 1" in error and "results since then are NaN" in error
