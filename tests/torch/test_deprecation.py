"""A deprecated name says what to use and when it goes, to the line that uses it; none is overdue."""

from __future__ import annotations

import ast
import sys
import warnings
from pathlib import Path

import pytest

import te_core
from te_torch.runtime import deprecated

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("te_core", "te_torch", "te_cli", "bindings/jax/te_jax")


def older() -> None:
    deprecated("older", "newer", 1, "0.4.0")


def _noted() -> None:
    deprecated("a name of the peer's", "ours", 2)


def other() -> None:
    _noted()


def test_what_is_said_and_where() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        older()
        line = sys._getframe().f_lineno
        other()
    assert [str(one.message) for one in seen] == [
        "older is deprecated: use newer; te-runtime 0.4.0 will not have it",
        "a name of the peer's is deprecated: use ours",
    ]
    assert all(one.category is DeprecationWarning and one.filename == __file__ for one in seen)
    assert [one.lineno for one in seen] == [line - 1, line + 1]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def ends(text: str) -> list[tuple[int, str]]:
    """(line, version in which the name goes) of each call of `deprecated` that says one."""
    if "deprecated(" not in text:  # to parse all sources takes seconds
        return []
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    ours = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "deprecated"]
    return [(call.lineno, ast.literal_eval(value)) for call in ours for value in call.args[3:]]


def test_ends_are_read() -> None:
    assert ends("deprecated('a', 'b')\ndeprecated('a', 'b', 2)\ndeprecated('a', 'b', 1, '1.3')") == [(3, "1.3")]


def test_no_name_is_overdue() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    overdue = [
        f"{path.relative_to(ROOT)}:{line} goes with {version}, and this is {te_core.__version__}"
        for path in files
        for line, version in ends(path.read_text())
        if numbers(version) <= numbers(te_core.__version__)
    ]
    assert len(files) > 300 and not overdue, overdue


def test_a_module_warns_where_it_is_used() -> None:
    import te_torch as te

    layer = te.LayerNormLinear(16, 16, device="cpu")
    with pytest.warns(DeprecationWarning, match="use reset_parameters") as seen:
        layer.reset_layer_norm_parameters()
    assert seen[0].filename == __file__
