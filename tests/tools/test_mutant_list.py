"""The listed faults still fit the sources, and the engine tells caught, survived and unjudgeable apart."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.tools.light_pytest import Light
from tools.mutants import Mutant, judge, load

ROOT = Path(__file__).resolve().parents[2]


def test_listed_faults_can_be_applied() -> None:
    """That a fault no longer fits its source, or its tests are gone, shows here, and not only in `make mutants`."""
    wrong = {mutant.name: why for mutant in load() if (why := misfit(mutant))}
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


text_of = cache(Path.read_text)


def misfit(mutant: Mutant) -> str:
    """Why a fault cannot be applied and judged; nothing if it can."""
    found = text_of(ROOT / mutant.file).count(mutant.old)
    named = [argument.partition("[")[0].split("::") for argument in mutant.tests if "/" in argument]
    if found != 1:
        return f"its text stands {found} times in {mutant.file}"
    if mutant.new == mutant.old or not mutant.breaks or not named:
        return "it changes nothing, does not say what it breaks, or names no test"
    gone = [
        f"{file}::{part}"
        for file, *parts in named
        for part in parts
        if f"def {part}(" not in text_of(ROOT / file) and f"class {part}" not in text_of(ROOT / file)
    ]
    return f"there are no tests {', '.join(gone)}" if gone else ""


def test_engine_judges_each_kind(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text("def half(x):\n    return x / 2\n\n\ndef odd(x):\n    return x % 2 == 1\n")
    (tmp_path / "test_sums.py").write_text("from sums import half\n\ndef test_half():\n    assert half(8) == 4\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')

    warm = Light()

    def verdict(old: str, new: str) -> str:
        before = (tmp_path / "sums.py").read_text()
        found = judge(Mutant("name", "what", "sums.py", old, new, ("test_sums.py",)), tmp_path, warm)
        assert (tmp_path / "sums.py").read_text() == before
        return f"{found.state} {found.detail}"

    assert verdict("x / 2", "x / 4") == "caught test_sums.py::test_half"
    assert verdict("== 1", "!= 1").startswith("survived")
    assert "0 times" in verdict("x // 2", "x")
    assert "2 times" in verdict("def", "async def")
    assert verdict("def half(x):", "def half(x:").startswith("error pytest ended with")
    assert "signal" in verdict("return x / 2", "import os; os.kill(os.getpid(), 9)")
    skipped = "import pytest\n\ndef test_half():\n    pytest.skip('not here')\n"
    (tmp_path / "test_sums.py").write_text(skipped)  # a fault that no test looked at has not survived
    assert verdict("== 1", "!= 1").startswith("error")
    warm.close()
