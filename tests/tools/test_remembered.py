"""What is remembered between calls is found in the sources, and what only imports fill is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import remembered
from tools.remembered import Place, counted, places, too_many

KEEPING = """
import functools
from functools import lru_cache
from weakref import WeakValueDictionary

import torch

from te_core.plan_cache import PlanCache
from te_core.table import later, of_imports

TABLE = {"a": 1}
_seen: dict[int, int] = {}
_last, _first = [], 0
_weak = WeakValueDictionary()
_when = "never"
_plans = PlanCache()


class Kept:
    known: dict[int, int] = {}
    fixed = {"a": 1}
    only = None

    @classmethod
    def one(cls):
        cls.only = cls.known[1] = 2

    @functools.cache
    def often(self):
        def inner():
            _weak.pop(3)
        return inner


@lru_cache(maxsize=2)
def once(x):
    global _when
    _when = x
    _seen.setdefault(x, TABLE["a"])
    later[x] = 1


quick = lru_cache(2)(once)


def others(TABLE, rt):
    TABLE["b"] = 2
    _first = rt.plans.get(_last)
    _last.append(1)
    del _plans[0]
    return torch.compiler.is_compiling() or torch.compiler.is_compiling()
"""

TABLE = """
later = {}
of_imports = {}


def entered(function):
    of_imports[function.__name__] = function
    return function


@entered
def used():
    return of_imports
"""


@pytest.fixture
def found(tmp_path: Path) -> list[Place]:
    for file, text in {"te_core/keeping.py": KEEPING, "te_core/table.py": TABLE, "te_torch/none.py": ""}.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    return places(tmp_path)


def test_each_kind_is_found(found: list[Place]) -> None:
    by_kind = {kind: sorted(place.name for place in found if place.kind == kind) for kind in remembered.MOST}
    assert by_kind == {
        "cached function": ["often", "once", "once"],
        "container": ["Kept.known", "_last", "_plans", "_seen", "_weak", "later"],
        "rebound name": ["Kept.only", "_when"],
        "PlanCache": [""],
        "plans.get": ["rt.plans.get"],
        "asks is_compiling": [""],
    }


def test_places_name_their_lines(found: list[Place]) -> None:
    for place in found:
        line = (KEEPING if "keeping" in place.file else TABLE).splitlines()[place.line - 1]
        assert place.name.rpartition(".")[2] in line


def test_more_than_allowed_is_said(found: list[Place], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST", counted(found))
    assert not too_many(found)
    (said,) = too_many([*found, Place("container", "te_core/more.py", 1, "_more")])
    assert "7" in said and "'container'" in said
