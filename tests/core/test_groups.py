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
from te_core.quantized import Cast, Format, QuantizedRows, QuantizedTensor
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


#: Sizes, out features, in features of FP8 products.
FP8_CASES = {
    "a tile": ([128], 256, 128),
    "odd sizes": ([100, 0, 28, 300, 1, 7, 129], 272, 144),
    "edges": ([64, 65, 127, 128, 255, 256], 528, 272),
    "many": ([9, 0, 3] * 70, 144, 208),
}
#: Scaling, types of x and dy.
FP8_KINDS = [("delayed", D.float8_e4m3, D.float8_e5m2), ("current", D.float8_e4m3, D.float8_e4m3)]
FP8_KINDS += [("block", D.float8_e4m3, D.float8_e5m2)]


def casts_of(rt: Runtime, scaling: str, kind: D.DType, groups: int) -> tuple[list[Cast], Tensor]:
    """A cast for each group, as a module's state gives them, and the maxima that they raise."""
    form = Format(kind, "block" if scaling == "block" else "tensor")
    scales = rt.tensor(2.0 ** (np.arange(3 * groups) % 8).astype(np.float32))
    amax = rt.zeros((3 * groups,), D.float32)

    def at(vector: Tensor, e: int) -> Tensor:
        return Tensor(vector.ptr + 12 * e, (1,), D.float32, vector.device, vector)

    more = [{"scale": at(scales, e), "amax": at(amax, e)} if scaling == "delayed" else {} for e in range(groups)]
    return [Cast(form, rowwise=True, columnwise=True, **given) for given in more], amax


def hopper_or_cpu(rt: Runtime) -> None:
    if rt.device.kind == "cuda" and capability() != (9, 0):
        pytest.skip("hardware: groups in one launch are Hopper's")


