"""The tables of the guide on performance: which figures stand beside one another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, report, rivals, summary


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of records with nothing in it."""
    monkeypatch.setattr(summary, "by_age", lambda name: report.by_age(name, tmp_path))
    return tmp_path


def record(folder: Path, day: str, name: str, rows: list[dict[str, Any]]) -> None:
    content = {"time": f"{day}T01:00:00Z", "about": {"device": "NVIDIA H100"}, "rows": rows}
    (folder / f"{day}-h100-{name}.json").write_text(json.dumps(content))


def test_the_newest_record_stands_beside_the_peer(results: Path) -> None:
    layer = {"case": "TransformerLayer", "recipe": "bf16", "peer fwd+bwd us": 2000.0}
    record(results, "2026-01-01", "attention", [layer | {"fwd+bwd us": 9000.0}])
    record(results, "2026-01-02", "attention", [layer | {"fwd+bwd us": 1500.0}, {"case": "host: DPA", "recipe": ""}])
    where, rows = summary.newest("attention")
    assert where == "NVIDIA H100, 2026-01-02"
    assert list(summary.of_peer(rows, "fwd+bwd us", 1e3)) == [("TransformerLayer", "bf16", 1.5, summary.PEER, 2.0)]


def test_torch_stands_beside_the_same_shape(results: Path) -> None:
    rows = [
        {"case": case, "shape": [size, 2], "us": us}
        for case, size, us in (("ours", 1, 10.0), ("ours", 2, 20.0), ("theirs", 2, 80.0))
    ]
    assert list(summary.of_torch(rows, "us", 10.0, {"ours": "theirs"})) == [("ours 2 x 2", "bf16", 2.0, "theirs", 8.0)]


def test_fp8_stands_beside_fp8_and_bf16(results: Path) -> None:
    assert not list(summary.of_rivals("us", 1))  # not measured
    cases = (("torch", "bf16"), (rivals.TORCHAO, "current"), ("te-runtime", "bf16"), ("te-runtime", "block"))
    record(results, "2026-01-02", "rivals", [{"case": c, "recipe": r, "us": 8.0 - i} for i, (c, r) in enumerate(cases)])
    ((_, found),) = summary.of_rivals("us", 2)
    assert [(each.recipe, each.other) for each in found] == [
        ("bf16", "torch"),
        ("block", "torch"),
        ("block", rivals.TORCHAO),
    ]
    assert (found[0].ours, found[0].theirs) == (3.0, 4.0)
    assert "| 0.75 |" in summary.table(iter([("there", found)]), "ms")


def test_records_by_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    for name in ("2026-01-01-h200-gemm", "2026-01-02-h100-80gb-hbm3-gemm", "2026-01-02-h100-80gb-hbm3-norms"):
        (tmp_path / f"{name}.json").write_text("{}")
    *_, newest, oldest = report.dates(tmp_path).splitlines()
    assert newest.startswith("| 2026-01-02 | [h100-80gb-hbm3-gemm](../2026-01-02-h100-80gb-hbm3-gemm.json), [h100")
    assert oldest == "| 2026-01-01 | [h200-gemm](../2026-01-01-h200-gemm.json) |"


def test_a_step_stands_beside_the_same_recipe(results: Path) -> None:
    parts = (
        ("bf16", "torch's", 8.0),
        ("block", "torch's", 6.0),
        ("block", "loss, optimizer", 5.0),
        ("block", "more", 1.0),
    )
    rows = [{"recipe": recipe, "parts": which, "ms": ms} for recipe, which, ms in parts]
    record(results, "2026-01-02", "end_to_end", rows)
    ((_, found),) = summary.of_parts("ms", 1)
    assert [(each.recipe, each.ours, each.theirs) for each in found] == [("block", 5.0, 6.0)]


def test_a_reduced_run_has_a_row_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "gpu", lambda: False)
    found = [(row["case"], row["recipe"]) for row in rivals.measure()]
    assert found[:2] == [("torch", "bf16"), (rivals.COMPILED, "bf16")] and ("te-runtime", "block") in found
