"""resize and column_sum on every backend: any shape, any address, nothing left unwritten."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from tests.core.inputs import DTYPES, SHAPES, numpy_dtype, placed, poisoned, values

SIZES = [(1, 1), (3, 40), (20, 5), (32, 48), (33, 17), (0, 16), (16, 0)]


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_resize(rt, dtype):
    """The common part is x's, bit for bit; what lies beyond x is zero."""
    rt = poisoned(rt)
    rng = np.random.default_rng(1)
    for given in SIZES:
        raw = rng.integers(1, 256, (*given, numpy_dtype(dtype).itemsize), np.uint8)
        x = raw.view(numpy_dtype(dtype))[..., 0] if raw.size else np.empty(given, numpy_dtype(dtype))
        for rows, cols in SIZES:
            got = rt.numpy(ops.resize(rt, placed(rt, x, 1), rows, cols))
            wanted = np.zeros((rows, cols, raw.shape[-1]), np.uint8)
            wanted[: given[0], : given[1]] = raw[:rows, :cols]
            assert got.shape == (rows, cols) and got.dtype == x.dtype
            np.testing.assert_array_equal(got.view(np.uint8).reshape(wanted.shape), wanted, err_msg=f"{given}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_column_sum(rt, dtype):
    """Within float32's rounding of the exact sums, and the same on every run."""
    rt = poisoned(rt)
    for i, shape in enumerate([*SHAPES, (1500, 72), (4100, 3)]):
        x = values(shape, dtype, i)
        name = (dtype, "float32")[i % 2]
        sums = [rt.empty((shape[1],), dtypes.dtype(name)) for _ in range(2)]
        for out in sums:
            ops.column_sum(rt, placed(rt, x, i % 3 == 2), out)
        got, again = (rt.numpy(out) for out in sums)
        np.testing.assert_array_equal(got.view(np.uint8), again.view(np.uint8))
        exact, terms = x.astype(np.float64).sum(axis=0), np.abs(x.astype(np.float64)).sum(axis=0)
        eps = float(ml_dtypes.finfo(numpy_dtype(name)).eps)
        assert (np.abs(got.astype(np.float64) - exact) <= 1e-5 * terms + eps * np.abs(exact)).all(), shape


def test_wrong_vectors_are_refused(rt):
    x = rt.tensor(np.ones((4, 8), np.float32))
    with pytest.raises(ArgumentError, match="column_sum"):
        ops.column_sum(rt, x, rt.empty((4,), dtypes.float32))
    with pytest.raises(ArgumentError, match="resize"):
        ops.resize(rt, rt.empty((8,), dtypes.float32), 2, 4)
