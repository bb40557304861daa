"""The router of a mixture of experts on JAX arrays."""

from __future__ import annotations

from enum import Enum
from typing import Any

import jax.numpy as jnp

from te_core.errors import ArgumentError
from te_core.spelling import choice_error
from te_jax.calling import call_layer, number


class ScoreFunction(Enum):
    """What makes scores of logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class RoutingMapFormat(Enum):
    """How a map of tokens to experts is stored: a byte an element, or a bit, the lowest first."""

    BYTEMAP = 0
    BITMAP_U8 = 1


def fused_topk_with_score_function(
    logits: Any,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int = -1,
    group_topk: int = -1,
    scaling_factor: float = 1.0,
    score_function: ScoreFunction | str = ScoreFunction.SOFTMAX,
    expert_bias: Any = None,
    compute_aux_scores: bool = False,
    routing_map_format: RoutingMapFormat | str | int = RoutingMapFormat.BYTEMAP,
) -> tuple[Any, Any]:
    """(probabilities [tokens, experts], zeros for experts that were not chosen; the map of the chosen).

    The best `topk` experts of each token are chosen, of equal ones the first; with groups among the experts of the best
    ones. The map is bool [tokens, experts], or with "bitmap_u8" uint8 [tokens, experts / 8]. `compute_aux_scores` gives
    scores of all experts, which add up to 1, and takes no notice of bias, groups and factor.
    """
    op = "fused_topk_with_score_function"
    if isinstance(scaling_factor, bool) or not isinstance(scaling_factor, (int, float)):
        raise TypeError(f"{op}: scaling_factor={scaling_factor!r}, not an int or a float")
    score = _one_of(op, "score_function", score_function, {f: f.value for f in ScoreFunction})
    by_name: dict[Any, str] = {f: f.name.lower() for f in RoutingMapFormat}
    form = _one_of(op, "routing_map_format", routing_map_format, by_name | {f.value: n for f, n in by_name.items()})
    options = {"topk": topk, "score_function": score, "routing_map_format": form}
    if compute_aux_scores:
        probs, routing = call_layer("router_scores", {"logits": logits}, options)
        return probs.astype(logits.dtype), routing
    if expert_bias is not None and score != "sigmoid":
        raise ArgumentError(op, f"expert_bias with {score}", "a bias with sigmoid", "leave expert_bias out")
    options |= {"use_pre_softmax": use_pre_softmax, "scaling_factor": number(op, "scaling_factor", scaling_factor)}
    options |= {"num_groups": max(num_groups or 0, 0), "group_topk": max(group_topk or 0, 0)}
    probs, routing = call_layer("router_topk", {"logits": logits, "expert_bias": expert_bias}, options)
    return probs, routing


def fused_moe_aux_loss(probs: Any, tokens_per_expert: Any, topk: int, coeff: float) -> Any:
    """experts * coeff / (topk * tokens^2) * sum(tokens_per_expert * sum of probs [tokens, experts] over tokens)."""
    probs = jnp.asarray(probs)
    arrays = {"probs": probs, "tokens_per_expert": tokens_per_expert}
    arrays["total_num_tokens"] = jnp.full((1,), probs.shape[0], jnp.int32)
    options = {"num_experts": probs.shape[-1], "topk": topk, "coeff": number("fused_moe_aux_loss", "coeff", coeff)}
    (loss,) = call_layer("router_aux_loss", arrays, options)
    return loss.reshape(())


def _one_of(operation: str, name: str, given: Any, known: dict[Any, str]) -> str:
    """What the core calls a choice, which may be its member, its number, or its name."""
    found = given if isinstance(given, str) else known.get(given)
    if found is None or found not in known.values():
        raise choice_error(operation, name, given, dict.fromkeys(known.values()))
    return found
