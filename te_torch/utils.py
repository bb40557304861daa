"""Small functions that scripts import beside the modules: initialisers, a mask for scores, whole divisions, the order
of gated weights, and torch's own by their documented names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_torch import not_built
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import default_device
from te_torch.values import is_size

__all__ = [
    "SplitAlongDim", "assert_dim_for_fp8_exec", "attention_mask_func", "canonicalize_device", "canonicalize_dtype",
    "canonicalize_process_group", "cast_if_needed", "check_dim_for_fp8_exec", "clear_tensor_data",
    "deinterleave_glu_tensor", "divide", "ensure_divisibility", "get_default_init_method", "get_sm_count",
    "gpu_autocast_ctx", "init_method_constant", "init_method_normal", "interleave_glu_tensor", "is_bf16_compatible",
    "make_weak_ref",
    "nvtx_range_pop", "nvtx_range_push", "round_up_to_nearest_multiple", "scaled_init_method_normal",
    "torch_get_autocast_gpu_dtype",
]  # fmt: skip

Init = Callable[[torch.Tensor], torch.Tensor]

# Partial functions, not closures: a module that keeps its initialiser can be copied and pickled.


def init_method_normal(sigma: float) -> Init:
    """An initialiser: normal(0, sigma)."""
    return partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Init:
    """normal(0, sigma / sqrt(2 num_layers)): for the projections that write to a residual stream of so many layers."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def init_method_constant(val: float) -> Init:
    """An initialiser: this value everywhere."""
    return partial(torch.nn.init.constant_, val=val)


def get_default_init_method() -> Init:
    """What modules begin with where they are given no `init_method`: normal(0, 0.023)."""
    return init_method_normal(0.023)


