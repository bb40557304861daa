"""Rotary position embedding on CUDA: one launch of rope.cu, a block for each token."""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING

from te_core.backends.cuda.norm_tiling import vector_width
from te_core.backends.cuda.sums import TYPES
from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.rope import Split, Turn

_THREADS = 256
_UNITS = 2  # of a token in one thread, where there are enough: the angles are made by fewer threads, but all of them

#: t, out, freqs, cu_seqlens, starts | tokens, sequences, three steps, table | heads, d, d2, cp_size, cp_rank
_ARGS = "pppppqqqqqqiiiii"
#: packed, q, k, v, two freqs, cu_seqlens, starts | tokens, sequences, two tables | heads .. dk2, grouped, cp
_QKV_ARGS = "pppppppp" + "qqqq" + "iiiiiiiiii"


def _threads(units: int) -> int:
    """Threads of a block for a token of so many units."""
    return max(32, min(_THREADS, -(-units // _UNITS) + 31 & -32))


def _extent(lead: tuple[int, ...], turn: Turn) -> tuple[int, int]:
    """(tokens of a sequence, sequences)."""
    if turn.fmt == "thd":
        return 0, (turn.cu_seqlens or 1) - 1
    return (lead[0], lead[1]) if turn.fmt == "sbhd" else (lead[1], lead[0])


def rope(
    rt: Runtime, turn: Turn, t: Tensor, freqs: Tensor, cu_seqlens: Tensor | None, starts: Tensor | None, out: Tensor
) -> None:
    """out = t turned (or turned back)."""
    shape, table, fmt = t.shape, freqs.shape, turn.fmt
    heads, d, d2, size = shape[-2], shape[-1], table[-1], t.dtype.itemsize
    steps = t.row_major_strides()
    width = vector_width(gcd(d, d2 // 2, *steps[:-1]), t.ptr | out.ptr, (size,), 16 // size)
    kernel = loader.get(
        rt,
        "rope",
        args=_ARGS,
        DTYPE=TYPES[t.dtype],
        FORMAT=fmt.upper(),
        INTERLEAVED=turn.interleaved,
        BACKWARD=turn.backward,
        VEC=width,
    )
    sequence_step = 0 if fmt == "thd" else steps[1 if fmt == "sbhd" else 0]
    token_step = steps[1 if fmt == "bshd" else 0]
    sizes = (*_extent(shape[:-2], turn), token_step, sequence_step, steps[-2], table[0])
    numbers = (*sizes, heads, d, d2, turn.cp_size, turn.cp_rank)
    threads = _threads(heads * (d - d2 // 2) // width)
    if prod(shape):
        kernel(rt, prod(shape[:-2]), threads, t, out, freqs, cu_seqlens, starts, *numbers, shared=8 * d2)


def rope_qkv(
    rt: Runtime,
    turn: Turn,
    split: Split,
    packed: Tensor,
    parts: tuple[Tensor | None, ...],
    freqs: tuple[Tensor | None, ...],
    cu_seqlens: Tensor | None,
    starts: Tensor | None,
) -> None:
    """The parts q, k, v of the packed rows; backward: the packed rows of the parts."""
    assert parts[1] is not None
    lead, dtype = parts[1].shape[:-2], packed.dtype
    heads, groups, (dq, dk, dv) = split.heads, split.groups, split.dims
    (q_rows, dq2), (k_rows, dk2) = ((0, 0) if f is None else (f.shape[0], f.shape[-1]) for f in freqs)
    whole, alignment = gcd(dq if heads else 0, dk, dv, dq2 // 2, dk2 // 2), packed.ptr
    for part in parts:
        alignment |= 0 if part is None else part.ptr
    width = vector_width(whole, alignment, (dtype.itemsize,), 16 // dtype.itemsize)
    kernel = loader.get(
        rt,
        "rope",
        entry="rope_qkv",
        args=_QKV_ARGS,
        DTYPE=TYPES[dtype],
        FORMAT=turn.fmt.upper(),
        INTERLEAVED=turn.interleaved,
        BACKWARD=turn.backward,
        VEC=width,
    )
    sizes = (*_extent(lead, turn), q_rows, k_rows, heads, groups, dq, dk, dv, dq2, dk2)
    numbers = (*sizes, split.interleaved, turn.cp_size, turn.cp_rank)
    threads = _threads(max(heads * (dq - dq2 // 2), groups * dk) // width)
    shared = 8 * (dq2 + dk2)  # the kernel sees by itself where both are one table
    if prod(lead):
        kernel(rt, prod(lead), threads, packed, *parts, *freqs, cu_seqlens, starts, *numbers, shared=shared)
