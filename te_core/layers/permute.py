"""Tokens to their experts, and back: the copies and sums of `te_core.ops.permute` as layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core import dtypes
from te_core.arguments import explained
from te_core.ops import raw as ops
from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class PermuteSpec:
    """How many tokens there are, and how many rows they come to."""

    tokens: int
    rows: int
    masked: bool = True  # the routing is a mask [tokens, experts], not expert ids [tokens, slots]


class PermuteSaved(NamedTuple):
    """What backward reads."""

    row_map: Tensor
    probs: Tensor | None


class UnpermuteSaved(NamedTuple):
    """What backward reads."""

    x: Tensor | None  # None without weights, as these
    row_map: Tensor
    weights: Tensor | None


@explained
def forward(
    rt: Runtime, x: Tensor, routing: Tensor, probs: Tensor | None, *, spec: PermuteSpec, scales: Scales | None = None
) -> tuple[tuple[Tensor, ...], PermuteSaved]:
    """((rows by expert, map), saved), with probs ((rows, map, the probability of each row), saved)."""
    starts = rt.empty((routing.shape[1] + 1,), dtypes.int32) if spec.masked else None
    if spec.masked:
        row_map = ops.mask_row_map(rt, routing, starts=starts)
    else:
        row_map = ops.index_row_map(rt, routing, rows=spec.rows)
    y, row_probs = ops.permute(rt, x, row_map, rows=spec.rows, probs=probs, starts=starts)
    return (y, row_map) if row_probs is None else (y, row_map, row_probs), PermuteSaved(row_map, probs)


@explained
def backward(
    rt: Runtime,
    dy: Tensor,
    dmap: None,
    drow_probs: Tensor | None,
    saved: PermuteSaved,
    *,
    spec: PermuteSpec,
    scales: Scales | None = None,
) -> tuple[Tensor, None, Tensor | None]:
    """(dx, None, dprobs)."""
    row_map, probs = saved
    if probs is not None and drow_probs is None:
        drow_probs = rt.zeros((spec.rows,), probs.dtype)
    dx, dprobs = ops.unpermute(rt, dy, row_map, tokens=spec.tokens, gates=probs, row_probs=drow_probs)
    return dx, None, dprobs


@explained
def unpermute_forward(
    rt: Runtime, x: Tensor, row_map: Tensor, weights: Tensor | None, *, spec: PermuteSpec, scales: Scales | None = None
) -> tuple[tuple[Tensor], UnpermuteSaved]:
    """((each token's rows added up, times their weights),), saved)."""
    y, _ = ops.unpermute(rt, x, row_map, tokens=spec.tokens, weights=weights)
    return (y,), UnpermuteSaved(None if weights is None else x, row_map, weights)


@explained
def unpermute_backward(
    rt: Runtime, dy: Tensor, saved: UnpermuteSaved, *, spec: PermuteSpec, scales: Scales | None = None
) -> tuple[Tensor, None, Tensor | None]:
    """(dx, None, dweights)."""
    x, row_map, weights = saved
    if x is None or weights is None:
        return ops.permute(rt, dy, row_map, rows=spec.rows)[0], None, None
    dx, dweights = ops.unpermute_backward(rt, dy, x, row_map, weights)
    return dx, None, dweights
