"""Several matrices quantized at once, each by itself: groups of rows of one matrix, or separate ones (weights).

Each result is bit for bit what `quantize` makes of that matrix alone. On a GPU per-tensor and block formats take one
launch for up to 64 matrices (current scaling two: the maxima first; column sums one more, which adds the partial
sums). mxfp8 and nvfp4 take a launch for each matrix: where their products run natively is not seen yet.

Where the device alone knows how many rows a group has, `quantize_rows` quantizes them into copies whose shapes follow
from the rows of all groups (`QuantizedRows`): values and scales are those of each group alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from te_core import dtypes
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError
from te_core.ops import _check
from te_core.ops.declare import operation
from te_core.ops.quantize import allocate, check_cast, check_out, count_nonfinite, quantize
from te_core.quantized import (
    ONE_BLOCK,
    Cast,
    CastKey,
    Copy,
    Format,
    QuantizedRows,
    QuantizedTensor,
    check_room,
    pieces_of,
    row_pieces,
    up,
)
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: Each group's copy begins at such an address, as if it had been allocated alone.
ALIGNMENT = 256
#: Scalings that a backend quantizes together.
_TOGETHER = ("tensor", "block")


@dataclass(frozen=True, slots=True)
class GroupedSpec:
    """All that the launches depend on besides how many matrices there are, their rows and addresses."""

    width: int
    dtype: DType
    cast: CastKey
    sum: DType | None  # of the column sums, if they are wanted


def bounds_of(splits: Sequence[int]) -> list[tuple[int, int]]:
    """(first row, row after the last) of each group."""
    ends = list(accumulate(splits))
    return list(zip([0, *ends], ends, strict=False))


@operation("""
    x [T, K]: Rows of all groups.
    splits: Rows of the groups, numbers of the host.
    casts: How each is quantized (`Cast`).
    column_sums: Vectors that are set to the column sums of each group. None computes none.
""")
def quantize_grouped(
    rt: Runtime, x: Tensor, splits: Sequence[int], casts: Sequence[Cast], column_sums: Sequence[Tensor] | None = None
) -> list[QuantizedTensor]:
    """Quantize each group of rows of x [T, K] as its cast says; `splits` are the rows of the groups, 0 allowed.

    The casts may differ in their tensors (scale, amax, maxima, rng) and in their site only. column_sums, if given: a
    vector [K] for each group, set to the column sums of its rows of x. The groups' storage is one block, as `groups_in`
    reads it.
    """
    op = "quantize_grouped"
    if min(splits, default=0) < 0 or sum(splits) != x.shape[0]:
        got, allowed = f"splits {list(splits)} of {x.shape[0]} rows", "row counts that add up to those of x"
        raise ArgumentError(op, got, allowed, "correct the splits")
    outs = allocate_groups(rt, splits, x.shape[1], casts[0]) if casts else []
    parts = [x.rows(start, stop) for start, stop in bounds_of(splits)]
    _quantize_all(op, rt, parts, casts, outs, column_sums)
    return outs


@operation(
    """
    tensors: Matrices of one width and type.
    outs: Where the results are written. None allocates them.
