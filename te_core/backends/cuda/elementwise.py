"""Residual add, and bias + dropout + add, on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core.backends.cuda.quantize import BLOCKS_PER_SM, THREADS, Tiling, multiprocessors
from te_core.backends.cuda.sums import TYPES, add_column_sums, column_workspace, sum_kernel
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_TILE_ROWS, _LANES = 16, 32  # of the strips of elementwise.cu


@dataclass(frozen=True, slots=True)
class StripPlan:
    """One launch over the strips of a matrix."""

    family: str
    kernel: Kernel
    tiling: Tiling
    sum_kernel: Kernel | None
    threshold: int
    factor: float


def add(rt: Runtime, a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a + b."""
    count = a.size
    aligned = not (a.ptr | b.ptr | out.ptr) & 15
    key = ("add", count, a.dtype, aligned)
    plan = rt.plans.get(key)
    if plan is None:
        kernel = loader.get(
            rt,
            "elementwise",
            entry="add",
            args="pppq",
            DTYPE=TYPES[a.dtype],
            ALIGNED=int(aligned),
            DROPOUT=0,
            COLUMN_SUM=0,
        )
        tiles = Tiling((min(1 << 20, max(1, -(-count * a.dtype.itemsize // (256 * 2 * 16)))), 1), 1)
        plan = rt.plans.put(key, StripPlan("add", kernel, tiles, None, 0, 1.0))
    plan.kernel(rt, plan.tiling.grid[0], 256, a.ptr, b.ptr, out.ptr, count)


class _Strips(NamedTuple):
    """The key of a plan."""

    operation: str
    shape: tuple[int, ...]
    dtype: DType
    p: float
    aligned: bool
    sum: DType | None = None  # of the column sums


def _plan(rt: Runtime, key: _Strips, entry: str, args: str) -> StripPlan:
    (rows, cols), dtype, p, sum_dtype = key.shape, key.dtype, key.p, key.sum
    vector = 16 // dtype.itemsize
    kernel = loader.get(
        rt,
        "elementwise",
        entry=entry,
        args=args,
        DTYPE=TYPES[dtype],
        DROPOUT=int(p > 0.0),
        COLUMN_SUM=int(sum_dtype is not None),
        ALIGNED=int(key.aligned and cols % vector == 0),
    )
    across = max(1, -(-cols // (_LANES * vector)))
    down = max(1, -(-rows // _TILE_ROWS))
    # Two tiles a block, or as many as keep the partial sums few.
    steps = -(-across * down // (BLOCKS_PER_SM * multiprocessors(rt))) if sum_dtype is not None else 2
    steps = max(1, steps, -(-down // 65535))
    plan = StripPlan(entry, kernel, Tiling((across, -(-down // steps)), steps), sum_kernel(rt, sum_dtype), *mask_of(p))
    rt.plans.put(key, plan)
    return plan


def mask_of(p: float) -> tuple[int, float]:
    """The threshold and the factor of a dropout, as the kernels take them."""
    if p == 1.0:  # a factor of 0 drops even the one word that reaches the threshold
        return signed(0xFFFFFFFF), 0.0
    return signed(int(p * 2.0**32)), 1.0 / (1.0 - p)


def signed(word: int) -> int:
    """The low 32 bits of a number, as the int32 that carries them to a kernel."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def bias_dropout_add(
    rt: Runtime,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    p: float,
    rng: Tensor | None,
    site: int,
) -> None:
    """out = residual + dropout(x + bias)."""
    b, r = (0 if bias is None else bias.ptr), (0 if residual is None else residual.ptr)
    aligned = not (x.ptr | b | r | out.ptr) & 15
    key = _Strips("bias_dropout_add", x.shape, x.dtype, p, aligned)
    plan = rt.plans.get(key)
    if plan is None:
        plan = _plan(rt, key, "bias_dropout_add", "pppppqqiiif")
    plan.kernel(
        rt,
        plan.tiling.grid,
        THREADS,
        x.ptr,
        b,
        r,
        out.ptr,
        None if rng is None else rng.ptr,
        x.shape[0],
        x.shape[1],
        plan.tiling.steps,
        signed(site),
        plan.threshold,
        plan.factor,
    )


def bias_dropout_add_backward(
    rt: Runtime, dy: Tensor, dx: Tensor, p: float, rng: Tensor | None, site: int, column_sum: Tensor | None
) -> None:
    """dx = dy where the mask kept the element, scaled; its column sums."""
    aligned = not (dy.ptr | dx.ptr) & 15
    sum_dtype = None if column_sum is None else column_sum.dtype
    key = _Strips("bias_dropout_add_backward", dy.shape, dy.dtype, p, aligned, sum_dtype)
    plan = rt.plans.get(key)
    if plan is None:
        plan = _plan(rt, key, "dropout_backward", "ppppqqiiif")
    rows, cols = dy.shape
    sums = 0 if column_sum is None else column_workspace(rt, plan.tiling.grid[1], cols)
    plan.kernel(
        rt,
        plan.tiling.grid,
        THREADS,
        dy.ptr,
        dx.ptr,
        None if rng is None else rng.ptr,
        sums,
        rows,
        cols,
        plan.tiling.steps,
        signed(site),
        plan.threshold,
        plan.factor,
    )
    if column_sum is not None:
        add_column_sums(rt, plan.sum_kernel, sums, plan.tiling.grid[1], cols, column_sum.ptr)
