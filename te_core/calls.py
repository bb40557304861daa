"""Calls of layers by name: one object for equal options, which runs forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import unwrap
from typing import Any

from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.entries import Asked, Layer
from te_core.layers.table import LAYERS
from te_core.precision import Precision
from te_core.recipe import Recipe, resolve
from te_core.spelling import choice_error
from te_core.tape.taped import Taped

_MOST_CALLS = 512  # of a layer


class Call:
    """A layer with its options: forward and backward, recorded and replayed as the tape has it."""

    __slots__ = ("asked", "backward", "draws", "forward", "layer", "spec")

    def __init__(self, layer: Layer, asked: Asked) -> None:
        self.layer, self.asked, self.spec = layer, asked, layer.spec(asked)
        self.draws = layer.draws(asked)
        self.forward = Taped(f"{layer.name} forward", unwrap(layer.forward), self.spec)
        self.backward = Taped(f"{layer.name} backward", unwrap(layer.backward), self.spec)

    def __repr__(self) -> str:
        wanted = ", ".join(a.name for a in self.layer.offered() if a.name in self.asked.needs)
        return f"Call({self.layer.name}, {self.asked.dtype}, gradients of {wanted or 'nothing'})"


def call(
    name: str, options: Mapping[str, Any], dtype: DType, needs: frozenset[str], recipe: Recipe | None = None
) -> Call:
    """The call of a layer with these options (the others have their defaults), for activations of this dtype and the
    gradients of these arguments. One object for equal ones."""
    layer = LAYERS.get(name)
    if layer is None:
        raise choice_error("calls.call", "name", name, LAYERS)
    precision = precision_of(name, recipe)
    key = (tuple(options.items()), dtype, needs, precision and precision.serial)
    found: Call | None = None
    try:
        found = layer.calls.get(key)
    except TypeError:  # allowed values can be hashed: `settled` refuses this one
        pass
    if found is None:
        if dtype not in ACTIVATION_DTYPES:
            allowed = ", ".join(d.name for d in ACTIVATION_DTYPES)
            raise ArgumentError(name, f"activations of {dtype}", allowed, "convert them")
        settled = layer.settled(name, options)
        unknown = needs - {a.name for a in layer.arguments if a.gradient}
        if unknown:
            allowed = ", ".join(a.name for a in layer.offered() if a.gradient)
            raise ArgumentError(name, f"needs={tuple(unknown)}", allowed, "leave out what has no gradient")
        full = (tuple(settled.items()), dtype, needs, key[3])
        found = layer.calls.get(full) or Call(layer, Asked(settled, dtype, needs, precision))
        if len(layer.calls) >= _MOST_CALLS:
            layer.calls.clear()
        found = layer.calls.setdefault(full, found)
        layer.calls.setdefault(key, found)
    return found


def precision_of(name: str, recipe: Recipe | None) -> Precision | None:
    """What a recipe comes down to for a layer that is called by name."""
    if recipe is None:
        return None
    if not isinstance(recipe, Recipe):
        do = "pass a recipe of te_core.recipe, or None for the activations' dtype"
        raise ArgumentError(name, f"recipe={recipe!r}", "a Recipe or None", do)
    precision = resolve(recipe)
    if precision.factory is not None:
        do = "choose another recipe, or give a module of te_torch this one"
        raise UnsupportedError(name, f"{type(recipe).__name__}, whose quantizers are functions", "other recipes", do)
    return precision