""",
    runs="quantize_grouped",
)
def quantize_many(
    rt: Runtime, tensors: Sequence[Tensor], casts: Sequence[Cast], *, outs: Sequence[QuantizedTensor] | None = None
) -> Sequence[QuantizedTensor]:
    """Quantize separate matrices of one width and type; each has its own storage, as `quantize` gives it, or `outs`,
    which hold the casts' copies.
    """
    for t in tensors:
        _check.matrix("quantize_many", "a tensor", t)
    if outs is None:
        outs = [allocate(rt, t.shape, cast) for t, cast in zip(tensors, casts, strict=True)]  # type: ignore[arg-type]
    elif len(outs) != len(tensors):
        got = f"{len(outs)} outs for {len(tensors)} matrices"
        raise ArgumentError("quantize_many", got, "one for each", "correct the counts")
    else:
        for out, t, cast in zip(outs, tensors, casts, strict=False):
            check_out("quantize_many", rt.device, out, t, cast)
            out.rowwise_swizzled = out.columnwise_swizzled = None
    _quantize_all("quantize_many", rt, tensors, casts, outs, None)
    return outs


def _quantize_all(
    op: str,
    rt: Runtime,
    parts: Sequence[Tensor],
    casts: Sequence[Cast],
    outs: Sequence[QuantizedTensor],
    column_sums: Sequence[Tensor] | None,
) -> None:
    if len(parts) != len(casts) or (column_sums is not None and len(column_sums) != len(parts)):
        got, allowed = f"{len(parts)} matrices, {len(casts)} casts", "one cast (and one column sum) for each"
        raise ArgumentError(op, got, allowed, "correct the counts")
    if not parts:
        return
    x, first = parts[0], casts[0]
    if first.format.scaling not in _TOGETHER:
        for i, (part, cast, out) in enumerate(zip(parts, casts, outs, strict=True)):
            quantize(rt, part, cast, column_sum=None if column_sums is None else column_sums[i], out=out)
        return
    _check_alike(op, rt, parts, casts, column_sums)
    sum_dtype = None if column_sums is None else column_sums[0].dtype
    _check.one_of(op, "dtype of x", x.dtype, ACTIVATION_DTYPES)
    check_cast(op, rt.device, first)
    spec = GroupedSpec(x.shape[1], x.dtype, first.key, sum_dtype)
    rt.backend.quantize_grouped(rt, spec, parts, casts, outs, column_sums)
    for part, cast in zip(parts, casts, strict=True):
        if cast.nonfinite is not None:
            count_nonfinite(rt, part, cast.nonfinite)


def _check_alike(
    op: str, rt: Runtime, parts: Sequence[Tensor], casts: Sequence[Cast], column_sums: Sequence[Tensor] | None
) -> None:
    """What one launch takes for granted of all matrices."""
    x, first = parts[0], casts[0]
    _check.on_device(op, rt.device, x)
    for part in parts:
        one = part.ndim == 2 and part.shape[1] == x.shape[1] and part.dtype is x.dtype and part.device is x.device
        if not (one and part.is_contiguous):
            allowed = "dense matrices of one width, type and device"
            raise ArgumentError(op, f"{part!r} beside {x!r}", allowed, "quantize others separately")
    rule = (first.key, first.epsilon, first.power_of_two, first.maxima is None)
    for cast in casts:
        if cast is not first and (cast.key, cast.epsilon, cast.power_of_two, cast.maxima is None) != rule:
            allowed = "casts that differ in their tensors only"
            raise ArgumentError(op, "casts of different rules", allowed, "quantize others separately")
    for total in column_sums or ():
        kinds = (column_sums[0].dtype,) if total is not column_sums[0] else ACTIVATION_DTYPES  # type: ignore[index]
        _check.vector(op, rt.device, "column_sum", total, x.shape[1], kinds)
        _check.written(op, "column_sum", total)


# ------------------------------------------------------------------------------------------- the groups' storage


def allocate_groups(rt: Runtime, splits: Sequence[int], width: int, cast: Cast) -> list[QuantizedTensor]:
    """Uninitialised storage for all groups: one block or, where it is large, one for each copy."""
    form = cast.format
    sizes = {columnwise: _places(rt.device, splits, width, form, columnwise)[1] for columnwise in (True, False)}
    columns, rows = (sizes[True] if cast.columnwise else 0), (sizes[False] if cast.rowwise else 0)
    both = cast.columnwise and cast.rowwise
    shared = not both or (rt.joins and columns + rows <= 2 * ONE_BLOCK)
    block = rt.empty((columns + rows if shared else columns,), dtypes.uint8)
    column_copies = _copies(block, splits, width, form, True) if cast.columnwise else [None] * len(splits)
    row_copies: list[Copy] | list[None] = [None] * len(splits)
    if cast.rowwise:
        where, start = (block, columns) if shared else (rt.empty((rows,), dtypes.uint8), 0)
        row_copies = _copies(where, splits, width, form, False, start)
    made = []
    for m, row, column in zip(splits, row_copies, column_copies, strict=True):
        if form.scaling == "tensor" and row is not None and column is not None:
            row = row._replace(scale=column.scale)  # one for both
        made.append(QuantizedTensor(form, (m, width), row, column, block))
    return made


def groups_in(
    block: Tensor, splits: Sequence[int], width: int, form: Format, columnwise: bool
) -> list[QuantizedTensor]:
    """The groups' copies that a block of `allocate_groups` begins with."""
    check_room(block, _places(block.device, splits, width, form, columnwise)[1], form, (sum(splits), width))
    copies = _copies(block, splits, width, form, columnwise)
    return [
        QuantizedTensor(form, (m, width), None if columnwise else copy, copy if columnwise else None, block)
        for m, copy in zip(splits, copies, strict=True)
    ]


