"""The site: what its checks find, and that the pages of the reference hold every public name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.test_docstrings import PACKAGES
from tools import surface
from tools.website import checks, reference, sources
from tools.website.docstrings import restructured


@pytest.mark.parametrize(
    ("link", "dead"),
    [
        ('<a href="b.html#here">', False),
        ('<a href="#top">', False),
        ('<a href="https://example.org/no.html">', False),
        ('<img src="p.png">', False),
        ('<a href="no.html">', True),
        ('<a href="b.html#gone">', True),
        ('<a href="#gone">', True),
        ('<img src="gone.png">', True),
    ],
)
def test_dead_links_of_a_site(link: str, dead: bool, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(f'<h1 id="top">A</h1>{link}')
    (tmp_path / "b.html").write_text('<dt id="here">B</dt>')
    (tmp_path / "p.png").touch()
    assert [link.split('"')[1] in told for told in checks.dead_links(tmp_path)] == [True] * dead


def test_every_public_name_is_on_a_page() -> None:
    found = reference.values()
    pages: dict[str, set[str]] = {}
    for page, names in found.items():
        pages.setdefault(reference.PAGES[page].module, set()).update(names)
    assert {*PACKAGES, *surface.FACES} <= pages.keys()
    for module in pages:
        assert reference.public(__import__(module, fromlist=["_"])).keys() == pages[module]


def test_a_name_without_description_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reference, "values", lambda: {"te_core": {"Cast": checks.dead_links}})
    monkeypatch.setattr(checks, "described", lambda folder: {"te_core.h", "te_forward"})
    told = set(checks.undescribed(tmp_path))
    assert "the reference does not describe te_core.Cast" in told
    assert "the reference does not describe te_backward" in told
    assert "the reference does not describe te_forward" not in told


def test_navigation_is_that_of_the_guides() -> None:
    groups = sources.navigation()
    entries = [entry.partition(" <")[2].rstrip(">") or entry for entries in groups.values() for entry in entries]
    there = {page.relative_to(sources.ROOT).with_suffix("").as_posix() for page in sources.documents()}
    assert sorted(entries) == sorted(there - {"README"})
    text = "| Start | |\n|---|---|\n| [Install](01-install.md) | all |\n\n"
    text += "| Train | |\n|---|---|\n| [Ranks](02.md) | all |\n"
    assert sources.guides(text, ["01-install.md", "02.md", "README.md"]) == {
        "Start": ["Install <docs/guides/01-install>"],
        "Train": ["Ranks <docs/guides/02>"],
    }
    with pytest.raises(ValueError, match=r"no table has 03\.md"):
        sources.guides(text, ["01-install.md", "02.md", "03.md"])


def test_docstrings_become_markup() -> None:
    said = [
        "y_ = x * `w_` of `x`s.", "", "  a table |", "", "Args:", "    *given: One,", "        or `two`.",
        "    n: A | b.", "", "Raises:", "    ArgumentError: Wrong.", "", "Example:", "    x = 1",
    ]  # fmt: skip
    assert [line for line in restructured(said) if line] == [
        r"y\_ = x \* \ ``w_``\  of \ ``x``\ s.", "::", "     a table |", r":param \*given: One, or \ ``two``\ .",
        r":param n: A \| b.", ":raises ArgumentError: Wrong.", "**Example**", ".. code-block:: python", "    x = 1",
    ]  # fmt: skip
