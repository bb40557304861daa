"""Activations forward and backward on CUDA, delivered as values, in FP8, or both.

With delayed scaling (or none) one launch does it all. With current scaling the first launch writes the values, which
the contract keeps for it, and their partial maxima; the second is `quantize.cast_with_partials`' kernel over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from te_core.backends.cuda.quantize import (
    BLOCKS_PER_SM,
    STAGE_BYTES,
    THREADS,
    CastPlan,
    Tiling,
    multiprocessors,
    plan_cast,
    run_cast,
    tiling,
)
from te_core.backends.cuda.sums import FORMATS, TYPES, add_column_sums, column_workspace, sum_kernel
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_GATED = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "clamped_swiglu": "clamped",
}

#: dy, x, y, rowwise, columnwise, source, scale_inv, amax, column_sum, rows, cols, steps, limit, alpha, offset
_ARGS = "pppppppppqqifff"
_DEFAULT_CLAMP = (7.0, 1.702, 1.0)


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """The launch of activation.cu, and for current scaling the cast that follows."""

    family: str
    kernel: Kernel
    tiling: Tiling
    rows: int
    cols: int  # of the activation's output, half of a gated x
    width: int  # of the result: the columns of y, or of dx
    shared: int  # bytes of the kernel's queue
    partials: int  # blocks that leave a partial maximum, for current scaling
    sum_kernel: Kernel | None
    cast: CastPlan | None
    clamp: tuple[float, ...]


def _plan(
    rt: Runtime,
    x: tuple[tuple[int, ...], DType, int],
    kind: str,
    cast_key: tuple[Any, ...] | None,
    keep: bool,
    sum_dtype: DType | None,
    backward: bool,
    clamp: tuple[float, ...] | None,
) -> ActivationPlan:
    """`x` is its shape, its dtype and how far its address (and that of dy) is off the 16-byte grid."""
    shape, dtype, misalignment = x
    gated = kind in _GATED
    rows, cols = shape[0], shape[1] // (1 + gated)
    outputs = 2 if gated and backward else 1
    current = cast_key is not None and not cast_key[3]
    delayed = cast_key is not None and not current
    scaling = "GIVEN_SCALE" if delayed else "NO_CAST"
    columnwise = cast_key is not None and delayed and cast_key[2]
    tall = columnwise or current or sum_dtype is not None
    kernel = loader.get(
        rt,
        "activation",
        args=_ARGS,
        DTYPE=TYPES[dtype],
        KIND=_GATED.get(kind, kind).upper(),
        GATED=int(gated),
        BACKWARD=int(backward),
        FORMAT=FORMATS[cast_key[0].dtype] if cast_key is not None and delayed else "E4M3",
        SCALING=scaling,
        TALL=int(tall),
        COLUMNWISE=int(columnwise),
        COLUMN_SUM=int(sum_dtype is not None),
        KEEP=int(keep or not delayed),
        ALIGNED=int(not misalignment and cols % (16 // dtype.itemsize) == 0),
    )
    # Partial maxima are read again by every block of the second pass: no more of them than blocks run at once.
    bounded = BLOCKS_PER_SM * multiprocessors(rt) if current else 0
    tiles = tiling(rows, cols, dtype, tall=tall, flat_rows=4, outputs=outputs, max_blocks=bounded)
    cast = None
    family = f"activation_{'backward' if backward else 'forward'}_{'tall' if tall else 'flat'}_{scaling.lower()}"
    if current and cast_key is not None:
        cast = plan_cast(rt, (rows, outputs * cols), dtype, cast_key[0].dtype, "OWN_SCALE", cast_key[2], None)
        family += f"+{cast.family}"
    operands, stages = 1 + gated + backward, 4 if tall and not gated and not backward else 2  # as in activation.cu
    return ActivationPlan(
        family,
        kernel,
        tiles,
        rows,
        cols,
        outputs * cols,
        operands * stages * STAGE_BYTES,
        tiles.blocks if current else 0,
        sum_kernel(rt, sum_dtype),
        cast,
        tuple(clamp or _DEFAULT_CLAMP),
    )


def _run(
    rt: Runtime,
    plan: ActivationPlan,
    dy: Tensor | None,
    x: Tensor,
    out: Tensor | None,
    cast: Cast | None,
    q: QuantizedTensor | None,
    column_sum: Tensor | None,
) -> None:
    tiles = plan.tiling
    rowwise = columnwise = source = scale_inv = largest = 0
    if plan.cast is not None:
        largest = rt.workspace("amax", 4 * plan.partials)
    elif cast is not None and q is not None and cast.scale is not None:
        rowwise = 0 if q.rowwise is None else q.rowwise.ptr
        columnwise = 0 if q.columnwise is None else q.columnwise.ptr
        source, scale_inv = cast.scale.ptr, q.scale_inv.ptr
        largest = 0 if cast.amax is None else cast.amax.ptr
    sums = 0 if column_sum is None else column_workspace(rt, tiles.grid[1], plan.width)
    plan.kernel(
        rt,
        tiles.grid,
        THREADS,
        0 if dy is None else dy.ptr,
        x.ptr,
        0 if out is None else out.ptr,
        rowwise,
        columnwise,
        source,
        scale_inv,
        largest,
        sums,
        plan.rows,
        plan.cols,
        tiles.steps,
        *plan.clamp,
        shared=plan.shared,
    )
    if column_sum is not None:
        add_column_sums(rt, plan.sum_kernel, sums, tiles.grid[1], plan.width, column_sum.ptr)
    if plan.cast is not None and out is not None and cast is not None and q is not None:
        run_cast(rt, plan.cast, out, cast, q, largest, plan.partials, None)


def plan_activation_forward(rt: Runtime, key: tuple[Any, ...]) -> ActivationPlan:
    """The launches of `activation_forward` (the key is the op's)."""
    _, clamp, shape, dtype, kind, cast_key, keep, misalignment, _ = key
    return _plan(rt, (shape, dtype, misalignment), kind, cast_key, keep, None, backward=False, clamp=clamp)


def activation_forward(
    rt: Runtime,
    plan: ActivationPlan,
    x: Tensor,
    kind: str,
    y: Tensor | None,
    cast: Cast | None,
    q: QuantizedTensor | None,
) -> None:
    """y = act(x), or act(a) * b for x = (a | b), and its cast."""
    _run(rt, plan, None, x, y, cast, q, None)


def plan_activation_backward(rt: Runtime, key: tuple[Any, ...]) -> ActivationPlan:
    """The launches of `activation_backward` (the key is the op's)."""
    _, clamp, shape, dtype, _, kind, cast_key, keep, sum_dtype, misalignment, _ = key
    return _plan(rt, (shape, dtype, misalignment), kind, cast_key, keep, sum_dtype, backward=True, clamp=clamp)


def activation_backward(
    rt: Runtime,
    plan: ActivationPlan,
    dy: Tensor,
    x: Tensor,
    kind: str,
    dx: Tensor | None,
    cast: Cast | None,
    q: QuantizedTensor | None,
    column_sum: Tensor | None,
) -> None:
    """dx = dy * act'(x), or (dy * b * act'(a) | dy * act(a)), its column sums and its cast."""
    _run(rt, plan, dy, x, dx, cast, q, column_sum)
