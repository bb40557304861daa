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
from te_core.dtypes import DType
from te_core.errors import UnsupportedError
from te_core.ops import _check
from te_core.ops.declare import operation, rules
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


@operation(
    """
    routing [tokens, experts] _MASKS: Mask, not 0 where a token goes to an expert.
    must tokens * experts < 1 << 31: less than 2^31 entries; split the tokens
    starts? [experts + 1] i32 written: Where the first row of each expert is written. None writes it nowhere.
""",
    runs="row_map",
)
def mask_row_map(rt: Runtime, routing: Tensor, *, starts: Tensor | None = None) -> Tensor:
    """The mask's map of `routing` [tokens, experts], which is not 0 where a token goes to an expert.

    `starts`, if given, int32 [experts + 1], gets the first row of each expert, and last the number of rows: so
    `permute` need not look for the rows that nobody gets.
    """
    tokens, experts = routing.shape
    _check_count("mask_row_map", "experts", experts, MAX_EXPERTS)
    out = rt.empty((tokens, 2 * experts + 1), dtypes.int32)
    rt.backend.row_map(rt, RowMapSpec("mask", tokens, experts, routing.dtype, None), routing, starts, out, 0)
    return out


@operation(
    """
    experts [tokens, slots] i32: Expert of each token and slot.
    must tokens * slots < 1 << 31: less than 2^31 entries; split the tokens
    rows: Number of rows of the result.
""",
    runs="row_map",
)
def index_row_map(rt: Runtime, experts: Tensor, *, rows: int) -> Tensor:
    """The index map of expert ids int32 [tokens, slots], any ids; only the first `rows` rows are kept."""
    tokens, slots = experts.shape
    out = rt.empty((tokens * slots,), dtypes.int32)
    rt.backend.row_map(rt, RowMapSpec("index", tokens, slots, experts.dtype, None), experts, None, out, rows)
    return out


@operation(
    """
    sizes [chunks] _INTEGERS: Rows of each chunk.
    order [chunks] _INTEGERS: Order of the chunks.
    must rows < 1 << 31: less than 2^31 rows; split the tokens
""",
    runs="row_map",
)
def chunk_row_map(rt: Runtime, sizes: Tensor, order: Tensor, *, rows: int) -> Tensor:
    """The index map (one slot) of `rows` rows in chunks of these sizes, when chunk order[i] comes i-th.

    Rows behind the last chunk stay where they are.
    """
    _check_count("chunk_row_map", "chunks", sizes.shape[0], MAX_CHUNKS)
    out = rt.empty((rows,), dtypes.int32)
    rt.backend.row_map(
        rt, RowMapSpec("chunks", rows, sizes.shape[0], sizes.dtype, order.dtype), sizes, order, out, rows
    )
    return out


# --------------------------------------------------------------------------------------------------- moves


@operation("""
    x [tokens, H]: Tokens.
    must rows >= 0: the rows of the result
    row_map: Map of rows, as `mask_row_map`, `index_row_map` or `chunk_row_map` gave it.
    probs: Probability of each token and expert. None moves none.
    pad_offsets: How many rows of padding come before each expert's rows. None is none.
    starts: First row of each expert, int32 [experts + 1]. None looks for it.
    fill: Whether rows that nobody gets become zeros.
""")
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
    operands = Operands(x, row_map, probs, pad_offsets, starts if fill else None)
    spec = _spec(rt, "permute", operands, x.shape[0], rows, "copy" if probs is None else "gated", fill=fill)
    out = rt.empty((rows, x.shape[1]), x.dtype)
    row_probs = None if probs is None else rt.empty((rows,), probs.dtype)
    rt.backend.permute(rt, spec, operands, out, row_probs)
    return out, row_probs


@operation("""
    x [rows, H] act: Rows.
    tokens: Number of tokens of the result.
    weights: Factors of the rows. None is 1.
    gates: Probabilities of the copies: rows of 0 are left out. None leaves none out.
    must weights is None or gates is None: one of them; leave out the other
    must row_probs is None or gates is not None: row_probs with gates; pass gates, too
    row_probs? [rows] gates: Probability of each row, which is brought back, too. None brings none.
""")
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
    operands = Operands(x, row_map, weights if gates is None else gates, pad_offsets)
    mode = "sum" if weights is gates else "weighted" if gates is None else "gated"
    spec = _spec(rt, "unpermute", operands, tokens, x.shape[0], mode)
    probs = None if row_probs is None or gates is None else rt.empty(gates.shape, gates.dtype)
    out = rt.empty((tokens, x.shape[1]), x.dtype)
    rt.backend.unpermute(rt, spec, operands, row_probs, out, probs)
    return out, probs


@operation("""
    x [rows, H] act: Rows of the forward.
    dy [tokens, H] x
    weights: Factors of the rows.
""")
def unpermute_backward(
    rt: Runtime, dy: Tensor, x: Tensor, row_map: Tensor, weights: Tensor, *, pad_offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dx, the gradient of the weights in their dtype) of `unpermute` with weights."""
    operands = Operands(x, row_map, weights, pad_offsets)
    spec = _spec(rt, "unpermute_backward", operands, dy.shape[0], x.shape[0], "weighted", fill=True, address=dy.ptr)
    dx, d_weights = rt.empty(x.shape, x.dtype), rt.empty(weights.shape, weights.dtype)
    rt.backend.unpermute_backward(rt, spec, dy, operands, dx, d_weights)
    return dx, d_weights


# -------------------------------------------------------------------------------------------------- checks


def _spec(
    rt: Runtime, op: str, operands: Operands, tokens: int, rows: int, mode: str, *, fill: bool = False, address: int = 0
) -> PermuteSpec:
    """What all moves depend on; x is checked by its caller."""
    x, row_map, probs, _, starts = operands
    masked = row_map.ndim == 2
    choices = (row_map.shape[1] - 1) // 2 if masked else row_map.shape[0] // max(tokens, 1) if row_map.ndim == 1 else 0
    _check_moves(op, rt, operands, tokens, choices, rows, mode)
    sizes, aligned = (tokens, rows, x.shape[1]), (x.ptr | address) & 15
    return PermuteSpec(*sizes, x.dtype, masked, choices, mode, _check.dtype(probs), aligned, fill, starts is not None)


@rules("""
    _o.row_map [...] i32
    must _o.row_map.shape in ((choices * tokens,), (tokens, 2 * choices + 1)): a map of these tokens, of dimensions
        [tokens, 2 * experts + 1] or [slots * tokens]; pass the map that the tokens were permuted by
    must _o.row_map.ndim == 2 or (_o.pad_offsets is None and _o.starts is None): a mask's map with pad_offsets and
        starts; leave them out
    must _o.row_map.ndim == 2 or _o.probs is None or mode == "weighted": a mask's map with gates; use weights
    _o.probs? [tokens, choices] act
    _o.pad_offsets? [choices] i64
    _o.starts? [choices + 1] i32
    must rows < 1 << 31: less than 2^31 rows; split the tokens
""")
def _check_moves(op: str, rt: Runtime, _o: Operands, tokens: int, choices: int, rows: int, mode: str) -> None:
    """What tells the places of rows fits the rows."""


def _check_count(op: str, name: str, count: int, limit: int) -> None:
    if count > limit:
        raise UnsupportedError(op, f"{count} {name}", f"up to {limit}", f"split the {name} into several calls")
