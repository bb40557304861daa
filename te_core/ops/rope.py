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
from math import prod

from te_core import dtypes
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError
from te_core.ops import _check
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
class RopeOpSpec:
    """All that the launch of `rope` depends on besides addresses."""

    turn: Turn
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    table: tuple[int, ...]  # the shape of freqs
    alignment: int  # how far addresses are off the 16-byte grid, all of them together


@dataclass(frozen=True, slots=True)
class Split:
    """How a packed row is made of heads."""

    heads: int
    groups: int
    dims: tuple[int, int, int]
    interleaved: bool  # by groups


@dataclass(frozen=True, slots=True)
class RopeQkvOpSpec:
    """All that the launch of `rope_qkv` and of its backward depends on besides addresses."""

    turn: Turn
    split: Split
    lead: tuple[int, ...]  # the token dimensions
    dtype: DType
    q_table: tuple[int, ...] | None  # the shape of freqs; None: not turned
    k_table: tuple[int, ...] | None
    alignment: int


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
    op = "rope"
    _check.one_of(op, "fmt", fmt, tuple(FORMATS))
    _check.one_of(op, "dtype of t", t.dtype, ACTIVATION_DTYPES)
    _check.require(
        t.ndim == len(fmt) and (t.strides is None or t.strides[-1] == 1 or t.shape[-1] == 1),
        op,
        f"t = {t!r}",
        f"{fmt} with neighbouring channels side by side",
        "correct fmt or t",
    )
    _check_table(op, "freqs", freqs, t.shape[-1])
    turn = Turn(fmt, interleaved, cp_size, cp_rank, backward, _count(cu_seqlens))
    _check_positions(op, t.shape, freqs, turn, cu_seqlens, start_positions)
    _check.result(op, rt.device, "out", out, t.shape, (t.dtype,))
    _check.on_device(op, rt.device, t, freqs, cu_seqlens, start_positions)
    spec = RopeOpSpec(turn, t.shape, t.strides, t.dtype, freqs.shape, _check.off(t, out))
    if out is None:
        out = rt.empty(t.shape, t.dtype)
    rt.backend.rope(rt, spec, t, freqs, cu_seqlens, start_positions, out)
    return out


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
    op = "rope_qkv"
    lead = qkv.shape[: len(fmt) - 2]
    split = Split(heads, groups, head_dims, interleaved_groups)
    turn = Turn(fmt, interleaved, cp_size, cp_rank, False, _count(cu_seqlens))
    tables = q_freqs, k_freqs
    _check_split(op, lead, qkv.dtype, split, turn, tables, cu_seqlens, start_positions)
    width = packed_width(heads, groups, head_dims)
    _check.require(
        qkv.is_contiguous and qkv.ndim > len(lead) and qkv.size == prod(lead) * width,
        op,
        f"qkv = {qkv!r}",
        f"dense, {len(lead)} token dimensions, then {width} channels",
        "correct qkv or the numbers of heads",
    )
    _check.on_device(op, rt.device, qkv, *tables, cu_seqlens, start_positions)
    spec = RopeQkvOpSpec(turn, split, lead, qkv.dtype, _check.shape(q_freqs), _check.shape(k_freqs), _check.off(qkv))
    q = rt.empty((*lead, heads, head_dims[0]), qkv.dtype) if heads else None
    k = rt.empty((*lead, groups, head_dims[1]), qkv.dtype)
    v = rt.empty((*lead, groups, head_dims[2]), qkv.dtype)
    rt.backend.rope_qkv(rt, spec, qkv, (q, k, v), tables, cu_seqlens, start_positions)
    return q, k, v


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
    _check_split(op, lead, dk.dtype, split, turn, tables, cu_seqlens, start_positions)
    for name, t, n, d in zip(("dq", "dk", "dv"), parts, (heads, groups, groups), head_dims, strict=True):
        _check.require(n == 0 or t is not None, op, f"{name} = None", f"a gradient of {n} heads", f"pass {name}")
        _check.require(n > 0 or t is None, op, f"{name} = {t!r}", "None for no heads", f"leave {name} out")
        if t is not None:
            _check.sized(op, name, t, (*lead, n, d), (dk.dtype,))
    _check.on_device(op, rt.device, *parts, *tables, cu_seqlens, start_positions)
    spec = RopeQkvOpSpec(turn, split, lead, dk.dtype, _check.shape(q_freqs), _check.shape(k_freqs), _check.off(*parts))
    dqkv = rt.empty((*lead, packed_width(heads, groups, head_dims)), dk.dtype)
    rt.backend.rope_qkv(rt, spec, dqkv, parts, tables, cu_seqlens, start_positions)
    return dqkv


