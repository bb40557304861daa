"""Residual add, and bias + dropout + add with a Philox4x32-10 mask (its rule: te_core/ops/elementwise.py)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from te_core.backends.cpu import codec
from te_core.backends.cpu.executor import CHUNK, F32, row_blocks, scratch
from te_core.backends.cpu.matrix import store_column_sum
from te_core.runtime import Runtime
from te_core.tensor import Tensor

U64 = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLY = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEP = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)


@np.errstate(all="ignore")
def add(rt: Runtime, a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a + b; out may be a or b."""
    ex, one, two, target = scratch(rt), a.numpy().reshape(-1), b.numpy().reshape(-1), out.numpy().reshape(-1)
    for start in range(0, one.size, CHUNK):
        part = slice(start, min(start + CHUNK, one.size))
        left = codec.decode(ex, one[part], ex.floats("add a", part.stop - start))
        right = codec.decode(ex, two[part], ex.floats("add b", part.stop - start))
        codec.encode(ex, np.add(left, right, out=left), target[part])


@np.errstate(all="ignore")
def rank_sum(rt: Runtime, parts: Tensor, out: Tensor) -> None:
    """In float32, by rank, rounded once."""
    first, *more = parts.numpy()
    total = first.astype(np.float32)
    for part in more:
        total += part.astype(np.float32)
    out.numpy()[...] = total.astype(out.dtype.numpy)


@np.errstate(all="ignore")
def bias_dropout_add(
    rt: Runtime,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    p: float,
    rng: Tensor | None,
    site: int,
) -> None:
    """out = residual + dropout(x + bias)."""
    ex, source, target, (m, n) = scratch(rt), x.numpy(), out.numpy(), x.shape
    added = None if bias is None else bias.numpy().astype(np.float32)
    other = None if residual is None else residual.numpy()
    for block in row_blocks(m, n):
        rows = block.stop - block.start
        v = codec.decode(ex, source[block], ex.floats("dropout x", rows, n))
        if added is not None:
            np.add(v, added, out=v)
        if p > 0.0 and rng is not None:
            _drop(v, p, rng.numpy(), site, block.start * n)
        if other is not None:
            np.add(v, codec.decode(ex, other[block], ex.floats("dropout residual", rows, n)), out=v)
        codec.encode(ex, v, target[block])


@np.errstate(all="ignore")
def bias_dropout_add_backward(
    rt: Runtime, dy: Tensor, dx: Tensor, p: float, rng: Tensor | None, site: int, column_sum: Tensor | None
) -> None:
    """dx = dy where the same mask kept the element, scaled; its column sums are the bias gradient."""
    ex, source, target, (m, n) = scratch(rt), dy.numpy(), dx.numpy(), dy.shape
    for block in row_blocks(m, n):
        v = codec.decode(ex, source[block], ex.floats("dropout x", block.stop - block.start, n))
        if p > 0.0 and rng is not None:
            _drop(v, p, rng.numpy(), site, block.start * n)
        codec.encode(ex, v, target[block])
    if column_sum is not None:
        store_column_sum(ex, target, column_sum)


def _drop(v: F32, p: float, rng: npt.NDArray[np.int64], site: int, first: int) -> None:
    """Zero or scale, in place, the elements numbered from `first`."""
    if p == 1.0:
        v.fill(0.0)
        return
    survives = philox_words(rng, site, first, v.size).reshape(v.shape) >= np.uint32(int(p * 2.0**32))
    np.multiply(v, np.float32(1.0 / (1.0 - p)), out=v)
    bits = v.view(np.int32)  # and-ing with all ones or none: a dropped infinity is 0, a product would be NaN
    np.bitwise_and(bits, np.negative(survives.view(np.int8), dtype=np.int32), out=bits)


def philox_words(rng: npt.NDArray[np.int64], site: int, first: int, count: int) -> npt.NDArray[np.uint32]:
    """Random words `first` to `first + count` of the stream (seed, offset, site)."""
    seed, offset = (int(v) & 0xFFFFFFFFFFFFFFFF for v in rng)
    begin, end = first // 4, (first + count + 3) // 4
    even, odd = np.empty((2, end - begin), np.uint64), np.empty((2, end - begin), np.uint64)
    index = np.arange(begin, end, dtype=np.uint64)
    np.bitwise_and(index, _LOW, out=even[0])
    np.right_shift(index, _HALF, out=odd[0])
    even[1] = offset & 0xFFFFFFFF
    odd[1] = (offset >> 32) ^ (site & 0xFFFFFFFF)
    _philox(even, odd, seed & 0xFFFFFFFF, seed >> 32)
    words = np.empty((end - begin, 4), np.uint32)
    words[:, 0::2], words[:, 1::2] = even.T, odd.T
    skip = first - 4 * begin
    return words.reshape(-1)[skip : skip + count]


def _philox(even: U64, odd: U64, key0: int, key1: int) -> None:
    """Philox4x32-10 in place on words (0, 2) and (1, 3) of the counters.

    The 32-bit words lie in 64-bit lanes, so that a product keeps both of its halves. Both products of a round
    are one array, which halves the number of passes.
    """
    key = np.array([[key0], [key1]], np.uint64)
    product = np.empty_like(even)
    for _ in range(10):
        np.multiply(even, _MULTIPLY, out=product)
        np.right_shift(product[::-1], _HALF, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, key, out=even)
        np.bitwise_and(product[::-1], _LOW, out=odd)
        key = (key + _KEY_STEP) & _LOW
