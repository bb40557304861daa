"""What a row of an operation is: cases, each with what comes of it in NumPy. tests/core/test_operations.py asks them.

A case calls an operation with arrays that are placed for it, and says of each result what it is and how far it may be
off. Of each are asked the values, at aligned and at odd addresses, in memory that shows what nobody wrote; the same of
calls that are alike (in place, strided, with more options); the same bits every time; a GPU's results against a CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from te_core import dtypes
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core.inputs import DTYPES, numpy_dtype, placed, poisoned

Array = np.ndarray[Any, Any]
Found = dict[str, Any]
#: Half a unit in the last place, and what float32 adds to it; the smallest steps that a type can take.
ROUNDING = {"float32": 1e-6, "bfloat16": 2.0**-8 * 1.01, "float16": 2.0**-11 * 1.01}
TINY = {"float32": 1e-37, "bfloat16": 1e-37, "float16": 2.0**-25}


class Near(NamedTuple):
    """What a result is, and how far each element may be off: by nothing, it is equal. NaN is NaN."""

    value: Array
    off: Array | float = 0.0
    dtype: str = ""  # of the result, where that of the value is wider


class Put(NamedTuple):
    """Places arrays on the runtime's device, so many elements past an aligned address."""

    rt: Runtime
    offset: int

    def __call__(self, array: Array | None) -> Any:
        """The array there; none of none."""
        return None if array is None else placed(self.rt, array, self.offset)

    def spread(self, array: Array, axis: int = -2) -> Tensor:
        """The array as the middle third along an axis: every element between two others."""
        axis %= array.ndim
        wide = np.full((*array.shape[:axis], array.shape[axis] * 3, *array.shape[axis + 1 :]), 77).astype(array.dtype)
        wide[(slice(None),) * axis + (slice(1, None, 3),)] = array
        base = placed(self.rt, wide, self.offset)
        step = list(base.row_major_strides())
        at = base.ptr + step[axis] * base.dtype.itemsize
        step[axis] *= 3
        return Tensor(at, array.shape, base.dtype, base.device, base, tuple(step))


Run = Callable[[Runtime, Put], Found]


class Case(NamedTuple):
    """One call."""

    run: Run
    want: dict[str, Near | None] | Callable[[dict[str, Array]], dict[str, Near | None]]  # or made of what was found
    also: tuple[Run, ...] = ()  # whose results are these, too


class Row(NamedTuple):
    """An operation: `case` makes a case of a size, a dtype and the size's number."""

    case: Callable[[Any, str, int], Case]
    sizes: Sequence[Any]
    dtypes: Sequence[str] = DTYPES
    large: Sequence[Any] = ()  # of what a GPU's results are compared with a CPU's
    every: bool = False  # each size in each dtype, and not in one of them in turn
    exact: bool = False  # large ones give the same numbers on all devices

    def cases(self, dtype: str, full: bool = False) -> list[Case]:
        """Those of a dtype; all sizes, or its share of them."""
        at, count = self.dtypes.index(dtype), len(self.dtypes)
        turn = [i for i in range(len(self.sizes)) if full or self.every or (i + i // count) % count == at]
        return [self.case(self.sizes[i], dtype, i) for i in turn]


def close(value: Array, dtype: str, slack: Array | float = 0.0) -> Near:
    """A result that is rounded to a type: within the rounding, and what it is a sum of may be off by."""
    return Near(value, ROUNDING[dtype] * np.abs(value) + slack + TINY[dtype], dtype)


def sums(of: Array, dtype: str, axis: int = 0) -> Near:
    """The sums of values, formed in float32."""
    with np.errstate(invalid="ignore"):
        exact, terms = of.astype(np.float64).sum(axis=axis), np.abs(of.astype(np.float64)).sum(axis=axis)
    return Near(exact, 1e-5 * terms + float(ml_dtypes.finfo(numpy_dtype(dtype)).eps) * np.abs(exact), dtype)


def check(found: dict[str, Array | None], case: Case) -> None:
    """Each result is what it has to be."""
    want = case.want(found) if callable(case.want) else case.want  # type: ignore[arg-type]
    assert found.keys() == want.keys(), found.keys() ^ want.keys()
    for name, near in want.items():
        got = found[name]
        assert (got is None) == (near is None), name
        if got is None or near is None:
            continue
        assert got.dtype == (numpy_dtype(near.dtype) if near.dtype else near.value.dtype), f"{name}: {got.dtype}"
        assert got.shape == near.value.shape, f"{name}: {got.shape}"
        judge(name, got, near.value, near.off)


def judge(name: str, got: Array, value: Array, off: Array | float) -> None:
    """Each element is near the value."""
    with np.errstate(invalid="ignore"):
        a, b = (t if t.dtype.kind in "biu" else t.astype(np.float64) for t in (got, value))
    if np.ndim(off) == 0 and off == 0:
        np.testing.assert_array_equal(a, b, name)
        return
    with np.errstate(invalid="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
    bad = ~((error <= off) | (error == 0))
    assert not bad.any(), f"{name}: {bad.sum()} of {bad.size} off, first at {np.argwhere(bad)[0]}, worst {error.max()}"


def results(rt: Runtime, case: Case, offset: int = 0, byte: int = 0xA5, run: Run | None = None) -> Found:
    """What a call gives, on the host, in memory full of this byte."""
    on = poisoned(rt, byte)
    found = (run or case.run)(on, Put(on, offset))
    return {name: None if t is None else rt.numpy(t) for name, t in found.items()}


def bytes_of(found: Found) -> dict[str, bytes | None]:
    """All of it, for equal bits."""
    return {name: None if t is None else t.tobytes() for name, t in found.items()}


def drawn(shape: Any, dtype: str, seed: int = 0, scale: float = 1.0) -> Array:
    """Normal numbers."""
    random = np.random.default_rng([seed, *np.atleast_1d(shape)])
    return (scale * random.standard_normal(shape)).astype(numpy_dtype(dtype))


def type_of(name: str) -> dtypes.DType:
    """The core's dtype of this name."""
    return dtypes.dtype(name)
