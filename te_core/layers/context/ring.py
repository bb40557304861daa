"""p2p: keys and values go round a ring of ranks, and what they meet there is put together.

In step i a rank has the keys of rank r - i. They leave for rank r + 1 before their attention begins, so that the next
step finds its keys there. Backward runs the ring again, with the final output and its statistics. dK|dV follow their
keys: the rank that has met keys hands on what it has added to their gradients; behind the last step they come home,
where the summand of step 0 has waited. Nothing of other ranks is kept between the passes.

At the peak there are two foreign K|V (and two dK|dV), one partial result, and its float32 sum.
"""

from __future__ import annotations

from te_core import dtypes
from te_core.layers.communicator import Communicator, Handle
from te_core.layers.context.calls import Problem
from te_core.layers.context.schedule import gradient_bytes
from te_core.layers.context.sides import Sides
from te_core.layers.context.sums import Chain, Logits, Outputs, half_of
from te_core.layers.context.traffic import apart, packed
from te_core.ops import raw as ops
from te_core.runtime import Runtime
from te_core.tensor import Tensor


class Passing:
    """A block on its way to the next rank, while another one comes from the rank before. It holds both until then."""

    __slots__ = ("block", "coming", "handle")

    def __init__(self, rt: Runtime, comm: Communicator, block: Tensor) -> None:
        rank, size = comm.rank, comm.size
        self.block: Tensor | None = block
        self.coming = rt.empty(block.shape, block.dtype)
        self.handle: Handle = comm.send_recv(rt, block, (rank + 1) % size, self.coming, (rank - 1) % size)

    def wait(self) -> Tensor:
        """What has come; what left is let go of."""
        self.handle.wait()
        self.block = None
        return self.coming


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, comm: Communicator, *, out: Tensor
) -> tuple[Tensor, Logits | None]:
    """(statistics, largest logits) of the output, which goes into `out`."""
    rt, steps = problem.rt, problem.schedule.steps
    outputs, logits = Outputs(rt, out, problem.core, problem.terms.sink), problem.logits(q.shape[-2])
    block = packed(rt, k, v, problem.core.kv_format)
    keys, values = k, v
    for number, step in enumerate(steps):
        coming = Passing(rt, comm, block) if number + 1 < len(steps) else None
        for side in problem.of_step(step.source):
            problem.attend(side, q, keys, values, outputs, logits)
        if coming is not None:
            block = coming.wait()
            keys, values = apart(block, k, v)
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
    rt, steps = problem.rt, problem.schedule.steps
    dq, dk, dv = grads
    queries = Chain(rt, dq, problem.core.q_format)
    block = packed(rt, k, v, problem.core.kv_format)
    coming = Passing(rt, comm, block) if len(steps) > 1 else None
    del block
    for side in problem.of_step(steps[0].source):
        problem.differentiate(side, given, (k, v), queries, (dk, dv))
    home: Passing | None = None  # gradients of the keys at hand, from the rank that had them before
    for number, step in enumerate(steps[1:], 1):
        assert coming is not None
        keys = apart(coming.wait(), k, v)
        coming = Passing(rt, comm, coming.coming) if number + 1 < len(steps) else None
        (side,) = problem.of_step(step.source)
        home = Passing(rt, comm, _gradients(problem, side, given, keys, queries, home))
    if home is not None:
        for target, part in zip((dk, dv), apart(home.wait(), k, v), strict=True):
            ops.context_sum(rt, target, part, out=target)


def _gradients(
    problem: Problem,
    side: Sides,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    queries: Chain,
    home: Passing | None,
) -> Tensor:
    """dK|dV of the keys at hand, as they go on: those that come behind the keys, and this rank's summand."""
    rt, core, size = problem.rt, problem.core, problem.schedule.context.ring
    k, v = keys
    dtype = problem.products.dtype
    kind = dtype if gradient_bytes(size, dtype.itemsize) == dtype.itemsize else dtypes.float32
    some = core.kv_format != "thd" and len(side.call.keys) == 1  # rows of the first chunk alone
    alone = home is None and kind is dtype
    total = rt.zeros((k.size + v.size,), kind) if some and home is None else None
    if alone:  # two ranks: the summand is all
        total = total or rt.empty((k.size + v.size,), kind)
        dk, dv = apart(total, k, v)
        problem.differentiate(side, given, keys, queries, (dk, dv))
        return total
    part = rt.empty((k.size + v.size,), dtype)
    problem.differentiate(side, given, keys, queries, apart(part, k, v))
    if home is not None:
        total = home.wait()
    if not some:
        made = total or rt.empty(part.shape, kind)
        ops.context_sum(rt, part, total, out=made)
        return made
    assert total is not None
    for theirs, ours in zip(apart(total, k, v), apart(part, k, v), strict=True):
        target, summand = (half_of(t, core.kv_format, 0) for t in (theirs, ours))
        ops.context_sum(rt, target, summand, out=target)
    return total
