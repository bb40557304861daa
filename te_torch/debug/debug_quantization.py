"""The documented names for what a layer quantizes while features look at it.

The layers of this package show features the recipe's own quantizers and tensors, so none of these is made by them:
they are for programs that ask for the classes, or make one.
"""

from __future__ import annotations

from typing import Any

import torch

HIGH_PRECISION = "High precision"
STANDARD_QUANTIZE = "FP8 quantization"


class DebugQuantizedTensor:
    """A tensor as the GEMM that reads its rows and the one that reads its columns have it: quantized or plain."""

    def __init__(
        self,
        rowwise_gemm_tensor: Any,
        columnwise_gemm_tensor: Any,
        quantizer: Any = None,
        layer_name: str | None = None,
        tensor_name: str | None = None,
    ) -> None:
        self.rowwise_gemm_tensor, self.columnwise_gemm_tensor = rowwise_gemm_tensor, columnwise_gemm_tensor
        self.quantizer, self._layer_name, self._tensor_name = quantizer, layer_name, tensor_name

    def get_tensor(self, transpose: bool) -> Any:
        """The one that columns are read of (`transpose`), or the one that rows are."""
        return self.columnwise_gemm_tensor if transpose else self.rowwise_gemm_tensor

    def size(self, *args: Any) -> Any:
        """As torch's."""
        held = self.rowwise_gemm_tensor if self.rowwise_gemm_tensor is not None else self.columnwise_gemm_tensor
        return held.size(*args)


class DebugQuantizer:
    """Quantizes one tensor of a layer by the recipe's quantizer; without one it leaves it as it is."""

    def __init__(
        self, layer_name: str, tensor_name: str, parent_quantizer: Any, tp_group: Any = None, tp_size: int = 1
    ) -> None:
        self.layer_name, self.tensor_name, self.parent_quantizer = layer_name, tensor_name, parent_quantizer
        self.tp_group, self.tp_size = tp_group, tp_size

    def quantize(self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> DebugQuantizedTensor:
        """The tensor for both GEMMs."""
        parent = self.parent_quantizer
        made = tensor if parent is None else parent.quantize(tensor, dtype=dtype)
        return DebugQuantizedTensor(made, made, self, self.layer_name, self.tensor_name)

    __call__ = quantize
