"""The order of tokens in rows with padding: a stable sort of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.padding_order import PaddingOrderSpec


def padding_order(rt: Runtime, spec: PaddingOrderSpec, mask: Tensor, there: Tensor, again: Tensor, cu: Tensor) -> None:
    """Tokens first."""
    hidden = mask.numpy().reshape(spec.rows, spec.length) != 0
    sums = cu.numpy()
    sums[0] = 0
    np.cumsum(np.count_nonzero(~hidden, axis=1), out=sums[1:])
    front = np.argsort(hidden, axis=1, kind="stable")
    rows = np.arange(spec.rows)[:, None] * spec.row_step
    here = np.arange(spec.length) * spec.token_step + rows
    for out, places in ((there, front), (again, np.argsort(front, axis=1))):
        out.numpy()[here] = places * spec.token_step + rows