def packed_width(heads: int, groups: int, head_dims: tuple[int, int, int]) -> int:
    """The channels of one token in a packed projection."""
    return heads * head_dims[0] + groups * (head_dims[1] + head_dims[2])


def _count(cu_seqlens: Tensor | None) -> int | None:
    return None if cu_seqlens is None else cu_seqlens.shape[0]


def _check_split(
    op: str,
    lead: tuple[int, ...],
    dtype: DType,
    split: Split,
    turn: Turn,
    tables: tuple[Tensor | None, Tensor | None],
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
) -> None:
    heads, groups, dims = split.heads, split.groups, split.dims
    _check.one_of(op, "fmt", turn.fmt, tuple(FORMATS))
    _check.one_of(op, "dtype", dtype, ACTIVATION_DTYPES)
    _check.require(
        groups > 0 and heads % groups == 0 and len(dims) == 3 and min(dims) > 0,
        op,
        f"{heads} heads in {groups} groups of sizes {dims}",
        "heads a multiple of groups, three sizes above 0",
        "correct the numbers of heads",
    )
    for name, freqs, d in (("q_freqs", tables[0], dims[0]), ("k_freqs", tables[1], dims[1])):
        if freqs is not None:
            _check_table(op, name, freqs, d)
            _check_positions(op, (*lead, 1, d), freqs, turn, cu_seqlens, start_positions)


def _check_table(op: str, name: str, freqs: Tensor, d: int) -> None:
    shape = tuple(freqs.shape)
    _check.require(
        freqs.dtype is dtypes.float32
        and freqs.is_contiguous
        and len(shape) in (2, 4)
        and (len(shape) == 2 or shape[1:3] == (1, 1)),
        op,
        f"{name} = {freqs!r}",
        "float32, dense, [s2, d2] or [s2, 1, 1, d2]",
        f"correct {name}",
    )
    _check.require(
        shape[-1] % 2 == 0 and shape[-1] <= d,
        op,
        f"{shape[-1]} angles for {d} channels",
        "an even number, at most that of the channels",
        f"correct {name}",
    )


def _check_positions(
    op: str,
    shape: tuple[int, ...],
    freqs: Tensor,
    turn: Turn,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
) -> None:
    """Where the tokens of heads of this shape stand, as far as the host can know."""
    fmt, cp_size, cp_rank = turn.fmt, turn.cp_size, turn.cp_rank
    token, batch = FORMATS[fmt]
    _check.require(
        cp_size >= 1 and 0 <= cp_rank < cp_size,
        op,
        f"cp_rank={cp_rank} of cp_size={cp_size}",
        "0 <= cp_rank < cp_size",
        "correct them",
    )
    if batch is None:
        if cu_seqlens is None or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
            got = f"thd with cu_seqlens={cu_seqlens!r}"
            raise ArgumentError(op, got, "int32 [sequences + 1]", "pass cu_seqlens")
        _check.vector(op, "cu_seqlens", cu_seqlens, cu_seqlens.shape[0], (dtypes.int32,))
        sequences = cu_seqlens.shape[0] - 1
    else:
        _check.require(cu_seqlens is None, op, f"{fmt} with cu_seqlens", "cu_seqlens with thd only", "leave it out")
        sequences, length = shape[batch], shape[token]
        _check.require(
            cp_size == 1 or length % 2 == 0,
            op,
            f"{length} tokens with cp_size={cp_size}",
            "an even number of tokens",
            "cut each sequence into 2 * cp_size equal chunks",
        )
        _check.require(
            length * cp_size <= freqs.shape[0],
            op,
            f"{length * cp_size} positions, a table of {freqs.shape[0]}",
            "a row of angles for each position",
            "make freqs for the longest sequence",
        )
    _check.require(
        start_positions is None
        or (
            start_positions.dtype is dtypes.int32
            and start_positions.ndim == 1
            and start_positions.is_contiguous
            and start_positions.shape[0] >= sequences
        ),
        op,
        f"start_positions = {start_positions!r}",
        f"int32, one for each of {sequences} sequences",
        "correct start_positions",
    )
