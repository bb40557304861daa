"""Another size for a matrix, and column sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from te_core.backends.cpu import codec
from te_core.backends.cpu.executor import F32, Executor, row_blocks, scratch
from te_core.runtime import Runtime
from te_core.tensor import Tensor

Array = np.ndarray[Any, Any]


def resize(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """Crop x, or fill up with zeros."""
    source, target = x.numpy(), out.numpy()
    rows, cols = min(x.shape[0], out.shape[0]), min(x.shape[1], out.shape[1])
    target[:rows, :cols] = source[:rows, :cols]
    target[rows:] = 0
    target[:rows, cols:] = 0


@np.errstate(all="ignore")
def column_sum(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """Add the rows in float32."""
    store_column_sum(scratch(rt), x.numpy(), out)


def column_sums(ex: Executor, values: Array) -> F32:
    """The column sums of a dense matrix: float32 within a block of rows, float64 from block to block."""
    m, k = values.shape
    total = np.zeros(k, np.float64)
    for block in row_blocks(m, k):
        part = codec.decode(ex, values[block], ex.floats("column sum", block.stop - block.start, k))
        total += part.sum(axis=0)
    return total.astype(np.float32)


def store_column_sum(ex: Executor, values: Array, column_sum: Tensor) -> None:
    """Set a vector to the column sums of a dense matrix."""
    codec.encode(ex, column_sums(ex, values), column_sum.numpy())
