"""Tokens to experts and back on CUDA: row_map.cu makes maps, permute.cu moves rows by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_core import dtypes
from te_core.backends.cuda.sums import TYPES
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.permute import Operands, PermuteSpec, RowMapSpec

_THREADS = 256
_BINS = 1024  # of index_count and index_place
_MAP_BLOCKS = 128  # at most: each block of the second launch reads the counts of all
_MAP_COUNTS = 32768  # of all blocks, at most, as long as these are 16
_TILE = 128  # tokens of mask_count and mask_place at a time
_AT_ONCE = 4 * _TILE  # tokens whose map one block makes
_CHUNK_ROWS = 1024  # of a block of chunk_map
_COPIES = 8  # vectors of a thread in permute_rows
_TEAM_BLOCK = 128  # threads of a block of unpermute_backward

_SOURCES = {dtypes.bool_: "u8", dtypes.uint8: "u8", dtypes.int32: "int", dtypes.int64: "i64"}
_MODES = {"copy": "SUM", "sum": "SUM", "weighted": "WEIGHTED", "gated": "GATED"}


# ---------------------------------------------------------------------------------------------------- maps


@dataclass(frozen=True, slots=True)
class RowMapPlan:
    """The launches of a map: `share` is what a block has of the entries (tiles of tokens, of a mask)."""

    family: str
    spec: RowMapSpec
    kernels: tuple[Kernel, ...]
    blocks: int
    share: int


def plan_row_map(rt: Runtime, spec: RowMapSpec) -> RowMapPlan:
    """How the entries are shared out over blocks."""
    kind, tokens = spec.kind, spec.tokens
    entries: tuple[tuple[str, str], ...]
    constants = {"SOURCE": _SOURCES[spec.source], "ORDER": "int" if spec.order is None else _SOURCES[spec.order]}
    if kind == "mask":
        most = min(2 * _MAP_BLOCKS, max(16, _MAP_COUNTS // max(spec.choices, 1)))
        share = max(1, -(-tokens // (_TILE * most)))
        blocks = -(-tokens // (_TILE * share))
        entries = (("mask_count", "pppqii"), ("mask_place", "ppppqii"))
        if tokens <= _AT_ONCE:
            entries = (("mask_map", "ppppqi"),)
    elif kind == "index":
        count, tile = tokens * spec.choices, 4 * _THREADS
        share = max(1, -(-count // (tile * _MAP_BLOCKS))) * tile
        entries = (("index_count", "ppppqq"), ("index_place", "pppppppqqqqi"))
        blocks = -(-count // share)
    else:
        entries, share = (("chunk_map", "pppqii"),), _CHUNK_ROWS
        blocks = -(-tokens // share)
    kernels = [loader.get(rt, "row_map", entry=name, args=args, **constants) for name, args in entries]
    return RowMapPlan(f"row_map_{kind}", spec, tuple(kernels), blocks if spec.choices or kind == "chunks" else 0, share)


def row_map(rt: Runtime, plan: RowMapPlan, source: Tensor, beside: Tensor | None, out: Tensor, rows: int) -> None:
    """Number the entries; nothing is known to the host. `beside`: the order of chunks, or a mask's starts to be."""
    kind = plan.spec.kind
    if not plan.blocks:
        for t in (out, beside if kind == "mask" else None):  # no tokens, or no experts
            if t is not None and t.size:
                rt.backend.zero(rt, t)
    elif kind == "mask":
        _mask_map(rt, plan, source, 0 if beside is None else beside.ptr, out)
    elif kind == "index":
        _index_map(rt, plan, source, out, rows)
    elif beside is not None:
        _chunk_map(rt, plan, source, beside, out, rows)


