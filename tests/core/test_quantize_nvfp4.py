"""NVFP4 and back: bytes, scales, amax and padding against the formulas; what its options promise."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.quantized import Cast, Format
from te_core.runtime import Runtime
from tests.backends import cuda_runtime, requires_cuda
from tests.core.covering_lists import covering_lists
from tests.core.inputs import DTYPES, codes, numpy_dtype, placed, poisoned, values
from tests.reference import quantize_nvfp4 as ref

SHAPES = [(1, 1), (3, 5), (16, 16), (17, 33), (0, 32), (48, 0), (64, 8), (31, 72), (130, 40), (40, 130)]
ORIENTATIONS = [(True, True), (True, False), (False, True)]
SITE = 0x7FFFFFFE
COLUMNWISE_SITE = 0x40000000

#: Every combination that is allowed: (tiled, transform, stochastic, row_scaled, four_over_six).
OPTIONS = [
    *((tiled, transform, stochastic, False, None) for tiled, transform, stochastic in product((False, True), repeat=3)),
    *((tiled, False, False, False, mode) for tiled in (False, True) for mode in ("MAE", "MSE")),
    *((False, False, False, True, mode) for mode in (None, "MAE", "MSE")),
]


def make_cast(rt, options=OPTIONS[0], orientation=(True, True), *, bound=448, rng=(7, 9), site=SITE):
    tiled, transform, stochastic, row_scaled, four_over_six = options
    form = Format(dtypes.float4_e2m1, "nvfp4", tiled, row_scaled, bound)
    state = rt.tensor(np.array(rng, np.uint64).view(np.int64)) if stochastic else None
    return Cast(
        form,
        rowwise=orientation[0],
        columnwise=orientation[1],
        transform=transform,
        stochastic=stochastic,
        rng=state,
        site=site,
        four_over_six=four_over_six,
    )


def expected(x, options, *, bound=448, rng=(7, 9), site=SITE):
    """Both copies from the formulas."""
    tiled, transform, stochastic, row_scaled, mode = options
    copies = []
    for columns in (False, True):
        lines = x.T if columns else x
        if columns and transform:
            lines = ref.transform(x)
        random = None
        if stochastic:
            shape = ref.ceil_to(lines.shape[0], 16), ref.ceil_to(lines.shape[1], 16)
            random = ref.random_bytes(*shape, *rng, site ^ COLUMNWISE_SITE if columns else site)
        copies.append(
            ref.quantize(
                lines, bound, tiled=tiled, row_scaled=row_scaled, four_over_six=mode, random=random, columns=columns
            )
        )
    return copies


def check_storage(rt, q, copies, message=""):
    """Data, scales with their padding, and amax of the copies that q holds, bit for bit."""
    held = [(q.rowwise, q.rowwise_scale, q.rowwise_amax), (q.columnwise, q.columnwise_scale, q.columnwise_amax)]
    for (data, scale, amax), copy in zip(held, copies, strict=True):
        if data is None:
            continue
        if amax is None:  # for each of no lines
            assert copy.amax.size == 0
        else:
            np.testing.assert_array_equal(rt.numpy(amax), copy.amax, err_msg=message)
        np.testing.assert_array_equal(codes(rt, scale), copy.scale, err_msg=message)
        np.testing.assert_array_equal(codes(rt, data), copy.data, err_msg=message)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_the_formulas(rt, options):
    rt = poisoned(rt)
    for i, shape in enumerate(SHAPES):
        x = values(shape, DTYPES[i % 3], i, special=i % 4 == 3)
        bound, offset = (448, 256)[i % 2], i % 3 % 2
        with np.errstate(all="ignore"):
            copies = expected(x, options, bound=bound)
        orientation = ORIENTATIONS[i % 3]
        q = ops.quantize(rt, placed(rt, x, offset), make_cast(rt, options, orientation, bound=bound))
        assert (q.rowwise is not None, q.columnwise is not None) == orientation
        check_storage(rt, q, copies, f"{shape} {x.dtype} {orientation}")


@covering_lists(
    pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3], OPTIONS[10]], ids=str),
    pytest.mark.parametrize("dtype", DTYPES),
)
def test_every_dtype_and_extremes(rt, dtype, options):
    """NaN, infinities, zeros, the largest and the smallest numbers, in blocks of their own and mixed."""
    info = ml_dtypes.finfo(numpy_dtype(dtype))
    top, tiny = float(info.max), float(info.smallest_subnormal)
    rng = np.random.default_rng(1)
    base = rng.standard_normal((48, 48))
    kinds = {
        "zeros": np.zeros((48, 48)),
        "negative zeros": np.full((48, 48), -0.0),
        "nan": np.full((48, 48), np.nan),
        "a nan": np.where(rng.random((48, 48)) < 0.02, np.nan, base),
        "huge": np.clip(base * top, -top, top),
        "tiny": np.rint(base * 4) * tiny,
        "an infinity": np.where(rng.random((48, 48)) < 0.01, -np.inf, base),
        "wide": base * 2.0 ** rng.integers(-14, 10, (48, 48)),
    }
    for name, x in kinds.items():
        x = x.astype(numpy_dtype(dtype))
        with np.errstate(all="ignore"):
            copies = expected(x, options)
        check_storage(rt, ops.quantize(rt, placed(rt, x), make_cast(rt, options)), copies, name)


def one_piece(rt, numbers, options=OPTIONS[0], **more):
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(rt, dtype):
    """The formula, from both copies; the columnwise one with its padding."""
    rt = poisoned(rt)
    for i, shape in enumerate(SHAPES):
        x = values(shape, "float32", i, special=i % 4 == 3)
        for options in (OPTIONS[0], OPTIONS[4], OPTIONS[12]):
            bound = (448, 256)[i % 2]
            q = ops.quantize(rt, placed(rt, x), make_cast(rt, options, bound=bound))
            with np.errstate(all="ignore"):
                row, column = (ref.dequantize(c, bound, options[3]) for c in expected(x, options, bound=bound))
                row = row[: shape[0], : shape[1]].astype(numpy_dtype(dtype))
                column = column[: shape[1]].T.astype(numpy_dtype(dtype))
            for copy, want in ((False, row), (True, column)):
                got = rt.numpy(ops.dequantize(rt, q, dtypes.dtype(dtype), columnwise=copy))
                np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def snr(got, exact):
    """In dB."""
    got, exact = got.astype(np.float64), exact.astype(np.float64)
    return 10 * np.log10((exact**2).sum() / ((got - exact) ** 2).sum())


def test_error(rt):
    """Of normal numbers; the variants in the order that their means promise."""
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    result = {}
    for options in OPTIONS:
        q = ops.quantize(rt, placed(rt, x), make_cast(rt, options, (True, False)))
        result[options] = snr(rt.numpy(ops.dequantize(rt, q, dtypes.float32)), x)
    plain = result[OPTIONS[0]]
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


def test_scale_invariance(rt):
    """A power of two in the input changes the amax and nothing else."""
    x = values((48, 80), "float32", 2)
    for options in OPTIONS:
        one, other = (ops.quantize(rt, placed(rt, (x * f).astype(np.float32)), make_cast(rt, options)) for f in (1, 64))
        for name in ("rowwise", "columnwise", "rowwise_scale", "columnwise_scale"):
            np.testing.assert_array_equal(codes(rt, getattr(one, name)), codes(rt, getattr(other, name)))
        np.testing.assert_array_equal(rt.numpy(one.rowwise_amax) * 64, rt.numpy(other.rowwise_amax))


def test_rows_with_their_own_amax_are_independent(rt):
    x = values((32, 48), "float32", 5)
    options = (False, False, False, True, None)
    y = x.copy()
    y[7] *= 1e6
    one, other = (ops.quantize(rt, placed(rt, v), make_cast(rt, options, (True, False))) for v in (x, y))
    keep = np.arange(32) != 7
    for name in ("rowwise", "rowwise_scale"):
        a, b = (codes(rt, getattr(q, name))[:32] for q in (one, other))
        np.testing.assert_array_equal(a[keep], b[keep])


@requires_cuda
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cuda_equals_cpu(options):
    """At sizes of many blocks, aligned and not, with specials."""
    cpu, cuda = Runtime.cpu(), poisoned(cuda_runtime())
    for i, shape in enumerate([(512, 768), (1000, 1003), (77, 2048), (3000, 64)]):
        x = values(shape, DTYPES[i % 3], i, special=i % 2 == 1)
        results = []
        for rt, offset in ((cpu, 0), (cuda, 0), (cuda, 1)):
            q = ops.quantize(rt, placed(rt, x, offset), make_cast(rt, options))
            dense = [rt.numpy(ops.dequantize(rt, q, dtypes.float32, columnwise=c)) for c in (False, True)]
            names = ("rowwise", "rowwise_scale", "rowwise_amax", "columnwise", "columnwise_scale", "columnwise_amax")
            results.append([*(rt.numpy(getattr(q, name)) for name in names), *dense])
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                np.testing.assert_array_equal(a, b)
