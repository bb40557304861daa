"""FP8 with block scales (1x128 pieces, 128x128 tiles), and back, on CUDA.

One launch makes both copies; column sums add a small one that adds up the partial sums of the tiles in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_core.backends.cuda.quantize import THREADS as DEQUANTIZE_THREADS
from te_core.backends.cuda.sums import FORMATS, TYPES, add_column_sums, column_workspace, sum_kernel
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.quantized import BLOCK, PAD, Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.quantize import QuantizeSpec

_SIDE = BLOCK["block"]
#: Rows of a thread of quantize_block.cu; its columns fill 16 bytes.
_ROWS = 16
#: x, rowwise, its scales, columnwise, its scales, column_sum, epsilon, power_of_two, rows, cols, across
_ARGS = "ppppppfiqqi"


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One launch of quantize_block.cu. `constants` serve its other variant, for an x off the 16-byte grid."""

    family: str
    kernel: Kernel
    aligned: bool
    constants: dict[str, Any]
    shape: tuple[int, ...]
    across: int  # tiles
    down: int
    threads: int
    shared: int
    sum_kernel: Kernel | None

    def kernel_for(self, rt: Runtime, x: Tensor) -> Kernel:
        """The kernel for this address of x."""
        if self.aligned and x.ptr & 15:
            return loader.get(rt, "quantize_block", args=_ARGS, **{**self.constants, "ALIGNED": 0})
        return self.kernel


def plan_quantize_block(rt: Runtime, spec: QuantizeSpec) -> BlockPlan:
    """The launch of `quantize_block`."""
    shape, dtype, sum_dtype = spec.shape, spec.dtype, spec.sum
    form, rowwise, columnwise = spec.cast.format, spec.cast.rowwise, spec.cast.columnwise
    vector = 16 // dtype.itemsize
    aligned = shape[1] % vector == 0
    constants: dict[str, Any] = {
        "DTYPE": TYPES[dtype],
        "FORMAT": FORMATS[form.dtype],
        "TILED": int(form.tiled),
        "ROWWISE": int(rowwise),
        "COLUMNWISE": int(columnwise),
        "COLUMN_SUM": int(sum_dtype is not None),
        "ALIGNED": int(aligned),
    }
    copies = "both" if rowwise and columnwise else "rowwise" if rowwise else "columnwise"
    grain = f"{_SIDE if form.tiled else 1}x{_SIDE}"
    return BlockPlan(
        family=f"quantize_block_{grain}_{copies}{'' if sum_dtype is None else '_sums'}",
        kernel=loader.get(rt, "quantize_block", args=_ARGS, **constants),
        aligned=aligned,
        constants=constants,
        shape=shape,
        across=-(-shape[1] // _SIDE),
        down=-(-shape[0] // _SIDE),
        threads=_SIDE // _ROWS * _SIDE // vector,
        shared=_SIDE * _SIDE * dtype.itemsize,
        sum_kernel=sum_kernel(rt, sum_dtype),
    )


def quantize_block(
    rt: Runtime, plan: BlockPlan, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None
) -> None:
    """Quantize x as planned."""
    rows, cols = plan.shape
    sums = 0 if column_sum is None else column_workspace(rt, plan.down, cols)
    blocks = plan.across * plan.down
    if blocks:
        plan.kernel_for(rt, x)(
            rt,
            blocks,
            plan.threads,
            x.ptr,
            0 if out.rowwise is None else out.rowwise.ptr,
            0 if out.rowwise_scale is None else out.rowwise_scale.ptr,
            0 if out.columnwise is None else out.columnwise.ptr,
            0 if out.columnwise_scale is None else out.columnwise_scale.ptr,
            sums,
            cast.epsilon,
            cast.power_of_two,
            rows,
            cols,
            plan.across,
            shared=plan.shared,
        )
    if column_sum is not None:
        add_column_sums(rt, plan.sum_kernel, sums, plan.down, cols, column_sum.ptr)


def dequantize_block(rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool) -> None:
    """out = q times the scales of its blocks, from one of the copies."""
    rows, cols = q.shape
    if not rows or not cols:
        return
    source, scales = (q.columnwise, q.columnwise_scale) if columnwise else (q.rowwise, q.rowwise_scale)
    assert source is not None and scales is not None  # the ops floor refuses a missing copy
    vector = cols % 4 == 0 and out.ptr % (4 * out.dtype.itemsize) == 0
    kernel = loader.get(
        rt,
        "dequantize_block",
        args="pppqq",
        DTYPE=TYPES[out.dtype],
        FORMAT=FORMATS[q.dtype],
        COLUMNWISE=int(columnwise),
        TILED=int(q.format.tiled),
        VECTOR=int(vector),
    )
    tile_m, tile_n = (8 * PAD, 64) if columnwise else (16, 32 * PAD)
    grid = (-(-rows // tile_m), -(-cols // tile_n))
    kernel(rt, grid, DEQUANTIZE_THREADS, source.ptr, scales.ptr, out.ptr, rows, cols)
