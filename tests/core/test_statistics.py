"""Records of statistics: against the formulas in float64, for every format that a tensor may be compared with."""

from __future__ import annotations

import math

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.ops.quantize import dequantize
from te_core.quantized import Cast, Format
from te_core.statistics import Statistics, empty, merge
from tests.covering import covering

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
E4M3, E5M2, E2M1 = dtypes.float8_e4m3, dtypes.float8_e5m2, dtypes.float4_e2m1


def wide_values(seed, *shape):
    """Normal numbers over eight decades, with zeros among them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 10 ** rng.uniform(-6, 2, shape)
    values[rng.random(shape) < 0.05] = 0
    return values.astype(np.float32)


def taken(rt, x, *args, **options):
    record = rt.tensor(empty())
    ops.statistics(rt, x, record, *args, **options)
    return Statistics(rt.numpy(record))


def close(found, want):
    assert found == pytest.approx(want, rel=3e-6, abs=1e-12), (found, want)


@covering(shape=[(1,), (7,), (33, 5), (2, 40, 64), (300, 257)], dtype=[F32, BF16, F16])
def test_of_values(rt, shape, dtype):
    x = wide_values(len(shape), *shape).astype(dtype.numpy)
    found, v = taken(rt, rt.tensor(x)), x.astype(np.float64)
    close(found.count, v.size)
    close(found.sum, v.sum()) if abs(v.sum()) > 1e-3 else None
    close(found.mean, v.mean())
    close(found.l1_norm, np.abs(v).sum())
    close(found.l2_norm, math.sqrt((v * v).sum()))
    assert found.max == v.max() and found.min == v.min()
    assert found.amax == np.abs(v).max()
    assert found.nonzero == np.count_nonzero(v)
    assert found.nans == found.infinities == found.compared == 0
    if np.count_nonzero(v):
        assert found.amin == np.abs(v[v != 0]).min()
        close(found.dynamic_range, math.log2(found.amax / found.amin))
    if v.size > 1:
        close(found.std, v.std(ddof=1))
    else:
        assert math.isnan(found.std)


FORMATS = [
    *(Format(d, "tensor") for d in (E4M3, E5M2)),
    *(Format(E4M3, "block", tiled) for tiled in (False, True)),
    *(Format(d, "mxfp8") for d in (E4M3, E5M2)),
    Format(E2M1, "nvfp4"),
]


def scales_of(rt, q, columnwise):
    """The scale of each value, where a format has one, from the stored ones."""
    (m, k), form = q.shape, q.format
    scale = rt.numpy(q.columnwise_scale if columnwise else q.rowwise_scale)
    row, column = np.indices((m, k))
    if form.scaling == "tensor":
        return np.full((m, k), scale[0])
    if form.scaling == "block":
        a, b = (column, row) if columnwise else (row, column)
        return scale[a // 128, b // 128] if form.tiled else scale[b // 128, a]
    codes = scale[row // 32, column] if columnwise else scale[row, column // 32]
    return 2.0 ** (codes.astype(np.float64) - 127)


@covering(dtype=[BF16, F32], shape=[(64, 128), (130, 272), (37, 45)], form=FORMATS, columnwise=[False, True], turns=2)
def test_of_a_quantized_copy(rt, dtype, shape, form, columnwise):
    x = rt.tensor(wide_values(7, *shape), dtype)
    scale = rt.tensor(np.array([16.0], np.float32)) if form.scaling == "tensor" else None
    q = ops.quantize(rt, x, Cast(form, rowwise=True, columnwise=True, scale=scale))
    if form.scaling == "nvfp4" and columnwise:
        with pytest.raises(ArgumentError, match="the rowwise copy of nvfp4"):
            taken(rt, x, q, columnwise=True)
        return
    found = taken(rt, x, q, columnwise=columnwise)
    v = rt.numpy(x).astype(np.float64)
    back = rt.numpy(dequantize(rt, q, F32, columnwise=columnwise)).astype(np.float64)
    assert found.compared == found.count == v.size
    assert found.underflows == np.count_nonzero(v) - np.count_nonzero(back)
    close(found.underflow_percent, 100 * found.underflows / v.size)
    close(found.mse, ((v - back) ** 2).mean())
    close(found.snr_db, 10 * math.log10((v * v).sum() / ((v - back) ** 2).sum()))
    close(found.l2_norm, math.sqrt((v * v).sum()))
    assert found.underflows > 0
    if form.scaling == "nvfp4":
        return
    s = scales_of(rt, q, columnwise)
    assert found.overflows == (np.abs(v) > form.dtype.max * s).sum()
    assert found.saturated == np.isclose(np.abs(back), form.dtype.max * s, rtol=1e-6).sum()
    assert (found.scale_inv_max, found.scale_inv_min) == (s.max(), s.min())
    if form.scaling == "tensor" and form.dtype is E4M3:
        assert found.overflows > 0  # the scale was given


def test_records_merge(rt):
    """On the device over calls, on the host over records: what one call over all of it finds."""
    parts = [wide_values(i, 40, 64) * (1 + i) for i in range(3)]
    scale = rt.tensor(np.array([4.0], np.float32))
    cast = Cast(E4M3, rowwise=True, columnwise=False, scale=scale)
    together, single = rt.tensor(empty()), []
    for part in parts:
        x = rt.tensor(part)
        q = ops.quantize(rt, x, cast)
        own = rt.tensor(empty())
        for record in (together, own):
            ops.statistics(rt, x, record, q)
        single.append(rt.numpy(own).copy())
    x = rt.tensor(np.concatenate(parts))
    whole = taken(rt, x, ops.quantize(rt, x, cast))
    for merged in (rt.numpy(together), merge(np.stack(single))):
        for name, value in Statistics(merged).as_dict().items():
            close(value, getattr(whole, name))


def test_what_is_no_number(rt):
    x = np.ones((8, 16), np.float32)
    x[0, 0], x[1, 1], x[2, 2] = np.nan, np.inf, -np.inf
    found = taken(rt, rt.tensor(x))
    assert (found.nans, found.infinities) == (1, 2)
    assert (found.max, found.min, found.amax, found.amin) == (np.inf, -np.inf, np.inf, 1)
    assert math.isnan(found.mean)


def test_nothing(rt):
    zeros = taken(rt, rt.tensor(np.zeros((4, 16), np.float32)))
    assert zeros.dynamic_range == math.inf and zeros.amax == zeros.nonzero == 0
    none = taken(rt, rt.tensor(np.zeros((0, 16), np.float32)))
    assert none.count == 0 and math.isnan(none.mean) and math.isnan(none.mse)


def test_any_beginning(rt):
    """Also where x is on no grid of 16 bytes."""
    values = wide_values(3, 4000)
    x = rt.tensor(values, BF16)
    v = rt.numpy(x).astype(np.float64)
    for start in range(9):
        found = taken(rt, x.rows(start, 3900))
        close(found.l1_norm, np.abs(v[start:3900]).sum())
        assert found.count == 3900 - start
