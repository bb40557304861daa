"""Named faults fit the sources and are judged; operators make others, of which a sample is judged."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path

import pytest

from tests.tools.light_pytest import Light
from tools import mutants, touched
from tools.mutants import LIST, Mutant, judge, load, renewed
from tools.mutations import changes
from tools.mutations_c import c_changes

ROOT = Path(__file__).resolve().parents[2]


def test_listed_faults_can_be_applied() -> None:
    """That a fault no longer fits its source, or its tests are gone, shows here, and not only in `make mutants`."""
    wrong = {mutant.name: why for mutant in load() if (why := misfit(mutant))}
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


def test_the_list_is_as_it_is_written() -> None:
    """Sorted and wrapped; else `tools/mutants.py --write` makes it so. What it writes it reads."""
    assert LIST.read_text() == renewed()


text_of = cache(Path.read_text)


def misfit(mutant: Mutant) -> str:
    """Why a fault cannot be applied and judged; nothing if it can."""
    found = text_of(ROOT / mutant.file).count(mutant.old)
    named = [argument.partition("[")[0].split("::") for argument in mutant.tests if "/" in argument]
    if found != 1:
        return f"its text stands {found} times in {mutant.file}"
    if mutant.new == mutant.old or not named:
        return "it changes nothing, or names no test"
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


CODE = '''
def scaled(x: str | None, scale, *, grad=True):
    """A text stays."""
    if grad and scale is not None:
        x = x * scale
    for part in x[1:]:
        part.add_(1, alpha=scale)
    return (x, scale) if grad else x[0]


def same(x, spec, first_scale, last_scale):
    with quiet():
        y = spec.forward_margin
        y += first_scale
    try:
        span(x, y)
    except (ValueError, KeyError):
        x = kind["row"] or kind["column"]
    finally:
        leave()
    return x[y:9], last_scale
'''
C_CODE = """
// a note; stays
#define SIDE 128
__global__ void scaled(const float* in, float* out, int rows, int cols) {
    if (rows < 2 && cols) return;
    const float scale = rows ? in[cols + 4] : 1.f;
    store(out, cols);
    out[cols] -= scale * in[rows];
}
"""
MADE = {
    "always": "if True:",
    "never": "if False:",
    "operand left out": "if (scale is not None):",
    "and for or": "if (grad or (scale is not None)):",
    "comparison": "grad and scale is None:",
    "sum or product": "x = (x / scale)",
    "term left out": "x = scale\n",
    "statement left out": "        pass\n    for",
    "no iteration": "for part in ():",
    "last missing": "for part in list(x[1:])[:-1]:",
    "slice left out": "for part in x:",
    "number": "x[2:]",
    "call left out": "        1\n    return",
    "method left out": "        part\n    return",
    "argument None": "alpha=None",
    "argument left out": "add_(1, )",
    "argument 0": "alpha=0",
    "element left out": "return (scale) if",
    "result True": "leave()\n    return True",
    "context left out": "with __import__('contextlib').nullcontext():",
    "argument False": "alpha=False",
    "argument twice": "span(y, y)",
    "condition turned": "if not (grad and",
    "choices exchanged": "return (x[0] if grad else ((x, scale)))",
    "statements exchanged": "        y += first_scale\n        y = spec.forward_margin\n",
    "two statements left out": "quiet():\n        pass\n    try",
    "block alone": "\n    y = spec.forward_margin\n    y += first_scale\n",
    "not added": "y = first_scale\n",
    "not caught": "except ():",
    "caught alone": "except KeyError:",
    "not at the end": "finally:\n        pass",
    "from zero": "span(0, y - x)",
    "other name": "y += last_scale",
    "other attribute": "y = spec.backward_margin",
    "other text": "kind['column'] or kind",
    "slice's begin left out": "return x[:9], last",
    "slice's end left out": "return x[y:], last",
    "bound shifted": "return x[y - 1:9], last",
    "value None": "y = None\n",
    "first alone": "return (x[y:9], last_scale)[:1]",
    "tail left out": "span(x[:-1], y)",
    "other order": "return (scale, x) if",
    "element None": "return (x, None) if",
    "one choice": "return ((x, scale))",
    "other choice": "    return x[0]",
    "result None": "leave()\n    return None",
    "flag": "grad=False):",
}


@pytest.mark.parametrize("operator", MADE)
def test_what_an_operator_makes(operator: str) -> None:
    made = [change.applied(CODE) for change in changes(CODE) if change.operator == operator]
    assert [text for text in made if MADE[operator] in text], made


C_MADE = {
    "always": "if (1) return;",
    "never": "if (0) return;",
    "statement left out": "    \n    const float",
    "term left out": "if ( cols) return",
    "decided": "out[cols] -= 1;",
    "comparison": "rows <= 2",
    "one choice": "scale = in[cols + 4];",
    "other choice": "scale = 1.f;",
    "choices exchanged": "rows ? 1.f : in[cols + 4];",
    "index": "out[(cols) - 1]",
    "other order": "store(cols, out)",
    "argument": "store(out, out)",
    "call left out": "    out;\n",
    "number": "cols + 3",
    "sum or product": "scale / in[rows]",
    "other name": "= scale * in[cols]",
    "not added": "out[cols] = scale",
}


@pytest.mark.parametrize("operator", C_MADE)
def test_what_an_operator_makes_of_a_kernel(operator: str) -> None:
    made = [change.applied(C_CODE) for change in c_changes(C_CODE) if change.operator == operator]
    assert [text for text in made if C_MADE[operator] in text], made
    assert all("// a note; stays\n#define SIDE 128\n" in text for text in made)


def test_types_are_left_alone() -> None:
    assert all("x: str | None" in change.applied(CODE) for change in changes(CODE))


def test_each_change_is_one_that_python_reads() -> None:
    for file in ("tools/touched.py", "te_core/layers/linear.py"):
        text = Path(file).read_text()
        for change in changes(text)[::200]:
            ast.parse(change.applied(text))


def test_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed draws the same faults, of functions that cases enter, and each is shown to the nearest ones."""
    (tmp_path / "te_core").mkdir()
    (tmp_path / "te_core/code.py").write_text(CODE + "\n\ndef never(x):\n    return x + 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="make quick-map"):
        mutants.sample(5, 1, ["te_core/"])
    touched.FOLDER.mkdir(parents=True)
    cases = [(n, 0.1, f"tests/test_code.py::test_it[{n}]") for n in range(9, 0, -1)]
    (touched.FOLDER / "main.json").write_text(json.dumps({"te_core/code.py:scaled": cases}))
    drawn = mutants.sample(12, 1, ["te_core/"])
    assert drawn == mutants.sample(12, 1, ["te_core/"]) != mutants.sample(12, 2, ["te_core/"])
    assert drawn and all("x + 1" in mutant.new and mutant.new != mutant.old for mutant in drawn)
    assert {mutant.tests for mutant in drawn} == {tuple(f"tests/test_code.py::test_it[{n}]" for n in range(1, 7))}

    def judged(chosen: list[mutants.Mutant], jobs: int, keep: object) -> dict[str, mutants.Verdict]:
        return {m.name: mutants.Verdict("survived" if i == 0 else "caught", "") for i, m in enumerate(chosen)}

    monkeypatch.setattr(mutants, "judge_all", judged)
    assert mutants.judge_sample(drawn, 1) == 0
    said = capsys.readouterr().out
    assert drawn[0].breaks in said and "caught" in said.splitlines()[-1]
