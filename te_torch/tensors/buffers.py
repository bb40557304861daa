"""The buffers of a quantized matrix as torch tensors, and core views of them.

A copy consists of data, scale and, for nvfp4, amax; each is a torch tensor and may be replaced by itself. They have
the padded shapes of `te_core.quantized`, or smaller ones (a slice of another tensor, a user's own buffer), which are
filled up when the core reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.quantized import Copy, Format, QuantizedTensor, pieces_of, up
from te_core.tensor import CPU, META
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


def are_held(buffers: Sequence[Any], t: Any) -> bool:
    """Whether these are the very tensors that a storage holds: asked for each weight in each step, so in C."""
    return all(map(is_, buffers, _held_by(t)))


_held_by = attrgetter(*NAMES)


def form_key(form: Format) -> tuple[Any, ...]:
    """A format as plain values."""
    return (form.dtype.name, form.scaling, form.tiled, form.row_scaled, form.bound)


def form_of(key: Sequence[Any]) -> Format:
    """The format that `form_key` described."""
    return Format(dtypes.dtype(key[0]), *key[1:])


def of_core(q: QuantizedTensor) -> Buffers:
    """torch views of the pieces of a core tensor that a torch runtime made."""
    row = (q.rowwise, torch.uint8), (q.rowwise_scale, None), (q.rowwise_amax, None)
    column = (q.columnwise, torch.uint8), (q.columnwise_scale, None), (q.columnwise_amax, None)
    return Buffers(*[None if t is None else piece_to_torch(t, dtype) for t, dtype in (*row, *column)])


class Apart(QuantizedTensor):
    """A matrix whose pieces lie apart; one block is made of them when somebody wants it (a weight's nobody does)."""

    __slots__ = ("_whole", "pack")
    pack: Callable[[], torch.Tensor]
    _whole: Any

    @property
    def block(self) -> Any:
        """The pieces of the columnwise copy, or of the rowwise one if that is all there is, in one memory."""
        if self._whole is None:
            self._whole = to_core(self.pack())
        return self._whole

    @block.setter
    def block(self, block: Any) -> None:
        self._whole = block


def core_of(form: Format, shape: tuple[int, int], buffers: Buffers, shapes_only: bool = False) -> QuantizedTensor:
    """The core's view. Each copy is read where it lies, unless it has to be padded or aligned.

    `shapes_only`: for buffers without memory (a compiler's stand-ins; meta ones are known).
    """
    first = buffers.row_data if buffers.row_data is not None else buffers.col_data
    shapes_only = shapes_only or (first is not None and first.is_meta)
    copies: list[Copy | None] = []
    block, pack = None, None
    for columnwise in (False, True):
        data, scale, amax = buffers.of(columnwise)
        if data is None:
            copies.append(None)
            continue
        if scale is None:  # per tensor, where one scale serves both copies
            scale = buffers.row_scale
        parts = pieces_of(META if shapes_only else CPU, form, shape, columnwise)
        if data.ndim != 2:  # strided data, of which no matrix is a view
            data = data.reshape(shape[::-1] if columnwise and form.transposed else shape)
        least = partial(least_of, form, shape, columnwise)
        data = _fit(data, parts.data, 0, shapes_only, least, 0)
        scale = _fit(scale, parts.scale, 1 if parts.scale_type is dtypes.float32 else 0, shapes_only, least, 1)
        amax = None if amax is None else _fit(amax, (parts.amax,), 0, shapes_only)
        convert = to_core_shape if shapes_only else to_core
        core = convert(data)
        core.dtype = parts.data_type
        copies.append(Copy(core, convert(scale), None if amax is None else convert(amax)))
        if shapes_only:
            block = to_core_shape(data.new_empty((parts.nbytes,)))
        else:
            whole = _joined(data, scale, amax, parts)
            block = None if whole is None else to_core(whole)
            pack = partial(_pack, data, scale, amax, parts)
    if block is not None or pack is None:
        return QuantizedTensor(form, shape, copies[0], copies[1], block)
    made = Apart(form, shape, copies[0], copies[1])
    made.pack = pack
    return made


def least_of(form: Format, shape: tuple[int, int], columnwise: bool) -> tuple[tuple[int, int], tuple[int, ...], int]:
    """The shapes of a copy's data and scales without any padding, and how many amaxes it has."""
    m, k = shape
    if form.scaling == "mxfp8":
        return (m, k), (-(-m // 32), k) if columnwise else (m, -(-k // 32)), 0
    rows, along = (k, m) if columnwise else (m, k)
    if form.scaling == "tensor":
        return (rows, along), (1,), 0
    if form.scaling == "block":
        blocks = -(-along // 128)
        return (rows, along), (-(-rows // 128), blocks) if form.tiled else (blocks, rows), 0
    return (rows, -(-along // 2)), (rows, -(-along // 16)), rows if form.row_scaled else 1


def _fit(
    t: torch.Tensor,
    shape: tuple[int, ...],
    fill: int,
    shapes_only: bool,
    least: Callable[[], Any] | None = None,
    which: int = 0,
) -> torch.Tensor:
    """The tensor itself if it is dense, of this shape and where a GEMM can read it, else a copy that is.

    What has to be filled up reaches as far as values do: `least` tells how far, under `which`. Of shapes alone nothing
    is compared: a compiler would have a program for sizes that have to be padded.
    """
    if shapes_only:
        return t.new_empty(shape)
    if t.shape == shape:
        t = t.contiguous()
        return t if not t.data_ptr() % (16 if t.numel() > 1 else 4) else t.clone()
    if least is not None and t.ndim == len(shape):
        needed = least()[which]
        if any(a < b for a, b in zip(t.shape, needed, strict=True)):
            raise ArgumentError(
                "a quantized tensor",
                f"a buffer of shape {tuple(t.shape)} ({t.dtype})",
                f"{needed}, or that padded: {shape}",
                "set data and scales that belong together, of all values",
            )
    whole = t.new_full(shape, fill)
    if t.ndim == len(shape):
        part = tuple(slice(0, min(a, b)) for a, b in zip(t.shape, shape, strict=True))
        whole[part].copy_(t[part])
    else:  # a scale of one element in another shape
        whole.copy_(t.reshape(shape))
    return whole


def _joined(data: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, parts: Any) -> torch.Tensor | None:
    """The bytes of a copy as one tensor, where its pieces follow one another."""
    start, storage = data.data_ptr(), data.untyped_storage()
    first = storage.data_ptr()
    scale_at = start + parts.data_bytes
    if (
        data.numel()
        and scale.data_ptr() == scale_at
        and scale.untyped_storage().data_ptr() == first
        and (amax is None or amax.data_ptr() == scale_at + parts.scale_bytes)
        and start - first + parts.nbytes <= storage.nbytes()
    ):
        return data.as_strided((parts.nbytes,), (1,))
    return None


def _pack(data: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, parts: Any) -> torch.Tensor:
    """The same as a new block."""
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
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def matrix_of_data(shape: Sequence[int], turned: bool) -> tuple[int, int]:
    """The shape of data as a matrix; of transposed data, whose first dimension was the last, its first one stands."""
    if turned and shape:
        return shape[0], prod(shape[1:])
    return matrix_of(shape)


def with_whole_scales(form: Format, shape: tuple[int, int], buffers: Buffers) -> Buffers:
    """The buffers with scales as the core has them, filled up where they are smaller."""
    made = list(buffers)
    for at, columnwise in ((1, False), (4, True)):
        scale = made[at]
        if scale is not None:
            parts = pieces_of(CPU, form, shape, columnwise)
            made[at] = _fit(scale, parts.scale, 1 if parts.scale_type is dtypes.float32 else 0, scale.is_meta)
    return Buffers(*made)


def without(dropped: Buffers, kept: Buffers) -> Buffers:
    """What is kept of two copies, in its place. A scale or amax in the other's memory moves out, which is then free."""

    def memory(copy: Buffers) -> int | None:
        data = copy.row_data if copy.row_data is not None else copy.col_data
        return None if data is None else memory_of(data)[0]

    gone, mine = memory(dropped), memory(kept)
    return Buffers(*[t.clone() if t is not None and gone != mine and memory_of(t)[0] == gone else t for t in kept])


def memory_of(t: torch.Tensor) -> tuple[int, Any]:
    """The memory that a tensor is a view of, and where in it it begins; real or a compiler's."""
    return t.untyped_storage()._cdata, t.storage_offset() * t.element_size()


def rows_of(form: Format, shape: tuple[int, int], buffers: Buffers, start: int, stop: int) -> Buffers | None:
    """The rows `start` to `stop` of a format with blocks as views; None where that would cut through one."""
    step = {"block": 128, "mxfp8": 32, "nvfp4": 16}[form.scaling]
    if start % step or (stop % step and stop != shape[0]):
        return None
    row, scale, amax = buffers.of(False)
    column, column_scale, column_amax = buffers.of(True)
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


def resolve_shape(old: Sequence[int], shape: Sequence[Any]) -> tuple[int, ...]:
    """The arguments of view() as sizes, a -1 worked out."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else tuple(shape)
    if -1 not in sizes:
        return sizes
    total = known = 1
    for n in old:
        total *= n
    for n in sizes:
        known *= 1 if n == -1 else n
    return tuple(total // known if n == -1 and known else max(n, 0) for n in sizes)
