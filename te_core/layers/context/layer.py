"""An attention over ranks: which of the modes carries it out, from this rank's q, k and v to its output, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from te_core.attention import AttentionSpec
from te_core.errors import ArgumentError
from te_core.layers.communicator import Communicator
from te_core.layers.context import gather, ring
from te_core.layers.context.calls import Logits, Problem
from te_core.layers.context.exchange import Exchange
from te_core.layers.context.schedule import Context, schedule
from te_core.ops import raw as ops
from te_core.ops.attention_terms import Terms
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: One communicator, or of a2a+p2p two: of the ranks that exchange heads, and of the ring.
Communicators = Communicator | Sequence[Communicator]


class Done(NamedTuple):
    """The results of a forward on this rank; and q, k, v and the output as backward reads them."""

    stats: Tensor
    max_logit: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


class Grads(NamedTuple):
    """The results of a backward besides the gradients of q, k and v."""

    sink: Tensor | None


class _Place:
    """This rank among the others, for one call."""

    __slots__ = ("all", "context", "inner", "outer", "rank")

    def __init__(self, context: Context, comm: Communicators | None) -> None:
        comms: tuple[Communicator, ...] = ()
        if comm is not None:
            comms = tuple(comm) if isinstance(comm, (tuple, list)) else (comm,)  # type: ignore[assignment]
        comms = tuple([c for c in comms if c.size > 1])
        sizes = [size for size in (context.heads, context.ring) if size > 1]
        if [c.size for c in comms] != sizes:
            got = ", ".join(f"one of {c.size} ranks" for c in comms) or "none"
            wanted = " and ".join(f"one of {n} ranks" for n in sizes) or "none, or one of 1 rank"
            raise ArgumentError(
                "context parallelism",
                f"communicators ({got}) with cp_comm_type={context.mode!r}",
                f"{wanted}; for a2a+p2p a list of two groups, without which every rank would attend to its own tokens",
                "pass the communicators of the groups, that of the ranks that exchange heads first",
            )
        self.context, self.all = context, comms
        self.inner = comms[0] if context.heads > 1 else None
        self.outer = comms[-1] if context.ring > 1 else None
        rank_inside, rank_outside = (0 if c is None else c.rank for c in (self.inner, self.outer))
        self.rank = rank_outside * context.heads + rank_inside

    def exchange(self, rt: Runtime, core: AttentionSpec, terms: Terms) -> Exchange | None:
        """How heads go to ranks, if they do."""
        if self.inner is None:
            return None
        return Exchange(rt, self.inner, (core.q_format, core.kv_format), terms.lengths, self.context.ring)

    def problem(self, rt: Runtime, core: AttentionSpec, terms: Terms, q: Tensor, k: Tensor) -> Problem:
        """This rank's calls."""
        return Problem(rt, core, schedule(self.context, self.rank, _plain(core)), terms, q, k)


def _plain(core: AttentionSpec) -> AttentionSpec:
    """What a schedule depends on."""
    return AttentionSpec(1.0, left=core.left, right=core.right)


def communicators(context: Context, comm: Communicators | None) -> tuple[Communicator, ...]:
    """The communicators of a call, whose sizes are the context's."""
    return _Place(context, comm).all


def forward(
    rt: Runtime,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    *,
    core: AttentionSpec,
    context: Context,
    comm: Communicators | None,
    out: Tensor,
) -> Done:
    """Attend to whole sequences with this rank's queries; their output goes into `out`."""
    place = _Place(context, comm)
    heads, exchange = q.shape[-2], place.exchange(rt, core, terms)
    target = out
    if exchange is not None:
        q, k, v = exchange.to_heads((q, k, v), (0, 1, 1))
        terms, core = exchange.terms(terms), replace(core, default_slopes=False)
        target = rt.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    stats, logits = _inside(rt, place, q, k, v, terms, core, target)
    if exchange is not None:
        exchange.to_tokens((target,), (0,), (out,))
    _mark(rt, place, core, terms, out)
    return Done(stats, _largest(rt, place, logits, heads), q, k, v, target)


