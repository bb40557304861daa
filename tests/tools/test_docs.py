"""The tool that keeps documents true: a check writes nothing and tells each kind of fault."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import docs

PAGE = """# A page

[there](page.md), [here](#a-page), [its `second` part](page.md#the-second-part-of-2-1){link}

## The `second` part (of [2](page.md))

## The second part of 2

<!-- output of: python -c "print('new')" -->
{text}
<!-- end of output -->

<!-- output of: python -c "print(6 * 7)" -->
42
<!-- end of output -->

```python
{code}
```
"""
RIGHT = {"link": "", "text": "new", "code": "assert True"}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "pages", lambda: [tmp_path / "page.md"])
    return tmp_path / "page.md"


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["docs", *options])
    return docs.main()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({}, None),
        ({"text": "old"}, "out of date"),
        ({"link": " [gone](nowhere.md)"}, "nowhere.md"),
        ({"link": " [gone](page.md#a-part)"}, "page.md#a-part"),
        ({"link": " [gone](#the-other-part)"}, "#the-other-part"),
        ({"code": "assert False"}, "AssertionError"),
    ],
)
def test_check(
    fault: dict[str, str], told: str | None, page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    page.write_text(before := PAGE.format(**RIGHT | fault))
    assert run(monkeypatch, "--check") == (told is not None)
    assert (told or "docs: ok") in capsys.readouterr().out
    assert run(monkeypatch, "--check", "--no-examples") == (told is not None and "code" not in fault)
    assert page.read_text() == before


def test_generated_text_is_made_anew(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page.write_text(PAGE.format(**RIGHT | {"text": "old\nlines"}))
    assert run(monkeypatch) == 0
    assert page.read_text() == PAGE.format(**RIGHT)


LOOSE = """<!-- output, in figures of one processor, of: python -c "print('{made}')" -->
{text}
<!-- end of output -->
"""


@pytest.mark.parametrize(
    ("made", "stays"),
    [("sum   184 %", True), ("sum -- 2.7e-05 %", True), ("sums 173 %", False), ("sum 173 % 1", False)],
)
def test_figures_of_another_processor_are_no_change(
    made: str, stays: bool, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.write_text(before := LOOSE.format(made=made, text="sum 173 %"))
    assert run(monkeypatch, "--check") == (not stays)
    assert run(monkeypatch) == 0
    assert page.read_text() == (before if stays else LOOSE.format(made=made, text=made))


def test_examples_for_a_gpu_are_run_where_one_is_said_to_be() -> None:
    text = "```python\na = 1\n```\n\n<!-- not run: it needs a GPU -->\n```python\nassert a == 2\n```\n"
    other = text.replace("it needs a GPU", "for another reason")
    assert docs.needs_gpu(text) and not docs.needs_gpu(other)
    assert docs.run_examples(text) is None and docs.run_examples(other, gpu=True) is None
    assert "AssertionError" in (docs.run_examples(text, gpu=True) or "")
