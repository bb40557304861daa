"""Lengths of chunks, rows between ranks, random numbers and maxima of context parallelism, one token at a time."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.ops.context import Span
from te_core.tensor import Tensor
from tests.backends import cuda_runtime, requires_cuda
from tests.core.inputs import numpy_dtype, placed, poisoned
from tests.reference.context import of_rank, places_of_rank, valid

SIZES = (1, 2, 3, 4, 8)


def batch(size, seed, count=None):
    """Running sums of lengths and of padded lengths, of 0 to `count` sequences, 0 and 1 and whole paddings included."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 9)) if count is None else count
    padded = rng.integers(0, 6, count) * 2 * size
    lengths = np.where(rng.random(count) < 0.2, padded, rng.integers(0, padded + 1))
    lengths = np.where(rng.random(count) < 0.2, np.minimum(padded, rng.integers(0, 2, count)), lengths)
    return [np.concatenate(([0], np.cumsum(x))).astype(np.int32) for x in (lengths, padded)]


def sums(rt, cu):
    return rt.tensor(np.asarray(cu, np.int32))


def spans_of(size):
    """Of each rank both chunks, the first and the second; runs of chunks in sequence order; a window's keys."""
    found = []
    for rank in range(size):
        late = 2 * size - 1 - rank
        first, second = (rank, rank + 1), (late, late + 1)
        found += [Span((first, second), size), Span((first,), size), Span((second,), size, 1)]
        found += [
            Span(((0, rank),)),
            Span(((rank + 1, late),), skip=rank + 1),
            Span(((late + 1, 2 * size),), 1, late + 1),
        ]
        found += [Span((first,), 1, rank, 2), Span((second,), 1, late, 7)]
    return tuple(found)


