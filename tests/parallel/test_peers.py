"""Memory that ranks read without each other's help: on two GPUs, or in files that ranks on the CPU map."""

from __future__ import annotations

import pytest

from tests.parallel.peer_steps import left_alone, uses
from tests.parallel.ranks import Ranks


@pytest.mark.four_ranks
def test_what_goes_around(ranks: Ranks) -> None:
    assert ranks.run(uses, 40, (512, 24, 4096, 8), False) == [0] * ranks.world
    assert ranks.run(uses, 40, (512, 24, 4096, 8), True) == [0] * ranks.world


def test_a_rank_that_dies_ends_the_wait(two: Ranks) -> None:
    waiting, dead = two.outcomes(left_alone, 1)
    assert dead.how == "died", dead
    assert waiting.how == "returned", waiting
    spoiled, seconds, said = waiting.value
    assert spoiled and 1 <= seconds < 5
    for error in said:
        assert "0 has waited in vain for 1" in error and "results since then are NaN" in error
