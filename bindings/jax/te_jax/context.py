"""What holds for a region, `with te_jax.autocast(recipe=...)`: read while JAX traces, part of what `jit` caches by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

from te_core.calls import precision_of
from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe import DelayedScaling, Recipe


@dataclass(frozen=True)
class MeshResource:
    """Mesh axes by what they divide: the data, heads and hidden channels (`tp`; with the tokens: `tpsp`), parameters.

    Inside of jax.shard_map a state without axis_names takes its maxima over those of these axes along which devices
    have different arrays and one state: as if it had been made with these axis_names.
    """

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None

    def __post_init__(self) -> None:
        for name, axis in vars(self).items():
            if axis is not None and not isinstance(axis, str):
                raise ArgumentError(
                    "MeshResource", f"{name}={axis!r}", "the name of a mesh axis, or None", "correct it"
                )
        not_divided = {"pp": "layers to devices", "cp": "the tokens of a sequence", "ep": "experts to devices"}
        for name, what in ((f"{short}_resource", what) for short, what in not_divided.items()):
            if getattr(self, name) is not None:
                do = f"leave {name} out: te_jax does not divide {what}"
                raise UnsupportedError("MeshResource", f"{name}={getattr(self, name)!r}", "None", do)

    @property
    def axes(self) -> tuple[str, ...]:
        """All that are named."""
        return tuple(sorted({axis for axis in vars(self).values() if axis is not None}))


class Region:
    """A recipe, how strictly it holds, and the axes of the mesh. Regions of equal ones are equal."""

    def __init__(self, recipe: Recipe | None = None, mesh: MeshResource = MeshResource(), strict: bool = False) -> None:
        precision = precision_of("autocast", recipe)
        self.recipe, self.mesh, self.strict = recipe, mesh, strict
        self._key = None if precision is None else precision.serial, mesh, strict

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Region) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)


_NOWHERE = Region()
_region = jax.make_user_context(None)


@contextmanager
def autocast(
    enabled: bool | None = None,
    recipe: Recipe | None = None,
    mesh_resource: MeshResource | None = None,
    *,
    strict: bool = False,
) -> Iterator[None]:
    """Inside it, layers that are given no recipe take this one.

    `enabled`: whether they do. True without a recipe is delayed scaling; None is True with a recipe, False without.
    `mesh_resource`: over which mesh axes states take their maxima; that of the `autocast` around, if it is left out.
    `strict`: what would else be computed in another way is an error: attention that cuDNN refuses.
    """
    enabled = recipe is not None if enabled is None else enabled
    for name, flag in (("enabled", enabled), ("strict", strict)):
        if not isinstance(flag, bool):
            raise ArgumentError("autocast", f"{name}={flag!r}", "True or False", "name the recipe: recipe=...")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ArgumentError("autocast", f"recipe={recipe!r}", "a recipe of te_core.recipe", "pass a recipe")
    if mesh_resource is not None and not isinstance(mesh_resource, MeshResource):
        raise ArgumentError("autocast", f"mesh_resource={mesh_resource!r}", "a te_jax.MeshResource", "pass one")
    mesh = region().mesh if mesh_resource is None else mesh_resource
    with _region(Region(recipe or DelayedScaling() if enabled else None, mesh, strict)):
        yield


def region() -> Region:
    """What holds where a program is traced."""
    return _region.value or _NOWHERE


def chosen(recipe: Recipe | None) -> Recipe | None:
    """The recipe of a call: its own, or the region's."""
    return region().recipe if recipe is None else recipe
