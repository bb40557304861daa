"""Partial attention outputs put together, against float64; their sums; the gradient of a sink."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.attention import AttentionSpec
from te_core.errors import ArgumentError
from te_core.ops.attention_terms import Terms
from te_core.tensor import Tensor
from tests.core.inputs import numpy_dtype, placed, poisoned
from tests.reference.context import by_token, merged, sink_grad, stats_by_token
from tests.tolerances import DB, snr_db

FORMS = ("sbhd", "bshd", "thd")
#: (batch, tokens, heads, width): vectors of 8, 4, 2 and 1 elements, rows longer than a block, and nothing at all.
SIZES = [(2, 6, 3, 16), (1, 5, 2, 12), (3, 4, 1, 6), (2, 3, 2, 7), (1, 2, 1, 4104), (2, 33, 5, 128), (2, 0, 3, 8)]
TYPES = [
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float32", "float16", "float32"),
    ("float32", "bfloat16", "bfloat16"),
    ("float32", "float32", "float32"),
    ("float16", "float32", "float16"),
]


def shapes(form, size):
    """Of an output and of its statistics."""
    b, s, h, d = size
    return {"sbhd": ((s, b, h, d), (b, h, s)), "bshd": ((b, s, h, d), (b, h, s)), "thd": ((b * s, h, d), (b * s, h))}[
        form
    ]


def drawn(form, size, dtype, seed, empty=0.3):
    """An output and statistics; rows of no key have infinite ones of either sign, and NaN for output."""
    rng = np.random.default_rng(seed)
    shape, of_stats = shapes(form, size)
    out = rng.standard_normal(shape).astype(numpy_dtype(dtype))
    stats = (rng.standard_normal(of_stats) * 5).astype(np.float32)
    stats[rng.random(of_stats) < empty] = -np.inf
    stats[rng.random(of_stats) < empty / 2] = np.inf
    by_token(out, form)[np.isinf(stats_by_token(stats, form))] = np.nan
    return out, stats


def accuracy(dtype):
    return {"bfloat16": DB["bf16"], "float16": DB["fp16"], "float32": DB["fp32"]}[dtype]


def compare(rt, got, want, form, dtype, what=""):
    """Zeros exactly where zeros are due, everything else within the rounding of the type."""
    found = by_token(rt.numpy(got).astype(np.float64), form)
    assert not found[np.all(want == 0, axis=-1)].any(), what
    assert not want.size or snr_db(found, want) > accuracy(dtype), what


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_two_partials(rt, form, types):
    for number, size in enumerate(SIZES):
        (a, a_stats), (b, b_stats) = (drawn(form, size, types[i], 2 * number + i) for i in (0, 1))
        rng = np.random.default_rng(number)
        sinks = rng.uniform(-2, 4, size[2]).astype(np.float32)
        for softmax, sink in (("vanilla", None), ("off-by-one", np.zeros(size[2])), ("learnable", sinks)):
            want, logs = merged([(a, a_stats), (b, b_stats)], form, sink)
            on = poisoned(rt)
            out, stats = on.empty(a.shape, dtypes.dtype(types[2])), on.empty(a_stats.shape, dtypes.float32)
            given = [rt.tensor(x) for x in (a, a_stats, b, b_stats)]
            learnable = rt.tensor(sinks) if softmax == "learnable" else None
            ops.attention_merge(on, *given, out=out, stats=stats, form=form, softmax=softmax, sink=learnable)
            compare(rt, out, want, form, types[2], (size, softmax))
            np.testing.assert_allclose(stats_by_token(rt.numpy(stats), form), logs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one", "learnable"])
def test_one_partial_is_rounded_and_gets_the_sink(rt, form, softmax):
    for number, size in enumerate(SIZES):
        a, a_stats = drawn(form, size, "float32", number)
        sinks = np.random.default_rng(number).uniform(-2, 4, size[2]).astype(np.float32)
        sink = {"vanilla": None, "off-by-one": np.zeros(size[2]), "learnable": sinks}[softmax]
        want, logs = merged([(a, a_stats)], form, sink)
        out = poisoned(rt).empty(a.shape, dtypes.bfloat16)
        t, stats = rt.tensor(a), rt.tensor(a_stats)
        learnable = rt.tensor(sinks) if softmax == "learnable" else None
        ops.attention_merge(
            rt, t, stats, None, None, out=out, stats=stats, form=form, softmax=softmax, sink=learnable
        )  # in place of its statistics
        compare(rt, out, want, form, "bfloat16", size)
        np.testing.assert_allclose(stats_by_token(rt.numpy(stats), form), logs, rtol=2e-6, atol=2e-6)
        if softmax == "vanilla":
            kept = ~np.isinf(a_stats)
            np.testing.assert_array_equal(rt.numpy(stats)[kept], a_stats[kept])


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
    a, a_stats = drawn(form, size, "float32", 1)
    b, b_stats = drawn(form, (3, 4, 2, width), "bfloat16", 2)
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


@pytest.mark.parametrize("width", [4104, 7, 128])
def test_statistics_in_place_of_their_own(rt, width):
    """Whoever writes a row's statistics waits for all who read them, also where many threads share a row."""
    size = (2, 40, 3, width)
    (a, a_stats), (b, b_stats) = (drawn("sbhd", size, "float32", i) for i in (0, 1))
    want, logs = merged([(a, a_stats), (b, b_stats)], "sbhd", None)
    total, stats = rt.tensor(a), rt.tensor(a_stats)
    ops.attention_merge(rt, total, stats, rt.tensor(b), rt.tensor(b_stats), out=total, stats=stats, form="sbhd")
    assert snr_db(rt.numpy(total), want) > DB["fp32"]
    np.testing.assert_allclose(stats_by_token(rt.numpy(stats), "sbhd"), logs, rtol=2e-6)


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


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_sums(rt, types):
    """Exactly: float32, rounded once. Of any shape and strides, in place, and without a second one."""
    for number, shape in enumerate([(7,), (3, 5), (4, 2, 8), (2, 3, 4, 16), (2, 2, 3, 2, 6), (3, 40000), (0, 4)]):
        rng = np.random.default_rng(number)
        a, b = (rng.standard_normal(shape).astype(numpy_dtype(t)) for t in types[:2])
        want = (a.astype(np.float32) + b.astype(np.float32)).astype(numpy_dtype(types[2]))
        for shift in (0, 1):
            out = placed(rt, np.zeros(shape, numpy_dtype(types[2])), shift)
            ops.context_sum(rt, placed(rt, a, shift), placed(rt, b, shift), out=out)
            np.testing.assert_array_equal(rt.numpy(out), want)
        ops.context_sum(rt, rt.tensor(a), None, out=out)
        np.testing.assert_array_equal(rt.numpy(out), a.astype(np.float32).astype(numpy_dtype(types[2])))


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sink_gradient(rt, form, dtype):
    for number, size in enumerate(SIZES):
        out, stats = drawn(form, size, dtype, number)
        dy = drawn(form, size, dtype, number + 50)[0]
        dy = np.where(np.isnan(dy.astype(np.float32)), 1, dy).astype(dy.dtype)
        by_token(dy, form)[np.isinf(stats_by_token(stats, form))] = np.nan
        sink = np.random.default_rng(number).uniform(-2, 4, size[2]).astype(np.float32)
        want = sink_grad(dy, out, stats, sink, form)
        given = [rt.tensor(x) for x in (dy, out, stats, sink)]
        got = ops.attention_sink_grad(poisoned(rt), *given, form=form)
        assert got.shape == sink.shape and got.dtype is dtypes.float32
        np.testing.assert_allclose(rt.numpy(got), want, rtol=1e-4, atol=1e-4)
        again = ops.attention_sink_grad(rt, *given, form=form)
        np.testing.assert_array_equal(rt.numpy(got), rt.numpy(again))


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


