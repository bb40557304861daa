"""Several matrices quantized at once: one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from te_core.backends.cpu.quantize import quantize
from te_core.backends.cpu.quantize_block import quantize_block
from te_core.quantized import Cast, QuantizedTensor
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
