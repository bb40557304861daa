"""Operations that users compose: chains that run as one function of autograd, and are fused where they can be."""

# ruff: noqa: F401

from te_torch.described import describe_ops
from te_torch.ops import fused as fused
from te_torch.ops.basic.activations import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from te_torch.ops.basic.collectives import AllGather, AllReduce, ReduceScatter
from te_torch.ops.basic.grouped_linear import GroupedLinear, is_op_fuser_grouped_tensor_path_supported
from te_torch.ops.basic.linear import BasicLinear, Linear
from te_torch.ops.basic.norms import L2Normalization, LayerNorm, RMSNorm
from te_torch.ops.basic.small import (
    AddExtraInput,
    Bias,
    ConstantScale,
    Dropout,
    Identity,
    MakeExtraOutput,
    Quantize,
    Reshape,
)
from te_torch.ops.fuser import register_backward_fusion, register_forward_backward_fusion, register_forward_fusion
from te_torch.ops.op import BasicOperation, FusedOperation, FusibleOperation
from te_torch.ops.sequential import Sequential

__all__ = [name for name, value in globals().items() if str(getattr(value, "__module__", "")).startswith(__name__)]

describe_ops(globals()[name] for name in __all__)
