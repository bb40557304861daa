"""The recipe of a region: `with te_jax.autocast(recipe=...)`, read while JAX traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling, Recipe

_recipe: ContextVar[Recipe | None] = ContextVar("te_jax recipe", default=None)


@contextmanager
def autocast(enabled: bool = True, recipe: Recipe | None = None) -> Iterator[None]:
    """Inside it, layers that are given no recipe take this one (delayed scaling, if none is named)."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ArgumentError("autocast", f"recipe={recipe!r}", "a recipe of te_core.recipe", "pass a recipe")
    token = _recipe.set((recipe or DelayedScaling()) if enabled else None)
    try:
        yield
    finally:
        _recipe.reset(token)


def chosen(recipe: Recipe | None) -> Recipe | None:
    """The recipe of a call: its own, or the region's."""
    return _recipe.get() if recipe is None else recipe