def check_lengths(got, spans, lengths, padded, size):
    """Each span against one position at a time."""
    count = len(lengths) - 1
    for i, span in enumerate(spans):
        running = [0]
        for s in range(count):
            n, whole = lengths[s + 1] - lengths[s], padded[s + 1] - padded[s]
            running.append(running[-1] + sum(valid(n, whole, size, run, span.before) for run in span.ranges))
        np.testing.assert_array_equal(got[2 * i], running)
        chunk = np.diff(padded) // (2 * size)
        places = [
            *(padded[:-1] // span.parts + np.maximum(span.skip * chunk - span.before, 0)),
            padded[-1] // span.parts,
        ]
        np.testing.assert_array_equal(got[2 * i + 1], places)


@pytest.mark.parametrize("size", SIZES)
def test_lengths_of_packed_sequences(rt, size):
    spans = spans_of(size)
    for seed in range(12):
        lengths, padded = batch(size, seed)
        got = ops.context_lengths(poisoned(rt), sums(rt, lengths), sums(rt, padded), size=size, spans=spans)
        assert got.dtype is dtypes.int32
        check_lengths(rt.numpy(got), spans, lengths, padded, size)
        alone = ops.context_lengths(rt, sums(rt, padded), size=size, spans=spans)
        check_lengths(rt.numpy(alone), spans, padded, padded, size)


@pytest.mark.parametrize("count", [1023, 1024, 2500])
def test_lengths_of_many_sequences(rt, count):
    lengths, padded = batch(2, 0, count)
    spans = spans_of(2)[:8]
    got = ops.context_lengths(rt, sums(rt, lengths), sums(rt, padded), size=2, spans=spans)
    check_lengths(rt.numpy(got), spans, lengths, padded, 2)


def test_lengths_of_more_spans_than_a_launch_takes(rt):
    lengths, padded = batch(32, 0, 3)
    spans = spans_of(32)
    assert len(spans) > 128
    got = ops.context_lengths(rt, sums(rt, lengths), sums(rt, padded), size=32, spans=spans)
    check_lengths(rt.numpy(got), spans, lengths, padded, 32)


@pytest.mark.parametrize("size", SIZES)
def test_lengths_of_rows(rt, size):
    """Dense: all rows are padded to one length, and places count from the begin of a row."""
    chunk = 5
    lengths = np.array([0, 1, 3, chunk * size, 2 * size * chunk, chunk * size + 1])
    cu = np.concatenate(([0], np.cumsum(lengths)))
    spans = spans_of(size)
    got = rt.numpy(ops.context_lengths(rt, sums(rt, cu), size=size, spans=spans, chunk=chunk))
    for i, span in enumerate(spans):
        want = [sum(valid(n, 2 * size * chunk, size, run, span.before) for run in span.ranges) for n in lengths]
        np.testing.assert_array_equal(np.diff(got[2 * i]), want)
        assert not got[2 * i, 0]
        np.testing.assert_array_equal(got[2 * i + 1], max(span.skip * chunk - span.before, 0))


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


def tokens_first(x, form):
    """[token, ..] of one dense row of the batch or of packed tokens; the batch second in both dense formats."""
    return x.swapaxes(0, 1) if form == "bshd" else x


def shape_of(form, tokens, heads, width, rows=2):
    return {"sbhd": (tokens, rows, heads, width), "bshd": (rows, tokens, heads, width), "thd": (tokens, heads, width)}[
        form
    ]


def numbered(shape, dtype):
    """Every element another one, as far as the type goes."""
    count = int(np.prod(shape))
    return (np.arange(count) % 251 + 1).astype(np.uint8).reshape(shape).view(np.uint8).astype(numpy_dtype(dtype))


def ranked(whole, form, size, padded):
    """What each rank holds of the whole, [size, ..], one token at a time; zeros for tokens of no sequence."""
    by_token = tokens_first(whole, form)
    count = by_token.shape[0] // size
    found = np.zeros((size, count, *by_token.shape[1:]), whole.dtype)
    for rank in range(size):
        places = of_rank(by_token.shape[0], size, rank) if padded is None else places_of_rank(padded, size, rank)
        found[rank, : len(places)] = by_token[places]
    return found.swapaxes(1, 2) if form == "bshd" else found


@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "float32", "float8_e4m3"])
def test_sequence_and_ranks(rt, form, dtype):
    for size in SIZES:
        for seed, (heads, width) in enumerate([(2, 16), (1, 3), (3, 8), (5, 130), (1, 4)]):
            padded = batch(size, seed)[1] if form == "thd" else None
            tail = size * (seed % 3)  # tokens of no sequence
            count = padded[-1] + tail if padded is not None else 6 * size
            whole = numbered(shape_of(form, count, heads, width), dtype)
            options = {"form": form, "size": size}
            if padded is not None:
                options["cu_seqlens_padded"] = sums(rt, padded)
            want = ranked(whole, form, size, padded)
            got = ops.context_rows(poisoned(rt), rt.tensor(whole), how="sequence_to_ranks", **options)
            np.testing.assert_array_equal(rt.numpy(got), want)
            back = ops.context_rows(poisoned(rt), got, how="ranks_to_sequence", **options)
            if tail and padded is not None:
                whole[padded[-1] :] = 0
            np.testing.assert_array_equal(rt.numpy(back), whole)


