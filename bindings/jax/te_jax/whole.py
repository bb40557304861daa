"""Attention with its projections, and a whole layer of a Transformer: one call of XLA's each way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from te_core.errors import ArgumentError
from te_core.layers.table import LAYERS
from te_core.recipe import Recipe
from te_jax.calling import call_layer, of_layer
from te_jax.context import chosen
from te_jax.state import Scaling


def _whole(name: str, about: str) -> Any:
    """The function of a layer of the table whose arguments have the names that the core's have."""
    known = [a.name for a in LAYERS[name].offered()][1:]

    def call(
        x: Any,
        params: Mapping[str, Any],
        *,
        recipe: Recipe | None = None,
        scaling: Scaling | None = None,
        seed: Any = None,
        **options: Any,
    ) -> Any:
        if not isinstance(params, Mapping) or not set(params) <= set(known):
            got = f"{[*params] if isinstance(params, Mapping) else type(params).__name__}"
            raise ArgumentError(name, got, f"a dict by {', '.join(known)}", "correct the names")
        arrays = {"x": x, **{n: params.get(n) for n in known}}
        (y,) = call_layer(name, arrays, options, chosen(recipe), scaling, seed)
        return y

    call.__name__ = call.__qualname__ = name
    call.__doc__ = (
        f"{about}. `params` ({', '.join(known)}) and options have the names of te_core.functional.{name}; weights lie "
        "[out, in]. `seed`: a key of jax.random for dropout."
    )
    return of_layer(name)(call)


multihead_attention = _whole("multihead_attention", "Attention between its projections")
transformer_layer = _whole("transformer_layer", "A layer of a Transformer")
