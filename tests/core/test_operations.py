"""Every row of an operation: values, places, equal bits, a GPU against a CPU (tests/core/operations.py)."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from te_core.runtime import Runtime
from tests.backends import cuda_runtime, requires_cuda
from tests.core.operation_rows import ROWS
from tests.core.operations import bytes_of, check, judge, results

rows = pytest.mark.parametrize(("name", "dtype"), [(name, d) for name, row in ROWS.items() for d in row.dtypes])


@rows
def test_values(rt: Runtime, name: str, dtype: str) -> None:
    """At an aligned and at an odd address, in memory of two bytes; a GPU also gives the same bits again."""
    ask(rt, name, dtype, full=False)


@pytest.mark.full
@rows
def test_values_of_every_size(rt: Runtime, name: str, dtype: str) -> None:
    ask(rt, name, dtype, full=True)


def ask(rt: Runtime, name: str, dtype: str, full: bool) -> None:
    for case in ROWS[name].cases(dtype, full):
        check(results(rt, case), case)
        odd = results(rt, case, 1, 0xFF)
        check(odd, case)
        if rt.backend.name == "cuda":
            assert bytes_of(results(rt, case, 1, 0xFF)) == bytes_of(odd)
        for run in case.also:
            check(results(rt, case, 0, 0xFF, run), case)


@requires_cuda
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.large])
def test_cuda_as_cpu(name: str) -> None:
    """Large ones: equal, or within what both may be off by."""
    row = ROWS[name]
    for dtype, (i, size) in product(row.dtypes, enumerate(row.large)):
        case = row.case(size, dtype, i)
        theirs, ours = (results(rt, case) for rt in (Runtime.cpu(), cuda_runtime()))
        if row.exact:
            for part in theirs.keys() - {"sums"}:  # which are added in another order
                assert (ours[part] is None) == (theirs[part] is None)
                if theirs[part] is not None:
                    judge(part, ours[part], theirs[part], 0)
            continue
        want: Any = case.want(theirs) if callable(case.want) else case.want
        for part, near in want.items():
            if part == "sums" and callable(case.want):  # of the side's own rounded values
                near = case.want(ours)[part]
                judge(part, ours[part], near.value, near.off)
            elif near is not None and np.any(near.off):  # others are judged by formula, or by one another
                judge(part, ours[part], theirs[part], 2 * near.off + (rounding(theirs[part]) if part == "sums" else 0))


def rounding(sums: np.ndarray) -> np.ndarray:
    """Each side rounds sums of its own."""
    return float(ml_dtypes.finfo(sums.dtype).eps) * np.abs(sums.astype(np.float64))
