"""Rows of messages of te_jax; tests/messages/test_messages.py says how to add one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import te_jax as te

from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.jax.test_te_jax import B1, B2, BETA, DELAYED, GAMMA, W1, W2, B, W, X
from tests.messages.rows import Rows

ROWS = Rows()
STATE, SPREAD = te.scaling(DELAYED, te.dense), te.scaling(DELAYED, te.dense, axis_names="data")
HALVES = te.SequenceDescriptor.from_seqlens(jnp.ones(4) / 2)
XXX = (X, X, X)


def dense(x: Any = X, *rest: Any, change: Any = None, **options: Any) -> Any:
    """Of a state that is changed."""
    state = {} if change is None else {"recipe": DELAYED, "scaling": jax.tree.map(change, STATE)}
    return te.dense(x, W, *rest, **state, **options)


def summed(x: Any) -> Any:
    return dense(x).sum()


def of_user(history: Any) -> Any:
    return history[0]


ROWS.update(
    {
        "jax.vmap of dense": lambda: jax.vmap(summed)(X),
        "a second derivative of dense": lambda: jax.grad(lambda x: jax.grad(summed)(x).sum())(X),
        "a gradient of quantize": lambda: jax.grad(
            lambda x: te.dequantize(te.quantize(x, Float8CurrentScaling())).sum()
        )(X[0]),
        "dense of another K": lambda: dense(X[..., :5]),
        "dense(contracting_dims=((0,), (0,)))": lambda: dense(contracting_dims=((0,), (0,))),
        "dense(contracting_dims=((-1,), (1,)))": lambda: dense(contracting_dims=((-1,), (1,))),
        "dense of int32": lambda: dense(X.astype(jnp.int32)),
        "dense in delayed scaling without a state": lambda: dense(recipe=DELAYED),
        "layernorm_dense with a state of dense": lambda: te.layernorm_dense(
            X, W, GAMMA, BETA, recipe=DELAYED, scaling=STATE
        ),
        "dense with a state and no recipe": lambda: dense(scaling=STATE),
        "dense with a state of another recipe": lambda: dense(recipe=DelayedScaling(margin=1), scaling=STATE),
        "dense with a state of bfloat16": lambda: dense(change=lambda a: a.astype(jnp.bfloat16)),
        "dense with a state of nothing": lambda: dense(change=lambda a: a[:0]),
        "dense with a state of several layers": lambda: dense(change=lambda a: a[None]),
        "dense with a state of several devices": lambda: dense(recipe=DELAYED, scaling=SPREAD),
        "dense with a bias of two dimensions": lambda: dense(X, B[:, None]),
        "layernorm_mlp of turned kernels": lambda: te.layernorm_mlp(
            X, GAMMA, BETA, [W1.swapaxes(1, 2), W2], [B1, B2], "layernorm"
        ),
        "layernorm_mlp of one kernel": lambda: te.layernorm_mlp(X, GAMMA, BETA, [W1], [B1, B2], "layernorm"),
        "layernorm_mlp(kernels=3)": lambda: te.layernorm_mlp(X, GAMMA, None, 3, [None, None], "rmsnorm"),
        "layernorm of RMSNorm with a bias": lambda: te.layernorm(X, GAMMA, BETA, "rmsnorm"),
        "fused_attn of lengths that are no integers": lambda: te.fused_attn(
            XXX, None, HALVES, attn_mask_type="padding"
        ),
        "fused_attn of two": lambda: te.fused_attn((X, X)),
        "autocast of a recipe in the place of enabled": lambda: te.autocast(DELAYED).__enter__(),
        "autocast(recipe='fp8')": lambda: te.autocast(recipe="fp8").__enter__(),
        "autocast(mesh_resource='data')": lambda: te.autocast(mesh_resource="data").__enter__(),
        "softmax(softmax_type='causal')": lambda: te.softmax(X, softmax_type="causal"),
        "dequantize of an array": lambda: te.dequantize(X),
        "scaling of a function of the user": lambda: te.scaling(DelayedScaling(amax_compute_algo=of_user), te.dense),
    }
)
for options in (
    {"seed": 7, "dropout_probability": 0.5},
    {"qkv_layout": "sbhd"},
    {"attn_mask_type": "padding"},
    {"attn_bias_type": "post_scale_bias"},
):
    ROWS.add(te.fused_attn, XXX, **options)
ROWS.add(te.fused_attn, (jnp.zeros((1, 8, 2, 16)),) * 3, dropout_probability=0.5)
ROWS.add(te.activation, X, ("gelu", "gelu"))
for options in (
    {"topk": 9},
    {"score_function": "sqrtsoftplus"},
    {"expert_bias": jnp.zeros(8)},
    {"routing_map_format": 2},
    {"scaling_factor": None},
):
    ROWS.add(te.fused_topk_with_score_function, jnp.zeros((4, 8)), **{"topk": 2, **options})
ROWS.add(te.fused_moe_aux_loss, jnp.zeros((4, 8)), jnp.zeros(7), 2, 0.1)
ROWS.add(te.scaling, DELAYED, te.layernorm)
ROWS.add(te.quantize, X, None)
K3 = jnp.zeros((3, 8, 4))
for rows, kernel, sizes, options in (
    (jnp.zeros((12, 8)), K3, jnp.zeros(2, int), {}),
    (jnp.zeros((12, 8)), K3, jnp.zeros(3), {}),
    (jnp.zeros((12, 7)), K3, jnp.zeros(3, int), {}),
    (jnp.zeros((12, 8)), K3, jnp.zeros(3, int), {"bias": jnp.zeros(4)}),
    (jnp.zeros((12, 8)), K3, jnp.zeros(3, int), {"contracting_dims": ((1,), (2,))}),
    (jnp.zeros((12, 8)), K3, jnp.zeros(3, int), {"recipe": DELAYED}),
    (jnp.zeros((12, 8)), K3, jnp.zeros(3, int), {"recipe": Float8CurrentScaling()}),
):
    ROWS.add(te.grouped_dense, rows, kernel, sizes, **options)
ROWS.each(te.MeshResource, pp_resource=("x",), cp_resource=("x",), ep_resource=("x",), dp_resource=(3,))
ROWS["multihead_attention of no parameter of it"] = lambda: te.multihead_attention(
    X, {"weight": X}, num_attention_heads=4
)
