"""Rows divided by their length on CUDA: one launch of l2_norm.cu, shared out as rows of a norm are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_core.backends.cuda import norm_tiling as tiling
from te_core.backends.cuda.sums import TYPES
from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.l2_norm import L2NormOpSpec

_THREADS = 256  # of a block


def _run(rt: Runtime, entry: str, spec: L2NormOpSpec, *operands: Tensor, eps: float) -> None:
    (rows, cols), dtype = spec.shape, spec.dtype
    width = tiling.vector_width(cols, spec.alignment, (dtype.itemsize,), 16 // dtype.itemsize)
    team = tiling.forward_team(cols, width, dtype.itemsize).in_blocks_of(_THREADS)
    kernel = loader.get(
        rt,
        "l2_norm",
        entry=entry,
        args="p" * len(operands) + "qif",
        DTYPE=TYPES[dtype],
        VEC=width,
        SIZE=team.size,
        ITERS=team.iters,
        FULL=team.is_full(cols),
        TEAMS=team.teams,
    )
    if rows:
        kernel(rt, -(-rows // team.teams), team.threads, *operands, rows, cols, eps)


def l2_norm_forward(rt: Runtime, spec: L2NormOpSpec, x: Tensor, y: Tensor, eps: float) -> None:
    """y = x / sqrt(sum(x^2) + eps)."""
    _run(rt, "l2_norm_forward", spec, x, y, eps=eps)


def l2_norm_backward(rt: Runtime, spec: L2NormOpSpec, dy: Tensor, x: Tensor, dx: Tensor, eps: float) -> None:
    """dx = r * (dy - x * r^2 * sum(dy * x))."""
    _run(rt, "l2_norm_backward", spec, dy, x, dx, eps=eps)
