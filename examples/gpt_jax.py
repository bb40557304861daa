"""The small GPT of te_cli/gpt.py in JAX: its parameters as a pytree, its loss, and a step of AdamW.

Parameters are float32, activations bf16. FP8 weights are cast from the float32 ones.
"""

from __future__ import annotations

import functools
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import te_jax as te

from te_cli.settings import GPTConfig
from te_core.recipe import Recipe

BETAS, EPSILON, DECAY = (0.9, 0.95), 1e-8, 0.1


def parameters(config: GPTConfig, seed: int) -> dict[str, Any]:
    """What is trained: the embedding, which is the head's weight as well, the layers, the last norm."""
    h, inner = config.hidden, 4 * config.hidden
    key = jax.random.key(seed)
    shapes = {
        "layernorm_qkv_weight": ((3 * h, h), 1 / sqrt(h)),
        "proj_weight": ((h, h), 0.02 / sqrt(2 * config.layers)),
        "layernorm_mlp_fc1_weight": ((inner, h), 1 / sqrt(h)),
        "layernorm_mlp_fc2_weight": ((h, inner), 0.02 / sqrt(2 * config.layers)),
    }
    layers = []
    for number in range(config.layers):
        keys = jax.random.split(jax.random.fold_in(key, number), len(shapes))
        layer = {n: jax.random.normal(k, s) * d for k, (n, (s, d)) in zip(keys, shapes.items(), strict=True)}
        for norm in ("layernorm_qkv", "layernorm_mlp"):
            layer |= {f"{norm}_layer_norm_weight": jnp.ones(h), f"{norm}_layer_norm_bias": jnp.zeros(h)}
        layer |= {"layernorm_qkv_bias": jnp.zeros(3 * h), "proj_bias": jnp.zeros(h)}
        layer |= {"layernorm_mlp_fc1_bias": jnp.zeros(inner), "layernorm_mlp_fc2_bias": jnp.zeros(h)}
        layers.append(layer)
    embedding = jax.random.normal(jax.random.fold_in(key, config.layers), (config.vocabulary, h)) * 0.02
    return {"embedding": embedding, "layers": layers, "norm": jnp.ones(h)}


def states(config: GPTConfig, recipe: Recipe | None) -> list[Any]:
    """The scaling state of each layer; None of recipes without a history."""
    return [te.scaling(recipe, te.transformer_layer) for _ in range(config.layers)]


def angles(length: int, width: int) -> Any:
    """By which the heads of each token are turned."""
    frequencies = 10000.0 ** -(jnp.arange(0, width, 2) / width)
    return jnp.tile(jnp.arange(length)[:, None] * frequencies, (1, 2)).astype(jnp.float32)


def whole_layer(x: Any, layer: Any, state: Any, turns: Any, config: GPTConfig, recipe: Recipe | None) -> Any:
    """A layer: x + attention(norm(x)), then x + mlp(norm(x)), causal, on hidden states [B, S, H]."""
    given, options = {**layer, "rotary_pos_emb": turns}, {"num_attention_heads": config.heads, "qkv_format": "bshd"}
    return te.transformer_layer(x, given, recipe=recipe, scaling=state, **options)


def loss(
    params: Any, scaling: Any, tokens: Any, config: GPTConfig, recipe: Recipe | None, run_layer: Any = whole_layer
) -> Any:
    """Mean cross-entropy of foretelling each token [B, S + 1] from those before it."""
    half, wide = jnp.bfloat16, ("weight" if recipe is not None else "norm_weight", "norm_bias")
    read, foretold = tokens[:, :-1], tokens[:, 1:]
    x = params["embedding"].astype(half)[read]
    turns = angles(read.shape[1], config.hidden // config.heads)
    for layer, state in zip(params["layers"], scaling, strict=True):
        given = {n: p if any(word in n for word in wide) else p.astype(half) for n, p in layer.items()}
        x = run_layer(x, given, state, turns, config, recipe)
    x = te.layernorm(x, params["norm"], None, "rmsnorm", epsilon=1e-5)
    logits = (x @ params["embedding"].astype(half).T).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), foretold[..., None], -1)
    return -chosen.mean()


def updated(params: Any, grads: Any, moments: Any, step: Any, rate: Any) -> tuple[Any, Any]:
    """(parameters, moments) after a step of AdamW, with gradients no longer than 1. Vectors do not decay."""
    length = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (length + 1e-6)), grads)
    first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, moments[0], grads)
    second = jax.tree.map(lambda m, g: BETAS[1] * m + (1 - BETAS[1]) * g * g, moments[1], grads)
    one, two = (1 - b ** (step + 1.0) for b in BETAS)

    def moved(p: Any, m: Any, v: Any) -> Any:
        kept = p * (1 - rate * DECAY) if p.ndim > 1 else p
        return kept - rate * (m / one) / (jnp.sqrt(v / two) + EPSILON)

    return jax.tree.map(moved, params, first, second), (first, second)


def training_step(config: GPTConfig, recipe: Recipe | None, of: Any = None) -> Any:
    """step(params, moments, scaling, tokens, number, rate) -> (params, moments, scaling, loss), compiled.

    `of`: another loss(params, scaling, tokens).
    """
    both = jax.value_and_grad(of or functools.partial(loss, config=config, recipe=recipe), argnums=(0, 1))

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, moments: Any, scaling: Any, tokens: Any, number: Any, rate: Any) -> Any:
        value, (grads, scaling) = both(params, scaling, tokens)
        params, moments = updated(params, grads, moments, number, rate)
        return params, moments, scaling, value

    return step


def moments_of(params: Any) -> tuple[Any, Any]:
    """Zeros, twice."""
    return jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
