"""Rows of tokens moved to experts and back: maps of where each row goes, copies by them, and sums.

A map is of one of two forms.

    mask    int32 [tokens, 2 * experts + 1]; of token t with n experts: [t, :n] the rows of its copies, the last
            expert's first, [t, experts : experts + n] these experts, [t, 2 * experts] n; the rest is undefined
    index   int32 [slots * tokens]; copy k of token t is in row map[k * tokens + t], -1: nowhere

Rows are ordered by expert, then token (then slot). `pad_offsets` int64 [experts], with a mask's map, is added to the
rows of each expert. A copy whose row is behind the last one does not exist: it is not written and counts for nothing.

Values are read and added in float32 and rounded once; weights multiply by fused multiply-adds, in the order of the
map. With an index map and weights the sum is kept in the values' dtype, to which weights are rounded before.
Nothing here waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core import dtypes
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import UnsupportedError
from te_core.ops import _check
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: The shared memory of the kernels that make maps: 3 * experts, and 3 * chunks, of 4 bytes each.
MAX_EXPERTS = 2048
MAX_CHUNKS = 8192

_MASKS = (dtypes.bool_, dtypes.uint8, dtypes.int32, dtypes.int64)
_INTEGERS = (dtypes.int32, dtypes.int64)


class Operands(NamedTuple):
    """What all moves read."""

    x: Tensor
    row_map: Tensor
    probs: Tensor | None  # or weights
    pad_offsets: Tensor | None
    starts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowMapSpec:
    """All that the launches of a map depend on besides addresses."""

    kind: str  # mask, index, chunks
    tokens: int  # rows of what is moved
    choices: int  # experts, slots, chunks
    source: DType
    order: DType | None  # of the chunks' new order


@dataclass(frozen=True, slots=True)
class PermuteSpec:
    """All that the launches of `permute`, `unpermute` and `unpermute_backward` depend on besides addresses."""

    tokens: int
    rows: int
    columns: int
    dtype: DType
    masked: bool
    choices: int  # experts of a mask's map, slots of an index map
    mode: str  # copy, sum, weighted, gated
    probs: DType | None
    alignment: int  # how far addresses are off the 16-byte grid, all of them together
    fill: bool
    starts: bool = False  # whether the rows to be filled are known by them


# ---------------------------------------------------------------------------------------------------- maps


def mask_row_map(rt: Runtime, routing: Tensor, *, starts: Tensor | None = None) -> Tensor:
    """The mask's map of `routing` [tokens, experts], which is not 0 where a token goes to an expert.

    `starts`, if given, int32 [experts + 1], gets the first row of each expert, and last the number of rows: so
    `permute` need not look for the rows that nobody gets.
    """
    op = "mask_row_map"
    _check.matrix(op, "routing", routing)
    _check.one_of(op, "dtype of routing", routing.dtype, _MASKS)
    tokens, experts = routing.shape
    _check.vector(op, "starts", starts, experts + 1, (dtypes.int32,))
    _check.on_device(op, rt.device, routing, starts)
    _check.written(op, "starts", starts)
    _check_size(op, tokens * experts)
    _check_count(op, "experts", experts, MAX_EXPERTS)
    out = rt.empty((tokens, 2 * experts + 1), dtypes.int32)
    rt.backend.row_map(rt, RowMapSpec("mask", tokens, experts, routing.dtype, None), routing, starts, out, 0)
    return out


def index_row_map(rt: Runtime, experts: Tensor, *, rows: int) -> Tensor:
    """The index map of expert ids int32 [tokens, slots], any ids; only the first `rows` rows are kept."""
    op = "index_row_map"
    _check.matrix(op, "experts", experts)
    _check.one_of(op, "dtype of experts", experts.dtype, (dtypes.int32,))
    _check.on_device(op, rt.device, experts)
    tokens, slots = experts.shape
    _check_size(op, tokens * slots)
    out = rt.empty((tokens * slots,), dtypes.int32)
    rt.backend.row_map(rt, RowMapSpec("index", tokens, slots, experts.dtype, None), experts, None, out, rows)
    return out


def chunk_row_map(rt: Runtime, sizes: Tensor, order: Tensor, *, rows: int) -> Tensor:
    """The index map (one slot) of `rows` rows in chunks of these sizes, when chunk order[i] comes i-th.

    Rows behind the last chunk stay where they are.
    """
    op = "chunk_row_map"
    for name, t in (("sizes", sizes), ("order", order)):
        _check.require(t.ndim == 1, op, f"{name} = {t!r}", "a vector, one entry a chunk", f"flatten {name}")
        _check.vector(op, name, t, sizes.shape[0], _INTEGERS)
    _check.on_device(op, rt.device, sizes, order)
    _check_size(op, rows)
    _check_count(op, "chunks", sizes.shape[0], MAX_CHUNKS)
    out = rt.empty((rows,), dtypes.int32)
    rt.backend.row_map(
        rt, RowMapSpec("chunks", rows, sizes.shape[0], sizes.dtype, order.dtype), sizes, order, out, rows
    )
    return out


# --------------------------------------------------------------------------------------------------- moves


def permute(
    rt: Runtime,
    x: Tensor,
    row_map: Tensor,
    *,
    rows: int,
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
    starts: Tensor | None = None,
    fill: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(x's rows [tokens, H] in all their places [rows, H], the probability of each row or None).

    probs [tokens, experts], with a mask's map: a copy whose probability is 0 is a row of zeros. `fill`: rows that no
    copy goes to are zeros, too; without it they are not written. `starts`: what `mask_row_map` gave with this map; the
    rows to be filled are then those before each expert that pad_offsets says and those behind the last.
    """
    op = "permute"
    operands = Operands(x, row_map, probs, pad_offsets, starts if fill else None)
    _check.matrix(op, "x", x)
    _check.require(rows >= 0, op, f"rows={rows}", "the rows of the result", "correct rows")
    spec = _spec(rt, op, operands, x.shape[0], rows, "copy" if probs is None else "gated", fill=fill)
    out = rt.empty((rows, x.shape[1]), x.dtype)
    row_probs = None if probs is None else rt.empty((rows,), probs.dtype)
    rt.backend.permute(rt, spec, operands, out, row_probs)
    return out, row_probs


