"""Lets a script that was written for the documented package run on this one, unchanged.

    import te_torch.compat                      # before the script's own imports
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

Only what this package has built exists under the documented names; any other name raises the usual ImportError or
AttributeError. Where the real package can be imported the alias refuses: two of them in one process would be mixed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import te_core
import te_torch
from te_core import attention as _attention
from te_core.errors import UnsupportedError
from te_torch import availability as _availability
from te_torch import recipe as _recipe
from te_torch import tensors as _tensors
from te_torch import utils as _utils
from te_torch.attention import dot_product as _dot_product
from te_torch.attention import kv_cache as _kv_cache
from te_torch.attention import rope as _rope
from te_torch.attention import softmax as _softmax
from te_torch.attention import utils as _attention_utils
from te_torch.custom_recipes import quantizer_factories, quantizer_factory_zoo
from te_torch.modules.base import BaseModule
from te_torch.tensors import utils as _tensor_utils

ROOT = "transformer_engine"

_MODULES = (
    "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm",
)  # fmt: skip
_ATTENTION = ("DotProductAttention", "InferenceParams", "MultiheadAttention", "RotaryPositionEmbedding")
_ROPE = ("apply_rotary_pos_emb", "apply_fused_qkv_rotary_pos_emb")
_CACHES = ("KVCacheManager", "NonPagedKVCacheManager", "PagedKVCacheManager")
_AVAILABLE = ("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available", "is_nvfp4_available")
_DEVICE = ("is_bf16_available", "get_cudnn_version", "get_device_compute_capability")
_REGIONS = ("autocast", "quantized_model_init", "get_default_recipe")
_CHECKS = (
    "check_fp8_support", "check_mxfp8_support", "check_nvfp4_support", "check_fp8_block_scaling_support",
    "check_recipe_support", "get_fp8_torch_dtype", "get_fp8_te_dtype", "get_fp4_te_dtype", "get_fp8_max",
)  # fmt: skip
#: Of our own, with no place in the documented package.
_OURS = (
    "convert", "measure_saved", "memory_report", "plain_state_dict", "precision_report", "prepare_state",
    "register_norm",
)  # fmt: skip


def _of(module: ModuleType, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def _factories(module: ModuleType) -> dict[str, Any]:
    return {name: made for name, made in vars(module).items() if name.endswith("_factory")}


_RECIPES = _of(_recipe, _recipe.__all__)
_TENSORS = _of(_tensors, _tensors.__all__)
#: The documented module of a format, and how the names of its classes begin.
_FORMATS: dict[str, tuple[str, ...]] = {
    "float8": ("Float8Tensor", "Float8Quantizer", "Float8Current", "_make_float8_tensor"),
    "float8_blockwise": ("Float8Block", "_make_float8_block"),
    "mxfp8": ("MXFP8", "_make_mxfp8"),
    "nvfp4": ("NVFP4", "_make_nvfp4"),
    "hybrid": ("Hybrid", "_make_hybrid"),
    "identity": ("Identity", "_make_identity"),
}
_UTILS = (
    "replace_raw_data", "quantize_master_weights", "cast_master_weights_to_fp8", "post_all_gather_processing",
    "clear_columnwise_cache", "is_custom",
)  # fmt: skip
_SAVING = (
    "QuantizedTensor", "QuantizedTensorStorage", "Quantizer", "prepare_for_saving", "restore_from_saved",
    "restore_from_func_ctx",
)  # fmt: skip

# Documented module name -> what it holds. A package is any name that another one continues.
_CONTENTS: dict[str, dict[str, Any]] = {
    "": {"__version__": te_core.__version__},
    "common": {},
    "common.recipe": _RECIPES,
    "pytorch": _of(te_torch, [n for n in te_torch.__all__ if n not in _OURS]),
    "pytorch.quantization": _of(te_torch, _AVAILABLE + _REGIONS)
    | _of(_availability, _CHECKS)
    | _of(_availability, ("get_align_size_for_quantization",))
    | _of(te_torch, ("QuantizerRole", "QuantizerRequest", "DelayedScalingRequest")),
    "pytorch.fp8": {  # the older name of quantization
        **_RECIPES,
        **_of(_availability, _CHECKS),
        "fp8_autocast": te_torch.fp8_autocast,
        "fp8_model_init": te_torch.fp8_model_init,
        "get_default_fp8_recipe": te_torch.get_default_recipe,
    },
    "pytorch.module": _of(te_torch, _MODULES),
    "pytorch.module.base": {"TransformerEngineBaseModule": BaseModule},
    "pytorch.tensor": _TENSORS | {"get_all_tensor_types": _tensors.get_all_tensor_types},
    **{
        f"pytorch.tensor.{place}": {n: t for n, t in _TENSORS.items() if n.startswith(starts)}
        for name, starts in _FORMATS.items()
        for place in (f"{name}_tensor", f"storage.{name}_tensor_storage")
    },
    "pytorch.tensor.storage": {n: t for n, t in _TENSORS.items() if n.endswith("Storage")},
    "pytorch.tensor.utils": _of(_tensor_utils, _UTILS),
    "pytorch.float8_tensor": _of(te_torch, ("Float8Tensor",)),
    "pytorch.quantized_tensor": _of(te_torch, _SAVING),
    "pytorch.attention": _of(te_torch, _ATTENTION) | _of(_rope, _ROPE),
    "pytorch.attention.rope": _of(_rope, ("RotaryPositionEmbedding", *_ROPE)),
    "pytorch.attention.inference": _of(te_torch, ("InferenceParams",)) | _of(_kv_cache, _CACHES),
    "pytorch.attention.dot_product_attention": _of(_dot_product, ("DotProductAttention", "_attention_backends")),
    "pytorch.attention.dot_product_attention.utils": _of(_attention_utils, _attention_utils.__all__),
    "pytorch.attention.dot_product_attention.softmax": _of(_softmax, ("FusedScaleMaskSoftmax",)),
    "pytorch.transformer": _of(te_torch, ("TransformerLayer",)),
    "pytorch.custom_recipes": {},
    "pytorch.custom_recipes.quantizer_factories": _factories(quantizer_factories),
    "pytorch.custom_recipes.quantizer_factory_zoo": _factories(quantizer_factory_zoo),
    "pytorch.constants": {
        **_of(_tensors, ("DType", "TE_DType", "TE_DType_To_Torch")),
        "AttnMaskTypes": _attention.MASKS,
        "AttnBiasTypes": _attention.BIASES,
        "AttnTypes": ("self", "cross"),
        "LayerTypes": ("encoder", "decoder"),
        "QKVLayouts": _attention_utils.QKVLayouts,
    },
    "pytorch.utils": _of(te_torch, _DEVICE) | _of(_utils, _utils.__all__),
}
_DEPRECATED = {"pytorch.fp8": "pytorch.quantization"}


def install() -> None:
    """Register the documented module names; `import te_torch.compat` does it. Twice is once."""
    present = sys.modules.get(ROOT)
    if present is not None and getattr(present, "__te_runtime__", False):
        return
    if present is not None or find_spec(ROOT) is not None:
        raise UnsupportedError(
            "te_torch.compat", f"an environment in which {ROOT} itself can be imported",
            "one package of that name in a process", f"uninstall {ROOT}, or import te_torch under its own name",
        )  # fmt: skip
    made = {name: _make(name, held) for name, held in _CONTENTS.items()}
    for name, module in made.items():
        sys.modules[module.__name__] = module
        if name and name not in _DEPRECATED:
            parent, _, last = name.rpartition(".")
            setattr(made[parent], last, module)


def _make(name: str, held: dict[str, Any]) -> ModuleType:
    full = f"{ROOT}.{name}".rstrip(".")
    module = _Deprecated(full) if name in _DEPRECATED else ModuleType(full)
    module.__doc__ = f"{full}, as te-runtime {te_core.__version__} provides it."
    module.__dict__.update(held, __te_runtime__=True, __all__=[n for n in held if not n.startswith("_")])
    if any(other != name and other.startswith(f"{name}." if name else "") for other in _CONTENTS):
        module.__path__ = []  # a package, whose other submodules do not exist
    return module


class _Deprecated(ModuleType):
    """A module under an older name: says so at the first use of what it holds."""

    def __getattribute__(self, attribute: str) -> Any:
        if not attribute.startswith("__"):
            name = super().__getattribute__("__name__")
            newer = f"{ROOT}.{_DEPRECATED[name.removeprefix(ROOT + '.')]}"
            warnings.warn(f"{name} is the older name of {newer}", DeprecationWarning, stacklevel=2)
        return super().__getattribute__(attribute)


install()
