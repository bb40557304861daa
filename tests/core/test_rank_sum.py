"""The summands of all ranks, added in float32 in their order and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.kernels import loader
from te_core.tensor import Tensor
from tests.backends import runtimes
from tests.core.fake_cuda import Make
from tests.core.inputs import numpy_dtype
from tests.covering import covering

#: (ranks, rows, width): vectors of 8 elements and of fewer, rows longer than a block, no rows.
SIZES = [(2, 6, 64), (3, 5, 12), (4, 3, 6), (8, 2, 16400), (9, 4, 7), (1, 2, 8), (2, 0, 8), (3, 33, 128)]


def strided(out: Tensor, pieces: int, number: int) -> Tensor:
    """One of so many pieces of the columns."""
    width = out.shape[1] // pieces
    ptr = out.ptr + out.dtype.nbytes(number * width)
    return Tensor(ptr, (out.shape[0], width), out.dtype, out.device, out, out.row_major_strides())


@pytest.mark.parametrize("rt", runtimes())
@covering(size=SIZES, dtype=["bfloat16", "float16", "float32"], pieces=[1, 3])
def test_sums_in_order(rt: Any, size: tuple[int, int, int], dtype: str, pieces: int) -> None:
    ranks, rows, width = size
    values = np.random.default_rng(1).standard_normal(size).astype(numpy_dtype(dtype))
    total = values[0].astype(np.float32)
    for part in values[1:]:
        total = total + part.astype(np.float32)
    out = rt.tensor(np.full((rows, pieces * width), 7, np.float32), dtypes.dtype(dtype))
    ops.rank_sum(rt, rt.tensor(values), out=strided(out, pieces, pieces - 1))
    wanted = np.full((rows, pieces * width), 7, np.float32)
    wanted[:, (pieces - 1) * width :] = total.astype(numpy_dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(rt.numpy(out).astype(np.float32), wanted)


def test_the_kernel_goes_by_addresses(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense rows are one long row; vectors are as wide as addresses and strides allow."""
    rt, found = make().runtime(), []

    def get(*_: Any, **constants: Any) -> Any:
        return lambda rt, grid, block, parts, out, *numbers: found.append(
            (constants["VEC"], constants["RANKS"], numbers)
        )

    monkeypatch.setattr(loader, "get", get)
    parts, out = rt.empty((3, 4, 2048), dtypes.bfloat16), rt.empty((4, 2 * 2048), dtypes.bfloat16)
    ops.rank_sum(rt, parts, out=rt.empty((4, 2048), dtypes.bfloat16))
    ops.rank_sum(rt, parts, out=strided(out, 2, 1))
    ops.rank_sum(rt, rt.empty((9, 4, 6), dtypes.bfloat16), out=rt.empty((4, 6), dtypes.bfloat16))
    ops.rank_sum(rt, rt.empty((2, 4, 6), dtypes.float32), out=strided(rt.empty((4, 18), dtypes.float32), 3, 1))
    assert found == [
        (8, 3, (1, 1024, 1, 3, 2048)),
        (8, 3, (4, 256, 1, 3, 4096)),
        (8, 0, (1, 3, 1, 9, 6)),
        (2, 2, (4, 3, 1, 2, 18)),
    ]


@pytest.mark.parametrize(
    ("parts", "out", "said"),
    [
        ((2, 3, 4), (3, 5), r"out = .*\[m, n\] = \[3, 4\] of dtype float32"),
        ((3, 4), (3, 4), r"parts = .*\[ranks, m, n\]"),
        ((0, 3, 4), (3, 4), "ranks=0.*one rank or more"),
    ],
)
def test_what_does_not_fit(parts: tuple[int, ...], out: tuple[int, ...], said: str) -> None:
    (given,) = runtimes()[:1]
    rt: Any = given.values[0]  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=f"rank_sum: got {said}"):
        ops.rank_sum(rt, rt.empty(parts, dtypes.float32), out=rt.empty(out, dtypes.float32))