def test_refusals(rt):
    a, stats = rt.tensor(np.zeros((4, 2, 3, 8), np.float32)), rt.tensor(np.zeros((2, 3, 4), np.float32))
    bf16, fp16 = (rt.tensor(np.zeros((4, 2, 3, 8), numpy_dtype(t))) for t in ("bfloat16", "float16"))
    sink = rt.tensor(np.zeros(3, np.float32))
    for args, options, part in (
        ((a, stats, bf16, stats), {"out": fp16}, "one activation dtype"),
        ((a, stats, a, None), {"out": a}, "both or none"),
        ((a, a, None, None), {"out": a}, "a_stats"),
        ((a, stats, None, None), {"out": a, "form": "bhsd"}, "form"),
        ((a, stats, None, None), {"out": a, "form": "thd"}, "3 dimensions"),
        ((a, stats, None, None), {"out": a, "sink": sink}, "a sink with 'learnable'"),
        ((a, stats, None, None), {"out": a, "softmax": "learnable"}, "a sink with 'learnable'"),
        ((a, stats, None, None), {"out": a, "softmax": "learnable", "sink": stats}, "sink = "),
        ((half(a, 3, True), stats, None, None), {"out": a}, "one shape"),
    ):
        with pytest.raises(ArgumentError, match=part):
            ops.attention_merge(rt, *args, **{"stats": None, "form": "sbhd", **options})
    with pytest.raises(ArgumentError, match="1 to 5 dimensions"):
        ops.context_sum(rt, a.reshape(1, 1, 4, 2, 3, 8), None, out=a)
    with pytest.raises(ArgumentError, match="a = .*dtype"):
        ops.context_sum(rt, rt.tensor(np.zeros(3, np.int32)), None, out=sink)
    for dy, logs, part in ((bf16, stats, "dy = .*of dtype float32"), (a, a, "stats")):
        with pytest.raises(ArgumentError, match=part):
            ops.attention_sink_grad(rt, dy, a, logs, sink, form="sbhd")
