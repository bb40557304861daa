"""Several matrices of one width quantized in one launch, per tensor or in blocks, on CUDA.

Where they lie is a table that the kernel takes by value: up to 48 matrices a launch (384 where driver and NVRTC are
CUDA 12.1 or newer), then another launch. Each matrix is cut into the tiles that it has in `quantize`, so sums have the
same bits. Delayed and block scaling take one launch, current scaling two (partial maxima, cast); column sums add one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import Array, c_char, create_string_buffer
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from te_core import libraries
from te_core.backends.cuda.quantize import BLOCKS_PER_SM, STAGE_BYTES, THREADS, Tiling, aligned, multiprocessors, tiling
from te_core.backends.cuda.quantize_block import tile_bytes, tile_constants, tile_threads
from te_core.backends.cuda.sums import FORMATS, TYPES, column_workspace
from te_core.dtypes import DType, float8_e4m3
from te_core.errors import ArgumentError
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.quantized import BLOCK, Cast, QuantizedRows, QuantizedTensor, columns_of
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.quantize_grouped import GroupedSpec

#: Entries that a launch's parameters hold, as in scale_update: 4 KB everywhere, 32,764 bytes since CUDA 12.1.
_SMALL, _LARGE = 48, 384
_MATRIX = struct.Struct("=7QqIIii")  # Group of quantize_grouped.cu
_TILES = struct.Struct("=6QqII")  # Group of quantize_block.cu
_TAIL = struct.Struct("=qfiiI")  # cols, epsilon, power_of_two, count, across
_PART = struct.Struct("=QQiI")  # Part of column_sum.cu, and what follows 128 of them
_PARTS, _PARTS_TAIL, _COLUMNS = 128, struct.Struct("=qi4x"), 32
_STAGES = 4 * STAGE_BYTES  # quantize_grouped.cu has four stages
_SIDE = BLOCK["block"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with its constants; `get` finds the variant for aligned or unaligned matrices and so many of them."""

    name: str
    entry: str
    constants: tuple[tuple[str, Any], ...]

    def get(self, rt: Runtime, aligned: bool, capacity: int) -> Kernel:
        """The kernel."""
        return loader.get(
            rt, self.name, entry=self.entry, args="b", ALIGNED=aligned, CAPACITY=capacity, **dict(self.constants)
        )


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """The kernels of one width, type and cast, and how far a matrix is cut up."""

    spec: GroupedSpec
    cast: Variant
    tall: bool
    limit: int  # of blocks of the cast, for each matrix; 0: none
    maxima: Variant | None = None  # current scaling: the pass before the cast
    most: int = 0  # blocks of that pass, for each matrix
    sums: Kernel | None = None

    @property
    def block(self) -> bool:
        """Whether the cast is one to a block format."""
        return self.cast.name == "quantize_block"


def _plan(rt: Runtime, spec: GroupedSpec) -> GroupedPlan:
    dtype, sum_dtype = spec.dtype, spec.sum
    form, columnwise = spec.cast.format, spec.cast.columnwise
    adds = sum_dtype is not None
    sums = None
    if sum_dtype is not None:
        sums = loader.get(rt, "column_sum", entry="column_sum_grouped", args="b", DTYPE=TYPES[sum_dtype])
    if form.scaling == "block":
        constants = {**tile_constants(spec.cast, dtype, adds), "GROUPED": 1}
        cast = Variant("quantize_block", "quantize_block_grouped", tuple(constants.items()))
        return GroupedPlan(spec, cast, True, 0, sums=sums)
    most = BLOCKS_PER_SM * multiprocessors(rt)
    if spec.cast.delayed:
        tall = columnwise or adds
        cast = _variant(dtype, form.dtype, "GIVEN_SCALE", columnwise, adds)
        return GroupedPlan(spec, cast, tall, most if tall else 0, sums=sums)
    cast = _variant(dtype, form.dtype, "OWN_SCALE", columnwise, False)
    maxima = _variant(dtype, float8_e4m3, "NO_CAST", False, adds)
    return GroupedPlan(spec, cast, columnwise, 0, maxima, most, sums)


