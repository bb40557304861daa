"""Another size for a matrix (kernels/resize.cu), and column sums (kernels/sums.cu)."""

from __future__ import annotations

from te_core.backends.cuda import sums
from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

THREADS = 256


def resize(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """Crop x, or fill up with zeros."""
    rows, cols = out.shape
    if not rows * cols:
        return
    kernel = loader.get(rt, "resize", args="ppqqqq", SIZE=out.dtype.bits // 8)
    blocks = -(-rows * cols // THREADS)
    kernel(rt, blocks, THREADS, x, out, *x.shape, rows, cols)


def column_sum(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """Add the rows in float32, in an order that depends on the shape alone."""
    sums.column_sum(rt, x.ptr, x.shape, x.dtype, out)
