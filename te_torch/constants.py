"""The documented constants."""

from types import SimpleNamespace

import torch

from te_core import attention as _attention
from te_torch.attention.layouts import QKV_LAYOUTS
from te_torch.tensors.dtype import DType, TE_DType, TE_DType_To_Torch

__all__ = [
    "AttnBiasTypes", "AttnMaskTypes", "AttnTypes", "DType", "FP8BwdTensorIdx", "FP8FwdTensorIdx", "GemmParallelModes",
    "LayerTypes", "MXFP8_BLOCK_SCALING_SIZE", "NVFP4_BLOCK_SCALING_SIZE", "QKVLayouts", "TE_DType", "TE_DType_To_Torch",
    "dist_group_type",
]  # fmt: skip

AttnMaskTypes = _attention.MASKS
AttnBiasTypes = _attention.BIASES
AttnTypes = ("self", "cross")
LayerTypes = ("encoder", "decoder")
QKVLayouts = QKV_LAYOUTS
GemmParallelModes = ("row", "column", None)

MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16

#: Slots of a module's scaling state, for up to three GEMMs.
FP8FwdTensorIdx = SimpleNamespace(
    **{f"GEMM{g}_{what}": 3 * (g - 1) + i for g in (1, 2, 3) for i, what in enumerate(("INPUT", "WEIGHT", "OUTPUT"))}
)
FP8BwdTensorIdx = SimpleNamespace(
    **{f"{what}{g}": 2 * (g - 1) + i for g in (1, 2, 3) for i, what in enumerate(("GRAD_OUTPUT", "GRAD_INPUT"))}
)

#: What a process group is an instance of.
dist_group_type = torch.distributed.ProcessGroup
