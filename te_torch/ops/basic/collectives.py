"""Operations that exchange rows between ranks."""

from __future__ import annotations

from typing import Any

from te_torch.ops.op import BasicOperation
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

    def op_forward(self, ctx, input_, **given):
        """Exchange the input."""
        return input_ if self.process_group_size == 1 else self._exchanged(input_, True)

    def op_backward(self, ctx, grad_output):
        """Exchange the gradient the other way."""
        return grad_output if self.process_group_size == 1 else self._exchanged(grad_output, False), ()

    def _exchanged(self, t: Any, forward: bool) -> Any:
        raise NotImplementedError


class AllGather(_Collective):
    """The rows of all ranks, one after another; backward gives each rank the sum of its rows' gradients."""

    def _exchanged(self, t: Any, forward: bool) -> Any:
        if forward:
            return gather_along_first_dim(t, self.process_group)[0]
        return reduce_scatter_along_first_dim(dense(t), self.process_group)[0]


class ReduceScatter(AllGather):
    """This rank's rows of the sum over ranks; backward gathers the gradients."""

    def _exchanged(self, t: Any, forward: bool) -> Any:
        return super()._exchanged(t, not forward)


class AllReduce(_Collective):
    """The sum over ranks; the gradient goes through as it is."""

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self._reduce_in_backward = reduce_in_backward

    def _exchanged(self, t: Any, forward: bool) -> Any:
        return allreduce(dense(t), self.process_group)[0] if forward else t
