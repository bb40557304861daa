"""Per-tensor quantization, dequantization, transpose, amax and the delayed-scaling update on CUDA.

Delayed scaling is one launch: the scale is there before. Current scaling is two: the first leaves partial maxima in
a workspace, the second (`run_cast`) derives the scale from them in every block and casts. Column sums add
a small launch that adds up the partial sums of the blocks in a fixed order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import create_string_buffer
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_core import device, dtypes, libraries
from te_core.backends.cuda.sums import FORMATS, TYPES, add_column_sums, column_workspace
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.quantized import PAD, Cast, QuantizedTensor, padded
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.quantize import ScalingState

#: Threads of a block of quantize.cu, activation.cu and elementwise.cu.
THREADS = 128
#: Threads of a block of scale_update.cu, and how many columns it takes at a time.
UPDATE_THREADS, _UPDATE_COLUMNS = 512, 4
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
    """The number of multiprocessors of the runtime's device."""
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


# ---------------------------------------------------------------------------------------------- quantize


#: x, rowwise, columnwise, source, scale_inv, amax, column_sum, n_partials, epsilon, power_of_two, rows, cols, steps
_QUANTIZE_ARGS = "pppppppifiqqi"


def _kernel(
    rt: Runtime, x: Tensor, fp8: DType, scaling: str, columnwise: bool, column_sum: Tensor | None, max_blocks: int = 0
) -> tuple[Kernel, Tiling]:
    """The launch of quantize.cu over x: scaling is NO_CAST, GIVEN_SCALE or OWN_SCALE."""
    (rows, cols), tall = x.shape, columnwise or column_sum is not None
    kernel = loader.get(
        rt,
        "quantize",
        args=_QUANTIZE_ARGS,
        DTYPE=TYPES[x.dtype],
        FORMAT=FORMATS[fp8],
        SCALING=scaling,
        TALL=tall,
        COLUMNWISE=columnwise,
        COLUMN_SUM=column_sum is not None,
        ALIGNED=aligned(x),
    )
    return kernel, tiling(rows, cols, x.dtype, tall=tall, flat_rows=8, max_blocks=max_blocks)


