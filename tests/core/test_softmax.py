"""Softmax of attention scores on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from te_core import ops
from te_core.errors import ArgumentError
from te_core.ops.softmax import Band, band_of
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.backends import cuda_runtime, requires_cuda
from tests.core.inputs import DTYPES, numpy_dtype, placed, poisoned
from tests.reference import softmax as reference

#: Half a unit in the last place, and what float32 exponentials and sums add to it.
ROUNDING = {"float32": 1e-6, "bfloat16": 2.0**-8 * 1.01, "float16": 2.0**-11 * 1.01}
ABSOLUTE = {"float32": 1e-37, "bfloat16": 1e-37, "float16": 2.0**-25}  # the smallest steps that a type can take

LENGTHS = [(5, 9), (0, 4), (7, 0), (3, 7)]
# shape, dtype, band, lengths, mask shape, sink
CASES: list[Any] = [
    ((2, 3, 5, 8), "float32", Band(), None, None, False),
    ((1, 2, 4, 2048), "bfloat16", Band(), None, None, False),
    ((2, 2, 3, 1000), "float16", Band(), None, (2, 1, 1, 1000), False),
    ((1, 4, 33, 33), "bfloat16", Band(-1, 0, False), None, None, True),
    ((2, 1, 5, 40), "float32", Band(-1, 0, True), None, None, False),
    ((1, 2, 40, 24), "float16", Band(3, 0, True), None, None, True),
    ((2, 3, 17, 64), "bfloat16", Band(5, 2, False), None, (1, 3, 17, 64), False),
    ((1, 1, 9, 136), "float32", Band(0, 7, True), None, (1, 1, 9, 136), True),
    ((4, 2, 8, 16), "bfloat16", Band(-1, 0, True), LENGTHS, None, False),
    ((4, 3, 7, 11), "float32", Band(2, 1, False), LENGTHS, (4, 1, 7, 11), True),
    ((4, 1, 9, 72), "float16", Band(), LENGTHS, None, True),
    ((1, 2, 2, 33000), "bfloat16", Band(-1, 0, True), None, None, True),
    ((1, 1, 2, 40000), "float32", Band(), None, (1, 1, 2, 40000), False),
    ((1, 1, 3, 16385), "float16", Band(), None, None, False),
    ((3, 2, 4, 1), "float32", Band(), None, None, True),
    ((0, 2, 4, 8), "float32", Band(), None, None, True),
    ((2, 2, 3, 0), "bfloat16", Band(), None, None, False),
    ((1, 1, 1000, 12), "bfloat16", Band(), None, None, False),
    ((1, 1, 3, 4104), "bfloat16", Band(100, -1, True), None, None, False),
]


def cumulated(rt: Runtime, lengths: Any, which: int) -> Any:
    return None if lengths is None else placed(rt, np.cumsum([0, *[n[which] for n in lengths]]).astype(np.int32))


def close(value: Any, expected: np.ndarray, dtype: str, scale: Any = None) -> None:
    """Within the rounding of the result, or of `scale`, the size of the terms it is a sum of."""
    value = np.asarray(value).astype(np.float64)
    assert value.shape == expected.shape
    size = np.abs(expected) if scale is None else scale
    assert (np.abs(value - expected) <= ROUNDING[dtype] * size + ABSOLUTE[dtype]).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_softmax(rt: Runtime, case: Any) -> None:
    shape, dtype, band, lengths, mask_shape, has_sink = case
    rt, rng = poisoned(rt), np.random.default_rng([7, *shape])
    # Small exponents: float32's own error in exp(v - m) grows with v.
    x = (rng.standard_normal(shape) * 2).astype(numpy_dtype(dtype))
    dy = rng.standard_normal(shape).astype(x.dtype)
    mask = None if mask_shape is None else rng.random(mask_shape) < 0.3
    sink = rng.standard_normal(shape[1]).astype(np.float32) if has_sink else None
    scale = 0.37
    visible = reference.seen(
        shape, left=band.left, right=band.right, bottom_right=band.bottom_right, lengths=lengths, mask=mask
    )
    expected, share = reference.softmax(x, visible, scale, sink)
    cu = {"cu_seqlens_q": cumulated(rt, lengths, 0), "cu_seqlens_kv": cumulated(rt, lengths, 1)}
    for offset in (0, 1):
        y, kept = ops.softmax_forward(
            rt,
            placed(rt, x, offset),
            scale=scale,
            band=band,
            mask=None if mask is None else placed(rt, mask, offset),
            sink=None if sink is None else placed(rt, sink),
            **cu,
        )
        host = rt.numpy(y)
        close(host, expected, dtype)
        assert (host[~visible] == 0).all()
        assert (kept is None) == (sink is None)
        dx, dsink = ops.softmax_backward(
            rt, placed(rt, dy, offset), placed(rt, host, offset), kept, scale=scale, band=band, **cu
        )
        weights = host.astype(np.float64)
        own = share if kept is None else rt.numpy(kept).transpose(0, 2, 1).astype(np.float64)
        close(own, share, "float32")
        expected_dx, expected_dsink = reference.gradients(dy, weights, own, scale)
        terms = np.abs(weights * dy.astype(np.float64))
        size = scale * (terms + weights * terms.sum(axis=-1, keepdims=True))
        close(rt.numpy(dx), expected_dx, dtype, np.abs(expected_dx) + (1e-6 / ROUNDING[dtype]) * size)
        if dsink is not None:
            total = (terms.sum(axis=-1) * own).sum(axis=(0, 2))
            close(rt.numpy(dsink), expected_dsink, "float32", total)


def test_gradients_are_differences(rt: Runtime) -> None:
    """dx and dsink against finite differences of the forward formula in float64."""
    rng = np.random.default_rng(8)
    shape, scale, step = (1, 2, 3, 6), 0.7, 1e-6
    x, w = rng.standard_normal((2, *shape)).astype(np.float32)
    sink = rng.standard_normal(2).astype(np.float32)
    visible = reference.seen(shape, right=0, bottom_right=True)
    band = band_of("bottom_right")

    def loss(x: np.ndarray, sink: np.ndarray) -> float:
        return float((reference.softmax(x, visible, scale, sink)[0] * w).sum())

    y, share = ops.softmax_forward(rt, rt.tensor(x), scale=scale, band=band, sink=rt.tensor(sink))
    dx, dsink = ops.softmax_backward(rt, rt.tensor(w), y, share, scale=scale, band=band)
    for got, which in ((rt.numpy(dx), 0), (rt.numpy(dsink), 1)):
        for index in np.ndindex(got.shape):
            values = [], []
            for sign in (1, -1):
                arguments = [x.astype(np.float64), sink.astype(np.float64)]
                arguments[which][index] += sign * step
                values[0].append(loss(*arguments))
            slope = (values[0][0] - values[0][1]) / (2 * step)
            assert got[index] == pytest.approx(slope, abs=2e-6)


def test_hidden_scores_do_not_matter(rt: Runtime) -> None:
    """NaN and infinity where nothing looks: behind the diagonal, behind the lengths, under the mask."""
    x = np.random.default_rng(9).standard_normal((2, 1, 6, 24)).astype(np.float32)
    mask = np.zeros((2, 1, 1, 24), np.bool_)
    mask[..., 2:5] = True
    lengths = [(6, 20), (4, 24)]
    visible = reference.seen(x.shape, left=9, right=0, bottom_right=True, lengths=lengths, mask=mask)
    spoilt = np.where(visible, x, np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), x.shape))
    options = {"band": band_of("bottom_right", 9), "cu_seqlens_q": cumulated(rt, lengths, 0)}
    options["cu_seqlens_kv"] = cumulated(rt, lengths, 1)
    y, y_spoilt = (
        rt.numpy(ops.softmax_forward(rt, rt.tensor(t), mask=rt.tensor(mask), **options)[0]) for t in (x, spoilt)
    )
    np.testing.assert_array_equal(y, y_spoilt)
    free = reference.seen(x.shape, left=9, right=0, bottom_right=True, lengths=lengths)
    dy = np.where(free, x, np.nan)
    dx, dx_spoilt = (rt.numpy(ops.softmax_backward(rt, rt.tensor(g), rt.tensor(y), **options)[0]) for g in (x, dy))
    np.testing.assert_array_equal(dx, dx_spoilt)


def test_a_seen_nan_shows(rt: Runtime) -> None:
    x = np.zeros((1, 1, 3, 8), np.float32)
    x[0, 0, 1, 5] = np.nan
    y = rt.numpy(ops.softmax_forward(rt, rt.tensor(x))[0])
    assert np.isnan(y[0, 0, 1]).any()
    np.testing.assert_allclose(y[0, 0, [0, 2]], 1 / 8, rtol=1e-6)


def test_large_scores_do_not_overflow(rt: Runtime) -> None:
    x = np.array([[[[3e38, -3e38, 3e38], [-3e38, -3e38, -3e38]]]], np.float32)
    sink = rt.tensor(np.array([1e38], np.float32))
    np.testing.assert_allclose(rt.numpy(ops.softmax_forward(rt, rt.tensor(x))[0])[0, 0, 0], [0.5, 0, 0.5])
    y, share = ops.softmax_forward(rt, rt.tensor(x), sink=sink)
    np.testing.assert_allclose(rt.numpy(y)[0, 0], [[0.5, 0, 0.5], [0, 0, 0]])
    np.testing.assert_allclose(rt.numpy(share).reshape(-1), [0, 1])


def test_rows_of_no_scores_are_the_sinks(rt: Runtime) -> None:
    rt, sink = poisoned(rt), rt.tensor(np.array([-1, 0, 30], np.float32))
    x = rt.tensor(np.zeros((2, 3, 5, 0), np.float32))
    y, share = ops.softmax_forward(rt, x, sink=sink)
    assert y.shape == x.shape and (rt.numpy(share) == 1).all()
    assert not rt.numpy(ops.softmax_backward(rt, y, y, share)[1]).any()


def test_in_place_and_repeatable(rt: Runtime) -> None:
    rng = np.random.default_rng(10)
    x = rng.standard_normal((3, 4, 37, 48)).astype(numpy_dtype("bfloat16"))
    sink = rt.tensor(rng.standard_normal(4).astype(np.float32))
    first, share = ops.softmax_forward(rt, placed(rt, x), sink=sink)
    t = placed(rt, x)
    again, _ = ops.softmax_forward(rt, t, sink=sink, out=t)
    assert again is t
    np.testing.assert_array_equal(rt.numpy(first).view(np.uint16), rt.numpy(t).view(np.uint16))
    sums = [rt.numpy(ops.softmax_backward(rt, placed(rt, x), first, share)[1]) for _ in range(3)]
    np.testing.assert_array_equal(sums[0], sums[1])
    np.testing.assert_array_equal(sums[0], sums[2])


@requires_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_equals_cpu(dtype: str) -> None:
    """Within a unit in the last place; both ways of holding a row."""
    rng, cuda, cpu = np.random.default_rng(11), cuda_runtime(), Runtime.cpu()
    for cols in (1024, 40000):
        x = (rng.standard_normal((1, 2, 3, cols)) * 3).astype(numpy_dtype(dtype))
        ours, theirs = (rt.numpy(ops.softmax_forward(rt, placed(rt, x), scale=0.5)[0]) for rt in (cuda, cpu))
        close(ours, theirs.astype(np.float64), dtype, 2 * np.abs(theirs.astype(np.float64)))


def test_every_row_has_a_team() -> None:
    from te_core.backends.cuda.softmax import team_of

    for cols in (0, 1, 2, 7, 8, 16, 24, 100, 1000, 1024, 4096, 16384, 32768, 32776, 65536, 100003):
        for itemsize in (2, 4):
            for alignment in (0, itemsize, 8):
                team = team_of(cols, itemsize, alignment)
                assert cols % team.width == 0
                assert alignment % (team.width * itemsize) == 0
                assert team.size * team.teams % 32 == 0
                assert team.size <= 1024
                assert team.iters == 0 or team.size * team.iters * team.width >= cols
                assert team.iters * team.width <= 32


def test_arguments(rt: Runtime) -> None:
    x = rt.tensor(np.zeros((2, 3, 4, 8), np.float32))
    cu = rt.tensor(np.zeros(3, np.int32))
    for message, wrong in [
        ("mask", {"mask": rt.tensor(np.zeros((2, 1, 4, 1), np.bool_))}),
        ("mask", {"mask": rt.tensor(np.zeros((2, 1, 4, 8), np.float32))}),
        ("both or none", {"cu_seqlens_q": cu}),
        ("cu_seqlens_kv", {"cu_seqlens_q": cu, "cu_seqlens_kv": rt.tensor(np.zeros(2, np.int32))}),
        ("sink", {"sink": rt.tensor(np.zeros(2, np.float32))}),
        ("window", {"band": Band(-2, 0)}),
        ("out = .*float16", {"out": rt.tensor(np.zeros((2, 3, 4, 8), np.float16))}),
    ]:
        with pytest.raises(ArgumentError, match=message):
            ops.softmax_forward(rt, x, **wrong)
    with pytest.raises(ArgumentError, match="causal"):
        band_of("upper")
    with pytest.raises(ArgumentError, match="dy"):
        ops.softmax_backward(rt, rt.tensor(np.zeros((2, 3, 4, 7), np.float32)), x)


def test_a_plan_hides_no_wrong_argument(rt: Runtime) -> None:
    """Refused as well where the right call has made a plan of the same shapes before."""
    x, cu = rt.tensor(np.zeros((2, 3, 4, 8), np.float32)), rt.tensor(np.zeros(3, np.int32))
    half, long = rt.tensor(np.zeros((2, 3, 4, 8), np.float16)), rt.tensor(np.zeros(3, np.int64))
    sink = rt.tensor(np.zeros(3, np.float32))
    y, share = ops.softmax_forward(rt, x, cu_seqlens_q=cu, cu_seqlens_kv=cu, sink=sink)
    ops.softmax_backward(rt, y, y, share)
    ops.softmax_forward(rt, x, out=rt.tensor(np.zeros((2, 3, 4, 8), np.float32)))
    wide = Tensor(x.ptr, (2, 3, 4, 4), x.dtype, x.device, x, (96, 32, 8, 2))
    ops.softmax_forward(rt, rt.tensor(np.zeros((2, 3, 4, 4), np.float32)))
    for call in (
        lambda: ops.softmax_forward(rt, x, out=half),
        lambda: ops.softmax_forward(rt, wide),
        lambda: ops.softmax_forward(rt, x, cu_seqlens_q=long, cu_seqlens_kv=cu, sink=sink),
        lambda: ops.softmax_backward(rt, half, y, share),
    ):
        with pytest.raises(ArgumentError):
            call()
