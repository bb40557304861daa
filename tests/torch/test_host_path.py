"""A step that has run before decides nothing anew: nothing on its way builds text that nobody will read, and on one
rank next to nothing asks for others.
"""

from __future__ import annotations

import linecache
import re
import subprocess
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
import torch

import te_torch as te
from te_core import dtypes
from te_core.ops import _check
from te_core.tensor import CPU, Tensor
from tests import recipes
from tests.covering import covering
from tests.host_steps import ROOT, each_instruction, line_of, worded, worded_at_last

HIDDEN = 32
SPLIT: dict[str, Any] = {"parameters_split": {"first_": HIDDEN // 2, "second_": HIDDEN // 2}}
MODULES: dict[str, Any] = {
    "Linear": lambda: te.Linear(HIDDEN, HIDDEN),
    "Linear in parts": lambda: te.Linear(HIDDEN, HIDDEN, **SPLIT),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, HIDDEN),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu"),
    "GroupedLinear": lambda: te.GroupedLinear(2, HIDDEN, HIDDEN),
    "TransformerLayer": lambda: te.TransformerLayer(HIDDEN, 2 * HIDDEN, 2, hidden_dropout=0.1),
    "RMSNorm": lambda: te.RMSNorm(HIDDEN),
}


@pytest.mark.usefixtures("interpreted")
def test_nothing_is_worded_where_nothing_is_replayed() -> None:
    test_nothing_is_worded("TransformerLayer", "current")


@covering(name=MODULES, recipe=[None, *recipes.KINDS])
def test_nothing_is_worded(name: str, recipe: str | None) -> None:
    module = MODULES[name]().to("cpu")
    x = torch.randn(64, 1, HIDDEN, requires_grad=True)
    given = (x.view(64, HIDDEN), [32, 32]) if name == "GroupedLinear" else (x,)

    def step() -> None:
        with recipes.region(recipe):
            y = module(*given)
        y.sum().backward()

    for _ in range(4):
        step()
    assert not worded_at_last(step)


@covering(recipe=recipes.KINDS, fused=[False, True])
def test_nothing_is_worded_for_quantized_weights(recipe: str, fused: bool) -> None:
    with te.quantized_model_init(recipe=recipes.rule(recipe)):
        module = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, params_dtype=torch.bfloat16, device="cpu")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused)
    x = torch.randn(64, 1, HIDDEN, dtype=torch.bfloat16)

    def step() -> None:
        with recipes.region(recipe):
            y = module(x)
        y.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    assert not worded_at_last(step)


def test_what_words_is_seen() -> None:
    """Else the tests above would see nothing."""
    t = Tensor(16, (2,), dtypes.float32, CPU, None)
    assert not worded(lambda: _check.vector("op", CPU, "x", t, 2, (dtypes.float32,)))
    assert "tensor.py" in worded(lambda: repr(t)).pop()


def test_the_first_count_of_a_process_sees_as_much() -> None:
    """A count of none is below every bound, and Python 3.12 told a trace function of no instruction at first."""
    code = "from tests.host_steps import opcodes as count; print(count(lambda: len('')), count(lambda: len('')))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    first, second = map(int, ran.stdout.split())
    assert first == second > 0, ran.stderr


# ---------------------------------------------------------------------------------------------------- one rank

#: A line that looks whether there are ranks, and files that nothing of one rank's step runs.
ASKS, OF_RANKS = re.compile(r"\b(parallel|comm|tp_size)\b"), re.compile(r"/te_\w+/.*(parallel|gathered|communicator)")


def instructions(call: Callable[[], Any]) -> tuple[int, int, set[str]]:
    """(the instructions of Python on such lines, all instructions, the files they are in)."""
    asking = total = 0
    files = set()

    def note(code: CodeType, offset: int) -> None:
        nonlocal asking, total
        file = code.co_filename
        files.add(file)
        total += 1
        asking += "/te_" in file and bool(ASKS.search(linecache.getline(file, line_of(code, offset))))

    with each_instruction(note):
        call()
    return asking, total, files


@pytest.mark.usefixtures("interpreted")  # a replay asks nothing
@covering(name=["LayerNormLinear", "Linear", "TransformerLayer", "GroupedLinear", "RMSNorm"], recipe=["current", None])
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
