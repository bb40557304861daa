"""The ranks that all tests share (tests/parallel/ranks.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.backends import requires_gpus
from tests.parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int, str], Ranks]]:
    """The ranks of a world size and device: one set of processes for the session."""
    started: dict[tuple[int, str], Ranks] = {}

    def find(world: int, device: str = "cpu") -> Ranks:
        return started.setdefault((world, device), Ranks(world, device))

    yield find
    for found in started.values():
        found.close()


NCCL = requires_gpus(2, ranks=True)
FOUR, FOUR_GPUS = "4 ranks", "4 GPUs"
GLOO = [pytest.param((2, "cpu"), id="2 ranks"), pytest.param((4, "cpu"), id=FOUR)]
OVER_FOUR = pytest.param((4, "cuda"), id=FOUR_GPUS, marks=requires_gpus(4, ranks=True))


def pytest_configure(config: pytest.Config) -> None:
    said = "four_ranks(**parameters): cases run on four GPUs, and with `make test-more` on four ranks; others: --full"
    config.addinivalue_line("markers", said)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Four ranks show what two do, but for groups of several ranks: `make test-more` runs the cases chosen for them."""
    named = item.callspec.id.split("-") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else []
    if FOUR in named or FOUR_GPUS in named:
        given = item.callspec.params  # type: ignore[attr-defined]
        chosen = any(
            all(given[name] == value for name, value in mark.kwargs.items()) for mark in item.iter_markers("four_ranks")
        )
        if FOUR in named or not chosen:
            item.add_marker("more" if chosen else "full")


@pytest.fixture(scope="module", params=[*GLOO, pytest.param((2, "cuda"), id="2 GPUs", marks=NCCL), OVER_FOUR])
def ranks(request: pytest.FixtureRequest, ranks_of: Callable[[int, str], Ranks]) -> Ranks:
    """Two gloo ranks, or GPUs by NCCL, and four of each (where a test is marked `four_ranks`, or --full)."""
    return ranks_of(*request.param)


@pytest.fixture(scope="module", params=GLOO)
def gloo_ranks(request: pytest.FixtureRequest, ranks_of: Callable[[int, str], Ranks]) -> Ranks:
    """The same without the GPUs, for what is otherwise there."""
    return ranks_of(*request.param)


@pytest.fixture(scope="module")
def pair(ranks_of: Callable[[int, str], Ranks]) -> Ranks:
    """Two gloo ranks, for what depends on neither their number nor the device."""
    return ranks_of(2, "cpu")


@pytest.fixture(
    scope="module", params=[pytest.param("cpu", id="2 ranks"), pytest.param("cuda", id="2 GPUs", marks=NCCL)]
)
def two(request: pytest.FixtureRequest, ranks_of: Callable[[int, str], Ranks]) -> Ranks:
    """Two ranks, over gloo and over NCCL."""
    return ranks_of(2, request.param)


@pytest.fixture(scope="module", params=[GLOO[1], OVER_FOUR])
def four(request: pytest.FixtureRequest, ranks_of: Callable[[int, str], Ranks]) -> Ranks:
    """Four ranks, over gloo and over NCCL, for groups of two; the test is marked `four_ranks`."""
    return ranks_of(*request.param)


@pytest.fixture(scope="module")
def gpus(ranks_of: Callable[[int, str], Ranks]) -> Ranks:
    """Two GPUs, for what only they have; the test is marked so."""
    return ranks_of(2, "cuda")


@pytest.fixture(scope="module")
def gloo_four(ranks_of: Callable[[int, str], Ranks]) -> Ranks:
    """Four gloo ranks; the test is marked `more`."""
    return ranks_of(4, "cpu")
