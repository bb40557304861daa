"""Quantized tensors that torch can hold, and the quantizers that make them. `__all__` is what users import."""

import torch

from te_torch.tensors import kinds
from te_torch.tensors import pickling as pickling
from te_torch.tensors.base import (
    DelayedScalingRequest,
    Quantizer,
    QuantizerRequest,
    QuantizerRole,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from te_torch.tensors.dtype import DType
from te_torch.tensors.dtype import TE_DType as TE_DType
from te_torch.tensors.dtype import TE_DType_To_Torch as TE_DType_To_Torch
from te_torch.tensors.float8 import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor, Float8TensorStorage
from te_torch.tensors.float8_blockwise import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from te_torch.tensors.hybrid import HybridQuantizedTensor, HybridQuantizedTensorStorage, HybridQuantizer
from te_torch.tensors.identity import IdentityQuantizer, IdentityTensor, IdentityTensorStorage
from te_torch.tensors.mxfp8 import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage
from te_torch.tensors.nvfp4 import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage
from te_torch.tensors.storage import QuantizedTensorStorage
from te_torch.tensors.tensor import QuantizedTensor
from te_torch.tensors.tracing import core_from_inner as core_from_inner
from te_torch.tensors.wrap import from_core as from_core
from te_torch.tensors.wrap import quantizer_of as quantizer_of


def get_all_tensor_types() -> list[type]:
    """Every class of plain and quantized tensors and storages."""
    of_kinds = [cls for kind in kinds.KINDS for cls in (kind.tensor, kind.storage)]
    return [torch.Tensor, torch.nn.Parameter, *of_kinds]


__all__ = [
    "DType", "DelayedScalingRequest", "Float8BlockQuantizer", "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage", "Float8CurrentScalingQuantizer", "Float8Quantizer", "Float8Tensor",
    "Float8TensorStorage", "HybridQuantizedTensor", "HybridQuantizedTensorStorage", "HybridQuantizer",
    "IdentityQuantizer", "IdentityTensor", "IdentityTensorStorage", "MXFP8Quantizer", "MXFP8Tensor",
    "MXFP8TensorStorage", "NVFP4Quantizer", "NVFP4Tensor", "NVFP4TensorStorage", "QuantizedTensor",
    "QuantizedTensorStorage", "Quantizer", "QuantizerRequest", "QuantizerRole", "prepare_for_saving",
    "restore_from_func_ctx", "restore_from_saved",
]  # fmt: skip
