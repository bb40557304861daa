"""Several matrices quantized at once: one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from te_core import dtypes
from te_core.backends.cpu.quantize import quantize
from te_core.backends.cpu.quantize_block import quantize_block
from te_core.quantized import Cast, Copy, QuantizedRows, QuantizedTensor, pieces
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.quantize_grouped import GroupedSpec


def quantize_grouped(
    rt: Runtime,
    spec: GroupedSpec,
    parts: Sequence[Tensor],
    casts: Sequence[Cast],
    outs: Sequence[QuantizedTensor],
    column_sums: Sequence[Tensor] | None,
) -> None:
    """Quantize each matrix as its cast says."""
    one = quantize_block if spec.cast.format.scaling == "block" else quantize
    for i, (part, cast, out) in enumerate(zip(parts, casts, outs, strict=True)):
        one(rt, part, cast, out, None if column_sums is None else column_sums[i])


def quantize_rows(rt: Runtime, x: Tensor, offsets: Tensor, casts: Sequence[Cast], out: QuantizedRows) -> None:
    """Quantize each group by itself, and copy it to where it lies among the others."""
    one = quantize_block if out.format.scaling == "block" else quantize
    form, ends, column = out.format, offsets.numpy().tolist(), 0
    if out.columnwise is not None:
        out.columnwise.numpy().view(np.uint8)[...] = 0
    for e, (start, stop) in enumerate(pairwise(ends)):
        m, shape = stop - start, (stop - start, x.shape[1])
        row, turned = (
            None if there is None else Copy.at(rt.empty((parts.nbytes,), dtypes.uint8), 0, parts)
            for there, parts in ((out.rowwise, pieces(form, shape, False)), (out.columnwise, pieces(form, shape, True)))
        )
        q = QuantizedTensor(form, shape, row, turned)
        one(rt, x.rows(start, stop), casts[e], q, None)
        if out.rowwise is not None and q.rowwise is not None:
            out.rowwise.numpy()[start:stop] = q.rowwise.numpy()[:m]
        if out.columnwise is not None and q.columnwise is not None:
            out.columnwise.numpy()[:, column : column + m] = q.columnwise.numpy()[:, :m]
        scales = out.rowwise_scale, out.columnwise_scale
        for where, to, found in zip(("rows", "columns"), scales, (q.rowwise_scale, q.columnwise_scale), strict=True):
            if to is None or found is None:
                continue
            if form.scaling == "tensor":
                to.numpy()[e] = q.scale_inv.numpy()[0]
            elif where == "rows":
                to.numpy()[:, start:stop] = found.numpy()[:, :m]
            else:
                to.numpy()[column // 128 : column // 128 + found.shape[0]] = found.numpy()
        column += (m + 127) // 128 * 128
