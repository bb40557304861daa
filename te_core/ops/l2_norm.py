"""Rows divided by their length: y = x * r, r = 1 / sqrt(sum(x^2) + eps), a sum and not a mean.

In float32, rounded once to x's dtype. Backward computes r again: dx = r * (dy - x * r^2 * sum(dy * x)).
"""

from __future__ import annotations

from dataclasses import dataclass

from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.ops import _check
from te_core.runtime import Runtime
from te_core.tensor import Tensor

MAX_ROW = 65536


@dataclass(frozen=True, slots=True)
class L2NormOpSpec:
    """All that a launch depends on besides addresses."""

    shape: tuple[int, ...]
    dtype: DType
    alignment: int  # how far addresses are off the 16-byte grid, all of them together


def l2_norm_forward(rt: Runtime, x: Tensor, *, eps: float) -> Tensor:
    """y for the rows of a dense matrix x [M, d]."""
    _check_rows("l2_norm_forward", rt, x)
    y = rt.empty(x.shape, x.dtype)
    rt.backend.l2_norm_forward(rt, L2NormOpSpec(x.shape, x.dtype, _check.off(x)), x, y, eps)
    return y


def l2_norm_backward(rt: Runtime, dy: Tensor, x: Tensor, *, eps: float) -> Tensor:
    """dx, in x's dtype."""
    op = "l2_norm_backward"
    _check_rows(op, rt, x)
    _check.like(op, "dy", dy, x)
    _check.on_device(op, rt.device, dy)
    dx = rt.empty(x.shape, x.dtype)
    rt.backend.l2_norm_backward(rt, L2NormOpSpec(x.shape, x.dtype, _check.off(x, dy)), dy, x, dx, eps)
    return dx


def _check_rows(op: str, rt: Runtime, x: Tensor) -> None:
    _check.on_device(op, rt.device, x)
    _check.matrix(op, "x", x)
    _check.one_of(op, "dtype of x", x.dtype, ACTIVATION_DTYPES)
    _check.require(
        1 <= x.shape[1] <= MAX_ROW, op, f"rows of {x.shape[1]} elements", f"1 to {MAX_ROW}", "use a shorter row"
    )
