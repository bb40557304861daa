"""The router of a mixture of experts: which experts a token goes to, with which probabilities, and the auxiliary loss.

The documented functions over the layers of `te_core.layers.router`. Nothing here waits for the device but a first look
at the bounds of a histogram.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.layers import router as core
from te_core.ops.router import SCORES, RouterTerms
from te_core.spelling import choice_error
from te_torch.calls import made_of_constants
from te_torch.doors import either
from te_torch.function import Call, apply, of_table, register
from te_torch.runtime import check_dtype
from te_torch.values import integer

ROUTER = of_table("router_topk", core.RouterSaved, differentiable=1)
SCORED = of_table("router_scores", core.RouterSaved, differentiable=1)
AUX_LOSS = of_table("router_aux_loss", core.AuxLossSaved)
_NUMBERS = {torch.int16: "int16", torch.int32: "int32", torch.int64: "int64"}
_COUNTS = (torch.int32, torch.int64, torch.float32, torch.bfloat16)
_MODES = ("two_kernel", "fused_atomic")


class RoutingMapFormat(IntEnum):
    """How a map of tokens to experts is stored: a byte an element, or a bit, the lowest first."""

    BYTEMAP = 0
    BITMAP_U8 = 1


#: The numbers and names of formats. Dynamo of torch 2.11 cannot loop over an enum.
_FORMATS = [(int(one), one.name.lower()) for one in RoutingMapFormat]


class QBHistogramMode(IntEnum):
    """How the histogram of quantile balancing is counted in the documented package. Here both are one way."""

    TWO_KERNEL = 0
    FUSED_ATOMIC = 1


class RouterError(ArgumentError, RuntimeError):
    """An argument that a router does not take. Also the documented RuntimeError."""


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: RoutingMapFormat | str | int = RoutingMapFormat.BYTEMAP,
    topk_indices: torch.Tensor | None = None,
    qb_histogram: torch.Tensor | None = None,
    qb_bin_bounds: torch.Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities [.., experts] in the logits' dtype, zeros for experts that were not chosen; the map of those).

    In float32. The best `topk` experts of each token are chosen, of equal ones the first; with `group_topk` among the
    experts of the best groups. `te_core.ops.router` has the rules. The map is bool [.., experts], or with "bitmap_u8"
    uint8 [.., experts / 8]. `topk_indices` [.., topk], if given, gets the numbers of the chosen experts, the smallest
    first, and is returned in the place of the map. The three `qb_` arguments go together: the histogram [experts, bins]
    is added to; the first call with bounds, or with bounds that have changed, reads them.

    Raises:
        RouterError: An argument is not allowed, or does not fit the others; a ValueError and a RuntimeError.

    Example:
        from te_torch.router import fused_topk_with_score_function

        probs, routing_map = fused_topk_with_score_function(
            torch.randn(32, 8), 2, False, None, None, None, "softmax", None
        )
    """
    op = "fused_topk_with_score_function"
    experts, form = _experts(op, logits), _format(op, routing_map_format)
    lead, bins = tuple(logits.shape[:-1]), 0
    if expert_bias is not None:
        if score_function == "softmax":
            allowed, do = "a bias with sigmoid or sqrtsoftplus", "leave expert_bias out"
            raise RouterError(op, "expert_bias with softmax", allowed, do)
        _check_sized(op, "expert_bias", expert_bias, (experts,), (torch.float32,))
        expert_bias = expert_bias.detach()
    if topk_indices is not None:
        if form != "bytemap":
            raise RouterError(op, f"topk_indices with {form}", "either of both", "leave one of them out")
        _check_sized(op, "topk_indices", topk_indices, (*lead, topk), tuple(_NUMBERS))
        form = _NUMBERS[topk_indices.dtype]
    if any([t is not None for t in (qb_histogram, qb_bin_bounds, qb_histogram_mode)]):
        _check_histogram(op, experts, qb_histogram, qb_bin_bounds, qb_histogram_mode)
        bins = qb_histogram.shape[1]  # type: ignore[union-attr]
    terms = terms_of(op, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function)
    needs = torch.is_grad_enabled() and logits.requires_grad
    call = _call(op, experts, form, bins, False, needs, *terms)
    probs, routing, *counted = apply(call, None, False, logits, expert_bias, qb_bin_bounds)
    if needs and topk_indices is None:
        routing = routing.clone()  # Megatron-core pads its map in place, and backward reads what was chosen
    if qb_histogram is not None:
        qb_histogram.add_(counted[0])
    return probs, routing if topk_indices is None else topk_indices.copy_(routing)


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: RoutingMapFormat | str | int = RoutingMapFormat.BYTEMAP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the map of the best `topk` experts; scores of all experts, float32 [.., experts]), for the auxiliary loss.

    The scores of a token add up to 1: softmax, or sigmoid and sqrtsoftplus divided by their sum.
    """
    op = "fused_compute_score_for_moe_aux_loss"
    experts, form = _experts(op, logits), _format(op, routing_map_format)
    wanted = torch.is_grad_enabled() and logits.requires_grad
    call = _call(op, experts, form, 0, False, wanted, integer(op, "topk", topk), score_function)
    scores, routing = apply(call, None, False, logits)
    return routing, scores


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """coeff * num_experts / (topk * N^2) * sum(tokens_per_expert * sum of probs over tokens), in the dtype of probs.

    N is `total_num_tokens`: a number, or an int64 tensor on the device, which a CUDA graph reads anew. The columns of
    probs [tokens, columns] are the experts, or those of several sequences side by side.
    """
    op = "fused_moe_aux_loss"
    columns, total = _experts(op, probs), total_num_tokens
    experts, chosen = integer(op, "num_experts", num_experts), integer(op, "topk", topk)
    if probs.ndim != 2 or min(experts, chosen) < 1 or columns % experts:
        got = f"probs {tuple(probs.shape)}, num_experts={experts}, topk={chosen}"
        allowed = "probs [tokens, a multiple of num_experts], topk and num_experts from 1 on"
        raise RouterError(op, got, allowed, "correct probs, or the numbers")
    _check_sized(op, "tokens_per_expert", tokens_per_expert, (columns,), _COUNTS)
    if isinstance(total, torch.Tensor):
        if total.numel() != 1 or total.dtype != torch.int64:
            raise RouterError(
                op, f"total_num_tokens {total.dtype} {tuple(total.shape)}", "one int64 number", "correct it"
            )
        total = total.reshape(1)
    else:
        total = torch.full((1,), integer(op, "total_num_tokens", total), dtype=torch.int64, device=probs.device)
    call = _loss(torch.is_grad_enabled() and probs.requires_grad, experts, chosen, float(coeff))
    (loss,) = apply(call, None, False, probs, tokens_per_expert.detach(), total)
    return loss.reshape(())


def terms_of(
    op: str, topk: int, pre: bool, groups: int | None, group_topk: int | None, scale: float | None, score: str
) -> tuple[Any, ...]:
    """How experts are chosen, in constants; the arguments of `RouterTerms`."""
    factor = 1.0 if scale is None else float(scale)
    return integer(op, "topk", topk), score, bool(pre), groups or 0, group_topk or 0, factor


def check_terms(op: str, experts: int, topk: int, score: str, *more: Any) -> RouterTerms:
    """The terms, once it is clear that they fit so many experts."""
    if score not in SCORES:
        raise choice_error(op, "score_function", score, SCORES, error=RouterError)
    terms = RouterTerms(topk, score, *more)
    try:
        terms.check(op, experts)
    except ArgumentError as error:
        raise RouterError(op, error.got, error.allowed, error.do) from error
    return terms


def routed(
    op: str, logits: torch.Tensor, bias: torch.Tensor | None, terms: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(probabilities, map, tokens of each expert int32), from one launch; `terms` as `terms_of` gives them."""
    wanted = torch.is_grad_enabled() and logits.requires_grad
    call = _call(op, logits.shape[-1], "bytemap", 0, True, wanted, *terms)
    probs, routing, counts = apply(call, None, False, logits, bias, None)
    return probs, routing, counts


