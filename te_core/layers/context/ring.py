"""p2p: keys and values go round a ring of ranks, and what they meet there is put together.

In step i a rank has the keys of rank r - i. They leave for rank r + 1 before their attention begins, so that the next
step finds its keys there. Backward runs the ring again, with the final output and its statistics. dK|dV follow their
keys: the rank that has met keys hands on what it has added to their gradients; behind the last step they come home,
where the summand of step 0 has waited. Nothing of other ranks is kept between the passes.

Where two streams win time, neighbouring steps have them by turns (`Turns`). Transfers and sums stay on the rank's own
stream, in the order of the schedule.

At the peak there are two foreign K|V (and two dK|dV), one partial result (on two streams: two), and its float32 sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from te_core.layers.communicator import Communicator, Handle
from te_core.layers.context.calls import Problem
from te_core.layers.context.sides import Sides
from te_core.layers.context.sums import Chain, Logits, Outputs, half_of
from te_core.layers.context.traffic import apart, packed
from te_core.ops import raw as ops
from te_core.runtime import Runtime
from te_core.tensor import Tensor


def two_streams(ring: int, rows: int) -> bool:
    """Whether neighbouring steps have two streams: by the ranks of the ring, and a rank's queries (tokens times heads).

    Measured with 32 heads: from 8,192 tokens a rank on, two win 3 % of the time, from 32,768 on less than 1 %, for a
    seventh more memory. With fewer tokens the host is too slow; two ranks have nothing to add up beside an attention.
    """
    return ring > 2 and 1 << 18 <= rows < 1 << 20


class Turns:
    """The streams of neighbouring steps: as one attention ends and leaves parts of a GPU free, the next one begins.

    A step begins on its stream, and is finished on the rank's own: at once on one stream, on two behind the beginning
    of the next step. All that steps read is held until then.
    """

    def __init__(self, problem: Problem, q: Tensor) -> None:
        rt, context = problem.rt, problem.schedule.context
        two = two_streams(context.ring, q.size // q.shape[-1])
        self.rt, self.number = rt, 0
        self.lanes = (rt.side("context"), rt.side(context.stream or "context 2")) if two else (rt, rt)
        self.ahead = 0 if self.lanes[0] is rt else 1
        self.open: deque[tuple[Runtime, Callable[[], None]]] = deque()

    def __enter__(self) -> Turns:
        return self

    def take(self, begin: Callable[[Runtime], Callable[[], None]]) -> None:
        """The next step: `begin` gives a stream its work, what it returns finishes the step."""
        lane = self.lanes[self.number % 2]
        self.number += 1
        self.open.append((lane, begin(lane)))
        self._finish(self.ahead)

    def _finish(self, left: int) -> None:
        while len(self.open) > left:
            lane, finish = self.open.popleft()
            self.rt.wait(lane)
            finish()
            lane.wait(self.rt)  # results are memory of the lane, which goes back now

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is None:
            self._finish(0)
        for lane, _ in self.open:  # after an error: what the steps read goes back to its allocator now
            self.rt.wait(lane)


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
    keys = k, v
    with Turns(problem, q) as turns:
        for number, step in enumerate(steps):
            coming = Passing(rt, comm, block) if number + 1 < len(steps) else None
            for side in problem.of_step(step.source):
                turns.take(partial(problem.attend_on, side=side, parts=(q, *keys), outputs=outputs, logits=logits))
            if coming is not None:
                block = coming.wait()
                keys = apart(block, k, v)
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
    foreign = _Foreign(problem, given, comm, queries)
    with Turns(problem, dq) as turns:
        for side in problem.of_step(steps[0].source):
            own = partial(
                problem.differentiate_on, side=side, given=given, keys=(k, v), queries=queries, grads=(dk, dv)
            )
            turns.take(own)
        for number, step in enumerate(steps[1:], 1):
            assert coming is not None
            keys = apart(coming.wait(), k, v)
            coming = Passing(rt, comm, coming.coming) if number + 1 < len(steps) else None
            (side,) = problem.of_step(step.source)
            turns.take(partial(foreign.begin, side=side, keys=keys))
    if foreign.home is not None:
        for target, part in zip((dk, dv), apart(foreign.home.wait(), k, v), strict=True):
            ops.context_sum(rt, target, part, out=target)


class _Foreign:
    """dK|dV of other ranks' keys, which go on with what the ranks before have added."""

    def __init__(
        self, problem: Problem, given: tuple[Tensor, Tensor, Tensor, Tensor], comm: Communicator, queries: Chain
    ) -> None:
        self.problem, self.given, self.comm, self.queries = problem, given, comm, queries
        self.home: Passing | None = None  # gradients that come behind their keys, from the rank that had them before
        self.first = True
        self.dtype, self.kind = problem.products.dtype, problem.summed_dtype()

    def begin(self, lane: Runtime, side: Sides, keys: tuple[Tensor, Tensor]) -> Callable[[], None]:
        """Compute this rank's summand."""
        problem, rt, (k, v), first = self.problem, self.problem.rt, keys, self.first
        self.first = False
        some = problem.core.kv_format != "thd" and len(side.call.keys) == 1  # rows of the first chunk alone
        shape = (k.size + v.size,)
        total = rt.zeros(shape, self.kind) if some and first else None
        alone = first and self.kind is self.dtype  # two ranks: the summand is all
        part = (total or rt.empty(shape, self.kind)) if alone else rt.empty(shape, self.dtype)
        added = problem.differentiate_on(lane, side, self.given, keys, self.queries, apart(part, k, v))

        def finish() -> None:
            added()
            done = part if alone else self._summed(part, total, some, keys)
            self.home = Passing(rt, self.comm, done)

        return finish

    def _summed(self, part: Tensor, total: Tensor | None, some: bool, keys: tuple[Tensor, Tensor]) -> Tensor:
        """This rank's summand added to those of the ranks before, if there are any."""
        rt, form = self.problem.rt, self.problem.core.kv_format
        if self.home is not None:
            total = self.home.wait()
        if not some:
            made = total or rt.empty(part.shape, self.kind)
            ops.context_sum(rt, part, total, out=made)
            return made
        assert total is not None
        for theirs, ours in zip(apart(total, *keys), apart(part, *keys), strict=True):
            target, summand = (half_of(t, form, 0) for t in (theirs, ours))
            ops.context_sum(rt, target, summand, out=target)
        return total
