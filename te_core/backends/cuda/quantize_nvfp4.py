"""NVFP4 on CUDA: the maxima first, one launch for both copies after them (kernels/quantize_nvfp4.cu), and back.

Every block of the second launch takes the maximum of the first one's partials itself; it writes the amax of the copies.
With an amax for each row the first launch, one for each copy, writes them where they belong.
"""

from __future__ import annotations

from ctypes import c_int32
from functools import partial

from te_core.backends.cuda import sums
from te_core.backends.cuda.quantize import BLOCKS_PER_SM, THREADS, aligned, maxima, multiprocessors
from te_core.backends.cuda.sums import TYPES
from te_core.kernels import loader
from te_core.quantized import Cast, QuantizedTensor, padded, up
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_SIDE = 64  # of the tiles of nvfp4.cuh
_FOUR_OVER_SIX = {None: 0, "MAE": 1, "MSE": 2}

#: x; data, scale and amax of the rowwise copy, then of the columnwise one; partials, n_partials, rng, site, range,
#: rows, cols, across
_QUANTIZE_ARGS = "ppppppppipifqqq"
_MAXIMA_ARGS = "ppqqqq"


def quantize_nvfp4(rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None) -> None:
    """Quantize x: its maxima, unless they are given, and the launch that casts."""
    (rows, cols), form = x.shape, cast.format
    get = partial(
        loader.get,
        rt,
        "quantize_nvfp4",
        DTYPE=TYPES[x.dtype],
        ALIGNED=aligned(x),
        TILED=form.tiled,
        TRANSFORM=cast.transform and cast.columnwise,
        STOCHASTIC=cast.stochastic,
        ROW_SCALED=form.row_scaled,
        FOUR_OVER_SIX=_FOUR_OVER_SIX[cast.four_over_six],
    )
    partials, count = 0, 0
    if cast.maxima is not None:  # one partial, or one pair of them
        partials, count = cast.maxima.ptr, 1
    elif cast.transform and cast.columnwise:
        across, down = -(-cols // _SIDE), -(-rows // _SIDE)
        count = min(BLOCKS_PER_SM * multiprocessors(rt), max(1, across * down))
        partials = rt.workspace("amax", 8 * count)
        kernel = get(entry="maxima", args=_MAXIMA_ARGS)
        kernel(rt, count, THREADS, x, partials, rows, cols, across, across * down)
    elif not form.row_scaled:
        partials, count = maxima(rt, x)
    else:
        if out.rowwise_amax is not None and rows:
            get(entry="row_maxima", args="ppq")(rt, rows, 256, x, out.rowwise_amax, cols)
        if out.columnwise_amax is not None and cols:
            kernel = get(entry="column_maxima", args="ppqq")
            kernel(rt, -(-cols // 32), (32, 8), x, out.columnwise_amax, rows, cols)
    # The scales of a copy reach to a multiple of 128 lines and of 64 elements along them.
    across = max(1, up(cols, 128 if cast.columnwise else _SIDE) // _SIDE)
    down = max(1, up(rows, 128 if cast.rowwise else _SIDE) // _SIDE)
    copies = (*_pieces(out, False), *_pieces(out, True))
    site = c_int32(cast.site & 0xFFFFFFFF).value
    kernel = get(args=_QUANTIZE_ARGS)
    numbers = (site, 6.0 * form.bound, rows, cols, across)
    kernel(rt, across * down, THREADS, x, *copies, partials, count, cast.rng, *numbers)
    if column_sum is not None:
        sums.column_sum(rt, x.ptr, x.shape, x.dtype, column_sum)


def _pieces(q: QuantizedTensor, columnwise: bool) -> tuple[Tensor | None, ...]:
    """Data, scales and amax of a copy; none of a copy that is not there, or has no lines."""
    side = "columnwise" if columnwise else "rowwise"
    found = getattr(q, side), getattr(q, f"{side}_scale"), getattr(q, f"{side}_amax")
    return (None, None, None) if None in found else found


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
        COLUMNWISE=columnwise,
        ROW_SCALED=form.row_scaled,
    )
    across = -(-length // _SIDE)
    blocks = across * -(-count // _SIDE)
    kernel(rt, blocks, THREADS, *_pieces(q, columnwise), out, 1.0 / (6 * form.bound), count, length, across)
