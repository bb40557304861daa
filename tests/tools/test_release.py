"""What a release says of itself: its version stands once, its README needs no repository, faults end its tools."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import te_core
from tools import release, wheels

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_stands_in_one_place() -> None:
    """Of documents, those that name a file of the wheel name the one that is built now."""
    assert wheels.version() == te_core.__version__
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first and first[1] == wheels.version()
    for page in (ROOT / "docs").glob("guides/*.md"):
        assert set(re.findall(r"te_runtime-(.+?)-py3", page.read_text())) <= {wheels.version()}, page


TEXT = "see [the\n  guide](docs/guides/01-install.md), [a site](https://example.org) and [below](#install); a[0](x)"


def test_links_of_the_readme() -> None:
    """Without a repository only words stay; with one, links lead to this version there."""
    assert wheels.linked(TEXT, "") == "see the\n  guide, [a site](https://example.org) and [below](#install); a0"
    led = wheels.linked("[guide](docs/a.md#b)", "https://example.org/te/")
    assert led == f"[guide](https://example.org/te/blob/v{wheels.version()}/docs/a.md#b)"
    readme = (ROOT / "README.md").read_text()
    assert "](docs/" in readme and "](docs/" not in wheels.linked(readme, "")


def test_a_copy_names_the_repository_where_there_is_one() -> None:
    with wheels.sources("https://example.org/te") as tree:
        project = (tree / "pyproject.toml").read_text()
        assert 'Repository = "https://example.org/te"' in project and "/blob/v" in (tree / "README.md").read_text()
    with wheels.sources() as tree:
        assert "[project.urls]" not in (tree / "pyproject.toml").read_text()
        assert not [path for path in tree.rglob("*") if path.name in ("__pycache__", "build")]


def test_the_quick_start_has_the_examples_of_the_readme() -> None:
    steps = release.quick_start((ROOT / "README.md").read_text(), ["--steps", "3"])
    assert (
        "te.autocast(recipe=DelayedScaling())" in steps["examples"][1] and "functional.linear" in steps["examples"][1]
    )
    assert steps["train"][-3:] == ["train", "--steps", "3"]


def test_a_step_that_fails_ends_the_check(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"ended with 3:\nwhat it said"):
        release.run(sys.executable, "-c", "print('what it said'); raise SystemExit(3)", folder=tmp_path)


def test_wheels_of_two_versions_are_no_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in ("0.1", "0.2"):
        (tmp_path / f"te_runtime-{version}-py3-none-any.whl").touch()
    with pytest.raises(SystemExit):
        release.main([str(tmp_path)])
    assert "2 wheels" in capsys.readouterr().err
