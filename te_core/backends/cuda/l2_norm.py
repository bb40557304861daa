"""Rows divided by their length on CUDA: one launch of l2_norm.cu, shared out as rows of a norm are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_core.backends.cuda import norm_tiling as tiling
from te_core.backends.cuda.sums import TYPES
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.l2_norm import L2NormOpSpec

_THREADS = 256  # of a block


@dataclass(frozen=True, slots=True)
class L2NormPlan:
    """One launch."""

    family: str
    kernel: Kernel
    blocks: int
    threads: int


def _plan(rt: Runtime, entry: str, spec: L2NormOpSpec, args: str) -> L2NormPlan:
    (rows, cols), dtype = spec.shape, spec.dtype
    width = tiling.vector_width(cols, spec.alignment, (dtype.itemsize,), 16 // dtype.itemsize)
    team = tiling.forward_team(cols, width, dtype.itemsize).in_blocks_of(_THREADS)
    kernel = loader.get(
        rt,
        "l2_norm",
        entry=entry,
        args=args,
        DTYPE=TYPES[dtype],
        VEC=width,
        SIZE=team.size,
        ITERS=team.iters,
        FULL=int(team.is_full(cols)),
        TEAMS=team.teams,
    )
    return L2NormPlan(entry, kernel, -(-rows // team.teams), team.threads)


def plan_l2_norm_forward(rt: Runtime, spec: L2NormOpSpec) -> L2NormPlan:
    """The launch of `l2_norm_forward`."""
    return _plan(rt, "l2_norm_forward", spec, "ppqif")


def l2_norm_forward(rt: Runtime, plan: L2NormPlan, x: Tensor, y: Tensor, eps: float) -> None:
    """y = x / sqrt(sum(x^2) + eps)."""
    if plan.blocks:
        plan.kernel(rt, plan.blocks, plan.threads, x.ptr, y.ptr, x.shape[0], x.shape[1], eps)


def plan_l2_norm_backward(rt: Runtime, spec: L2NormOpSpec) -> L2NormPlan:
    """The launch of `l2_norm_backward`."""
    return _plan(rt, "l2_norm_backward", spec, "pppqif")


def l2_norm_backward(rt: Runtime, plan: L2NormPlan, dy: Tensor, x: Tensor, dx: Tensor, eps: float) -> None:
    """dx = r * (dy - x * r^2 * sum(dy * x))."""
    if plan.blocks:
        plan.kernel(rt, plan.blocks, plan.threads, dy.ptr, x.ptr, dx.ptr, x.shape[0], x.shape[1], eps)
