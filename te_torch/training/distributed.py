"""Small functions of the documented `distributed` module: ranks, and the marks and beginnings of parallel weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from te_torch.forks import fork_of


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
