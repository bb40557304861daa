"""The small GPT of examples/gpt_jax.py on several devices: they divide the batch, or heads and hidden channels.

Divided weights lie as in the whole model, each device has its rows or columns of them: the same parameters for one
device and for many.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import te_jax as te
from jax.sharding import NamedSharding, PartitionSpec

from examples import gpt_jax
from te_cli.settings import GPTConfig
from te_core.recipe import Recipe

AXIS = "devices"
ROWS, COLUMNS = PartitionSpec(AXIS), PartitionSpec(None, AXIS)
#: How tensor parallelism divides a layer: heads, and hidden channels of the MLP. All else is on each device.
DIVIDED = {
    "layernorm_qkv_weight": ROWS,
    "layernorm_qkv_bias": ROWS,
    "proj_weight": COLUMNS,
    "layernorm_mlp_fc1_weight": ROWS,
    "layernorm_mlp_fc1_bias": ROWS,
    "layernorm_mlp_fc2_weight": COLUMNS,
}


def turned(t: Any, angles: Any) -> Any:
    """Heads [B, S, heads, width], turned by their tokens' angles [S, width]."""
    first, second = jnp.split(t.astype(jnp.float32), 2, -1)
    across = jnp.concatenate([-second, first], -1)
    return (t * jnp.cos(angles)[:, None] + across * jnp.sin(angles)[:, None]).astype(t.dtype)


def divided_layer(x: Any, layer: Any, state: Any, angles: Any, config: GPTConfig, recipe: Recipe | None) -> Any:
    """A layer of which this device has some heads and some hidden channels."""
    attention, projection, mlp = state
    p = {n.removeprefix("layernorm_"): a for n, a in layer.items()}
    norms = [(p[f"{n}_layer_norm_weight"], p[f"{n}_layer_norm_bias"]) for n in ("qkv", "mlp")]
    options: dict[str, Any] = {"recipe": recipe, "epsilon": 1e-5}
    qkv = te.layernorm_dense(x, p["qkv_weight"].T, *norms[0], p["qkv_bias"], scaling=attention, **options)
    qkv = qkv.reshape(*x.shape[:2], -1, 3, config.hidden // config.heads)
    q, k, v = (qkv[:, :, :, i] for i in range(3))
    heads = te.fused_attn((turned(q, angles), turned(k, angles), v))
    part = te.dense(heads.reshape(*x.shape[:2], -1), p["proj_weight"].T, recipe=recipe, scaling=projection)
    x = x + jax.lax.psum(part, AXIS) + p["proj_bias"].astype(x.dtype)
    kernels = [p["mlp_fc1_weight"].T, p["mlp_fc2_weight"].T]
    part = te.layernorm_mlp(x, *norms[1], kernels, [p["mlp_fc1_bias"], None], "layernorm", scaling=mlp, **options)
    return x + jax.lax.psum(part, AXIS) + p["mlp_fc2_bias"].astype(x.dtype)


def states(config: GPTConfig, recipe: Recipe | None, tensor_parallel: bool) -> list[Any]:
    """The scaling states of each layer, whose maxima are those of all devices."""
    parts = (te.layernorm_dense, te.dense, te.layernorm_mlp)
    make = functools.partial(te.scaling, recipe, axis_names=AXIS)
    return [tuple(map(make, parts)) if tensor_parallel else make(te.transformer_layer) for _ in range(config.layers)]


def loss_on(mesh: Any, config: GPTConfig, recipe: Recipe | None, tensor_parallel: bool) -> tuple[Any, Any]:
    """(a loss(params, scaling, tokens) on the devices of a mesh, how it wants parameters to lie)."""
    whole = PartitionSpec()
    names = gpt_jax.parameters(dataclasses.replace(config, layers=1), 0)["layers"][0]
    layer = {n: DIVIDED.get(n, whole) if tensor_parallel else whole for n in names}
    where = {"embedding": whole, "layers": [layer] * config.layers, "norm": whole}

    def loss(params: Any, scaling: Any, tokens: Any) -> Any:
        if tensor_parallel:
            return gpt_jax.loss(params, scaling, tokens, config, recipe, divided_layer)
        return jax.lax.pmean(gpt_jax.loss(params, scaling, tokens, config, recipe), AXIS)

    batch = whole if tensor_parallel else PartitionSpec(AXIS)
    return jax.shard_map(loss, mesh=mesh, in_specs=(where, whole, batch), out_specs=whole), where


def training(
    config: GPTConfig, recipe: Recipe | None, params: Any, count: int, tensor_parallel: bool
) -> tuple[Any, Any, Any]:
    """(a step as gpt_jax.training_step gives it, parameters and states where it wants them), for so many devices."""
    mesh = jax.make_mesh((count,), (AXIS,), (jax.sharding.AxisType.Auto,))
    spread, where = loss_on(mesh, config, recipe, tensor_parallel)
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))  # noqa: E731
    scaling = put(states(config, recipe, tensor_parallel), PartitionSpec())
    return gpt_jax.training_step(config, recipe, spread), jax.tree.map(put, params, where), scaling
