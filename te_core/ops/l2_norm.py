"""Rows divided by their length: y = x * r, r = 1 / sqrt(sum(x^2) + eps), a sum and not a mean.

In float32, rounded once to x's dtype. Backward computes r again: dx = r * (dy - x * r^2 * sum(dy * x)).
"""

from __future__ import annotations

from dataclasses import dataclass

from te_core.dtypes import DType
from te_core.ops import _check
from te_core.ops.declare import operation
from te_core.runtime import Runtime
from te_core.tensor import Tensor

MAX_ROW = 65536


@dataclass(frozen=True, slots=True)
class L2NormOpSpec:
    """All that a launch depends on besides addresses."""

    shape: tuple[int, ...]
    dtype: DType
    alignment: int  # how far addresses are off the 16-byte grid, all of them together


_ROWS = """
    x [M, N] act
    must 1 <= N <= MAX_ROW: rows of 1 to {MAX_ROW} elements; use a shorter row
"""


@operation(_ROWS)
def l2_norm_forward(rt: Runtime, x: Tensor, *, eps: float) -> Tensor:
    """y for the rows of a dense matrix x [M, d]."""
    y = rt.empty(x.shape, x.dtype)
    rt.backend.l2_norm_forward(rt, L2NormOpSpec(x.shape, x.dtype, _check.off(x)), x, y, eps)
    return y


@operation(_ROWS, "dy =x")
def l2_norm_backward(rt: Runtime, dy: Tensor, x: Tensor, *, eps: float) -> Tensor:
    """dx, in x's dtype."""
    dx = rt.empty(x.shape, x.dtype)
    rt.backend.l2_norm_backward(rt, L2NormOpSpec(x.shape, x.dtype, _check.off(x, dy)), dy, x, dx, eps)
    return dx
