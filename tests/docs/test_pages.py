"""What the documents say holds: links lead somewhere, examples run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends import more_without_gpu, requires_cuda
from tools.docs import dead_links, needs_gpu, pages, run_examples

ROOT = Path(__file__).resolve().parents[2]
WITH_GPU = [page for page in pages() if needs_gpu(page.read_text())]


@more_without_gpu  # `make check` runs them, too
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page(page: Path) -> None:
    text = page.read_text()
    assert not dead_links(page, text)
    assert run_examples(text) is None


@requires_cuda
@pytest.mark.parametrize("page", WITH_GPU, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_that_need_a_gpu(page: Path) -> None:
    """Among the others of their page, whose names they read."""
    assert run_examples(page.read_text(), gpu=True) is None


def test_pages_with_examples_that_need_a_gpu() -> None:
    """A reason that says so in other words would not be found, and the example never run."""
    assert {page.name for page in WITH_GPU} == {"attention.md", "training.md"}
    others = [line for page in pages() for line in page.read_text().splitlines() if line.startswith("<!-- not run")]
    assert not [line for line in others if "GPU" in line and line != "<!-- not run: it needs a GPU -->"]
