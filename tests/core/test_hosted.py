"""Tapes in a host's memory: nothing is taken, temporaries have places of their own, scratch begins as zeros."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core.ops import raw as ops
from te_core.runtime import Runtime
from te_core.tape.hosted import hosted
from te_core.tape.recorder import record
from te_core.tape.tape import Drop, Take
from te_core.tape.walk import NotRecordedError
from te_core.tensor import CPU, Tensor

SIZE = 128
LARGE = 1 << 17  # a recording puts smaller temporaries into one block
RT = Runtime.cpu()


def vector(rt: Runtime, value: float = 0.0, size: int = SIZE) -> Tensor:
    return rt.tensor(np.full(size, value, np.float32))


def replayed(layer: Any, given: list[Tensor]) -> np.ndarray:
    """The one result of a layer in memory that holds other things before."""
    made = hosted(RT, record(RT, "layer", layer, (tuple(given), {}), 16))
    slots = made.tape.slots
    assert {slot.kind for slot in slots} == {"input"} and len(made.results()) == 1
    assert not any(isinstance(step, (Take, Drop)) for step in made.tape.steps)
    brought = [*given, *(RT.tensor(np.full(max(1, s.nbytes), 0x41, np.uint8)) for s in slots[len(given) :])]
    made.tape.replay(RT, [t.ptr for t in brought], [None] * len(brought), ())
    found: np.ndarray = brought[-2].numpy().view(np.float32)
    return found


def test_scratch_begins_as_zeros() -> None:
    def layer(rt: Runtime, x: Tensor) -> Tensor:
        zeros = Tensor(rt.workspace("zeros", 4 * SIZE, zeroed=True), (SIZE,), dtypes.float32, CPU, None)
        total = rt.empty((SIZE,), dtypes.float32)
        ops.context_sum(rt, zeros, x, out=total)
        return total

    assert (replayed(layer, [vector(RT, 3.0)]) == 3.0).all()


def test_temporaries_that_live_together_lie_apart() -> None:
    """And one whose life is over makes room for the next."""

    def layer(rt: Runtime, x: Tensor) -> Tensor:
        total = rt.empty((SIZE,), dtypes.float32)
        ops.context_sum(rt, x, None, out=total)
        for _ in range(4):
            first, second = (rt.empty((SIZE,), dtypes.float32) for _ in range(2))
            ops.context_sum(rt, x, None, out=first)
            ops.context_sum(rt, x, first, out=second)
            ops.context_sum(rt, total, second, out=total)
            ops.context_sum(rt, total, first, out=total)
        return total

    assert (replayed(layer, [vector(RT, 2.0)]) == 2.0 + 4 * (4.0 + 2.0)).all()
    assert hosted(RT, record(RT, "layer", layer, ((vector(RT),), {}), 16)).block == 2 * 4 * SIZE


def test_temporaries_lie_where_the_result_will_be() -> None:
    """Until it is written: what the step that writes it reads lies elsewhere."""

    def layer(rt: Runtime, x: Tensor, early: bool) -> Tensor:
        first, second, third, total = (rt.empty((LARGE,), dtypes.float32) for _ in range(4))
        ops.context_sum(rt, x, None, out=first)
        ops.context_sum(rt, x, first, out=second)
        ops.context_sum(rt, first, second, out=third)
        ops.context_sum(rt, third, second if early else first, out=total)
        return total

    for early, value in ((True, 10.0), (False, 8.0)):
        assert (replayed(partial(layer, early=early), [vector(RT, 2.0, LARGE)]) == value).all()
        made = hosted(RT, record(RT, "layer", partial(layer, early=early), ((vector(RT, 0.0, LARGE),), {}), 16))
        assert made.block == 2 * 4 * LARGE  # of three: the first or the second one lies in the result

    def at_once(rt: Runtime, x: Tensor) -> Tensor:
        first, second, total = (rt.empty((LARGE,), dtypes.float32) for _ in range(3))
        ops.context_sum(rt, x, None, out=first)
        ops.context_sum(rt, x, first, out=second)
        ops.context_sum(rt, first, second, out=total)
        return total

    assert hosted(RT, record(RT, "layer", at_once, ((vector(RT, 0.0, LARGE),), {}), 16)).block == 2 * 4 * LARGE


def test_another_stream_is_no_hosts() -> None:
    def layer(rt: Runtime, x: Tensor) -> Tensor:
        total = rt.empty((SIZE,), dtypes.float32)
        ops.context_sum(rt, x, None, out=total)
        return total

    tape = record(RT, "layer", layer, ((vector(RT),), {}), 16)
    slot = tape.slots[-1]._replace(way=("side",))
    tape.slots = (*tape.slots[:-1], slot)
    with pytest.raises(NotRecordedError, match="other streams"):
        hosted(RT, tape)
