"""Rotary position embedding on CUDA: one launch of rope.cu, a block for each token."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from te_core.backends.cuda.sums import TYPES
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor, dense_strides

if TYPE_CHECKING:
    from te_core.ops.rope import RopeOpSpec, RopeQkvOpSpec, Turn

_THREADS = 256
_UNITS = 2  # of a token in one thread, where there are enough: the angles are made by fewer threads, but all of them

#: t, out, freqs, cu_seqlens, starts | tokens, sequences, three steps, table | heads, d, d2, cp_size, cp_rank
_ARGS = "pppppqqqqqqiiiii"
#: packed, q, k, v, two freqs, cu_seqlens, starts | tokens, sequences, two tables | heads .. dk2, grouped, cp
_QKV_ARGS = "pppppppp" + "qqqq" + "iiiiiiiiii"


def _width(dtype: DType, alignment: int, sizes: tuple[int, ...]) -> int:
    """Elements of a vector: at most 16 bytes, dividing every size, every vector on its boundary."""
    width = 16 // dtype.itemsize
    while width > 1 and (alignment % (width * dtype.itemsize) or any(size % width for size in sizes)):
        width //= 2
    return width


def _threads(units: int) -> int:
    """Threads of a block for a token of so many units."""
    return max(32, min(_THREADS, -(-units // _UNITS) + 31 & -32))


def _extent(lead: tuple[int, ...], turn: Turn) -> tuple[int, int]:
    """(tokens of a sequence, sequences)."""
    if turn.fmt == "thd":
        return 0, (turn.cu_seqlens or 1) - 1
    return (lead[0], lead[1]) if turn.fmt == "sbhd" else (lead[1], lead[0])


def rope(
    rt: Runtime,
    spec: RopeOpSpec,
    t: Tensor,
    freqs: Tensor,
    cu_seqlens: Tensor | None,
    starts: Tensor | None,
    out: Tensor,
) -> None:
    """out = t turned (or turned back)."""
    shape, table, turn, fmt = spec.shape, spec.table, spec.turn, spec.turn.fmt
    heads, d, d2 = shape[-2], shape[-1], table[-1]
    steps = spec.strides or dense_strides(shape)
    width = _width(spec.dtype, spec.alignment, (d, d2 // 2, *steps[:-1]))
    kernel = loader.get(
        rt,
        "rope",
        args=_ARGS,
        DTYPE=TYPES[spec.dtype],
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
    spec: RopeQkvOpSpec,
    packed: Tensor,
    parts: tuple[Tensor | None, ...],
    freqs: tuple[Tensor | None, ...],
    cu_seqlens: Tensor | None,
    starts: Tensor | None,
) -> None:
    """The parts q, k, v of the packed rows; backward: the packed rows of the parts."""
    turn, split, lead = spec.turn, spec.split, spec.lead
    heads, groups, (dq, dk, dv) = split.heads, split.groups, split.dims
    (q_rows, dq2), (k_rows, dk2) = ((0, 0) if s is None else (s[0], s[-1]) for s in (spec.q_table, spec.k_table))
    width = _width(spec.dtype, spec.alignment, (dq if heads else 0, dk, dv, dq2 // 2, dk2 // 2))
    kernel = loader.get(
        rt,
        "rope",
        entry="rope_qkv",
        args=_QKV_ARGS,
        DTYPE=TYPES[spec.dtype],
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
