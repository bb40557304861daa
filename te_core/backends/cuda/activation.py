"""Activations forward and backward on CUDA, delivered as values, in FP8, or both.

With delayed scaling (or none) one launch does it all. With current scaling the first launch writes the values, which
the contract keeps for it, and their partial maxima; the second is `quantize.cast_with_partials`' kernel over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime

if TYPE_CHECKING:
    from te_core.ops.activation import ActivationOperands, ActivationSpec

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


def _plan(rt: Runtime, spec: ActivationSpec, backward: bool) -> ActivationPlan:
    kind, (rows, width), dtype, cast_key = spec.kind, spec.shape, spec.dtype, spec.cast
    gated = kind in _GATED
    cols = width // (1 + gated)
    outputs = 2 if gated and backward else 1
    current = cast_key is not None and not cast_key.delayed
    delayed = cast_key is not None and not current
    scaling = "GIVEN_SCALE" if delayed else "NO_CAST"
    columnwise = cast_key is not None and delayed and cast_key.columnwise
    tall = columnwise or current or spec.sum is not None
    kernel = loader.get(
        rt,
        "activation",
        args=_ARGS,
        DTYPE=TYPES[dtype],
        KIND=_GATED.get(kind, kind).upper(),
        GATED=int(gated),
        BACKWARD=int(backward),
        FORMAT=FORMATS[cast_key.format.dtype] if cast_key is not None and delayed else "E4M3",
        SCALING=scaling,
        TALL=int(tall),
        COLUMNWISE=int(columnwise),
        COLUMN_SUM=int(spec.sum is not None),
        KEEP=int(spec.keep or not delayed),
        ALIGNED=int(not spec.alignment and cols % (16 // dtype.itemsize) == 0),
    )
    # Partial maxima are read again by every block of the second pass: no more of them than blocks run at once.
    bounded = BLOCKS_PER_SM * multiprocessors(rt) if current else 0
    tiles = tiling(rows, cols, dtype, tall=tall, flat_rows=4, outputs=outputs, max_blocks=bounded)
    cast = None
    family = f"activation_{'backward' if backward else 'forward'}_{'tall' if tall else 'flat'}_{scaling.lower()}"
    if current and cast_key is not None:
        fp8, own = cast_key.format.dtype, (rows, outputs * cols)
        cast = plan_cast(rt, own, dtype, fp8, "OWN_SCALE", cast_key.columnwise, None)
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
        sum_kernel(rt, spec.sum),
        cast,
        spec.clamp,
    )


def plan_activation_forward(rt: Runtime, spec: ActivationSpec) -> ActivationPlan:
    """The launches of `activation_forward`."""
    return _plan(rt, spec, backward=False)


def plan_activation_backward(rt: Runtime, spec: ActivationSpec) -> ActivationPlan:
    """The launches of `activation_backward`."""
    return _plan(rt, spec, backward=True)


def _run(rt: Runtime, plan: ActivationPlan, operands: ActivationOperands) -> None:
    x, dy, out, cast, q, column_sum = operands
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


def activation_forward(rt: Runtime, plan: ActivationPlan, operands: ActivationOperands) -> None:
    """y = act(x), or act(a) * b for x = (a | b), and its cast."""
    _run(rt, plan, operands)


def activation_backward(rt: Runtime, plan: ActivationPlan, operands: ActivationOperands) -> None:
    """dx = dy * act'(x), or (dy * b * act'(a) | dy * act(a)), its column sums and its cast."""
    _run(rt, plan, operands)
