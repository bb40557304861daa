"""Partial attention outputs put together on CUDA: attention_merge.cu, attention_sink.cu."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from te_core import device
from te_core.attention import DIMENSIONS, SOFTMAX
from te_core.backends.cuda.sums import TYPES, add_column_sums, column_workspace
from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.attention_merge import MergeOperands

_THREADS = 256
_PER_BLOCK = 1024  # vectors of a row that a block of context_sum takes, as the kernel has it
#: Where batch, token and head are in statistics: [b, h, s], or packed [t, h].
_OF_STATS = {"sbhd": (0, 2, 1), "bshd": (0, 2, 1), "thd": (None, 0, 1)}

Places = tuple[int | None, int, int]


def attention_merge(rt: Runtime, form: str, softmax: str, operands: MergeOperands) -> None:
    """Threads of a block for each token's head, as many as it has vectors."""
    a, a_stats, b, b_stats, out, stats, sink = operands
    (tokens, batch, heads), width = in_order(a.shape, DIMENSIONS[form], 1), a.shape[-1]
    steps = [_steps(t, DIMENSIONS[form]) for t in (a, b, out)]
    logs = [_steps(t, _OF_STATS[form]) for t in (a_stats, b_stats, stats)]
    vec = _vector((tokens, batch, heads, width), (a, b, out), steps)
    kernel = loader.get(rt, "attention_merge", args="p" * 7 + "q" + "i" * 6 + "q" * 18, **_constants(a, b, out, vec))
    rows, vectors = tokens * batch * heads, width // vec
    lanes, together = _team(vectors)
    numbers = (rows, vectors, lanes, tokens, batch, heads, SOFTMAX.index(softmax))
    pointers = (a, b, out, a_stats, b_stats, stats, sink)
    if rows:
        strides = [n for three in (*steps, *logs) for n in three]
        kernel(rt, -(-rows // together), lanes * together, *pointers, *numbers, *strides)


def context_sum(rt: Runtime, a: Tensor, b: Tensor | None, out: Tensor) -> None:
    """Dimensions that lie behind one another in all tensors are one; a long row has several blocks."""
    given = [t for t in (a, b, out) if t is not None]
    sizes, steps = _joined(a.shape, [t.row_major_strides() for t in given])
    *outer, width = sizes
    vec = _vector(sizes, given, steps)
    kernel = loader.get(
        rt, "attention_merge", entry="context_sum", args="pppqq" + "i" * 5 + "q" * 12, **_constants(a, b, out, vec)
    )
    rows, vectors, missing = prod(outer), width // vec, 4 - len(outer)
    lanes, together = _team(vectors)
    segments = max(1, -(-vectors // _PER_BLOCK))
    strides = [[0] * missing + list(s[:-1]) for s in steps]
    if b is None:
        strides.insert(1, [0] * 4)
    numbers = (rows, vectors, lanes, segments, *([1] * missing + outer)[1:], *(n for four in strides for n in four))
    if rows and vectors:
        kernel(rt, -(-rows // together) * segments, lanes * together, a, b, out, *numbers)


def attention_sink_grad(
    rt: Runtime, form: str, dy: Tensor, out: Tensor, stats: Tensor, sink: Tensor, dsink: Tensor
) -> None:
    """Sums of strips, then of all, in an order that depends on the shape alone.

    Four blocks on every multiprocessor; a strip of less than 64 tokens is not worth a block.
    """
    token, batch, heads = in_order(out.shape, DIMENSIONS[form], 1)
    steps = [_steps(t, DIMENSIONS[form]) for t in (dy, out)]
    vec = _vector((token, batch, heads, out.shape[-1]), (dy, out), steps)
    vectors = out.shape[-1] // vec
    across = min(32, 1 << max(vectors - 1, 0).bit_length())  # the smallest power of two from there on
    kernel = loader.get(
        rt, "attention_sink", args="pppppqqiii" + "q" * 9, DTYPE=TYPES[out.dtype], VEC=vec, ACROSS=across
    )
    tokens, eights = token * batch, -(-heads // 8)
    most = max(1, 4 * device.info(rt.device.index).multiprocessors // max(eights, 1))
    parts = max(1, min(-(-tokens // 64), most))
    strides = [n for three in (*steps, _steps(stats, _OF_STATS[form])) for n in three]
    numbers = (tokens, -(-tokens // parts), batch, heads, vectors, *strides)
    if heads:
        partials = column_workspace(rt, parts, heads)
        kernel(rt, (parts, eights), _THREADS, dy, out, stats, sink, partials, *numbers)
        add_column_sums(rt, partials, parts, dsink)


def in_order(values: Sequence[int], places: Places, missing: int) -> tuple[int, int, int]:
    """Of token, batch and head."""
    batch, token, head = places
    return values[token], missing if batch is None else values[batch], values[head]


def _steps(t: Tensor | None, places: Places) -> tuple[int, int, int]:
    """Strides over token, batch and head."""
    return (0, 0, 0) if t is None else in_order(t.row_major_strides(), places, 0)


def _constants(a: Tensor, b: Tensor | None, out: Tensor, vec: int) -> dict[str, Any]:
    types = {"A_TYPE": a, "B_TYPE": a if b is None else b, "OUT_TYPE": out}
    return {name: TYPES[t.dtype] for name, t in types.items()} | {"VEC": vec, "PAIR": b is not None}


def _team(vectors: int) -> tuple[int, int]:
    """How many threads share a row, and how many rows a block has."""
    lanes = max(1, min(vectors, _THREADS))
    return lanes, _THREADS // lanes


def _vector(sizes: Sequence[int], tensors: Sequence[Tensor | None], steps: Sequence[tuple[int, ...]]) -> int:
    """The most elements whose access, in pieces of up to 16 bytes, all addresses, strides and rows allow.

    `steps` are those of dimensions from the outermost on.
    """
    given = [(t, strides) for t, strides in zip(tensors, steps, strict=True) if t is not None]
    vec = 16 // min(t.dtype.itemsize for t, _ in given)
    while sizes[-1] % vec:
        vec //= 2
    for t, strides in given:
        bits = 16 | t.ptr
        for step, n in zip(strides, sizes[:-1], strict=False):
            bits |= step * t.dtype.itemsize if n > 1 else 0
        piece = bits & -bits
        if piece < 16:
            vec = min(vec, max(1, piece // t.dtype.itemsize))
    return vec


def _joined(sizes: Sequence[int], steps: Sequence[tuple[int, ...]]) -> tuple[list[int], list[tuple[int, ...]]]:
    """The same elements in as few dimensions as all of these strides allow."""
    kept = [i for i, n in enumerate(sizes) if n != 1] or [len(sizes) - 1]
    if kept[-1] != len(sizes) - 1 and any(s[kept[-1]] != 1 for s in steps):
        kept.append(len(sizes) - 1)
    groups: list[tuple[int, list[int]]] = []  # size, and the stride in each
    for i in kept:
        here = [s[i] for s in steps]
        if groups and all(before == step * sizes[i] for before, step in zip(groups[-1][1], here, strict=True)):
            groups[-1] = groups[-1][0] * sizes[i], here
        else:
            groups.append((sizes[i], here))
    return [n for n, _ in groups], [tuple(g[1][k] for g in groups) for k in range(len(steps))]