def test_a_part_of_each_sequence(rt):
    """The tensor in sequence order holds 1 / parts of each: two groups of an a2a inside of a ring."""
    parts, size = 3, 2
    padded = np.array([0, 12, 12, 48, 60], np.int32)
    whole = numbered((20, 2, 8), "bfloat16")
    options = {"form": "thd", "size": size, "cu_seqlens_padded": sums(rt, padded), "parts": parts}
    got = ops.context_rows(rt, rt.tensor(whole), how="sequence_to_ranks", **options)
    np.testing.assert_array_equal(rt.numpy(got), ranked(whole, "thd", size, padded // parts))
    back = ops.context_rows(rt, got, how="ranks_to_sequence", **options)
    np.testing.assert_array_equal(rt.numpy(back), whole)


@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "float32"])
def test_heads_and_ranks(rt, form, dtype):
    for size, heads, width in ((1, 3, 8), (2, 4, 16), (3, 6, 5), (4, 4, 64), (4, 2, 8), (4, 1, 3), (8, 16, 128)):
        whole = numbered(shape_of(form, 5, heads, width), dtype)
        got = ops.context_rows(poisoned(rt), rt.tensor(whole), how="heads_to_ranks", form=form, size=size)
        each = max(heads // size, 1)
        for rank in range(size):
            first = rank * heads // size
            np.testing.assert_array_equal(rt.numpy(got)[rank], whole[..., first : first + each, :])
        if heads >= size:
            back = ops.context_rows(poisoned(rt), got, how="ranks_to_heads", form=form, size=size)
            np.testing.assert_array_equal(rt.numpy(back), whole)


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


def splitmix(seed, number):
    """The finalizer, in Python's integers."""
    mask = (1 << 64) - 1
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


@pytest.mark.parametrize("seed", [0, 1234, -5, 2**63 - 1])
def test_draws_of_their_own(rt, seed):
    numbers = (0, 1, 7, 2**40, *range(100, 400))
    rng = rt.tensor(np.array([seed, 96], np.int64))
    got = rt.numpy(ops.context_draws(poisoned(rt), rng, numbers))
    np.testing.assert_array_equal(got[:, 0], [splitmix(seed, n) for n in numbers])
    assert (got[:, 1] == 96).all() and len(set(got[:, 0])) == len(numbers)
    assert ops.context_draws(rt, rng, ()).shape == (0, 2)


def test_largest(rt):
    parts = np.random.default_rng(0).standard_normal((5, 300)).astype(np.float32)
    parts[2, 3], parts[:, 4], parts[0, 5] = np.nan, -np.inf, np.inf
    for given in (parts, parts[:1], parts[:0]):
        want = np.fmax.reduce(given, axis=0, initial=-np.inf)
        np.testing.assert_array_equal(rt.numpy(ops.context_max(poisoned(rt), rt.tensor(given))), want)
        placed_in = rt.numpy(ops.context_max(poisoned(rt), rt.tensor(given), heads=900, first=300))
        np.testing.assert_array_equal(placed_in[300:600], want)
        assert np.isneginf(placed_in[:300]).all() and np.isneginf(placed_in[600:]).all()


# ------------------------------------------------------------------------------------------------------- refusals


def test_refusals(rt):
    cu, t = sums(rt, [0, 4, 8]), rt.tensor(np.zeros((4, 2, 3, 8), np.float32))
    span = Span(((0, 1),))
    for args, options, part in (
        ((t,), {}, "running sums"),
        ((cu, sums(rt, [0, 4])), {}, "cu_seqlens_padded"),
        ((cu, cu), {"chunk": 2}, "padded lengths in thd"),
        ((cu,), {"spans": (Span(((0, 5),)),)}, r"within \[0, 4\]"),
        ((cu,), {"spans": (Span(((0, 1),), 0),)}, "parts from 1"),
        ((cu,), {"spans": (Span(()),)}, "one or two ranges"),
        ((cu,), {"size": 0, "spans": ()}, "number of ranks"),
    ):
        with pytest.raises(ArgumentError, match=part):
            ops.context_lengths(rt, *args, **{"size": 2, "spans": (span,), **options})
    for options, part in (
        ({"how": "ranks"}, "how"),
        ({"form": "bhsd"}, "form"),
        ({"how": "heads_to_ranks"}, "3 heads for 2 ranks"),
        ({"how": "sequence_to_ranks", "size": 4}, "4 tokens for 4 ranks"),
        ({"how": "ranks_to_sequence"}, "5 dimensions"),
        ({"cu_seqlens_padded": cu}, "where thd changes its order"),
        ({"form": "thd"}, "3 dimensions"),
        ({"out": t}, "out = "),
        ({"parts": 2}, "parts"),
    ):
        with pytest.raises(ArgumentError, match=part):
            ops.context_rows(rt, t, **{"how": "sequence_to_ranks", "form": "sbhd", "size": 2, **options})
    if rt.device.kind == "cpu":
        with pytest.raises(ArgumentError, match="sequences within the tokens"):
            options = {"how": "sequence_to_ranks", "form": "thd", "size": 2, "cu_seqlens_padded": cu}
            ops.context_rows(rt, rt.tensor(np.zeros((4, 3, 8), np.float32)), **options)
    with pytest.raises(ArgumentError, match="integers from 0 on"):
        ops.context_draws(rt, rt.tensor(np.zeros(2, np.int64)), (-1,))
    with pytest.raises(ArgumentError, match="heads among the whole's"):
        ops.context_max(rt, rt.tensor(np.zeros((1, 4), np.float32)), heads=6, first=3)
    with pytest.raises(ArgumentError, match="floats"):
        ops.context_mark(rt, rt.tensor(np.zeros((4, 1, 1), np.int32)), cu, size=1)


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
