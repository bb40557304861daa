"""What the modules share: parameters with names of axes, states of recipes with a history, refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from flax import linen as nn
from flax import serialization

from te_core.calls import precision_of
from te_core.errors import ArgumentError, UnsupportedError
from te_core.spelling import choice_error
from te_jax.context import chosen, region
from te_jax.state import NAMES, Scaling, scaling

#: flax's TrainState puts the gradients of this collection in its place.
OVERWRITTEN = "_overwrite_with_gradient"

#: Names of axes, as transformer_engine.jax has them: of arrays ...
BATCH_AXES, SEQLEN_AXES, SEQLEN_TP_AXES = "nvte_batch", "nvte_seqlen", "nvte_seqlen_tp"
HEAD_AXES, HIDDEN_AXES, HIDDEN_TP_AXES, JOINED_AXES = "nvte_head", "nvte_hidden", "nvte_hidden_tp", "nvte_joined"
#: ... and of parameters.
W_NO_SHARD_AXES, W_FSDP_AXES, W_TP_AXES, W_JOINED_AXES = "nvte_w_no_shard", "nvte_w_fsdp", "nvte_w_tp", "nvte_w_joined"

Initializer = Callable[..., Any]
Axes = tuple[str | None, ...]
#: What no initializer stands for: in general, and around attention.
KERNEL_INIT = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
ATTENTION_KERNEL_INIT = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


def refuse(module: nn.Module, instead: Mapping[str, tuple[Any, str]]) -> None:
    """Fields that must keep a value, and what to do for those who set another one."""
    for name, (value, do) in instead.items():
        found = getattr(module, name)
        if found != value and not (found is None and not value):
            raise UnsupportedError(type(module).__name__, f"{name}={found!r}", f"{name}={value!r}", do)


#: Of the modules that multiply.
NO_ADAPTATION = {"enable_low_rank_adaptation": (False, "add the two small products in a module of your own")}
NO_SCOPE = {"low_rank_adaptation_scope": ("none", "add the two small products in a module of your own")}
NO_SEQUENCE_PARALLEL = {"enable_sequence_parallel": (False, "divide the batch by jax.shard_map")}
NO_CONSTRAINT = ((), "leave it out: divide arrays by jax.shard_map")
POLICY = "leave it out: name some of te_jax.checkpoint_names in the policy of jax.checkpoint"
NO_CHECKPOINT_NAME = {"quantization_checkpoint_name": (None, POLICY)}
NO_SCORE_MOD = dict.fromkeys(
    ("score_mod", "score_mod_bprop"), (None, "pass a bias, or write the attention in jax.numpy")
)


def one_of(module: nn.Module, name: str, allowed: Sequence[str]) -> None:
    """That a field has one of these values."""
    if getattr(module, name) not in allowed:
        raise choice_error(type(module).__name__, name, getattr(module, name), allowed)


def parameter(module: nn.Module, name: str, init: Initializer, axes: Axes, shape: tuple[int, ...]) -> Any:
    """A parameter of the module's dtype."""
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, module.dtype)


def norm_parameters(module: Any, width: int, bias_init: Initializer, bias_axes: Axes) -> tuple[Any, Any]:
    """(gamma, beta) of a norm; beta is None with RMSNorm."""
    usual = nn.initializers.zeros if module.zero_centered_gamma else nn.initializers.ones
    gamma = parameter(module, "scale", module.scale_init or usual, module.scale_axes, (width,))
    if module.layernorm_type == "rmsnorm":
        return gamma, None
    return gamma, parameter(module, "ln_bias", bias_init, bias_axes, (width,))


def bias_parameter(module: Any, name: str, axes: Axes, shape: tuple[int, ...]) -> Any:
    """A bias, or None where the module has none."""
    return parameter(module, name, module.bias_init, axes, shape) if module.use_bias else None