def unpermute(
    rt: Runtime,
    x: Tensor,
    row_map: Tensor,
    *,
    tokens: int,
    weights: Tensor | None = None,
    gates: Tensor | None = None,
    row_probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(the sum of each token's rows of x [rows, H], in x's dtype, [tokens, H]; None).

    weights [tokens, experts or slots] multiply the rows. Or, as the derivative of `permute` with probabilities, `gates`
    [tokens, experts]: rows of gate 0 are left out, and with row_probs [rows] the second result is [tokens, experts],
    what row_probs has for each copy, 0 where there is none.
    """
    op = "unpermute"
    operands = Operands(x, row_map, weights if gates is None else gates, pad_offsets)
    _check.matrix(op, "x", x)
    _check.one_of(op, "dtype of x", x.dtype, ACTIVATION_DTYPES)
    _check.require(weights is None or gates is None, op, "weights and gates", "one of them", "leave out the other")
    mode = "sum" if weights is gates else "weighted" if gates is None else "gated"
    spec, probs = _spec(rt, op, operands, tokens, x.shape[0], mode), None
    if row_probs is not None:
        _check.require(gates is not None, op, "row_probs alone", "row_probs with gates", "pass gates, too")
        assert gates is not None
        _check.vector(op, "row_probs", row_probs, x.shape[0], (gates.dtype,))
        _check.on_device(op, rt.device, row_probs)
        probs = rt.empty(gates.shape, gates.dtype)
    out = rt.empty((tokens, x.shape[1]), x.dtype)
    rt.backend.unpermute(rt, spec, operands, row_probs, out, probs)
    return out, probs


def unpermute_backward(
    rt: Runtime, dy: Tensor, x: Tensor, row_map: Tensor, weights: Tensor, *, pad_offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dx, the gradient of the weights in their dtype) of `unpermute` with weights."""
    op = "unpermute_backward"
    operands = Operands(x, row_map, weights, pad_offsets)
    _check.matrix(op, "x", x)
    _check.one_of(op, "dtype of x", x.dtype, ACTIVATION_DTYPES)
    _check.sized(op, "dy", dy, (*dy.shape[:1], x.shape[1]), (x.dtype,))
    _check.on_device(op, rt.device, dy)
    spec = _spec(rt, op, operands, dy.shape[0], x.shape[0], "weighted", fill=True, address=dy.ptr)
    dx, d_weights = rt.empty(x.shape, x.dtype), rt.empty(weights.shape, weights.dtype)
    rt.backend.unpermute_backward(rt, spec, dy, operands, dx, d_weights)
    return dx, d_weights


# -------------------------------------------------------------------------------------------------- checks


def _spec(
    rt: Runtime, op: str, operands: Operands, tokens: int, rows: int, mode: str, *, fill: bool = False, address: int = 0
) -> PermuteSpec:
    """What all moves depend on; x is checked by its caller."""
    x, row_map, probs, pad_offsets, starts = operands
    masked = row_map.ndim == 2
    choices = (row_map.shape[1] - 1) // 2 if masked else row_map.shape[0] // max(tokens, 1) if row_map.ndim == 1 else 0
    shapes = {1: (choices * tokens,), 2: (tokens, 2 * choices + 1)}
    _check.require(
        row_map.shape == shapes.get(row_map.ndim) and row_map.is_contiguous and row_map.dtype is dtypes.int32,
        op,
        f"row_map = {row_map!r} for {tokens} tokens",
        "a dense int32 map of these tokens: [tokens, 2 * experts + 1], or [slots * tokens]",
        "pass the map that the tokens were permuted by",
    )
    if probs is not None:
        _check.require(masked or mode == "weighted", op, "gates with an index map", "a mask's map", "use weights")
        _check.sized(op, "the probabilities", probs, (tokens, choices), ACTIVATION_DTYPES)
    if pad_offsets is not None:
        _check.require(masked, op, "pad_offsets with an index map", "a mask's map", "leave pad_offsets out")
        _check.vector(op, "pad_offsets", pad_offsets, choices, (dtypes.int64,))
    if starts is not None:
        _check.require(masked, op, "starts with an index map", "a mask's map", "leave starts out")
        _check.vector(op, "starts", starts, choices + 1, (dtypes.int32,))
    _check.on_device(op, rt.device, x, row_map, probs, pad_offsets, starts)
    _check_size(op, rows)
    sizes, aligned = (tokens, rows, x.shape[1]), (x.ptr | address) & 15
    return PermuteSpec(*sizes, x.dtype, masked, choices, mode, _check.dtype(probs), aligned, fill, starts is not None)


def _check_size(op: str, entries: int) -> None:
    _check.require(entries < 1 << 31, op, f"{entries} entries", "less than 2^31", "split the tokens")


def _check_count(op: str, name: str, count: int, limit: int) -> None:
    if count > limit:
        raise UnsupportedError(op, f"{count} {name}", f"up to {limit}", f"split the {name} into several calls")