def aligned(x: Tensor) -> bool:
    """Whether a matrix may be read 16 bytes at a time, whichever row one begins in."""
    return x.shape[1] % (16 // x.dtype.itemsize) == 0 and not x.ptr & 15


def run_cast(
    rt: Runtime,
    x: Tensor,
    cast: Cast,
    q: QuantizedTensor,
    partials: tuple[int, int] | None = None,
    column_sum: Tensor | None = None,
) -> None:
    """Cast the matrix x into q with the cast's scale, or with the one that its partial maxima imply: (the address of
    float32 values, how many). The column sums of x on the way.

    The maximum of the partials (none: 0) is max |x|. Every block works out the scale by itself; q.scale_inv is written,
    cast.amax raised if given. No allocation but workspaces, safe under graph capture.
    """
    (rows, cols), limit = x.shape, 0
    if partials is None and (cast.columnwise or column_sum is not None):  # flat tiles are faster in many small blocks
        limit = BLOCKS_PER_SM * multiprocessors(rt)
    scaling = "GIVEN_SCALE" if partials is None else "OWN_SCALE"
    kernel, tiles = _kernel(rt, x, cast.dtype, scaling, cast.columnwise, column_sum, limit)
    sums = 0 if column_sum is None else column_workspace(rt, tiles.grid[1], cols)
    source, count = (cast.scale, 0) if partials is None else partials
    pointers = (x, q.rowwise, q.columnwise, source, q.scale_inv, cast.amax, sums)
    numbers = (count, cast.epsilon, cast.power_of_two, rows, cols, tiles.steps)
    kernel(rt, tiles.grid, THREADS, *pointers, *numbers, shared=_SHARED)
    add_column_sums(rt, sums, tiles.grid[1], column_sum)


def quantize(rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None) -> None:
    """Delayed scaling: the cast alone. Current scaling: the maximum first, unless it is given, and column sums."""
    if cast.scale is not None:
        run_cast(rt, x, cast, out, column_sum=column_sum)
        return
    given = None if cast.maxima is None else (cast.maxima.ptr, 1)
    if column_sum is not None:
        found = _maxima_and_sums(rt, x, column_sum)
        run_cast(rt, x, cast, out, given or found)
    else:
        run_cast(rt, x, cast, out, given or maxima(rt, x))


# ---------------------------------------------------------------------------------------------- amax


def maxima(rt: Runtime, x: Tensor) -> tuple[int, int]:
    """Partial maxima of x in a workspace: their address, and how many."""
    blocks = amax_blocks(rt, x.size, x.dtype)
    partials = rt.workspace("amax", 4 * blocks)
    _amax_kernel(rt, x.dtype)(rt, blocks, 256, x, partials, x.size)
    return partials, blocks


def _maxima_and_sums(rt: Runtime, x: Tensor, column_sum: Tensor) -> tuple[int, int]:
    """The same; the column sums of x in the same pass."""
    (rows, cols), limit = x.shape, BLOCKS_PER_SM * multiprocessors(rt)
    kernel, tiles = _kernel(rt, x, dtypes.float8_e4m3, "NO_CAST", False, column_sum, limit)
    partials = rt.workspace("amax", 4 * tiles.blocks)
    sums = column_workspace(rt, tiles.grid[1], cols)
    pointers = (x, None, None, None, None, partials, sums)
    kernel(rt, tiles.grid, THREADS, *pointers, 0, 0.0, 0, rows, cols, tiles.steps, shared=_SHARED)
    add_column_sums(rt, sums, tiles.grid[1], column_sum)
    return partials, tiles.blocks


def amax_blocks(rt: Runtime, count: int, dtype: DType) -> int:
    """Blocks of 256 threads with four 16-byte loads each, no more than the device holds at once."""
    return min(BLOCKS_PER_SM * multiprocessors(rt), max(1, -(-count * dtype.itemsize // (256 * 4 * 16))))


def _amax_kernel(rt: Runtime, dtype: DType) -> Kernel:
    return loader.get(rt, "amax", args="ppq", DTYPE=TYPES[dtype])


def _finish(rt: Runtime, dtype: DType) -> Kernel:
    return loader.get(rt, "amax", entry="amax_finish", args="ppi", DTYPE=TYPES[dtype])


def amax(rt: Runtime, x: Tensor, out: Tensor, column_sum: Tensor | None) -> None:
    """out[0] = max |x|, NaN ignored; the column sums in the same pass."""
    if column_sum is None and amax_blocks(rt, x.size, x.dtype) == 1:
        _amax_kernel(rt, x.dtype)(rt, 1, 256, x, out, x.size)
        return
    partials, count = maxima(rt, x) if column_sum is None else _maxima_and_sums(rt, x, column_sum)
    _finish(rt, x.dtype)(rt, 1, 256, partials, out, count)


def amax_many(rt: Runtime, tensors: Sequence[Tensor], out: Tensor) -> None:
    """out[i] = max |tensors[i]|: a launch for each, of equally many blocks, and one that finishes all of them."""
    dtype = tensors[0].dtype
    blocks = amax_blocks(rt, max([t.size for t in tensors]), dtype)
    first = at = out.ptr if blocks == 1 else rt.workspace("amax", 4 * blocks * len(tensors))
    for t in tensors:
        _amax_kernel(rt, dtype)(rt, blocks, 256, t, at, t.size)
        at += 4 * blocks
    if blocks > 1:
        _finish(rt, dtype)(rt, len(tensors), 256, first, out, blocks)


def count_nonfinite(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """One launch that adds to what is there."""
    if x.size:
        kernel = loader.get(rt, "nonfinite", args="ppq", DTYPE=TYPES[x.dtype])
        kernel(rt, amax_blocks(rt, x.size, x.dtype), 256, x, out, x.size)


# ---------------------------------------------------------------------------------------------- and back


def dequantize(rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool) -> None:
    """out = q * scale_inv, from one of the copies."""
    if out.size:
        kernel, grid = dequantizer(rt, "dequantize", q, out, columnwise)
        kernel(rt, grid, THREADS, q.columnwise if columnwise else q.rowwise, q.scale_inv, out, *q.shape)


def dequantizer(
    rt: Runtime, name: str, q: QuantizedTensor, out: Tensor, columnwise: bool, **constants: Any
) -> tuple[Kernel, tuple[int, int]]:
    """The kernel that gives the values of a copy, and how many tiles lie beside and below one another."""
    (rows, cols), (tile_m, tile_n) = q.shape, (8 * PAD, 64) if columnwise else (16, 32 * PAD)
    vector = cols % 4 == 0 and out.ptr % (4 * out.dtype.itemsize) == 0
    constants |= {"DTYPE": TYPES[out.dtype], "FORMAT": FORMATS[q.dtype], "COLUMNWISE": columnwise, "VECTOR": vector}
    kernel = loader.get(rt, name, args="pppqq", **constants)
    return kernel, (-(-cols // tile_n), -(-rows // tile_m))


def transpose(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """A dense transposed copy."""
    rows, cols = x.shape
    if not rows or not cols:
        return
    size = x.dtype.itemsize
    whole = not ((rows * size | cols * size | x.ptr | out.ptr) & 15)
    kernel = loader.get(rt, "transpose", args="ppqq", SIZE=size, ALIGNED=whole)
    tile_m, tile_n = (8 * 16 // size, 16 * 16 // size) if whole else (32, 32)
    kernel(rt, (-(-cols // tile_n), -(-rows // tile_m)), THREADS, x, out, rows, cols)


# ---------------------------------------------------------------------------------------------- scale update

_STATE = struct.Struct("=QQQiifi")  # State of scale_update.cu
#: States that a launch's parameters hold: 4 KB everywhere; 32,764 bytes where driver and NVRTC are CUDA 12.1 or newer.
_SMALL, _LARGE = 100, 800


#: Of each launch: the kernel, how many states it updates, the blocks of each, its table.
UpdatePlan = tuple[tuple[Kernel, int, int, Any], ...]


def run_update(rt: Runtime, plan: UpdatePlan) -> None:
    """One launch for up to 800 states (100 before CUDA 12.1)."""
    for kernel, count, blocks, table in plan:
        places = None
        if rt.recorder is not None:
            places = [i * _STATE.size + at for i in range(count) for at in (0, 8, 16)]
        kernel.by_value(rt, count * blocks, UPDATE_THREADS, table, 0, places)


def plan_update(rt: Runtime, states: list[ScalingState], algo: str) -> UpdatePlan:
    """The table of pointers that the kernel takes by value."""
    states = [s for s in states if s.history.size]
    capacity = _LARGE if len(states) > _SMALL and libraries.large_parameters() else _SMALL
    kernel = loader.get(rt, "scale_update", args="b", CAPACITY=capacity, HISTORY_MAX=algo == "max")
    launches = []
    for start in range(0, len(states), capacity):
        part = states[start : start + capacity]
        table = create_string_buffer(capacity * _STATE.size)
        blocks = -(-max(s.history.shape[1] for s in part) // _UPDATE_COLUMNS)
        for i, s in enumerate(part):
            rows, columns = s.history.shape
            addresses = s.scale.ptr, s.history.ptr, s.used.ptr
            _STATE.pack_into(table, i * _STATE.size, *addresses, columns, rows, s.limit, blocks)
        launches.append((kernel, len(part), blocks, table))
    return tuple(launches)