def _variant(dtype: DType, fp8: DType, scaling: str, columnwise: bool, adds: bool) -> Variant:
    constants = {
        "DTYPE": TYPES[dtype],
        "FORMAT": FORMATS[fp8],
        "SCALING": scaling,
        "TALL": columnwise or adds,
        "COLUMNWISE": columnwise,
        "COLUMN_SUM": adds,
    }
    return Variant("quantize_grouped", "quantize_grouped", tuple(constants.items()))


def quantize_grouped(
    rt: Runtime,
    spec: GroupedSpec,
    parts: Sequence[Tensor],
    casts: Sequence[Cast],
    outs: Sequence[QuantizedTensor],
    column_sums: Sequence[Tensor] | None,
) -> None:
    """Quantize all matrices."""
    plan = rt.plans.find(rt, _plan, spec)
    capacity = _LARGE if len(parts) > _SMALL and libraries.large_parameters() else _SMALL
    vector = 16 // plan.spec.dtype.itemsize
    aligned = plan.spec.width % vector == 0 and not any(part.ptr & 15 for part in parts)
    for start in range(0, len(parts), capacity):
        some = slice(start, start + capacity)
        chunk = _Chunk(plan, parts[some], casts[some], outs[some], aligned, capacity)
        chunk.run(rt, None if column_sums is None else column_sums[some])


