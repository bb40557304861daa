"""Activations forward and backward on CUDA, delivered as values, in FP8, or both.

With delayed or block scaling (or none) one launch does it all. With current scaling the first launch writes the values,
which the contract keeps for it, and their partial maxima; the second is `quantize.run_cast` over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_core.backends.cuda.quantize import BLOCKS_PER_SM, STAGE_BYTES, THREADS, multiprocessors, run_cast, tiling
from te_core.backends.cuda.quantize_block import TILE_ARGS, run_tiles, tile_constants
from te_core.backends.cuda.sums import FORMATS, TYPES, add_column_sums, column_workspace
from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.activation import ActivationOperands, ActivationSpec

#: dy, x, y, rowwise, columnwise, source, scale_inv, amax, column_sum, rows, cols, steps, limit, alpha, offset
_ARGS = "pppppppppqqifff"
#: In blocks: dy, x, what all tile kernels take, limit, alpha, offset
_BLOCK_ARGS = "pp" + TILE_ARGS + "fff"


def _run(rt: Runtime, spec: ActivationSpec, operands: ActivationOperands, backward: bool) -> None:
    x, dy, out, cast, q, column_sum = operands
    (rows, width), dtype, gated = x.shape, x.dtype, spec.gated
    cols = width // (1 + gated)  # of the activation's output, half of a gated x
    aligned = not (x.ptr | (0 if dy is None else dy.ptr)) & 15 and cols % (16 // dtype.itemsize) == 0
    kind: dict[str, Any] = {"KIND": spec.plain.upper(), "GATED": gated, "BACKWARD": backward}
    if cast is not None and cast.format.scaling == "block":
        constants = {**kind, **tile_constants(cast.key, dtype, column_sum is not None), "ALIGNED": aligned, "BLOCKS": 1}
        kernel = loader.get(rt, "activation", entry="activation_block", args=_BLOCK_ARGS, **constants)
        assert q is not None
        run_tiles(rt, kernel, (dy, x), (cols, dtype), cast, q, column_sum, spec.clamp)
        return
    outputs = 2 if gated and backward else 1
    delayed = cast is not None and cast.scale is not None
    current = cast is not None and not delayed
    columnwise = cast is not None and delayed and cast.columnwise
    tall = columnwise or current or column_sum is not None
    kernel = loader.get(
        rt,
        "activation",
        args=_ARGS,
        DTYPE=TYPES[dtype],
        **kind,
        FORMAT=FORMATS[cast.dtype] if cast is not None and delayed else "E4M3",
        SCALING="GIVEN_SCALE" if delayed else "NO_CAST",
        TALL=tall,
        COLUMNWISE=columnwise,
        COLUMN_SUM=column_sum is not None,
        KEEP=spec.keep or not delayed,
        ALIGNED=aligned,
    )
    # Partial maxima are read again by every block of the second pass: no more of them than blocks run at once.
    bounded = BLOCKS_PER_SM * multiprocessors(rt) if current else 0
    tiles = tiling(rows, cols, dtype, tall=tall, flat_rows=4, outputs=outputs, max_blocks=bounded)
    stages = 4 if tall and not gated and not backward else 2  # as in activation.cu
    shared = (1 + gated + backward) * stages * STAGE_BYTES
    copies: tuple[Tensor | int | None, ...] = (None, None, None, None, None)
    if current:
        copies = (None, None, None, None, rt.workspace("amax", 4 * tiles.blocks))
    elif cast is not None and q is not None:
        copies = (q.rowwise, q.columnwise, cast.scale, q.scale_inv, cast.amax)
    sums = 0 if column_sum is None else column_workspace(rt, tiles.grid[1], outputs * cols)
    numbers = (rows, cols, tiles.steps, *spec.clamp)
    kernel(rt, tiles.grid, THREADS, dy, x, out, *copies, sums, *numbers, shared=shared)
    add_column_sums(rt, sums, tiles.grid[1], column_sum)
    if current and out is not None and cast is not None and q is not None:
        run_cast(rt, out, cast, q, (rt.workspace("amax", 4 * tiles.blocks), tiles.blocks))


def activation_forward(rt: Runtime, spec: ActivationSpec, operands: ActivationOperands) -> None:
    """y = act(x), or act(a) * b for x = (a | b), and its cast."""
    _run(rt, spec, operands, backward=False)


def activation_backward(rt: Runtime, spec: ActivationSpec, operands: ActivationOperands) -> None:
    """dx = dy * act'(x), or (dy * b * act'(a) | dy * act(a)), its column sums and its cast."""
    _run(rt, spec, operands, backward=True)
