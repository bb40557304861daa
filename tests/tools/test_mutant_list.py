"""The listed faults still fit the sources, and the engine tells caught, survived and unjudgeable apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutants import Mutant, judge, load

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", load(), ids=lambda mutant: mutant.name)
def test_listed_fault_can_be_applied(mutant: Mutant) -> None:
    """`make mutants` takes minutes; that a fault no longer fits its source shows here."""
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old and mutant.breaks
    named = [argument.partition("[")[0].split("::") for argument in mutant.tests if "/" in argument]
    assert named
    for file, *parts in named:
        text = (ROOT / file).read_text()
        missing = [part for part in parts if f"def {part}(" not in text and f"class {part}" not in text]
        assert not missing, f"{file} has no {missing}"


def test_engine_judges_each_kind(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text("def half(x):\n    return x / 2\n\n\ndef odd(x):\n    return x % 2 == 1\n")
    (tmp_path / "test_sums.py").write_text("from sums import half\n\ndef test_half():\n    assert half(8) == 4\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')

    def verdict(old: str, new: str) -> str:
        before = (tmp_path / "sums.py").read_text()
        found = judge(Mutant("name", "what", "sums.py", old, new, ("test_sums.py",)), tmp_path)
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
