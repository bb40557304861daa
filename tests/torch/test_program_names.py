"""Compilers keep programs on disk: what an operator is called says all that the shapes of its results follow from."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import Float8BlockScaling, Float8CurrentScaling
from te_torch import calls as registry
from te_torch import program_names
from te_torch.calls import Call, Layer, key_of
from te_torch.program_names import build, name_of_program
from tests import recipes
from tests.torch.test_operators import EVERY

ROOT = Path(__file__).resolve().parents[2]

STEP = """
import sys

import torch
from torch._dynamo.utils import counters

import te_torch as te
from te_core import recipe

torch.manual_seed(0)
layer = te.Linear(64, 48, params_dtype=torch.bfloat16, device="cpu")
x = torch.randn(24, 64, dtype=torch.bfloat16, requires_grad=True)
results = []
for module in (layer, torch.compile(layer)):
    with te.autocast(recipe=getattr(recipe, sys.argv[1])()):
        y = module(x)
    y.sum().backward()
    results.append([y.detach(), x.grad, layer.weight.grad])
    x.grad = layer.weight.grad = None
assert all(torch.equal(a, b) for a, b in zip(*results))
print("from disk:", counters["inductor"]["fxgraph_cache_hit"])
"""


def step(recipe: str, kept: Path) -> str:
    """A compiled training step in a process of its own, which keeps its programs there: how many it took from there."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(kept)}
    done = subprocess.run(
        [sys.executable, "-c", STEP, recipe], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.rpartition("from disk: ")[2].strip()


@pytest.mark.more
def test_a_process_takes_only_its_own_kind_of_program_from_disk(tmp_path: Path) -> None:
    """As of one who runs a script again with another recipe: the text of both programs is the same but for names."""
    assert step("Float8BlockScaling", tmp_path) == "0"
    assert step("Float8CurrentScaling", tmp_path) == "0"
    assert step("Float8CurrentScaling", tmp_path) == "2"  # forward and backward


def keys_of(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys of a layer's programs, in tables as a new process finds them."""
    for table in ("_of_programs", "_by_spec"):
        monkeypatch.setattr(registry, table, {} if table == "_of_programs" else weakref.WeakValueDictionary())
    torch._dynamo.reset()
    layer = torch.compile(te.Linear(16, 16, device="cpu"), backend="aot_eager")
    x = torch.randn(16, 16, requires_grad=True)
    with te.autocast(recipe=recipe):
        layer(x).sum().backward()
    return set(registry._of_programs)


def test_keys_are_of_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    block, current = (keys_of(r, monkeypatch) for r in (Float8BlockScaling(), Float8CurrentScaling()))
    assert not block & current
    assert keys_of(Float8BlockScaling(), monkeypatch) == block
    monkeypatch.setattr(program_names, "build", lambda: "another version")
    assert not keys_of(Float8BlockScaling(), monkeypatch) & block


def test_every_recipe_can_be_named_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is made of the call's spec alone, which nothing of this process is part of."""
    calls = {}
    for name in EVERY:
        if name is None or "custom" not in name:
            layer = te.Linear(64, 48, device="cpu")
            with recipes.region(name):
                layer(torch.randn(32, 64))
            calls[name] = layer._last
    keys = {name: key_of(call) for name, call in calls.items()}
    monkeypatch.setattr(program_names, "_SECRET", "another")
    again = {name: name_of_program(call.layer.name, (call.spec, call.needs_grad)) for name, call in calls.items()}
    assert {name: key for name, key in keys.items() if again[name] != key} == {}
    assert len(set(keys.values())) == len({call.spec for call in calls.values()})


def test_what_has_no_description_is_this_processs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        return [name_of_program("a", 1), name_of_program("a", object), name_of_program("a", [lambda: None])]

    plain, kind, function_ = names()
    private = name_of_program("a", 1, shared=False)
    monkeypatch.setattr(program_names, "_SECRET", "another")
    assert names()[:2] == [plain, kind] and names()[2] != function_
    assert name_of_program("a", 1, shared=False) != private != plain


def test_inspected_programs_are_this_processs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks on may put something else in an operand's place."""
    calls = [Call(Layer("a", print, print, print), 1, True, o) for o in ({}, {"inspector": None})]
    monkeypatch.setattr(registry, "_of_programs", {})
    here = [key_of(c) for c in calls]
    monkeypatch.setattr(registry, "_of_programs", {})
    monkeypatch.setattr(program_names, "_SECRET", "another")
    there = [key_of(c) for c in calls]
    assert here[0] == there[0] and here[1] != there[1]


def test_two_that_read_the_same_have_two_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_of_programs", {})
    calls = [Call(Layer("a", print, print, print), 1, True, {}) for _ in range(3)]
    keys = [key_of(c) for c in calls]
    assert len(set(keys)) == 3 and [key_of(c) for c in calls] == keys
    assert [registry._of_programs[k] for k in keys] == calls


def test_a_forked_process_has_a_name_of_its_own() -> None:
    here = program_names.this_process()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, program_names.this_process().encode())
        os._exit(0)  # pytest is not to end twice
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        there = pipe.read()
    assert there.split()[0] == here.split()[0] and there != here == program_names.this_process()


def test_the_build_is_of_all_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = program_names._sources
    assert build() == sources() == sources.__wrapped__() != program_names.this_process()
    monkeypatch.setattr(program_names, "_PACKAGES", (tmp_path,))
    monkeypatch.setattr(program_names, "_sources", sources.__wrapped__)
    assert build() == program_names.this_process()  # no sources are there
    found = set()
    for name, content in (("a.py", "1"), ("a.py", "2"), ("b/a.py", "2")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
        found.add(build())
    assert len(found) == 3
