"""The order in which cuBLASLt reads the scales of mxfp8 and nvfp4. `Scales` has both orders of an operand's."""

from __future__ import annotations

from te_core.ops.declare import operation
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: cuBLASLt reads scales in tiles of so many rows and blocks; `te_core.quantized` rounds up to whole ones.
TILE = (128, 4)


@operation(
    """
    scale [R, C] u8: Scales of a copy, one byte each.
    must scale.device.kind != "cuda" or not scale.ptr & 15: scales at a multiple of 16 bytes; pass a copy
    transposed: Whether `scale` is held as [C, R].
    must scale.shape[transposed] % TILE[0] == 0 == scale.shape[not transposed] % TILE[1]: whole tiles of {TILE[0]} rows
        and {TILE[1]} blocks; pass the whole padded scale of a copy
""",
    runs="quantize_mxfp8.swizzle_scales",
)
def swizzle_scales(rt: Runtime, scale: Tensor, *, transposed: bool = False) -> Tensor:
    """The scales [R, C] of a copy, one byte each, in cuBLASLt's order: the same shape, other places.

    R (rows of the operand) is a multiple of 128, C (blocks along the contraction) of 4. The scale (i, j) goes to byte

        (i // 128 * (C / 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4

    transposed: `scale` is held as [C, R], as an mxfp8 columnwise copy holds it. The result then has that shape too.
    """
    out = rt.empty(scale.shape, scale.dtype)
    rt.backend.swizzle_scales(rt, scale, out, transposed)
    return out


class Scales:
    """The scales of one copy of an operand, in the order that a plan wants. Swizzled ones are made once, and kept."""

    __slots__ = ("_columnwise", "_q")

    def __init__(self, q: QuantizedTensor, columnwise: bool) -> None:
        self._q, self._columnwise = q, columnwise

    @property
    def stored(self) -> Tensor:
        """As `quantize` left them."""
        scale = self._q.columnwise_scale if self._columnwise else self._q.rowwise_scale
        assert scale is not None
        return scale

    def swizzled(self, rt: Runtime) -> Tensor:
        """As cuBLASLt reads them."""
        q, columnwise = self._q, self._columnwise
        found = q.columnwise_swizzled if columnwise else q.rowwise_swizzled
        if found is None:
            found = swizzle_scales(rt, self.stored, transposed=columnwise and not q.format.transposed)
            if columnwise:
                q.columnwise_swizzled = found
            else:
                q.rowwise_swizzled = found
        return found
