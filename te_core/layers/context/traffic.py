"""What travels in one piece: a rank's keys and values behind one another, and their gradients."""

from __future__ import annotations

from math import prod

from te_core.ops import raw as ops
from te_core.runtime import Runtime
from te_core.tensor import Tensor, dense_strides


def packed(rt: Runtime, k: Tensor, v: Tensor, form: str) -> Tensor:
    """k and v, values or codes, one behind the other, in a vector of their own."""
    block = rt.empty((k.size + v.size,), k.dtype)
    for part, t in zip(ranked(block, 1, [k.shape, v.shape]), (k, v), strict=True):
        ops.context_rows(rt, t, how="heads_to_ranks", form=form, size=1, out=part)
    return block


def apart(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The two in a block, dense, in the shapes of k and v."""
    return piece(block, 0, k.shape), piece(block, k.size, v.shape)


def piece(block: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """Some elements of a vector, in a shape."""
    assert start + prod(shape) <= block.shape[0]
    return Tensor(block.ptr + block.dtype.nbytes(start), shape, block.dtype, block.device, block)


def ranked(block: Tensor, size: int, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """The pieces of these shapes of a block that has, of each rank, one of each: [size, *shape], with the strides."""
    step, start, found = sum(map(prod, shapes)), 0, []
    for shape in shapes:
        at = block.ptr + block.dtype.nbytes(start)
        found.append(Tensor(at, (size, *shape), block.dtype, block.device, block, (step, *dense_strides(shape))))
        start += prod(shape)
    return found
