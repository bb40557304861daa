"""Partial attention outputs put together on CUDA: attention_merge.cu, attention_sink.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from te_core import device, dtypes
from te_core.backends.cuda.sums import TYPES, add_column_sums, column_workspace, sum_kernel
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.attention_merge import MergeOperands, MergeSpec, SinkGradSpec, SumSpec

_THREADS = 256
_PER_BLOCK = 1024  # vectors of a row that a block of context_sum takes, as the kernel has it
_SOFTMAX = {"vanilla": 0, "off-by-one": 1, "learnable": 2}
_NO_STEPS = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """One launch over rows: its kernel, blocks and threads, and the numbers behind the pointers."""

    kernel: Kernel
    blocks: int
    threads: int
    numbers: tuple[int, ...]
    family: str = "attention_merge"


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """A launch that leaves partial sums of heads, and one that adds them up."""

    kernel: Kernel
    adds: Kernel | None
    grid: tuple[int, int]
    heads: int
    numbers: tuple[int, ...]
    family: str = "attention_sink"


def plan_attention_merge(rt: Runtime, spec: MergeSpec) -> RowsPlan:
    """Threads of a block for each token's head, as many as it has vectors."""
    *outer, width = spec.sum.sizes
    vec = _vector(spec.sum.sizes, spec.sum.types, spec.sum.steps, spec.sum.off)
    kernel = loader.get(rt, "attention_merge", args="p" * 7 + "q" + "i" * 6 + "q" * 18, **_constants(spec.sum, vec))
    rows, vectors = outer[0] * outer[1] * outer[2], width // vec
    lanes, together = _team(vectors)
    steps = [n for three in (*spec.sum.steps, *spec.stats) for n in three or _NO_STEPS]
    numbers = (rows, vectors, lanes, *outer, _SOFTMAX[spec.softmax], *steps)
    return RowsPlan(kernel, -(-rows // together), lanes * together, numbers)


def attention_merge(rt: Runtime, plan: RowsPlan, operands: MergeOperands) -> None:
    """Weigh and add."""
    a, a_stats, b, b_stats, out, stats, sink = operands
    if plan.blocks:
        plan.kernel(
            rt,
            plan.blocks,
            plan.threads,
            a.ptr,
            0 if b is None else b.ptr,
            out.ptr,
            a_stats.ptr,
            0 if b_stats is None else b_stats.ptr,
            0 if stats is None else stats.ptr,
            0 if sink is None else sink.ptr,
            *plan.numbers,
        )


def plan_context_sum(rt: Runtime, spec: SumSpec) -> RowsPlan:
    """Dimensions that lie behind one another in all tensors are one; a long row has several blocks."""
    sizes, steps = _joined(spec.sizes, [s for s in spec.steps if s])
    *outer, width = sizes
    vec = _vector(sizes, spec.types, steps, spec.off)
    kernel = loader.get(
        rt, "attention_merge", entry="context_sum", args="pppqq" + "i" * 5 + "q" * 12, **_constants(spec, vec)
    )
    rows, vectors = prod(outer), width // vec
    lanes, together = _team(vectors)
    segments = max(1, -(-vectors // _PER_BLOCK))
    a, *others = ([*[0] * (4 - len(outer)), *s[:-1]] for s in steps)
    b, out = others if len(others) > 1 else ([0] * 4, *others)
    places = [*[1] * (4 - len(outer)), *outer][1:]
    numbers = (rows, vectors, lanes, segments, *places, *a, *b, *out)
    return RowsPlan(kernel, -(-rows // together) * segments if vectors else 0, lanes * together, numbers)


def context_sum(rt: Runtime, plan: RowsPlan, a: Tensor, b: Tensor | None, out: Tensor) -> None:
    """Add."""
    if plan.blocks:
        plan.kernel(rt, plan.blocks, plan.threads, a.ptr, 0 if b is None else b.ptr, out.ptr, *plan.numbers)


def plan_attention_sink_grad(rt: Runtime, spec: SinkGradSpec) -> SinkPlan:
    """Four blocks on every multiprocessor; a strip of less than 64 tokens is not worth a block."""
    token, batch, head, width = spec.sizes
    vec = _vector(spec.sizes, (spec.dtype,) * 2, spec.steps[:2], spec.off)
    across = _power_of_two(width // vec, 32)
    kernel = loader.get(
        rt, "attention_sink", args="pppppqqiii" + "q" * 9, DTYPE=TYPES[spec.dtype], VEC=vec, ACROSS=across
    )
    tokens, eights = token * batch, -(-head // 8)
    most = max(1, 4 * device.info(rt.device.index).multiprocessors // max(eights, 1))
    parts = max(1, min(-(-tokens // 64), most))
    strip = -(-tokens // parts)
    numbers = (tokens, strip, batch, head, width // vec, *(n for three in spec.steps for n in three))
    return SinkPlan(kernel, sum_kernel(rt, dtypes.float32), (parts, eights), head, numbers)


def attention_sink_grad(
    rt: Runtime, plan: SinkPlan, dy: Tensor, out: Tensor, stats: Tensor, sink: Tensor, dsink: Tensor
) -> None:
    """Sums of strips, then of all, in an order that depends on the shape alone."""
    if not plan.heads:
        return
    parts = column_workspace(rt, plan.grid[0], plan.heads)
    plan.kernel(rt, plan.grid, _THREADS, dy.ptr, out.ptr, stats.ptr, sink.ptr, parts, *plan.numbers)
    add_column_sums(rt, plan.adds, parts, plan.grid[0], plan.heads, dsink.ptr)


def _constants(spec: SumSpec, vec: int) -> dict[str, Any]:
    a, b, out = spec.types
    return {
        "A_TYPE": TYPES[a],
        "B_TYPE": TYPES[a if b is None else b],
        "OUT_TYPE": TYPES[out],
        "VEC": vec,
        "PAIR": int(b is not None),
    }


def _team(vectors: int) -> tuple[int, int]:
    """How many threads share a row, and how many rows a block has."""
    lanes = max(1, min(vectors, _THREADS))
    return lanes, _THREADS // lanes


def _vector(sizes: Sequence[int], types: Sequence[DType | None], steps: Sequence[tuple[int, ...]], off: int) -> int:
    """The most elements whose access, in pieces of up to 16 bytes, all addresses, strides and rows allow.

    `steps` are those of dimensions from the outermost on.
    """
    kinds = [t for t in types if t is not None]
    vec = 16 // min(t.itemsize for t in kinds)
    given = [s for s in steps if s]
    while vec > 1:
        fits = sizes[-1] % vec == 0
        for kind, strides in zip(kinds, given, strict=True):
            grid = min(16, vec * kind.itemsize)
            fits = fits and off % grid == 0
            outer = zip(strides, sizes[:-1], strict=False)
            fits = fits and all(step * kind.itemsize % grid == 0 for step, n in outer if n > 1)
        if fits:
            break
        vec //= 2
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


def _power_of_two(n: int, most: int) -> int:
    """The smallest one from n on, at most `most`."""
    return min(most, 1 << max(n - 1, 0).bit_length())
