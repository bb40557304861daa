"""LayerNorm, RMSNorm and the L2 norm on CUDA: which kernel, with which tiling; then its pointers.

| wanted | launches |
|---|---|
| values, or FP8 with a given scale (delayed scaling) | norm_forward |
| FP8 with a scale for each block | norm_forward for the moments, then norm_block, which reads x again |
| FP8 with its own scale (current scaling) | norm_forward with an amax for each block, then the cast of quantize.cu |
| dx, dgamma, dbeta | norm_backward (rows over 16,384 elements: norm_backward_wide, two kernels), norm_backward_sum |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from te_core import dtypes, libraries
from te_core.backends.cuda import norm_tiling as tiling
from te_core.backends.cuda.elementwise import mask_of, signed
from te_core.backends.cuda.quantize import run_cast
from te_core.backends.cuda.quantize_block import TILE_ARGS, run_tiles, tile_constants
from te_core.backends.cuda.sums import FORMATS, TYPES
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.quantized import CastKey, padded
from te_core.runtime import Runtime
from te_core.tensor import Device, Tensor

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
    """One launch, after which a cast follows if there are `partials`, or the `tiles` of block scaling. `scratch`: bytes
    for a row-wise copy that nobody wants.
    """

    family: str
    kernel: Kernel
    grid: int
    block: int
    shared: int
    partials: bool
    scratch: int
    tiles: Kernel | None


def _plan_forward(rt: Runtime, spec: NormOpSpec) -> ForwardPlan:
    (rows, cols), cast, margin, tiles = spec.shape, spec.cast, spec.sm_margin, None
    if cast is not None and cast.format.scaling == "block":
        tiles, cast = _tiles(rt, spec, cast), None
    sizes = (spec.x.itemsize, spec.gamma.itemsize, spec.out.itemsize)
    width = tiling.vector_width(cols, spec.alignment, sizes, 16 // sizes[0])
    team = tiling.forward_team(cols, width, sizes[0])
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
        IN=TYPES[spec.x],
        GAMMA=TYPES[spec.gamma],
        OUT=TYPES[spec.out],
        KIND=_KINDS[spec.kind],
        ZERO_CENTERED=spec.zero_centered,
        VEC=width,
        SIZE=team.size,
        ITERS=team.iters,
        FULL=team.is_full(cols),
        RESIDUAL=spec.branch,
        BIAS=spec.bias,
        DROPOUT=spec.p > 0.0,
        TEAMS=team.teams,
        ROWS=height,
        STAGES=stages,
        VALUES=spec.keep or not (delayed or tiles),
        CAST=delayed,
        ROWWISE=rowwise,
        COLUMNWISE=turn,
        AMAX=use,
        FORMAT=FORMATS[dtypes.float8_e4m3 if cast is None else cast.format.dtype],
        MIN_BLOCKS=side_by_side,
    )
    shared = stages * row_bytes
    steps = -(-(padded(rows) if delayed else rows) // height)
    # A persistent grid. With a margin one large block to a multiprocessor: the hardware spreads blocks over all
    # multiprocessors before it doubles up, so fewer blocks than multiprocessors leave some of them free.
    blocks = max(1, limits(rt).multiprocessors - margin)
    if not margin:
        blocks *= limits(rt).blocks_per_multiprocessor(team.threads, kernel.attribute(4), shared)
    grid = min(steps, blocks)
    # A cast is launched for no rows too: it writes the scale's inverse, or the partial maximum 0.
    grid = max(grid, 1 if cast else 0)
    scratch = 0 if rowwise or not turn else grid * height * padded(cols)
    family = f"norm_forward_{'transposed' if turn else 'rows'}"
    return ForwardPlan(family, kernel, grid, team.threads, shared, use == "PARTIALS", scratch, tiles)


def _tiles(rt: Runtime, spec: NormOpSpec, cast: CastKey) -> Kernel:
    """The second launch of block scaling."""
    return loader.get(
        rt,
        "norm_block",
        args="ppppp" + TILE_ARGS,
        GAMMA=TYPES[spec.gamma],
        KIND=_KINDS[spec.kind],
        ZERO_CENTERED=spec.zero_centered,
        ALIGNED=not spec.alignment and spec.shape[1] % (16 // spec.x.itemsize) == 0,
        **tile_constants(cast, spec.x, False),
    )


def norm_forward(rt: Runtime, spec: NormOpSpec, operands: NormOperands) -> None:
    """One launch, and in current and block scaling the cast."""
    plan = rt.plans.find(rt, _plan_forward, spec)
    if not plan.grid:
        return
    (rows, cols), (x, gamma, beta, y, cast, q, mean, rstd, eps, branch) = spec.shape, operands
    copies: tuple[Tensor | int | None, ...] = (None, None)
    scales: tuple[Tensor | int | None, ...] = (None, None, None)
    amax = 0
    if plan.partials:
        amax = rt.workspace("norm amax", 4 * plan.grid)
        scales = (None, None, amax)
    elif cast is not None and q is not None and plan.tiles is None:
        copies = (q.rowwise or rt.workspace("norm bytes", plan.scratch), q.columnwise)
        scales = (cast.scale, q.scale_inv, cast.amax)
    more: tuple[Any, ...] = ()
    if branch is not None:
        mask = mask_of(branch.p)
        more = (branch.residual, branch.bias, branch.sum, branch.rng, signed(branch.site), *mask)
    pointers = (x, gamma, beta, y, *copies, mean, rstd, *scales)
    plan.kernel(rt, plan.grid, plan.block, *pointers, rows, cols, 1.0 / cols, eps, *more, shared=plan.shared)
    if plan.partials and cast is not None and q is not None and y is not None:
        run_cast(rt, y, cast, q, (amax, plan.grid))
    if plan.tiles is not None and cast is not None and q is not None:
        normed = x if branch is None else branch.sum
        run_tiles(rt, plan.tiles, (normed, gamma, beta, mean, rstd), (cols, x.dtype), cast, q)


# ---------------------------------------------------------------------------------------------- backward


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """Two launches, three for very long rows (`columns`). `parts`: partial sums of each column."""

    family: str
    kernel: Kernel
    grid: int
    block: int
    shared: int
    parts: int
    columns: Kernel | None = None
    columns_grid: tuple[int, int] = (0, 0)


def _plan_backward(rt: Runtime, spec: NormOpSpec) -> BackwardPlan:
    (rows, cols), margin = spec.shape, spec.sm_margin
    sizes = (spec.x.itemsize, spec.out.itemsize, spec.gamma.itemsize)
    width = tiling.vector_width(cols, spec.alignment, sizes, 16 // max(sizes[:2]))
    constants: dict[str, Any] = {
        "IN": TYPES[spec.x],
        "DY": TYPES[spec.out],
        "GAMMA": TYPES[spec.gamma],
        "KIND": _KINDS[spec.kind],
        "ZERO_CENTERED": spec.zero_centered,
        "VEC": width,
        "ADD": spec.add,
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
        FULL=team.is_full(cols),
        TEAMS=team.teams,
        STAGES=stages,
    )
    # The same memory serves the addition of the teams' sums at the end.
    shared = max(stages * stage_bytes, team.teams // 2 * cols * 4)
    grid = min(-(-rows // team.teams), max(1, limits(rt).multiprocessors - margin) * side_by_side)
    return BackwardPlan("norm_backward_rows", kernel, grid, team.threads, shared, grid)


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
    grid = min(rows, free if margin else 2 * free)
    return BackwardPlan("norm_backward_wide", kernel, grid, 1024, 0, parts, columns, (across, parts))


def norm_backward(rt: Runtime, spec: NormOpSpec, operands: NormGradients) -> None:
    """The gradient of x with partial sums of the others', which another launch adds."""
    plan, (rows, cols) = rt.plans.find(rt, _plan_backward, spec), spec.shape
    dy, x, gamma, mean, rstd, add, dx, dgamma, dbeta = operands
    partial = rt.workspace("norm backward", 8 * plan.parts * cols)
    pointers = (dy, x, gamma, mean, rstd, add, dx)
    if plan.columns is not None and rows:
        plan.kernel(rt, plan.grid, plan.block, *pointers, rows, cols, 1.0 / cols)
        plan.columns(rt, plan.columns_grid, 128, dy, x, mean, rstd, partial, rows, cols)
    elif rows:
        plan.kernel(rt, plan.grid, plan.block, *pointers, partial, rows, cols, 1.0 / cols, shared=plan.shared)
    total = loader.get(rt, "norm_backward_sum", args="pppii", GAMMA=TYPES[spec.gamma])
    grid = (-(-cols // 32), 2 if spec.kind == "LayerNorm" else 1)
    total(rt, grid, 512, partial, dgamma, dbeta, plan.parts, cols)


# ---------------------------------------------------------------------------------------------- L2 norm

_L2_THREADS = 256  # of a block


def _run_l2(rt: Runtime, entry: str, x: Tensor, *operands: Tensor, eps: float) -> None:
    (rows, cols), dtype = x.shape, x.dtype
    alignment = reduce(or_, [t.ptr for t in operands])
    width = tiling.vector_width(cols, alignment, (dtype.itemsize,), 16 // dtype.itemsize)
    team = tiling.forward_team(cols, width, dtype.itemsize).in_blocks_of(_L2_THREADS)
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


def l2_norm_forward(rt: Runtime, x: Tensor, y: Tensor, eps: float) -> None:
    """y = x / sqrt(sum(x^2) + eps)."""
    _run_l2(rt, "l2_norm_forward", x, x, y, eps=eps)


def l2_norm_backward(rt: Runtime, dy: Tensor, x: Tensor, dx: Tensor, eps: float) -> None:
    """dx = r * (dy - x * r^2 * sum(dy * x))."""
    _run_l2(rt, "l2_norm_backward", x, dy, x, dx, eps=eps)
