"""`te report` and `te warmup`: reports of a step, mistakes without a traceback of ours, exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from te_cli import main

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


ATTENTION = """
import torch
import te_torch as te
model = torch.nn.ModuleList(te.TransformerLayer(32, 32, 2, device="cpu") for _ in range(2))
def step():
    for layer in model:
        layer(torch.randn(8, 1, 32))
    return model
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
    assert main.main(["report", f"{place}:step"]) == 0
    said = capsys.readouterr().out
    assert "float8_e4m3 per tensor x float8_e4m3 per tensor" in said and "saved for backward" in said
    assert main.main(["report", f"{place}:step", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"precision", "memory", "attention"} and found["precision"] and found["memory"]


def test_a_warmup_runs_the_step_twice(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["warmup", "my_steps:step", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = found["seconds"]
    assert not found["on disk"]  # of a model on the CPU
    assert len(seconds) == len(sys.modules["my_steps"].calls) == 2 and min(seconds) > 0


@pytest.mark.parametrize(
    "step, said",
    [
        ("my_steps", "write FILE.py:FUNCTION"),
        ("other.py:step", "there is no such file"),
        ("other.steps:step", "no module other here"),
        ("my_steps:stepp", "did you mean step?"),
        ("my_steps:modle", "has no function modle\n"),
        ("my_steps:model", "model of my_steps is no function, but of type int\n"),
    ],
)
def test_a_mistake_in_the_command_ends_it_in_a_line(
    step: str, said: str, train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if ":mod" in step:
        (train / "my_steps.py").write_text("model = 3")
    with pytest.raises(SystemExit) as ended:
        main.main(["report", step])
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("step, said", [("wrong", "To do:"), ("nothing", "a step that returns NoneType")])
def test_an_error_of_ours_is_shown_without_its_way(
    step: str, said: str, train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["report", f"my_steps:{step}"])
    err = capsys.readouterr().err
    assert ended.value.code == 1 and said in err and "Traceback" not in err


@pytest.mark.parametrize("place", ["my_steps.py", "my_steps"])
@pytest.mark.parametrize(
    "text, step", [("def step():\n    return missing_name\n", "step"), ("import missing_name\n", "x")]
)
def test_an_error_of_the_user_is_shown_from_their_lines_on(
    text: str, step: str, place: str, train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (train / "my_steps.py").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main.main(["report", f"{place}:{step}"])
    err = capsys.readouterr().err
    assert ended.value.code == 1 and "missing_name" in err and err.count("  File ") == 1 and "my_steps.py" in err


def test_a_report_says_why_attention_runs_as_it_does(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers that choose alike stand together."""
    (train / "my_steps.py").write_text(ATTENTION)
    assert main.main(["report", "my_steps:step"]) == 0
    said = capsys.readouterr().out
    assert "attention of 0.self_attention.core_attention, 1.self_attention.core_attention\n" in said
    assert "chosen: FusedAttention" in said and "FlashAttention" in said
    assert main.main(["report", "my_steps:step", "--json"]) == 0
    (attention,) = json.loads(capsys.readouterr().out)["attention"]
    assert len(attention["layers"]) == 2 and attention["backend"] == "FusedAttention" and attention["reasons"]
