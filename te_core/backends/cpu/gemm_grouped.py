"""Groups of rows: where each begins, and the column sums of each. Products are the loop of te_core/ops/gemm_grouped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from te_core.backends.cpu.executor import scratch
from te_core.backends.cpu.matrix import store_column_sum
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.gemm_grouped import GroupedGemmSpec


def plan_gemm_grouped(rt: Runtime, spec: GroupedGemmSpec) -> None:
    """None: the numbers are on the host."""


def group_offsets(rt: Runtime, sizes: Tensor, rows: int, out: Tensor, faults: Tensor | None) -> None:
    """Running sums of sizes."""
    given = sizes.numpy().astype(np.int64)
    sums = np.cumsum(np.clip(given, 0, rows + 1))
    out.numpy()[0], out.numpy()[1:] = 0, np.minimum(sums, rows)
    if faults is not None and (given.min(initial=0) < 0 or (sums[-1] if sums.size else 0) != rows):
        faults.numpy()[0] += 1


def group_sums(rt: Runtime, x: Tensor, offsets: Tensor, outs: Sequence[Tensor | None]) -> None:
    """Column sums of each group that has an out."""
    for (start, stop), out in zip(pairwise(offsets.numpy().tolist()), outs, strict=True):
        if out is not None:
            store_column_sum(scratch(rt), x.numpy()[start:stop], out)
