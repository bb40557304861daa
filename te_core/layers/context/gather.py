"""all_gather: all keys and values come at once, while a rank attends to its own tokens.

They are put into the order of the sequence, so that what a rank sees besides lies in one piece or two (not causal: in
three), and no call needs a diagonal that ends bottom-right. Backward gathers again; each rank's summands of all
gradients go back by one reduce-scatter. With a window each chunk of queries has one call, on a band of keys that
begins where its window does; what two bands share is added in float32.
"""

from __future__ import annotations

from te_core import dtypes
from te_core.layers.communicator import Communicator
from te_core.layers.context.calls import Problem
from te_core.layers.context.sums import Chain, Logits, Outputs
from te_core.layers.context.traffic import apart, packed, ranked
from te_core.ops import raw as ops
from te_core.runtime import Runtime
from te_core.tensor import Tensor


class _Gathered:
    """Keys and values of all ranks, on their way."""

    def __init__(self, problem: Problem, k: Tensor, v: Tensor, comm: Communicator) -> None:
        rt = self.rt = problem.rt
        self.problem, self.like = problem, (k, v)
        self.part = packed(rt, k, v, problem.core.kv_format)
        self.whole = rt.empty((comm.size * self.part.shape[0],), k.dtype)
        self.handle = comm.all_gather(rt, self.part, self.whole)

    def wait(self) -> tuple[Tensor, Tensor]:
        """They are there: in the order of the sequence."""
        self.handle.wait()
        order = self.problem.order()
        parts = ranked(self.whole, order["size"], [t.shape for t in self.like])
        k, v = (ops.context_rows(self.rt, t, how="ranks_to_sequence", **order) for t in parts)
        return k, v


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, comm: Communicator, *, out: Tensor
) -> tuple[Tensor, Logits | None]:
    """(statistics, largest logits) of the output, which goes into `out`."""
    outputs, logits = Outputs(problem.rt, out, problem.core, problem.terms.sink), problem.logits(q.shape[-2])
    own, others = problem.schedule.steps
    coming = _Gathered(problem, k, v, comm)
    for side in problem.of_step(own.source):
        problem.attend_on(problem.rt, side, (q, k, v), outputs, logits)()
    keys, values = coming.wait()
    del coming
    for side in problem.of_step(others.source):
        problem.attend_on(problem.rt, side, (q, keys, values), outputs, logits)()
    assert outputs.stats is not None
    return outputs.stats, logits


def backward(
    problem: Problem,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    comm: Communicator,
    *,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """The gradients of this rank's q, k and v, into `grads`. `given`: dy, q, out, stats."""
    rt, order = problem.rt, problem.order()
    size, (dq, dk, dv) = order["size"], grads
    own, others = problem.schedule.steps
    queries = Chain(rt, dq, problem.core.q_format)
    coming = _Gathered(problem, k, v, comm)
    for side in problem.of_step(own.source):
        problem.differentiate_on(rt, side, given, (k, v), queries, (dk, dv))()
    keys = coming.wait()
    del coming
    kind = problem.summed_dtype()
    totals = _totals(problem, given, keys, queries)
    sent = rt.empty((size * (k.size + v.size),), kind)
    for t, place in zip(totals, ranked(sent, size, [k.shape, v.shape]), strict=True):
        ops.context_rows(rt, _as(rt, t, kind), how="sequence_to_ranks", out=place, **order)
    del totals, keys
    home = rt.empty((k.size + v.size,), kind)
    comm.reduce_scatter(rt, sent, home).wait()
    for target, part in zip((dk, dv), apart(home, k, v), strict=True):
        ops.context_sum(rt, part, target if own.calls else None, out=target)


def _totals(
    problem: Problem, given: tuple[Tensor, Tensor, Tensor, Tensor], keys: tuple[Tensor, Tensor], queries: Chain
) -> list[Tensor]:
    """This rank's summands of the gradients of all keys and values, in the order of the sequence."""
    rt, calls, dtype = problem.rt, problem.of_step(None), problem.products.dtype
    together = problem.core.kv_format == "thd" or any(side.call.mask == "band" for side in calls)
    if not together:  # each key is in one call: it writes where the gradients stand
        totals = [rt.zeros(t.shape, dtype) for t in keys]
        for side in calls:
            problem.differentiate_on(rt, side, given, keys, queries, (totals[0], totals[1]))()
        return totals
    totals = [rt.zeros(t.shape, dtypes.float32) for t in keys]
    for side in calls:
        parts = [rt.empty(t.shape, dtype) for t in keys]
        problem.differentiate_on(rt, side, given, keys, queries, (parts[0], parts[1]))()
        for total, part in zip(totals, parts, strict=True):
            target = problem.keys(total, side)
            ops.context_sum(rt, target, problem.keys(part, side), out=target)
    return totals


def _as(rt: Runtime, t: Tensor, kind: dtypes.DType) -> Tensor:
    """The values in another type."""
    if t.dtype is kind:
        return t
    made = rt.empty(t.shape, kind)
    ops.context_sum(rt, t, None, out=made)
    return made
