"""LayerNorm and RMSNorm on CUDA: which kernel, with which tiling; then its pointers.

| wanted | launches |
|---|---|
| values, or FP8 with a given scale (delayed scaling) | norm_forward |
| FP8 with its own scale (current scaling) | norm_forward with an amax for each block, then the cast of quantize.cu |
| dx, dgamma, dbeta | norm_backward (rows over 16,384 elements: norm_backward_wide, two kernels), norm_backward_sum |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_core import dtypes, libraries
from te_core.backends.cuda import norm_tiling as tiling
from te_core.backends.cuda.elementwise import mask_of, signed
from te_core.backends.cuda.quantize import cast_with_partials
from te_core.backends.cuda.sums import FORMATS, TYPES
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.quantized import padded
from te_core.runtime import Runtime
from te_core.tensor import Device

if TYPE_CHECKING:
    from te_core.ops.norm import NormGradients, NormOperands, NormOpSpec

_KINDS = {"LayerNorm": "LAYER", "RMSNorm": "RMS"}


def limits(rt: Runtime) -> tiling.Limits:
    """What the runtime's device can hold; asked once."""
    return rt.device.of(_limits)


def _limits(device: Device) -> tiling.Limits:
    driver = libraries.driver()
    return tiling.Limits(**{name: driver.attribute(device.index, name) for name in tiling.Limits.__dataclass_fields__})


# ---------------------------------------------------------------------------------------------- forward


#: x, gamma, beta, y, rowwise, columnwise, mean, rstd, scale, scale_inv, amax, rows, cols, 1 / cols, eps
_FORWARD_ARGS = "pppppppppppqiff"
#: With a branch also residual, bias, sum, rng, site, threshold and factor.
_BRANCH_ARGS = "ppppiif"


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """One launch; with `partials` a cast follows it. `scratch`: bytes for a row-wise copy that nobody wants.

    `mask`: the threshold and factor of a branch's dropout.
    """

    family: str
    kernel: Kernel
    grid: int
    block: int
    shared: int
    rows: int
    cols: int
    inverse: float
    partials: bool
    scratch: int
    mask: tuple[int, float]