def _places(device: object, splits: Sequence[int], width: int, form: Format, columnwise: bool) -> tuple[list[int], int]:
    """(where each group's copy begins, bytes of all)."""
    ends = list(accumulate(up(pieces_of(device, form, (m, width), columnwise).nbytes, ALIGNMENT) for m in splits))
    return [0, *ends[:-1]], ends[-1] if ends else 0


def _copies(
    block: Tensor, splits: Sequence[int], width: int, form: Format, columnwise: bool, start: int = 0
) -> list[Copy]:
    places, _ = _places(block.device, splits, width, form, columnwise)
    return [
        Copy.at(block, start + place, pieces_of(block.device, form, (m, width), columnwise))
        for m, place in zip(splits, places, strict=True)
    ]


# ------------------------------------------------------------------------------------- sizes that the device knows

#: In the place of a copy that nobody wants.
_NONE = (None, None)


@operation("""
    x [T, K] act: Rows of all groups.
    offsets [G] i32: Running sums of the rows of the groups.
    casts: How each is quantized (`Cast`), per tensor or in 1 x 128 pieces.
""")
def quantize_rows(rt: Runtime, x: Tensor, offsets: Tensor, casts: Sequence[Cast]) -> QuantizedRows:
    """Quantize each group of rows of x as its cast says; where groups begin is on the device.

    The casts may differ in their tensors only, which lie at equal distances in one vector. K is a multiple of 16.
    """
    op, width, groups = "quantize_rows", x.shape[1], offsets.shape[0] - 1
    if len(casts) != groups or not groups:
        raise ArgumentError(op, f"{len(casts)} casts, offsets {offsets.shape}", "a cast for each group", "pass as many")
    _check_alike(op, rt, [x], casts, None)
    cast, form = casts[0], casts[0].format
    plain = form.scaling in _TOGETHER and not form.tiled and not any(c.maxima or c.nonfinite for c in casts)
    if not plain or width % 16:
        got = f"{x!r} to {form}"
        allowed = "rows of a multiple of 16 to FP8 per tensor or in 1 x 128 pieces, without counters or given maxima"
        raise ArgumentError(op, got, allowed, "quantize_grouped takes others, with sizes of the host")
    row, column = (row_pieces(x.shape, groups, form, columnwise) for columnwise in (False, True))  # type: ignore[arg-type]
    block = rt.empty((column.nbytes if cast.columnwise else row.nbytes,), dtypes.uint8)
    place = rt.empty((row.nbytes,), dtypes.uint8) if cast.columnwise and cast.rowwise else block
    rows = Copy.at(place, 0, row) if cast.rowwise else _NONE
    columns = Copy.at(block, 0, column) if cast.columnwise else _NONE
    scale = columns[1] if form.scaling == "tensor" and cast.columnwise and cast.rowwise else rows[1]  # one for both
    out = QuantizedRows(form, (x.shape[0], width), rows[0], scale, columns[0], columns[1], block)
    if x.shape[0]:
        rt.backend.quantize_rows(rt, x, offsets, casts, out)
    return out
