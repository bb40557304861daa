"""Tables of records: two trees beside one another, and which figures of the guide on performance stand together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import beside, harness, report, rivals, summary

STANDIN = """
import json, pathlib, sys
state = pathlib.Path("turns.txt")
turn = len(state.read_text()) if state.exists() else 0
state.write_text("x" * (turn + 1))
with open({log!r}, "a") as log:
    log.write({name!r})
rows = [{{"case": "Linear", "recipe": "bf16", "fwd us": {times!r}[turn], "peak MiB": {peak}, "ok": True}}]
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
(out / "record.json").write_text(json.dumps({{"rows": rows}}))
"""


def tree(folder: Path, name: str, times: list[float], peak: float) -> Path:
    made = folder / name
    (made / "benchmarks").mkdir(parents=True)
    (made / "benchmarks" / "__init__.py").touch()
    standin = STANDIN.format(log=str(folder / "log.txt"), name=name[0], times=times, peak=peak)
    (made / "benchmarks" / "run.py").write_text(standin)
    return made


def test_rounds_take_turns_and_medians_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tree(tmp_path, "before", [4.0, 100.0, 5.0], 10.0)
    monkeypatch.setattr(beside.harness, "ROOT", tree(tmp_path, "now", [10.0, 9.0, 1.0], 5.0))
    assert beside.main([str(other), "modules", "--rounds", "3", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "log.txt").read_text() == "bnbnbn"
    (record,) = (tmp_path / "out").glob("*beside.json")
    rows: list[dict[str, Any]] = json.loads(record.read_text())["rows"]
    assert [(r["case"], r["figure"], r["before"], r["now"], r["ratio"]) for r in rows] == [
        ("Linear | bf16", "fwd us", 5.0, 9.0, 1.8),
        ("Linear | bf16", "peak MiB", 10.0, 5.0, 0.5),
    ]
    assert "Linear | bf16" in capsys.readouterr().out


def test_rounds_end_in_time_and_what_was_measured_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tree(tmp_path, "before", [4.0], 10.0)
    monkeypatch.setattr(beside.harness, "ROOT", tree(tmp_path, "now", [10.0], 5.0))
    options = ["--rounds", "3", "--minutes", "0.0001", "--out", str(tmp_path / "out")]
    assert beside.main([str(other), "modules", *options]) == 0
    assert (tmp_path / "log.txt").read_text() == "bn"
    (record,) = (tmp_path / "out").glob("*beside.json")
    assert [row["rounds"] for row in json.loads(record.read_text())["rows"]] == [1, 1]
    assert "ended after 1 of 3 rounds" in capsys.readouterr().out


def test_wrong_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([str(tmp_path), "modules"], [str(tree(tmp_path, "a", [], 0)), "modules", "--rounds", "0"]):
        with pytest.raises(SystemExit):
            beside.main(arguments)
    shown = capsys.readouterr().err
    assert "is no tree of this project" in shown and "--rounds 0" in shown


def test_a_benchmark_that_fails_says_why(tmp_path: Path) -> None:
    other = tree(tmp_path, "broken", [], 0)
    with pytest.raises(SystemExit, match="IndexError"):
        beside.main([str(other), "modules", "--rounds", "1"])


def test_records_of_the_same_trees_become_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.harness, "ROOT", tmp_path)
    paths = []
    for number, (commit, case, figure) in enumerate(
        (("a..b", "Linear", "fwd us"), ("b..c", "Linear", "fwd us"), ("b..c", "Linear", "peak MiB"))
    ):
        path = tmp_path / f"2026-01-0{number + 1}-h200-beside.json"
        rows = [{"case": case, "figure": figure, "before": 4.0, "now": 2.0 + number, "ratio": 0.5 + number}]
        about = {"device": "H200", "commit": commit}
        path.write_text(json.dumps({"time": f"2026-01-0{number + 1}T00:00:00Z", "about": about, "rows": rows}))
        paths.append(path)
    text = report.changes(report.by_age("beside", tmp_path))
    assert "| Linear | 4.000 -> 3.000 (1.50) | 4.000 -> 4.000 (2.50) |" in text, text
    assert paths[0].name not in text and all(path.name in text for path in paths[1:])
    assert "Not measured" in report.changes([])


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