def _mask_map(rt: Runtime, plan: RowMapPlan, routing: Tensor, starts: int, out: Tensor) -> None:
    tokens, experts = plan.spec.tokens, plan.spec.choices
    columns = rt.workspace("row map", 4 * (-(-tokens // 32) + plan.blocks) * experts)
    shared = 12 * (-(-experts // 32) * 32)
    if len(plan.kernels) == 1:
        plan.kernels[0](rt, 1, _THREADS, routing.ptr, columns, out.ptr, starts, tokens, experts, shared=shared)
        return
    counts = columns + 4 * -(-tokens // 32) * experts
    count, place = plan.kernels
    sizes = (tokens, experts, plan.share)
    count(rt, plan.blocks, _THREADS, routing.ptr, columns, counts, *sizes, shared=4 * experts)
    place(rt, plan.blocks, _THREADS, columns, counts, out.ptr, starts, *sizes, shared=shared)


def _index_map(rt: Runtime, plan: RowMapPlan, ids: Tensor, out: Tensor, rows: int) -> None:
    tokens, slots = plan.spec.tokens, plan.spec.choices
    entries, blocks, share = tokens * slots, plan.blocks, plan.share
    counts = rt.workspace("row map", 4 * (blocks * (_BINS + 1) + 1 + 2 * entries))
    used = counts + 4 * blocks * _BINS
    done = used + 4 * blocks
    ordered = done + 4
    spare = ordered + 4 * entries
    count, place = plan.kernels
    sizes = (entries, share)
    count(rt, blocks, _THREADS, ids.ptr, counts, used, done, *sizes)
    place(rt, blocks, _THREADS, ids.ptr, counts, used, done, out.ptr, ordered, spare, *sizes, tokens, rows, slots)


def _chunk_map(rt: Runtime, plan: RowMapPlan, sizes: Tensor, order: Tensor, out: Tensor, rows: int) -> None:
    chunks = plan.spec.choices
    (kernel,) = plan.kernels
    shared = 12 * chunks
    kernel(rt, plan.blocks, _THREADS, sizes.ptr, order.ptr, out.ptr, rows, chunks, plan.share, shared=shared)


# --------------------------------------------------------------------------------------------------- moves


@dataclass(frozen=True, slots=True)
class PermutePlan:
    """One launch over the tokens, and one that fills up rows (`fill`; its blocks have 256 rows each).

    A `fill` goes by marks that the first launch makes, without which it fills up by itself where `starts` are given.
    """

    family: str
    kernel: Kernel
    blocks: int
    threads: tuple[int, int]
    sizes: tuple[int, ...]  # vectors of a row, tokens, rows, choices
    fill: Kernel | None


def _constants(
    spec: PermuteSpec, width: int, full: bool, batch: tuple[int, int] = (1, 1), team: int = 32
) -> dict[str, Any]:
    return {
        "WIDTH": width,
        "MASK": int(spec.masked),
        "PROB": "float" if spec.probs is None else TYPES[spec.probs],
        "PROBS": int(spec.mode == "gated"),
        "FULL": int(full),
        "DTYPE": TYPES.get(spec.dtype, "bf16"),
        "MODE": _MODES[spec.mode],
        "TEAM_SIZE": team,
        "BATCH_ROWS": batch[0],
        "BATCH_COLUMNS": batch[1],
    }


def _batch(spec: PermuteSpec, backward: bool = False) -> tuple[int, int]:
    """How many rows and vectors of each a thread of unpermute_* reads at a time."""
    if not spec.masked and spec.choices == 1:
        return 1, 4
    return (8, 1) if backward else (4, 2)


def _width(spec: PermuteSpec) -> int:
    """Bytes of a vector: at most 16, dividing a row, every vector on its boundary."""
    bits = 16 | spec.alignment | spec.columns * spec.dtype.itemsize
    return bits & -bits


def _threads(vectors: int, each: int) -> tuple[int, int]:
    """(threads of a token, tokens of a block) where a thread is to have `each` vectors."""
    across = min(_THREADS, 1 << max(-(-vectors // each) - 1, 0).bit_length())
    return across, _THREADS // across


def _fill(rt: Runtime, spec: PermuteSpec, constants: dict[str, Any]) -> Kernel | None:
    """What zeros the rows that nothing is written to; they are known by marks."""
    if not spec.fill or not spec.rows or (spec.starts and spec.tokens and spec.columns):
        return None
    return loader.get(rt, "permute", entry="fill_rows", args="pppqq", **constants)


def plan_permute(rt: Runtime, spec: PermuteSpec) -> PermutePlan:
    """Threads of a token copy its row to all places."""
    width = _width(spec)
    vectors = spec.columns * spec.dtype.itemsize // width
    sizes = (vectors, spec.tokens, spec.rows, spec.choices)
    across, down = _threads(vectors, _COPIES)
    constants = _constants(spec, width, vectors % (_COPIES * across) == 0)
    fill = _fill(rt, spec, constants)
    kernel = loader.get(rt, "permute", entry="permute_rows", args="pppppppp" + "qqqi", **constants)
    blocks = -(-spec.tokens // down) if vectors and spec.rows else 0
    return PermutePlan("permute", kernel, blocks, (across, down), sizes, fill)


def permute(rt: Runtime, plan: PermutePlan, operands: Operands, out: Tensor, row_probs: Tensor | None) -> None:
    """Copy rows; then zeros into those that no token went to."""
    x, row_map, probs, pad, starts = operands
    marks = _marks(rt, plan)
    to_probs = 0 if row_probs is None else row_probs.ptr
    if plan.blocks:
        plan.kernel(
            rt,
            plan.blocks,
            plan.threads,
            x.ptr,
            out.ptr,
            row_map.ptr,
            0 if pad is None else pad.ptr,
            0 if probs is None else probs.ptr,
            to_probs,
            marks,
            0 if starts is None else starts.ptr,
            *plan.sizes,
        )
    _run_fill(rt, plan, out, to_probs, marks)


def _marks(rt: Runtime, plan: PermutePlan) -> int:
    """A zero for each row of the result, which fill_rows leaves behind; 0 if it is not needed."""
    return 0 if plan.fill is None else rt.workspace("marks of rows", plan.sizes[2], zeroed=True)


def _run_fill(rt: Runtime, plan: PermutePlan, out: Tensor, to_probs: int, marks: int) -> None:
    if plan.fill is not None:
        vectors, rows = plan.sizes[0], plan.sizes[2]
        plan.fill(rt, -(-rows // _THREADS), _THREADS, out.ptr, to_probs, marks, vectors, rows)


def plan_unpermute(rt: Runtime, spec: PermuteSpec) -> PermutePlan:
    """Threads of a token add up its rows."""
    width = _width(spec)
    vectors = spec.columns * spec.dtype.itemsize // width
    batch = _batch(spec)
    across, down = _threads(vectors, batch[1])
    constants = _constants(spec, width, vectors % (batch[1] * across) == 0, batch)
    kernel = loader.get(rt, "permute", entry="unpermute_rows", args="ppppppp" + "qqqi", **constants)
    blocks = -(-spec.tokens // down)
    sizes = (vectors, spec.tokens, spec.rows, spec.choices)
    return PermutePlan("unpermute", kernel, blocks, (across, down), sizes, None)


def unpermute(
    rt: Runtime, plan: PermutePlan, operands: Operands, row_probs: Tensor | None, out: Tensor, probs: Tensor | None
) -> None:
    """Add up rows; without any there are zeros."""
    x, row_map, given, pad, _ = operands
    if not plan.sizes[2]:
        for t in (out, probs):
            if t is not None:
                rt.backend.zero(rt, t)
    elif plan.blocks:
        plan.kernel(
            rt,
            plan.blocks,
            plan.threads,
            x.ptr,
            out.ptr,
            row_map.ptr,
            0 if pad is None else pad.ptr,
            0 if given is None else given.ptr,
            0 if row_probs is None else row_probs.ptr,
            0 if probs is None else probs.ptr,
            *plan.sizes,
        )


def plan_unpermute_backward(rt: Runtime, spec: PermuteSpec) -> PermutePlan:
    """A warp has a token, or, of long rows, a block."""
    width = _width(spec)
    vectors = spec.columns * spec.dtype.itemsize // width
    batch = _batch(spec, backward=True)
    team = 32 if vectors < 8 * 32 else _TEAM_BLOCK
    constants = _constants(spec, width, vectors % (batch[1] * team) == 0, batch, team)
    kernel = loader.get(rt, "permute", entry="unpermute_backward", args="pppppppp" + "qqqi", **constants)
    blocks = -(-spec.tokens // (_TEAM_BLOCK // team))
    sizes = (vectors, spec.tokens, spec.rows, spec.choices)
    return PermutePlan("unpermute_backward", kernel, blocks, (_TEAM_BLOCK, 1), sizes, _fill(rt, spec, constants))


def unpermute_backward(
    rt: Runtime, plan: PermutePlan, dy: Tensor, operands: Operands, dx: Tensor, d_weights: Tensor
) -> None:
    """Weighted gradients to all places, zeros elsewhere; and the weights' own."""
    x, row_map, weights, pad, _ = operands
    if not plan.sizes[2]:
        rt.backend.zero(rt, d_weights)
        return
    marks = _marks(rt, plan)
    if plan.blocks:
        plan.kernel(
            rt,
            plan.blocks,
            plan.threads,
            dy.ptr,
            x.ptr,
            dx.ptr,
            row_map.ptr,
            0 if pad is None else pad.ptr,
            0 if weights is None else weights.ptr,
            d_weights.ptr,
            marks,
            *plan.sizes,
        )
    _run_fill(rt, plan, dx, 0, marks)
