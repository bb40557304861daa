"""What NVFP4 and its options promise; its formulas are rows (tests/core/operation_cast_rows.py)."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np

from te_core import dtypes, ops
from tests.core.inputs import codes, placed, values
from tests.core.operation_cast_rows import NVFP4, Rule
from tests.reference import quantize_nvfp4 as ref


def make_cast(rt, options=NVFP4[0], orientation=(True, True), *, bound=448, **draws):
    return Rule("nvfp4", orientation=orientation, options=options, bound=bound).cast(rt, **draws)


def one_piece(rt, numbers, options=NVFP4[0], **more):
    """The codes of one block of sixteen whose scales are exactly one: amax 2688, and 6 in the block."""
    x = np.zeros((1, 32), np.float32)
    x[0, : len(numbers)], x[0, 15], x[0, 31] = numbers, 6, 2688
    q = ops.quantize(rt, placed(rt, x), make_cast(rt, options, (True, False), **more))
    assert rt.numpy(q.rowwise_amax)[0] == 2688
    assert codes(rt, q.rowwise_scale)[0, 0] == 0x38  # one
    data = codes(rt, q.rowwise)[0, :8]
    return np.stack((data & 15, data >> 4), axis=-1).ravel()[: len(numbers)].tolist()


def test_thresholds(rt):
    """Each tie, a step of float32 below and above it, in both signs."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    up = [False, True, False, True, False, True, False]
    for i, (tie, rises) in enumerate(zip(ties, up, strict=True)):
        below, above = np.nextafter(np.float32(tie), np.float32(0)), np.nextafter(np.float32(tie), np.float32(9))
        numbers = [below, tie, above, -below, -tie, -above]
        sizes = [i, i + rises, i + 1]
        assert one_piece(rt, numbers) == [*sizes, *(8 + size for size in sizes)]
    exact = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert one_piece(rt, exact) == list(range(8))
    assert one_piece(rt, [-v for v in exact]) == list(range(8, 16))
    assert one_piece(rt, [np.nan, -np.nan]) == [7, 7]


def test_low_nibble_is_the_even_column(rt):
    x = np.zeros((16, 16), np.float32)
    x[0, 0], x[0, 1], x[1, 0] = 6, 1, 3
    q = ops.quantize(rt, placed(rt, x), make_cast(rt))
    assert codes(rt, q.rowwise)[0, 0] == 0x27
    assert codes(rt, q.columnwise)[0, 0] == 0x57


def order_matters():
    """Beside a tile with the amax, one whose two errors are so near that the order of the additions decides (MAE)."""
    rng = np.random.default_rng(43)
    pool = rng.standard_normal(int(rng.integers(2, 4))).astype(np.float32)
    tile = rng.choice(pool, (16, 1600))[:, 944:960]
    return np.concatenate((tile, np.full((16, 16), np.abs(pool).max() * np.float32(1.7), np.float32)), axis=1)


def test_a_tile_has_one_scale_and_an_exact_transpose(rt):
    for x, mode in product((values((80, 48), "bfloat16", 3), order_matters()), (None, "MAE", "MSE")):
        q = ops.quantize(rt, placed(rt, x), make_cast(rt, (True, False, False, False, mode)))
        row, column = (
            ref.Stored(codes(rt, data), codes(rt, scale), None).codes()
            for data, scale in ((q.rowwise, q.rowwise_scale), (q.columnwise, q.columnwise_scale))
        )
        np.testing.assert_array_equal(row, column.T)
        m, k = x.shape[0] // 16, x.shape[1] // 16
        scale = codes(rt, q.rowwise_scale)[: 16 * m, :k].reshape(m, 16, k)
        assert (scale == scale[:, :1]).all()
        np.testing.assert_array_equal(codes(rt, q.columnwise_scale)[: 16 * k : 16, :m].T, scale[:, 0])


def snr(got, exact):
    """In dB."""
    got, exact = got.astype(np.float64), exact.astype(np.float64)
    return 10 * np.log10((exact**2).sum() / ((got - exact) ** 2).sum())


def test_error(rt):
    """Of normal numbers; the variants in the order that their means promise."""
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    result = {}
    for options in NVFP4:
        q = ops.quantize(rt, placed(rt, x), make_cast(rt, options, (True, False)))
        result[options] = snr(rt.numpy(ops.dequantize(rt, q, dtypes.float32)), x)
    plain = result[NVFP4[0]]
    assert plain > 20
    assert result[(True, False, False, False, None)] > 18
    assert result[(False, False, False, True, None)] > 20
    assert 15 < result[(False, False, True, False, None)] < plain - 2  # random rounding doubles the squared error
    assert result[(False, False, False, False, "MSE")] > plain + 0.3
    assert result[(False, False, False, False, "MSE")] >= result[(False, False, False, False, "MAE")]


