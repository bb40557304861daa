"""Groups whose sizes are on the device: running sums, column sums, products in one launch, and the layer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from te_core import dtypes as D
from te_core import ops
from te_core.layers import grouped_linear
from te_core.layers.product import LinearSpec, Needs, Sink
from te_core.ops.gemm_grouped import takes_offsets
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.backends import capability, cuda_runtime, requires_cuda

#: Sizes of groups, out features, in features: none, one, odd ones, edges of tiles, more groups than a launch takes.
CASES = {
    "a tile": ([128], 256, 64),
    "odd sizes": ([100, 0, 28, 300, 1, 7, 129], 264, 72),
    "edges": ([64, 65, 127, 128, 255, 256], 520, 136),
    "empty": ([0, 0, 0], 64, 64),
    "many": ([9, 0, 3] * 70, 136, 200),
}


def values(rt: Runtime, *shape: int, seed: int, dtype: D.DType = D.bfloat16) -> Tensor:
    return rt.tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), dtype)


def ends(rt: Runtime, sizes: list[int]) -> Tensor:
    return rt.tensor(np.array([0, *np.cumsum(sizes)], np.int32))


def wide(rt: Runtime, t: Tensor) -> np.ndarray:
    return rt.numpy(t).astype(np.float64)


@pytest.mark.parametrize("dtype", [np.int32, np.int64], ids=str)
@pytest.mark.parametrize(
    ("sizes", "rows", "wanted", "fault"),
    [
        ([3, 0, 4], 7, [0, 3, 3, 7], 0),
        ([3, -2, 4], 7, [0, 3, 3, 7], 1),
        ([3, 9, 4], 7, [0, 3, 7, 7], 1),
        ([2**30, 2**30, 2**30, 2**30], 7, [0, 7, 7, 7, 7], 1),
        ([1, 1], 7, [0, 1, 2], 1),
        ([1] * 70, 70, [*range(71)], 0),
    ],
)
def test_offsets_are_cut_to_the_rows(rt, sizes, rows, wanted, fault, dtype):
    faults = rt.tensor(np.array([5], np.int32))
    out = rt.empty((len(sizes) + 1,), D.int32)
    ops.group_offsets(rt, rt.tensor(np.array(sizes, dtype)), rows, out, faults)
    assert rt.numpy(out).tolist() == wanted
    assert rt.numpy(faults).tolist() == [5 + fault]
    ops.group_offsets(rt, rt.tensor(np.array(sizes, dtype)), rows, out)
    assert rt.numpy(out).tolist() == wanted


@pytest.mark.parametrize("dtype", [D.bfloat16, D.float32], ids=str)
def test_column_sums(rt, dtype):
    sizes = [5, 0, 70, 1]
    x = values(rt, sum(sizes) + 3, 67, seed=0, dtype=dtype)
    outs = [rt.empty((67,), D.float32) for _ in sizes]
    ops.group_sums(rt, x, ends(rt, sizes), [outs[0], outs[1], None, outs[3]])
    for out, (start, stop) in zip([outs[0], outs[1], outs[3]], [(0, 5), (5, 5), (75, 76)], strict=True):
        assert np.allclose(rt.numpy(out), wide(rt, x)[start:stop].sum(0), atol=1e-5)


@requires_cuda
@pytest.mark.parametrize("dtype", [D.bfloat16, D.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_one_launch(name, dtype):
    """Forward with biases and both gradients, against float64. Nobody reads or writes rows behind the last group."""
    rt, (sizes, n, k) = cuda_runtime(), CASES[name]
    if capability() != (9, 0):
        pytest.skip("hardware: groups in one launch are Hopper's")
    assert takes_offsets(rt, dtype, n, k, len(sizes))
    total, groups = sum(sizes), len(sizes)
    offsets, unit = ends(rt, sizes), 2.0 ** (-8 if dtype is D.bfloat16 else -11)

    def rows(width: int, seed: int) -> Tensor:  # what follows the groups is not a number
        content = np.random.default_rng(seed).standard_normal((total + 5, width)).astype(np.float32)
        content[total:] = np.nan
        return rt.tensor(content, dtype)

    x, dy = rows(k, 0), rows(n, 1)
    w = [values(rt, n, k, seed=10 + e, dtype=dtype) for e in range(groups)]
    bias = [values(rt, n, seed=900 + e, dtype=dtype) if e % 2 else None for e in range(groups)]
    y, dx = (rt.tensor(np.full((total + 5, width), 7.0, np.float32), dtype) for width in (n, k))
    ops.gemm_grouped(rt, x, w, y, offsets, trans_b=True, bias=bias)
    ops.gemm_grouped(rt, dy, w, dx, offsets)
    assert (wide(rt, y)[total:] == 7).all() and (wide(rt, dx)[total:] == 7).all()

    def gradients(kind: D.DType, accumulate: bool) -> list[Tensor | None]:
        outs = [None if e == 2 else rt.tensor(np.full((n, k), 2.0, np.float32), kind) for e in range(groups)]
        ops.gemm_grouped(rt, dy, x, outs, offsets, trans_a=True, accumulate=accumulate)
        return outs

    found = {(kind, adds): gradients(kind, adds) for kind in (dtype, D.float32) for adds in (False, True)}
    for e, (start, stop) in enumerate(pairwise([0, *np.cumsum(sizes).tolist()])):
        here, matrix = slice(start, stop), wide(rt, w[e])
        added = 0 if bias[e] is None else wide(rt, bias[e])
        for got, wanted in (
            (wide(rt, y)[here], wide(rt, x)[here] @ matrix.T + added),
            (wide(rt, dx)[here], wide(rt, dy)[here] @ matrix),
        ):
            assert np.abs(got - wanted).max(initial=0) <= unit * (1 + np.abs(wanted).max(initial=0))
        product = wide(rt, dy)[here].T @ wide(rt, x)[here]
        for (kind, adds), outs in found.items():
            if outs[e] is not None:
                wanted = product + 2 * adds
                near = (2.0**-19 if kind is D.float32 else unit) * (2 + np.abs(wanted).max())
                assert np.abs(wide(rt, outs[e]) - wanted).max() <= near, (e, kind, adds)


@requires_cuda
def test_wrong_offsets_stay_inside():
    rt = cuda_runtime()
    x, w = values(rt, 64, 64, seed=0), [values(rt, 64, 64, seed=e) for e in (1, 2, 3)]
    y = rt.tensor(np.full((128, 64), 7.0, np.float32), D.bfloat16)
    wrong = rt.tensor(np.array([-5, 40, 10, 900], np.int32))  # as if 0, 40, 40, 64
    ops.gemm_grouped(rt, x, w, y.rows(0, 64), wrong, trans_b=True)
    got = wide(rt, y)
    for here, e in ((slice(0, 40), 0), (slice(40, 64), 2)):
        wanted = wide(rt, x)[here] @ wide(rt, w[e]).T
        assert np.abs(got[here] - wanted).max() <= 2.0**-8 * np.abs(wanted).max()
    assert (got[64:] == 7).all()


@pytest.mark.parametrize("queued", [False, True])
def test_the_layer_reads_sizes_on_the_device(rt, queued):
    """As with sizes that the host knows: the same bits on a CPU, nearly the same on a GPU."""
    sizes, n, k = [16, 0, 24], 48, 64
    x, dy = values(rt, 2, 20, k, seed=0), values(rt, 2, 20, n, seed=1)
    w, b = ([values(rt, *shape, seed=s + e) for e in range(3)] for shape, s in (((n, k), 2), ((n,), 5)))
    spec = grouped_linear.GroupedSpec(
        tuple(LinearSpec(D.bfloat16, None, Needs(True, e != 1, e != 1)) for e in range(3))
    )
    results = []
    for splits in (grouped_linear.Groups(sizes), grouped_linear.Groups(None, offsets=ends(rt, sizes))):
        (y,), saved = grouped_linear.forward(rt, x, *w, *b, None, spec=spec, splits=splits)
        saved = grouped_linear.GroupedSaved(*[x if t is not None and t.ptr == x.ptr else t for t in saved])
        main, queue = rt.tensor(np.full((n, k), 3.0, np.float32)), [] if queued else None
        sinks = [Sink(main, True, queue), None, None]
        dx, *gradients = grouped_linear.backward(rt, dy, saved, spec=spec, splits=splits, sinks=sinks)
        for run in queue or ():
            assert run(rt) is None
        assert [g is None for g in gradients] == [True, True, False, False, True, False]
        results.append([rt.numpy(t) for t in (y, dx, main, *gradients) if t is not None])
    for got, wanted in zip(results[1], results[0], strict=True):
        if rt.device.kind == "cpu":
            assert np.array_equal(got, wanted)
        else:
            assert np.allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=2**-7, atol=2**-7)
