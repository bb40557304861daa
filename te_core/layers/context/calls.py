"""The calls of a schedule on a rank's tensors: views of chunks, lengths of parts of sequences, and sums of results.

Chunks of dense formats are views. In packed ones a call is given whole tensors, and lengths and places by which it
finds its chunks in them; it leaves zeros elsewhere. Nothing is copied.

A result of several calls (the output, dQ) adds up in float32 and is rounded once, by a `Chain`: the first call writes
where the result will stand, later ones are added, the last sum is rounded into its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from te_core import dtypes
from te_core.attention import DIMENSIONS, AttentionSpec, Lengths, Sizes
from te_core.dtypes import DType
from te_core.layers.context.products import Products
from te_core.layers.context.schedule import Call, Context, Schedule, Step, chunks_of, schedule
from te_core.ops import raw as ops
from te_core.ops.attention_terms import Terms
from te_core.ops.context import Span
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: More calls than ranks no rank has, unless it is these.
_MOST = 4


class Piece(NamedTuple):
    """A range of a rank's queries, as one of the calls that add up to its result."""

    half: int | None  # 0 or 1; None: both, or packed tensors as they are
    number: int  # of the call in this range, from 0
    last: bool


class Sides(NamedTuple):
    """What a call attends with: spans of its queries and keys where lengths matter, and its place in the sums."""

    call: Call
    source: int | None
    number: int  # among the rank's calls
    queries: Span
    keys: Span
    pieces: tuple[Piece, ...]


@lru_cache(maxsize=1024)
def planned(context: Context, rank: int, bounds: tuple[int, int], packed: bool) -> tuple[Schedule, tuple[Sides, ...]]:
    """(the schedule of a rank, what its calls attend with). `bounds`: of the band, left and right."""
    made = schedule(context, rank, AttentionSpec(1.0, left=bounds[0], right=bounds[1]))
    return made, sides(made, packed)


def sides(made: Schedule, packed: bool) -> tuple[Sides, ...]:
    """All calls of a schedule, in order."""
    size, rank = made.context.ring, made.rank // made.context.heads
    own = chunks_of(size, rank)
    listed = [(step, call) for step in made.steps for call in step.calls]
    pieces = _pieces([call for _, call in listed], own, packed)
    return tuple(
        Sides(
            call,
            step.source,
            number,
            Span(_ranges(call.queries), size, own.index(call.queries[0])),
            _keys(step, call, size),
            pieces[number],
        )
        for number, (step, call) in enumerate(listed)
    )


