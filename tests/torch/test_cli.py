"""The command `te`: reports of a step, mistakes without a traceback, exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from te_torch.tools import cli

STEP = """
import torch
import te_torch as te
from te_core.recipe import Float8CurrentScaling

model = torch.nn.Sequential(te.Linear(32, 32, device="cpu"))
calls = []

def step():
    with te.autocast(recipe=Float8CurrentScaling()):
        model(torch.randn(16, 32)).sum().backward()
    calls.append(1)
    return model

def wrong():
    model(torch.randn(16, 48))

def nothing():
    pass
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)  # that of the test before
    (tmp_path / "my_steps.py").write_text(STEP)
    return tmp_path


@pytest.mark.parametrize("place", ["my_steps.py", "my_steps"])
def test_a_report_says_what_ran(place: str, train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", f"{place}:step"]) == 0
    said = capsys.readouterr().out
    assert "float8_e4m3 per tensor x float8_e4m3 per tensor" in said and "saved for backward" in said
    assert cli.main(["report", f"{place}:step", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"precision", "memory"} and found["precision"] and found["memory"]


def test_a_warmup_runs_the_step_twice(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warmup", "my_steps:step", "--json"]) == 0
    seconds = json.loads(capsys.readouterr().out)["seconds"]
    assert len(seconds) == len(sys.modules["my_steps"].calls) == 2 and min(seconds) > 0


@pytest.mark.parametrize(
    "step, said",
    [
        ("my_steps", "write FILE.py:FUNCTION"),
        ("other.py:step", "there is no such file"),
        ("other.steps:step", "no module other here"),
        ("my_steps:stepp", "did you mean step?"),
        ("my_steps:model", "has no function model"),
    ],
)
def test_a_mistake_in_the_command_ends_it_in_a_line(
    step: str, said: str, train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if step.endswith(":model"):
        (train / "my_steps.py").write_text("model = 3")
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", step])
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("step, said", [("wrong", "To do:"), ("nothing", "a step that returns NoneType")])
def test_an_error_of_ours_is_shown_without_its_way(
    step: str, said: str, train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", f"my_steps:{step}"]) == 1
    assert said in capsys.readouterr().err


def test_doctor_is_that_of_the_core(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--variables"]) == 0
    assert "TE_CORE_CACHE_DIR" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    assert "usage: te doctor" in capsys.readouterr().out
