"""A call of a layer of the table from JAX: its arrays, its state, its random numbers, and words for what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from te_core.calls import precision_of
from te_core.errors import ArgumentError
from te_core.layers.table import LAYERS
from te_core.quantize.operands import takes_turned
from te_core.recipe import Recipe
from te_jax.context import region
from te_jax.mesh import alike
from te_jax.record import note, the_one
from te_jax.rules import CALLED, Layered, layered
from te_jax.state import LOOPS, Scaling

F = TypeVar("F", bound=Callable[..., Any])
#: What arguments of the core's layers are called here, and the layers themselves.
_NAMES = CALLED | {
    "attention_forward": "fused_attn", "softmax_scale": "scaling_factor", "sink": "softmax_offset", "weight": "kernel",
    "fc1_weight": "kernels[0]", "fc2_weight": "kernels[1]", "fc1_bias": "biases[0]", "fc2_bias": "biases[1]",
    "layer_norm_weight": "gamma", "layer_norm_bias": "beta", "core_attention_bias": "bias",
}  # fmt: skip
_NAMES |= {f"{name}_forward": CALLED[name] for name in ("router_topk", "router_scores", "router_aux_loss")}
_WORD = re.compile(rf"\b({'|'.join(_NAMES)})\b")
_WHOLE = ("multihead_attention", "transformer_layer")  # whose names are the core's


def of_layer(layer: str) -> Callable[[F], F]:
    """Of which layer of the table a function is: a scaling state belongs to it."""

    def marked(function: F) -> F:
        function.te_layer = LAYERS[layer]  # type: ignore[attr-defined]
        return function

    return marked


def number(operation: str, name: str, value: Any) -> float:
    """An option that is a number, as the core takes it."""
    known_while_traced(operation, {name: value})
    return float(value)


def known_while_traced(operation: str, options: Mapping[str, Any]) -> None:
    """Options become a part of the program: none of them may be an array that JAX traces."""
    for name, value in options.items():
        if any(isinstance(part, jax.core.Tracer) for part in (value if isinstance(value, tuple) else (value,))):
            do = "close over the number, or let jax.jit have it as one of static_argnames"
            raise ArgumentError(operation, f"{name} = {value}", "a value that is known while JAX traces", do)


def call_layer(
    name: str,
    arrays: Mapping[str, Any],
    options: dict[str, Any],
    recipe: Recipe | None = None,
    scaling: Scaling | None = None,
    seed: Any = None,
) -> tuple[Any, ...]:
    """The outputs of a layer. Mistakes are told by the names that arguments have here."""
    try:
        known_while_traced(name, options)
        return _called(name, arrays, options, recipe, scaling, seed)
    except ArgumentError as error:
        if name in _WHOLE:
            raise
        parts = (error.operation, error.got, error.allowed, error.do)
        raise ArgumentError(*(_WORD.sub(lambda m: _NAMES[m[0]], part) for part in parts)) from error


def _called(
    name: str,
    arrays: Mapping[str, Any],
    options: dict[str, Any],
    recipe: Recipe | None,
    scaling: Scaling | None,
    seed: Any,
) -> tuple[Any, ...]:
    given = {n: jnp.asarray(a) for n, a in arrays.items() if a is not None}
    if "turned" in LAYERS[name].options:
        options["turned"] = takes_turned(precision_of(name, recipe))
        if not options["turned"]:  # XLA transposes what te_core cannot read as it lies
            given |= {n: given[n].T for n in LAYERS[name].products}
            note(f"{name}: XLA transposes kernels for {type(recipe).__name__}, whose weights lie [out, in]")
    whole, constant = the_one(Layered(name, options, recipe, region().strict, given)), None
    if whole.history:
        given["scaling"], constant = _entered(whole, scaling, given)
    elif scaling is not None:
        got = f"scaling= with {'no recipe' if recipe is None else type(recipe).__name__}"
        raise ArgumentError(name, got, "a state beside a recipe with a history", "pass recipe=, or leave scaling out")
    elif whole.precision is not None and region().mesh.axes:
        note(f"mesh_resource has no effect on {type(recipe).__name__}: each device scales its part by its own maxima")
    if seed is not None:
        given["seed"] = _seed(name, seed, whole.named.pairs)
    outputs: tuple[Any, ...] = layered(whole, constant, alike(given))
    return outputs


def _entered(whole: Layered, scaling: Any, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], str | None]:
    """The state's arrays, and what a function is traced for of which they are constants."""
    name, called = whole.name, _NAMES.get(whole.name, whole.name)
    if not isinstance(scaling, Scaling):
        do = f"make it once: scaling = te_jax.scaling(recipe, te_jax.{called})"
        raise ArgumentError(name, f"scaling={scaling!r}", "the state of this layer and recipe", do)
    if scaling.rule.layer != name:
        got = f"a state of {_NAMES.get(scaling.rule.layer, scaling.rule.layer)}"
        raise ArgumentError(name, got, f"a state of {called}", f"make one: te_jax.scaling(recipe, te_jax.{called})")
    if scaling.rule.precision is not whole.precision:
        got, do = "a state of another recipe", "make the state by the recipe of the call; equal ones are the same"
        raise ArgumentError(name, got, "the state of this recipe", do)
    constant = scaling.closed_over()
    if constant in LOOPS:
        got, allowed = f"a scaling state from outside of the loop's body ({constant})", "an argument of the body"
        do = "carry the state through the loop, or pass a state for each step or layer as xs of jax.lax.scan"
        raise ArgumentError(name, got, allowed, do)
    return scaling.entered(name, given), constant


def _seed(operation: str, seed: Any, pairs: tuple[int, ...]) -> Any:
    """Pairs of int64 (seed, 0) as te_core reads them, as uint32: one for each part of a layer that draws."""
    array = jnp.asarray(seed) if not isinstance(seed, jax.Array) else seed
    key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key) and array.shape == ()
    if not key and (array.shape != (2,) or array.dtype != jnp.uint32):
        got, allowed = f"seed = {array.dtype}{list(array.shape)}", "a key of jax.random, or two uint32"
        raise ArgumentError(operation, got, allowed, "pass jax.random.key(number), another one in each step")
    words = jax.random.bits(array, (2,), jnp.uint32)
    if len(pairs) == 1:
        return jnp.concatenate([words, jnp.zeros(2, jnp.uint32)])
    apart = jnp.arange(pairs[0], dtype=jnp.uint32) << 28
    return jnp.stack([words[0] + 0 * apart, words[1] ^ apart, 0 * apart, 0 * apart], 1)
