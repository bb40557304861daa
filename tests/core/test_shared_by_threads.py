"""What threads share in the core, and what a thread meets again inside of its own locks."""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from te_core import dlpack, libraries
from te_core.kernels import loader
from te_core.plan_cache import PlanCache, drop_oldest
from te_core.precision import the_one
from te_core.recipe import DelayedScaling, NVFP4BlockScaling, QParams, resolve
from tests.threads import ends, together

# ------------------------------------------------------------------------------------------------------- recipes


def test_resolving_changes_no_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may read the same recipe now: it never sees the defaults in the place of what a user assigned."""
    recipe = NVFP4BlockScaling()
    recipe.fp4_quant_bwd_grad = QParams(stochastic_rounding=False)
    assigned: list[str] = []
    monkeypatch.setattr(NVFP4BlockScaling, "__setattr__", lambda self, name, value: assigned.append(name))
    assert not resolve(recipe).grad.stochastic  # type: ignore[union-attr]
    assert not assigned


def test_a_field_that_is_assigned_while_another_thread_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, original = DelayedScaling(margin=0), DelayedScaling.resolve

    def overtaken(self: Any) -> Any:
        found = original(self)
        if self.margin == 0:
            self.margin = 3  # by another thread, once this one has read the fields
        return found

    monkeypatch.setattr(DelayedScaling, "resolve", overtaken)
    resolve(recipe)
    assert resolve(recipe).history.margin == 3  # type: ignore[union-attr]


class Resolving:
    """A user's quantizer whose hash asks for a precision itself, as what runs in a collection of garbage may."""

    def __hash__(self) -> int:
        the_one(resolve(DelayedScaling(margin=5)))
        return 1


def test_a_precision_inside_of_a_precision() -> None:
    precision = resolve(DelayedScaling())
    assert precision.input is not None
    own = replace(precision, input=replace(precision.input, custom=Resolving()))
    assert ends(lambda: the_one(own)) is own


def test_an_import_inside_of_an_import() -> None:
    def inside() -> Any:
        with dlpack._taking:  # garbage is collected here, and its owner imports
            return dlpack.from_dlpack(np.arange(3.0, dtype=np.float32))

    assert ends(inside).shape == (3,)


# -------------------------------------------------------------------------------------------------------- caches


class Returning:
    """A plan that comes back to its cache as it goes."""

    def __init__(self, cache: PlanCache) -> None:
        self.cache = cache

    def __del__(self) -> None:
        self.cache.put("gone", 0)
        self.cache.get("gone")


def test_a_plan_that_comes_back_as_it_goes() -> None:
    def fill() -> int:
        cache = PlanCache(4)
        for i in range(12):
            cache.put(i, Returning(cache))
            cache.put(i, 0)  # in its place
        return len(cache)

    assert 0 < ends(fill) <= 5


class Racing(dict[int, int]):
    """Another thread adds as this one begins to look."""

    def __iter__(self) -> Any:
        found = super().__iter__()
        self[len(self)] = 0
        return found


def test_the_oldest_goes_whatever_others_do() -> None:
    kept = {1: 1, 2: 2}
    drop_oldest(kept)
    assert kept == {2: 2}
    drop_oldest(racing := Racing({0: 0}))
    assert len(racing) == 2  # nobody fails; the next one finds it too full again
    drop_oldest({})


# ------------------------------------------------------------------------------------------------------- libraries


class Slow:
    """A driver that takes its time over the first thing that it is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def funcGetAttribute(self, number: int, function: int) -> int:  # noqa: N802
        return 0

    def funcSetAttribute(self, function: int, number: int, value: int) -> None:  # noqa: N802
        self.told.append(value)
        if len(self.told) == 1:
            time.sleep(0.2)

    def launchKernel(self, *args: Any) -> None:  # noqa: N802
        """Nothing runs."""


def test_shared_memory_is_what_the_driver_was_told_last() -> None:
    driver = Slow()
    kernel = loader.Kernel("k", 1, "p", driver)

    def smaller() -> None:
        while not driver.told:
            time.sleep(0.001)
        kernel.allow(60_000)

    together(lambda: kernel.allow(98_304), smaller)
    assert driver.told[-1] == kernel._shared == 98_304


def test_a_library_is_there_with_what_it_opens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other threads take it without asking the lock."""
    seen: list[Any] = []
    (tmp_path / "libnvrtc-builtins.so.13.0").touch()
    monkeypatch.setattr(libraries, "_handles", {})
    monkeypatch.setattr(libraries, "_open", lambda name: (name, str(tmp_path / "libnvrtc.so.13")))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: seen.append((Path(path).name, dict(libraries._handles))))
    assert libraries.load("nvrtc") == "nvrtc"
    assert seen == [("libnvrtc-builtins.so.13.0", {})]
