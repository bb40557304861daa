"""What the current GPU can do, under the documented names. Every answer is one of `te_core.device`'s predicates.

Without a GPU each of them is `(False, "no GPU; the CPU backend emulates it")`: the answer is about hardware, and
regions on CPU tensors work all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from te_core import device, libraries
from te_core.device import Answer, DeviceInfo
from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe import Format, Recipe, resolve
from te_core.tensor import Device, cuda_device
from te_torch.tensors.dtype import DType

NO_GPU = "no GPU; the CPU backend emulates it"

#: Which predicate decides, by the scaling of an operand (`te_core.precision.Operand.scaling`).
_BY_SCALING: dict[str, Callable[[DeviceInfo], Answer]] = {
    "delayed": device.fp8_supported,
    "current": device.fp8_supported,
    "block": device.fp8_block_supported,
    "mxfp8": device.mxfp8_supported,
    "nvfp4": device.nvfp4_supported,
}


def _known(place: Device) -> DeviceInfo:
    return replace(device.info(place.index), cublaslt=libraries.version("cublasLt"))


def current_device() -> DeviceInfo | None:
    """torch's current device with this process's cuBLASLt; None without a GPU. Makes no CUDA context."""
    if not torch.cuda.is_available():
        return None
    # Before torch's first CUDA call its current device is the first one, and asking for it would make a context.
    return cuda_device(torch.cuda.current_device() if torch.cuda.is_initialized() else 0).of(_known)


def _answer(predicate: Callable[[DeviceInfo], Answer]) -> Answer:
    """The predicate's answer about the current device, without a reason where there is nothing to explain."""
    info = current_device()
    if info is None:
        return False, NO_GPU
    able, reason = predicate(info)
    return able, "" if able else reason


# ------------------------------------------------------------------------------- (bool, reason)


def check_fp8_support() -> Answer:
    """Whether the GPU multiplies FP8 with one scale a tensor, and why not."""
    return _answer(device.fp8_supported)


def check_mxfp8_support() -> Answer:
    """Whether the GPU multiplies MXFP8, and why not."""
    return _answer(device.mxfp8_supported)


def check_nvfp4_support() -> Answer:
    """Whether the GPU multiplies NVFP4, and why not."""
    return _answer(device.nvfp4_supported)


def check_fp8_block_scaling_support() -> Answer:
    """Whether the GPU multiplies FP8 with a scale for each block of 128, and why not."""
    return _answer(device.fp8_block_supported)


def check_recipe_support(recipe: Recipe) -> None:
    """Raise where the GPU cannot multiply what this recipe asks for, showing what it can do."""
    able, reason = recipe_support(recipe)
    if not able:
        info, table = current_device(), "a CUDA device"
        if info is not None:
            from te_core.tools import doctor  # drags in what only a report needs

            reason, table = f"{info.name}: {reason}", "\n" + "\n".join(doctor.table(info)) + "\n"
        raise UnsupportedError(
            type(recipe).__name__,
            reason,
            table,
            "choose a recipe of the table, ask for emulation (autocast(emulate=True)), or use CPU tensors",
        )


def recipe_support(recipe: Recipe) -> Answer:
    """Whether the GPU multiplies what this recipe asks for, and why not.

    A CustomRecipe asks for nothing until its factory is asked for a module's operands: yes.
    """
    precision = resolve(recipe)
    operands = (precision.input, precision.weight, precision.grad)
    for scaling in dict.fromkeys(operand.scaling for operand in operands if operand is not None):
        able, reason = _answer(_BY_SCALING[scaling])
        if not able:
            return able, reason
    return True, ""


# ------------------------------------------------------------------------ bool, or (bool, reason)


def is_fp8_available(return_reason: bool = False) -> bool | Answer:
    """Whether the GPU multiplies FP8; with `return_reason` also why not."""
    return _shaped(check_fp8_support(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | Answer:
    """Whether the GPU multiplies MXFP8; with `return_reason` also why not."""
    return _shaped(check_mxfp8_support(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | Answer:
    """Whether the GPU multiplies block-scaled FP8; with `return_reason` also why not."""
    return _shaped(check_fp8_block_scaling_support(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | Answer:
    """Whether the GPU multiplies NVFP4; with `return_reason` also why not."""
    return _shaped(check_nvfp4_support(), return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | Answer:
    """Whether the GPU multiplies bfloat16; with `return_reason` also why not."""
    return _shaped(_answer(device.supported), return_reason)


def _shaped(answer: Answer, return_reason: bool) -> bool | Answer:
    return answer if return_reason else answer[0]


# ------------------------------------------------------------------------------------- facts


def get_device_compute_capability() -> tuple[int, int]:
    """(major, minor) of the current device; (0, 0), which is below every requirement, without a GPU."""
    info = current_device()
    return (0, 0) if info is None else info.capability


def get_cudnn_version() -> tuple[int, int, int]:
    """(major, minor, patch) that cuDNN itself reports; LibraryError where there is none."""
    major, minor, patch = libraries.version("cudnn")
    return major, minor, patch


def is_nccl_ep_available() -> bool:
    """Whether tokens can be moved to experts on other ranks by NCCL: not built, so no."""
    return False


def require_nccl_ep() -> None:
    """An error, since it is not available."""
    raise UnsupportedError(
        "require_nccl_ep",
        "a build without it",
        "experts on the rank that holds the tokens",
        "move tokens by torch.distributed.all_to_all_single",
    )


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Rows of a group are a multiple of this under the recipe (what Fp8Padding pads to)."""
    if recipe.custom():
        alignment: int = recipe.quantization_alignment  # type: ignore[attr-defined]
        return alignment
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


def get_fp8_torch_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> torch.dtype:
    """torch's type of forward tensors under a recipe, or of gradients."""
    return torch.float8_e4m3fn if _is_e4m3(fp8_recipe, fprop_tensor) else torch.float8_e5m2


def get_fp8_te_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> DType:
    """The same as a member of the documented `DType`."""
    return DType.kFloat8E4M3 if _is_e4m3(fp8_recipe, fprop_tensor) else DType.kFloat8E5M2


def get_fp4_te_dtype(fp4_recipe: Any) -> DType:
    """The `DType` of a recipe's 4-bit format."""
    if getattr(fp4_recipe, "fp4_format", None) is not Format.E2M1:
        raise ArgumentError(
            "get_fp4_te_dtype", repr(fp4_recipe), "a recipe with an FP4 format", "pass NVFP4BlockScaling()"
        )
    return DType.kFloat4E2M1


def get_fp8_max(fp8_recipe: Any, fprop_tensor: bool = True) -> float:
    """The largest value of that type."""
    limits = fp8_recipe.fp8_format.value
    return limits.max_fwd if fprop_tensor else limits.max_bwd


def _is_e4m3(recipe: Any, forward: bool) -> bool:
    return recipe.fp8_format is Format.E4M3 or (recipe.fp8_format is Format.HYBRID and forward)