class _Chunk(NamedTuple):
    """As many matrices as one table holds."""

    plan: GroupedPlan
    parts: Sequence[Tensor]
    casts: Sequence[Cast]
    outs: Sequence[QuantizedTensor]
    aligned: bool
    capacity: int

    def run(self, rt: Runtime, column_sums: Sequence[Tensor] | None) -> None:
        """All launches for these matrices."""
        plan = self.plan
        if plan.block:
            self._tiles(rt, column_sums)
        elif plan.maxima is None:
            tiles = [self._tiling(part, plan.tall, plan.limit) for part in self.parts]
            sums = self._sums(rt, tiles, column_sums)
            sources = [_pointer(cast.scale) for cast in self.casts]
            self._cast(rt, tiles, sources, [0] * len(tiles), sums)
            self._add(rt, [t.grid[1] for t in tiles], sums, column_sums)
        else:
            sources = [_pointer(cast.maxima) for cast in self.casts]
            counts = [1] * len(sources)
            if self.casts[0].maxima is None or column_sums is not None:
                partials, blocks = self._first_pass(rt, column_sums)
                if self.casts[0].maxima is None:
                    sources, counts = partials, blocks
            tiles = [self._tiling(part, plan.tall, 0) for part in self.parts]
            self._cast(rt, tiles, sources, counts, [0] * len(tiles))

    # ------------------------------------------------------------------------------------------ per tensor

    def _tiling(self, part: Tensor, tall: bool, limit: int) -> Tiling:
        return tiling(part.shape[0], part.shape[1], part.dtype, tall=tall, flat_rows=8, max_blocks=limit)

    def _sums(self, rt: Runtime, tiles: Sequence[Tiling], wanted: Sequence[Tensor] | None) -> list[int]:
        """Where each matrix leaves its partial column sums."""
        if wanted is None:
            return [0] * len(tiles)
        return self._places(rt, [t.grid[1] for t in tiles])

    def _places(self, rt: Runtime, rows: Sequence[int]) -> list[int]:
        at = column_workspace(rt, sum(rows), self.plan.spec.width)
        found = []
        for n in rows:
            found.append(at)
            at += 4 * n * self.plan.spec.width
        return found

    def _first_pass(self, rt: Runtime, column_sums: Sequence[Tensor] | None) -> tuple[list[int], list[int]]:
        """Where each matrix's partial maxima are, and how many; column sums on the way."""
        first = [self._tiling(part, column_sums is not None, self.plan.most) for part in self.parts]
        sums = self._sums(rt, first, column_sums)
        partials, at = [], rt.workspace("amax", 4 * sum(t.blocks for t in first))
        for t in first:
            partials.append(at)
            at += 4 * t.blocks
        assert self.plan.maxima is not None
        rows = [
            (part.ptr, 0, 0, 0, 0, at, total, part.shape[0], t.grid[1], t.steps, 0)
            for part, t, at, total in zip(self.parts, first, partials, sums, strict=True)
        ]
        self._launch(rt, self.plan.maxima, rows, first)
        self._add(rt, [t.grid[1] for t in first], sums, column_sums)
        return partials, [t.blocks for t in first]

    def _cast(
        self, rt: Runtime, tiles: Sequence[Tiling], sources: Sequence[int], counts: Sequence[int], sums: Sequence[int]
    ) -> None:
        rows = [
            (
                part.ptr,
                _pointer(q.rowwise),
                _pointer(q.columnwise),
                source,
                q.scale_inv.ptr,
                _pointer(cast.amax),
                total,
                part.shape[0],
                t.grid[1],
                t.steps,
                count,
            )
            for part, cast, q, t, source, count, total in zip(
                self.parts, self.casts, self.outs, tiles, sources, counts, sums, strict=True
            )
        ]
        self._launch(rt, self.plan.cast, rows, tiles)

    def _launch(self, rt: Runtime, variant: Variant, rows: Sequence[tuple[int, ...]], tiles: Sequence[Tiling]) -> None:
        table = create_string_buffer(self.capacity * _MATRIX.size + _TAIL.size)
        blocks = 0
        for i, (row, t) in enumerate(zip(rows, tiles, strict=True)):
            _MATRIX.pack_into(table, i * _MATRIX.size, *row[:8], blocks, *row[8:])
            blocks += t.blocks
        self._finish(table, _MATRIX.size, tiles[0].grid[0])
        kernel = variant.get(rt, self.aligned, self.capacity)
        kernel.by_value(rt, blocks, THREADS, table, _STAGES, _places_of(rt, _MATRIX, len(rows)))

    def _finish(self, table: Array[c_char], size: int, across: int) -> None:
        """What follows the entries."""
        cast = self.casts[0]
        _TAIL.pack_into(
            table, self.capacity * size, self.plan.spec.width, cast.epsilon, cast.power_of_two, len(self.parts), across
        )

    # ---------------------------------------------------------------------------------------------- in blocks

    def _tiles(self, rt: Runtime, column_sums: Sequence[Tensor] | None) -> None:
        """One launch of quantize_block.cu."""
        plan = self.plan
        across = -(-plan.spec.width // _SIDE)
        down = [-(-part.shape[0] // _SIDE) for part in self.parts]
        sums = [0] * len(down) if column_sums is None else self._places(rt, down)
        table = create_string_buffer(self.capacity * _TILES.size + _TAIL.size)
        blocks = 0
        for i, (part, q) in enumerate(zip(self.parts, self.outs, strict=True)):
            _TILES.pack_into(
                table,
                i * _TILES.size,
                part.ptr,
                _pointer(q.rowwise),
                _pointer(q.rowwise_scale),
                _pointer(q.columnwise),
                _pointer(q.columnwise_scale),
                sums[i],
                part.shape[0],
                blocks,
                0,
            )
            blocks += across * down[i]
        if blocks:
            self._finish(table, _TILES.size, across)
            threads, shared = tile_threads(plan.spec.dtype), tile_bytes(plan.spec.dtype)
            kernel = plan.cast.get(rt, self.aligned, self.capacity)
            kernel.by_value(rt, blocks, threads, table, shared, _places_of(rt, _TILES, len(down)))
        self._add(rt, down, sums, column_sums)

    # --------------------------------------------------------------------------------------------- column sums

    def _add(
        self, rt: Runtime, parts: Sequence[int], partials: Sequence[int], column_sums: Sequence[Tensor] | None
    ) -> None:
        """Add up the partial column sums of all matrices."""
        kernel, width = self.plan.sums, self.plan.spec.width
        if column_sums is None or kernel is None or not width:
            return
        blocks = -(-width // _COLUMNS)
        for start in range(0, len(parts), _PARTS):
            some = slice(start, start + _PARTS)
            table = create_string_buffer(_PARTS * _PART.size + _PARTS_TAIL.size)
            entries = list(zip(partials[some], column_sums[some], parts[some], strict=True))
            for i, (source, out, rows) in enumerate(entries):
                _PART.pack_into(table, i * _PART.size, source, out.ptr, rows, i * blocks)
            _PARTS_TAIL.pack_into(table, _PARTS * _PART.size, width, len(entries))
            kernel.by_value(rt, blocks * len(entries), 256, table, 0, _places_of(rt, _PART, len(entries)))


# ------------------------------------------------------------------------------------- sizes that the device knows

#: x, rowwise, columnwise, offsets, source, scale_inv, amax, cols, pitch, total, groups, across, two steps, epsilon,
#: power_of_two.
_ROWS_ARGS = "pppppppqqiiiiifi"
#: x, rowwise, its scales, columnwise, its scales, offsets, cols, pitch, pitch of the row scales, total, groups, across,
#: epsilon, power_of_two.
_BLOCK_ROWS_ARGS = "ppppppqqqiiifi"


def quantize_rows(rt: Runtime, x: Tensor, offsets: Tensor, casts: Sequence[Cast], out: QuantizedRows) -> None:
    """One launch, with current scaling two: maxima of tiles first."""
    (rows, cols), groups, cast, is_aligned = x.shape, len(casts), casts[0], aligned(x)
    pitch = columns_of(rows, groups)
    if out.format.scaling == "block":
        across, pieces = -(-cols // _SIDE), 0 if out.rowwise_scale is None else out.rowwise_scale.shape[1]
        constants = {**tile_constants(cast.key, x.dtype, False), "GROUPED": 2, "ALIGNED": is_aligned}
        kernel = loader.get(rt, "quantize_block", entry="quantize_block_rows", args=_BLOCK_ROWS_ARGS, **constants)
        places = (out.rowwise, out.rowwise_scale, out.columnwise, out.columnwise_scale, offsets)
        sizes = (cols, pitch, pieces, rows, groups, across, cast.epsilon, cast.power_of_two)
        blocks, threads = across * (pitch // _SIDE), tile_threads(x.dtype)
        kernel(rt, blocks, threads, x, *places, *sizes, shared=tile_bytes(x.dtype))
        return
    across = tiling(rows, cols, x.dtype, tall=True, flat_rows=8).grid[0]
    blocks = across * (pitch // 128)
    source, source_step = _vector(casts, "scale")
    amax, amax_step = _vector(casts, "amax")
    scale = out.columnwise_scale if out.rowwise_scale is None else out.rowwise_scale
    passes: list[tuple[str, DType, bool, tuple[Any, ...]]] = []
    if not cast.key.delayed:
        source = rt.workspace("amax", 4 * blocks)
        passes.append(("NO_CAST", float8_e4m3, False, (None, None, offsets, source, None, 0)))
    kind = "GIVEN_SCALE" if cast.key.delayed else "OWN_SCALE"
    given = (out.rowwise, out.columnwise, offsets, source, scale, amax)
    for scaling, fp8, columnwise, operands in (*passes, (kind, out.format.dtype, cast.columnwise, given)):
        constants = {**dict(_variant(x.dtype, fp8, scaling, columnwise, False).constants), "TALL": True}
        constants |= {"BY_OFFSETS": 1, "ALIGNED": is_aligned}
        kernel = loader.get(rt, "quantize_grouped", entry="quantize_rows", args=_ROWS_ARGS, **constants)
        numbers = (cols, pitch, rows, groups, across, source_step, amax_step, cast.epsilon, cast.power_of_two)
        kernel(rt, blocks, THREADS, x, *operands, *numbers, shared=_STAGES)


def _vector(casts: Sequence[Cast], name: str) -> tuple[int, int]:
    """(the address of the first one's float, how many floats on the next one's is); (0, 0) where they have none."""
    places = [_pointer(getattr(cast, name)) for cast in casts]
    step = places[1] - places[0] if len(places) > 1 else 0
    if any(b - a != step for a, b in pairwise(places)):
        got, allowed = f"casts whose {name} lie at uneven distances", "one vector for all groups"
        raise ArgumentError("quantize_rows", got, allowed, "take them from one Scales")
    return places[0], step // 4


def _places_of(rt: Runtime, entry: struct.Struct, count: int) -> tuple[int, ...]:
    """Where addresses stand in so many entries of a table, at the beginning of each, if a recording wants to know."""
    addresses = {_MATRIX: 7, _TILES: 6, _PART: 2}[entry]
    return tuple(i * entry.size + 8 * k for i in range(count if rt.recorder else 0) for k in range(addresses))


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.ptr
