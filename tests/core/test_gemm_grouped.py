"""Products of groups of rows: each is what the product of that group alone gives, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import dtypes as D
from te_core import ops
from te_core.quantized import Cast, Format
from te_core.runtime import Runtime
from te_core.tensor import Tensor

SIZES = (32, 0, 5, 75)
T, N, K = sum(SIZES), 48, 64
BOUNDS = [(0, 32), (32, 32), (32, 37), (37, 112)]


def values(rt: Runtime, *shape: int, seed: int = 0) -> Tensor:
    return rt.tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), D.bfloat16)


def offsets(rt: Runtime) -> Tensor:
    return rt.tensor(np.array([0, *[stop for _, stop in BOUNDS]], np.int32))


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("trans_b", [True, False])
def test_rows_times_matrices(rt, where, trans_b):
    x = values(rt, T, K)
    w = [values(rt, *((N, K) if trans_b else (K, N)), seed=1 + i) for i in range(4)]
    bias = [values(rt, N, seed=9), None, values(rt, N, seed=10), None]
    out = rt.zeros((T, N), D.bfloat16)
    known = {"sizes": SIZES} if where == "host" else {"offsets": offsets(rt)}
    ops.gemm_grouped(rt, x, w, out, trans_b=trans_b, bias=bias, **known)
    got = rt.numpy(out)
    for i, (start, stop) in enumerate(BOUNDS):
        if start < stop:
            alone = ops.gemm(rt, x.rows(start, stop), w[i], trans_b=trans_b, bias=bias[i])
            assert np.array_equal(got[start:stop], rt.numpy(alone))
            wanted = rt.numpy(x)[start:stop].astype(np.float64) @ _matrix(rt, w[i], trans_b)
            wanted += 0 if bias[i] is None else rt.numpy(bias[i]).astype(np.float64)
            assert np.abs(got[start:stop] - wanted).max() < 0.05 * np.abs(wanted).max()


def _matrix(rt: Runtime, w: Tensor, transposed: bool) -> np.ndarray:
    found = rt.numpy(w).astype(np.float64)
    return found.T if transposed else found


@pytest.mark.parametrize("accumulate", [False, True])
def test_rows_contracted(rt, accumulate):
    dy, x = values(rt, T, N), values(rt, T, K, seed=1)
    dw = [rt.tensor(np.full((N, K), 2.0, np.float32)) for _ in SIZES]
    ops.gemm_grouped(rt, dy, x, dw, offsets(rt), trans_a=True, accumulate=accumulate)
    for out, (start, stop) in zip(dw, BOUNDS, strict=True):
        rows = [rt.numpy(t)[start:stop].astype(np.float64) for t in (dy, x)]
        wanted = rows[0].T @ rows[1] + 2.0 * accumulate  # an empty group adds nothing
        assert np.abs(rt.numpy(out) - wanted).max() < 1e-4 * (1 + np.abs(wanted).max())


def test_quantized_groups(rt):
    """As `quantize_grouped` gives them: each is multiplied by its own scale, forward and backward."""
    scales = [rt.tensor(np.array([2.0**i], np.float32)) for i in range(4)]
    casts = [Cast(Format(D.float8_e4m3, "tensor"), rowwise=True, columnwise=True, scale=s) for s in scales]
    x, dy = values(rt, T, K), values(rt, T, N, seed=1)
    w = [values(rt, N, K, seed=2 + i) for i in range(4)]
    qx, qdy = (ops.quantize_grouped(rt, t, SIZES, casts) for t in (x, dy))
    qw = ops.quantize_many(rt, w, casts)
    y, dx = rt.zeros((T, N), D.bfloat16), rt.zeros((T, K), D.bfloat16)
    dw = [rt.zeros((N, K), D.float32) for _ in SIZES]
    ops.gemm_grouped(rt, qx, qw, y, sizes=SIZES, trans_b=True)
    ops.gemm_grouped(rt, qdy, qw, dx, sizes=SIZES)
    ops.gemm_grouped(rt, qdy, qx, dw, sizes=SIZES, trans_a=True)
    for i, (start, stop) in enumerate(BOUNDS):
        if start == stop:
            assert not rt.numpy(dw[i]).any()
            continue
        high = [rt.numpy(ops.dequantize(rt, q[i], D.float32)).astype(np.float64) for q in (qx, qdy, qw)]
        for got, wanted in (
            (rt.numpy(y)[start:stop], high[0] @ high[2].T),
            (rt.numpy(dx)[start:stop], high[1] @ high[2]),
            (rt.numpy(dw[i]), high[1].T @ high[0]),
        ):
            assert np.abs(got - wanted).max() < 0.01 * np.abs(wanted).max()


def test_a_quantized_operand_meets_a_plain_one(rt):
    cast = Cast(Format(D.float8_e4m3, "tensor"), rowwise=True, columnwise=True)
    x, w = values(rt, T, K), [values(rt, N, K, seed=1 + i) for i in range(4)]
    quantized, y, wanted = (
        ops.quantize_many(rt, w, [cast] * 4),
        rt.zeros((T, N), D.bfloat16),
        rt.zeros((T, N), D.bfloat16),
    )
    ops.gemm_grouped(rt, x, quantized, y, sizes=SIZES, trans_b=True)
    plain = [ops.dequantize(rt, q, D.bfloat16) for q in quantized]
    ops.gemm_grouped(rt, x, plain, wanted, sizes=SIZES, trans_b=True)
    assert np.array_equal(rt.numpy(y), rt.numpy(wanted)) and rt.numpy(y).any()
