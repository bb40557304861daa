"""What `make check` draws from the sources: every module is counted once, and a circle that is not listed is told."""

from __future__ import annotations

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
