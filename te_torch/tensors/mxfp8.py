"""MXFP8: FP8 with a power-of-two scale for each 32 elements. Storage, tensor, quantizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_core.precision import Operand, rule_of
from te_core.quantized import Format
from te_core.recipe import MXFP8BlockScaling
from te_torch.tensors import kinds
from te_torch.tensors.base import Quantizer
from te_torch.tensors.block_scaled import BlockScaledStorage, scale_shape
from te_torch.tensors.buffers import Buffers, matrix_of
from te_torch.tensors.dtype import DType, fp8, of_core
from te_torch.tensors.pickling import rebuilt
from te_torch.tensors.tensor import QuantizedTensor, constructor


class MXFP8TensorStorage(BlockScaledStorage):
    """FP8 data of the tensor's shape in both copies (the columnwise one is not transposed), E8M0 scales as uint8."""

    _CHANGES = True

    def __init__(
        self,
        *,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: Any,
        quantizer: Any = None,
        with_gemm_swizzled_scales: bool = False,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_swizzled(type(self).__name__, with_gemm_swizzled_scales)
        given = Buffers(rowwise_data, rowwise_scale_inv, None, columnwise_data, columnwise_scale_inv)
        tiled = bool(getattr(quantizer, "with_2d_quantization", False))
        self._take(fake_dtype or torch.float32, Format(fp8(fp8_dtype), "mxfp8", tiled), given, quantizer)

    _fp8_dtype = property(lambda self: of_core(self._format.dtype))

    def _build_default_quantizer(self) -> Any:
        return MXFP8Quantizer(self._fp8_dtype, with_2d_quantization=self._format.tiled, **self.get_usages())

    def _derives_columnwise(self) -> bool:
        return False

    def get_metadata(self) -> dict[str, Any]:
        """The constructor's keyword arguments that make a storage of the same buffers."""
        return {**self._given(), "fp8_dtype": self._fp8_dtype, "with_gemm_swizzled_scales": False}


def refuse_swizzled(name: str, swizzled: bool) -> None:
    """Scales are held in the documented order; a GEMM swizzles them itself."""
    if swizzled:
        raise NotImplementedError(f"{name}: with_gemm_swizzled_scales=True; pass scales in rows and blocks")


class MXFP8Tensor(QuantizedTensor, MXFP8TensorStorage):  # type: ignore[misc]
    """A tensor in MXFP8."""

    __init__ = constructor(MXFP8TensorStorage)


class MXFP8Quantizer(Quantizer):
    """MXFP8 by 1x32 pieces or, `with_2d_quantization`, 32x32 tiles."""

    _RECIPE = MXFP8BlockScaling
    _VALUE = ("dtype", "with_2d_quantization")

    def __init__(
        self, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._check(with_2d_quantization=with_2d_quantization)
        self.dtype = of_core(fp8(fp8_dtype))
        self.with_2d_quantization = with_2d_quantization

    @property
    def operand(self) -> Operand:
        """The rule as plain data."""
        return rule_of(self.dtype.core, "mxfp8", tiled=self.with_2d_quantization)

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Whether a piece of this shape can be quantized by itself."""
        m, k = matrix_of(inp.shape)
        return inp.ndim >= 2 and m % 32 == 0 and k % 32 == 0

    get_scale_shape = scale_shape

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the columnwise data."""
        return tuple(shape)

    def create_tensor_from_data(
        self,
        data: torch.Tensor,
        scale_inv: torch.Tensor,
        fake_dtype: torch.dtype = torch.float32,
        fp8_dtype: Any = DType.kFloat8E4M3,
    ) -> MXFP8Tensor:
        """A tensor over rowwise data and scales."""
        return MXFP8Tensor(
            data.shape,
            fake_dtype,
            rowwise_data=data,
            rowwise_scale_inv=scale_inv,
            columnwise_data=None,
            columnwise_scale_inv=None,
            fp8_dtype=fp8_dtype,
            quantizer=self.copy(),
            device=data.device,
        )

    def onnx_quantize(self, tensor: torch.Tensor) -> torch.Tensor:
        """The cast as one operator (`te_runtime::quantize_pieces`)."""
        return self._made(tensor, None)

    def onnx_dequantize(self, tensor: Any) -> torch.Tensor:
        """The values of what `onnx_quantize` gave."""
        return tensor.dequantize()

    def is_requantization_safe(self) -> bool:
        """The scales follow from the values."""
        return True


@kinds.made_by(MXFP8TensorStorage, MXFP8Tensor, MXFP8Quantizer, scaling="mxfp8")
def _make_mxfp8_tensor_in_reduce_ex(*args: Any) -> Any:
    """Unpickles an `MXFP8Tensor`."""
    return rebuilt(MXFP8Tensor, *args)
