"""Maxima over the processes that train together: before an update, row 0 of each history becomes that of all ranks.

One all-reduce for each step, direction and group takes all states that the update is about to read. As with any
collective, the ranks of a group have to run the same modules in the same order, and to end the same regions and
backward passes. A signature of what is reduced travels along, so that a step in which they did not is an error and
not a wrong scale. Nothing here runs in a job of one process.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import torch
import torch.distributed as dist

from te_core.errors import ArgumentError, UnsupportedError
from te_core.precision import Precision

# Buffers are of a few sizes, so that ranks that disagree still reduce as many numbers, and see it by the signature.
_SMALLEST = 1024


def spans_ranks(group: Any) -> bool:
    """Whether a group (None: the default one) has several processes, this one among them."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def reduce(states: list[Any], direction: int) -> None:
    """Raise row 0 of the histories of one direction to the maximum over the group of each state's last region."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    members: dict[tuple[Any, torch.device], list[Any]] = {}
    for state in states:
        if state.precision.history.reduce_amax:
            members.setdefault((state.group, state.scale_fwd.device), []).append(state)
    for (group, _), of_group in members.items():
        if spans_ranks(group):
            key = (direction, group, *[s.token for s in of_group])
            plans = of_group[0].update_plans
            plan = plans.get(key)
            if plan is None:
                plan = plans[key] = _Plan(of_group, direction)
            plan.run(group)


class _Plan:
    """Rows of histories, the buffer that they are reduced in, and where each lies in it."""

    __slots__ = ("agreed", "buffer", "parts", "rows", "signature")

    def __init__(self, states: list[Any], direction: int) -> None:
        # .data: autograd does not count this as a change of the history, nor does the update that follows.
        histories = [s.amax_history_bwd.data if direction else s.amax_history_fwd.data for s in states]
        sizes = [h.shape[1] for h in histories]
        self.signature = float(1 + (zlib.crc32(struct.pack(f"<{1 + len(sizes)}q", direction, *sizes)) >> 9))
        device = histories[0].device
        head = torch.tensor([self.signature, -self.signature], device=device)
        length = max(_SMALLEST, 1 << (1 + sum(sizes)).bit_length())
        self.buffer = torch.zeros(length, device=device)
        self.rows = [head, *[h[0] for h in histories]]
        self.parts = list(self.buffer[: 2 + sum(sizes)].split([2, *sizes]))
        self.agreed = False

    def run(self, group: Any) -> None:
        torch._foreach_copy_(self.parts, self.rows)
        dist.all_reduce(self.buffer, dist.ReduceOp.MAX, group=group)
        # On a GPU to look costs a host synchronisation: only the first run of these states is looked at.
        if not self.agreed or self.buffer.is_cpu:
            if self.buffer[:2].tolist() != [self.signature, -self.signature]:
                raise ArgumentError(
                    "amax reduction", "ranks of a group that ran different modules since the last update",
                    "the same modules in the same order on all ranks",
                    "pass the group of the ranks that do as amax_reduction_group, or use reduce_amax=False",
                )  # fmt: skip
            self.agreed = True
        torch._foreach_copy_(self.rows[1:], self.parts[1:])


def refuse_traced(precision: Precision) -> None:
    """Raise for a region inside a compiled function whose update would have to communicate."""
    if precision.history is not None and precision.history.reduce_amax and spans_ranks(None):
        raise UnsupportedError(
            "autocast", "a region inside a compiled function, in a job of several processes, with reduce_amax=True",
            "such a region around the compiled function, or DelayedScaling(reduce_amax=False)",
            "move the region out of the compiled function",
        )  # fmt: skip
