"""Activations forward and backward against float64, and their fused casts against the unfused ones."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.ops.activation import GATED, KINDS, Clamp
from tests.backends import cuda_runtime, requires_cuda
from tests.core.covering_lists import covering_lists
from tests.core.inputs import DTYPES, FP8, codes, numpy_dtype, placed, poisoned
from tests.core.test_quantize import ORIENTATIONS, make_cast
from tests.reference import activation as ref
from tests.reference import quantize as ref_quantize
from tests.reference.rounding import spacing

#: (rows, columns of the result); gated inputs have twice the columns.
SHAPES = [(1, 1), (5, 24), (17, 33), (0, 16), (16, 0), (33, 72), (130, 264), (64, 128)]
# A result in 16 bits is the float32 one rounded: within one unit in the last place. In float32, 2e-6 of the value,
# and of a thousandth of its argument where the sigmoid is smaller than that (its exponent's own rounding counts there).
RELATIVE = 2e-6


def draw(shape, kind, dtype, seed):
    """x and dy: normal numbers of width 3, so that the tails of the sigmoid are met."""
    rng = np.random.default_rng(seed)
    width = shape[1] * (2 if kind in GATED else 1)
    x = (3 * rng.standard_normal((shape[0], width))).astype(numpy_dtype(dtype))
    return x, rng.standard_normal(shape).astype(numpy_dtype(dtype))


def gate_of(kind, x):
    """The size that the activation's own value is multiplied by (of clamped_swiglu: plus its offset)."""
    if kind == "clamped_swiglu":
        return np.abs(x.astype(np.float64))[:, x.shape[1] // 2 :] + 1
    return np.abs(x.astype(np.float64))[:, x.shape[1] // 2 :] if kind in GATED else 1.0


def argument_of(kind, x):
    return np.abs(x.astype(np.float64))[:, : x.shape[1] // (2 if kind in GATED else 1)]


def check(got, exact, slack, dtype):
    error = np.abs(got.astype(np.float64) - exact)
    bound = RELATIVE * (np.abs(exact) + slack)
    if dtype != "float32":
        bound = bound + spacing(exact, numpy_dtype(dtype))
    assert (error <= bound).all(), f"worst {np.nanmax(error / bound)}"


@covering_lists(pytest.mark.parametrize("kind", KINDS), pytest.mark.parametrize("dtype", DTYPES))
def test_forward(rt, kind, dtype):
    rt = poisoned(rt)
    for i, shape in enumerate(SHAPES):
        x, _ = draw(shape, kind, dtype, i)
        y, q = ops.activation_forward(rt, placed(rt, x, i % 2), kind)
        assert q is None
        check(rt.numpy(y), ref.forward(kind, x), 1e-3 * argument_of(kind, x) * gate_of(kind, x), dtype)


@covering_lists(pytest.mark.parametrize("kind", KINDS), pytest.mark.parametrize("dtype", DTYPES))
def test_backward(rt, kind, dtype):
    rt = poisoned(rt)
    for i, shape in enumerate(SHAPES):
        x, dy = draw(shape, kind, dtype, i)
        sums = rt.empty((x.shape[1],), dtypes.dtype(("float32", dtype)[i % 2]))
        dx, q = ops.activation_backward(rt, placed(rt, dy, i % 2), placed(rt, x), kind, column_sum=sums)
        assert q is None
        got = rt.numpy(dx)
        # s + x s (1 - s) z' cancels near its zero: its terms, not their sum, carry the error.
        slack = np.abs(dy.astype(np.float64)) * gate_of(kind, x)
        if kind in GATED:
            slack = np.concatenate([slack, 1e-3 * np.abs(dy.astype(np.float64)) * argument_of(kind, x)], axis=1)
        check(got, ref.backward(kind, dy, x), slack, dtype)
        # The sums are those of the rounded dx.
        exact, terms = got.astype(np.float64).sum(axis=0), np.abs(got.astype(np.float64)).sum(axis=0)
        summed = rt.numpy(sums)
        eps = float(ml_dtypes.finfo(summed.dtype).eps)
        assert (np.abs(summed.astype(np.float64) - exact) <= 1e-5 * terms + eps * np.abs(exact)).all()


@covering_lists(pytest.mark.parametrize("kind", KINDS), pytest.mark.parametrize("dtype", DTYPES))
def test_fused_equals_unfused(rt, kind, dtype):
    """A cast starts from the rounded value: the same bytes, scale and amax as quantize gives on that value."""
    rt = poisoned(rt)
    for i, shape in enumerate(SHAPES):
        x, dy = draw(shape, kind, dtype, i)
        x_there, dy_there = placed(rt, x), placed(rt, dy)
        for j in range(3):
            options = {"scale": (3.0, None, 0.1)[j], "power_of_two": i % 2 == 0, "amax": 0.0 if i % 3 else None}
            orientation, fp8 = ORIENTATIONS[(i + j) % 3], FP8[(i + j) % 2]
            casts = [make_cast(rt, fp8, orientation, **options) for _ in range(4)]
            alone, none = ops.activation_forward(rt, x_there, kind)
            kept, fused = ops.activation_forward(rt, x_there, kind, cast=casts[0], keep=j == 0)
            assert none is None and (kept is not None) == (j == 0)
            check_same(rt, alone, kept, fused, casts[0], casts[1])
            sums = [rt.empty((x.shape[1],), dtypes.float32) for _ in range(2)]
            alone, _ = ops.activation_backward(rt, dy_there, x_there, kind)
            kept, fused = ops.activation_backward(
                rt, dy_there, x_there, kind, cast=casts[2], keep=j != 0, column_sum=sums[0] if i % 2 else None
            )
            check_same(rt, alone, kept, fused, casts[2], casts[3])
            if i % 2:  # the column sums: of the same values, whatever else is delivered, and the same every time
                ops.activation_backward(rt, dy_there, x_there, kind, cast=casts[2], column_sum=sums[1])
                once, again = rt.numpy(sums[0]), rt.numpy(sums[1])
                np.testing.assert_array_equal(once, again)
                values = rt.numpy(alone).astype(np.float64)
                assert (np.abs(once - values.sum(axis=0)) <= 1e-5 * np.abs(values).sum(axis=0)).all()


def check_same(rt, alone, kept, fused, fused_cast, plain_cast):
    if kept is not None:
        np.testing.assert_array_equal(rt.numpy(kept).view(np.uint8), rt.numpy(alone).view(np.uint8))
    plain = ops.quantize(rt, alone, plain_cast)
    for name in ("rowwise", "columnwise"):
        np.testing.assert_array_equal(*(codes(rt, getattr(q, name)) for q in (fused, plain)))
    np.testing.assert_array_equal(rt.numpy(fused.scale_inv), rt.numpy(plain.scale_inv))
    if plain_cast.amax is not None:
        largest = rt.numpy(fused_cast.amax)[0]
        assert largest == rt.numpy(plain_cast.amax)[0] == ref_quantize.amax(rt.numpy(alone))


@pytest.mark.parametrize("kind", KINDS)
def test_extremes(rt, kind):
    """Far arguments neither overflow inside nor come out as NaN; a NaN comes out as one."""
    for dtype in DTYPES:
        check_extremes(rt, kind, dtype)


def check_extremes(rt, kind, dtype):
    far = np.array([[-3e4, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 200.0, 3e4]])
    far = np.concatenate([far, np.ones_like(far)], axis=1) if kind in GATED else far
    x = far.astype(numpy_dtype(dtype))
    dy = np.ones((1, 10), x.dtype)
    y, _ = ops.activation_forward(rt, placed(rt, x), kind)
    dx, _ = ops.activation_backward(rt, placed(rt, dy), placed(rt, x), kind)
    top = float(ml_dtypes.finfo(x.dtype).max)
    for got, exact in ((rt.numpy(y), ref.forward(kind, x)), (rt.numpy(dx), ref.backward(kind, dy, x))):
        got = got.astype(np.float64)
        fits = np.abs(exact) < top  # srelu of 3e4 is beyond float16
        assert np.isfinite(got[fits]).all() and (np.abs(got[~fits]) == np.inf).all()
        bound = 2 * spacing(exact, x.dtype) + 1e-4 * np.abs(exact) + 1e-30
        assert (np.abs(got - exact) <= bound)[fits].all()
    x[0, 3] = np.nan
    y, _ = ops.activation_forward(rt, placed(rt, x), kind)
    assert np.isnan(rt.numpy(y).astype(np.float32)).sum() == 1


CLAMPS = [Clamp(), Clamp(1.5, 1.0, 0.0), Clamp(0.0, 2.0, -0.25), Clamp(3.0, -0.5, 2.0)]


@covering_lists(pytest.mark.parametrize("clamp", CLAMPS), pytest.mark.parametrize("dtype", DTYPES))
def test_clamped_swiglu(rt, clamp, dtype):
    """Its parameters are values of the call; a value at the limit still has a gradient, one beyond it has none."""
    rt, formula = poisoned(rt), ref.Clamped(*clamp)
    for i, shape in enumerate(SHAPES):
        x, dy = draw(shape, "clamped_swiglu", dtype, i)
        if x.size:
            x[0, 0], x[0, shape[1]] = clamp.limit, -clamp.limit
        x_there, dy_there = placed(rt, x, i % 2), placed(rt, dy)
        y, _ = ops.activation_forward(rt, x_there, "clamped_swiglu", clamp=clamp)
        gate = gate_of("clamped_swiglu", x) + abs(clamp.offset)
        check(rt.numpy(y), formula.forward(x), 1e-2 * argument_of("clamped_swiglu", x) * gate, dtype)
        dx, _ = ops.activation_backward(rt, dy_there, x_there, "clamped_swiglu", clamp=clamp)
        got = rt.numpy(dx)
        size = np.abs(dy.astype(np.float64)) * (1 + argument_of("clamped_swiglu", x))
        check(got, formula.backward(dy.astype(np.float64), x), np.concatenate([size * gate, size], axis=1), dtype)
        beyond = np.concatenate([x[:, : shape[1]] > clamp.limit, np.abs(x[:, shape[1] :]) > clamp.limit], axis=1)
        assert not got[beyond].any()
        for kept in (True, False):  # the parameters reach the fused cast, too
            casts = [
                make_cast(rt, FP8[i % 2], ORIENTATIONS[i % 3], scale=(3.0, None)[kept], power_of_two=False, amax=0.0)
                for _ in range(4)
            ]
            also, fused = ops.activation_forward(rt, x_there, "clamped_swiglu", clamp=clamp, cast=casts[0], keep=kept)
            check_same(rt, y, also, fused, casts[0], casts[1])
            also, fused = ops.activation_backward(
                rt, dy_there, x_there, "clamped_swiglu", clamp=clamp, cast=casts[2], keep=kept
            )
            check_same(rt, dx, also, fused, casts[2], casts[3])


def test_clamp_is_checked(rt):
    x = rt.tensor(np.ones((3, 14), np.float32))
    for kind, clamp in (("swiglu", Clamp()), ("clamped_swiglu", Clamp(limit=-1.0))):
        with pytest.raises(ArgumentError, match="limit"):
            ops.activation_forward(rt, x, kind, clamp=clamp)


@requires_cuda
def test_cuda_agrees_with_cpu():
    """On a matrix of many tiles: within one unit in the last place of bf16."""
    from te_core.runtime import Runtime

    for kind in KINDS:
        x, dy = draw((384, 1024), kind, "bfloat16", 1)
        results = []
        for rt in (Runtime.cpu(), cuda_runtime()):
            y, _ = ops.activation_forward(rt, placed(rt, x), kind)
            dx, _ = ops.activation_backward(rt, placed(rt, dy), placed(rt, x), kind)
            results.append((rt.numpy(y).astype(np.float64), rt.numpy(dx).astype(np.float64)))
        for a, b in zip(*results, strict=True):
            assert (np.abs(a - b) <= spacing(np.maximum(np.abs(a), np.abs(b)), numpy_dtype("bfloat16")) + 1e-5).all()
