"""Padding masks whose tokens do not lie at the beginning of their rows: padding before them, or in between.

All backends take sequences by their lengths, from the beginning of a row on. So such tokens are moved to the front of
their rows, attended to there, and moved back, on the device. What that means for a user: docs/attention.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_torch.attention.inputs import Given
from te_torch.attention.masks import check_beside, check_padding_mask
from te_torch.attention.plan import OPERATION
from te_torch.quantized import QuantizedTorch


class Order(NamedTuple):
    """Where tokens go: in rows [b, s], and by the same places among all tokens of q, k or v [b * s], there and back."""

    front: torch.Tensor  # what comes to place i of a row
    back: torch.Tensor  # where place j of a row has gone
    there: torch.Tensor
    again: torch.Tensor


class Orders(NamedTuple):
    """Those of queries, and of keys and values; None: they stay where they are."""

    q: Order | None
    kv: Order | None


def orders_of(mask: Any, form: str, like: torch.Tensor) -> Orders | None:
    """How the tokens of a padding mask, or of a pair of them, have to be moved; None if none has to be.

    `form` is that of q, k and v, `like` one of them.
    """
    if isinstance(mask, (tuple, list)):
        q, kv = (_order_of(m, form, like) for m in mask)
    else:
        q = kv = _order_of(mask, form, like)
    return None if q is None and kv is None else Orders(q, kv)


def _order_of(mask: torch.Tensor, form: str, like: torch.Tensor) -> Order | None:
    check_padding_mask(mask)
    check_beside(OPERATION, like, attention_mask=mask)
    if mask.is_meta or (_may_look(mask) and _is_in_front(mask)):
        return None
    return _new_order(mask, form)


def _may_look(mask: torch.Tensor) -> bool:
    """Whether to see what a mask says costs nothing. On a GPU each layer would wait for it: tokens are always moved."""
    return mask.is_cpu and not torch.compiler.is_compiling()


def _is_in_front(mask: torch.Tensor) -> bool:
    """Whether no token lies behind padding."""
    return not bool((mask[..., :-1] & ~mask[..., 1:]).any())


def _new_order(mask: torch.Tensor, form: str) -> Order:
    hidden = mask.flatten(1)
    places = torch.arange(hidden.shape[1], device=mask.device).expand(hidden.shape)
    tokens = (~hidden).cumsum(1)  # up to this place
    # A token comes behind the tokens before it, padding behind all tokens and the padding before it.
    back = torch.where(hidden, tokens[:, -1:] + places - tokens, tokens - 1)
    front = torch.empty_like(back).scatter_(1, back, places)
    return Order(front, back, _among_all(front, form), _among_all(back, form))


def _among_all(places: torch.Tensor, form: str) -> torch.Tensor:
    """Places in rows [b, s] as places among all tokens of [b, s, ..] or [s, b, ..]."""
    batch, length = places.shape
    rows = torch.arange(batch, device=places.device)[:, None]
    return (places * batch + rows).t().reshape(-1) if form == "sbhd" else (rows * length + places).reshape(-1)


# ----------------------------------------------------------------------------------------------- moving tokens


def to_front(given: Given, orders: Orders) -> Given:
    """The call with its tokens in front; what comes of it has to be moved back, and so is not quantized."""
    q, kv = orders
    a, b, c = (
        t if t is None or order is None else _Moved.apply(t, order.there, order.again)
        for t, order in zip((given.a, given.b, given.c), (q, kv, kv), strict=True)
    )
    bias = given.core_attention_bias
    if bias is not None:
        if q is not None and bias.shape[2] > 1:
            bias = _taken(bias, q.front[:, None, :, None], 2)
        if kv is not None and bias.shape[3] > 1:
            bias = _taken(bias, kv.front[:, None, None, :], 3)
    return given.but(a=a, b=b, c=c, core_attention_bias=bias, fp8_output=False)


def moved_back(out: torch.Tensor, orders: Orders) -> torch.Tensor:
    """The output where its queries were."""
    if orders.q is None:
        return out
    moved: torch.Tensor = _Moved.apply(out, orders.q.again, orders.q.there)
    return moved


def back_in_pairs(hidden: torch.Tensor, orders: Orders) -> torch.Tensor:
    """What is said of pairs [b|1, 1, sq, skv] of tokens in front, of the places where they were."""
    if orders.q is not None:
        hidden = _taken(hidden, orders.q.back[:, None, :, None], 2)
    return hidden if orders.kv is None else _taken(hidden, orders.kv.back[:, None, None, :], 3)


def _taken(t: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    shape = [index.shape[0], *t.shape[1:]]
    shape[dim] = index.shape[dim]
    return t.expand(index.shape[0], -1, -1, -1).gather(dim, index.expand(shape))


class _Moved(torch.autograd.Function):
    """Tokens in another order; gradients go back in the inverse one, so that nothing is added up."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return _select(t, index)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return _select(dy, inverse), None, None


def _select(t: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if isinstance(t, QuantizedTorch):
        t = t.dequantize()
    return t.flatten(0, 1).index_select(0, index).view(t.shape)
