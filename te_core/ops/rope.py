"""Rotary position embedding of heads, and the same while a packed projection is split into q, k and v.

Channel pairs (a, b) are the two halves of the first d2 channels, or neighbours if `interleaved`. With the angles f of a
token's position, in float32 and rounded once to t's dtype:

    forward    y_a = a cos f_a - b sin f_a      y_b = b cos f_b + a sin f_b
    backward   x_a = a cos f_a + b sin f_b      x_b = b cos f_b - a sin f_a      (the transpose, for any f)

Channels behind d2 are copied. `freqs` is float32 [s2, d2] or [s2, 1, 1, d2]. A token's position is its place in its
sequence, plus its sequence's `start_positions` (int32; there may be more of these than sequences). With `cp_size` ranks
a sequence of local length L is chunk `cp_rank` followed by chunk 2 * cp_size - 1 - cp_rank, of L / 2 tokens each, of a
sequence of cp_size * L. In thd sequences lie between `cu_seqlens` // cp_size; a token that belongs to none is not
turned. A position that the table does not have gives NaN: it is known on the device only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod  # noqa: F401  (of a declaration)

from te_core.ops import _check
from te_core.ops.declare import exported, operation
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: Which dimension is the token's and which the sequence's (thd has none).
FORMATS: dict[str, tuple[int, int | None]] = {"sbhd": (0, 1), "bshd": (1, 0), "thd": (0, None)}


@dataclass(frozen=True, slots=True)
class Turn:
    """By what rule tokens are turned."""

    fmt: str
    interleaved: bool
    cp_size: int
    cp_rank: int
    backward: bool
    cu_seqlens: int | None  # how many


@dataclass(frozen=True, slots=True)
class Split:
    """How a packed row is made of heads."""

    heads: int
    groups: int
    dims: tuple[int, int, int]
    interleaved: bool  # by groups


_PLACED = """
    fmt in FORMATS: Format in which tokens lie: "sbhd", "bshd" or "thd".
    interleaved: Whether angles turn neighbouring channels, and not those of the two halves.
    cp_size: Number of ranks that a sequence is spread over.
    cp_rank: Number of this rank among them.
    must 0 <= cp_rank < cp_size: 0 <= cp_rank < cp_size
    cu_seqlens? [offsets] i32: Running sums of the lengths. None where sequences are not packed.
    must cu_seqlens is None or (fmt == "thd" and offsets > 0): cu_seqlens, [sequences + 1], with thd only; leave it out
    start_positions? [sequences] i32: Position of each sequence's first token. None is 0.
"""
_SPLIT = """
    heads: Number of heads.
    groups: Number of heads of keys and values.
    head_dims: Channels of a query or key, and of a value.
    must groups > 0 and heads % groups == 0: heads a multiple of groups; correct the numbers of heads
    must len(head_dims) == 3 and min(head_dims) > 0: three sizes above 0; correct the sizes of heads
    interleaved_groups: Whether a row lies group by group, and not queries before keys before values.
    q_freqs? [...] f32: Angles of the queries. None turns none.
    k_freqs? [...] f32: Angles of the keys. None turns none.
"""


@operation(
    _PLACED,
    """
    t [...] act strided: Heads to be turned.
    must t.ndim == len(fmt) and (t.strides is None or t.strides[-1] == 1 or t.shape[-1] == 1): {fmt} with neighbouring
        channels side by side; correct fmt or t
    freqs [...] f32: Angles, [positions, 1, 1, channels].
    backward: Whether heads are turned back.
    out? =t written
""",
)
def rope(
    rt: Runtime,
    t: Tensor,
    freqs: Tensor,
    *,
    fmt: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    start_positions: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    backward: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The heads t [s, b, h, d], [b, s, h, d] or [t, h, d] turned, dense; t may be strided, its channels may not."""
    turn = Turn(fmt, interleaved, cp_size, cp_rank, backward, _count(cu_seqlens))
    _check_positions("rope", "freqs", t.shape, freqs, turn, start_positions)
    if out is None:
        out = rt.empty(t.shape, t.dtype)
    rt.backend.rope(rt, turn, t, freqs, cu_seqlens, start_positions, out)
    return out


