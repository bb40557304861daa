"""Messages: rows of calls with something wrong in them, and the golden file of what they say (tests/messages.txt).

`python -c "from tests.messages import rows; rows.main()"` writes the file anew, as `make docs` does.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "messages.txt"
HEAD = """\
# What wrong calls say, row by row: the call, the error's class with the built-in ones that it derives from, the text.
# The rows stand in tests/messages/; `make docs` writes this file, and tests/messages/test_messages.py compares it.
"""
#: The areas, and the package without which an area says nothing. Its rows stand in core.py and core_*.py, and so on.
AREAS = {"core": "numpy", "torch": "torch", "parallel": "torch", "debug": "torch", "jax": "jax"}
WIDTH = 120


class Rows(dict[str, Callable[[], Any]]):
    """Calls by their names. A name that is given twice is an error."""

    def __setitem__(self, name: str, call: Callable[[], Any]) -> None:
        if name in self:
            raise ValueError(f"two rows are named {name!r}")
        super().__setitem__(name, call)

    def add(self, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        """A row that is named as its call is written: `Linear(32, 48, parallel_mode='both')`."""
        given = [*map(shown, args), *(f"{name}={shown(value)}" for name, value in options.items())]
        self[f"{shown(call)}({', '.join(given)})"] = lambda: call(*args, **options)

    def each(self, call: Callable[..., Any], *args: Any, **options: tuple[Any, ...]) -> None:
        """A row for each value of each option, with these arguments before it."""
        for name, values in options.items():
            for value in values:
                self.add(call, *args, **{name: value})


def shown(value: Any) -> str:
    """A value in the name of a row."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        parts = ", ".join(map(shown, value))
        return f"[{parts}]" if isinstance(value, list) else f"({parts}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{shown(key)}: {shown(part)}" for key, part in value.items()) + "}"
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return str(value.__name__)
    if getattr(value, "shape", None) is not None and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return stable(repr(value))


def stable(text: str) -> str:
    """A text without what differs from machine to machine: addresses, paths, versions of other libraries."""
    text = text.replace(str(ROOT), ".")
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\S*?(?=[\s'\",;:]|\.?$|\. )", "TEMP", text)
    text = re.sub(r"\b0x[0-9a-f]{6,}\b", "0xADDRESS", text)
    return re.sub(r"\b(torch|numpy|jax|cuDNN|CUDA|Python|python) \d+\.\d[\w.+]*\b", r"\1 VERSION", text)


def said(call: Callable[[], Any]) -> str:
    """The kinds and the text of the error that a call raises; where it raises none, of what it warns of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            return _as_one(error)
    return "\n".join(_as_one(warning.message) for warning in warned) or "nothing"


def _as_one(error: Any) -> str:
    others = [kind.__name__ for kind in type(error).__mro__[1:] if kind.__module__ == "builtins"]
    kinds = [type(error).__name__, *others[: others.index("Exception")]]
    return f"{', '.join(kinds)}: {stable(str(error))}"


def block(name: str, text: str) -> str:
    """A row as it stands in the golden file."""
    lines = [
        *textwrap.wrap(name, WIDTH, subsequent_indent="  ", break_on_hyphens=False),
        *(
            part
            for line in text.split("\n")
            for part in textwrap.wrap(
                line, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
            )
        ),
    ]
    return "\n".join(lines) + "\n"


def made(area: str) -> list[str]:
    """An area's rows as they are now, sorted by their names."""
    texts = {name: said(call) for name, call in table(area, "ROWS").items()}
    if on_ranks := table(area, "ON_RANKS"):
        texts |= _on_two_ranks(area, on_ranks)
    return [block(name, texts[name]) for name in sorted(texts)]


def table(area: str, name: str) -> Rows:
    """An area's rows: those of all of its files."""
    found = Rows()
    for file in sorted(Path(__file__).parent.glob(f"{area}*.py")):
        if file.stem == area or file.stem.startswith(f"{area}_"):
            for row, call in getattr(importlib.import_module(f"tests.messages.{file.stem}"), name, {}).items():
                found[row] = call
    return found


def _on_two_ranks(area: str, rows: Rows) -> dict[str, str]:
    """What each of two ranks says, or all of them where they say the same."""
    from tests.parallel.ranks import Ranks

    ranks = Ranks(2, "cpu")
    try:
        first, second = ranks.run(_on_rank, area)
    finally:
        ranks.close()
    return {
        name: first[name] if first[name] == second[name] else f"rank 0: {first[name]}\nrank 1: {second[name]}"
        for name in rows
    }


def _on_rank(rank: Any, area: str) -> dict[str, str]:
    return {name: said(lambda call=call: call(rank)) for name, call in table(area, "ON_RANKS").items()}


def golden(area: str) -> list[str]:
    """An area's rows as the golden file has them."""
    text = GOLDEN.read_text() if GOLDEN.is_file() else ""
    found = re.search(rf"^## {area}\n\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return [f"{part.strip(chr(10))}\n" for part in found[1].split("\n\n") if part.strip()] if found else []


def main() -> None:
    """Write the golden file; an area whose package is missing keeps what it had."""
    os.environ.setdefault("TE_CORE_TAPES", "first")  # as the tests run
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parts = [HEAD]
    for area, package in AREAS.items():
        rows = made(area) if find_spec(package) else golden(area)
        if silent := [row for row in rows if row.endswith("\n    nothing\n")]:
            sys.exit("these calls raise nothing and warn of nothing:\n" + "".join(silent))
        parts += [f"\n## {area}\n", *(f"\n{row}" for row in rows)]
    GOLDEN.write_text("".join(parts))
