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
FOUR = "4 ranks"
GLOO = [pytest.param((2, "cpu"), id="2 ranks"), pytest.param((4, "cpu"), id=FOUR)]


def pytest_configure(config: pytest.Config) -> None:
    said = "four_ranks(**parameters): cases that `make test-more` runs with four ranks; the rest of them has --full"
    config.addinivalue_line("markers", said)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Four ranks show what two do, but for groups of several ranks: `make test-more` runs the cases chosen for them."""
    if isinstance(item, pytest.Function) and hasattr(item, "callspec") and FOUR in item.callspec.id.split("-"):
        given = item.callspec.params
        chosen = any(
            all(given[name] == value for name, value in mark.kwargs.items()) for mark in item.iter_markers("four_ranks")
        )
        item.add_marker("more" if chosen else "full")


@pytest.fixture(scope="module", params=[*GLOO, pytest.param((2, "cuda"), id="2 GPUs", marks=NCCL)])
def ranks(request: pytest.FixtureRequest, ranks_of: Callable[[int, str], Ranks]) -> Ranks:
    """Two gloo ranks, four of them (where a test is marked `four_ranks`, or --full), and NCCL on two GPUs."""
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
