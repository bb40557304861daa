"""The recipe of a region, `with te_jax.autocast(recipe=...)`: read while JAX traces, part of what `jit` caches by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from te_core.calls import precision_of
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling, Recipe


class _Chosen:
    """A recipe that is equal to equal ones."""

    def __init__(self, recipe: Recipe) -> None:
        precision = precision_of("autocast", recipe)
        self.recipe, self.serial = recipe, None if precision is None else precision.serial

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Chosen) and other.serial == self.serial

    def __hash__(self) -> int:
        return hash(self.serial)


_region = jax.make_user_context(None)


@contextmanager
def autocast(enabled: bool = True, recipe: Recipe | None = None) -> Iterator[None]:
    """Inside it, layers that are given no recipe take this one (delayed scaling, if none is named)."""
    if not isinstance(enabled, bool):
        raise ArgumentError("autocast", f"enabled={enabled!r}", "True or False", "name the recipe: recipe=...")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ArgumentError("autocast", f"recipe={recipe!r}", "a recipe of te_core.recipe", "pass a recipe")
    with _region(_Chosen(recipe or DelayedScaling()) if enabled else None):
        yield


def chosen(recipe: Recipe | None) -> Recipe | None:
    """The recipe of a call: its own, or the region's."""
    region = _region.value
    return region.recipe if recipe is None and region is not None else recipe
