"""Documented names that this release has not built, and what to use in their place: the one table of them.

A module that documents some has `__getattr__ = not_built.getter(...)`. The error is an AttributeError (`hasattr` says
no), or an ImportError in `from ... import`; either names the substitute. A page of docs/guides shows the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import te_core
from te_core.errors import UnsupportedError
from te_core.spelling import importing, unknown_name

_GROUPED = "a list of tensors, one a group; GroupedLinear takes all rows in one and keeps a weight for each group"
_STATE = "te.autocast and its recipe: a module keeps its own state, in the child `fp8_state`"
_CORE = "te_core.ops, on te_core tensors"
_MUON = "torch.optim.Muon, or the iteration in torch on a matrix that one process holds"

_KEPT_BY_MODULES = "nothing: a module keeps its own scales, updated where its region ends and after its backward"
_RUN_AGAIN = "te.checkpoint, which runs again with the scales of the first time"
_FIRST_MICROBATCH = "is_first_microbatch=False in forward, also of a callable of te.make_graphed_callables"

#: Module (below transformer_engine) -> documented name -> what to use in its place.
NAMES: Mapping[str, Mapping[str, str]] = {
    "pytorch": {
        "CusolverMpCtx": _MUON,
        "FusedMLAQUpProjRopeQuant": "te.Linear, then apply_rotary_pos_emb",
        "load_framework_extension": "nothing: there is no extension to load",
        "newton_schulz": _MUON,
    },
    "pytorch.cpp_extensions": dict.fromkeys(
        ("general_grouped_gemm", "general_grouped_gemm_for_grouped_tensor", "layernorm_bwd"), _CORE
    ),
    "pytorch.cpp_extensions.gemm": dict.fromkeys(("get_cublas_workspace_size_bytes", "_unwrap_tensor"), _CORE),
    "pytorch.jit": {
        "dgelu_fused_": "torch.ops.aten.gelu_backward(grad, x, approximate='tanh')",
        "l2normalization_backward_fused": "autograd of l2normalization_fused",
        "l2normalization_fwd_fused": "l2normalization_fused",
    },
    "pytorch.quantization.FP8GlobalStateManager": {
        "autocast_enter": "te.autocast, as a context",
        "autocast_exit": "te.autocast, as a context",
        "reduce_and_update_fp8_tensors": _KEPT_BY_MODULES,
        "add_fp8_tensors_to_global_buffer": _KEPT_BY_MODULES,
        "get_buffer_info": _KEPT_BY_MODULES,
        "get_fwd_bwd_key": _KEPT_BY_MODULES,
        "get_key_in_buffer": _KEPT_BY_MODULES,
        "get_meta_tensor_key": _KEPT_BY_MODULES,
        "get_unique_autocast_key": _KEPT_BY_MODULES,
        "split_key_in_buffer": _KEPT_BY_MODULES,
        "copy_forward_fp8_meta_tensors_for_recompute": _RUN_AGAIN,
        "get_old_fp8_meta_tensors_for_recompute": _RUN_AGAIN,
        "restore_fp8_meta_tensors": _RUN_AGAIN,
        "get_skip_fp8_weight_update_tensor": _FIRST_MICROBATCH,
        "set_skip_fp8_weight_update_tensor": _FIRST_MICROBATCH,
    },
    "pytorch.quantization.FP8GlobalState": {
        "autocast_arguments": _KEPT_BY_MODULES,
        "global_amax_buffer": _KEPT_BY_MODULES,
        "global_amax_history_buffer": _KEPT_BY_MODULES,
        "global_scale_buffer": _KEPT_BY_MODULES,
        "fp8_tensors_recompute_buffer": _RUN_AGAIN,
        "skip_fp8_weight_update_tensor": _FIRST_MICROBATCH,
    },
    "pytorch.module.base": {
        "fill_userbuffers_buffer_for_all_gather": "nothing: a module with ub_overlap_ag has its parts come by itself"
    },
    "pytorch.optimizers": {
        "multi_tensor_adam_fp8": "FusedAdam(master_weights=True), which updates quantized parameters",
        "multi_tensor_compute_scale_inv_e8m0": "te.MXFP8Quantizer, which makes its scales",
    },
    "pytorch.tensor": {"GroupedTensor": _GROUPED, "GroupedTensorStorage": _GROUPED},
    "pytorch.attention": {"FusedMLAQUpProjRopeQuant": "te.Linear, then apply_rotary_pos_emb"},
    "pytorch.attention.dot_product_attention.context_parallel": {
        "attn_forward_func_with_cp": "te.DotProductAttention, and its set_context_parallel_group"
    },
    "pytorch.attention.dot_product_attention.utils": {
        "AttentionLogging": "DotProductAttention.explain(q, k, v), which returns the choice and every reason",
        "_get_supported_versions": "python -m te_core.doctor",
        "combine_and_quantize": "a quantizer called on torch.cat of the tensors",
    },
    "pytorch.utils": {
        "combine_tensors": "torch.stack",
        "is_non_tn_fp8_gemm_supported": "nothing: orientations are made as a GEMM reads them",
        "mark_grouped_tensor": _GROUPED,
        "split_tensor_along_dim": "torch.split",
    },
}

#: Module -> (names that can be imported, what to use in their place): classes refuse when made, functions when called.
REFUSING: Mapping[str, tuple[tuple[str, ...], str]] = {
    "pytorch.ops.fused": (
        (
            *("UserbuffersForwardLinear", "UserbuffersBackwardLinear"),
            *("GroupedMLP_CuTeGEMMGLU", "GroupedMLP_CuTeGEMMUnary"),
        ),
        "the same chain, which gives the same numbers without this fusion",
    ),
    "pytorch.quantization": (
        (
            *("RecipeState", "DelayedScalingRecipeState", "Float8CurrentScalingRecipeState"),
            *("MXFP8BlockScalingRecipeState", "Float8BlockScalingRecipeState", "NVFP4BlockScalingRecipeState"),
            *("CustomRecipeState", "_amax_and_scale_update", "_default_sf_compute", "_update_amax_history"),
        ),
        _STATE,
    ),
}

#: Module of which nothing is built -> (the names it documents, what to use in their place).
MODULES: Mapping[str, tuple[str, str]] = {
    "debug.features.utils.stats_computation": ("the formulas of statistics", "the features, which compute by them"),
    "jax": ("the JAX modules", "te_core and the package te_jax, on JAX arrays"),
    "pytorch._extra_state": (
        "CheckpointExtraStatePolicy, UNSAFE_PICKLE_EXTRA_STATE_ENV, should_load_extra_state_pickle",
        "load_state_dict: such entries are read without unpickling them",
    ),
    "pytorch.attention.dot_product_attention.backends": (
        "FlashAttention, FusedAttention, UnfusedDotProductAttention",
        "te.DotProductAttention, and NVTE_FLASH_ATTN, NVTE_FUSED_ATTN, NVTE_UNFUSED_ATTN to choose one",
    ),
    "pytorch.attention.dot_product_attention.flex_attention": (
        "score_mod's helpers",
        "score_mod and torch_score_mod of te.DotProductAttention",
    ),
    "pytorch.cpp_extensions.fused_attn": ("fused_attn_bwd, fused_attn_fwd, FusedAttnBackend, META_*, QKVFormat", _CORE),
    "pytorch.custom_recipes.gemm": ("GEMMType, MMParams, custom_gemm", "te_core.ops.gemm"),
    "pytorch.custom_recipes.reference_current_scaling": (
        "CurrentScalingQuantizerRef, CurrentScalingTensorRef, current_scaling_ref_factory",
        "te.Float8CurrentScalingQuantizer on CPU tensors, which is the reference here",
    ),
    "pytorch.custom_recipes.reference_nvfp4": (
        "NVFP4QuantizerRef, NVFP4TensorRef, cast_from_fp4x2, cast_to_e4m3, cast_to_e8, cast_to_fp4x2, "
        "high_precision_gemm_ref, nvfp4_ref_rht_2d_factory",
        "te.NVFP4Quantizer on CPU tensors, which is the reference here",
    ),
    "pytorch.custom_recipes.reference_utils": ("Fp4Formats, HIGH_PRECISION_FLOAT_DTYPES, roundup_div", "plain Python"),
    "pytorch.distributed_weight": (
        "DistributedWeight, finalize_weight_grads, is_distributed_weight, materialize_weight_for_backward, "
        "materialize_weight_for_forward",
        "torch.distributed.fsdp.fully_shard",
    ),
    "pytorch.dynamo": (
        "TensorSpec, is_value_opaque_quantizer, register_value_opaque_quantizer, to_tensor_spec",
        "nothing: modules compile under torch.compile as they are",
    ),
    "pytorch.ep": (
        "EpBuffer, ep_bootstrap, ep_combine, ep_dispatch, ep_finalize, ep_prepare, is_ep_bootstrapped, is_symm_backed, "
        "release_symm_mem_pool, symm_mem_alloc",
        "torch.distributed.all_to_all_single; the last two are in transformer_engine.pytorch.distributed",
    ),
    "pytorch.module._common": ("WeightGradStore", "delay_wgrad_compute=True, and the module's backward_dw()"),
    "pytorch.newton_schulz": ("CusolverMpCtx, get_coefficient_iterator, get_coefficients, newton_schulz", _MUON),
    "pytorch.numerics_debug": ("debug, fp8_tensor_statistics", "te.precision_report(model)"),
    "pytorch.tensor.grouped_tensor": ("GroupedTensor", _GROUPED),
    "pytorch.tensor.storage.grouped_tensor_storage": ("GroupedTensorStorage", _GROUPED),
    "pytorch.triton": ("cross_entropy, grouped_dbias_dscales, mhc, pad, permutation", "torch: no such kernel is built"),
}

#: Other top packages that belong to the documented one.
PACKAGES: Mapping[str, tuple[str, str]] = {
    "transformer_engine_torch": (
        "the backend's functions and enums (`tex`), but for DType and thd_get_partitioned_indices",
        "te_core.ops; enums in te.constants",
    ),
    "nvdlfw_inspect": ("api, base, logging, registry, utils", "pip install nvdlfw-inspect (the extra `debug`)"),
}

#: Documented submodules of transformer_engine.pytorch that exist under that name only, behind `import te_torch.compat`.
BEHIND_ALIAS = (
    "cpu_offload", "cpu_offload_v1", "cross_entropy", "distributed", "float8_tensor", "fp8", "graph", "jit", "module",
    "permutation", "quantization", "quantized_tensor", "tensor",
)  # fmt: skip


class NotBuiltError(UnsupportedError, AttributeError):
    """A documented name that is not built: as an attribute."""


class NotBuiltImportError(UnsupportedError, ModuleNotFoundError):
    """The same where it is imported, and a module that is not built: programs guard either by one of these two."""


def getter(
    module: str, place: str, behind_alias: tuple[str, ...] = (), at_first_use: tuple[str, ...] = ()
) -> Callable[[str], Any]:
    """The `__getattr__` of a module that stands at this documented place.

    `behind_alias`: submodules that exist under the documented name only. `at_first_use`: those that are imported when
    they are asked for.
    """
    names = dict(NAMES.get(place, {}))
    names |= {below.rpartition(".")[2]: do for below, (_, do) in MODULES.items() if below.rpartition(".")[0] == place}

    def __getattr__(name: str) -> Any:  # noqa: N807
        told: tuple[str, str, str]
        if name in at_first_use:
            return import_module(f"{module}.{name}")
        if name in names:
            told = (*_not_built(), names[name])
        elif module in PACKAGES and not name.startswith("_"):
            told = (*_not_built(), PACKAGES[module][1])
        elif name in behind_alias:
            full = f"transformer_engine.{place}.{name}"
            told = ("a name of the alias", f"{full} behind `import te_torch.compat`", f"import {full} there")
        else:
            raise unknown_name(module, name, sys._getframe(1))
        kind = NotBuiltImportError if importing(sys._getframe(1)) else NotBuiltError
        raise kind(f"{module}.{name}", *told)

    return __getattr__


def refusal(place: str, name: str, kind: type[UnsupportedError] = UnsupportedError) -> UnsupportedError:
    """What the use of a name of `REFUSING` ends in."""
    return kind(f"transformer_engine.{place}.{name}", *_not_built(), REFUSING[place][1])


def module_error(name: str) -> NotBuiltImportError | None:
    """What importing this module ends in, if it is a documented one that is not built."""
    found = MODULES.get(name.partition(".")[2]) if name.startswith("transformer_engine.") else PACKAGES.get(name)
    if found is None:
        return None
    error = NotBuiltImportError(name, *_not_built(), found[1])
    error.name = name
    return error


def _not_built() -> tuple[str, str]:
    return (
        f"a documented name that te-runtime {te_core.__version__} has not built",
        "the names that dir() of a module lists",
    )


def table() -> Iterator[str]:
    """The table, as docs/guides shows it."""
    yield "| Where | Not built | In its place |"
    yield "|---|---|---|"
    rows: dict[tuple[str, str], list[str]] = {}
    for place, names in NAMES.items():
        alike: dict[str, list[str]] = {}
        for name, do in names.items():
            alike.setdefault(do, []).append(f"`{name}`")
        for do, some in alike.items():
            rows.setdefault((", ".join(some), do), []).append(f"`{place}`")
    yield from (f"| {', '.join(places)} | {some} | {do} |" for (some, do), places in rows.items())
    for place, (refusing, do) in REFUSING.items():
        yield f"| `{place}` | can be imported, not used: {', '.join(f'`{name}`' for name in refusing)} | {do} |"
    yield from (f"| `{place}` | all: {names} | {do} |" for place, (names, do) in (*MODULES.items(), *PACKAGES.items()))
