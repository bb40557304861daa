"""A step that has run before decides nothing anew: nothing on its way words a message that nobody will read, and on
one rank next to nothing asks for others.
"""

from __future__ import annotations

import importlib
import linecache
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.ops import _check
from tests import recipes

HIDDEN = 32
MODULES: dict[str, Any] = {
    "Linear": lambda: te.Linear(HIDDEN, HIDDEN),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, HIDDEN),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu"),
    "GroupedLinear": lambda: te.GroupedLinear(2, HIDDEN, HIDDEN),
    "TransformerLayer": lambda: te.TransformerLayer(HIDDEN, 2 * HIDDEN, 2, hidden_dropout=0.1),
    "RMSNorm": lambda: te.RMSNorm(HIDDEN),
}


@pytest.mark.parametrize("recipe", [None, *recipes.KINDS])
@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_worded(monkeypatch: pytest.MonkeyPatch, name: str, recipe: str | None) -> None:
    module = MODULES[name]().to("cpu")
    x = torch.randn(64, 1, HIDDEN, requires_grad=True)
    given = (x.view(64, HIDDEN), [32, 32]) if name == "GroupedLinear" else (x,)

    def step() -> None:
        with recipes.region(recipe):
            y = module(*given)
        y.sum().backward()

    for _ in range(4):
        step()
    worded: set[str] = set()

    def spy(ok: bool, operation: str, *parts: str) -> None:
        where = sys._getframe(1)
        worded.add(f"{where.f_code.co_filename}:{where.f_lineno} {operation}")

    monkeypatch.setattr(_check, "require", spy)
    for _ in range(8):  # memory that lies otherwise makes another plan, whose arguments are checked
        worded.clear()
        step()
        if not worded:
            return
    raise AssertionError(worded)


def test_the_check_that_is_watched_is_the_one_that_words() -> None:
    """Else the test above would see nothing."""
    operations = importlib.import_module("te_core.ops.rope")
    assert operations._check.require is _check.require


# ---------------------------------------------------------------------------------------------------- one rank

#: A line that looks whether there are ranks, and files that nothing of one rank's step runs.
ASKS, OF_RANKS = re.compile(r"\b(parallel|comm|tp_size)\b"), re.compile(r"/te_\w+/.*(parallel|gathered|communicator)")


def instructions(call: Callable[[], Any]) -> tuple[int, int, set[str]]:
    """(the instructions of Python on such lines, all instructions, the files they are in)."""
    asking = total = 0
    files = set()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal asking, total
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            file = frame.f_code.co_filename
            files.add(file)
            total += 1
            asking += "/te_" in file and bool(ASKS.search(linecache.getline(file, frame.f_lineno or 0)))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return asking, total, files


@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("name", MODULES)
def test_one_rank_asks_for_others_in_passing(name: str, recipe: str | None) -> None:
    """What weights that are spread over ranks cost where there is one: attribute tests, of an FP8 layer's step under a
    hundredth."""
    module = MODULES[name]().to("cpu")
    x = torch.randn(64, 1, HIDDEN, requires_grad=True)
    given = (x.view(64, HIDDEN), [32, 32]) if name == "GroupedLinear" else (x,)

    def step() -> None:
        with recipes.region(recipe):
            y = module(*given)
        y.sum().backward()

    with torch.autograd.set_multithreading_enabled(False):  # backward's thread would not be watched
        for _ in range(4):
            step()
        asking, total, files = instructions(step)
    assert not [file for file in files if OF_RANKS.search(file)]
    weights = sum(p.ndim == 2 for p in module.parameters())
    assert asking <= 110 * weights, f"{asking} of {total} instructions"
    assert asking or not weights, "the lines that ask are not seen"