def side_by_side(*inits: Initializer) -> Initializer:
    """Of kernels [in, out] in one parameter [in, kernels, out]: each begins as if it stood alone."""

    def init(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        keys = jax.random.split(key, len(inits))
        return jnp.stack([one(k, (shape[0], *shape[2:]), dtype) for one, k in zip(inits, keys, strict=True)], 1)

    return init


def as_read(x: Any, *arrays: Any) -> tuple[Any, ...]:
    """Kernels and biases as a product with x reads them: without a recipe in x's dtype."""
    if chosen(None) is not None:
        return arrays
    return tuple(None if a is None else jnp.asarray(a, x.dtype) for a in arrays)


def quantizing(module: nn.Module, name: str, function: Any) -> dict[str, Any]:
    """What a function with products takes from its module: the state of this name, which `init` makes, and a key.

    Both belong to the recipe of the region, which the function takes, too.
    """
    recipe, called = chosen(None), type(module).__name__
    precision = precision_of(called, recipe)
    if precision is None:
        return {}
    found: dict[str, Any] = {}
    if _drawing(module, "sr_rng"):  # for recipes that round gradients by draws
        found["seed"] = module.make_rng("sr_rng")
    if precision.history is not None:
        if not module.is_initializing() and not module.has_variable(OVERWRITTEN, name):
            got = f"no state {OVERWRITTEN}/{name} for {type(recipe).__name__}"
            do = "call init inside of te_jax.autocast with this recipe, and pass all that init gave to apply"
            raise ArgumentError(called, got, "the variables that init makes for a recipe with a history", do)
        # A module that is used twice has one object for both, whose maxima add up; to unbox it would make two of it.
        made = module.variable(OVERWRITTEN, name, lambda: scaling(recipe, function), unbox=False)
        found["scaling"] = made.value
    return found


def _drawing(module: nn.Module, name: str) -> bool:
    """Whether apply has this random stream, or that of parameters, which flax takes in its place."""
    return module.has_rng(name) or (module.has_rng("params") and not module.is_initializing())


def random_key(module: nn.Module, name: str) -> Any:
    """A key of a stream that the caller of apply has to name."""
    if not _drawing(module, name) and not module.is_initializing():
        do = f"pass rngs={{{name!r}: key}} to apply, another key in each step, or deterministic=True"
        raise ArgumentError(type(module).__name__, f"no random stream {name!r}", "a key of jax.random", do)
    return module.make_rng(name)


def dropped(x: Any, rate: float, dims: Sequence[int], stream: str, deterministic: bool) -> Any:
    """x after flax's dropout, which is the same along these dimensions."""
    return nn.Dropout(rate, broadcast_dims=tuple(dims), rng_collection=stream)(x, deterministic=deterministic)


def counted(features: Any) -> tuple[int, ...]:
    """One number or name, or several, as a tuple."""
    several = isinstance(features, Sequence) and not isinstance(features, str)
    return tuple(features) if several else (features,)


def from_heads(x: Any) -> Any:
    """[..., heads, width] as [..., heads * width]."""
    return x.reshape(*x.shape[:-2], prod(x.shape[-2:]))


def extend_logical_axis_rules(rules: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """These rules of flax, and those for the axes of the modules' parameters on the mesh that te_jax.autocast names."""
    mesh, known = region().mesh, {name for name, _ in rules}
    batch = tuple(axis for axis in (mesh.dp_resource, mesh.fsdp_resource) if axis is not None)
    tp, tpsp = mesh.tp_resource or mesh.tpsp_resource, mesh.tpsp_resource
    ours = {
        BATCH_AXES: batch or None, SEQLEN_AXES: None, SEQLEN_TP_AXES: tpsp, HEAD_AXES: tp, HIDDEN_AXES: None,
        HIDDEN_TP_AXES: tp, JOINED_AXES: None, W_NO_SHARD_AXES: None, W_FSDP_AXES: mesh.fsdp_resource, W_TP_AXES: tp,
        W_JOINED_AXES: None,
    }  # fmt: skip
    return (*rules, *((name, axis) for name, axis in ours.items() if name not in known))


def _stored(state: Scaling) -> dict[str, Any]:
    return dict(zip(NAMES, state.arrays, strict=True))


def _restored(state: Scaling, found: Mapping[str, Any]) -> Scaling:
    """A state as `_stored` gave it, by the rule of one that is there."""
    if set(found) != set(NAMES):
        do = "load a checkpoint of this module and recipe, or keep the states that init made"
        raise ArgumentError("Scaling", f"{sorted(found)}", ", ".join(NAMES), do)
    here = _stored(state)
    return Scaling(tuple(serialization.from_state_dict(here[n], found[n], n) for n in NAMES), state.rule)


serialization.register_serialization_state(Scaling, _stored, _restored)
yaml.SafeDumper.add_representer(Scaling, lambda dumper, state: dumper.represent_str(repr(state)))  # for nn.tabulate