def _ranges(chunks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Chunks that follow one another, as ranges."""
    found: list[tuple[int, int]] = []
    for chunk in chunks:
        if found and found[-1][1] == chunk:
            found[-1] = found[-1][0], chunk + 1
        else:
            found.append((chunk, chunk + 1))
    return tuple(found)


def _keys(step: Step, call: Call, size: int) -> Span:
    if step.source is not None:
        return Span(_ranges(call.keys), size, 0)
    return Span(_ranges(call.keys), 1, call.keys[0], max(call.before, 0))


def _pieces(calls: Sequence[Call], own: tuple[int, int], packed: bool) -> list[tuple[Piece, ...]]:
    """For each call the ranges that its result goes to. Both halves are one range while they stand alike."""
    if packed:
        return [(Piece(None, i, i == len(calls) - 1),) for i in range(len(calls))]
    total = [sum(chunk in call.queries for call in calls) for chunk in own]
    done, found = [0, 0], []
    for call in calls:
        halves = [half for half in (0, 1) if own[half] in call.queries]
        made = [Piece(half, done[half], done[half] == total[half] - 1) for half in halves]
        if len(made) == 2 and _alike(*made):
            made = [made[0]._replace(half=None)]
        for half in halves:
            done[half] += 1
        found.append(tuple(made))
    return found


def _alike(a: Piece, b: Piece) -> bool:
    return min(a.number, 2) == min(b.number, 2) and a.last == b.last


# ---------------------------------------------------------------------------------------------- views


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


# ---------------------------------------------------------------------------------------------- a rank's problem


class Problem:
    """An attention of this rank's queries, as the calls of its schedule."""

    __slots__ = (
        "_stats",
        "core",
        "dbias",
        "kv_lengths",
        "pairs",
        "products",
        "q_lengths",
        "rt",
        "schedule",
        "sides",
        "terms",
    )

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
            sizes = [_chunk(t, form) for t, form in zip(tokens, forms, strict=True)]
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

    def attend(
        self, side: Sides, q: Tensor, k: Tensor, v: Tensor, outputs: Outputs, logits: Logits | None = None
    ) -> None:
        """Carry out a call: its output joins the others."""
        q, k, v = self.queries(q, side), self.keys(k, side), self.keys(v, side)
        spec, terms = call_spec(self.core, side, *self._tokens(q, k)), self.of_call(side)
        done = self.products.forward(q, k, v, spec=spec, terms=terms, out=outputs.place(side))
        assert done.stats is not None
        outputs.join(side, done.out, done.stats)
        if logits is not None and done.max_logit is not None:
            logits.put(side.number, done.max_logit)

    def differentiate(
        self,
        side: Sides,
        given: tuple[Tensor, Tensor, Tensor, Tensor],
        keys: tuple[Tensor, Tensor],
        queries: Chain,
        grads: tuple[Tensor, Tensor],
    ) -> None:
        """Go back through a call: its dQ joins the others; its dK and dV, and its piece of the gradient of a bias, are
        written. `given`: dy, q, out, stats."""
        dy, q, out, stats = given
        k, v, dk, dv = (self.keys(t, side) for t in (*keys, *grads))
        dy, q, out = (self.queries(t, side) for t in (dy, q, out))
        place = queries.place(side)
        dq = like(self.rt, q, self.core.q_format, self.products.dtype) if place is None else place
        spec = call_spec(self.core, side, *self._tokens(q, k), backward=True)
        terms, own = self.of_call(side), self.stats(stats, side)
        found = self.products.backward((q, k, v), (dy, out), own, spec=spec, terms=terms, grads=(dq, dk, dv))
        if place is None:
            queries.add(side, dq)
        if found.bias is not None:
            if self.dbias is None:
                assert self.terms.bias is not None
                self.dbias = self.rt.zeros(self.terms.bias.shape, found.bias.dtype)
            for part, whole in self._columns(side, found.bias, self.dbias):
                ops.context_sum(self.rt, part, None, out=whole)

    def begins(self) -> Tensor | None:
        """Where whole sequences of packed keys begin; None in dense formats."""
        lengths = self.terms.lengths
        if lengths is None or self.core.kv_format != "thd":
            return None
        return lengths.cu_kv if lengths.cu_kv_padded is None else lengths.cu_kv_padded

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
        start, stop = _band(call, chunk, t.shape[axis])
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


def call_spec(core: AttentionSpec, side: Sides, queries: int, keys: int, *, backward: bool = False) -> AttentionSpec:
    """What a call computes, of tensors with so many tokens in a row (thd: in all)."""
    call, packed = side.call, core.q_format == "thd"
    longest = core.max_q, core.max_kv
    if packed:  # a chunk has no more than half of a rank's tokens
        halves = len(call.queries) == 1, side.source is not None and len(call.keys) == 1
        longest = _bound(core.max_q, queries, halves[0]), _bound(core.max_kv, keys, halves[1])
    bounds = -1, 0 if call.mask == "causal" else -1
    if call.mask == "band":
        bounds = call.before, call.behind
        if not packed:  # by a band that begins top-left, which cuDNN has with all else
            shift = call.keys[0] * queries - _band(call, queries, 0)[0]
            bounds = (bounds[0] - shift if bounds[0] >= 0 else -1), (bounds[1] + shift if bounds[1] >= 0 else -1)
    return _spec(core, bounds, call.mask == "band" and packed, longest, backward)


def attentions(core: AttentionSpec, context: Context, size: Sizes) -> list[tuple[AttentionSpec, Sizes]]:
    """All that the ranks compute forward, each kind once: what a backend has to be able to do.

    `size`: of a rank's tensors; in thd their tokens stand for its queries and keys.
    """
    parts, packed = context.heads, core.q_format == "thd"
    size = size._replace(
        sq=size.sq * parts, skv=size.skv * parts, heads=size.heads // parts, groups=max(1, size.groups // parts)
    )
    if parts > 1:
        core = replace(core, default_slopes=False)
    if context.ring == 1:
        return [(core, size._replace(sq=core.max_q, skv=core.max_kv) if packed else size)]
    found: dict[tuple[AttentionSpec, Sizes], None] = {}
    for rank in range(0, context.size, parts):
        for side in planned(context, rank, (core.left, core.right), packed)[1]:
            queries, keys = _call_tokens(side, context, size, packed)
            spec = call_spec(core, side, queries, keys)
            found[spec, size._replace(sq=spec.max_q or queries, skv=spec.max_kv or keys)] = None
    return [*found]


def _call_tokens(side: Sides, context: Context, size: Sizes, packed: bool) -> tuple[int, int]:
    """The tokens of a call's queries and keys in a row, of a rank with so many."""
    call, gathered = side.call, side.source is None
    if packed:
        return size.sq, size.skv * (context.ring if gathered else 1)
    if gathered:
        start, stop = _band(call, size.skv // 2, size.skv * context.ring)
        return size.sq // 2 * len(call.queries), stop - start
    return size.sq // 2 * len(call.queries), size.skv // 2 * len(call.keys)


def _spec(
    core: AttentionSpec, bounds: tuple[int, int], bottom_right: bool, longest: tuple[int, int], backward: bool
) -> AttentionSpec:
    return replace(
        core,
        left=bounds[0],
        right=bounds[1],
        bottom_right=bottom_right,
        softmax="vanilla",
        max_logit=core.max_logit and not backward,
        partial=backward,
        max_q=longest[0],
        max_kv=longest[1],
    )


def _bound(longest: int, tokens: int, half: bool) -> int:
    """How long the parts of packed sequences are at most. A padded one may be longer than the longest real one."""
    return max(1, min(longest, tokens // 2 if half else tokens))


def _band(call: Call, chunk: int, total: int) -> tuple[int, int]:
    """The first key of a call in sequence order, and the one behind its last."""
    start, stop = call.keys[0] * chunk, (call.keys[-1] + 1) * chunk
    if call.mask == "band":
        start = max(0, start - call.before) if call.before >= 0 else 0
        stop = min(total, stop + call.behind) if call.behind >= 0 else total
    return start, stop


def _chunk(t: Tensor, form: str) -> int:
    """The tokens of a chunk in dense formats; in packed ones each sequence has its own, which 0 stands for."""
    return 0 if form == "thd" else t.shape[DIMENSIONS[form][1]] // 2


def _lengths(
    rt: Runtime, cu: Tensor, cu_padded: Tensor | None, size: int, spans: tuple[Span, ...], chunk: int
) -> dict[Span, tuple[Tensor, Tensor]]:
    """Of each span the running sums of its lengths, and where it lies, in one launch."""
    found = ops.context_lengths(rt, cu, cu_padded, size=size, spans=spans, chunk=chunk)
    rows = [found.rows(i, i + 1).reshape(found.shape[1]) for i in range(2 * len(spans))]
    return {span: (rows[2 * i], rows[2 * i + 1]) for i, span in enumerate(spans)}
