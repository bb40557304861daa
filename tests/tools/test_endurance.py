"""The benchmark of a long training: a short one, and what it says of memory that grows."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import endurance, harness, report
from benchmarks.catalogue import BENCHMARKS
from benchmarks.pictures import draw_record

ON_GPU = {"torch MiB", "reserved MiB"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "gpu", lambda: False)
    monkeypatch.setattr(endurance, "SAMPLES", 9)
    monkeypatch.setattr(endurance, "LINES", 3)
    monkeypatch.setattr(endurance, "TURN", 1)  # all recipes have their turn


def test_a_short_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("ENDURANCE_SECONDS", "0.5")
    threads = torch.get_num_threads()
    rows = endurance.measure()
    assert torch.get_num_threads() == threads
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert {key for row in rows for key in row} >= set(BENCHMARKS["endurance"].columns)
    last = rows[-1]
    samples = last["samples"]
    assert 0.5 <= samples["minutes"][-1] * 60 < 30 and {len(values) for values in samples.values()} == {9}
    assert len(set(samples["steps"])) > 3 and last["steps"] == samples["steps"][-1]
    assert last["share"] == 1 and not last["reasons"]
    assert all(math.isnan(row[key]) is (key in ON_GPU) for row in rows for key in endurance.READ)
    path = harness.write("endurance", rows, tmp_path, 0.5)
    assert "NaN" not in path.read_text()
    pytest.importorskip("matplotlib")
    assert draw_record(harness.read(path), tmp_path / "endurance.svg")
    assert "resident" in (tmp_path / "endurance.svg").read_text()


class Still:
    """Steps that do nothing."""

    def __init__(self, loss: float = 0.0) -> None:
        self.steps, self.losses = 0, [loss]

    def step(self) -> None:
        self.steps += 1


@pytest.mark.parametrize("grows", [None, *endurance.READ])
def test_growth_is_noticed(grows: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By more than 3 % from the middle third to the last one, whatever was before. The number of tapes may vary."""
    for by in (1.02, 1.04, 0.5):
        count = itertools.count()

        def read(by: float = by, count: Iterator[int] = count) -> dict[str, float]:
            third = next(count) // 3
            return {key: 1000.0 * ((0.1, 1.0, by if key == grows else 1.0)[third]) for key in endurance.READ}

        monkeypatch.setattr(endurance, "read", read)
        *_, last = endurance.thirds(endurance.sampled(Still(), 0.01))
        assert last["ok"] is (by <= 1.03 or grows in (None, "tapes")), by
        assert last["of_middle"] == (1 if grows in (None, "tapes") or by < 1 else by), by


def test_a_loss_that_is_none() -> None:
    with pytest.raises(ArithmeticError, match="nan after"):
        endurance.sampled(Still(float("nan")), 0.01)


def test_what_is_resident() -> None:
    before = endurance.resident_mib()
    held = np.ones(64 << 20, np.uint8)
    assert 50 < endurance.resident_mib() - before < 100 and held.any()


def test_sequences_are_new_and_come_again() -> None:
    draw = endurance.Lengths()
    found = [draw.next() for _ in range(400)]
    assert all(sum(lengths) == sum(splits) and min(splits) >= 0 for lengths, splits in found)
    sets = [tuple(lengths) for lengths, _ in found]
    often = [one for one in set(sets) if sets.count(one) > 3]
    assert 20 <= len(often) <= endurance.COMMON + 5 and len(set(sets)) > 80


def test_a_cpu_is_shown_until_there_is_a_gpu(tmp_path: Path) -> None:
    """Where its figures mean something."""
    for name in ("cpu-endurance", "cpu-gemm", "h200-gemm"):
        (tmp_path / f"2026-01-02-{name}.json").write_text(json.dumps({"time": "2026-01-02T00:00:00Z"}))
    assert [path.name for path in report.by_age("endurance", tmp_path)] == ["2026-01-02-cpu-endurance.json"]
    assert [path.name for path in report.by_age("gemm", tmp_path)] == ["2026-01-02-h200-gemm.json"]
    (tmp_path / "2026-01-01-h200-endurance.json").write_text(json.dumps({"time": "2026-01-01T00:00:00Z"}))
    assert report.by_age("endurance", tmp_path)[-1].name == "2026-01-01-h200-endurance.json"
