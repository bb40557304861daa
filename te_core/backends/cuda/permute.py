"""Tokens to experts and back on CUDA: row_map.cu makes maps, permute.cu moves rows by them."""

from __future__ import annotations

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


def row_map(rt: Runtime, spec: RowMapSpec, source: Tensor, beside: Tensor | None, out: Tensor, rows: int) -> None:
    """Number the entries; nothing is known to the host. `beside`: the order of chunks, or a mask's starts to be."""
    if not spec.tokens or (spec.kind != "chunks" and not spec.choices):
        for t in (out, beside if spec.kind == "mask" else None):  # no tokens, or no experts
            if t is not None and t.size:
                rt.backend.zero(rt, t)
    elif spec.kind == "mask":
        _mask_map(rt, spec, source, beside, out)
    elif spec.kind == "index":
        _index_map(rt, spec, source, out, rows)
    elif beside is not None:
        blocks, shared = -(-spec.tokens // _CHUNK_ROWS), 12 * spec.choices
        kernel = _map_kernel(rt, spec, "chunk_map", "pppqii")
        kernel(rt, blocks, _THREADS, source, beside, out, rows, spec.choices, _CHUNK_ROWS, shared=shared)


def _map_kernel(rt: Runtime, spec: RowMapSpec, entry: str, args: str) -> Kernel:
    order = "int" if spec.order is None else _SOURCES[spec.order]
    return loader.get(rt, "row_map", entry=entry, args=args, SOURCE=_SOURCES[spec.source], ORDER=order)


def _mask_map(rt: Runtime, spec: RowMapSpec, routing: Tensor, starts: Tensor | None, out: Tensor) -> None:
    """Each block has `share` tiles of tokens."""
    tokens, experts = spec.tokens, spec.choices
    most = min(2 * _MAP_BLOCKS, max(16, _MAP_COUNTS // experts))
    share = max(1, -(-tokens // (_TILE * most)))
    blocks = -(-tokens // (_TILE * share))
    columns = rt.workspace("row map", 4 * (-(-tokens // 32) + blocks) * experts)
    shared = 12 * (-(-experts // 32) * 32)
    if tokens <= _AT_ONCE:
        kernel = _map_kernel(rt, spec, "mask_map", "ppppqi")
        kernel(rt, 1, _THREADS, routing, columns, out, starts, tokens, experts, shared=shared)
        return
    counts = columns + 4 * -(-tokens // 32) * experts
    count, place = _map_kernel(rt, spec, "mask_count", "pppqii"), _map_kernel(rt, spec, "mask_place", "ppppqii")
    count(rt, blocks, _THREADS, routing, columns, counts, tokens, experts, share, shared=4 * experts)
    place(rt, blocks, _THREADS, columns, counts, out, starts, tokens, experts, share, shared=shared)


def _index_map(rt: Runtime, spec: RowMapSpec, ids: Tensor, out: Tensor, rows: int) -> None:
    """Each block has `share` entries."""
    tokens, slots = spec.tokens, spec.choices
    entries, tile = tokens * slots, 4 * _THREADS
    share = max(1, -(-entries // (tile * _MAP_BLOCKS))) * tile
    blocks = -(-entries // share)
    counts = rt.workspace("row map", 4 * (blocks * (_BINS + 1) + 1 + 2 * entries))
    used = counts + 4 * blocks * _BINS
    done = used + 4 * blocks
    ordered = done + 4
    spare = ordered + 4 * entries
    count = _map_kernel(rt, spec, "index_count", "ppppqq")
    place = _map_kernel(rt, spec, "index_place", "pppppppqqqqi")
    count(rt, blocks, _THREADS, ids, counts, used, done, entries, share)
    place(rt, blocks, _THREADS, ids, counts, used, done, out, ordered, spare, entries, share, tokens, rows, slots)


# --------------------------------------------------------------------------------------------------- moves


def _constants(
    spec: PermuteSpec, each: int, across: int, batch: tuple[int, int] = (1, 1), team: int = 32
) -> dict[str, Any]:
    """Those of a kernel whose `across` threads of a token have `each` vectors at a time."""
    return {
        "WIDTH": _width(spec),
        "MASK": spec.masked,
        "PROB": "float" if spec.probs is None else TYPES[spec.probs],
        "PROBS": spec.mode == "gated",
        "FULL": _vectors(spec) % (each * across) == 0,
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


def _vectors(spec: PermuteSpec) -> int:
    """Vectors of a row."""
    return spec.columns * spec.dtype.itemsize // _width(spec)


def _sizes(spec: PermuteSpec) -> tuple[int, int, int, int]:
    """What follows the pointers of a kernel."""
    return _vectors(spec), spec.tokens, spec.rows, spec.choices


def _threads(vectors: int, each: int) -> tuple[int, int]:
    """(threads of a token, tokens of a block) where a thread is to have `each` vectors."""
    across = min(_THREADS, 1 << max(-(-vectors // each) - 1, 0).bit_length())
    return across, _THREADS // across


def _fills(spec: PermuteSpec) -> bool:
    """Whether a launch of its own fills up rows with zeros: those that have no mark of the first launch, which fills up
    by itself where `starts` are given."""
    return spec.fill and bool(spec.rows) and not (spec.starts and spec.tokens and spec.columns)


def _marks(rt: Runtime, spec: PermuteSpec) -> int:
    """A zero for each row of the result, which fill_rows leaves behind; 0 if it is not needed."""
    return rt.workspace("marks of rows", spec.rows, zeroed=True) if _fills(spec) else 0


def _fill(
    rt: Runtime, spec: PermuteSpec, constants: dict[str, Any], out: Tensor, probs: Tensor | None, marks: int
) -> None:
    """Zeros into the rows that nothing was written to; a block has 256 rows."""
    if _fills(spec):
        kernel = loader.get(rt, "permute", entry="fill_rows", args="pppqq", **constants)
        kernel(rt, -(-spec.rows // _THREADS), _THREADS, out, probs, marks, _vectors(spec), spec.rows)


def permute(rt: Runtime, spec: PermuteSpec, operands: Operands, out: Tensor, row_probs: Tensor | None) -> None:
    """Threads of a token copy its row to all places; then zeros go into those that no token went to."""
    x, row_map, probs, pad, starts = operands
    across, down = _threads(_vectors(spec), _COPIES)
    constants, marks = _constants(spec, _COPIES, across), _marks(rt, spec)
    kernel = loader.get(rt, "permute", entry="permute_rows", args="pppppppp" + "qqqi", **constants)
    if _vectors(spec) and spec.rows and spec.tokens:
        pointers = (x, out, row_map, pad, probs, row_probs, marks, starts)
        kernel(rt, -(-spec.tokens // down), (across, down), *pointers, *_sizes(spec))
    _fill(rt, spec, constants, out, row_probs, marks)


def unpermute(
    rt: Runtime, spec: PermuteSpec, operands: Operands, row_probs: Tensor | None, out: Tensor, probs: Tensor | None
) -> None:
    """Threads of a token add up its rows; without any there are zeros."""
    x, row_map, given, pad, _ = operands
    batch = _batch(spec)
    across, down = _threads(_vectors(spec), batch[1])
    constants = _constants(spec, batch[1], across, batch)
    kernel = loader.get(rt, "permute", entry="unpermute_rows", args="ppppppp" + "qqqi", **constants)
    if not spec.rows:
        for t in (out, probs):
            if t is not None:
                rt.backend.zero(rt, t)
    elif spec.tokens:
        pointers = (x, out, row_map, pad, given, row_probs, probs)
        kernel(rt, -(-spec.tokens // down), (across, down), *pointers, *_sizes(spec))


def unpermute_backward(
    rt: Runtime, spec: PermuteSpec, dy: Tensor, operands: Operands, dx: Tensor, d_weights: Tensor
) -> None:
    """Weighted gradients to all places, zeros elsewhere; and the weights' own. A warp has a token, or, of long rows, a
    block."""
    x, row_map, weights, pad, _ = operands
    if not spec.rows:
        rt.backend.zero(rt, d_weights)
        return
    batch = _batch(spec, backward=True)
    team = 32 if _vectors(spec) < 8 * 32 else _TEAM_BLOCK
    constants, marks = _constants(spec, batch[1], team, batch, team), _marks(rt, spec)
    kernel = loader.get(rt, "permute", entry="unpermute_backward", args="pppppppp" + "qqqi", **constants)
    if spec.tokens:
        blocks, pointers = (
            -(-spec.tokens // (_TEAM_BLOCK // team)),
            (dy, x, dx, row_map, pad, weights, d_weights, marks),
        )
        kernel(rt, blocks, (_TEAM_BLOCK, 1), *pointers, *_sizes(spec))
    _fill(rt, spec, constants, dx, None, marks)
