"""What holds of a cast into every format: column sums beside it, addresses off the grid, any bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_core import dtypes, ops
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from tests.core import test_quantize as per_tensor
from tests.core import test_quantize_block as block
from tests.core import test_quantize_mxfp8 as mxfp8
from tests.core import test_quantize_nvfp4 as nvfp4
from tests.core.covering_lists import covering_lists
from tests.core.inputs import DTYPES, FP8, SHAPES, numpy_dtype, placed, poisoned, values
from tests.core.test_quantize_grouped import same

ORIENTATIONS = [(True, False), (False, True), (True, True)]


class Case(NamedTuple):
    """One format: its casts in an orientation (the count alternates what else there is), what they must give, and
    where to look."""

    casts: Callable[[Runtime, int, tuple[bool, bool]], list[Cast]]
    check: Callable[[Runtime, QuantizedTensor, np.ndarray, Cast], None]
    summed: Sequence[tuple[int, int]]
    unaligned: Sequence[tuple[int, int]] = ((40, 64), (33, 16), (16, 31), (2, 300))
    offset: int = 0  # of every other matrix that is summed


def check_per_tensor(rt, q, x, cast):
    fp8 = cast.dtype.name
    scale = per_tensor.ref.scale_of(per_tensor.ref.amax(x), fp8, 0.0, False)
    if cast.scale is not None:
        scale = rt.numpy(cast.scale)[0]
    per_tensor.check_storage(rt, q, per_tensor.ref.cast(x, scale, fp8), (cast.rowwise, cast.columnwise), scale)


def check_mxfp8(rt, q, x, cast):
    mxfp8.check(rt, q, x, cast.dtype.name, (cast.rowwise, cast.columnwise), cast.format.tiled)


def check_nvfp4(rt, q, x, cast):
    options = (cast.format.tiled, cast.transform, cast.stochastic, cast.format.row_scaled, cast.four_over_six)
    with np.errstate(all="ignore"):
        copies = nvfp4.expected(x, options)
    assert (q.rowwise is not None, q.columnwise is not None) == (cast.rowwise, cast.columnwise)
    nvfp4.check_storage(rt, q, copies)


def of_blocks(tiled):
    return Case(
        lambda rt, i, o: [block.make_cast(FP8[i % 2], tiled, o)],
        block.check,
        [(1, 1), (17, 33), (0, 32), (48, 0), (130, 264), (129, 257), (1500, 72)],
        ((40, 64), (33, 16), (130, 144), (16, 31), (2, 300)),
    )


CASES = {
    "delayed": Case(
        lambda rt, i, o: [per_tensor.make_cast(rt, FP8[i % 2], o, scale=scale) for scale in (2.0, 0.5)],
        check_per_tensor,
        [*SHAPES, (1500, 72)],
    ),
    "current": Case(
        lambda rt, i, o: [per_tensor.make_cast(rt, FP8[i % 2], o)], check_per_tensor, [*SHAPES, (1500, 72)]
    ),
    "1x128": of_blocks(False),
    "128x128": of_blocks(True),
    "mxfp8": Case(
        lambda rt, i, o: [mxfp8.make_cast(FP8[i % 2], o, tiled) for tiled in (False, True)],
        check_mxfp8,
        [*SHAPES, (1500, 72), (40000, 24)],
    ),
    "nvfp4": Case(
        lambda rt, i, o: [nvfp4.make_cast(rt, options, o) for options in (nvfp4.OPTIONS[0], nvfp4.OPTIONS[3])],
        check_nvfp4,
        [(0, 32), (33, 17), (300, 72)],
        offset=1,
    ),
}
on_dtypes = pytest.mark.parametrize("dtype", DTYPES)
on_formats = pytest.mark.parametrize("name", CASES)


@covering_lists(on_formats, on_dtypes)
def test_column_sum(rt, name, dtype):
    """Right within the rounding of its type, the same every time; and asking for it changes nothing else."""
    rt, case = poisoned(rt), CASES[name]
    for i, shape in enumerate(case.summed):
        x = values(shape, dtype, i)
        out_type = (dtype, "float32")[i % 2]
        exact, scale = x.astype(np.float64).sum(axis=0), np.abs(x.astype(np.float64)).sum(axis=0)
        eps = float(ml_dtypes.finfo(numpy_dtype(out_type)).eps)
        for orientation in ORIENTATIONS[i % 2 : i % 2 + 2]:
            for cast in case.casts(rt, i, orientation):
                sums = [rt.empty((shape[1],), dtypes.dtype(out_type)) for _ in range(2)]
                given = placed(rt, x, i % 2 * case.offset)
                results = [ops.quantize(rt, given, cast, column_sum=out) for out in sums]
                got = rt.numpy(sums[0])
                np.testing.assert_array_equal(got.view(np.uint8), rt.numpy(sums[1]).view(np.uint8))
                assert (np.abs(got.astype(np.float64) - exact) <= 1e-5 * scale + eps * np.abs(exact)).all()
                case.check(rt, results[0], x, cast)
                for plain in (results[1], ops.quantize(rt, placed(rt, x), cast)):
                    same(rt, results[0], plain)


@covering_lists(on_formats, on_dtypes)
def test_unaligned(rt, name, dtype):
    """An address off the 16-byte grid, whatever the shape."""
    rt, case = poisoned(rt), CASES[name]
    for i, shape in enumerate(case.unaligned):
        x = values(shape, dtype, i, special=True)
        for cast in case.casts(rt, i, (True, True)):
            for sums in (None, rt.empty((shape[1],), dtypes.float32)):
                case.check(rt, ops.quantize(rt, placed(rt, x, 1 + i), cast, column_sum=sums), x, cast)


#: What may be drawn of a cast beside its type. (Those per tensor are checked in three scales.)
ANY: dict[str, Callable[[Any, str], Cast]] = {
    "1x128": lambda yes, fp8: block.make_cast(fp8, False, power_of_two=yes()),
    "128x128": lambda yes, fp8: block.make_cast(fp8, True, power_of_two=yes()),
    "mxfp8": lambda yes, fp8: mxfp8.make_cast(fp8, tiled=yes()),
}


@pytest.mark.parametrize("name", ["per tensor", *ANY])
@given(data=st.data())
def test_any_bits(name, data):
    """Every bit pattern of every type: the CPU backend against the formulas."""
    dtype = numpy_dtype(data.draw(st.sampled_from(DTYPES)))
    rows, cols = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 40))
    bits = data.draw(st.binary(min_size=rows * cols * dtype.itemsize, max_size=rows * cols * dtype.itemsize))
    x, rt, fp8 = np.frombuffer(bits, dtype).reshape(rows, cols), Runtime.cpu(), data.draw(st.sampled_from(FP8))
    if name == "per tensor":
        per_tensor.check_any_bits(rt, x, fp8)
    else:
        cast = ANY[name](lambda: data.draw(st.booleans()), fp8)
        CASES[name].check(rt, ops.quantize(rt, placed(rt, x), cast), x, cast)
