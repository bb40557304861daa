"""What `make quick` runs beside its fixed fifth: the cases that enter what has changed, as a recording knows them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tools.light_pytest import Light
from tools import touched

CODE = """import math

LIMIT = 3

def inner(x):
    return x

def outer(x):
    return inner(x)

def other(x):
    return math.floor(x)
"""
TESTS = """import threading
import pytest
import code_of_ours as code

@pytest.mark.parametrize("n", [1, 2])
def test_outer(n):
    assert code.outer(n) == n

def test_inner_alone():
    def right():
        return code.inner(1) == 1
    assert right()

def test_other_in_a_thread():
    thread = threading.Thread(target=code.other, args=(1,))
    thread.start()
    thread.join()
"""


def test_what_a_change_touches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, tests, named = tmp_path / "code_of_ours.py", tmp_path / "test_small.py", "test_small.py::{}".format
    code.write_text(CODE)
    tests.write_text(TESTS)
    (tmp_path / ".gitignore").write_text("build\n__pycache__\n")
    monkeypatch.chdir(tmp_path)
    who = ["-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", *words], check=True)

    def picked(text: str, new: str) -> list[str]:
        code.write_text(CODE.replace(text, new))
        assert touched.main(["HEAD"]) == 0
        return capsys.readouterr().out.split()

    assert picked("LIMIT = 3", "LIMIT = 4") == []  # nothing was recorded
    code.write_text(CODE)
    light = Light()
    try:
        done, shown = light.run(tmp_path, ["-q", "-p", "no:cacheprovider", "-p", "tools.touched", "--rootdir=."], 60)
    finally:
        light.close()
    assert done == 0, shown
    assert picked("", "") == []
    assert set(picked("return inner(x)", "return inner(+x)")) == {named("test_outer[1]"), named("test_outer[2]")}
    assert picked("    return x", "    return +x")[0] == named("test_inner_alone")  # it enters the fewest others
    assert picked("math.floor(x)", "math.ceil(x)") == [named("test_other_in_a_thread")]
    assert picked("import math", "import math, sys") == []
    assert set(picked("LIMIT = 3", "LIMIT = 4")) >= {named("test_inner_alone"), named("test_other_in_a_thread")}
    tests.write_text(TESTS.replace("code.inner(1) == 1", "code.inner(2) == 2"))
    (tmp_path / "test_new.py").write_text("def test_new():\n    pass\n")
    assert picked("", "") == ["test_new.py::test_new", named("test_inner_alone")]
    monkeypatch.setattr(touched, "SECONDS", 0.0)
    assert picked("math.floor(x)", "math.ceil(x)")[2:] == []
