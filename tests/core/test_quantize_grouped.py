"""Several matrices quantized at once: the bytes that `quantize` gives of each alone."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.ops.quantize_grouped import ALIGNMENT, bounds_of, groups_in
from te_core.quantize.state import element
from te_core.quantized import Cast, Format
from tests.backends import cuda_runtime, requires_cuda
from tests.core.inputs import DTYPES, numpy_dtype, placed, poisoned, values
from tests.covering import covering

FORMATS = {
    "delayed": Format(dtypes.float8_e4m3),
    "current": Format(dtypes.float8_e5m2),
    "block": Format(dtypes.float8_e4m3, "block"),
    "tiles": Format(dtypes.float8_e5m2, "block", tiled=True),
    "mxfp8": Format(dtypes.float8_e4m3, "mxfp8"),
    "nvfp4": Format(dtypes.float4_e2m1, "nvfp4"),
}
ORIENTATIONS = [(True, True), (True, False), (False, True)]
#: None but one, empty ones first, last and side by side, one row, none that is whole tiles, whole tiles.
SPLITS = [[0, 0, 5], [37, 0, 1, 128, 0, 0], [129, 16, 257, 33], [256, 128]]
WIDTH = 80


def make_casts(rt, name, count, orientation=(True, True), seed=0):
    """A cast for each matrix; of delayed scaling with a scale and an amax of its own."""
    form = FORMATS[name]
    options = {"rowwise": orientation[0], "columnwise": orientation[1]}
    if name == "nvfp4":
        rng = rt.tensor(np.array([seed, 0], np.int64))
        return [Cast(form, **options, stochastic=True, rng=rng, site=i) for i in range(count)]
    if name != "delayed":
        cast = Cast(form, **options, power_of_two=form.scaling == "block", epsilon=0.25)
        return [cast] * count
    scales = np.random.default_rng(seed).uniform(0.1, 40, (count, 1)).astype(np.float32)
    held = np.arange(count, dtype=np.float32)  # some above the maximum, which then must stay
    return [
        Cast(form, **options, scale=rt.tensor(scales[i]), amax=rt.tensor(held[i : i + 1] * 50)) for i in range(count)
    ]


def pieces(rt, q):
    """All that a quantized matrix holds, as bytes."""
    named = {n: getattr(q, n) for n in ("rowwise", "rowwise_scale", "columnwise", "columnwise_scale")}
    if q.format.scaling == "nvfp4":
        named |= {n: getattr(q, n) for n in ("rowwise_amax", "columnwise_amax")}
    return {n: rt.numpy(t).view(np.uint8) for n, t in named.items() if t is not None}


def same(rt, ours, alone):
    assert ours.format is alone.format and tuple(ours.shape) == tuple(alone.shape)
    a, b = pieces(rt, ours), pieces(rt, alone)
    assert set(a) == set(b)
    for part in a:
        np.testing.assert_array_equal(a[part], b[part], err_msg=part)


def compare(rt, name, dtype, splits, orientation=(True, True), *, sums=False, offset=0, special=False, maxima=None):
    rt = poisoned(rt)
    held = placed(rt, values((sum(splits), WIDTH), dtype, len(splits), special=special), offset)
    sum_dtype = dtypes.dtype(numpy_dtype(dtype))
    totals = [[rt.empty((WIDTH,), sum_dtype) for _ in splits] if sums else [None] * len(splits) for _ in range(2)]
    ours, theirs = (make_casts(rt, name, len(splits), orientation) for _ in range(2))
    if maxima is not None:
        agreed = rt.tensor(np.array(maxima, np.float32))
        ours = theirs = [cast.scaled_by(element(agreed, i)) for i, cast in enumerate(ours)]
    groups = ops.quantize_grouped(rt, held, splits, ours, totals[0] if sums else None)
    for i, (start, stop) in enumerate(bounds_of(splits)):
        same(rt, groups[i], ops.quantize(rt, held.rows(start, stop), theirs[i], column_sum=totals[1][i]))
        for mine, other in ((totals[0][i], totals[1][i]), (ours[i].amax, theirs[i].amax)):
            assert mine is other is None or rt.numpy(mine).tobytes() == rt.numpy(other).tobytes()
    again, front = groups_in(groups[0].block, splits, WIDTH, FORMATS[name], orientation[1]), groups[0].block.ptr
    for group, found in zip(groups, again, strict=True):
        data, there = pieces(rt, group), pieces(rt, found)
        assert all(np.array_equal(data[part], there[part]) for part in there)
        assert (found.columnwise if orientation[1] else found.rowwise).ptr % ALIGNMENT == front % ALIGNMENT


@covering(name=FORMATS, dtype=DTYPES)
def test_groups(rt, name, dtype):
    """Also of more rows than a block of threads takes, and at an address that holds no vector."""
    for i, splits in enumerate(SPLITS):
        compare(rt, name, dtype, splits, ORIENTATIONS[i % 3], sums=i % 2 == 0, special=i == 2 and name != "nvfp4")
    compare(rt, name, "bfloat16", [1000, 0, 700], sums=True)
    if name in ("delayed", "current", "block"):
        compare(rt, name, "bfloat16", [33, 7], sums=True, offset=1)


@covering(count=[49, 130, 400], name=["delayed", "current", "block", "tiles"])
def test_more_than_a_table_holds(rt, count, name):
    compare(rt, name, "bfloat16", [(7 * i) % 5 for i in range(count)], sums=True)


@covering(sums=[False, True], dtype=DTYPES)
def test_given_maxima(rt, sums, dtype):
    """In the place of each matrix's own: what ranks agreed on."""
    compare(rt, "current", dtype, [72, 0, 128], sums=sums, maxima=[3.0, 0.5, 70.0])


