"""The benchmark of shards runs on the CPU, within its time."""

from __future__ import annotations

import pytest

from benchmarks import sharded
from benchmarks.catalogue import BENCHMARKS


def test_two_processes_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer bytes with quantized weights: half, but for what is no weight."""
    monkeypatch.setattr(sharded.harness, "gpus", lambda: 0)
    monkeypatch.setattr(sharded.harness, "gpu", lambda: False)
    cases = (sharded.Case("4 small layers", "delayed"), sharded.Case("4 small layers", "current", True))
    plain, held = sharded.measure(cases)
    assert plain["of_bytes"] == 1.0 and 0.49 < held["of_bytes"] < 0.53
    assert held["ms"] > 0 and held["ok"] == (held["of_bf16"] <= 1) and "ok" not in plain
    assert set(BENCHMARKS["sharded"].columns) == set(held)
