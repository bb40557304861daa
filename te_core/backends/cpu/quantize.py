"""Per-tensor quantization, dequantization, transpose, amax and the delayed-scaling update.

`deliver` is the one place where values become FP8: quantize, norms and activations all end in it, with values
that are already rounded to the activation dtype. So fused equals unfused bit for bit by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from te_core import dtypes
from te_core.backends.cpu import codec
from te_core.backends.cpu.executor import Executor, row_blocks, scratch
from te_core.backends.cpu.matrix import store_column_sum
from te_core.backends.cpu.quantize_block import deliver_blocks
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.quantize import ScalingState

Array = np.ndarray[Any, Any]
_FLT_MAX = np.finfo(np.float32).max
_ONE = np.float32(1)
#: From this size on it is faster to encode all 2^16 values of a 16-bit type and look each element up.
_WORTH_A_TABLE = 1 << 17


def quantize(rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None) -> None:
    """Quantize a matrix in the orientations that `out` holds."""
    ex, values = scratch(rt), x.numpy()
    if column_sum is not None:
        store_column_sum(ex, values, column_sum)
    deliver(ex, values, cast, out)


@np.errstate(all="ignore")
def deliver(ex: Executor, values: Array, cast: Cast, out: QuantizedTensor) -> None:
    """Cast a dense matrix of an activation dtype to FP8: amax, scale, both orientations, padding."""
    if cast.format.scaling == "block":
        deliver_blocks(ex, values, cast, out)
        return
    if cast.scale is None or cast.amax is not None:
        largest = codec.amax(values) if cast.maxima is None else cast.maxima.numpy()[0]
        if cast.amax is not None:
            amax = cast.amax.numpy()
            amax[0] = np.fmax(amax[0], largest)
    if cast.scale is None:
        scale = current_scale(largest, cast.dtype.max, cast.epsilon, cast.power_of_two)
    else:
        scale = cast.scale.numpy()[0]
    out.scale_inv.numpy()[0] = _ONE / scale

    m, k = values.shape
    rowwise = None if out.rowwise is None else out.rowwise.numpy()
    direct = rowwise is not None and rowwise.shape[1] == k  # no gaps between rows: encode in place
    codes = rowwise[:m] if direct and rowwise is not None else np.empty((m, k), cast.dtype.numpy)
    _encode_rows(ex, values, codes, scale)
    codes = codes.view(np.uint8)
    if rowwise is not None:
        storage = rowwise.view(np.uint8)
        if not direct:
            storage[:m, :k] = codes
        _zero_tail(storage, m, k)
    if out.columnwise is not None:
        storage = out.columnwise.numpy().view(np.uint8)
        _transpose(codes, storage[:k, :m])
        _zero_tail(storage, k, m)


def _encode_rows(ex: Executor, values: Array, codes: Array, scale: np.float32) -> None:
    if values.dtype == np.float32:
        codec.encode(ex, values, codes, scale)
        return
    if values.size >= _WORTH_A_TABLE:
        codec.encode_by_table(ex, values, codes, scale)
        return
    m, k = values.shape
    for block in row_blocks(m, k):
        part = codec.decode(ex, values[block], ex.floats("deliver", block.stop - block.start, k))
        codec.encode(ex, part, codes[block], scale)


def _zero_tail(storage: Array, m: int, k: int) -> None:
    """Zero the padding around the [m, k] values that storage holds."""
    storage[m:] = 0
    storage[:m, k:] = 0


def _transpose(source: Array, out: Array) -> None:
    """out = source.T, 128 rows at a time: up to four times faster where the row length is a power of two."""
    for start in range(0, source.shape[0], 128):
        out[:, start : start + 128] = source[start : start + 128].T


def current_scale(largest: np.float32, limit: float, epsilon: float, power_of_two: bool) -> np.float32:
    """The scale of a tensor from its own maximum."""
    largest = max(largest, np.float32(epsilon))
    if not np.isfinite(largest) or largest == 0:
        return _ONE
    scale = np.minimum(np.float32(limit) / largest, _FLT_MAX)  # a tiny maximum makes the quotient infinite
    if power_of_two:
        scale = (np.array([scale]).view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)[0]
    return np.float32(scale)


@np.errstate(all="ignore")
def dequantize(rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool) -> None:
    """The values of one copy of a quantized matrix."""
    ex, (m, k) = scratch(rt), q.shape
    if not columnwise:
        assert q.rowwise is not None  # the ops floor refuses a missing copy
        codes = q.rowwise.numpy()[:m, :k]
    else:
        assert q.columnwise is not None
        codes = q.columnwise.numpy()[:k, :m].T
    scale_inv, values = q.scale_inv.numpy()[0], out.numpy()
    for block in row_blocks(m, k):
        part = ex.floats("dequantize", block.stop - block.start, k)
        codec.decode(ex, np.ascontiguousarray(codes[block]), part)
        np.multiply(part, scale_inv, out=part)
        codec.encode(ex, part, values[block])


def transpose(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """A dense transposed copy."""
    unsigned = dtypes.UNSIGNED[x.dtype.itemsize]  # bytes are moved, not values
    _transpose(x.numpy().view(unsigned), out.numpy().view(unsigned))


def amax(rt: Runtime, x: Tensor, out: Tensor, column_sum: Tensor | None) -> None:
    """Max |x| without NaN; the column sums."""
    out.numpy()[0] = codec.amax(x.numpy())
    if column_sum is not None:
        store_column_sum(scratch(rt), x.numpy(), column_sum)


def amax_many(rt: Runtime, tensors: Sequence[Tensor], out: Tensor) -> None:
    """The same of each tensor."""
    out.numpy()[:] = [codec.amax(t.numpy()) for t in tensors]


def count_nonfinite(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """Add the NaNs and the infinities."""
    values = x.numpy().astype(np.float32)
    out.numpy()[:] += (np.isnan(values).sum(), np.isinf(values).sum())


def plan_update(rt: Runtime, states: list[ScalingState], algo: str) -> tuple[list[ScalingState], str]:
    """Nothing to prepare."""
    return states, algo


@np.errstate(all="ignore")
def run_update(rt: Runtime, plan: tuple[list[ScalingState], str]) -> None:
    """The delayed-scaling step of all states."""
    states, algo = plan
    for state in states:
        scale, history, used = state.scale.numpy(), state.history.numpy(), state.used.numpy()
        used[...] = scale
        last = history[0].copy()
        largest = np.fmax(np.fmax.reduce(history[1:], axis=0, initial=-np.inf), last) if algo == "max" else last
        rolls = last != 0  # true for NaN, too: it rolls like any other
        if history.shape[0] > 1:
            history[1:-1, rolls] = history[2:, rolls]
            history[-1, rolls] = last[rolls]
        history[0, rolls] = 0
        fits = rolls & np.isfinite(largest) & (largest > 0)
        scale[fits] = np.minimum(np.float32(state.limit) / largest[fits], _FLT_MAX)
