"""Residual connections: residual + dropout(x + bias) as a layer of its own, and as a part of layers that begin with a
norm.

A layer that begins with a norm carries the stream itself (`Stream`): what its norm reads comes out beside its result.
That is its input, or the sum of a branch and the stream, which the norm forms on the way. Its backward adds the
gradient that comes back along the stream while it computes the norm's own, so no pass over the stream is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import unwrap
from typing import Any, NamedTuple

from te_core.arguments import explained
from te_core.layers.communicator import Communicator
from te_core.layers.gathered import gather
from te_core.ops import raw as ops
from te_core.ops.norm import Branch
from te_core.quantize.operands import Value
from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tensor import Tensor


class BranchNeeds(NamedTuple):
    """Which gradients of residual + dropout(x + bias) the caller wants."""

    x: bool
    bias: bool
    residual: bool


@dataclass(frozen=True, slots=True)
class AddSpec:
    """All that a residual addition's plan depends on besides shapes."""

    p: float
    needs: BranchNeeds


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream through a layer that begins with a norm.

    add: the norm reads the sum of the stream and the layer's input; None: the input is the stream.
    """

    add: AddSpec | None = None


class AddSaved(NamedTuple):
    """What backward reads."""

    rng: Tensor | None


@explained
def forward(
    rt: Runtime,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rng: Tensor | None = None,
    *,
    spec: AddSpec,
    scales: Scales | None = None,
) -> tuple[tuple[Tensor], AddSaved]:
    """((residual + dropout(x + bias),), saved) for x and residual [.., H]."""
    stream = None if residual is None else residual.matrix()
    out = rt.empty(x.shape, x.dtype)
    ops.bias_dropout_add(rt, x.matrix(), bias, stream, p=spec.p, rng=rng, out=out.matrix())
    return (out,), AddSaved(rng)


@explained
def backward(
    rt: Runtime, dy: Tensor, saved: AddSaved, *, spec: AddSpec, scales: Scales | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dbias, dresidual); dresidual is dy itself, and without dropout dx is, too."""
    needs = spec.needs
    dbias = rt.empty((dy.shape[-1],), dy.dtype) if needs.bias else None
    dresidual = dy if needs.residual else None
    if spec.p == 0.0:
        if dbias is not None:
            ops.column_sum(rt, dy.matrix(), dbias)
        return dy if needs.x else None, dbias, dresidual
    if not needs.x and dbias is None:
        return None, None, dresidual
    dx = ops.bias_dropout_add_backward(rt, dy.matrix(), p=spec.p, rng=saved.rng, column_sum=dbias)
    return dx.reshape(*dy.shape) if needs.x else None, dbias, dresidual


branch_gradients = unwrap(backward)  # called by layers that have checked


def entered(
    rt: Runtime, x: Tensor, stream: Stream | None, residual: Tensor | None, bias: Tensor | None, rng: Tensor | None
) -> tuple[Tensor, Branch | None]:
    """(what a layer's norm reads, how the norm forms it, if it does)."""
    if stream is None or stream.add is None:
        return x, None
    assert residual is not None
    total = rt.empty(x.shape, x.dtype)
    return total, Branch(residual.matrix(), total.matrix(), bias, stream.add.p, rng)


def left(
    rt: Runtime, dx: Tensor, stream: Stream | None, rng: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(gradient of the layer's input, of the branch's bias, of the residual) from that of what the norm read."""
    if stream is None or stream.add is None:
        return dx, None, None
    dx, dbias, dresidual = branch_gradients(rt, dx, AddSaved(rng), spec=stream.add)
    return dx, dbias, dresidual


def returned(
    rt: Runtime, y: Value, normed: Tensor | None, read: Tensor, spec: Any, comm: Communicator | None
) -> tuple[Value, ...]:
    """A layer's outputs as its spec has them: its result; the norm's output, of these rows or all ranks'; with a stream
    what the norm read."""
    outputs: tuple[Value, ...] = (y,)
    if spec.return_norm:
        assert normed is not None
        rows = normed.reshape(*read.shape)
        outputs = (y, gather(rt, comm, rows).wait() if spec.gather_norm and comm is not None else rows)
    return outputs if spec.stream is None else (*outputs, read)


def returned_gradients(
    second: Tensor | None, third: Tensor | None, return_norm: bool, stream: Stream | None
) -> tuple[Tensor | None, Tensor | None]:
    """(gradient of the norm's output, of the stream) from those of a layer's outputs beside its result, in order."""
    if stream is None:
        return second, None
    return (second, third) if return_norm else (None, second)
