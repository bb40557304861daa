"""Quantized storage as plain data: what a quantizer makes and a GEMM reads. No policy here.

A matrix [M, K] may be held in two orientations, because an FP8 GEMM on Hopper reads both operands along the
contraction: `rowwise` is [M, K], `columnwise` is its transpose [K, M]. Both are stored with every side rounded
up to PAD elements and the tail filled with zeros, so any shape can enter any GEMM; `shape` is the real one.

In memory an orientation and the scale are one block of bytes: data, then the float32 scale_inv. The columnwise copy,
which backward reads, begins its block, so the block alone is all that has to be kept for it.
"""

from __future__ import annotations

from te_core import dtypes
from te_core.dtypes import DType
from te_core.tensor import Tensor

#: Up to this many bytes an orientation both lie in one block: an allocation costs a host 3 us, and keeping the
#: row-wise copy until backward costs less memory than the allocator's own rounding.
ONE_BLOCK = 1 << 16

#: cuBLASLt wants FP8 leading dimensions and addresses in multiples of 16 bytes.
PAD = 16


def padded(n: int) -> int:
    """`n` rounded up to a whole number of PADs."""
    return (n + PAD - 1) // PAD * PAD


class QuantizedTensor:
    """A per-tensor scaled FP8 matrix: value = data * scale_inv."""

    __slots__ = ("block", "columnwise", "dtype", "rowwise", "scale_inv", "shape")

    def __init__(
        self,
        rowwise: Tensor | None,
        columnwise: Tensor | None,
        scale_inv: Tensor,
        shape: tuple[int, int],
        dtype: DType,
        block: Tensor | None = None,
    ) -> None:
        self.rowwise = rowwise  # [padded(M), padded(K)]
        self.columnwise = columnwise  # [padded(K), padded(M)]
        self.scale_inv = scale_inv  # float32 [1]
        self.shape = shape  # (M, K)
        self.dtype = dtype
        self.block = block  # uint8: the memory that begins with the columnwise copy and holds the scale after it

    @classmethod
    def columnwise_in(cls, block: Tensor, shape: tuple[int, int], dtype: DType) -> QuantizedTensor:
        """The columnwise copy that a block begins with, and its scale."""
        m, k = padded(shape[0]), padded(shape[1])
        device = block.device
        scale_inv = Tensor(block.ptr + m * k, (1,), dtypes.float32, device, block)
        return cls(None, Tensor(block.ptr, (k, m), dtype, device, block), scale_inv, shape, dtype, block)

    def __repr__(self) -> str:
        held = [n for n in ("rowwise", "columnwise") if getattr(self, n) is not None]
        return f"QuantizedTensor({self.dtype} {tuple(self.shape)}, {' and '.join(held) or 'empty'})"


class Cast:
    """How a producer (quantize, norm, activation) shall deliver its result in FP8.

    With `scale` (float32 [1], on the device) the value is multiplied by it and cast (delayed scaling); `amax`,
    if given, is raised to the maximum |value| (float32 [1], never lowered). Without `scale` the scale is worked
    out from the value's own maximum (current scaling): `epsilon` and `power_of_two` are its rule. Not to be changed
    once made: casts are shared between calls.
    """

    __slots__ = ("amax", "columnwise", "dtype", "epsilon", "key", "power_of_two", "rowwise", "scale")

    def __init__(
        self,
        dtype: DType,
        *,
        rowwise: bool,
        columnwise: bool,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
        epsilon: float = 0.0,
        power_of_two: bool = False,
    ) -> None:
        self.dtype = dtype
        self.rowwise = rowwise
        self.columnwise = columnwise
        self.scale = scale
        self.amax = amax
        self.epsilon = epsilon
        self.power_of_two = power_of_two
        #: What a plan depends on (the tensors and the epsilon are run-time values).
        self.key = (dtype, rowwise, columnwise, scale is not None, amax is not None)
