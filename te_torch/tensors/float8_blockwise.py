"""FP8 with a float32 scale for each 1x128 piece or 128x128 tile. Storage, tensor, quantizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.precision import Operand, rule_of
from te_core.quantized import Format
from te_core.recipe import Float8BlockScaling
from te_torch.tensors import kinds
from te_torch.tensors.base import Quantizer
from te_torch.tensors.block_scaled import BlockScaledStorage, scale_shape
from te_torch.tensors.buffers import Buffers, matrix_of
from te_torch.tensors.dtype import fp8, of_core
from te_torch.tensors.pickling import rebuilt
from te_torch.tensors.tensor import QuantizedTensor, constructor


class Float8BlockwiseQTensorStorage(BlockScaledStorage):
    """FP8 data, columnwise as (K, ...), with float32 scales as a GEMM reads them."""

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
        is_2D_scaled: bool = False,
        fake_dtype: torch.dtype | None = None,
        data_format: Any = None,
    ) -> None:
        given = Buffers(rowwise_data, rowwise_scale_inv, None, columnwise_data, columnwise_scale_inv)
        self._take(fake_dtype or torch.float32, Format(fp8(fp8_dtype), "block", is_2D_scaled), given, quantizer)

    _fp8_dtype = property(lambda self: of_core(self._format.dtype))
    _is_2D_scaled = property(lambda self: self._format.tiled)  # noqa: N815

    def _build_default_quantizer(self) -> Any:
        return Float8BlockQuantizer(
            self._fp8_dtype, block_scaling_dim=2 if self._is_2D_scaled else 1, **self.get_usages()
        )

    def get_metadata(self) -> dict[str, Any]:
        """The constructor's keyword arguments that make a storage of the same buffers."""
        return {**self._given(), "fp8_dtype": self._fp8_dtype, "is_2D_scaled": self._is_2D_scaled}


class Float8BlockwiseQTensor(QuantizedTensor, Float8BlockwiseQTensorStorage):  # type: ignore[misc]
    """A tensor in FP8 with a scale for each block."""

    __init__ = constructor(Float8BlockwiseQTensorStorage)


class Float8BlockQuantizer(Quantizer):
    """FP8 with a scale for each 1x128 piece (`block_scaling_dim=1`) or 128x128 tile (2)."""

    _RECIPE = Float8BlockScaling
    _VALUE = ("dtype", "amax_epsilon", "force_pow_2_scales", "block_scaling_dim")
    block_len = 128

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._check(amax_epsilon, force_pow_2_scales=force_pow_2_scales)
        if block_scaling_dim not in (1, 2):
            raise ArgumentError(
                "Float8BlockQuantizer",
                f"block_scaling_dim={block_scaling_dim}",
                "1 (1x128) or 2 (128x128)",
                "correct it",
            )
        self.dtype = of_core(fp8(fp8_dtype))
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim

    @property
    def operand(self) -> Operand:
        """The rule as plain data."""
        tiled = self.block_scaling_dim == 2
        return rule_of(self.dtype.core, "block", self.force_pow_2_scales, self.amax_epsilon, tiled=tiled)

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Whether a piece of this shape can be quantized by itself."""
        m, k = matrix_of(inp.shape)
        return inp.ndim >= 2 and m % 128 == 0 and k % 128 == 0

    get_scale_shape = scale_shape

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the columnwise data."""
        return (shape[-1], *shape[:-1]) if shape else ()

    def is_requantization_safe(self) -> bool:
        """The scales follow from the values."""
        return True


@kinds.made_by(Float8BlockwiseQTensorStorage, Float8BlockwiseQTensor, Float8BlockQuantizer, scaling="block")
def _make_float8_blockwise_tensor_in_reduce_ex(*args: Any) -> Any:
    """Unpickles a `Float8BlockwiseQTensor`."""
    return rebuilt(Float8BlockwiseQTensor, *args)
