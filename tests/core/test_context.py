"""Lengths of chunks, rows between ranks, random numbers and maxima of context parallelism, one token at a time."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import ops
from te_core.errors import ArgumentError
from te_core.ops.context import Span
from te_core.tensor import Tensor
from tests.backends import cuda_runtime, requires_cuda
from tests.core.inputs import numpy_dtype, placed, poisoned


def sums(rt, cu):
    return rt.tensor(np.asarray(cu, np.int32))


def test_padded_lengths_that_do_not_divide(rt):
    """The host learns of it on the CPU alone."""
    cu = sums(rt, [0, 8, 14, 22])
    t = rt.tensor(np.ones((11, 2, 3), np.float32))
    if rt.device.kind == "cpu":
        for call in (
            lambda: ops.context_lengths(rt, cu, size=2, spans=(Span(((0, 1),)),)),
            lambda: ops.context_mark(rt, t, cu, size=2),
            lambda: ops.context_rows(
                rt, t, how="sequence_to_ranks", form="thd", size=1, cu_seqlens_padded=sums(rt, [0, 3])
            ),
        ):
            with pytest.raises(ArgumentError, match=r"sequence \d of padded length [63].*twice the number of ranks"):
                call()
        return
    ops.context_lengths(rt, cu, size=2, spans=(Span(((0, 1),)),))
    for dtype in ("float32", "bfloat16", "float8_e4m3"):
        t = rt.tensor(np.ones((11, 2, 3), numpy_dtype(dtype)))
        ops.context_mark(rt, t, cu, size=2)
        values = rt.numpy(t).astype(np.float32)
        assert np.isnan(values[4:7]).all() and (values[:4] == 1).all() and (values[7:] == 1).all()
    fits = rt.tensor(np.ones((11, 2, 3), np.float32))
    ops.context_mark(rt, fits, sums(rt, [0, 8, 8, 20]), size=2)
    assert (rt.numpy(fits) == 1).all()


# ---------------------------------------------------------------------------------------------------------- rows


def numbered(shape, dtype):
    """Every element another one, as far as the type goes."""
    count = int(np.prod(shape))
    return (np.arange(count) % 251 + 1).astype(np.uint8).reshape(shape).view(np.uint8).astype(numpy_dtype(dtype))


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_parts_of_shared_buffers(rt, shift):
    """q, k and v as views of one projection go into one buffer [size, bytes of all three], and back."""
    size, tokens, rows, d = 2, 4, 3, 8
    packed = numbered((tokens, rows, 8, d), "bfloat16")  # 4 heads of q, 2 of k, 2 of v
    t = placed(rt, packed, shift)
    buffer = placed(rt, np.zeros((size, tokens * rows * 4 * d), numpy_dtype("bfloat16")), shift)
    begin = 0
    for first, heads in ((0, 4), (4, 2), (6, 2)):
        view = Tensor(t.ptr + first * d * 2, (tokens, rows, heads, d), t.dtype, t.device, t, t.row_major_strides())
        dense = (size, tokens, rows, heads // size, d)
        inner = (rows * heads // size * d, heads // size * d, d, 1)
        piece = Tensor(buffer.ptr + begin * 2, dense, t.dtype, t.device, buffer, (buffer.shape[1], *inner))
        ops.context_rows(rt, view, how="heads_to_ranks", form="sbhd", size=size, out=piece)
        want = (
            packed[:, :, first : first + heads].reshape(tokens, rows, size, heads // size, d).transpose(2, 0, 1, 3, 4)
        )
        np.testing.assert_array_equal(rt.numpy(buffer)[:, begin : begin + want[0].size], want.reshape(size, -1))
        into = placed(rt, np.zeros_like(packed), shift)
        back = Tensor(into.ptr + first * d * 2, view.shape, t.dtype, t.device, into, t.row_major_strides())
        ops.context_rows(rt, piece, how="ranks_to_heads", form="sbhd", size=size, out=back)
        expected = np.zeros_like(packed)
        expected[:, :, first : first + heads] = packed[:, :, first : first + heads]
        np.testing.assert_array_equal(rt.numpy(into), expected)
        begin += want[0].size
    assert begin == buffer.shape[1]


# --------------------------------------------------------------------------------------- random numbers and maxima


# ------------------------------------------------------------------------------------------------------- refusals


@requires_cuda
def test_whatever_running_sums_say_stays_inside():
    """Lengths that do not divide, or reach behind the tokens: what fits no chunk counts as padding."""
    rt = cuda_runtime()
    rng = np.random.default_rng(0)
    for _ in range(60):
        size, parts = (int(n) for n in rng.integers(1, 5, 2))
        padded = np.concatenate(([0], np.cumsum(rng.integers(0, 20, 5)))).astype(np.int32)
        count = int(padded[-1]) // parts // size * size + size * int(rng.integers(-1, 3))
        for how, shape in (("sequence_to_ranks", (count,)), ("ranks_to_sequence", (size, count // size))):
            whole = np.arange(1, max(count, 0) * 8 + 1, dtype=np.float32).reshape(*np.maximum(shape, 0), 2, 4)
            options = {"how": how, "form": "thd", "size": size, "parts": parts}
            t = placed(rt, whole, 4)
            got = ops.context_rows(poisoned(rt), t, cu_seqlens_padded=sums(rt, padded), **options)
            assert np.isin(rt.numpy(got), [0.0, *whole.ravel()]).all(), (size, parts, padded)
