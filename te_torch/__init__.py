"""te_torch: the module API on PyTorch. The documented names, and the reports; nothing else."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as missing:
    from te_core import hints
    from te_core.errors import MissingPackageError

    raise MissingPackageError(
        "import te_torch", str(missing), "torch 2.8 or newer in the same environment", hints.install("torch")
    ) from missing

from te_core import __version__ as __version__
from te_torch import constants, not_built, optimizers, router, utils
from te_torch.attention.dot_product import DotProductAttention
from te_torch.attention.inference import InferenceParams
from te_torch.attention.rope import RotaryPositionEmbedding
from te_torch.autocast import autocast, fp8_autocast, get_default_recipe
from te_torch.availability import (
    get_cudnn_version,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from te_torch.base.checkpoint_state import plain_state_dict, prepare_state
from te_torch.base.quantized_init import fp8_model_init, quantized_model_init
from te_torch.described import describe, describe_optimizers, describe_tensors
from te_torch.modules.grouped_linear import GroupedLinear
from te_torch.modules.layernorm_linear import LayerNormLinear
from te_torch.modules.layernorm_mlp import LayerNormMLP
from te_torch.modules.linear import Linear
from te_torch.modules.norm import LayerNorm, RMSNorm
from te_torch.modules.padding import Fp8Padding, Fp8Unpadding
from te_torch.nonfinite import nonfinite_report
from te_torch.parallel.context.data import *  # noqa: F403  this rank's part of a batch
from te_torch.parallel.context.data import __all__ as _context
from te_torch.parallel.overlap import UserBufferQuantizationMode, destroy_ub, initialize_ub
from te_torch.tensors import *  # noqa: F403  the quantized tensor classes and their quantizers
from te_torch.tensors import __all__ as _tensors
from te_torch.tools.convert import convert
from te_torch.tools.expert_report import expert_report
from te_torch.tools.foreign_norms import register_norm
from te_torch.tools.memory_report import measure_saved, memory_report
from te_torch.tools.precision_report import precision_report
from te_torch.training.checkpoint import checkpoint
from te_torch.training.cross_entropy import linear_cross_entropy, parallel_cross_entropy
from te_torch.training.export import onnx_export
from te_torch.training.graphs.make import make_graphed_callables
from te_torch.training.moe import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from te_torch.training.moe_layer import MoELayer
from te_torch.training.offload import ManualOffloadSynchronizer, get_cpu_offload_context, mark_not_offload
from te_torch.training.rng import CudaRNGStatesTracker
from te_torch.transformer.layer import TransformerLayer
from te_torch.transformer.multihead import MultiheadAttention
from te_torch.utils import deinterleave_glu_tensor, interleave_glu_tensor
from te_torch.utils import torch_version as torch_version

__all__ = [
    "CudaRNGStatesTracker", "DotProductAttention", "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "InferenceParams",
    "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "ManualOffloadSynchronizer", "MoELayer",
    "MultiheadAttention", "RMSNorm", "RotaryPositionEmbedding", "TransformerLayer", "UserBufferQuantizationMode",
    "autocast", "checkpoint", "constants", "convert", "deinterleave_glu_tensor", "destroy_ub", "expert_report",
    "fp8_autocast", "fp8_model_init", "get_cpu_offload_context", "get_cudnn_version", "get_default_recipe",
    "get_device_compute_capability", "initialize_ub", "interleave_glu_tensor", "is_bf16_available",
    "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available",
    "linear_cross_entropy", "make_graphed_callables", "mark_not_offload", "measure_saved", "memory_report",
    "moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs", "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs", "moe_unpermute", "nonfinite_report", "onnx_export", "optimizers",
    "parallel_cross_entropy", "plain_state_dict", "precision_report", "prepare_state", "quantized_model_init",
    "register_norm", "router", *_context, *_tensors,
]  # fmt: skip

describe_tensors(globals()[name] for name in _tensors)
describe(globals()[name] for name in __all__)
describe(vars(utils)[name] for name in utils.__all__)
describe(vars(router)[name] for name in router.__all__)
describe_optimizers(vars(optimizers)[name] for name in optimizers.__all__)

__getattr__ = not_built.getter(__name__, "pytorch", not_built.BEHIND_ALIAS, ("debug", "ops"))
