"""The documented `distributed` module: ranks, the marks and beginnings of parallel weights, and collectives.

These move plain tensors, and the bytes of quantized ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from te_core.errors import ArgumentError, UnsupportedError
from te_core.spelling import choice_error
from te_torch.exchange import all_gather, all_reduce, reduce_scatter, telling
from te_torch.forks import fork_of
from te_torch.tensors import Float8CurrentScalingQuantizer, NVFP4Quantizer, QuantizedTensorStorage, Quantizer
from te_torch.tensors.gathering import Gathering, can_gather, missing_of, usages_of


def get_distributed_world_size(group: Any = None) -> int:
    """How many ranks a group has (None: all); 1 where torch.distributed is not initialized."""
    return torch.distributed.get_world_size(group) if _initialized() else 1


def get_distributed_rank(group: Any = None) -> int:
    """This process's rank in a group (None: among all); 0 where torch.distributed is not initialized."""
    return torch.distributed.get_rank(group) if _initialized() else 0


def _initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def set_tensor_model_parallel_attributes(tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Tell trainers whether, and along which side, tensor parallelism cuts this parameter."""
    marked: Any = tensor
    marked.tensor_model_parallel, marked.partition_dim, marked.partition_stride = is_parallel, dim, stride


def initialize_affine_weight_gpu(
    weight: torch.Tensor,
    init_method: Callable[[torch.Tensor], Any],
    get_rng_state_tracker: Callable[[], Any] | None,
    partition_dim: int = 0,
    stride: int = 1,
    set_tp_attributes: bool = True,
) -> None:
    """Fill this rank's piece of a weight, inside the tracker's fork if there is one."""
    if set_tp_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    fork = fork_of(get_rng_state_tracker, None)
    with torch.no_grad(), nullcontext() if fork is None else fork():
        init_method(weight)


# ---------------------------------------------------------------------------------------- collectives


def allreduce(inp: torch.Tensor, tp_group: Any = None, async_op: bool = False) -> tuple[torch.Tensor, Any]:
    """(the sum over the group's ranks, in the memory of `inp`; a handle to wait for with `async_op`, else None)."""
    if get_distributed_world_size(tp_group) == 1:
        return inp, None
    if not inp.is_contiguous():
        raise ArgumentError(
            "allreduce", f"a tensor with strides {tuple(inp.stride())}", "a contiguous one", "call contiguous() first"
        )
    return inp, all_reduce("allreduce", inp, tp_group, async_op=async_op)


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: Any, async_op: bool = False, output: torch.Tensor | None = None
) -> tuple[torch.Tensor, Any]:
    """(this rank's rows of the sum over the group's ranks, a handle with `async_op`). `output` is written if given."""
    operation, ranks = "reduce_scatter_along_first_dim", get_distributed_world_size(tp_group)
    if ranks == 1:
        return (inp, None) if output is None else (output.copy_(inp), None)
    if inp.ndim == 0 or inp.shape[0] % ranks:
        rows = f"{inp.shape[0]} rows" if inp.ndim else "no rows"
        raise ArgumentError(operation, f"{rows} for {ranks} ranks", f"a multiple of {ranks}", "pad the first dimension")
    shape = (inp.shape[0] // ranks, *inp.shape[1:])
    output = _output(operation, output, shape, inp)
    return output, reduce_scatter(operation, output, inp.contiguous(), tp_group, async_op)


def gather_along_first_dim(
    inp: Any,
    process_group: Any,
    async_op: bool = False,
    quantizer: Quantizer | None = None,
    output_tensor: Any = None,
    external_coalescing: bool = False,
) -> tuple[Any, Any]:
    """(the rows of all the group's ranks, a handle to wait for with `async_op`, else None).

    With a quantizer, or a quantized input, the result is quantized, with the copies that the quantizer makes, and the
    bytes of the ranks' shards travel. FP8 with one scale moves its rowwise copy alone; its scale is agreed over the
    group where it follows from the values (current scaling). Where a shard does not end with a block, and of NVFP4 that
    is quantized here (each rank has its own amax), the values travel as they are and are quantized afterwards, with a
    warning. Ranks that bring different scales get NaN. `output_tensor` is written if given.

    `external_coalescing`: the caller's coalescing manager is around this call; for plain tensors.
    """
    operation, ranks = "gather_along_first_dim", get_distributed_world_size(process_group)
    quantized = isinstance(inp, QuantizedTensorStorage)
    if ranks == 1:
        return _into(output_tensor, inp if quantized or quantizer is None else quantizer(inp)), None
    if quantizer is None and not quantized:
        return _gather_plain(inp, process_group, async_op and not external_coalescing, output_tensor)
    if external_coalescing:
        raise UnsupportedError(
            operation,
            "external_coalescing=True for a quantized result",
            "it for plain tensors",
            "leave external_coalescing out: the buffers of a quantized tensor are put together after they came",
        )
    local = inp if quantized else _quantized_shard(inp, quantizer, process_group)
    if local is None:
        values, _ = _gather_plain(inp, process_group, False, None)
        return _into(output_tensor, quantizer(values)), None  # type: ignore[misc]
    usages = usages_of(quantizer, local)
    _check_shard(operation, local, usages)
    gathering = Gathering(operation, local, process_group, usages)
    if async_op and output_tensor is None:
        return gathering.result, gathering
    gathering.wait()
    return _into(output_tensor, gathering.result), None


def _gather_plain(inp: torch.Tensor, group: Any, async_op: bool, output: Any) -> tuple[torch.Tensor, Any]:
    shape = (get_distributed_world_size(group) * inp.shape[0], *inp.shape[1:])
    operation = "gather_along_first_dim"
    output = _output(operation, output, shape, inp)
    return output, all_gather(operation, output, inp.contiguous(), group, async_op)


def _output(operation: str, output: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    if output is None:
        return like.new_empty(shape)
    if tuple(output.shape) != shape or output.dtype != like.dtype or not output.is_contiguous():
        raise ArgumentError(
            operation,
            f"an output of shape {tuple(output.shape)} and {output.dtype}",
            f"a contiguous one of {shape} and {like.dtype}",
            "correct it, or leave it out",
        )
    return output


def _quantized_shard(inp: torch.Tensor, quantizer: Any, group: Any) -> Any:
    """This rank's rows, quantized so that the others' can stand beside them; None where they cannot."""
    rows = prod(inp.shape[:-1])
    if isinstance(quantizer, NVFP4Quantizer):
        why = "each rank's NVFP4 has an amax of its own"
    elif quantizer.operand is None or quantizer.custom or quantizer.operand.columnwise is not None:
        why = f"{type(quantizer).__name__} has no format whose bytes could stand side by side"
    elif not can_gather(quantizer.format, rows):
        why = f"{rows} rows of a rank end within a block"
    else:
        quantizer = quantizer.copy()
        if isinstance(quantizer, Float8CurrentScalingQuantizer):
            quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, group
        if quantizer.format.scaling == "tensor":  # the transpose is made of what arrives
            quantizer.set_usage(rowwise=True, columnwise=False)
        with torch.no_grad():
            made = quantizer(inp)
        made._quantizer.amax_reduction_group = None  # a tensor's quantizer keeps no group
        return made
    warnings.warn(f"gather_along_first_dim: {why}; the values travel, and are quantized afterwards", stacklevel=4)
    return None


def _check_shard(operation: str, local: Any, usages: dict[str, bool]) -> None:
    form, name = local._format, type(local).__name__
    rows = local._matrix()[0]
    if not can_gather(form, rows):
        raise ArgumentError(
            operation,
            f"a {name} of {rows} rows, which end within a block",
            "whole blocks of rows on each rank",
            "gather the values before they are quantized, or cut the rows elsewhere",
        )
    if missing := missing_of(form, local, usages):
        raise ArgumentError(
            operation,
            f"a {name} with {local.get_usages()}",
            f"one with its {' and '.join(missing)} copy",
            "quantize it with that usage, or ask for another one by quantizer.set_usage()",
        )


def _into(output: Any, made: Any) -> Any:
    """The result, in the caller's tensor if there is one."""
    if output is None:
        return made
    if isinstance(output, QuantizedTensorStorage) and isinstance(made, QuantizedTensorStorage):
        output.copy_from_storage(made)
        return output
    return output.copy_(made)


# ------------------------------------------------------------------------------ equal pieces of a flattened tensor


def split_tensor_into_1d_equal_chunks(tensor: torch.Tensor, tp_group: Any, new_buffer: bool = False) -> torch.Tensor:
    """This rank's piece of the flattened tensor: a view, or in memory of its own (`new_buffer`)."""
    ranks, rank = get_distributed_world_size(tp_group), get_distributed_rank(tp_group)
    if tensor.numel() % ranks:
        raise ArgumentError(
            "split_tensor_into_1d_equal_chunks",
            f"{tensor.numel()} elements for {ranks} ranks",
            f"a multiple of {ranks}",
            "pad the tensor",
        )
    each = tensor.numel() // ranks
    piece = tensor.reshape(-1)[rank * each : (rank + 1) * each]
    return piece.clone() if new_buffer else piece


def gather_split_1d_tensor(tensor: torch.Tensor, tp_group: Any) -> torch.Tensor:
    """The flattened tensor of which each rank has such a piece."""
    ranks = get_distributed_world_size(tp_group)
    if ranks == 1:
        return tensor
    whole = tensor.new_empty((ranks * tensor.numel(),))
    all_gather("gather_split_1d_tensor", whole, tensor.contiguous().view(-1), tp_group)
    return whole


# ------------------------------------------------------------------------------------------ symmetric memory

_buffers: dict[tuple[Any, ...], torch.Tensor] = {}
_pool: Any = None
_IN_PLACE = {"multimem_all_reduce": "multimem_all_reduce_", "two_shot": "two_shot_all_reduce_"}
_TYPES = ("nccl", "multimem_all_reduce", "two_shot", "one_shot")


def _symmetric(operation: str, device: Any) -> Any:
    """torch's symmetric memory, for tensors of this device."""
    kind = torch.device(device).type
    found: Any = None
    with suppress(ImportError):
        found = import_module("torch.distributed._symmetric_memory")
    if found is None or kind != "cuda":
        raise UnsupportedError(
            operation,
            f"a tensor on {kind}" if found is not None else f"torch {torch.__version__}, which has no symmetric memory",
            "symmetric memory of torch, between GPUs that reach each other's memory",
            "use allreduce(), or torch.empty for a buffer",
        )
    return found


def get_symmetric_memory_tensor(
    tensor_numel: int, tensor_dtype: torch.dtype, tensor_device: Any, tp_group: Any, tag: Any = None
) -> torch.Tensor:
    """A flat tensor that all ranks of the group can reach; the same one for equal arguments. A collective, at first."""
    operation = "get_symmetric_memory_tensor"
    memory = _symmetric(operation, tensor_device)
    group: Any = dist.group.WORLD if tp_group is None else tp_group
    key = (int(tensor_numel), tensor_dtype, torch.device(tensor_device), group.group_name, tag)
    found = _buffers.get(key)
    if found is None:
        found = memory.empty(int(tensor_numel), dtype=tensor_dtype, device=tensor_device)
        with telling(operation, group):
            memory.rendezvous(found, group.group_name)
        _buffers[key] = found
    return found


def symmetric_all_reduce(
    inp: torch.Tensor, tp_group: Any = None, async_op: bool = False, all_reduce_type: str = "multimem_all_reduce"
) -> tuple[torch.Tensor, Any]:
    """(the sum over the group's ranks, None), through memory that all of them reach; "nccl" is `allreduce`."""
    operation = "symmetric_all_reduce"
    if all_reduce_type not in _TYPES:
        raise TypeError(f"{operation}: all_reduce_type={all_reduce_type!r}; it is one of {', '.join(_TYPES)}")
    if all_reduce_type == "nccl":
        return allreduce(inp, tp_group, async_op)
    if async_op:
        raise UnsupportedError(
            operation, "async_op=True", "async_op=False", "leave it out, or pass all_reduce_type='nccl'"
        )
    if get_distributed_world_size(tp_group) == 1:
        return inp, None
    memory = _symmetric(operation, inp.device)
    group: Any = dist.group.WORLD if tp_group is None else tp_group
    buffer = get_symmetric_memory_tensor(inp.numel(), inp.dtype, inp.device, group, operation)
    if all_reduce_type == "multimem_all_reduce" and not memory.rendezvous(buffer, group.group_name).multicast_ptr:
        raise UnsupportedError(
            operation,
            "all_reduce_type='multimem_all_reduce' where NVLink multicast is off",
            "'one_shot', 'two_shot' or 'nccl' here",
            "pass one of these",
        )
    buffer.copy_(inp.reshape(-1))
    if all_reduce_type == "one_shot":
        made = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group.group_name)
    else:
        getattr(torch.ops.symm_mem, _IN_PLACE[all_reduce_type])(buffer, "sum", group.group_name)
        made = buffer
    return inp.copy_(made.view(inp.shape)), None


def symm_mem_alloc(
    shape: Sequence[int],
    dtype: torch.dtype,
    ep_group: Any,
    device: Any = None,
    use_pool: bool = False,
    backend: str = "NCCL",
) -> torch.Tensor:
    """A tensor in memory that all ranks of the group can reach.

    By itself, registered now (every rank calls it), or from the process's pool (`use_pool`), whose memory is registered
    as it is used; `release_symm_mem_pool()` gives that back. `backend`: torch's, "NCCL", "CUDA" or "NVSHMEM".
    """
    operation = "symm_mem_alloc"
    if backend not in ("NCCL", "CUDA", "NVSHMEM"):
        raise choice_error(operation, "backend", backend, ("NCCL", "CUDA", "NVSHMEM"))
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    memory = _symmetric(operation, device)
    if memory.get_backend(torch.device(device)) != backend:
        memory.set_backend(backend)
    if use_pool:
        global _pool
        if _pool is None:
            _pool = memory.get_mem_pool(torch.device(device))
        with torch.cuda.use_mem_pool(_pool):
            return torch.empty(tuple(shape), dtype=dtype, device=device)
    made: torch.Tensor = memory.empty(tuple(shape), dtype=dtype, device=device)
    group: Any = dist.group.WORLD if ep_group is None else ep_group
    with telling(operation, group):
        memory.rendezvous(made, group.group_name)
    return made


def release_symm_mem_pool() -> None:
    """Let go of the pool of `symm_mem_alloc`, and of what `get_symmetric_memory_tensor` keeps.

    Before process groups are destroyed.
    """
    global _pool
    _pool = None
    _buffers.clear()
