"""What holds for a region, `with te_jax.autocast(recipe=...)`: read while JAX traces, part of what `jit` caches by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from te_core.calls import precision_of
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling, Recipe


class Region:
    """A recipe, and how strictly it holds. Regions of equal ones are equal."""

    def __init__(self, recipe: Recipe | None = None, strict: bool = False) -> None:
        precision = precision_of("autocast", recipe)
        self.recipe, self.strict = recipe, strict
        self._key = None if precision is None else precision.serial, strict

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Region) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)


_NOWHERE = Region()
_region = jax.make_user_context(None)


@contextmanager
def autocast(enabled: bool = True, recipe: Recipe | None = None, *, strict: bool = False) -> Iterator[None]:
    """Inside it, layers that are given no recipe take this one (delayed scaling, if none is named).

    `strict`: what would else be computed in another way is an error: attention that cuDNN refuses.
    """
    for name, flag in (("enabled", enabled), ("strict", strict)):
        if not isinstance(flag, bool):
            raise ArgumentError("autocast", f"{name}={flag!r}", "True or False", "name the recipe: recipe=...")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ArgumentError("autocast", f"recipe={recipe!r}", "a recipe of te_core.recipe", "pass a recipe")
    with _region(Region(recipe or DelayedScaling() if enabled else None, strict)):
        yield


def region() -> Region:
    """What holds where a program is traced."""
    return _region.value or _NOWHERE


def chosen(recipe: Recipe | None) -> Recipe | None:
    """The recipe of a call: its own, or the region's."""
    return region().recipe if recipe is None else recipe
