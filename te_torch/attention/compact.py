"""Padding masks whose tokens do not lie at the beginning of their rows: padding before them, or in between.

All backends take sequences by their lengths, from the beginning of a row on. So such tokens are moved to the front of
their rows, attended to there, and moved back, on the device. What that means for a user: docs/attention.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_core.ops import raw as ops
from te_torch.attention.inputs import Given
from te_torch.attention.masks import Sums, check_beside, check_padding_mask, get_cu_seqlens
from te_torch.attention.plan import OPERATION, Key, fact_of
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import runtime_for, to_core, to_torch
from te_torch.surroundings import dispatch_modes, functorch_active


class Order(NamedTuple):
    """Where tokens go, by places among all tokens of q, k or v [b * s], and how many there are."""

    there: torch.Tensor  # what comes to a place
    again: torch.Tensor  # where what is in a place has gone
    cu: torch.Tensor  # cu_seqlens
    length: int  # of a row
    form: str


class Orders(NamedTuple):
    """Those of queries, and of keys and values; None: they stay where they are."""

    q: Order | None
    kv: Order | None


def orders_of(mask: Any, form: str, like: torch.Tensor, traced: bool = False) -> Orders | None:
    """How the tokens of a padding mask, or of a pair of them, have to be moved; None if none has to be.

    `form` is that of q, k and v, `like` one of them. `traced` code looks at no value, and sorts by torch's operators.
    """
    if isinstance(mask, (tuple, list)):
        q, kv = (_order_of(m, form, like, traced) for m in mask)
    else:
        q = kv = _order_of(mask, form, like, traced)
    return None if q is None and kv is None else Orders(q, kv)


def _order_of(mask: torch.Tensor, form: str, like: torch.Tensor, traced: bool) -> Order | None:
    check_padding_mask(mask)
    check_beside(OPERATION, like, attention_mask=mask)
    if mask.is_meta or (not traced and _may_look(mask) and _is_in_front(mask)):
        return None
    if not traced and _is_in_memory(mask):  # in one launch: each layer reads its mask in each call
        there, again, cu = map(to_torch, ops.padding_order(runtime_for(mask), to_core(mask.contiguous()), form=form))
        return Order(there, again, cu, mask.shape[-1], form)
    hidden = mask.flatten(1)
    places = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape)
    tokens = (~hidden).cumsum(1)  # up to this place
    # A token comes behind the tokens before it, padding behind all tokens and the padding before it.
    back = torch.where(hidden, tokens[:, -1:] + places - tokens, tokens - 1)
    front = torch.empty_like(back).scatter_(1, back, places)
    there, again = _among_all(front, form), _among_all(back, form)
    return Order(there, again, get_cu_seqlens(hidden), mask.shape[-1], form)


def _may_look(mask: torch.Tensor) -> bool:
    """Whether to see what a mask says costs nothing. On a GPU each layer would wait for it: tokens are always moved."""
    return mask.is_cpu


def _is_in_front(mask: torch.Tensor) -> bool:
    """Whether no token lies behind padding."""
    return not bool((mask[..., :-1] & ~mask[..., 1:]).any())


def _is_in_memory(mask: torch.Tensor) -> bool:
    """Whether a kernel may read the mask: nothing transforms what is done to it."""
    return type(mask) is torch.Tensor and not dispatch_modes() and not functorch_active()


def _among_all(places: torch.Tensor, form: str) -> torch.Tensor:
    """Places in rows [b, s] as places among all tokens of [b, s, ..] or [s, b, ..]."""
    batch, length = places.shape
    rows = torch.arange(batch, device=places.device)[:, None]
    return (places * batch + rows).t().reshape(-1) if form == "sbhd" else (rows * length + places).reshape(-1)


def _in_rows(places: torch.Tensor, order: Order) -> torch.Tensor:
    """The inverse of that."""
    batch, length = order.cu.shape[0] - 1, order.length
    return places.view(length, batch).t() // batch if order.form == "sbhd" else places.view(batch, length) % length


def fronts(orders: Orders) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What comes to each place of the rows of queries, and of keys, [b, s]; None: what was there."""
    q, kv = (None if order is None else _in_rows(order.there, order) for order in orders)
    return q, kv


def sums_of(orders: Orders | None) -> Sums:
    """cu_seqlens of queries and of keys, where their order tells them."""
    q, kv = orders or (None, None)
    return q and q.cu, kv and kv.cu


# ----------------------------------------------------------------------------------------------- moving tokens


def in_front(key: Key, given: Given, lengths: str, traced: bool = False) -> tuple[Key, Given, Orders | None]:
    """A call and its key with all tokens in front, if `lengths` come from padding masks, and how they were moved."""
    orders = orders_of(given.attention_mask, key.form, given.a, traced) if lengths in ("mask", "masks") else None
    if orders is None:
        return key, given, None
    q, kv = orders
    a, b, c = (
        t if t is None or order is None else _Moved.apply(t, order.there, order.again)
        for t, order in zip((given.a, given.b, given.c), (q, kv, kv), strict=True)
    )
    bias = given.core_attention_bias
    if bias is not None:
        if q is not None and bias.shape[2] > 1:
            bias = _taken(bias, _in_rows(q.there, q)[:, None, :, None], 2)
        if kv is not None and bias.shape[3] > 1:
            bias = _taken(bias, _in_rows(kv.there, kv)[:, None, None, :], 3)
        key = key._replace(bias=fact_of(bias, torch.is_grad_enabled()))  # it may have been laid anew
    # What comes of it has to be moved back, and so is not quantized.
    return key, given.but(a=a, b=b, c=c, core_attention_bias=bias, fp8_output=False), orders


def returned(out: torch.Tensor, largest: torch.Tensor | None, orders: Orders | None) -> Any:
    """What an attention returns: the output where its queries were, and the largest logits if they were asked for."""
    if orders is not None and orders.q is not None:
        out = _Moved.apply(out, orders.q.again, orders.q.there)
    return out if largest is None else (out, largest)


def back_in_pairs(hidden: torch.Tensor, orders: Orders) -> torch.Tensor:
    """What is said of pairs [b|1, 1, sq, skv] of tokens in front, of the places where they were."""
    q, kv = orders
    if q is not None:
        hidden = _taken(hidden, _in_rows(q.again, q)[:, None, :, None], 2)
    return hidden if kv is None else _taken(hidden, _in_rows(kv.again, kv)[:, None, None, :], 3)


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