def attention_mask_func(attention_scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The scores, -10000 where the mask is True: a `mask_func` of FusedScaleMaskSoftmax."""
    return attention_scores.masked_fill(attention_mask, -10000.0)


def make_weak_ref(x: Any) -> Any:
    """The same tuples, lists, dictionaries and values, with tensors on a GPU that do not keep their memory alive.

    For buffers of a CUDA graph, whose pool keeps the memory. A tensor on the CPU stays itself.
    """
    if isinstance(x, torch.Tensor):
        if not x.is_cuda:
            return x
        storage: Any = x.untyped_storage()
        weak = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), x.device, storage.nbytes())
        return x.new_empty(0).set_(weak, x.storage_offset(), x.shape, x.stride())
    if isinstance(x, dict):
        return {key: make_weak_ref(value) for key, value in x.items()}
    return type(x)(map(make_weak_ref, x)) if type(x) in (tuple, list) else x


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """An error unless the division of these two leaves nothing."""
    if denominator == 0 or numerator % denominator:
        raise ArgumentError(
            "ensure_divisibility", f"{numerator} / {denominator}", f"a multiple of {denominator}", "change one of them"
        )


def divide(numerator: int, denominator: int) -> int:
    """The quotient of a division that leaves nothing."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """The smallest multiple that is not below the value."""
    if multiple <= 0:
        raise ArgumentError("round_up_to_nearest_multiple", f"multiple={multiple}", "a number > 0", "correct it")
    return -(-value // multiple) * multiple


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """[gate; linear] along the first dimension as blocks of so many rows in turn: gate, linear, gate, linear, ..."""
    return _turned("interleave_glu_tensor", tensor, interleave_size, True)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The inverse of `interleave_glu_tensor`: all rows of the gate, then all of the linear part."""
    return _turned("deinterleave_glu_tensor", tensor, interleave_size, False)


def _turned(operation: str, tensor: torch.Tensor, size: int, gate_first: bool) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(operation, f"a {type(tensor).__name__}", "a tensor", "pass the weight")
    if not is_size(size) or not tensor.ndim or tensor.shape[0] % (2 * size):
        raise ArgumentError(
            operation,
            f"interleave_size={size!r} for a tensor of shape {tuple(tensor.shape)}",
            "a size above 0, twice of which divides the first dimension",
            "choose such a size, or pad the tensor",
        )
    each = tensor.shape[0] // (2 * size)
    blocks = (2, each) if gate_first else (each, 2)
    return tensor.reshape(*blocks, size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


# ------------------------------------------------------------------------------ torch's own, by their documented names


def torch_version() -> tuple[int, ...]:
    """The numbers of torch's version."""
    found = re.match(r"\d+(\.\d+)*", torch.__version__)
    return tuple(map(int, found[0].split("."))) if found else ()


class SplitAlongDim:
    """`SplitAlongDim.apply(tensor, dim, sizes)` is torch.split(tensor, sizes, dim)."""

    @staticmethod
    def apply(
        mixed_x_layer: torch.Tensor, split_dim: int, split_size_or_sections: int | list[int]
    ) -> tuple[torch.Tensor, ...]:
        """The parts along a dimension: views."""
        return torch.split(mixed_x_layer, split_size_or_sections, split_dim)


def split_and_copy(buffer: torch.Tensor, outputs: list[torch.Tensor], chunk_sizes: list[int]) -> None:
    """Copy the parts of a buffer, which are of these sizes, into the outputs."""
    torch._foreach_copy_(outputs, buffer.split(chunk_sizes))


def cast_if_needed(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor in a dtype; itself, where it is."""
    return None if tensor is None else tensor.to(dtype)


def check_dim_for_fp8_exec(tensor: torch.Tensor) -> bool:
    """Whether the documented package multiplies a tensor of these sizes in FP8. Here every size runs."""
    return tensor.shape[:-1].numel() % 8 == 0 and tensor.shape[-1] % 16 == 0


def assert_dim_for_fp8_exec(*tensors: torch.Tensor) -> None:
    """An error unless the documented package multiplies tensors of these sizes in FP8."""
    for tensor in tensors:
        if not check_dim_for_fp8_exec(tensor):
            raise ArgumentError(
                "assert_dim_for_fp8_exec",
                f"a tensor of shape {tuple(tensor.shape)}",
                "a last dimension that 16 divides, and others whose product 8 divides",
                "pad it, or leave the check out: modules pad by themselves",
            )


def canonicalize_device(device: torch.device | str | None) -> torch.device:
    """A device with its number; None is where modules are made by default."""
    found = torch.device(default_device() if device is None else device)
    return torch.empty(0, device=found).device if found.type == "cuda" and found.index is None else found


def canonicalize_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype; None is torch's default."""
    return torch.get_default_dtype() if dtype is None else dtype


def canonicalize_process_group(group: Any) -> Any:
    """The process group; None is all processes."""
    return torch.distributed.group.WORLD if group is None else group


def clear_tensor_data(*tensors: torch.Tensor | None) -> None:
    """Free the memory of tensors, but of those marked `_do_not_clear`."""
    for tensor in tensors:
        if tensor is None or getattr(tensor, "_do_not_clear", False):
            continue
        if isinstance(tensor, QuantizedTorch):
            tensor.clear()  # type: ignore[attr-defined]
        else:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


@lru_cache
def _dummy(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """What stands for a gradient that is elsewhere (in `main_grad`): one memory for all of a shape."""
    made = _dummy(tuple(shape), dtype, canonicalize_device(None)).detach()
    return made.zero_() if zero else made


def get_sm_count() -> int:
    """How many multiprocessors the current GPU has."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def is_bf16_compatible() -> bool:
    """Whether the current GPU multiplies bfloat16."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


#: torch.autocast of GPUs.
gpu_autocast_ctx = partial(torch.autocast, "cuda")


def torch_get_autocast_gpu_dtype() -> torch.dtype:
    """What torch.autocast of GPUs computes in."""
    return torch.get_autocast_dtype("cuda")


def nvtx_range_push(msg: str) -> None:
    """Begin a range for profilers of GPUs; nothing without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(msg)


def nvtx_range_pop(msg: str | None = None) -> None:
    """End the range that began last."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


__getattr__ = not_built.getter(__name__, "pytorch.utils")
