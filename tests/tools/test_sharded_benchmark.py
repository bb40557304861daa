"""The benchmark of shards runs on the CPU, within its time."""

from __future__ import annotations

import pytest

from benchmarks import sharded, sharded_host
from benchmarks.catalogue import BENCHMARKS


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded.harness, "gpus", lambda: 0)
    monkeypatch.setattr(sharded.harness, "gpu", lambda: False)


@pytest.mark.more
def test_two_processes_measure() -> None:
    """Fewer bytes with quantized weights: half, but for what is no weight."""
    cases = (sharded.Case(sharded.SMALL, "delayed"), sharded.Case(sharded.SMALL, "current", True))
    plain, held = sharded.measure(cases)
    assert plain["of_bytes"] == 1.0 and 0.49 < held["of_bytes"] < 0.53
    assert held["bf16 gathered MiB"] == plain["bf16 gathered MiB"] == plain["gathered MiB"]
    assert held["ms"] > 0 and held["ok"] == (held["of_bf16"] <= 1) and "ok" not in plain
    assert set(BENCHMARKS["sharded"].columns) == set(held)


@pytest.mark.full
def test_what_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all ranks alike, and in the order in which cases matter."""
    monkeypatch.setattr(sharded, "SECONDS", -1)
    rows = sharded.measure()
    assert [row["case"] for row in rows] == [
        f"{case.model}, {case.shown}: left out, -1 s are over" for case in sharded.CASES
    ]


def test_what_matters_most_comes_first() -> None:
    """All cases are there once: what predictions read, then what has a target, then the others."""
    held = [case.held for case in sharded.CASES]
    assert len(set(sharded.CASES)) == len(sharded.CASES) == 15
    assert sharded.CASES[0] == sharded.Case(sharded.LARGE, "delayed") and held[1:] == [True] * 9 + [False] * 5


@pytest.mark.more
def test_one_gpu_shows_the_host() -> None:
    (row,) = sharded_host.measure((sharded.Case(sharded.SMALL, "current", True),))
    assert set(BENCHMARKS["sharded_host"].columns) == set(row) and row["host ms"] > 0
    assert row["of_bf16"] == row["ms"] / row["bf16 ms"]
