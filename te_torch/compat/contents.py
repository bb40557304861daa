"""What stands where under the documented names: two tables, from the documented module to what it holds.

`DEFINED` is where the documented package defines a name: classes say that they are of that module. `GATHERED` shows
some of them again at other places, the older names among them. A package is any module that another one continues.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import te_core
import te_torch
from te_torch import availability as _availability
from te_torch import constants as _constants
from te_torch import cpp_extensions as _cpp_extensions
from te_torch import ops as _ops
from te_torch import optimizers as _optimizers
from te_torch import recipe as _recipe
from te_torch import router as _router
from te_torch import tensors as _tensors
from te_torch import utils as _utils
from te_torch.attention import dot_product as _dot_product
from te_torch.attention import kv_cache as _kv_cache
from te_torch.attention import rope as _rope
from te_torch.attention import softmax as _softmax
from te_torch.attention import utils as _attention_utils
from te_torch.base.module import BaseModule
from te_torch.compat import jit as _jit
from te_torch.compat import stand_ins as _stand_ins
from te_torch.compat.global_state import FP8GlobalState, FP8GlobalStateManager
from te_torch.custom_recipes import quantizer_factories, quantizer_factory_zoo
from te_torch.debug import debug_quantization as _debug_quantization
from te_torch.debug import state as _debug_state
from te_torch.debug import stats as _debug_stats
from te_torch.ops import fused as _fused
from te_torch.ops import fuser as _fuser
from te_torch.ops import op as _op
from te_torch.parallel import overlap as _overlap
from te_torch.parallel.context import data as _context
from te_torch.tensors import float8, float8_blockwise, hybrid, identity, mxfp8, nvfp4
from te_torch.tensors import utils as _tensor_utils
from te_torch.training import checkpoint as _checkpoint
from te_torch.training import collectives as _collectives
from te_torch.training import export as _export
from te_torch.training import fsdp as _fsdp
from te_torch.training import offload as _offload
from te_torch.training import rng as _rng
from te_torch.training.graphs import make as _graphs

ROOT = "transformer_engine"
#: Of the API that the name stands for; ours is beside it, as `__te_runtime__`.
VERSION = "2.20.0"

_ATTENTION = ("DotProductAttention", "InferenceParams", "MultiheadAttention", "RotaryPositionEmbedding")
_ROPE = ("apply_rotary_pos_emb", "apply_fused_qkv_rotary_pos_emb")
_CACHES = ("KVCacheManager", "NonPagedKVCacheManager", "PagedKVCacheManager")
_AVAILABLE = ("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available", "is_nvfp4_available")
_DEVICE = ("is_bf16_available", "get_cudnn_version", "get_device_compute_capability")
_REGIONS = ("autocast", "quantized_model_init", "get_default_recipe")
_REQUESTS = ("QuantizerRole", "QuantizerRequest", "DelayedScalingRequest")
_CHECKS = (
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_fp8_block_scaling_support",
    "check_recipe_support",
    "get_fp8_torch_dtype",
    "get_fp8_te_dtype",
    "get_fp4_te_dtype",
    "get_fp8_max",
)
_SAVING = (
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "prepare_for_saving",
    "restore_from_saved",
    "restore_from_func_ctx",
)
_RECOMPUTE = (
    "activation_recompute_forward",
    "get_activation_recompute_contexts",
    "has_te_modules",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
    "use_reentrant_activation_recompute",
)
_RNG = (
    "CudaRNGStatesTracker",
    "get_all_rng_states",
    "graph_safe_rng_available",
    "is_graph_safe_rng_state",
    "set_all_rng_states",
)
_OVERLAP = (
    "UserBufferQuantizationMode",
    "destroy_ub",
    "get_ub",
    "get_ub_is_fp8",
    "initialize_ub",
    "is_ub_initialized",
    "using_cublasmp_backend",
)
#: In te_torch itself alone: of our own, or documented deeper below.
OURS = (
    *_context.__all__,
    "MoELayer",
    "convert",
    "expert_report",
    "linear_cross_entropy",
    "measure_saved",
    "memory_report",
    "nonfinite_report",
    "plain_state_dict",
    "precision_report",
    "prepare_state",
    "register_norm",
)


def _of(module: ModuleType, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def _defined(module: ModuleType, *ends: str) -> dict[str, Any]:
    """What a module defines under documented names (that end so): all its public ones, and what unpickles tensors."""
    found = (n for n in vars(module) if n.endswith(ends or "") and (n[0] != "_" or n.startswith("_make_")))
    return {n: v for n in found if getattr(v := getattr(module, n), "__module__", None) == module.__name__}


def _basic_operations() -> list[str]:
    kinds = {n: v for n, v in _of(_ops, _ops.__all__).items() if isinstance(v, type)}
    return [n for n, v in kinds.items() if issubclass(v, _op.BasicOperation) and v is not _op.BasicOperation]


_FORMATS = {
    "float8": float8,
    "float8_blockwise": float8_blockwise,
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
    "hybrid": hybrid,
    "identity": identity,
}
_RECIPES = _of(_recipe, _recipe.__all__)
_OLDER_REGIONS = {
    **_stand_ins.refusing("pytorch.quantization"),
    "FP8GlobalState": FP8GlobalState,
    "FP8GlobalStateManager": FP8GlobalStateManager,
    "fp8_autocast": te_torch.fp8_autocast,
    "fp8_model_init": te_torch.fp8_model_init,
    "get_default_fp8_recipe": te_torch.get_default_recipe,
}
_MAKERS = {n: v for module in _FORMATS.values() for n, v in _defined(module, "_in_reduce_ex").items()}
_DOT_PRODUCT = _of(_dot_product, ("DotProductAttention", "_attention_backends"))

DEFINED: dict[str, dict[str, Any]] = {
    # The last one is what the peer's pickles of a Format name: its value, of which ours is an equal.
    "common.recipe": _RECIPES | {"_FormatHelper": te_core.recipe._FormatMax},
    "debug.pytorch.debug_quantization": _of(
        _debug_quantization, ("DebugQuantizedTensor", "DebugQuantizer", "HIGH_PRECISION", "STANDARD_QUANTIZE")
    ),
    "debug.pytorch.debug_state": _of(_debug_state, ("TEDebugState", "set_weight_tensor_tp_group_reduce")),
    "pytorch.attention.dot_product_attention.context_parallel": _of(_context, _context.DOCUMENTED),
    "pytorch.attention.dot_product_attention.dot_product_attention": _DOT_PRODUCT,
    "pytorch.attention.dot_product_attention.softmax": _of(_softmax, ("FusedScaleMaskSoftmax",)),
    "pytorch.attention.dot_product_attention.utils": _of(_attention_utils, _attention_utils.__all__),
    "pytorch.attention.inference": _of(te_torch, ("InferenceParams",)) | _of(_kv_cache, _CACHES),
    "pytorch.attention.multi_head_attention": _of(te_torch, ("MultiheadAttention",)),
    "pytorch.attention.rope": _of(_rope, ("RotaryPositionEmbedding", *_ROPE)),
    "pytorch.constants": _of(_constants, _constants.__all__),
    "pytorch.cpu_offload": _of(_offload, _offload.__all__),
    "pytorch.cross_entropy": _of(te_torch, ("parallel_cross_entropy",)),
    "pytorch.custom_recipes.quantizer_factories": _defined(quantizer_factories, "_factory"),
    "pytorch.custom_recipes.quantizer_factory_zoo": _defined(quantizer_factory_zoo, "_factory"),
    "pytorch.distributed": _of(_checkpoint, _RECOMPUTE)
    | _of(_rng, _RNG)
    | _defined(_collectives)
    | _defined(_fsdp)
    | {"checkpoint": te_torch.checkpoint},
    "pytorch.graph": _defined(_graphs),
    "pytorch.export": _of(_export, _export.__all__),
    "pytorch.jit": _of(_jit, _jit.__all__),
    "pytorch.module.base": {
        "TransformerEngineBaseModule": BaseModule,
        "get_dummy_wgrad": _utils.get_dummy_wgrad,
        # Whether a GEMM accumulates in full precision where the recipe does not say.
        "_2X_ACC_FPROP": False,
        "_2X_ACC_DGRAD": True,
        "_2X_ACC_WGRAD": True,
    }
    | _of(_overlap, _OVERLAP),
    "pytorch.module.fp8_padding": _of(te_torch, ("Fp8Padding",)),
    "pytorch.module.fp8_unpadding": _of(te_torch, ("Fp8Unpadding",)),
    "pytorch.module.grouped_linear": _of(te_torch, ("GroupedLinear",)),
    "pytorch.module.layernorm": _of(te_torch, ("LayerNorm",)),
    "pytorch.module.layernorm_linear": _of(te_torch, ("LayerNormLinear",)),
    "pytorch.module.layernorm_mlp": _of(te_torch, ("LayerNormMLP",)),
    "pytorch.module.linear": _of(te_torch, ("Linear",)),
    "pytorch.module.rmsnorm": _of(te_torch, ("RMSNorm",)),
    "pytorch.optimizers": _of(_optimizers, [n for n in _optimizers.__all__ if n not in _optimizers.OURS]),
    "pytorch.permutation": _of(te_torch, [n for n in te_torch.__all__ if n.startswith("moe_")]),
    "pytorch.ops": _of(_ops, _ops.__all__),
    "pytorch.ops.fused": _defined(_fused, *("Add", "Activation", "Scale", "Bias", "Norm"))
    | _stand_ins.refusing("pytorch.ops.fused"),
    "pytorch.ops.fuser": _of(_fuser, ("OperationFuser",)),
    "pytorch.ops.op": _of(_op, ("OperationContext",)),
    "pytorch.quantization": _of(te_torch, (*_AVAILABLE, *_REGIONS, *_REQUESTS))
    | _of(_availability, (*_CHECKS, "get_align_size_for_quantization"))
    | _OLDER_REGIONS,
    "pytorch.quantized_tensor": _of(te_torch, _SAVING),
    **{
        f"pytorch.tensor.{name}_tensor": _defined(module, "Tensor", "Quantizer", "_in_reduce_ex")
        for name, module in _FORMATS.items()
    },
    **{
        f"pytorch.tensor.storage.{name}_tensor_storage": _defined(module, "Storage")
        for name, module in _FORMATS.items()
    },
    "pytorch.cpp_extensions.gemm": _of(_cpp_extensions, _cpp_extensions.__all__),
    "pytorch.router": _of(_router, _router.__all__),
    "pytorch.tensor.utils": _defined(_tensor_utils),
    "pytorch.torch_version": _of(_utils, ("torch_version",)),
    "pytorch.transformer": _of(te_torch, ("TransformerLayer",)),
    "pytorch.utils": _of(te_torch, _DEVICE) | _of(_utils, _utils.__all__),
}

_MODULES = [place for place in DEFINED if place.startswith("pytorch.module.") and place != "pytorch.module.base"]
GATHERED: dict[str, dict[str, Any]] = {
    "": {
        "__version__": VERSION,
        "__te_runtime__": te_core.__version__,
        **_of(_availability, ("is_nccl_ep_available", "require_nccl_ep")),
    },
    "common": {},
    # What of its `features` needs nvdlfw_inspect are files of the alias's folder.
    "debug": _of(_debug_state, ("set_weight_tensor_tp_group_reduce",)),
    "debug.features": {},
    "debug.features.utils": {},
    "debug.features.utils.stats_buffer": {"STATS_BUFFERS": _debug_stats.STATS_BUFFERS},
    "debug.pytorch": {},
    "pytorch": _of(te_torch, ["torch_version", *[n for n in te_torch.__all__ if n not in OURS]]) | _MAKERS,
    "pytorch.attention": _of(te_torch, _ATTENTION)
    | _of(_rope, _ROPE)
    | {"_get_qkv_layout": _attention_utils.get_qkv_layout},
    "pytorch.attention.dot_product_attention": _DOT_PRODUCT,
    "pytorch.cpp_extensions": _of(_cpp_extensions, _cpp_extensions.__all__),
    "pytorch.cpu_offload_v1": _of(te_torch, ("get_cpu_offload_context",)),  # NVTE_CPU_OFFLOAD_V1=1's
    "pytorch.custom_recipes": {},
    "pytorch.float8_tensor": _of(te_torch, ("Float8Tensor",)),
    "pytorch.fp8": {  # the older name of quantization
        **_RECIPES,
        **_of(_availability, _CHECKS),
        **_OLDER_REGIONS,
        "split_and_copy": _utils.split_and_copy,
    },
    "pytorch.module": {n: v for place in _MODULES for n, v in DEFINED[place].items()}
    | {"is_module_grouped_tensor_path_supported": _stand_ins.has_no_grouped_path}
    | _of(_overlap, ("UserBufferQuantizationMode", "destroy_ub", "initialize_ub")),
    "pytorch.ops.basic": _of(_ops, _basic_operations()),
    "pytorch.ops.basic.basic_linear": _of(_ops, ("BasicLinear",)),
    "pytorch.ops.basic.grouped_linear": _of(_ops, ("GroupedLinear",))
    | {"OUTPUT_BUFFER_KEY": "output", "GRAD_INPUT_BUFFER_KEY": "grad_input"},
    "pytorch.optimizers.fused_adam": _of(_optimizers, ("FusedAdam",)),
    "pytorch.tensor": _of(_tensors, _tensors.__all__) | _MAKERS | _of(_tensors, ("get_all_tensor_types",)),
    "pytorch.tensor.storage": _of(te_torch, [n for n in _tensors.__all__ if n.endswith("Storage")]),
}

CONTENTS = GATHERED | DEFINED
#: Other top packages that belong to the documented one: what of them is built.
PACKAGES: dict[str, dict[str, Any]] = {
    "transformer_engine_torch": _of(_constants, ("DType",)) | _of(_context, ("thd_get_partitioned_indices",))
}
#: Older name -> what it is called now.
DEPRECATED = {"pytorch.fp8": "pytorch.quantization"}
