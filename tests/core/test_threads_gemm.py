"""Eight threads, one plan, different tensors, ten thousand runs: every result is its own thread's."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from te_core import dtypes as D
from te_core.ops.gemm import gemm
from tests.reference import gemm as reference
from tests.threads import together
from tests.tolerances import DB, snr_db

THREADS, RUNS = 8, 1250


def fp8_call(rt, seed):
    """A product whose scales, bias and operands are this thread's own."""
    rng = np.random.default_rng(seed)
    m, n, k = 16, 32, 48
    arrays = [rng.standard_normal(s).astype(D.float8_e4m3.numpy) for s in ((m, k), (n, k))]
    bias = rng.standard_normal(n).astype(D.bfloat16.numpy)
    scale = np.float32(2.0 ** (seed % 7 - 3))
    a, b = (rt.tensor(x) for x in arrays)
    kept = {
        "a_scale": rt.tensor(np.array([scale])),
        "b_scale": rt.tensor(np.array([1.5], np.float32)),
        "bias": rt.tensor(bias),
        "out": rt.empty((m, n), D.bfloat16),
    }
    want = reference.gemm(*arrays, trans_b=True, scale=scale * 1.5, bias=bias).out
    return lambda: gemm(rt, a, b, trans_b=True, **kept), want


def unfused_call(rt, seed):
    """The same with an epilogue that needs a kernel of our own: argument blocks are per thread too."""
    rng = np.random.default_rng(seed)
    m, n, k = 8, 11, 16
    a, b = (rng.standard_normal(s).astype(D.bfloat16.numpy) for s in ((m, k), (k, n)))
    bias = rng.standard_normal(n).astype(np.float32)
    ta, tb, tbias, out = rt.tensor(a), rt.tensor(b), rt.tensor(bias), rt.empty((m, n), D.bfloat16)
    aux = rt.empty((m, n), D.bfloat16)
    want = reference.gemm(a, b, bias=bias, epilogue="gelu").out
    return lambda: gemm(rt, ta, tb, bias=tbias, epilogue="gelu", aux=aux, out=out), want


@pytest.mark.parametrize("make", [fp8_call, unfused_call])
def test_threads_share_a_plan(rt, make):
    calls = [[make(rt, 2 * i + j) for j in range(2)] for i in range(THREADS)]
    for mine in calls:  # the plans exist before the threads start: one for each alignment of host memory
        for run, _ in mine:
            rt.numpy(run())
    built = rt.plans.builds

    def work(mine):
        for i in range(RUNS):
            run, want = mine[i % 2]  # its pointers change with every run
            out = run()
            if i % 50 < 2:
                got = snr_db(rt.numpy(out).astype(np.float64), want)
                assert got >= DB["bf16"] - 3, f"run {i}: {got} dB"

    together(*(partial(work, mine) for mine in calls))
    assert rt.plans.builds == built
