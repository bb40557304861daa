"""Operations that exchange rows between ranks."""

from __future__ import annotations

from typing import Any

import torch

from te_torch.ops.op import BasicOperation, OperationContext
from te_torch.ops.values import dense
from te_torch.training.collectives import (
    allreduce,
    gather_along_first_dim,
    get_distributed_world_size,
    reduce_scatter_along_first_dim,
)


class _Collective(BasicOperation):
    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group
        self.process_group_size = get_distributed_world_size(process_group)

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Exchange the input."""
        return input_ if self.process_group_size == 1 else self._exchanged(input_)

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> tuple[Any, tuple[()]]:
        """Exchange the gradient the other way."""
        return grad_output if self.process_group_size == 1 else self._exchanged_back(grad_output), ()

    def _exchanged(self, x: Any) -> Any:
        raise NotImplementedError

    def _exchanged_back(self, dy: Any) -> Any:
        raise NotImplementedError


class AllGather(_Collective):
    """The rows of all ranks, one after another; backward gives each rank the sum of its rows' gradients."""

    def _exchanged(self, x: Any) -> Any:
        return gather_along_first_dim(x, self.process_group)[0]

    def _exchanged_back(self, dy: Any) -> Any:
        return reduce_scatter_along_first_dim(dense(dy), self.process_group)[0]


class ReduceScatter(_Collective):
    """This rank's rows of the sum over ranks; backward gathers the gradients."""

    _exchanged, _exchanged_back = AllGather._exchanged_back, AllGather._exchanged


class AllReduce(_Collective):
    """The sum over ranks; the gradient goes through as it is."""

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self._reduce_in_backward = reduce_in_backward

    def _exchanged(self, x: Any) -> Any:
        return allreduce(dense(x), self.process_group)[0]

    def _exchanged_back(self, dy: Any) -> Any:
        return dy
