"""What the documents say holds: links lead somewhere, examples run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs import dead_links, pages, run_examples

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page(page: Path) -> None:
    text = page.read_text()
    assert not dead_links(page, text)
    assert run_examples(text) is None
