"""Residual add, and dropout with the mask of Philox4x32-10."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.runtime import Runtime
from tests.backends import cuda_runtime, requires_cuda
from tests.core.inputs import DTYPES, SHAPES, numpy_dtype, placed, poisoned, values
from tests.reference.elementwise import keep, philox

P = (0.0, 0.1, 0.5, 0.9)


def test_reference_known_answers():
    """The vectors that the generator's authors publish with it (Random123, kat_vectors)."""
    ones = 0xFFFFFFFF
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)) == (
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    )


def rng_of(rt, seed, offset):
    return rt.tensor(np.array([seed, offset], np.uint64).view(np.int64))


def test_known_answer(rt):
    """The published words decide the mask: kept at p = word / 2^32, dropped one step above."""
    words = philox((0, 0, 0, 0), (0, 0))
    x = placed(rt, np.ones((1, 4), np.float32))
    for i, word in enumerate(words):
        for step, kept in ((0, True), (1, False)):
            out = ops.bias_dropout_add(rt, x, None, None, p=(word + step) / 2**32, rng=rng_of(rt, 0, 0))
            assert (rt.numpy(out)[0, i] != 0) == kept


def expected_sum(x, bias, residual, p, mask):
    """In float32, in the order of the contract; rounded once at the end."""
    f = x.astype(np.float32)
    if bias is not None:
        f = f + bias.astype(np.float32)
    if p > 0:
        f = np.where(mask, f * np.float32(1 / (1 - p)), np.float32(0))
    if residual is not None:
        f = f + residual.astype(np.float32)
    with np.errstate(over="ignore"):
        return f.astype(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_dropout_add(rt, dtype):
    rt = poisoned(rt)
    for i, shape in enumerate(SHAPES):
        if np.prod(shape) > 20_000 and DTYPES[i % 3] != dtype:
            continue  # the reference draws number by number: one dtype for each large matrix
        x, residual, bias = (values(shape, dtype, i), values(shape, dtype, i + 50), values(shape[1:], dtype, i + 90))
        bias, residual, p = (None if i % 4 == 1 else bias), (None if i % 4 == 2 else residual), P[i % 4]
        seed, offset, site = 2**64 - 1 - i, (i << 40) + 12345, (i * 0x9E3779B9) & 0x7FFFFFFF
        mask = keep(x.size, p, seed, offset, site).reshape(shape)
        rng = rng_of(rt, seed, offset)
        for shift in (0, 1):
            out = ops.bias_dropout_add(
                rt,
                placed(rt, x, shift),
                None if bias is None else placed(rt, bias),
                None if residual is None else placed(rt, residual),
                p=p,
                rng=rng,
                site=site,
            )
            expected = expected_sum(x, bias, residual, p, mask)
            np.testing.assert_array_equal(rt.numpy(out).astype(np.float32), expected.astype(np.float32))
            # Backward draws the same mask.
            sums = rt.empty((shape[1],), dtypes.dtype((dtype, "float32")[i % 2]))
            dx = rt.numpy(
                ops.bias_dropout_add_backward(rt, placed(rt, x, shift), p=p, rng=rng, site=site, column_sum=sums)
            )
            expected = expected_sum(x, None, None, p, mask)
            np.testing.assert_array_equal(dx.astype(np.float32), expected.astype(np.float32))
            exact, terms = dx.astype(np.float64).sum(axis=0), np.abs(dx.astype(np.float64)).sum(axis=0)
            eps = 2.0**-7 if i % 2 == 0 and dtype != "float32" else 0.0
            assert (np.abs(rt.numpy(sums).astype(np.float64) - exact) <= 1e-5 * terms + eps * np.abs(exact)).all()


def test_dropped_infinity(rt):
    """A dropped infinity is zero, not NaN."""
    x = np.full((8, 64), np.inf, np.float32)
    rng = rng_of(rt, 1, 2)
    for got in (
        rt.numpy(ops.bias_dropout_add(rt, placed(rt, x), None, None, p=0.5, rng=rng)),
        rt.numpy(ops.bias_dropout_add_backward(rt, placed(rt, x), p=0.5, rng=rng)),
    ):
        assert set(np.unique(got)) == {0.0, np.inf}


def test_everything_dropped(rt):
    """A probability of one keeps nothing, finite or not."""
    x = placed(rt, np.array([[np.inf, np.nan, -2.0, 3.0] * 128] * 64, np.float32))
    rng, sums = rng_of(rt, 3, 4), placed(rt, np.ones(512, np.float32))
    assert not rt.numpy(ops.bias_dropout_add(rt, x, None, None, p=1.0, rng=rng)).any()
    assert not rt.numpy(ops.bias_dropout_add_backward(rt, x, p=1.0, rng=rng, column_sum=sums)).any()
    assert not rt.numpy(sums).any()
    with pytest.raises(ArgumentError, match="p=1.5"):
        ops.bias_dropout_add(rt, x, None, None, p=1.5, rng=rng)


def test_statistics(rt):
    """The kept share is 1 - p within five sigma, in every column as over all; seed, offset and site each count."""
    rows, cols = 1024, 512
    x = placed(rt, np.ones((rows, cols), np.float32))

    def mask(p, seed=1, offset=2, site=3):
        return rt.numpy(ops.bias_dropout_add(rt, x, None, None, p=p, rng=rng_of(rt, seed, offset), site=site)) != 0

    for p in (0.05, 0.5, 0.8):
        kept = mask(p)
        sigma = np.sqrt(p * (1 - p))
        assert abs(kept.mean() - (1 - p)) < 5 * sigma / np.sqrt(rows * cols)
        assert np.abs(kept.mean(axis=0) - (1 - p)).max() < 5.5 * sigma / np.sqrt(rows)
        assert np.abs(kept.mean(axis=1) - (1 - p)).max() < 5.5 * sigma / np.sqrt(cols)
    one = mask(0.5)
    np.testing.assert_array_equal(one, mask(0.5))
    others = [
        mask(0.5, **{name: value})
        for name, value in (("seed", 2), ("seed", 1 + (1 << 32)), ("offset", 3), ("offset", 2 + (1 << 32)), ("site", 4))
    ]
    for other in (*others, np.roll(one, 1, axis=0), np.roll(one, 1, axis=1)):
        assert abs((one == other).mean() - 0.5) < 5 * 0.5 / np.sqrt(rows * cols)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add(rt, dtype):
    rt = poisoned(rt)
    for i, shape in enumerate([*SHAPES, (7,), (3, 4, 5)]):
        a, b = values(shape, dtype, i, special=i % 3 == 2), values(shape, dtype, i + 50)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = (a.astype(np.float32) + b.astype(np.float32)).astype(numpy_dtype(dtype)).astype(np.float32)
        for shift in (0, 1):
            one, two = placed(rt, a, shift), placed(rt, b)
            np.testing.assert_array_equal(rt.numpy(ops.add(rt, one, two)).astype(np.float32), expected)
            for out in (two, one):  # in place, into either
                kept = rt.numpy(out)
                np.testing.assert_array_equal(rt.numpy(ops.add(rt, one, two, out=out)).astype(np.float32), expected)
                rt.backend.copy_from_host(rt, kept, out)


@requires_cuda
def test_cuda_equals_cpu():
    """Bit for bit, over several strips."""
    for dtype in DTYPES:
        for shape in ((300, 1048), (77, 333)):
            x, residual, bias = values(shape, dtype, 1), values(shape, dtype, 2), values(shape[1:], dtype, 3)
            results = []
            for rt in (Runtime.cpu(), cuda_runtime()):
                rng = rng_of(rt, 99, 7)
                out = ops.bias_dropout_add(
                    rt, placed(rt, x), placed(rt, bias), placed(rt, residual), p=0.3, rng=rng, site=-5
                )
                dx = ops.bias_dropout_add_backward(rt, placed(rt, x), p=0.3, rng=rng, site=-5)
                results.append((rt.numpy(out).view(np.uint8), rt.numpy(dx).view(np.uint8)))
            for a, b in zip(*results, strict=True):
                np.testing.assert_array_equal(a, b)


@requires_cuda
def test_cuda_column_sum_repeats():
    """The order of additions is fixed."""
    rt = cuda_runtime()
    x = placed(rt, values((2000, 520), "bfloat16", 4))
    sums = [rt.empty((520,), dtypes.float32) for _ in range(2)]
    for s in sums:
        ops.bias_dropout_add_backward(rt, x, p=0.2, rng=rng_of(rt, 1, 1), column_sum=s)
    np.testing.assert_array_equal(rt.numpy(sums[0]), rt.numpy(sums[1]))