@made_of_constants
def _call(op: str, experts: int, form: str, bins: int, counts: bool, needs: bool, *terms: Any) -> Call:
    made = check_terms(op, experts, *terms)
    return register(ROUTER if len(terms) > 2 else SCORED, core.RouterSpec(made, form, counts, bins), needs)


@made_of_constants
def _loss(needs: bool, experts: int, topk: int, coeff: float) -> Call:
    return register(AUX_LOSS, core.AuxLossSpec(experts, topk, coeff), needs)


def _experts(op: str, t: torch.Tensor) -> int:
    check_dtype(op, t)
    if not t.ndim:
        raise RouterError(op, "a tensor without dimensions", "[.., experts]", "pass a row for each token")
    return t.shape[-1]


def _format(op: str, given: Any) -> str:
    """The name of a map's format."""
    if not isinstance(given, (str, int)):
        raise TypeError(f"{op}: routing_map_format={given!r}, not a RoutingMapFormat, a str or an int")
    for number, name in _FORMATS:
        if given in (number, name):
            return name
    raise choice_error(op, "routing_map_format", given, [name for _, name in _FORMATS], error=RouterError)


def _check_sized(op: str, name: str, t: Any, shape: tuple[int, ...], allowed: tuple[torch.dtype, ...]) -> None:
    right = isinstance(t, torch.Tensor) and tuple(t.shape) == shape and t.dtype in allowed
    if not right or not t.is_contiguous():
        got = f"{t.dtype} {tuple(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
        words = " or ".join(str(one).removeprefix("torch.") for one in allowed)
        raise RouterError(op, f"{name} {got}", f"a contiguous tensor {list(shape)} of {words}", f"correct {name}")


def _check_histogram(op: str, experts: int, histogram: Any, bounds: Any, mode: Any) -> None:
    """The three go together; the bounds' values are looked at once for each version of them."""
    wrong = partial(RouterError, op)
    if histogram is None or bounds is None or mode is None:
        allowed = "qb_histogram, qb_bin_bounds and qb_histogram_mode provided together"
        raise wrong("some of the qb_ arguments", allowed, "pass all three, or none")
    if mode not in _MODES:
        raise choice_error(op, "qb_histogram_mode", mode, _MODES, error=RouterError)
    bins = histogram.shape[-1] if isinstance(histogram, torch.Tensor) and histogram.ndim else 0
    _check_sized(op, "qb_histogram", histogram, (experts, max(bins, 1)), (torch.int32,))
    _check_sized(op, "qb_bin_bounds", bounds, (2,), (torch.float32,))
    if either(False, True):  # nobody waits in traced code
        return
    version = None if bounds.is_inference() else bounds._version
    if getattr(bounds, "_looked_at", -1) == version:
        return
    if bounds.is_cuda and torch.cuda.is_current_stream_capturing():
        allowed = "bounds that an earlier call has read"
        raise wrong("qb_bin_bounds for the first time in a capture", allowed, "call it once before the capture")
    lower, upper = bounds.tolist()
    if not (-float("inf") < lower < upper < float("inf")):
        raise wrong(f"qb_bin_bounds=({lower}, {upper})", "finite with lower < upper", "correct the bounds")
    bounds._looked_at = -1 if version is None else version


__all__ = [
    "QBHistogramMode",
    "RoutingMapFormat",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]
