"""Statistics on CUDA: statistics.cu, one launch over the tensor and one that joins what its blocks found."""

from __future__ import annotations

from functools import partial

from te_core.backends.cuda.quantize import BLOCKS_PER_SM, multiprocessors
from te_core.backends.cuda.sums import FORMATS, TYPES
from te_core.kernels import loader
from te_core.quantized import Format
from te_core.runtime import Runtime
from te_core.statistics import SLOTS
from te_core.tensor import Tensor

_THREADS = 256


def statistics(
    rt: Runtime,
    x: Tensor,
    data: Tensor | None,
    scale: Tensor | None,
    form: Format | None,
    columnwise: bool,
    record: Tensor,
) -> None:
    """Merge what a matrix is like into a record."""
    (rows, cols), pitch = x.shape, 0 if data is None else data.shape[1]
    vec = _width(x, data, form)
    vectors = rows * (cols // vec)
    many = vectors + (1 << 21) > 1 << 32  # the last step of a thread's index must not wrap
    blocks = max(1, min(BLOCKS_PER_SM * multiprocessors(rt), -(-vectors // (4 * _THREADS))))
    parts = rt.workspace("statistics", 8 * SLOTS * blocks)
    one = scale is None or form is None or form.scaling == "tensor"
    get = partial(
        loader.get,
        rt,
        "statistics",
        DTYPE=TYPES[x.dtype],
        KIND=_kind(data, form, columnwise),
        VEC=vec,
        FORMAT="E4M3" if form is None else FORMATS[form.dtype],
        INDEX="i64" if many else "u32",
    )
    kernel, finish = get(args="ppppqqqq"), get(entry="statistics_finish", args="ppi")
    across = 0 if one else scale.shape[1]  # type: ignore[union-attr]
    kernel(rt, blocks, _THREADS, x, data, scale, parts, rows, cols, pitch, across)
    finish(rt, 1, 32 * SLOTS, parts, record, blocks)


def _kind(data: Tensor | None, form: Format | None, columnwise: bool) -> str:
    if data is None:
        return "NONE"
    if form is None:
        return "VALUES"
    if form.scaling == "block":
        return "TILES" if form.tiled else "PIECES"
    if form.scaling == "mxfp8":
        return "MX_COLUMNS" if columnwise else "MX"
    return "TENSOR"


def _width(x: Tensor, data: Tensor | None, form: Format | None) -> int:
    """Elements that a thread reads at once: whole vectors fill a row, and all addresses are on their grid."""
    widest = 4 if data is not None and form is None else 16 // x.dtype.itemsize
    if x.ptr & (widest * x.dtype.itemsize - 1):
        return 1
    if data is None:
        return widest
    return widest if x.shape[1] % widest == 0 and not data.ptr & 15 else 1
