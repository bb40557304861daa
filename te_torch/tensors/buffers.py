"""The buffers of a quantized matrix as torch tensors, and core views of them.

A copy consists of data, scale and, for nvfp4, amax; each is a torch tensor and may be replaced by itself. They have
the padded shapes of `te_core.quantized`, or smaller ones (a slice of another tensor, a user's own buffer), which are
filled up when the core reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from te_core import dtypes
from te_core.quantized import Copy, Format, QuantizedTensor, pieces_of, up
from te_core.tensor import CPU, META, Tensor
from te_torch.runtime import piece_to_torch, to_core, to_core_shape


class Buffers(NamedTuple):
    """Both copies of a matrix. Data and E8M0 or E4M3 scales are uint8, other scales and amaxes float32."""

    row_data: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    row_amax: torch.Tensor | None = None
    col_data: torch.Tensor | None = None
    col_scale: torch.Tensor | None = None
    col_amax: torch.Tensor | None = None

    @property
    def row(self) -> Buffers:
        """The rowwise copy alone."""
        return Buffers(*self[:3])

    @property
    def col(self) -> Buffers:
        """The columnwise copy alone."""
        return Buffers(None, None, None, *self[3:])

    def of(self, columnwise: bool) -> tuple[Any, Any, Any]:
        """(data, scale, amax) of one copy."""
        return self[3:] if columnwise else self[:3]


#: The attributes of a storage that hold its buffers, in the order of `Buffers`.
NAMES = tuple(f"_{name}" for name in Buffers._fields)


@lru_cache(256)
def form_key(form: Format) -> tuple[Any, ...]:
    """A format as plain values."""
    return (form.dtype.name, form.scaling, form.tiled, form.row_scaled, form.bound)


@lru_cache(256)
def form_of(key: tuple[Any, ...]) -> Format:
    """The format that `form_key` described."""
    return Format(dtypes.dtype(key[0]), *key[1:])


def of_core(q: QuantizedTensor) -> Buffers:
    """torch views of the pieces of a core tensor that a torch runtime made."""

    def piece(t: Tensor | None, data: bool = False) -> torch.Tensor | None:
        if t is None:
            return None
        return piece_to_torch(t, torch.uint8 if data else None)

    return Buffers(
        piece(q.rowwise, True), piece(q.rowwise_scale), piece(q.rowwise_amax),
        piece(q.columnwise, True), piece(q.columnwise_scale), piece(q.columnwise_amax),
    )  # fmt: skip


def core_of(form: Format, shape: tuple[int, int], buffers: Buffers, shapes_only: bool = False) -> QuantizedTensor:
    """The core's view; of each copy in one block where the buffers lie so, else of a copy that does.

    `shapes_only`: for buffers without memory (a compiler's stand-ins; meta ones are known).
    """
    row = column = None
    block = None
    if buffers.row_data is not None:
        shapes_only = shapes_only or buffers.row_data.is_meta
        row, block = _copy_of(form, shape, buffers, False, buffers.col_data is None, shapes_only)
    if buffers.col_data is not None:
        shapes_only = shapes_only or buffers.col_data.is_meta
        column, block = _copy_of(form, shape, buffers, True, True, shapes_only)
    return QuantizedTensor(form, shape, row, column, block)


def _copy_of(
    form: Format, shape: tuple[int, int], buffers: Buffers, columnwise: bool, in_block: bool, shapes_only: bool
) -> tuple[Copy, Tensor | None]:
    data, scale, amax = buffers.of(columnwise)
    if scale is None:  # per tensor, where one scale serves both copies
        scale = buffers.row_scale
    parts = pieces_of(META if shapes_only else CPU, form, shape, columnwise)
    data = _fit(data, parts.data, 0)
    scale = _fit(scale, parts.scale, 1 if parts.scale_type is dtypes.float32 else 0)
    if amax is not None:
        amax = _fit(amax, (parts.amax,), 0)
    if in_block and not shapes_only:
        block = _block(data, scale, amax, parts)
        core = to_core(block)
        return Copy.at(core, 0, parts), core
    convert = to_core_shape if shapes_only else to_core
    core_data, core_scale = convert(data), convert(scale)
    core_data.dtype = parts.data_type
    block_of_shape = None
    if in_block:
        block_of_shape = to_core_shape(data.new_empty((parts.nbytes,)))
    return Copy(core_data, core_scale, None if amax is None else convert(amax)), block_of_shape


def _fit(t: torch.Tensor, shape: tuple[int, ...], fill: int) -> torch.Tensor:
    """The tensor itself if it is dense and of this shape, else a copy that is."""
    if t.shape == shape:
        return t.contiguous()
    whole = t.new_full(shape, fill)
    if t.ndim == len(shape):
        part = tuple(slice(0, min(a, b)) for a, b in zip(t.shape, shape, strict=True))
        whole[part].copy_(t[part])
    else:  # a scale of one element in another shape
        whole.copy_(t.reshape(shape))
    return whole


def _block(data: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, parts: Any) -> torch.Tensor:
    """The bytes of a copy as one tensor: a view where they follow one another, else a new block."""
    start, storage = data.data_ptr(), data.untyped_storage()
    first = storage.data_ptr()
    scale_at = start + parts.data_bytes
    if (
        data.numel() and scale.data_ptr() == scale_at and scale.untyped_storage().data_ptr() == first
        and (amax is None or amax.data_ptr() == scale_at + parts.scale_bytes)
        and start - first + parts.nbytes <= storage.nbytes()
    ):  # fmt: skip
        return data.as_strided((parts.nbytes,), (1,))
    block = data.new_empty((parts.nbytes,))
    for source, at in ((data, 0), (scale, parts.data_bytes), (amax, parts.data_bytes + parts.scale_bytes)):
        if source is not None:
            flat = source.reshape(-1).view(torch.uint8)
            block[at : at + flat.numel()].copy_(flat)
    return block


def packed(buffers: Buffers, device: torch.device | None = None, non_blocking: bool = False) -> Buffers:
    """Copies of the buffers, on `device`, each copy of the matrix in a block of its own."""
    made: list[torch.Tensor | None] = []
    for columnwise in (False, True):
        three = [t for t in buffers.of(columnwise)]
        if three[0] is None:
            made += [None, None, None]
            continue
        sizes = [0 if t is None else up(t.numel() * t.element_size(), 16) for t in three]
        block = torch.empty((sum(sizes),), dtype=torch.uint8, device=device or three[0].device)
        at = 0
        for t, size in zip(three, sizes, strict=True):
            if t is None:
                made.append(None)
                continue
            view = block[at : at + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            view.copy_(t, non_blocking=non_blocking)
            made.append(view)
            at += size
    return Buffers(*made)


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """A shape as a matrix: all leading dimensions as one."""
    if not shape:
        return 1, 1
    rows = 1
    for n in shape[:-1]:
        rows *= n
    return rows, shape[-1]


def rows_of(form: Format, shape: tuple[int, int], buffers: Buffers, start: int, stop: int) -> Buffers | None:
    """The rows `start` to `stop` as views; None where that would cut through what shares a scale.

    Per tensor the columnwise copy is left out: it can be made again.
    """
    step = {"tensor": 1, "block": 128, "mxfp8": 32, "nvfp4": 16}[form.scaling]
    if start % step or (stop % step and stop != shape[0]):
        return None
    row, scale, amax = buffers.of(False)
    column, column_scale, column_amax = buffers.of(True)
    k = shape[1]
    if form.scaling == "tensor":
        return None if row is None else Buffers(row[:, :k][start:stop], scale)
    if form.row_scaled:
        amax = None if amax is None else amax[start:stop]
    first, last = start // step, -(-stop // step)
    if row is not None:
        row = row[start : up(stop, form.pad)]
        if form.scaling == "block":
            scale = scale[first:last] if form.tiled else scale[:, start:stop]
        else:
            scale = scale[start:stop]
    if column is not None:
        if form.scaling == "mxfp8":
            column, column_scale = column[start : up(stop, form.pad)], column_scale[first:last]
        elif form.scaling == "block":
            column = column[:, start : up(stop, form.pad)]
            column_scale = column_scale[:, first:last] if form.tiled else column_scale[first:last]
        else:
            column, column_scale = column[:, start // 2 : up(stop, form.pad) // 2], column_scale[:, first:last]
    return Buffers(row, scale if row is not None else None, amax, column, column_scale, column_amax)
