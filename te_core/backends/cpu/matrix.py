"""Another size for a matrix, and column sums."""

from __future__ import annotations

import numpy as np

from te_core.backends.cpu.executor import scratch
from te_core.backends.cpu.quantize import store_column_sum
from te_core.runtime import Runtime
from te_core.tensor import Tensor


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