@covering(name=FORMATS, dtype=DTYPES)
def test_many(rt, name, dtype):
    """Separate matrices, each with storage of its own; and into that, whatever was there: what was swizzled of it is
    made again.
    """
    rt, shapes, outs, places = poisoned(rt), (48, 129, 0, 16), None, []
    for seed in (0, 1):
        tensors = [placed(rt, values((m, WIDTH), dtype, m + seed)) for m in shapes]
        ours, theirs = (make_casts(rt, name, 4, seed=seed) for _ in range(2))
        made = ops.quantize_many(rt, tensors, ours, outs=outs)
        assert outs is None or (made is outs and places == [q.block.ptr for q in made])
        for q, t, cast in zip(made, tensors, theirs, strict=True):
            same(rt, q, ops.quantize(rt, t, cast))
            assert q.rowwise_swizzled is None
            q.rowwise_swizzled = q.rowwise_scale
        outs, places = made, [q.block.ptr for q in made]
        assert len({*places}) == len(made)


@covering(sizes=[(1,), (7, 0, 300), (5, 70000, 1 << 20, 0)], dtype=DTYPES)
def test_maxima_of_many(rt, sizes, dtype):
    """As of each alone; where one is large the small ones leave most of their blocks idle."""
    rt = poisoned(rt)
    tensors = [placed(rt, values((n,), dtype, i, special=True), i % 2) for i, n in enumerate(sizes)]
    room, alone = rt.zeros((len(sizes),), dtypes.float32), [rt.numpy(ops.amax(rt, t))[0] for t in tensors]
    assert ops.amax_many(rt, tensors, out=room) is room
    for made in (ops.amax_many(rt, tensors), room):
        assert made.shape == (len(sizes),)
        np.testing.assert_array_equal(rt.numpy(made), alone)


def test_one_block(rt):
    """All groups in one allocation, the copy that backward reads at its front; rows apart where it is large."""
    for rows, apart in ((64, False), (2048, True)):
        x = rt.zeros((2 * rows, WIDTH), dtypes.bfloat16)
        a, b = ops.quantize_grouped(rt, x, [rows, rows], make_casts(rt, "current", 2))
        assert a.block is b.block and a.columnwise.owner is b.columnwise.owner is a.block
        assert (a.rowwise.owner is not a.block) is apart and a.rowwise.owner is b.rowwise.owner
        assert a.columnwise.ptr == a.block.ptr


def test_nothing(rt):
    assert ops.quantize_grouped(rt, rt.zeros((0, 16), dtypes.float32), [], []) == []
    assert ops.quantize_many(rt, [], []) == []
    assert ops.amax_many(rt, []).shape == (0,)


def test_plans_do_not_know_the_rows(rt):
    """Splits change with every step: after the first call nothing is planned again."""
    casts = make_casts(rt, "current", 3)
    x = rt.zeros((90, WIDTH), dtypes.bfloat16)
    ops.quantize_grouped(rt, x, [30, 30, 30], casts)
    before = rt.plans.builds
    for i in range(20):
        ops.quantize_grouped(rt, x, [i, 30, 60 - i], casts)
    assert rt.plans.builds == before


@requires_cuda
@pytest.mark.parametrize("name", ["delayed", "current", "block", "tiles"])
def test_launches(name, monkeypatch):
    """One launch for all groups (current scaling: maxima and cast), one more for all column sums."""
    from te_core.kernels.loader import Kernel

    rt, launched = cuda_runtime(), []
    real = Kernel.by_value
    monkeypatch.setattr(Kernel, "by_value", lambda self, *args: (launched.append(self.name), real(self, *args))[1])
    monkeypatch.setattr(Kernel, "__call__", lambda self, *args, **kw: pytest.fail(f"a launch of {self.name}"))
    casts = make_casts(rt, name, 3)
    x = rt.tensor(np.ones((96, WIDTH), np.float32))
    ops.quantize_grouped(rt, x, [40, 0, 56], casts)
    assert len(launched) == (2 if name == "current" else 1)
    launched.clear()
    ops.quantize_grouped(rt, x, [40, 0, 56], casts, [rt.empty((WIDTH,), dtypes.float32) for _ in range(3)])
    assert len(launched) == (3 if name == "current" else 2) and launched.count("column_sum_grouped") == 1
