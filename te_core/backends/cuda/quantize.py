"""Per-tensor quantization, dequantization, transpose, amax and the delayed-scaling update on CUDA.

Delayed scaling is one launch: the scale is there before. Current scaling is two: the first leaves partial maxima in
a workspace, the second (`cast_with_partials`) derives the scale from them in every block and casts. Column sums add
a small launch that adds up the partial sums of the blocks in a fixed order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import create_string_buffer
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_core import device, dtypes, libraries
from te_core.backends.cuda.sums import FORMATS, TYPES, add_column_sums, column_workspace, sum_kernel
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.quantized import PAD, Cast, QuantizedTensor, padded
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.quantize import QuantizeSpec, ScalingState

#: Threads of a block of quantize.cu, activation.cu and elementwise.cu.
THREADS = 128
#: Threads of a block of scale_update.cu.
UPDATE_THREADS = 512
#: Blocks of a multiprocessor in launches that leave a partial result for each block: enough to keep the memory
#: busy, few enough that reading all partials again costs nothing.
BLOCKS_PER_SM = 5
#: Shared memory of one stage of fp8_tile.cuh's queue, for each operand: four rows of 16 bytes a thread.
STAGE_BYTES = 4 * 16 * THREADS
_SHARED = 4 * STAGE_BYTES  # quantize.cu has four stages
#: The largest blockIdx.y.
_MAX_GRID_Y = 65535


@dataclass(frozen=True, slots=True)
class Tiling:
    """How blocks of THREADS cover a matrix: `grid`, and `steps` tiles below one another for each block."""

    grid: tuple[int, int]
    steps: int

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.grid[0] * self.grid[1]


def multiprocessors(rt: Runtime) -> int:
    """The number of multiprocessors of the runtime's device (asked when a plan is made)."""
    return device.info(rt.device.index).multiprocessors