@pytest.mark.parametrize("dtype", [D.bfloat16, D.float16, D.float32], ids=str)
@pytest.mark.parametrize(("scaling", "kind"), [k[:2] for k in FP8_KINDS] + [("delayed", D.float8_e5m2)], ids=str)
def test_rows_quantized_by_offsets(rt, scaling, kind, dtype):
    """Values, scales and maxima are those of each group alone; in the transposed copy zeros follow a group."""
    sizes, width = [100, 0, 28, 300, 1, 7, 129, *[0, 3] * 30], 144
    x = values(rt, sum(sizes), width, seed=0, dtype=dtype)
    casts, amax = casts_of(rt, scaling, kind, len(sizes))
    alone, wanted = casts_of(rt, scaling, kind, len(sizes))
    q = ops.quantize_rows(rt, x, ends(rt, sizes), casts)
    groups = ops.quantize_grouped(rt, x, sizes, alone)
    assert np.array_equal(rt.numpy(amax), rt.numpy(wanted))
    rows, columns = (rt.numpy(t).view(np.uint8) for t in (q.rowwise, q.columnwise))
    row_scale, column_scale = rt.numpy(q.rowwise_scale), rt.numpy(q.columnwise_scale)
    only = [ops.quantize_rows(rt, x, ends(rt, sizes), [c.__class__(c.format, rowwise=r, columnwise=not r, scale=c.scale)
                                                       for c in casts]) for r in (True, False)]  # fmt: skip
    assert np.array_equal(rt.numpy(only[0].rowwise).view(np.uint8), rows) and only[0].columnwise is None
    alone_columns, column = rt.numpy(only[1].columnwise).view(np.uint8), 0
    for e, ((start, stop), g) in enumerate(zip(pairwise([0, *np.cumsum(sizes).tolist()]), groups, strict=True)):
        m, end = stop - start, column + -(-(stop - start) // 128) * 128
        assert np.array_equal(rows[start:stop], rt.numpy(g.rowwise).view(np.uint8)[:m])
        assert np.array_equal(columns[:, column : column + m], rt.numpy(g.columnwise).view(np.uint8)[:, :m])
        assert not columns[:, column + m : end].any()
        assert np.array_equal(columns[:, column:end], alone_columns[:, column:end])
        if scaling != "block":
            assert row_scale[e] == column_scale[e] == rt.numpy(g.scale_inv)[0]
        elif m:
            assert np.array_equal(row_scale[:, start:stop], rt.numpy(g.rowwise_scale)[:, :m])
            blocks = g.columnwise_scale.shape[0]
            assert np.array_equal(column_scale[column // 128 :][:blocks], rt.numpy(g.columnwise_scale))
        column = end


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", FP8_KINDS, ids=lambda kind: kind[0])
@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_in_one_launch(rt, name, kind, split):
    """Against the loop over groups: the same bits on a CPU; on a GPU sums of another order, to which the low bits of
    the tensor cores' own sums belong."""
    hopper_or_cpu(rt)
    (scaling, of_x, of_dy), (sizes, n, k) = kind, FP8_CASES[name]
    groups, offsets, total = len(sizes), ends(rt, sizes), sum(sizes)
    x, dy = values(rt, total, k, seed=0), values(rt, total, n, seed=1)
    w = [values(rt, n, k, seed=10 + e) for e in range(groups)]
    bias = [values(rt, n, seed=900 + e) if e % 2 else None for e in range(groups)]
    xs, dys = casts_of(rt, scaling, of_x, groups)[0], casts_of(rt, scaling, of_dy, groups)[0]
    form = Format(of_x, "block", tiled=True) if scaling == "block" else Format(of_x)
    qw = ops.quantize_many(rt, w, [Cast(form, rowwise=True, columnwise=True)] * groups)
    found: list[list[tuple[str, np.ndarray]]] = []
    for by in ({"offsets": offsets}, {"sizes": sizes}):
        cast = ops.quantize_rows if "offsets" in by else ops.quantize_grouped
        rows = [cast(rt, t, next(iter(by.values())), c) for t, c in ((x, xs), (dy, dys))]
        y, dx = (rt.tensor(np.full((total, width), 7.0, np.float32), D.bfloat16) for width in (n, k))
        rules = {**by, "split_accumulator": split}
        ops.gemm_grouped(rt, rows[0], qw, y, trans_b=True, bias=bias, **rules)
        ops.gemm_grouped(rt, rows[1], qw, dx, **rules)
        results = [("rows", wide(rt, y)), ("rows", wide(rt, dx))]
        for out, adds in ((D.bfloat16, False), (D.float32, False), (D.float32, True), (D.bfloat16, True)):
            dws = [None if e == 2 else rt.tensor(np.full((n, k), 2.0, np.float32), out) for e in range(groups)]
            ops.gemm_grouped(rt, rows[1], rows[0], dws, trans_a=True, accumulate=adds, **rules)
            results += [(f"{out}{' added' * adds}", wide(rt, t)) for t in dws if t is not None]
        found.append(results)
    fast = scaling != "block" and not split
    for (name, got), (_, wanted) in zip(*found, strict=True):
        if rt.device.kind == "cpu":
            assert np.array_equal(got, wanted), name
            continue
        # Fast sums keep 13 bits or so of each addend; the loop rounds what it adds to bfloat16; two neighbours there.
        near = 2.0**-9 if fast else 2.0**-16 if name.startswith("float32") else 2.0**-8
        off = np.abs(got - wanted) - near * np.abs(wanted).max(initial=0) - 2.0**-7 * np.abs(wanted)
        assert (off <= 0).all(), (name, off.max())
    assert isinstance(rows[0][0], QuantizedTensor)


def test_fp8_rows_by_formula(rt):
    """Products of quantized rows are those of the numbers that they stand for."""
    hopper_or_cpu(rt)
    sizes, n, k = [40, 0, 130], 64, 256
    x, w = values(rt, sum(sizes), k, seed=0), [values(rt, n, k, seed=e) for e in (1, 2, 3)]
    for scaling in ("current", "block"):
        casts = casts_of(rt, scaling, D.float8_e4m3, 3)[0]
        q = ops.quantize_rows(rt, x, ends(rt, sizes), casts)
        assert isinstance(q, QuantizedRows)
        form = Format(D.float8_e4m3, "block", tiled=True) if scaling == "block" else Format(D.float8_e4m3)
        qw = ops.quantize_many(rt, w, [Cast(form, rowwise=True, columnwise=False)] * 3)
        y = rt.empty((sum(sizes), n), D.bfloat16)
        ops.gemm_grouped(rt, q, qw, y, ends(rt, sizes), trans_b=True)
        for e, (start, stop) in enumerate(pairwise([0, *np.cumsum(sizes).tolist()])):
            alone = ops.quantize(rt, x.rows(start, stop), casts[e])
            wanted = wide(rt, ops.dequantize(rt, alone, D.float32)) @ wide(rt, ops.dequantize(rt, qw[e], D.float32)).T
            assert np.abs(wide(rt, y)[start:stop] - wanted).max(initial=0) <= 2.0**-7 * np.abs(wanted).max(initial=1)


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
