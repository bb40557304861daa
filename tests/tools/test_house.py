"""What `make check` draws from the sources: every module is counted once, and a circle that is not listed is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import house


def test_every_module_is_counted_once() -> None:
    files, lines = (sum(row[i] for row in house.rows()) for i in (2, 3))
    assert files == len(house.sources()) and lines == house.lines(*house.sources().values())
    assert [row[0] for row in house.rows() if row[0] not in house.ORDER] == []


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("te_core", "te_core"),
        ("te_core.tensor", "te_core"),
        ("te_core.layers", "te_core.layers"),
        ("te_core.backends.cuda.gemm", "te_core.backends"),
    ],
)
def test_packages(module: str, package: str) -> None:
    assert module in house.sources() and house.package(module) == package


def test_the_table_shows_what_is_watched() -> None:
    shown = "\n".join(house.table())
    for part in ("te_core.layers", "te_torch.attention", *house.PARTS, "CUDA of the kernels", "longest"):
        assert part in shown


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d", "a"}, "e": set()}
    assert house.circles_of(graph) == {("b", "c"), ("d",)}


def test_a_circle_that_is_not_listed_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert house.main() == 0
    here = sorted(house.CIRCLES)[0]
    monkeypatch.setattr(house, "CIRCLES", {("gone", "long ago")})
    assert house.main() == 1
    shown = capsys.readouterr().out
    assert f"circle: {' - '.join(here)}, which is not listed" in shown and "gone - long ago is listed and not" in shown


def test_a_package_keeps_to_its_budget() -> None:
    allowed = {"a": (1000, ""), "b": (1000, "a new format")}
    for counts, good, said in (
        ({"a": 1000, "b": 1000 - house.SLACK}, True, "a: 1000 lines of 1000"),
        ({"a": 1001}, False, "make it smaller, or .*renew --because REASON"),
        ({"b": 700}, False, "renew to keep what was won"),
        ({"c": 1}, False, "c: 1 lines of 0"),
    ):
        text, kept = house.spent(counts, allowed)
        assert kept is good and re.search(said, "\n".join(text))


def test_a_budget_falls_by_itself_and_rises_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(house, "BUDGET", tmp_path / "budget.toml")
    before = {"a": (1000, ""), "b": (1000, "a new format")}
    house.BUDGET.write_text(house.renewed({"a": 900, "b": 900, "c": 5}, before, ""))
    assert house.budget() == {"a": (900, ""), "b": (900, "a new format"), "c": (5, "")}
    with pytest.raises(SystemExit, match="b has 50 lines more"):
        house.renewed({"a": 1, "b": 950}, house.budget(), "")
    house.BUDGET.write_text(house.renewed({"a": 901, "b": 800}, house.budget(), "an option"))
    assert house.budget() == {"a": (901, "an option"), "b": (800, "a new format")}


def test_where_operations_and_options_are_named() -> None:
    assert {"rank_sum", "kv_gather", "attention_forward"} <= set(house.operations())
    assert {"zero_centered_gamma", "softmax_type"} <= set(house.options())
    shown = "\n".join(house.spread())
    assert re.search(r"rank_sum +[45] +\d", shown) and re.search(r"zero_centered_gamma +\d", shown)