def tiling(
    rows: int, cols: int, dtype: DType, *, tall: bool, flat_rows: int, outputs: int = 1, max_blocks: int = 0
) -> Tiling:
    """Tiles of fp8_tile.cuh over `outputs` matrices [rows, cols] side by side, their padding included.

    With `max_blocks`, a block takes as many tiles as keeps their number under it.
    """
    vector = 16 // dtype.itemsize
    tile_m, tile_n = (128, 16 * vector) if tall else (4 * flat_rows, 32 * vector)
    across = max(1, -(-(padded(outputs * cols) - (outputs - 1) * cols) // tile_n))
    down = max(1, -(-padded(rows) // tile_m))
    steps = -(-down // _MAX_GRID_Y)
    if max_blocks:
        steps = max(steps, -(-across * down // max_blocks))
    return Tiling((across, -(-down // steps)), steps)


# ---------------------------------------------------------------------------------------------- casting


@dataclass(frozen=True, slots=True)
class CastPlan:
    """One launch of quantize.cu. `unaligned` is the other variant's constants, for an x off the 16-byte grid."""

    family: str
    kernel: Kernel
    aligned: bool
    constants: dict[str, Any]
    tiling: Tiling
    shape: tuple[int, ...]
    sum_kernel: Kernel | None

    def kernel_for(self, rt: Runtime, x: Tensor) -> Kernel:
        """The kernel for this address of x."""
        if self.aligned and x.ptr & 15:
            return loader.get(rt, "quantize", args=_QUANTIZE_ARGS, **{**self.constants, "ALIGNED": 0})
        return self.kernel


#: x, rowwise, columnwise, source, scale_inv, amax, column_sum, n_partials, epsilon, power_of_two, rows, cols, steps
_QUANTIZE_ARGS = "pppppppifiqqi"


def plan_cast(
    rt: Runtime,
    shape: tuple[int, ...],
    dtype: DType,
    fp8: DType,
    scaling: str,
    columnwise: bool,
    sum_dtype: DType | None,
    max_blocks: int = 0,
) -> CastPlan:
    """The plan of one launch over x of this shape: scaling is NO_CAST, GIVEN_SCALE or OWN_SCALE."""
    aligned = shape[1] % (16 // dtype.itemsize) == 0
    tall = columnwise or sum_dtype is not None
    constants: dict[str, Any] = {
        "DTYPE": TYPES[dtype],
        "FORMAT": FORMATS[fp8],
        "SCALING": scaling,
        "TALL": int(tall),
        "COLUMNWISE": int(columnwise),
        "COLUMN_SUM": int(sum_dtype is not None),
        "ALIGNED": int(aligned),
    }
    return CastPlan(
        family=f"quantize_{'tall' if tall else 'flat'}_{scaling.lower()}",
        kernel=loader.get(rt, "quantize", args=_QUANTIZE_ARGS, **constants),
        aligned=aligned,
        constants=constants,
        tiling=tiling(shape[0], shape[1], dtype, tall=tall, flat_rows=8, max_blocks=max_blocks),
        shape=shape,
        sum_kernel=sum_kernel(rt, sum_dtype),
    )


def run_cast(
    rt: Runtime,
    plan: CastPlan,
    x: Tensor,
    cast: Cast,
    q: QuantizedTensor,
    source: int,
    n_partials: int,
    column_sum: Tensor | None,
) -> None:
    """Cast x into q with the scale at `source`, or the one that follows from the partial maxima there."""
    rows, cols = plan.shape
    tiles = plan.tiling
    sums = 0 if column_sum is None else column_workspace(rt, tiles.grid[1], cols)
    plan.kernel_for(rt, x)(
        rt,
        tiles.grid,
        THREADS,
        x.ptr,
        0 if q.rowwise is None else q.rowwise.ptr,
        0 if q.columnwise is None else q.columnwise.ptr,
        source,
        q.scale_inv.ptr,
        0 if cast.amax is None else cast.amax.ptr,
        sums,
        n_partials,
        cast.epsilon,
        cast.power_of_two,
        rows,
        cols,
        tiles.steps,
        shared=_SHARED,
    )
    if column_sum is not None:
        add_column_sums(rt, plan.sum_kernel, sums, tiles.grid[1], cols, column_sum.ptr)


def cast_with_partials(
    rt: Runtime,
    x: Tensor,
    cast: Cast,
    q: QuantizedTensor,
    partials_ptr: int,
    n_partials: int,
    column_sum: Tensor | None = None,
) -> None:
    """The second pass of current scaling: cast the matrix x with the scale that its partial maxima imply.

    The maximum over the float32 values at `partials_ptr` (none: 0) is max |x|. Every block works out the scale by
    itself; q.scale_inv is written, cast.amax raised if given. One launch (two with `column_sum`, the column sums of
    x), no allocation but workspaces, safe under graph capture.
    """
    sum_dtype = None if column_sum is None else column_sum.dtype
    key = ("cast_with_partials", x.shape, x.dtype, cast.dtype, cast.columnwise, sum_dtype)
    plan = rt.plans.get(key)
    if plan is None:
        plan = plan_cast(rt, x.shape, x.dtype, cast.dtype, "OWN_SCALE", cast.columnwise, sum_dtype)
        rt.plans.put(key, plan)
    run_cast(rt, plan, x, cast, q, partials_ptr, n_partials, column_sum)


# ---------------------------------------------------------------------------------------------- quantize


def no_cast(rt: Runtime, plan: CastPlan, x: Tensor, partials: int, column_sum: Tensor) -> None:
    """The partial maxima and the column sums of x."""
    (rows, cols), tiles = plan.shape, plan.tiling
    sums = column_workspace(rt, tiles.grid[1], cols)
    plan.kernel_for(rt, x)(
        rt,
        tiles.grid,
        THREADS,
        x.ptr,
        None,
        None,
        None,
        None,
        partials,
        sums,
        0,
        0.0,
        0,
        rows,
        cols,
        tiles.steps,
        shared=_SHARED,
    )
    add_column_sums(rt, plan.sum_kernel, sums, tiles.grid[1], cols, column_sum.ptr)


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """Delayed scaling: `cast` alone. Current scaling: the maximum by `amax`, or by `sums` if it also adds columns."""

    family: str
    cast: CastPlan
    delayed: bool
    amax: AmaxPlan | None
    sums: CastPlan | None


def plan_quantize(rt: Runtime, spec: QuantizeSpec) -> QuantizePlan:
    """The launches of `quantize`."""
    shape, dtype, sum_dtype = spec.shape, spec.dtype, spec.sum
    fp8, columnwise = spec.cast.format.dtype, spec.cast.columnwise
    limit = BLOCKS_PER_SM * multiprocessors(rt)
    if spec.cast.delayed:
        tall = columnwise or sum_dtype is not None  # flat tiles are faster in many small blocks
        cast = plan_cast(rt, shape, dtype, fp8, "GIVEN_SCALE", columnwise, sum_dtype, max_blocks=limit if tall else 0)
        return QuantizePlan(cast.family, cast, True, None, None)
    cast = plan_cast(rt, shape, dtype, fp8, "OWN_SCALE", columnwise, None)
    if sum_dtype is None:
        largest = plan_amax(rt, shape[0] * shape[1], dtype)
        return QuantizePlan(f"amax+{cast.family}", cast, False, largest, None)
    first = _plan_sums(rt, shape, dtype, sum_dtype)
    return QuantizePlan(f"{first.family}+{cast.family}", cast, False, None, first)


def quantize(
    rt: Runtime, plan: QuantizePlan, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None
) -> None:
    """Quantize x as planned."""
    if cast.scale is not None:
        run_cast(rt, plan.cast, x, cast, out, cast.scale.ptr, 0, column_sum)
    elif cast.maxima is not None:
        if plan.sums is not None and column_sum is not None:
            no_cast(rt, plan.sums, x, rt.workspace("amax", 4 * plan.sums.tiling.blocks), column_sum)
        run_cast(rt, plan.cast, x, cast, out, cast.maxima.ptr, 1, None)
    elif plan.amax is not None:
        partials = rt.workspace("amax", 4 * plan.amax.blocks)
        plan.amax.kernel(rt, plan.amax.blocks, 256, x.ptr, partials, plan.amax.count)
        run_cast(rt, plan.cast, x, cast, out, partials, plan.amax.blocks, None)
    elif plan.sums is not None and column_sum is not None:
        blocks = plan.sums.tiling.blocks
        partials = rt.workspace("amax", 4 * blocks)
        no_cast(rt, plan.sums, x, partials, column_sum)
        run_cast(rt, plan.cast, x, cast, out, partials, blocks, None)


# ---------------------------------------------------------------------------------------------- amax


@dataclass(frozen=True, slots=True)
class AmaxPlan:
    """One launch of amax.cu that leaves a partial maximum for each of its blocks."""

    kernel: Kernel
    blocks: int
    count: int


def plan_amax(rt: Runtime, count: int, dtype: DType) -> AmaxPlan:
    """Blocks of 256 threads with four 16-byte loads each, no more than the device holds at once."""
    most = BLOCKS_PER_SM * multiprocessors(rt)
    blocks = min(most, max(1, -(-count * dtype.itemsize // (256 * 4 * 16))))
    return AmaxPlan(loader.get(rt, "amax", args="ppq", DTYPE=TYPES[dtype]), blocks, count)


def amax(rt: Runtime, x: Tensor, out: Tensor, column_sum: Tensor | None) -> None:
    """out[0] = max |x|, NaN ignored; the column sums in the same pass."""
    if column_sum is not None:
        _amax_and_sums(rt, x, out, column_sum)
        return
    key = ("amax", x.size, x.dtype)
    plan = rt.plans.get(key)
    if plan is None:
        plan = rt.plans.put(key, plan_amax(rt, x.size, x.dtype))
    if plan.blocks == 1:
        plan.kernel(rt, 1, 256, x.ptr, out.ptr, plan.count)
        return
    partials = rt.workspace("amax", 4 * plan.blocks)
    plan.kernel(rt, plan.blocks, 256, x.ptr, partials, plan.count)
    _finish(rt, x.dtype)(rt, 1, 256, partials, out.ptr, plan.blocks)


def _finish(rt: Runtime, dtype: DType) -> Kernel:
    return loader.get(rt, "amax", entry="amax_finish", args="ppi", DTYPE=TYPES[dtype])


def _amax_and_sums(rt: Runtime, x: Tensor, out: Tensor, column_sum: Tensor) -> None:
    """The first pass of `quantize` in current scaling, and its maximum as a number."""
    key = ("amax and sums", x.shape, x.dtype, column_sum.dtype)
    plan = rt.plans.get(key)
    if plan is None:
        plan = rt.plans.put(key, _plan_sums(rt, x.shape, x.dtype, column_sum.dtype))
    partials = rt.workspace("amax", 4 * plan.tiling.blocks)
    no_cast(rt, plan, x, partials, column_sum)
    _finish(rt, x.dtype)(rt, 1, 256, partials, out.ptr, plan.tiling.blocks)


def _plan_sums(rt: Runtime, shape: tuple[int, ...], dtype: DType, sum_dtype: DType) -> CastPlan:
    limit = BLOCKS_PER_SM * multiprocessors(rt)
    return plan_cast(rt, shape, dtype, dtypes.float8_e4m3, "NO_CAST", False, sum_dtype, max_blocks=limit)


def amax_many(rt: Runtime, tensors: Sequence[Tensor], out: Tensor) -> None:
    """out[i] = max |tensors[i]|: a launch for each, of equally many blocks, and one that finishes all of them."""
    dtype = tensors[0].dtype
    largest = max([t.size for t in tensors])
    key = ("amax", largest, dtype)
    plan = rt.plans.get(key)
    if plan is None:
        plan = rt.plans.put(key, plan_amax(rt, largest, dtype))
    blocks = plan.blocks
    first = at = out.ptr if blocks == 1 else rt.workspace("amax", 4 * blocks * len(tensors))
    for t in tensors:
        plan.kernel(rt, blocks, 256, t.ptr, at, t.size)
        at += 4 * blocks
    if blocks > 1:
        _finish(rt, dtype)(rt, len(tensors), 256, first, out.ptr, blocks)


def count_nonfinite(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """One launch that adds to what is there."""
    if x.size:
        blocks = plan_amax(rt, x.size, x.dtype).blocks
        kernel = loader.get(rt, "nonfinite", args="ppq", DTYPE=TYPES[x.dtype])
        kernel(rt, blocks, 256, x.ptr, out.ptr, x.size)


# ---------------------------------------------------------------------------------------------- and back


def dequantize(rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool) -> None:
    """out = q * scale_inv, from one of the copies."""
    rows, cols = q.shape
    if not rows or not cols:
        return
    source = q.columnwise if columnwise else q.rowwise
    assert source is not None  # the ops floor refuses a missing copy
    vector = cols % 4 == 0 and out.ptr % (4 * out.dtype.itemsize) == 0
    kernel = loader.get(
        rt,
        "dequantize",
        args="pppqq",
        DTYPE=TYPES[out.dtype],
        FORMAT=FORMATS[q.dtype],
        COLUMNWISE=int(columnwise),
        VECTOR=int(vector),
    )
    tile_m, tile_n = (8 * PAD, 64) if columnwise else (16, 32 * PAD)
    grid = (-(-cols // tile_n), -(-rows // tile_m))
    kernel(rt, grid, THREADS, source.ptr, q.scale_inv.ptr, out.ptr, rows, cols)


def transpose(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """A dense transposed copy."""
    rows, cols = x.shape
    if not rows or not cols:
        return
    size = x.dtype.itemsize
    aligned = not ((rows * size | cols * size | x.ptr | out.ptr) & 15)
    kernel = loader.get(rt, "transpose", args="ppqq", SIZE=size, ALIGNED=int(aligned))
    tile_m, tile_n = (8 * 16 // size, 16 * 16 // size) if aligned else (32, 32)
    kernel(rt, (-(-cols // tile_n), -(-rows // tile_m)), THREADS, x.ptr, out.ptr, rows, cols)


# ---------------------------------------------------------------------------------------------- scale update

_STATE = struct.Struct("=QQQiifi")  # State of scale_update.cu
#: States that a launch's parameters hold: 4 KB everywhere; 32,764 bytes where driver and NVRTC are CUDA 12.1 or newer.
_SMALL, _LARGE = 100, 800


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The launches of one scale update, their tables filled in."""

    family: str
    launches: tuple[tuple[Kernel, int, Any], ...]  # kernel, states, the table


def run_update(rt: Runtime, plan: UpdatePlan) -> None:
    """One launch for up to 800 states (100 before CUDA 12.1)."""
    for kernel, count, table in plan.launches:
        kernel.by_value(rt, count, UPDATE_THREADS, table)


def plan_update(rt: Runtime, states: list[ScalingState], algo: str) -> UpdatePlan:
    """The table of pointers that the kernel takes by value."""
    states = [s for s in states if s.history.size]
    roomy = libraries.driver_version() >= (12, 1) and libraries.version("nvrtc") >= (12, 1)
    capacity = _LARGE if roomy and len(states) > _SMALL else _SMALL
    kernel = loader.get(rt, "scale_update", args="b", CAPACITY=capacity, HISTORY_MAX=int(algo == "max"))
    launches = []
    for start in range(0, len(states), capacity):
        part = states[start : start + capacity]
        table = create_string_buffer(capacity * _STATE.size)
        for i, s in enumerate(part):
            rows, columns = s.history.shape
            _STATE.pack_into(table, i * _STATE.size, s.scale.ptr, s.history.ptr, s.used.ptr, columns, rows, s.limit, 0)
        launches.append((kernel, len(part), table))
    return UpdatePlan("scale_update", tuple(launches))
