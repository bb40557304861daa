"""Quantized matrices of several ranks as one: their bytes travel, and nothing is quantized again.

A rank's rows lie along the first side of some buffers and along the second of others, which a transposed copy and its
scales do. Each buffer is gathered by itself, as uint8, where it shall lie; the second sort is turned once it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_core.quantized import BLOCK, Format
from te_torch.exchange import all_gather
from te_torch.tensors import kinds
from te_torch.tensors.buffers import Buffers, matrix_of, with_whole_scales
from te_torch.tensors.transposing import columnwise_of


class _Piece(NamedTuple):
    """A buffer of this rank without padding between ranks, and the side along which rows lie (None: one for all)."""

    name: str
    data: torch.Tensor
    side: int | None


def can_gather(form: Format, rows: int) -> bool:
    """Whether this many rows of a rank end where a block ends, so that ranks' bytes can stand one after another."""
    return form.scaling == "tensor" or rows % BLOCK[form.scaling] == 0


def _pieces_to_send(form: Format, shape: tuple[int, int], buffers: Buffers) -> list[_Piece]:
    m, scaling = shape[0], form.scaling
    block = 1 if scaling == "tensor" else BLOCK[scaling]
    if scaling == "tensor":  # the transpose is made of what arrives
        data: Any = buffers.row_data
        scale: Any = buffers.row_scale if buffers.row_scale is not None else buffers.col_scale
        return [_Piece("row_data", data.reshape(-1, data.shape[-1])[:m], 0), _Piece("row_scale", scale, None)]
    made = []
    row, scale, amax = buffers.of(False)
    if row is not None:
        made.append(_Piece("row_data", row[:m], 0))
        along = {"block": (0, m // block) if form.tiled else (1, m), "mxfp8": (0, m), "nvfp4": (0, m)}[scaling]
        made.append(_Piece("row_scale", scale.narrow(along[0], 0, along[1]), along[0]))
        if amax is not None:
            made.append(_Piece("row_amax", amax, 0 if form.row_scaled else None))
    column, scale, amax = buffers.of(True)
    if column is not None and scaling == "mxfp8":
        made += [_Piece("col_data", column[:m], 0), _Piece("col_scale", scale[: m // block], 0)]
    elif column is not None:
        side = 0 if scaling == "block" and not form.tiled else 1
        made.append(_Piece("col_data", column[:, : m // (2 if scaling == "nvfp4" else 1)], 1))
        made.append(_Piece("col_scale", scale.narrow(side, 0, m // block), side))
        if amax is not None:
            made.append(_Piece("col_amax", amax, None))
    return made


class Gathering:
    """An all-gather of a quantized matrix that is on its way: `wait()` completes the result."""

    def __init__(self, operation: str, local: Any, group: Any, usages: dict[str, bool]) -> None:
        """`local`: a storage or tensor of this rank, of as many rows as each other's (`can_gather`)."""
        self.ranks, self.usages, self.form = dist.get_world_size(group), usages, local._format
        shape, buffers = local._to_read()
        if self.form.scaling != "tensor" and not usages["columnwise"]:
            buffers = buffers.row
        elif self.form.scaling != "tensor" and not usages["rowwise"] and buffers.col_data is not None:
            buffers = buffers.col
        self.shape = (shape[0] * self.ranks, shape[1])
        self.pieces = _pieces_to_send(self.form, shape, buffers)
        self.works, self.arrived = [], []
        for piece in self.pieces:
            sent = piece.data.contiguous().view(-1).view(torch.uint8)
            out = sent.new_empty((self.ranks * sent.numel(),))
            self.works.append(all_gather(operation, out, sent, group, True))
            self.arrived.append(out.view(piece.data.dtype).view(self.ranks, *piece.data.shape))
        first = self.arrived[0]
        shape_of_all = (self.ranks * local.shape[0], *local.shape[1:])
        quantizer = None if local._quantizer is None else local._quantizer.copy()
        if quantizer is not None:
            quantizer.set_usage(**usages)
        kind = kinds.of_format(self.form)
        of = kind.tensor if isinstance(local, torch.Tensor) else kind.storage
        held = Buffers(row_data=first.view(-1, first.shape[-1]), row_scale=self.arrived[1])  # until `wait`
        self.result = of._of(shape_of_all, local.dtype, self.form, held, quantizer, local._options)

    def wait(self, *timeout: Any, **named: Any) -> bool:
        """Wait for the bytes, and put the result together."""
        for work in self.works:
            work.wait(*timeout, **named)
        if self.works:
            self.works = []
            self.result._set_buffers(self._whole())
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return all(work.is_completed() for work in self.works)

    def _whole(self) -> Buffers:
        buffers = Buffers(**{p.name: _joined(t, p.side) for p, t in zip(self.pieces, self.arrived, strict=True)})
        if self.form.scaling == "tensor":
            shape = matrix_of(buffers.row_data.shape)  # type: ignore[union-attr]
        else:
            shape, buffers = self.shape, with_whole_scales(self.form, self.shape, buffers)
        if self.usages["columnwise"] and buffers.col_data is None:
            turned = columnwise_of(self.form, shape, buffers)
            buffers = Buffers(*(buffers if self.usages["rowwise"] else Buffers())[:3], *turned[3:])
        return buffers


def _joined(arrived: torch.Tensor, side: int | None) -> torch.Tensor:
    """What all ranks sent, one after another along their rows."""
    if side is None:
        return _one(arrived)
    if side == 0:
        return arrived.reshape(-1, *arrived.shape[2:])
    return arrived.permute(1, 0, 2).reshape(arrived.shape[1], -1)


def _one(scales: torch.Tensor) -> torch.Tensor:
    """The scale that all ranks have. Where one of them has another the values would be wrong: they become NaN."""
    flat = scales.reshape(scales.shape[0], -1)
    if flat.dtype is not torch.float32 or flat.shape[1] != 1:
        return scales
    return torch.where((flat == flat[:1]).all(), flat[0], torch.full_like(flat[0], torch.nan))


def usages_of(quantizer: Any, local: Any) -> dict[str, bool]:
    """The copies that a gathered tensor shall have: those that its quantizer makes, else those of the shard."""
    if quantizer is None:
        return dict(local.get_usages())
    return {"rowwise": bool(quantizer.rowwise_usage), "columnwise": bool(quantizer.columnwise_usage)}


def missing_of(form: Format, local: Any, usages: dict[str, bool]) -> Sequence[str]:
    """The wanted copies that neither travel nor can be made of what does."""
    there = local.get_usages()
    if form.scaling == "tensor":
        return () if there["rowwise"] else ("rowwise",)
    made = ("columnwise",) if form.tiled and there["rowwise"] and form.scaling != "mxfp8" else ()
    return [name for name, wanted in usages.items() if wanted and not there[name] and name not in made]
