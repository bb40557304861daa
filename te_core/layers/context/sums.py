"""Views of the chunks of a rank's tensors, and sums of the results of its calls.

A result of several calls (the output, dQ) adds up in float32 and is rounded once, by a `Chain`: the first call writes
where the result will stand, later ones are added, the last sum is rounded into its place.
"""

from __future__ import annotations

from te_core import dtypes
from te_core.attention import DIMENSIONS, AttentionSpec
from te_core.dtypes import DType
from te_core.layers.context.sides import Piece, Sides
from te_core.ops import raw as ops
from te_core.runtime import Runtime
from te_core.tensor import Tensor


def slab(t: Tensor, axis: int, start: int, stop: int) -> Tensor:
    """A range of a dimension, as a view."""
    steps = t.row_major_strides()
    shape = (*t.shape[:axis], stop - start, *t.shape[axis + 1 :])
    at = t.ptr + t.dtype.nbytes(start * steps[axis])
    dense = axis == 0 and t.is_contiguous  # rows of a dense tensor are one
    return Tensor(at, shape, t.dtype, t.device, t.owner, None if dense else steps)


def half_of(t: Tensor, form: str, half: int | None, *, stats: bool = False) -> Tensor:
    """One of the two chunks of a rank's tensor, or of its statistics."""
    if half is None or form == "thd":
        return t
    axis = t.ndim - 1 if stats else DIMENSIONS[form][1]
    count = t.shape[axis] // 2
    return slab(t, axis, half * count, (half + 1) * count)


def like(rt: Runtime, t: Tensor, form: str, dtype: DType) -> Tensor:
    """Memory for a gradient: dense; of a packed tensor with that one's strides, as cuDNN has to find it."""
    if form != "thd" or t.is_contiguous:
        return rt.empty(t.shape, dtype)
    steps = t.row_major_strides()
    block = rt.empty((t.shape[0], steps[0]), dtype)
    return Tensor(block.ptr, t.shape, dtype, t.device, block, steps)


# ---------------------------------------------------------------------------------------------- sums


class Chain:
    """What several calls add up to: rounded once, into its target."""

    __slots__ = ("_sum", "form", "rt", "target")

    def __init__(self, rt: Runtime, target: Tensor, form: str) -> None:
        self.rt, self.target, self.form = rt, target, form
        self._sum: Tensor | None = None

    def place(self, side: Sides) -> Tensor | None:
        """Where a call may write its result at once; None where it is to be added to others."""
        pieces = side.pieces
        if any(piece.number for piece in pieces):
            return None
        return half_of(self.target, self.form, pieces[0].half if len(pieces) == 1 else None)

    def _ends(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """(what a result is added to, where the sum goes), of a piece that is not the first of its range."""
        if self._sum is None and (piece.number > 1 or not piece.last):
            self._sum = self.rt.empty(self.target.shape, dtypes.float32)
        a = self.target if piece.number == 1 else self._sum
        out = self.target if piece.last else self._sum
        assert a is not None and out is not None
        return half_of(a, self.form, piece.half), half_of(out, self.form, piece.half)

    def _part(self, t: Tensor, side: Sides, piece: Piece, *, stats: bool = False) -> Tensor:
        """The rows of a call's result that belong to a piece."""
        whole = len(side.call.queries) != 1
        return half_of(t, self.form, piece.half, stats=stats) if whole else t

    def add(self, side: Sides, t: Tensor) -> None:
        """Add a call's result."""
        for piece in side.pieces:
            a, out = self._ends(piece)
            ops.context_sum(self.rt, a, self._part(t, side, piece), out=out)


class Outputs(Chain):
    """Partial outputs, weighted by their statistics; the sink is a term of the last sum alone."""

    __slots__ = ("sink", "softmax", "stats")

    def __init__(self, rt: Runtime, target: Tensor, core: AttentionSpec, sink: Tensor | None) -> None:
        super().__init__(rt, target, core.q_format)
        self.softmax, self.sink = core.softmax, sink
        self.stats: Tensor | None = None  # of all queries

    def join(self, side: Sides, out: Tensor, stats: Tensor) -> None:
        """Take a call's output; one that was written to its `place` stands there."""
        if self.stats is None and len(side.call.queries) != 1:
            self.stats = stats
        for piece in side.pieces:
            part = self._part(stats, side, piece, stats=True)
            if piece.number == 0:
                self._begin(piece, part)
                a, b, b_stats, into = half_of(self.target, self.form, piece.half), None, None, None
                if not piece.last or self.softmax == "vanilla":
                    continue
                into = a
            else:
                a, into = self._ends(piece)
                b, b_stats = self._part(out, side, piece), part
            assert self.stats is not None
            of_piece = half_of(self.stats, self.form, piece.half, stats=True)
            softmax, sink = (self.softmax, self.sink) if piece.last else ("vanilla", None)
            ops.attention_merge(
                self.rt, a, of_piece, b, b_stats, out=into, stats=of_piece, form=self.form, softmax=softmax, sink=sink
            )

    def _begin(self, piece: Piece, stats: Tensor) -> None:
        """The first statistics of a range."""
        if piece.half is None:
            self.stats = stats
        if self.stats is None:
            self.stats = self.rt.empty((*stats.shape[:-1], 2 * stats.shape[-1]), stats.dtype)
        place = half_of(self.stats, self.form, piece.half, stats=True)
        if place.ptr != stats.ptr:
            ops.context_sum(self.rt, stats, None, out=place)


class Logits:
    """The largest logits of each call."""

    __slots__ = ("parts", "rt")

    def __init__(self, rt: Runtime, calls: int, heads: int) -> None:
        self.rt, self.parts = rt, rt.empty((calls, heads), dtypes.float32)

    def put(self, number: int, found: Tensor) -> None:
        """Those of a call."""
        place = self.parts.rows(number, number + 1).reshape(found.shape[0])
        ops.context_sum(self.rt, found, None, out=place)

    def largest(self, heads: int, first: int) -> Tensor:
        """[heads]: of this rank's heads those over all calls; they begin with head `first`."""
        return ops.context_max(self.rt, self.parts, heads=heads, first=first)
