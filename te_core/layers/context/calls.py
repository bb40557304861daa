"""The calls of a schedule, carried out on a rank's tensors.

Chunks of dense formats are views. In packed ones a call is given whole tensors, and lengths and places by which it
finds its chunks in them; it leaves zeros elsewhere. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from te_core import dtypes
from te_core.attention import DIMENSIONS, AttentionSpec, Lengths
from te_core.dtypes import DType
from te_core.layers.context.products import Products, Three
from te_core.layers.context.schedule import Context, gradient_bytes
from te_core.layers.context.sides import Sides, band, call_spec, planned
from te_core.layers.context.sums import Chain, Logits, Outputs, half_of, like, slab
from te_core.ops import raw as ops
from te_core.ops.attention import Attended
from te_core.ops.attention_terms import Terms, stats_shape
from te_core.ops.context import Span
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: A rank makes at most this many calls beyond one for each rank.
_MOST = 4


class Problem:
    """An attention of this rank's queries, as the calls of its schedule."""

    __slots__ = (
        "_stats", "core", "dbias", "kv_lengths", "pairs", "products", "q_lengths", "rt", "schedule", "sides", "terms",
    )  # fmt: skip

    def __init__(
        self,
        rt: Runtime,
        core: AttentionSpec,
        at: tuple[Context, int],
        terms: Terms,
        tokens: tuple[Tensor, Tensor],
        products: Products,
    ) -> None:
        """`at`: the context and this rank. `tokens`: its q and k."""
        self.rt, self.core, self.terms, self.products = rt, core, terms, products
        made, self.sides = planned(*at, (core.left, core.right), core.q_format == "thd")
        self.schedule = made
        size, lengths = made.context.ring, terms.lengths
        self.q_lengths = self.kv_lengths = None
        if lengths is not None:
            forms = core.q_format, core.kv_format
            # The tokens of a chunk in dense formats; in packed ones each sequence has its own, which 0 stands for.
            sizes = [0 if f == "thd" else t.shape[DIMENSIONS[f][1]] // 2 for t, f in zip(tokens, forms, strict=True)]
            given = (lengths.cu_q, lengths.cu_q_padded), (lengths.cu_kv, lengths.cu_kv_padded)
            spans = [tuple(dict.fromkeys(s)) for s in zip(*((s.queries, s.keys) for s in self.sides), strict=True)]
            self.q_lengths, self.kv_lengths = (
                _lengths(rt, *cu, size, some, chunk) for cu, some, chunk in zip(given, spans, sizes, strict=True)
            )
        self._stats: dict[int | None, Tensor] = {}
        self.dbias: Tensor | None = None  # the gradient of a bias, in backward
        self.pairs = None
        if terms.rng is not None:  # of the whole batch one pair; each call of each rank draws by one of its own
            first = made.rank * (made.context.size + _MOST)
            numbers = tuple(first + i for i in range(len(self.sides)))
            self.pairs = ops.context_draws(rt, terms.rng, numbers)

    def of_step(self, source: int | None) -> list[Sides]:
        """The calls on the keys of one rank; None: on those of several."""
        return [side for side in self.sides if side.source == source]

    def attend_on(
        self, lane: Runtime, side: Sides, parts: Three, outputs: Outputs, logits: Logits | None = None
    ) -> Callable[[], None]:
        """Carry out a call on a stream that waits for all that this rank has begun by now.

        What is returned adds the call's output to the others, once the rank's stream has waited for the call. Until
        then it holds the memory that the call reads.
        """
        q, k, v = self.queries(parts[0], side), self.keys(parts[1], side), self.keys(parts[2], side)
        spec, terms = call_spec(self.core, side, *self._tokens(q, k)), self.of_call(side)
        place, stats = outputs.place(side), self.rt.empty(stats_shape(q, self.core.q_format), dtypes.float32)
        lane.wait(self.rt)
        done = self.products.forward(lane, (q, k, v), spec=spec, terms=terms, out=place, stats=stats)
        return partial(self._join, side, done, outputs, logits, (parts, terms))

    def _join(self, side: Sides, done: Attended, outputs: Outputs, logits: Logits | None, read: Any) -> None:
        assert done.stats is not None
        outputs.join(side, done.out, done.stats)
        if logits is not None and done.max_logit is not None:
            logits.put(side.number, done.max_logit)

    def differentiate_on(
        self,
        lane: Runtime,
        side: Sides,
        given: tuple[Tensor, Tensor, Tensor, Tensor],
        keys: tuple[Tensor, Tensor],
        queries: Chain,
        grads: tuple[Tensor, Tensor],
    ) -> Callable[[], None]:
        """Go back through a call on a stream, as in `attend_on`: what is returned has its dQ join the others, and adds
        its piece of the gradient of a bias. dK and dV are written by the call itself. `given`: dy, q, out, stats."""
        dy, q, out, stats = given
        k, v, dk, dv = (self.keys(t, side) for t in (*keys, *grads))
        dy, q, out = (self.queries(t, side) for t in (dy, q, out))
        place = queries.place(side)
        dq = like(self.rt, q, self.core.q_format, self.products.dtype) if place is None else place
        spec = call_spec(self.core, side, *self._tokens(q, k), backward=True)
        terms, own = self.of_call(side), self.stats(stats, side)
        lane.wait(self.rt)
        found = self.products.backward(lane, (q, k, v), (dy, out), own, spec=spec, terms=terms, grads=(dq, dk, dv))
        read = keys, terms, own
        return partial(self._add, side, queries, dq if place is None else None, found.bias, read)

    def _add(self, side: Sides, queries: Chain, dq: Tensor | None, bias: Tensor | None, read: Any) -> None:
        if dq is not None:
            queries.add(side, dq)
        if bias is not None:
            if self.dbias is None:
                assert self.terms.bias is not None
                self.dbias = self.rt.zeros(self.terms.bias.shape, bias.dtype)
            for part, whole in self._columns(side, bias, self.dbias):
                ops.context_sum(self.rt, part, None, out=whole)

    def order(self) -> dict[str, Any]:
        """How keys lie in the order of the sequence: packed ones by where whole sequences begin."""
        lengths, form = self.terms.lengths, self.core.kv_format
        begins = None if lengths is None or form != "thd" else lengths.cu_kv_padded or lengths.cu_kv
        return {"form": form, "size": self.schedule.context.ring, "cu_seqlens_padded": begins}

    def summed_dtype(self) -> DType:
        """Of dK and dV on their way between ranks."""
        dtype = self.products.dtype
        narrow = gradient_bytes(self.schedule.context.ring, dtype.itemsize) == dtype.itemsize
        return dtype if narrow else dtypes.float32

    def logits(self, heads: int) -> Logits | None:
        """Room for the largest logits of all calls, if they are asked for."""
        return Logits(self.rt, len(self.sides), heads) if self.core.max_logit else None

    def queries(self, t: Tensor, side: Sides) -> Tensor:
        """The rows of a call's queries, of a tensor that lies as q does."""
        return half_of(t, self.core.q_format, self._half(side))

    def stats(self, t: Tensor, side: Sides) -> Tensor:
        """The statistics of a call's queries as an attention reads them: dense. Made once for a half."""
        half = self._half(side)
        part = half_of(t, self.core.q_format, half, stats=True)
        if part.is_contiguous:
            return part
        made = self._stats.get(half)
        if made is None:
            made = self._stats[half] = self.rt.empty(part.shape, part.dtype)
            ops.context_sum(self.rt, part, None, out=made)
        return made

    def _half(self, side: Sides) -> int | None:
        return None if len(side.call.queries) != 1 else side.queries.skip

    def keys(self, t: Tensor, side: Sides) -> Tensor:
        """The rows of a call's keys: of a tensor of the source's tokens, or of one in sequence order."""
        form, call = self.core.kv_format, side.call
        if form == "thd":
            return t
        axis = DIMENSIONS[form][1]
        if side.source is not None:
            return t if len(call.keys) == 2 else half_of(t, form, 0)
        chunk = t.shape[axis] // (2 * self.schedule.context.ring)
        start, stop = band(call, chunk, t.shape[axis])
        return slab(t, axis, start, stop)

    def _tokens(self, q: Tensor, k: Tensor) -> tuple[int, int]:
        """Of a call's queries and keys, in a row."""
        return q.shape[DIMENSIONS[self.core.q_format][1]], k.shape[DIMENSIONS[self.core.kv_format][1]]

    def of_call(self, side: Sides) -> Terms:
        """The terms of a call."""
        lengths = None
        if self.q_lengths is not None and self.kv_lengths is not None:
            (cu_q, at_q), (cu_kv, at_kv) = self.q_lengths[side.queries], self.kv_lengths[side.keys]
            lengths = Lengths(cu_q, cu_kv, at_q, at_kv) if self.core.q_format == "thd" else Lengths(cu_q, cu_kv)
        bias = self._bias(side)
        rng = None if self.pairs is None else self.pairs.rows(side.number, side.number + 1).reshape(2)
        return Terms(lengths, bias=bias, rng=rng)

    def _bias(self, side: Sides) -> Tensor | None:
        """The rows and columns of a bias that a call reads, dense."""
        bias = self.terms.bias
        if bias is None:
            return None
        keys = bias.shape[3] // (2 * self.schedule.context.ring) * len(side.call.keys)
        rows = bias.shape[2] // 2 * len(side.call.queries)
        made = self.rt.empty((*bias.shape[:2], rows, keys), bias.dtype)
        for part, whole in self._columns(side, made, bias):
            ops.context_sum(self.rt, whole, None, out=part)
        return made

    def _columns(self, side: Sides, part: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The chunks of keys in a call's bias beside those of the whole one, which has all keys in sequence order."""
        half = self._half(side)
        if half is not None:
            rows = whole.shape[2] // 2
            whole = slab(whole, 2, half * rows, (half + 1) * rows)
        chunk = part.shape[3] // len(side.call.keys)
        for i, key in enumerate(side.call.keys):
            yield slab(part, 3, i * chunk, (i + 1) * chunk), slab(whole, 3, key * chunk, (key + 1) * chunk)


def _lengths(
    rt: Runtime, cu: Tensor, cu_padded: Tensor | None, size: int, spans: tuple[Span, ...], chunk: int
) -> dict[Span, tuple[Tensor, Tensor]]:
    """Of each span the running sums of its lengths, and where it lies, in one launch."""
    found = ops.context_lengths(rt, cu, cu_padded, size=size, spans=spans, chunk=chunk)
    rows = [found.rows(i, i + 1).reshape(found.shape[1]) for i in range(2 * len(spans))]
    return {span: (rows[2 * i], rows[2 * i + 1]) for i, span in enumerate(spans)}