def _inside(
    rt: Runtime, place: _Place, q: Tensor, k: Tensor, v: Tensor, terms: Terms, core: AttentionSpec, out: Tensor
) -> tuple[Tensor, Logits | None]:
    """(statistics, largest logits) of what this rank attends to once heads are where they belong."""
    if place.outer is None:
        done = ops.attention_forward(rt, q, k, v, spec=core, terms=_drawn(rt, place, terms), out=out)
        assert done.stats is not None
        if done.max_logit is None:
            return done.stats, None
        logits = Logits(rt, 1, q.shape[-2])
        logits.put(0, done.max_logit)
        return done.stats, logits
    problem = place.problem(rt, core, terms, q, k)
    run = gather.forward if place.context.mode == "all_gather" else ring.forward
    return run(problem, q, k, v, place.outer, out=out)


def recomputed(
    rt: Runtime,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    *,
    core: AttentionSpec,
    context: Context,
    comm: Communicators | None,
) -> tuple[Tensor, Tensor]:
    """(output, statistics) again, of q, k and v as forward kept them: heads are exchanged already."""
    place = _Place(context, comm)
    exchange = place.exchange(rt, core, terms)
    if exchange is not None:
        terms, core = exchange.terms(terms), replace(core, default_slopes=False)
    out = rt.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    stats, _ = _inside(rt, place, q, k, v, terms, core, out)
    return out, stats


def backward(
    rt: Runtime,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    terms: Terms,
    *,
    core: AttentionSpec,
    context: Context,
    comm: Communicators | None,
    grads: tuple[Tensor, Tensor, Tensor],
) -> Tensor | None:
    """The gradients of this rank's q, k and v, into `grads`; that of the sink, this rank's summand."""
    place = _Place(context, comm)
    heads, exchange = grads[0].shape[-2], place.exchange(rt, core, terms)
    made = grads
    if exchange is not None:
        (dy,) = exchange.to_heads((dy,), (0,))
        terms, core = exchange.terms(terms), replace(core, default_slopes=False)
        made = rt.empty(q.shape, q.dtype), rt.empty(k.shape, k.dtype), rt.empty(v.shape, v.dtype)
    if place.outer is None:
        terms = _drawn(rt, place, terms)
        dsink = ops.attention_backward(rt, dy, q, k, v, out, stats, spec=core, terms=terms, grads=made).sink
    else:
        problem = place.problem(rt, core, terms, q, k)
        run = gather.backward if context.mode == "all_gather" else ring.backward
        run(problem, (dy, q, out, stats), k, v, place.outer, grads=made)
        dsink = None
        if terms.sink is not None:
            dsink = ops.attention_sink_grad(rt, dy, out, stats, terms.sink, form=core.q_format)
    if exchange is not None:
        exchange.to_tokens(made, (0, 1, 1), grads)
        dsink = None if dsink is None else exchange.of_all_heads(dsink, heads)
    return dsink


def _drawn(rt: Runtime, place: _Place, terms: Terms) -> Terms:
    """The terms with this rank's own random pair."""
    if terms.rng is None:
        return terms
    return terms._replace(rng=ops.context_draws(rt, terms.rng, (place.rank,)).reshape(2))


def _mark(rt: Runtime, place: _Place, core: AttentionSpec, terms: Terms, out: Tensor) -> None:
    """NaN where a padded length has no chunks of one size: a GPU does not wait to refuse it."""
    if core.q_format == "thd" and terms.lengths is not None:
        begins = terms.lengths.cu_q_padded or terms.lengths.cu_q
        ops.context_mark(rt, out, begins, size=place.context.size)


def _largest(rt: Runtime, place: _Place, logits: Logits | None, heads: int) -> Tensor | None:
    """The largest logits [heads] of whole sequences."""
    if logits is None:
        return None
    first = 0 if place.inner is None else place.inner.rank * heads // place.context.heads
    found = logits.largest(heads, first)
    for comm in place.all:
        comm.all_reduce(rt, found, "max").wait()
    return found