@operation(
    _PLACED,
    _SPLIT,
    """
    qkv [...] act: Packed projection.
    must qkv.ndim > len(fmt) - 2: token dimensions, then channels; correct qkv or fmt
    must qkv.size == prod(qkv.shape[:len(fmt)-2]) * packed_width(heads, groups, head_dims): {len(fmt) - 2} token
        dimensions, then {packed_width(heads, groups, head_dims)} channels; correct qkv or the numbers of heads
""",
)
def rope_qkv(
    rt: Runtime,
    qkv: Tensor,
    q_freqs: Tensor | None,
    k_freqs: Tensor | None,
    *,
    heads: int,
    groups: int,
    head_dims: tuple[int, int, int],
    interleaved_groups: bool,
    fmt: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    start_positions: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(q, k, v), dense heads, of a dense `qkv` whose token dimensions are followed by one row of all heads.

    The row is [q heads of the group, k, v] for each group if `interleaved_groups`, else all q, all k, all v; it may be
    several dimensions. q or k is turned if it has freqs; v is copied. With heads=0 there is no q (None).
    """
    lead = qkv.shape[: len(fmt) - 2]
    split = Split(heads, groups, head_dims, interleaved_groups)
    turn = Turn(fmt, interleaved, cp_size, cp_rank, False, _count(cu_seqlens))
    tables = q_freqs, k_freqs
    _check_tables("rope_qkv", lead, split, turn, tables, start_positions)
    q = rt.empty((*lead, heads, head_dims[0]), qkv.dtype) if heads else None
    k = rt.empty((*lead, groups, head_dims[1]), qkv.dtype)
    v = rt.empty((*lead, groups, head_dims[2]), qkv.dtype)
    rt.backend.rope_qkv(rt, turn, split, qkv, (q, k, v), tables, cu_seqlens, start_positions)
    return q, k, v


@operation(
    _PLACED,
    _SPLIT,
    """
    dk [*dk.shape[:len(fmt) - 2], groups, head_dims[1]] act: Gradient of the keys.
    dq? [*dk.shape[:-2], heads, head_dims[0]] dk: Gradient of the queries. None where there are none.
    must (dq is None) == (heads == 0): a gradient dq where there are heads; pass dq, or leave it out
    dv [*dk.shape[:-2], groups, head_dims[2]] dk: Gradient of the values.
""",
    runs="rope_qkv",
)
def rope_qkv_backward(
    rt: Runtime,
    dq: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    q_freqs: Tensor | None,
    k_freqs: Tensor | None,
    *,
    heads: int,
    groups: int,
    head_dims: tuple[int, int, int],
    interleaved_groups: bool,
    fmt: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    start_positions: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """The gradient of `rope_qkv`'s packed input, [token dimensions, channels]."""
    op = "rope_qkv_backward"
    lead = dk.shape[: len(fmt) - 2]
    split = Split(heads, groups, head_dims, interleaved_groups)
    turn = Turn(fmt, interleaved, cp_size, cp_rank, True, _count(cu_seqlens))
    tables, parts = (q_freqs, k_freqs), (dq, dk, dv)
    _check_tables(op, lead, split, turn, tables, start_positions)
    dqkv = rt.empty((*lead, packed_width(heads, groups, head_dims)), dk.dtype)
    rt.backend.rope_qkv(rt, turn, split, dqkv, parts, tables, cu_seqlens, start_positions)
    return dqkv


@exported("""
    heads: Number of heads.
    groups: Number of heads of keys and values.
    head_dims: Channels of a query or key, and of a value.
""")
def packed_width(heads: int, groups: int, head_dims: tuple[int, int, int]) -> int:
    """The channels of one token in a packed projection."""
    return heads * head_dims[0] + groups * (head_dims[1] + head_dims[2])


def _count(cu_seqlens: Tensor | None) -> int | None:
    return None if cu_seqlens is None else cu_seqlens.shape[0]


def _check_tables(
    op: str,
    lead: tuple[int, ...],
    split: Split,
    turn: Turn,
    tables: tuple[Tensor | None, Tensor | None],
    start_positions: Tensor | None,
) -> None:
    for name, freqs, d in (("q_freqs", tables[0], split.dims[0]), ("k_freqs", tables[1], split.dims[1])):
        if freqs is not None:
            _check_positions(op, name, (*lead, 1, d), freqs, turn, start_positions)


def _check_positions(
    op: str, name: str, shape: tuple[int, ...], freqs: Tensor, turn: Turn, start_positions: Tensor | None
) -> None:
    """A table has the angles of heads of this shape, and each sequence has a place, as far as the host can know."""
    size, d = tuple(freqs.shape), shape[-1]
    do = f"correct {name}"
    right = len(size) in (2, 4) and (len(size) == 2 or size[1:3] == (1, 1))
    _check.require(right, op, f"{name} = {freqs!r}", "float32, dense, [s2, d2] or [s2, 1, 1, d2]", do)
    allowed = "an even number, at most that of the channels"
    _check.require(size[-1] % 2 == 0 and size[-1] <= d, op, f"{size[-1]} angles for {d} channels", allowed, do)
    token, batch = FORMATS[turn.fmt]
    if batch is None:
        _check.require(turn.cu_seqlens is not None, op, "thd without cu_seqlens", "cu_seqlens with thd", "pass it")
        sequences = (turn.cu_seqlens or 1) - 1
    else:
        sequences, length = shape[batch], shape[token]
        got, do = f"{length} tokens with cp_size={turn.cp_size}", "cut each sequence into 2 * cp_size equal chunks"
        _check.require(turn.cp_size == 1 or length % 2 == 0, op, got, "an even number of tokens", do)
        length *= turn.cp_size
        got, do = f"{length} positions, a table of {size[0]}", "make freqs for the longest sequence"
        _check.require(length <= size[0], op, got, "a row of angles for each position", do)
    right = start_positions is None or start_positions.shape[0] >= sequences
    allowed = f"int32, one for each of {sequences} sequences"
    _check.require(right, op, f"start_positions = {start_positions!r}", allowed, "correct start_positions")
