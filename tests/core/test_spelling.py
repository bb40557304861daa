"""Which name was meant: one answer for modules of ours, options, recipes and environment variables."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from te_core.errors import ArgumentError
from te_core.spelling import meant, name_error, nearest, unknown_name
from tools.house import sources

ROOT = Path(__file__).resolve().parents[2]


def test_the_nearest_name() -> None:
    known = ["LayerNorm", "LayerNormLinear", "RMSNorm", "amax_history_len"]
    assert nearest("layernorm", known) == "LayerNorm" and nearest("rmsnorm", known) == "RMSNorm"
    assert nearest("amax_history", known) == "amax_history_len" and nearest("colour", known) == ""
    assert nearest("LayerNormLinaer", known) == "LayerNormLinear" and nearest("LayerNorms", known, 0.99) == ""
    assert meant(["rmsnorm", "colour", "RMSNorms"], known) == " (did you mean RMSNorm?)" and meant(["x"], known) == ""


def test_the_error_for_unknown_keywords() -> None:
    error = name_error("f", {"hight": 3, "x": None}, ["width", "height"])
    assert isinstance(error, TypeError) and isinstance(error, ArgumentError)
    assert str(error) == (
        "f: got hight=3, x=None (did you mean height?). Allowed: width, height. "
        "To do: correct the name, or leave it out."
    )


#: Module -> a name that it does not have, and the one that was meant.
NAMES = {
    "te_core": ("Runtme", "Runtime"),
    "te_core.recipe": ("DelayedScalng", "DelayedScaling"),
    "te_torch": ("layernorm_linear", "LayerNormLinear"),
    "te_torch.recipe": ("MXFP8Scaling", "MXFP8BlockScaling"),
    "te_torch.utils": ("devide", "divide"),
}


@pytest.mark.parametrize("module", NAMES)
def test_unknown_names_of_modules(module: str) -> None:
    name, near = NAMES[module]
    if module.startswith("te_torch"):
        pytest.importorskip("torch")
    there = importlib.import_module(module)
    with pytest.raises(AttributeError, match=f"^module '{module}' has no attribute '{name}' .did you mean {near}.*$"):
        getattr(there, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from '{module}' .did you mean {near}") as error:
        exec(f"from {module} import {name}")
    assert type(error.value) is ImportError and error.value.name == module
    assert not hasattr(there, "__nothing_like_it__") and not hasattr(there, "colour_of_money")
    with pytest.raises(ImportError, match="cannot import name 'colour_of_money'"):
        exec(f"from {module} import colour_of_money")


def test_python_does_not_say_it_again() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import te_core; te_core.Runtme"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert ran.returncode == 1 and ran.stderr.lower().count("did you mean") == 1, ran.stderr


def test_rooms_are_imported_without_a_look_at_names() -> None:
    """`from package import room` asks for the attribute first: that is no mistake, and costs no comparison."""
    code = (
        "import sys; from te_core import cache, statistics; from te_core.recipe import DelayedScaling as D; D();"
        "print('difflib' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ran.stdout.split() == ["False"], ran.stderr


def test_a_room_that_is_being_imported_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a circle the room is in sys.modules, but no attribute yet: Python takes it from there after this error."""
    monkeypatch.setitem(sys.modules, "te_core.Runtme", sys)
    assert isinstance(unknown_name("te_core", "Runtme", sys._getframe()), AttributeError)
    exec("from te_core import Runtme; assert Runtme.__name__ == 'sys'")


def texts(path: Path) -> list[str]:
    """The texts in a file that are no docstrings."""
    tree = ast.parse(path.read_text())
    told = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in told
    ]


def test_no_message_names_a_file_that_a_wheel_does_not_hold() -> None:
    folders = [f"{folder}/" for folder in ("docs", "examples", "tests", "tools", "benchmarks")]
    wrong = {
        f"{module}: {text}"
        for module, path in sources().items()
        for text in texts(path)
        if any(text.startswith(folder) or f" {folder}" in text for folder in folders) or "README" in text
    }
    assert not wrong
