"""The command `te` as tests run it, in a folder with a program of a user."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from te_cli import main

PROGRAM = """
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
def layer():
    return torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32)), torch.randn(16, 32, requires_grad=True)
def no_layer():
    return torch.nn.Sequential(torch.nn.Tanh()), torch.randn(16, 32)
def alone():
    return torch.nn.Linear(32, 32)
def attention():
    layers = torch.nn.ModuleList(te.TransformerLayer(32, 32, 2, device="cpu") for _ in range(2))
    for layer in layers:
        layer(torch.randn(8, 1, 32))
    return layers
"""


class Ended(NamedTuple):
    """How a command ended, and what it said."""

    code: Any
    out: str
    err: str


Te = Callable[..., Ended]


@pytest.fixture
def te(capsys: pytest.CaptureFixture[str]) -> Te:
    """Runs the command with these words."""

    def run(*words: str) -> Ended:
        try:
            code: Any = main.main([*words])
        except SystemExit as ended:
            code = ended.code
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's program, beside which the command is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # that of the test before
    (tmp_path / "mine.py").write_text(PROGRAM)
    return tmp_path / "mine.py"
