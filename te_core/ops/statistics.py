"""Statistics of a tensor, and of what a cast made of it, merged into a record on the device in one pass.

A record is what `te_core.statistics` says: `merge` tells how its float64 numbers join. Values are taken as float32, and
so are squares and differences; sums are float64 (on a GPU the 16 bytes that a thread reads at once are added in
float32). Added in an order that only shapes decide, so the same tensors give the same record.

Where there is a quantized tensor, each value x meets its code c and the scale_inv s of its tensor, piece or tile:
underflow  x != 0 and c is a zero;  overflow  |x| > largest value of the format * s;  saturated  c is the largest code;
noise  (x - c * s)^2. NVFP4 is dequantized before: it has neither overflows nor scales here.
"""

from __future__ import annotations

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.ops import _check
from te_core.ops.declare import operation
from te_core.ops.quantize import dequantize, transpose
from te_core.quantized import Format, QuantizedTensor
from te_core.runtime import Runtime
from te_core.statistics import SLOTS  # noqa: F401  (of the declaration)
from te_core.tensor import Tensor


@operation("""
    x [...] act
    record [SLOTS] f64 written: Statistics that are merged into.
    q: x quantized, which is compared with x. None compares nothing.
    columnwise: Whether the columnwise copy is read.
""")
def statistics(
    rt: Runtime, x: Tensor, record: Tensor, q: QuantizedTensor | None = None, *, columnwise: bool = False
) -> None:
    """Merge the statistics of x (dense) into `record`, a float64 vector of SLOTS that begins as `statistics.empty()`.

    q, if given, is x [M, K] quantized: its rowwise copy is compared with x, or its columnwise one.
    """
    op = "statistics"
    if not x.size:
        return
    if q is None:
        rt.backend.statistics(rt, x.reshape(1, x.size), None, None, None, False, record)
        return
    data, scale = (q.columnwise, q.columnwise_scale) if columnwise else (q.rowwise, q.rowwise_scale)
    if data is None:
        got = f"{q!r} without the copy that columnwise={columnwise} names"
        raise ArgumentError(op, got, "a tensor that holds it", "ask for the other copy")
    _check.stored(op, rt.device, "q", q)
    if columnwise and q.format.scaling == "nvfp4":
        allowed = "the rowwise copy of nvfp4: the other one may be transformed"
        raise ArgumentError(op, f"the columnwise copy of {q!r}", allowed, "compare that one")
    flat = x if len(x.shape) == 2 else x.matrix()
    if tuple(flat.shape) != tuple(q.shape):
        raise ArgumentError(op, f"q = {q!r} of {x!r}", "q of x's shape", "correct q")
    form: Format | None = q.format
    if q.format.scaling == "nvfp4":
        data, scale, form = dequantize(rt, q, dtypes.float32, columnwise=False), None, None
    elif columnwise and q.format.transposed:
        flat, columnwise = transpose(rt, flat), False
    rt.backend.statistics(rt, flat, data, scale, form, columnwise, record)
