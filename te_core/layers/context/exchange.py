"""a2a: heads go to ranks. One exchange gives each rank whole sequences of some heads, one brings the output back.

q, k and v travel in one piece, of each rank its heads of all three, and so do their gradients. Where there are more
ranks than groups, a group's k and v go to several of them, whose gradients are added, in float32, on the way back.
Inside of a ring (a2a+p2p) the sequences are whole among the ranks of the group alone: its part of them, which goes
round then.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from te_core import dtypes
from te_core.attention import DIMENSIONS, Lengths
from te_core.layers.communicator import Communicator
from te_core.layers.context.sums import slab
from te_core.layers.context.traffic import piece, ranked
from te_core.ops import raw as ops
from te_core.ops.attention_terms import Terms
from te_core.runtime import Runtime
from te_core.tensor import Tensor


class Exchange:
    """The ranks among which heads go to ranks, and how their tokens lie."""

    __slots__ = ("begins", "comm", "forms", "parts", "rt")

    def __init__(
        self, rt: Runtime, comm: Communicator, forms: tuple[str, str], lengths: Lengths | None, parts: int
    ) -> None:
        """`forms`: of q, and of k and v. `parts`: how many groups share a sequence."""
        self.rt, self.comm, self.forms, self.parts = rt, comm, forms, parts
        self.begins: tuple[Tensor | None, Tensor | None] = (None, None)
        if lengths is not None:
            q, kv = lengths.cu_q_padded or lengths.cu_q, lengths.cu_kv_padded or lengths.cu_kv
            self.begins = (q if forms[0] == "thd" else None), (kv if forms[1] == "thd" else None)

    def to_heads(
        self, tensors: Sequence[Tensor], sides: Sequence[int], outs: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """This rank's heads of all ranks' tokens, in sequence order, in `outs` if they are given. `sides`: 0 as q
        lies, 1 as k."""
        size = self.comm.size
        shapes = [self._shape(t, side) for t, side in zip(tensors, sides, strict=True)]
        sent = self._block(shapes, tensors[0])
        for t, side, place in zip(tensors, sides, ranked(sent, size, shapes), strict=True):
            ops.context_rows(self.rt, t, how="heads_to_ranks", form=self.forms[side], size=size, out=place)
        arrived = ranked(self._exchanged(sent), size, shapes)
        into: Sequence[Tensor | None] = outs or [None] * len(shapes)
        return [
            ops.context_rows(self.rt, t, how="ranks_to_sequence", out=out, **self._order(side))
            for t, side, out in zip(arrived, sides, into, strict=True)
        ]

    def to_tokens(self, tensors: Sequence[Tensor], sides: Sequence[int], targets: Sequence[Tensor]) -> None:
        """The inverse: all heads of this rank's tokens, into `targets`."""
        size = self.comm.size
        shapes = [self._shape(t, side) for t, side in zip(targets, sides, strict=True)]
        sent = self._block(shapes, tensors[0])
        for t, side, place in zip(tensors, sides, ranked(sent, size, shapes), strict=True):
            ops.context_rows(self.rt, t, how="sequence_to_ranks", out=place, **self._order(side))
        arrived = ranked(self._exchanged(sent), size, shapes)
        for t, side, target in zip(arrived, sides, targets, strict=True):
            several = size // target.shape[-2]
            if several < 2:
                ops.context_rows(self.rt, t, how="ranks_to_heads", form=self.forms[side], size=size, out=target)
            else:
                made = ops.context_rows(self.rt, t, how="ranks_to_heads", form=self.forms[side], size=size)
                self._add(made, several, target)

    def _add(self, t: Tensor, several: int, out: Tensor) -> None:
        """The sum of `several` heads that stand side by side, rounded once."""
        rt, steps = self.rt, t.row_major_strides()
        strides = (*steps[:-2], several * steps[-2], 1)
        parts = [
            Tensor(t.ptr + t.dtype.nbytes(i * steps[-2]), out.shape, t.dtype, t.device, t, strides)
            for i in range(several)
        ]
        total = parts[0]
        for i, part in enumerate(parts[1:], 2):
            into = out if i == several else rt.empty(out.shape, dtypes.float32) if i == 2 else total
            ops.context_sum(rt, total, part, out=into)
            total = into

    def heads(self, t: Tensor, dim: int) -> Tensor:
        """This rank's of a number for each head, at an address that every library takes."""
        count = t.shape[dim] // self.comm.size
        first = count * self.comm.rank
        part = slab(t, dim, first, first + count)
        made = self.rt.empty(part.shape, part.dtype)
        ops.context_sum(self.rt, part, None, out=made)
        return made

    def terms(self, terms: Terms) -> Terms:
        """Of terms that heads have, those of this rank's heads."""
        sink = None if terms.sink is None else self.heads(terms.sink, 0)
        slopes = None if terms.slopes is None else self.heads(terms.slopes, terms.slopes.ndim - 1)
        return terms._replace(sink=sink, slopes=slopes)

    def of_all_heads(self, t: Tensor, heads: int) -> Tensor:
        """A number for each of this rank's heads among those of all: zeros for the others."""
        made = self.rt.zeros((heads,), t.dtype)
        first = self.comm.rank * t.shape[0]
        ops.context_sum(self.rt, t, None, out=piece(made, first, t.shape))
        return made

    def whole_shape(self, t: Tensor, side: int) -> tuple[int, ...]:
        """Of a rank's tensor with all heads, the shape of what it attends with."""
        token, shape = DIMENSIONS[self.forms[side]][1], self._shape(t, side)
        return tuple([n * self.comm.size if i == token else n for i, n in enumerate(shape)])

    def _shape(self, t: Tensor, side: int) -> tuple[int, ...]:
        """Of a tensor with all heads, the shape of what each rank gets."""
        return (*t.shape[:-2], max(1, t.shape[-2] // self.comm.size), t.shape[-1])

    def _order(self, side: int) -> dict[str, Any]:
        packed = {"cu_seqlens_padded": self.begins[side], "parts": self.parts} if self.begins[side] is not None else {}
        return {"form": self.forms[side], "size": self.comm.size, **packed}

    def _block(self, shapes: Sequence[tuple[int, ...]], like: Tensor) -> Tensor:
        return self.rt.empty((self.comm.size * sum(map(prod, shapes)),), like.dtype)

    def _exchanged(self, sent: Tensor) -> Tensor:
        arrived = self.rt.empty(sent.shape, sent.dtype)
        self.comm.all_to_all(self.rt, sent, arrived).wait()
        return arrived
