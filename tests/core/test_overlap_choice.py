"""Which method is taken where nobody says: by the table that ships, and how a record fills it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overlap_table
from te_core.layers import overlap_choice
from te_core.layers.overlap import Overlap, Way
from te_core.layers.overlap_choice import Call, fastest
from tests.core.peer_ranks import PeerRanks
from tests.core.test_overlap import ROOM, case_of, in_tiles, poisoned, stepped

__all__ = ["in_tiles", "poisoned"]

RESULTS = Path(overlap_table.TABLE).parents[1] / "benchmarks/results"
RECORD = RESULTS / "2026-11-27-h200-x2-overlap.json"
BY_PEER_MEMORY = RESULTS / "2026-11-27-h100-80gb-hbm3-x2-overlap.json"
OVER_FOUR = RESULTS / "2026-11-28-h100-80gb-hbm3-x4-overlap.json"
BIG = Call("peer memory", 2, "bf16", 8192, 8192)


def entry(tokens: int, width: int, ranks: int = 2, recipe: str = "bf16", **of_plain: dict[str, float]) -> Any:
    return {
        "carrier": "peer memory",
        "ranks": ranks,
        "recipe": recipe,
        "tokens": tokens,
        "width": width,
        "of_plain": of_plain,
    }


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fill it for a test."""
    entries: list[Any] = []
    monkeypatch.setattr(overlap_choice, "measured", lambda: entries)
    return entries


def test_the_nearest_entry_decides(table: list[Any]) -> None:
    assert fastest("sum", ("pipeline", "ring_exchange"), BIG) == ("pipeline", "")  # nothing was measured
    table += [
        entry(8192, 8192, sum={"pipeline": 0.97, "ring_exchange": 0.95}, gather={"ring_exchange": 0.9}),
        entry(2048, 8192, sum={"pipeline": 1.2, "ring_exchange": 1.1}, gather={"ring_exchange": 0.9}),
        entry(8192, 8192, recipe="current", sum={"pipeline": 0.96, "ring_exchange": 0.99}),
        entry(8192, 8192, ranks=8, sum={"pipeline": 0.8, "ring_exchange": 0.9}),
    ]
    both = "pipeline", "ring_exchange"
    assert fastest("sum", both, BIG) == fastest("sum", both, BIG._replace(tokens=6000)) == ("ring_exchange", "")
    assert (
        fastest("sum", ("pipeline",), BIG) == fastest("sum", both, BIG._replace(recipe="current")) == ("pipeline", "")
    )
    assert fastest("sum", both, BIG._replace(ranks=6)) == ("pipeline", "")
    method, reason = fastest("sum", both, BIG._replace(tokens=2000))
    assert (
        method == ""
        and reason == "plain was measured faster, of 2048 x 8192 elements in bf16 over 2 ranks, by peer memory"
    )
    assert fastest("gather", ("ring_exchange",), BIG._replace(tokens=2000)) == ("ring_exchange", "")
    method, reason = fastest("gather", ("ring_exchange",), BIG._replace(tokens=64))
    assert method == "" and "64 x 8192 elements are too few" in reason
    assert fastest("sum", both, BIG._replace(carrier="nccl")) == ("pipeline", "")


def test_a_method_without_a_figure(table: list[Any]) -> None:
    """It is plain where all others lose, and else goes by the next entry that has it."""
    table += [
        entry(8192, 8192, gather={"ring_exchange": 0.94}, dgrad={"bulk": 0.96}),
        entry(4096, 8192, gather={"ring_exchange": 0.99}),
        entry(2048, 8192, gather={"ring_exchange": 1.2}),
    ]
    bulk = "dgrad", ("bulk",)
    assert fastest(*bulk, BIG) == fastest(*bulk, BIG._replace(tokens=4096)) == ("bulk", "")
    method, reason = fastest(*bulk, BIG._replace(tokens=2048))
    assert not method and "plain was measured faster, of 2048 x 8192" in reason
    assert fastest("sum", ("pipeline",), BIG) == ("", reason)  # by the nearest in which anything loses
    del table[2]
    assert fastest("sum", ("pipeline",), BIG) == ("pipeline", "")


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize(("tokens", "width", "ranks"), [(2048, 8192, 2), (4096, 4096, 2), (8192, 8192, 4)])
def test_what_ships_runs_plain_where_rings_lost(tokens: int, width: int, ranks: int, recipe: str) -> None:
    """All of a step, so that it is the plain one."""
    call = Call("peer memory", ranks, recipe, tokens, width)
    for asked in (("gather", ("ring_exchange",)), ("sum", ("pipeline", "ring_exchange")), ("dgrad", ("bulk",))):
        assert fastest(*asked, call)[0] == ""


def test_a_call_goes_by_it(table: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has chosen; what was chosen is done as asked."""
    monkeypatch.setattr(overlap_choice, "MEASURED", "cpu")
    asked = Way("ring_exchange", chosen=False), Way("bulk", chosen=False), Way("bulk", chosen=False)
    table.append(entry(256, 256, gather={"ring_exchange": 1.1}, dgrad={"bulk": 0.9, "ring_exchange": 0.8}))
    case = case_of("column", None, 2, Overlap("fc1", *asked, ROOM))
    _, logs = stepped(case, PeerRanks(2))
    ran = case.spec.parallel.ran  # type: ignore[union-attr]
    assert ran["fprop"].startswith("not overlapped by ring_exchange: plain was measured faster, of 256 x 256")
    assert ran["dgrad"].startswith("overlapped by bulk") and ran["wgrad"].startswith("overlapped by bulk")
    assert [name for name, _ in logs[0]] == ["all_gather", "pull", "push"]
    case = case_of("column", None, 2, Overlap("fc1", Way("ring_exchange"), *asked[1:], ROOM))
    stepped(case, PeerRanks(2))
    assert case.spec.parallel.ran["fprop"].startswith("overlapped by ring_exchange")  # type: ignore[union-attr]


def test_a_record_fills_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads(RECORD.read_text())
    rows = [
        {
            "case": "512 tokens, hidden 256, tp 4",
            "recipe": "bf16",
            "method": method,
            "of_plain": ratio,
            "carrier": "peer memory",
        }
        for method, ratio in (("rings", 0.9), ("sums by ring_exchange", 0.95), ("rings, bulk", 0.85), ("default", 0.1))
    ]
    new = tmp_path / "new.json"
    new.write_text(json.dumps({**record, "rows": rows}))
    monkeypatch.setattr(overlap_table, "TABLE", tmp_path / "table.json")
    (tmp_path / "table.json").write_text(json.dumps({"comment": "a", "measured": [entry(1, 1, ranks=4)]}))
    assert overlap_table.main([str(RECORD), str(new)]) == 0
    *others, added = json.loads((tmp_path / "table.json").read_text())["measured"]
    assert {e["carrier"] for e in others} == {"nccl"}
    assert added == {
        **entry(512, 256, ranks=4),
        "device": "NVIDIA H200",
        "of_plain": {
            "gather": {"ring_exchange": 0.85},
            "sum": {"ring_exchange": 0.85},  # with the others, though not so fast by itself
            "dgrad": {"ring_exchange": 0.9, "bulk": 0.85},
        },
    }


def test_the_table_that_ships_is_that_of_the_record() -> None:
    shipped = json.loads(overlap_table.TABLE.read_text())["measured"]
    assert shipped == [
        e for file in (RECORD, BY_PEER_MEMORY, OVER_FOUR) for e in overlap_table.entries(json.loads(file.read_text()))
    ]
