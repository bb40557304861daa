"""What the operations between ranks of one sequence promise beside their values: views, marks, bounds; attention in
pieces. Their values are rows (tests/core/operation_token_rows.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.attention import AttentionSpec
from te_core.ops.attention_terms import Terms
from te_core.ops.context import Span
from te_core.tensor import Tensor
from tests.backends import cuda_runtime, requires_cuda
from tests.core.inputs import numpy_dtype, placed, poisoned
from tests.core.operation_token_rows import numbered, partial_output
from tests.reference.context import by_token, merged, stats_by_token
from tests.tolerances import DB, snr_db


def sums(rt, cu):
    return rt.tensor(np.asarray(cu, np.int32))


@requires_cuda
def test_padded_lengths_that_do_not_divide():
    """The host learns of it on the CPU alone; on a GPU such tokens become NaN."""
    rt, cu = cuda_runtime(), [0, 8, 14, 22]
    ops.context_lengths(rt, sums(rt, cu), size=2, spans=(Span(((0, 1),)),))
    for dtype in ("float32", "bfloat16", "float8_e4m3"):
        t = rt.tensor(np.ones((11, 2, 3), numpy_dtype(dtype)))
        ops.context_mark(rt, t, sums(rt, cu), size=2)
        values = rt.numpy(t).astype(np.float32)
        assert np.isnan(values[4:7]).all() and (values[:4] == 1).all() and (values[7:] == 1).all()
    fits = rt.tensor(np.ones((11, 2, 3), np.float32))
    ops.context_mark(rt, fits, sums(rt, [0, 8, 8, 20]), size=2)
    assert (rt.numpy(fits) == 1).all()


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


# ------------------------------------------------------------------------------------ partial outputs of attention


def half(t: Tensor, axis: int, second: bool) -> Tensor:
    """A view of half of a dimension."""
    n, strides = t.shape[axis] // 2, t.row_major_strides()
    shape = (*t.shape[:axis], n, *t.shape[axis + 1 :])
    return Tensor(t.ptr + second * n * strides[axis] * t.dtype.itemsize, shape, t.dtype, t.device, t, strides)


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("width", [16, 6])
def test_a_half_into_a_sum(rt, form, width):
    """In place, through views of the sum and of its statistics; the other half stays, bit for bit."""
    size = (3, 8, 2, width)
    token = form.index("s")
    a, a_stats = partial_output(form, size, "float32", 1)
    b, b_stats = partial_output(form, (3, 4, 2, width), "bfloat16", 2)
    total, stats = rt.tensor(a), rt.tensor(a_stats)
    views = half(total, token, True), half(stats, 2, True)
    ops.attention_merge(rt, *views, rt.tensor(b), rt.tensor(b_stats), out=views[0], stats=views[1], form=form)
    old = [np.split(x, 2, axis)[0] for x, axis in ((a, token), (a_stats, 2))]
    new = [np.split(rt.numpy(x), 2, axis) for x, axis in ((total, token), (stats, 2))]
    for (kept, _), was in zip(new, old, strict=True):
        np.testing.assert_array_equal(kept, was)
    second = np.split(a, 2, token)[1], np.split(a_stats, 2, 2)[1]
    want, logs = merged([second, (b, b_stats)], form, None)
    found = by_token(new[0][1].astype(np.float64), form)
    assert snr_db(found, want) > DB["fp32"]
    np.testing.assert_allclose(stats_by_token(new[1][1], form), logs, rtol=2e-6)


def test_far_apart_and_infinite(rt):
    """Exponents that float32 cannot hold; one that has seen no key stays out, and the other comes out unchanged."""
    a = np.array([[[1.0, np.nan]], [[2.0, 3.0]], [[np.nan, 5.0]], [[7.0, 8.0]]], np.float32)
    b = np.array([[[4.0, 6.0]], [[np.nan, np.nan]], [[np.inf, 1.0]], [[1.0, 2.0]]], np.float32)
    a_stats = np.array([[-np.inf], [90000.0], [np.inf], [1e30]], np.float32)
    b_stats = np.array([[-3e38], [-np.inf], [-np.inf], [-1e30]], np.float32)
    out, stats = rt.empty(a.shape, dtypes.float32), rt.empty((4, 1), dtypes.float32)
    ops.attention_merge(rt, *(rt.tensor(x) for x in (a, a_stats, b, b_stats)), out=out, stats=stats, form="thd")
    np.testing.assert_array_equal(rt.numpy(out), [b[0], a[1], np.zeros_like(a[2]), a[3]])
    np.testing.assert_array_equal(rt.numpy(stats)[:, 0], np.array([-3e38, 90000, np.inf, 1e30], np.float32))
    a_stats[1] = np.nan  # a fault of somebody's shows
    ops.attention_merge(rt, *(rt.tensor(x) for x in (a, a_stats, b, b_stats)), out=out, stats=stats, form="thd")
    assert np.isnan(rt.numpy(out)[1]).all() and np.isnan(rt.numpy(stats)[1])


@pytest.mark.parametrize("shape", [(2, 6, 8), (4, 6, 3, 8), (2, 3, 10), (1, 2, 12, 1, 8)], ids=str)
def test_sums_of_views(rt, shape):
    """A half of any dimension but the last, in place."""
    rng = np.random.default_rng(0)
    for axis in (i for i, n in enumerate(shape[:-1]) if n % 2 == 0):
        a = rng.standard_normal(shape).astype(np.float32)
        b = rng.standard_normal((*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])).astype(numpy_dtype("bfloat16"))
        total = rt.tensor(a)
        view = half(total, axis, True)
        ops.context_sum(rt, view, rt.tensor(b), out=view)
        first, second = np.split(a, 2, axis)
        np.testing.assert_array_equal(rt.numpy(total), np.concatenate((first, second + b.astype(np.float32)), axis))
    stats = rt.tensor(rng.standard_normal((2, 3, 10)).astype(np.float32))
    out = rt.empty((2, 3, 5), dtypes.float32)
    ops.context_sum(rt, half(stats, 2, True), None, out=out)
    np.testing.assert_array_equal(rt.numpy(out), rt.numpy(stats)[..., 5:])


@pytest.mark.parametrize("softmax", ["off-by-one", "learnable"])
def test_an_attention_in_pieces(rt, softmax):
    """Three runs of keys, merged in float32, are the attention over all; with its statistics and its sink's gradient.

    (The CPU computes float32; cuDNN takes none.)
    """
    dtype = numpy_dtype("float32" if rt.device.kind == "cpu" else "bfloat16")
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 48, h, 64)).astype(dtype) for h in (4, 2, 2))
    sink = rt.tensor(rng.uniform(-2, 4, 4).astype(np.float32)) if softmax == "learnable" else None
    whole = AttentionSpec(0.125, "bshd", "bshd", softmax=softmax)
    want = ops.attention_forward(rt, *(rt.tensor(x) for x in (q, k, v)), spec=whole, terms=Terms(sink=sink))
    total = stats = None
    for i in range(3):
        keys, values = (rt.tensor(np.ascontiguousarray(x[:, 16 * i : 16 * (i + 1)])) for x in (k, v))
        part = ops.attention_forward(rt, rt.tensor(q), keys, values, spec=AttentionSpec(0.125, "bshd", "bshd"))
        if total is None:
            total, stats = part.out, part.stats
            continue
        last = i == 2
        out = rt.empty(q.shape, dtypes.dtype(dtype) if last else dtypes.float32)
        more = {"softmax": softmax, "sink": sink} if last else {}
        ops.attention_merge(rt, total, stats, part.out, part.stats, out=out, stats=stats, form="bshd", **more)
        total = out
    assert snr_db(rt.numpy(total), rt.numpy(want.out)) > (100 if rt.device.kind == "cpu" else DB["bf16"])
    np.testing.assert_allclose(rt.numpy(stats), rt.numpy(want.stats), rtol=1e-3 if dtype != np.float32 else 1e-5)
    if sink is not None and rt.device.kind == "cpu":
        dy = rt.tensor(rng.standard_normal(q.shape).astype(dtype))
        given = [rt.tensor(x) for x in (q, k, v)]
        grads = ops.attention_backward(rt, dy, *given, want.out, want.stats, spec=whole, terms=Terms(sink=sink))
        got = ops.attention_sink_grad(rt, dy, total, stats, sink, form="bshd")
        np.testing.assert_allclose(rt.numpy(got), rt.numpy(grads.sink), rtol=1e-4)
