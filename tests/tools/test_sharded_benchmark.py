"""The benchmark of shards runs on the CPU, and the model of many GPUs computes what it states."""

from __future__ import annotations

import pytest

from benchmarks import predict, sharded
from benchmarks.catalogue import BENCHMARKS
from benchmarks.predict import GIGA, Machine, Model


def test_two_processes_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer bytes with quantized weights: half, but for what is no weight."""
    monkeypatch.setattr(sharded.harness, "gpus", lambda: 0)
    monkeypatch.setattr(sharded.harness, "gpu", lambda: False)
    cases = (sharded.Case("4 small layers", "delayed"), sharded.Case("4 small layers", "current", True))
    plain, held = sharded.measure(cases)
    assert plain["of_bytes"] == 1.0 and 0.49 < held["of_bytes"] < 0.53
    assert held["ms"] > 0 and held["ok"] == (held["of_bf16"] <= 1) and "ok" not in plain
    assert set(BENCHMARKS["sharded"].columns) == set(held)


def test_rings() -> None:
    assert predict.collective(8 * GIGA, 1, GIGA, 1.0) == 0
    assert predict.collective(8 * GIGA, 4, 2 * GIGA, 0.5) == pytest.approx(8 * 3 / 4 / 2 + 1.5)


def test_a_step_by_hand() -> None:
    """One node, ten layers of 1e9 weights, where products hide all but the first gather and the last reduction."""
    machine = Machine(rate=2e12, inside=100 * GIGA, between=GIGA, latency=0.0, memory=1e12, node=4)
    found = predict.step(Model("hand", 10, 1e9), machine, 4, 1000, 2.0, hybrid=False)
    gather = reduce = 2 * 0.75 / 100
    assert found["products"] == pytest.approx(10 * (1 + 2))
    assert found["update"] == pytest.approx(16 * 10 / 4 / 1000)
    assert found["added"] == pytest.approx(gather + reduce)
    # Between nodes the same gathers are a hundred times as slow, and show in both passes.
    slow = predict.step(Model("hand", 10, 1e9), machine, 8, 1000, 2.0, hybrid=False)
    each = 2 * 7 / 8
    assert slow["whole"] == pytest.approx(10 * (max(1, each) + max(2, 2 * each)) + 2 * each + 16 * 10 / 8 / 1000)
    # On a mesh only gradients cross, a quarter of them from each GPU.
    mesh = predict.step(Model("hand", 10, 1e9), machine, 8, 1000, 2.0, hybrid=True)
    crossing = reduce + 2 * (2 / 4) / 2
    assert mesh["whole"] == pytest.approx(10 * (1 + max(2, gather + crossing)) + gather + crossing + 0.04)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main(["--tokens", "4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 2 * 2 * 3 and "1024" in lines[-1] and "128 x 8" in lines[-1]
