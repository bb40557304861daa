"""Attention in plain JAX, for what cuDNN refuses: the formulas of te_core/attention.py, all scores at once.

Forward gives what te_core's forward gives, the output and the statistics, and backward reads nothing else: so each of
them may run here or there, which is decided when a program is lowered, for the device of that program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from te_core.attention import AttentionSpec
from te_core.layers.attention import AttentionLayerSpec

_PRODUCT = {"precision": "highest", "preferred_element_type": jnp.float32}


def forward(spec: AttentionLayerSpec, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """(the output, heads side by side; the logs of the sums of exp(scores)), of arrays by the core's names."""
    core, packed = spec.core, spec.core.q_format == "thd"
    q, k, v = (given[name].astype(jnp.float32) for name in "qkv")
    if packed:
        q, k, v = q[None], k[None], v[None]
    batch, length, heads, width = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, width)
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", grouped, k, **_PRODUCT) * core.scale
    scores = scores.reshape(batch, heads, length, k.shape[1])
    if core.bias == "post_scale_bias":
        scores += _bias(given, packed, length, k.shape[1])
    scores = jnp.where(_seen(core, length, k.shape[1], given), scores, -jnp.inf)
    weights, sums = _softmax(core, scores, given)
    if core.dropout:
        key = jax.random.wrap_key_data(given["seed"][:2], impl="threefry2x32")
        survives = jax.random.bernoulli(key, 1 - core.dropout, weights.shape)
        weights *= survives * (1 / (1 - core.dropout) if core.dropout < 1 else 0.0)
    weights = weights.reshape(batch, k.shape[2], -1, length, k.shape[1])
    out = jnp.einsum("bgrqk,bkgd->bqgrd", weights, v, **_PRODUCT).reshape(batch, length, -1)
    out = out.astype(given["q"].dtype)
    return (out[0], sums[0].T) if packed else (out, sums)


def backward(spec: AttentionLayerSpec, needs: frozenset[str], dy: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The gradients of these arguments, through scores that are computed again."""

    def of(wanted: Mapping[str, Any]) -> Any:
        return forward(spec, {**given, **wanted})[0]

    _, back = jax.vjp(of, {name: given[name] for name in sorted(needs)})
    grads: dict[str, Any] = back(dy)[0]
    return grads


def _softmax(core: AttentionSpec, scores: Any, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """(weights, the logs of what they were divided by); a query that sees no key has weights of zero."""
    sink: Any = given["softmax_offset"] if core.softmax == "learnable" else jnp.zeros(scores.shape[1], jnp.float32)
    most = scores.max(-1, keepdims=True, initial=-jnp.inf)
    if core.softmax != "vanilla":
        sink = sink[:, None, None]
        most = jnp.maximum(most, sink)
    most = jax.lax.stop_gradient(jnp.where(jnp.isfinite(most), most, 0.0))
    weights = jnp.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    if core.softmax != "vanilla":
        total += jnp.exp(sink - most)
    return weights / jnp.where(total > 0, total, 1.0), (most + jnp.log(total))[..., 0]


def _seen(core: AttentionSpec, queries: int, keys: int, given: Mapping[str, Any]) -> Any:
    """Which keys a query sees, [batch or 1, 1, queries, keys]."""
    i, j = jnp.arange(queries)[:, None], jnp.arange(keys)[None]
    len_q, len_kv, seen = queries, keys, jnp.full((1, 1, queries, keys), True)
    if core.padded:
        sums_q, sums_kv = given["cu_seqlens_q"], given["cu_seqlens_kv"]
        len_q, len_kv = jnp.diff(sums_q), jnp.diff(sums_kv)
        if core.q_format == "thd":
            (of_q, i), (of_kv, j) = _places(sums_q, i), _places(sums_kv, j)
            len_q, len_kv = len_q[of_q], len_kv[of_q]
            seen &= (of_q == of_kv) & (i < len_q)
        else:
            len_q, len_kv = (n[:, None, None, None] for n in (len_q, len_kv))
            seen = (i < len_q) & (j < len_kv)
    shift = len_kv - len_q if core.bottom_right else 0
    if core.left >= 0:
        seen &= j >= i + shift - core.left
    if core.right >= 0:
        seen &= j <= i + shift + core.right
    return seen


def _places(sums: Any, tokens: Any) -> tuple[Any, Any]:
    """(the sequences of packed tokens, their places in these); tokens behind all sequences lie behind the last."""
    sequence = jnp.minimum(jnp.searchsorted(sums[1:], tokens, side="right"), sums.size - 2)
    return sequence, tokens - sums[sequence]


def _bias(given: Mapping[str, Any], packed: bool, queries: int, keys: int) -> Any:
    """What is added to scores [batch, heads, queries, keys]. Of packed tokens a bias has a row for each place."""
    bias = given["core_attention_bias"].astype(jnp.float32)
    if not packed:
        return bias
    (of_q, i), (_, j) = (
        _places(given[f"cu_seqlens_{name}"], jnp.arange(n)) for name, n in (("q", queries), ("kv", keys))
    )
    of_q, i = of_q if bias.shape[0] > 1 else 0 * of_q, i if bias.shape[2] > 1 else 0 * i
    return bias[of_q[:, None], :, i[:, None], j[None]].transpose(2, 0, 1)[None]
