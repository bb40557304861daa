"""An attention over ranks: which of the modes carries it out, from this rank's q, k and v to its output, and back.

Heads are exchanged around what is attended to inside: of whole sequences if nothing else cuts them, else in a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from te_core.attention import AttentionSpec
from te_core.errors import ArgumentError
from te_core.layers.communicator import Communicator
from te_core.layers.context import gather, ring
from te_core.layers.context.calls import Problem
from te_core.layers.context.exchange import Exchange
from te_core.layers.context.products import Products, Three
from te_core.layers.context.rules import OPERATION
from te_core.layers.context.schedule import Context
from te_core.layers.context.sums import Logits
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
    parts: Three
    out: Tensor


class Place:
    """This rank among the others, for one call: what it attends with, once heads are where they belong."""

    __slots__ = ("all", "context", "core", "exchange", "inner", "outer", "rank", "rt", "terms")

    def __init__(
        self, rt: Runtime, context: Context, comm: Communicators | None, core: AttentionSpec, terms: Terms
    ) -> None:
        self.rt, self.context, self.all = rt, context, communicators(context, comm)
        self.inner = self.all[0] if context.heads > 1 else None
        self.outer = self.all[-1] if context.ring > 1 else None
        rank_inside, rank_outside = (0 if c is None else c.rank for c in (self.inner, self.outer))
        self.rank = rank_outside * context.heads + rank_inside
        self.core, self.terms = core, terms
        self.exchange: Exchange | None = None
        if self.inner is not None:
            forms = core.q_format, core.kv_format
            self.exchange = exchange = Exchange(rt, self.inner, forms, terms.lengths, context.ring)
            self.terms, self.core = exchange.terms(terms), replace(core, default_slopes=False)

    def _problem(self, parts: Three, products: Products) -> Problem:
        """This rank's calls."""
        return Problem(self.rt, self.core, (self.context, self.rank), self.terms, parts[:2], products)

    def _alone(self) -> dict[str, Any]:
        """What the one call of whole sequences computes, by this rank's own random pair."""
        terms = self.terms
        if terms.rng is not None:
            terms = terms._replace(rng=ops.context_draws(self.rt, terms.rng, (self.rank,)).reshape(2))
        return {"spec": self.core, "terms": terms}

    def attend(self, parts: Three, out: Tensor, products: Products) -> tuple[Tensor, Logits | None]:
        """(statistics, largest logits) of this rank's heads of its sequences; the output goes into `out`."""
        if self.outer is not None:
            run = gather.forward if self.context.mode == "all_gather" else ring.forward
            return run(self._problem(parts, products), *parts, self.outer, out=out)
        done = products.forward(self.rt, parts, out=out, stats=True, **self._alone())
        assert done.stats is not None
        logits = None
        if done.max_logit is not None:
            logits = Logits(self.rt, 1, parts[0].shape[-2])
            logits.put(0, done.max_logit)
        return done.stats, logits

    def differentiate(
        self, parts: Three, given: tuple[Tensor, Tensor, Tensor], grads: Three, products: Products
    ) -> Terms:
        """The gradients of q, k and v go into `grads`; those of bias and sink. `given`: dy, out, stats."""
        dy, out, stats = given
        if self.outer is None:
            return products.backward(self.rt, parts, (dy, out), stats, grads=grads, **self._alone())
        run = gather.backward if self.context.mode == "all_gather" else ring.backward
        (q, k, v), problem, sink = parts, self._problem(parts, products), self.terms.sink
        run(problem, (dy, q, out, stats), k, v, self.outer, grads=grads)
        if sink is not None:
            sink = ops.attention_sink_grad(self.rt, dy, out, stats, sink, form=self.core.q_format)
        return Terms(bias=problem.dbias, sink=sink)

    def finish(self, out: Tensor, logits: Logits | None) -> Tensor | None:
        """The largest logits [heads] of whole sequences. NaN goes into the output of sequences without chunks of one
        size: a GPU does not wait to refuse them."""
        lengths, rt = self.terms.lengths, self.rt
        if self.core.q_format == "thd" and lengths is not None:
            ops.context_mark(rt, out, lengths.cu_q_padded or lengths.cu_q, size=self.context.size)
        if logits is None:
            return None
        heads = out.shape[-2]
        first = 0 if self.inner is None else self.inner.rank * heads // self.context.heads
        found = logits.largest(heads, first)
        for comm in self.all:
            comm.all_reduce(rt, found, "max").wait()
        return found


def communicators(context: Context, comm: Communicators | None) -> tuple[Communicator, ...]:
    """The communicators of a call, whose sizes are the context's; that of one rank counts for nothing."""
    comms: tuple[Communicator, ...] = ()
    if comm is not None:
        comms = tuple(comm) if isinstance(comm, (tuple, list)) else (comm,)  # type: ignore[assignment]
    comms = tuple([c for c in comms if c.size > 1])
    sizes = [size for size in (context.heads, context.ring) if size > 1]
    if [c.size for c in comms] == sizes:
        return comms
    raise ArgumentError(
        OPERATION,
        f"communicators ({', '.join(f'one of {c.size} ranks' for c in comms) or 'none'}) with "
        f"cp_comm_type={context.mode!r}",
        f"{' and '.join(f'one of {n} ranks' for n in sizes) or 'none, or one of 1 rank'}; for a2a+p2p a list of two "
        "groups, without which every rank would attend to its own tokens",
        "pass the communicators of the groups, that of the ranks that exchange heads first",
    )


def forward(parts: Three, out: Tensor, place: Place) -> Done:
    """Attend to whole sequences with this rank's queries; their output goes into `out`. `parts`: q, k and v."""
    rt, exchange, target, products = place.rt, place.exchange, out, Products(out.dtype)
    if exchange is not None:
        q, k, v = exchange.to_heads(parts, (0, 1, 1))
        parts, target = (q, k, v), rt.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    stats, logits = place.attend(parts, target, products)
    if exchange is not None:
        exchange.to_tokens((target,), (0,), (out,))
    return Done(stats, place.finish(out, logits), parts, target)


def recomputed(parts: Three, place: Place) -> tuple[Tensor, Tensor]:
    """(output, statistics) again, of q, k and v as forward kept them: heads are exchanged already."""
    q, _, v = parts
    out = place.rt.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    return out, place.attend(parts, out, Products(q.dtype))[0]


def backward(
    parts: Three, given: tuple[Tensor, Tensor, Tensor], grads: Three, place: Place, products: Products | None = None
) -> Terms:
    """The gradients of this rank's q, k and v go into `grads`; those of bias and sink, this rank's summands.

    `parts` are q, k and v, `given` dy of this rank's tokens, and out and stats, all as forward kept them.
    """
    products = products or Products(grads[0].dtype)
    rt, exchange, made, (dy, out, stats) = place.rt, place.exchange, grads, given
    if exchange is not None:
        (dy,) = exchange.to_heads((dy,), (0,))
        q, k, v = (rt.empty(t.shape, products.dtype) for t in parts)
        made = q, k, v
    found = place.differentiate(parts, (dy, out, stats), made, products)
    if exchange is not None:
        exchange.to_tokens(made, (0, 1, 1), grads)
        if found.sink is not None:
            found = found._replace(sink=exchange.of_all_heads(found.sink, grads[0].shape[-2]))
    return found