def plan_norm_forward(rt: Runtime, spec: NormOpSpec) -> ForwardPlan:
    """The launches of `norm_forward`."""
    (rows, cols), cast, margin = spec.shape, spec.cast, spec.sm_margin
    sizes = (spec.x.itemsize, spec.gamma.itemsize, spec.out.itemsize)
    width = tiling.vector_width(cols, spec.alignment, sizes, 16 // sizes[0])
    team = tiling.forward_team(cols, width, sizes[0])
    constants: dict[str, Any] = {
        "IN": TYPES[spec.x],
        "GAMMA": TYPES[spec.gamma],
        "OUT": TYPES[spec.out],
        "KIND": _KINDS[spec.kind],
        "ZERO_CENTERED": int(spec.zero_centered),
        "VEC": width,
        "SIZE": team.size,
        "ITERS": team.iters,
        "FULL": int(team.is_full(cols)),
        "RESIDUAL": int(spec.branch),
        "BIAS": int(spec.bias),
        "DROPOUT": int(spec.p > 0.0),
    }
    delayed = cast is not None and cast.delayed
    rowwise = cast is not None and cast.rowwise
    turn = cast is not None and delayed and cast.columnwise
    use = "KEEP_NONE" if cast is None else "PARTIALS" if not delayed else "RAISE" if cast.amax else "KEEP_NONE"
    if turn:
        team = tiling.transposing_team(team)
    else:
        team = team.in_blocks_of(1024 if margin else tiling.FORWARD_THREADS)
    row_bytes = team.row_bytes(sizes[0]) * (1 + spec.branch)
    side_by_side = 1 if margin else max(1, (tiling.TILE_RESIDENT if turn else tiling.FORWARD_RESIDENT) // team.threads)
    most = tiling.TILE_STAGES if turn else tiling.FORWARD_STAGES
    stages = tiling.stages(row_bytes, side_by_side, most, limits(rt)) if team.iters else 0
    height = tiling.TILE_ROWS if turn else team.teams
    kernel = loader.get(
        rt,
        "norm_forward",
        args=_FORWARD_ARGS + (_BRANCH_ARGS if spec.branch else ""),
        **constants,
        TEAMS=team.teams,
        ROWS=height,
        STAGES=stages,
        VALUES=int(spec.keep or not delayed),
        CAST=int(delayed),
        ROWWISE=int(rowwise),
        COLUMNWISE=int(turn),
        AMAX=use,
        FORMAT=FORMATS[dtypes.float8_e4m3 if cast is None else cast.format.dtype],
        MIN_BLOCKS=side_by_side,
    )
    shared = stages * row_bytes
    steps = -(-(padded(rows) if delayed else rows) // height)
    grid = min(steps, _blocks(rt, team.threads, kernel, shared, margin))
    # A cast is launched for no rows too: it writes the scale's inverse, or the partial maximum 0.
    grid = max(grid, 1 if cast else 0)
    return ForwardPlan(
        f"norm_forward_{'transposed' if turn else 'rows'}",
        kernel,
        grid,
        team.threads,
        shared,
        rows,
        cols,
        1.0 / cols,
        use == "PARTIALS",
        0 if rowwise or not turn else grid * height * padded(cols),
        mask_of(spec.p),
    )


def _blocks(rt: Runtime, threads: int, kernel: Kernel, shared: int, margin: int) -> int:
    """Blocks of a persistent grid. With a margin one large block to a multiprocessor: the hardware spreads blocks
    over all multiprocessors before it doubles up, so fewer blocks than multiprocessors leave some of them free."""
    if margin:
        return max(1, limits(rt).multiprocessors - margin)
    return limits(rt).multiprocessors * limits(rt).blocks_per_multiprocessor(threads, kernel.attribute(4), shared)


def norm_forward(rt: Runtime, plan: ForwardPlan, operands: NormOperands) -> None:
    """Run a plan of `plan_norm_forward`."""
    if not plan.grid:
        return
    x, gamma, beta, y, cast, q, mean, rstd, eps, branch = operands
    rowwise = columnwise = scale = scale_inv = amax = 0
    if plan.partials:
        amax = rt.workspace("norm amax", 4 * plan.grid)
    elif cast is not None and q is not None:
        rowwise = q.rowwise.ptr if q.rowwise is not None else rt.workspace("norm bytes", plan.scratch)
        columnwise = q.columnwise.ptr if q.columnwise is not None else 0
        scale = cast.scale.ptr if cast.scale is not None else 0
        scale_inv = q.scale_inv.ptr
        amax = cast.amax.ptr if cast.amax is not None else 0
    more: tuple[Any, ...] = ()
    if branch is not None:
        more = (
            branch.residual.ptr,
            branch.bias.ptr if branch.bias is not None else 0,
            branch.sum.ptr,
            branch.rng.ptr if branch.rng is not None else 0,
            signed(branch.site),
            *plan.mask,
        )
    plan.kernel(
        rt,
        plan.grid,
        plan.block,
        x.ptr,
        gamma.ptr,
        beta.ptr if beta is not None else 0,
        y.ptr if y is not None else 0,
        rowwise,
        columnwise,
        mean.ptr if mean is not None else 0,
        rstd.ptr,
        scale,
        scale_inv,
        amax,
        plan.rows,
        plan.cols,
        plan.inverse,
        eps,
        *more,
        shared=plan.shared,
    )
    if plan.partials and cast is not None and q is not None and y is not None:
        cast_with_partials(rt, y, cast, q, amax, plan.grid)


# ---------------------------------------------------------------------------------------------- backward


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """Two launches, three for very long rows (`columns`). `parts`: partial sums of each column."""

    family: str
    kernel: Kernel
    grid: int
    block: int
    shared: int
    columns: Kernel | None
    columns_grid: tuple[int, int]
    total: Kernel
    total_grid: tuple[int, int]
    parts: int
    rows: int
    cols: int
    inverse: float


def plan_norm_backward(rt: Runtime, spec: NormOpSpec) -> BackwardPlan:
    """The launches of `norm_backward`."""
    (rows, cols), margin = spec.shape, spec.sm_margin
    sizes = (spec.x.itemsize, spec.out.itemsize, spec.gamma.itemsize)
    width = tiling.vector_width(cols, spec.alignment, sizes, 16 // max(sizes[:2]))
    constants: dict[str, Any] = {
        "IN": TYPES[spec.x],
        "DY": TYPES[spec.out],
        "GAMMA": TYPES[spec.gamma],
        "KIND": _KINDS[spec.kind],
        "ZERO_CENTERED": int(spec.zero_centered),
        "VEC": width,
        "ADD": int(spec.add),
    }
    team = tiling.backward_team(cols, width)
    if team is None:
        return _plan_wide(rt, spec, width, constants)
    # One large block a multiprocessor is enough: fewer blocks, fewer partial sums.
    resident = tiling.BACKWARD_THREADS if team.iters * width > 8 else 1024
    side_by_side = 1 if margin else max(1, resident // team.threads)
    stage_bytes = team.row_bytes(sizes[0] * (1 + spec.add) + sizes[1])
    stages = max(1, tiling.stages(stage_bytes, side_by_side, tiling.BACKWARD_STAGES, limits(rt)))
    kernel = loader.get(
        rt,
        "norm_backward",
        args="ppppppppqif",
        **constants,
        SIZE=team.size,
        ITERS=team.iters,
        FULL=int(team.is_full(cols)),
        TEAMS=team.teams,
        STAGES=stages,
    )
    # The same memory serves the addition of the teams' sums at the end.
    shared = max(stages * stage_bytes, team.teams // 2 * cols * 4)
    grid = min(-(-rows // team.teams), max(1, limits(rt).multiprocessors - margin) * side_by_side)
    return BackwardPlan(
        "norm_backward_rows",
        kernel,
        grid,
        team.threads,
        shared,
        None,
        (0, 0),
        *_total(rt, spec),
        grid,
        rows,
        cols,
        1.0 / cols,
    )


def _plan_wide(rt: Runtime, spec: NormOpSpec, width: int, constants: dict[str, Any]) -> BackwardPlan:
    (rows, cols), margin = spec.shape, spec.sm_margin
    free = max(1, limits(rt).multiprocessors - margin)
    kernel = loader.get(rt, "norm_backward_wide", args="pppppppqif", **constants, SIZE=1024)
    columns = loader.get(
        rt, "norm_backward_wide", entry="norm_backward_columns", args="pppppqi", **constants, SIZE=1024
    )
    across = -(-cols // (128 * width))
    # About 8 blocks a multiprocessor; each part is another row of partial sums to add.
    parts = min(rows, max(1, 8 * free // across))
    return BackwardPlan(
        "norm_backward_wide",
        kernel,
        min(rows, free if margin else 2 * free),
        1024,
        0,
        columns,
        (across, parts),
        *_total(rt, spec),
        parts,
        rows,
        cols,
        1.0 / cols,
    )


def _total(rt: Runtime, spec: NormOpSpec) -> tuple[Kernel, tuple[int, int]]:
    kernel = loader.get(rt, "norm_backward_sum", args="pppii", GAMMA=TYPES[spec.gamma])
    return kernel, (-(-spec.shape[1] // 32), 2 if spec.kind == "LayerNorm" else 1)


def norm_backward(rt: Runtime, plan: BackwardPlan, operands: NormGradients) -> None:
    """Run a plan of `plan_norm_backward`."""
    dy, x, gamma, mean, rstd, add, dx, dgamma, dbeta = operands
    add_ptr = add.ptr if add is not None else 0
    mean_ptr = mean.ptr if mean is not None else 0
    partial = rt.workspace("norm backward", 8 * plan.parts * plan.cols)
    if plan.columns is not None and plan.rows:
        plan.kernel(
            rt,
            plan.grid,
            plan.block,
            dy.ptr,
            x.ptr,
            gamma.ptr,
            mean_ptr,
            rstd.ptr,
            add_ptr,
            dx.ptr,
            plan.rows,
            plan.cols,
            plan.inverse,
        )
        plan.columns(rt, plan.columns_grid, 128, dy.ptr, x.ptr, mean_ptr, rstd.ptr, partial, plan.rows, plan.cols)
    elif plan.rows:
        plan.kernel(
            rt,
            plan.grid,
            plan.block,
            dy.ptr,
            x.ptr,
            gamma.ptr,
            mean_ptr,
            rstd.ptr,
            add_ptr,
            dx.ptr,
            partial,
            plan.rows,
            plan.cols,
            plan.inverse,
            shared=plan.shared,
        )
    plan.total(
        rt, plan.total_grid, 512, partial, dgamma.ptr, dbeta.ptr if dbeta is not None else 0, plan.parts, plan.cols
    )
