"""How much memory a layer holds at its peak: in which order backward computes, and lets go of what was read."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from te_core import dtypes
from te_core.dtypes import DType
from te_core.layers import mlp
from te_core.layers.linear import LinearSpec, Needs, Sink
from te_core.layers.norm import NormSpec
from te_core.runtime import Runtime
from te_core.tensor import CPU, Tensor

BF16 = dtypes.bfloat16
WIDTH, INNER = 32, 64


class Block:
    """Memory that says when it goes."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(max(nbytes, 1), np.uint8)


class Counting:
    """An allocator that keeps account of what is alive."""

    def __init__(self) -> None:
        self.device, self.alive, self.peak = CPU, 0, 0

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """Memory that counts until its owner goes."""
        nbytes = dtype.nbytes(int(np.prod(shape)))
        block = Block(nbytes)
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(block, self._gone, nbytes)
        return Tensor(block.bytes.ctypes.data, tuple(shape), dtype, CPU, block)

    def _gone(self, nbytes: int) -> None:
        self.alive -= nbytes


def step(rows: int, sink: Sink | None = None) -> tuple[int, list[Any]]:
    """The peak of an MLP's backward above what its inputs take, and its gradients."""
    account = Counting()
    rt = Runtime.cpu(account)
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> Tensor:
        return rt.tensor(draw.standard_normal(shape).astype(BF16.numpy))

    x, gamma, w1, w2, dy = (
        normal(rows, WIDTH),
        normal(WIDTH),
        normal(2 * INNER, WIDTH),
        normal(WIDTH, INNER),
        normal(rows, WIDTH),
    )
    needs = Needs(True, True, False)
    linear = LinearSpec(BF16, None, needs)
    spec = mlp.MLPSpec(linear, linear, NormSpec(BF16, "RMSNorm", 1e-5), "swiglu")
    for sinks in ((None, None), (None, sink)):  # the first time makes the backend's scratch memory, too
        grads: Any = None
        resting = account.alive
        (y,), saved = mlp.forward(rt, x, gamma, None, w1, None, w2, None, spec=spec)
        del y
        account.peak = account.alive
        grads = mlp.backward(rt, dy, None, None, saved, spec=spec, sinks=sinks, release=True)
    return account.peak - resting, [None if t is None else rt.numpy(t) for t in grads if not isinstance(t, tuple)]


def test_the_smaller_of_two_waits_for_the_activations_gradient() -> None:
    """At the peak stand h, its gradient and that of the activation's output, and beside them fc2's weight gradient:
    the activation's output, larger here, has gone."""
    rows = 256
    peak, _ = step(rows)
    wide, narrow = 2 * rows * INNER, 2 * rows * WIDTH
    standing = 2 * wide + wide + 2 * wide + 2 * WIDTH * INNER
    assert standing <= peak <= standing + narrow + 8 * rows + 64 < standing + wide - 2 * WIDTH * INNER


def test_the_order_changes_no_gradient() -> None:
    """A gradient that waits in a queue is computed behind all others. (And a released backward leaves the weights be:
    each step is the second with them.)"""
    queue: list[Any] = []
    _, plain = step(256)
    _, queued = step(256, Sink(queue=queue))
    (run,) = queue
    queued[5] = (rt := Runtime.cpu()).numpy(run(rt))
    for a, b in zip(plain, queued, strict=True):
        assert (a is None) == (b is None) and (a is None or np.array_equal(a, b))
