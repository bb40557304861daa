"""Operations that exchange rows between ranks."""

from __future__ import annotations

from typing import Any

from te_torch.ops.op import Own
from te_torch.ops.values import dense
from te_torch.training import collectives


class AllGather(Own):
    """The rows of all ranks, one after another; backward gives each rank the sum of its rows' gradients."""

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group
        self.process_group_size = collectives.get_distributed_world_size(process_group)

    def _all_rows(self, ctx, t, *quantizers):
        return collectives.gather_along_first_dim(t, self.process_group)[0]

    def _summed_rows(self, ctx, t, *quantizers):
        return collectives.reduce_scatter_along_first_dim(dense(t), self.process_group)[0]

    _run, _back = _all_rows, _summed_rows


class ReduceScatter(AllGather):
    """This rank's rows of the sum over ranks; backward gathers the gradients."""

    _run, _back = AllGather._summed_rows, AllGather._all_rows


class AllReduce(AllGather):
    """The sum over ranks; the gradient goes through as it is."""

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self._reduce_in_backward = reduce_in_backward

    def _run(self, ctx, x, prev, after):
        return x if self.process_group_size == 1 else collectives.allreduce(dense(x), self.process_group)[0]

    def _back(self, ctx, dy):
        return dy