def test_four_over_six_takes_the_better_scale(rt):
    """9 and 6.75 are 4 and 3 of a scale of 2.25; 9 and 6 are 6 and 4 of 1.5, under which 6.75 has no code."""
    for bound, tiled in product((448, 256), (False, True)):
        x = np.zeros((16, 48), np.float32)
        x[:, :16], x[:, 16:32], x[0, 32] = [9, 6.75] * 8, [9, 6] * 8, 6 * bound
        dense = {}
        for mode in (None, "MAE", "MSE"):
            cast = make_cast(rt, (tiled, False, False, False, mode), (True, False), bound=bound)
            q = ops.quantize(rt, placed(rt, x), cast)
            dense[mode] = rt.numpy(ops.dequantize(rt, q, dtypes.float32))
            assert codes(rt, q.rowwise_scale)[0, :2].tolist() == [0x3C if mode is None else 0x41, 0x3C]  # 2.25, 1.5
        for mode in ("MAE", "MSE"):
            np.testing.assert_allclose(dense[mode][:, :32], x[:, :32], rtol=1e-6)
        assert np.abs(dense[None][:, :16] - x[:, :16]).max() > 0.7


def test_the_transform_cancels(rt):
    """Of exact values: a product over transformed rows is the product itself. And the matrix is orthogonal."""
    matrix = ref.hadamard_matrix()
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(16), atol=1e-12)
    rng = np.random.default_rng(0)
    options = (False, True, False, False, None)
    a, b = (rng.standard_normal((200, n)).astype(ml_dtypes.bfloat16) for n in (48, 32))
    a[70], b[70] = a[70] * 20, b[70] * 20
    back = []
    for x in (a, b):
        q = ops.quantize(rt, placed(rt, x), make_cast(rt, options, (False, True)))
        values_of = rt.numpy(ops.dequantize(rt, q, dtypes.float32)).astype(np.float64)
        assert values_of.shape == (208, x.shape[1])
        # Undo it: the transform of the rows is orthogonal.
        undone = (values_of.reshape(13, 16, -1).transpose(0, 2, 1) @ matrix.T).transpose(0, 2, 1).reshape(208, -1)
        assert snr(undone[:200], x) > 18
        assert np.abs(undone[200:]).max() < 0.8
        back.append(values_of)
    exact = a.astype(np.float64).T @ b.astype(np.float64)
    product = back[0].T @ back[1]
    assert snr(product, exact) > 16


def test_stochastic_rounding_is_unbiased(rt):
    """The mean over many draws is the value, up to the 1/512 of a step that eight random bits floor away."""
    numbers = [0.1, 0.4, 0.6, 1.3, 1.9, 2.2, 3.7, 4.4, 5.9, -0.1, -1.1, -2.7, -5.0]
    copies = 4096
    x = np.zeros((copies, 32), np.float32)
    x[:, : len(numbers)], x[:, 15], x[:, 31] = numbers, 6, 2688
    options = (False, False, True, False, None)
    for rng in ((1, 0), (1, 4096)):
        q = ops.quantize(rt, placed(rt, x), make_cast(rt, options, (True, False), rng=rng))
        got = rt.numpy(ops.dequantize(rt, q, dtypes.float32))[:, : len(numbers)].astype(np.float64)
        for i, value in enumerate(numbers):
            size = abs(value)
            step = 0.5 if size < 2 else 1.0 if size < 4 else 2.0
            low = np.floor(size / step) * step
            np.testing.assert_allclose(np.unique(np.abs(got[:, i])), [low, low + step], rtol=1e-6)
            share = (size - low) / step
            sigma = step * np.sqrt(share * (1 - share) / copies)
            assert abs(np.abs(got[:, i]).mean() - size) < 4.5 * sigma + step / 256


def test_stochastic_draws(rt):
    """The same rng and site give the same bytes; another seed, offset or site, or the other copy, others."""
    x = values((64, 64), "bfloat16", 1)
    options = (False, False, True, False, None)

    def data(**more):
        q = ops.quantize(rt, placed(rt, x), make_cast(rt, options, **more))
        return codes(rt, q.rowwise), codes(rt, q.columnwise)

    first = data()
    for copy, again in zip(first, data(), strict=True):
        np.testing.assert_array_equal(copy, again)
    for other in ({"rng": (8, 9)}, {"rng": (7, 10)}, {"rng": (7, 9 + (1 << 40))}, {"site": 1}):
        for copy, changed in zip(first, data(**other), strict=True):
            assert (copy != changed).mean() > 0.05
    tiled = ops.quantize(rt, placed(rt, x), make_cast(rt, (True, False, True, False, None)))
    row, column = (ref.Stored(codes(rt, d), None, None).codes() for d in (tiled.rowwise, tiled.columnwise))
    assert (row != column.T).mean() > 0.05
