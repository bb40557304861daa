"""What is made of a storage's buffers once and found again: their documented views, and the core's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_core.quantized import Copy, Format, QuantizedTensor
from te_core.tape.walk import Facts, facts_of_weight
from te_core.tensor import Tensor
from te_torch.tensors.buffers import Apart, Buffers, are_held

_address_of = torch.Tensor.data_ptr

#: Strides and offset of a tensor, as torch says them.
Place = tuple[Sequence[int], Any]


class Part(NamedTuple):
    """A part of a tensor, as torch says where a view lies."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def place(self) -> Place:
        """Strides and offset."""
        return self.stride, self.offset


class Seen(NamedTuple):
    """How a tensor's buffers are related to what it shows."""

    matrix: tuple[int, int] | None = None  # which they are, where it is not that of the shape (`view(-1)`)
    part: bool = False  # of another tensor, with whose rest they share a scale


WHOLE = Seen()


@dataclass(slots=True, eq=False)
class Memory:
    """What all tensors over the same data know of it, or of parts of it."""

    writes: int = 0
    size: int = 0  # elements of the tensor that parts were made of
    arriving: Any = None  # parts of another tensor that were written to it (arriving.py)
    blank: bool = False  # all zeros, to which any scale fits
    alone: Any = None  # the one part that was written since, beside which all is zero (FSDP2 fills shards up)
    giver: tuple[int, int] = (0, 0)  # the scaling state that its scale is of, by token, and the column (handovers)
    state: Any = None  # of a module's weight with delayed scaling: the scaling state

    @property
    def margin(self) -> int | None:
        """That of a delayed scale which starts anew with whatever is written; None once maxima have made the scale."""
        return None if self.state is None else self.state.begins


@dataclass(slots=True, eq=False)
class Look:
    """A buffer and its documented view, made once: programs keep these views, and compare them by identity.

    Tensors that share buffers share their looks.
    """

    buffer: torch.Tensor
    given: torch.Tensor | None = None
    view: torch.Tensor | None = None
    as_of: int = 0  # of a transpose: how often the data had been written when it was made

    def seen(self, how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The view: the tensor that was given if it is of the view's shape, else what this function makes."""
        if self.view is None:
            outlives = torch.is_inference_mode_enabled() and not self.buffer.is_inference()
            with torch.inference_mode(False) if outlives else nullcontext():
                self.view = how(self.buffer)
            if self.given is not None and (self.given.shape, self.given.dtype) == (self.view.shape, self.view.dtype):
                self.view = self.given
            self.given = None
        return self.view


class OfOneTensor:
    """What a tensor finds out about itself: a copy (of torch's asynchronous checkpoints, too) finds out its own."""

    __slots__ = ()

    def __deepcopy__(self, memo: Any) -> None:
        return None


class CoreViews(OfOneTensor):
    """The pieces of a core view, for as long as the buffers are the same and stay where they are."""

    __slots__ = ("block", "buffers", "column", "facts", "form", "held", "pack", "pieces", "places", "row", "shape")

    @classmethod
    def of(cls, storage: Any, q: QuantizedTensor) -> CoreViews | None:
        """Those of a view just made; None if the core reads copies, which a change of the buffers would not reach."""
        b: Buffers = storage._buffers
        apart = isinstance(q, Apart)
        pairs = [(b.row_data, q.rowwise), (b.col_data, q.columnwise)]
        pairs += [] if apart else [(b.row_data if b.col_data is None else b.col_data, q.block)]
        if any(t is not None and (core is None or not t.numel() or core.ptr != t.data_ptr()) for t, core in pairs):
            return None
        made = cls()
        made.buffers, made.form, made.shape = b, q.format, q.shape
        made.block, made.pack = (None, q.pack) if isinstance(q, Apart) else (q.block, None)
        made.row = made.column = None
        if q.rowwise is not None and q.rowwise_scale is not None:
            made.row = Copy(q.rowwise, q.rowwise_scale, q.rowwise_amax)
        if q.columnwise is not None and q.columnwise_scale is not None:
            made.column = Copy(q.columnwise, q.columnwise_scale, q.columnwise_amax)
        made.pieces, made.facts = _pieces(made.row, b[:3]) + _pieces(made.column, b[3:]), None
        made.held, made.places = [t for _, t in made.pieces], [core.ptr for core, _ in made.pieces]
        return made if made._in_place() else None

    buffers: Buffers
    form: Format
    shape: tuple[int, int]
    row: Copy | None
    column: Copy | None
    block: Any
    pack: Callable[[], torch.Tensor] | None
    pieces: list[tuple[Tensor, torch.Tensor]]  # of both copies: the core's view, and of what
    held: list[torch.Tensor]  # of what each piece is, and where it is
    places: list[int]
    facts: Facts | None  # what recordings depend on of them, once they were asked for

    def fit(self, storage: Any) -> bool:
        """Whether the storage still has these buffers, each in this memory (`buffer.data = ...` exchanges that)."""
        return are_held(self.buffers, storage) and self.form is storage._format and self._in_place()

    def _in_place(self) -> bool:
        return [*map(_address_of, self.held)] == self.places

    def follow(self) -> bool:
        """Point to where the buffers' memory is now, which was freed and allocated again; False if these views cannot:
        there they would be one block no longer, or a GEMM could not read it. Who has taken them has nothing else left.
        """
        for core, t in self.pieces:
            ptr = t.data_ptr()
            if core.ptr != ptr:
                if self.pack is None or ptr % (16 if core.size > 1 else 4):
                    return False
                core.ptr = ptr
        self.places = [core.ptr for core, _ in self.pieces]
        if self.facts is not None:
            self.facts.follow()
        return True

    def facts_of(self, owner: Any, device: Any) -> Facts:
        """What recordings depend on of them, as of one that belongs to this tensor."""
        known = self.facts
        if known is None:
            view = self.view()
            view.owner = owner
            known = self.facts = facts_of_weight(view, device)
        return known

    def view(self) -> QuantizedTensor:
        """A core tensor of these pieces: its owner is who takes it."""
        if self.pack is None:
            return QuantizedTensor(self.form, self.shape, self.row, self.column, self.block)
        made = Apart(self.form, self.shape, self.row, self.column)
        made.pack = self.pack
        return made


def _pieces(copy: Copy | None, buffers: Sequence[Any]) -> list[tuple[Tensor, torch.Tensor]]:
    """The pieces of a copy that are views of buffers of its own."""
    both = () if copy is None else zip(copy, buffers, strict=True)
    return [(c, t) for c, t in both if c is not None and t is not None]
