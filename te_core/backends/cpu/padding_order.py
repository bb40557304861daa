"""The order of tokens in rows with padding: a stable sort of each row."""

from __future__ import annotations

import numpy as np

from te_core.runtime import Runtime
from te_core.tensor import Tensor


def padding_order(rt: Runtime, steps: tuple[int, int], mask: Tensor, there: Tensor, again: Tensor, cu: Tensor) -> None:
    """Tokens first."""
    hidden, (token_step, row_step) = mask.numpy() != 0, steps
    sums = cu.numpy()
    sums[0] = 0
    np.cumsum(np.count_nonzero(~hidden, axis=1), out=sums[1:])
    front = np.argsort(hidden, axis=1, kind="stable")
    rows = np.arange(mask.shape[0])[:, None] * row_step
    here = np.arange(mask.shape[1]) * token_step + rows
    for out, places in ((there, front), (again, np.argsort(front, axis=1))):
        out.numpy()[here] = places * token_step + rows
