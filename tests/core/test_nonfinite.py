"""Counting what is no number."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.quantized import Cast
from tests.core.covering_lists import covering_lists

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16


@covering_lists(
    pytest.mark.parametrize("count", [0, 1, 7, 1000, 70_001]), pytest.mark.parametrize("dtype", [F32, BF16, F16])
)
def test_counts(rt, count, dtype):
    rng = np.random.default_rng(count)
    values = rng.standard_normal(count).astype(np.float32)
    picks = rng.permutation(count)
    nans, infinities = picks[: count // 3], picks[count // 3 : count // 2]
    values[nans], values[infinities] = np.nan, np.where(infinities % 2, np.inf, -np.inf)
    out = rt.tensor(np.array([5, 7], np.int64))
    x = rt.tensor(values.astype(dtype.numpy))
    for times in (1, 2):
        ops.count_nonfinite(rt, x, out)
        assert rt.numpy(out).tolist() == [5 + times * len(nans), 7 + times * len(infinities)]


def test_any_beginning(rt):
    """Elements before the first whole vector are seen, too."""
    x = rt.tensor(np.full(64, np.nan, dtypes.bfloat16.numpy))
    for start in range(9):
        out = rt.tensor(np.zeros(2, np.int64))
        ops.count_nonfinite(rt, x.rows(start, 50), out)
        assert rt.numpy(out).tolist() == [50 - start, 0]


def test_every_cast_counts(rt):
    """quantize, and what fuses a cast, whose result stays the same."""
    values = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    values[2, 3] = np.inf
    x, gamma = rt.tensor(values, BF16), rt.tensor(np.ones(64, np.float32), BF16)
    one = rt.tensor(np.ones(1, np.float32))
    found = []
    for counter in (rt.tensor(np.zeros(2, np.int64)), None):
        cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=True, scale=one, nonfinite=counter)
        made = [
            ops.quantize(rt, x, cast),
            ops.norm_forward(rt, x, gamma, None, kind="RMSNorm", eps=1e-5, cast=cast)[1],
            ops.activation_forward(rt, x, "relu", cast=cast)[1],
            ops.activation_backward(rt, x, x, "relu", cast=cast)[1],
            *ops.quantize_many(rt, [x, x], [cast, cast]),
        ]
        found.append([rt.numpy(q.rowwise).view(np.uint8) for q in made])
        if counter is not None:
            seen = rt.numpy(counter).tolist()
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    # x, x through relu both ways, twice x; the norm's row of an infinity has one NaN.
    assert seen == [1, 5]


def test_wrong_counters(rt):
    x = rt.tensor(np.ones((4, 16), np.float32))
    for wrong in (rt.tensor(np.zeros(2, np.int32)), rt.tensor(np.zeros(3, np.int64))):
        with pytest.raises(ArgumentError, match="int64"):
            ops.count_nonfinite(rt, x, wrong)
