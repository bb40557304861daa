"""NVFP4 on CUDA: the maxima first, one launch for both copies after them (kernels/quantize_nvfp4.cu), and back.

Every block of the second launch takes the maximum of the first one's partials itself; it writes the amax of the copies.
With an amax for each row the first launch, one for each copy, writes them where they belong.
"""

from __future__ import annotations

from ctypes import c_int32
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_core.backends.cuda.quantize import BLOCKS_PER_SM, THREADS, AmaxPlan, multiprocessors, plan_amax
from te_core.backends.cuda.sums import TYPES, ColumnSum
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.quantized import Cast, QuantizedTensor, padded, up
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.quantize import QuantizeSpec

_SIDE = 64  # of the tiles of nvfp4.cuh
_FOUR_OVER_SIX = {None: 0, "MAE": 1, "MSE": 2}

#: x; data, scale and amax of the rowwise copy, then of the columnwise one; partials, n_partials, rng, site, range,
#: rows, cols, across
_QUANTIZE_ARGS = "ppppppppipifqqq"
_MAXIMA_ARGS = "ppqqqq"


@dataclass(frozen=True, slots=True)
class Nvfp4Plan:
    """The launches of `quantize_nvfp4`; `unaligned` variants are for an x off the 16-byte grid."""

    family: str
    shape: tuple[int, int]
    constants: dict[str, Any]
    across: int
    blocks: int
    partials: int
    amax: AmaxPlan | None
    sums: ColumnSum | None

    def kernel(self, rt: Runtime, entry: str, args: str, x: Tensor) -> Kernel:
        """A function of quantize_nvfp4.cu for this address of x."""
        constants = self.constants
        if x.ptr & 15 and constants["ALIGNED"]:
            constants = {**constants, "ALIGNED": 0}
        return loader.get(rt, "quantize_nvfp4", entry=entry, args=args, **constants)


def plan_quantize_nvfp4(rt: Runtime, spec: QuantizeSpec) -> Nvfp4Plan:
    """The launches of `quantize_nvfp4`."""
    cast, form, dtype, (rows, cols) = spec.cast, spec.cast.format, spec.dtype, spec.shape
    transform = cast.transform and cast.columnwise
    # The scales of a copy reach to a multiple of 128 lines and of 64 elements along them.
    across = max(1, up(cols, 128 if cast.columnwise else _SIDE) // _SIDE)
    down = max(1, up(rows, 128 if cast.rowwise else _SIDE) // _SIDE)
    partials, amax = 0, None
    if transform:
        partials = min(BLOCKS_PER_SM * multiprocessors(rt), max(1, -(-cols // _SIDE) * -(-rows // _SIDE)))
    elif not form.row_scaled:
        amax = plan_amax(rt, rows * cols, dtype)
        partials = amax.blocks
    constants = {
        "DTYPE": TYPES[dtype],
        "ALIGNED": int(cols % (16 // dtype.itemsize) == 0),
        "TILED": int(form.tiled),
        "TRANSFORM": int(transform),
        "STOCHASTIC": int(cast.stochastic),
        "ROW_SCALED": int(form.row_scaled),
        "FOUR_OVER_SIX": _FOUR_OVER_SIX[cast.four_over_six],
    }
    first = "line_maxima" if form.row_scaled else "maxima" if transform else "amax"
    return Nvfp4Plan(
        f"{first}+quantize_nvfp4",
        (rows, cols),
        constants,
        across,
        across * down,
        partials,
        amax,
        None if spec.sum is None else ColumnSum(rt, rows, cols, dtype, spec.sum),
    )


def quantize_nvfp4(
    rt: Runtime, plan: Nvfp4Plan, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None
) -> None:
    """Quantize x as planned."""
    (rows, cols), partials, count = plan.shape, 0, plan.partials
    if cast.maxima is not None:  # one partial, or one pair of them
        partials, count = cast.maxima.ptr, 1
    elif plan.amax is not None:
        partials = rt.workspace("amax", 4 * plan.partials)
        plan.amax.kernel(rt, plan.partials, 256, x.ptr, partials, plan.amax.count)
    elif plan.partials:
        partials = rt.workspace("amax", 8 * plan.partials)
        across, down = -(-cols // _SIDE), -(-rows // _SIDE)
        maxima = plan.kernel(rt, "maxima", _MAXIMA_ARGS, x)
        maxima(rt, plan.partials, THREADS, x.ptr, partials, rows, cols, across, across * down)
    else:
        _line_maxima(rt, plan, x, out)
    plan.kernel(rt, "quantize_nvfp4", _QUANTIZE_ARGS, x)(
        rt,
        plan.blocks,
        THREADS,
        x.ptr,
        *_addresses(out, False),
        *_addresses(out, True),
        partials,
        count,
        0 if cast.rng is None else cast.rng.ptr,
        c_int32(cast.site & 0xFFFFFFFF).value,
        6.0 * cast.format.bound,
        rows,
        cols,
        plan.across,
    )
    if plan.sums is not None and column_sum is not None:
        plan.sums(rt, x.ptr, 0, column_sum.ptr)


def _line_maxima(rt: Runtime, plan: Nvfp4Plan, x: Tensor, out: QuantizedTensor) -> None:
    """The amax of each row, and of each column, of x."""
    rows, cols = plan.shape
    if out.rowwise_amax is not None and rows:
        kernel = plan.kernel(rt, "row_maxima", "ppq", x)
        kernel(rt, rows, 256, x.ptr, out.rowwise_amax.ptr, cols)
    if out.columnwise_amax is not None and cols:
        kernel = plan.kernel(rt, "column_maxima", "ppqq", x)
        kernel(rt, -(-cols // 32), (32, 8), x.ptr, out.columnwise_amax.ptr, rows, cols)


def _addresses(q: QuantizedTensor, columnwise: bool) -> tuple[int, int, int]:
    """Of data, scales and amax of a copy; zeros for one that is not there."""
    if columnwise:
        data, scale, amax = q.columnwise, q.columnwise_scale, q.columnwise_amax
    else:
        data, scale, amax = q.rowwise, q.rowwise_scale, q.rowwise_amax
    if data is None or scale is None or amax is None:
        return 0, 0, 0
    return data.ptr, scale.ptr, amax.ptr


def dequantize_nvfp4(rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool) -> None:
    """The values of one copy; of the columnwise one, with its padded rows and as it was transformed."""
    rows, cols = q.shape
    if not rows or not cols:
        return
    count, length = (cols, padded(rows)) if columnwise else (rows, cols)
    form = q.format
    kernel = loader.get(
        rt,
        "dequantize_nvfp4",
        args="ppppfqqq",
        DTYPE=TYPES[out.dtype],
        COLUMNWISE=int(columnwise),
        ROW_SCALED=int(form.row_scaled),
    )
    across = -(-length // _SIDE)
    blocks = across * -(-count // _SIDE)
    addresses = _addresses(q, columnwise)
    kernel(rt, blocks, THREADS, *addresses, out.ptr, 1.0 / (6 * form.bound), count, length, across)
