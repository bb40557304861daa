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


def _called(
    name: str, x: Any, arrays: Mapping[str, Any], options: dict[str, Any], recipe: Recipe | None, more: dict[str, Any]
) -> Any:
    known = [a.name for a in LAYERS[name].offered()][1:]
    if not isinstance(arrays, Mapping) or not set(arrays) <= set(known):
        got = f"{[*arrays] if isinstance(arrays, Mapping) else type(arrays).__name__}"
        raise ArgumentError(name, got, f"a dict by {', '.join(known)}", "correct the names")
    (y,) = call_layer(name, {"x": x, **{n: arrays.get(n) for n in known}}, options, chosen(recipe), **more)
    return y


@of_layer("multihead_attention")
def multihead_attention(
    x: Any,
    params: Mapping[str, Any],
    *,
    recipe: Recipe | None = None,
    scaling: Scaling | None = None,
    seed: Any = None,
    **options: Any,
) -> Any:
    """Attention between its projections. `params` and options have the names of `te_core.functional`'s function;
    weights lie [out, in]. `seed`: a key of jax.random for dropout."""
    return _called("multihead_attention", x, params, options, recipe, {"scaling": scaling, "seed": seed})


@of_layer("transformer_layer")
def transformer_layer(
    x: Any,
    params: Mapping[str, Any],
    *,
    recipe: Recipe | None = None,
    scaling: Scaling | None = None,
    seed: Any = None,
    **options: Any,
) -> Any:
    """A layer of a Transformer. `params` and options have the names of `te_core.functional`'s function; weights lie
    [out, in]. `seed`: a key of jax.random for dropout."""
    return _called("transformer_layer", x, params, options, recipe, {"scaling": scaling, "seed": seed})
