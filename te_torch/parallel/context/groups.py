"""The groups over which sequences are spread: what `set_context_parallel_group` is given, checked, and its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch.distributed as dist

from te_core.errors import ArgumentError
from te_core.layers.communicator import Communicator
from te_core.layers.context.schedule import MODES, Context
from te_core.spelling import choice_error
from te_torch.parallel.communicator import GroupCommunicator
from te_torch.parallel.groups import group_of

#: Of a2a+p2p, which a forward refuses.
_WITHOUT_GROUPS = Context("a2a+p2p", 0, 0)
_PAIR = "a list of two groups, [a2a group, p2p group]; without them every rank would attend to its own tokens only"


class ContextGroups:
    """A module's context groups, and on what their ranks have agreed.

    A copy of the module has the same ones. A pickled module has none, and says so in its first forward.
    """

    __slots__ = ("agreed", "context", "given", "groups", "rank")

    def __init__(
        self, context: Context | None = None, groups: tuple[Any, ...] = (), rank: int = 0, given: Any = (None,) * 3
    ) -> None:
        self.context = context  # None: sequences are whole
        self.groups = groups  # of several ranks each; the one that exchanges heads first
        self.rank = rank
        self.given = given  # the group, the global ranks and the stream as they came
        self.agreed: tuple[set[str], ...] = tuple(set[str]() for _ in groups)

    def __deepcopy__(self, memo: Any) -> ContextGroups:
        return self

    def __reduce__(self) -> Any:
        return ContextGroups, (self.context, (), self.rank)

    def check(self, operation: str) -> None:
        """Raise where a forward would not attend to the whole."""
        if self.context is None or self.groups:
            return
        if self.context.inner == 0:
            do = "pass the list to set_context_parallel_group, or choose another cp_comm_type"
            raise ArgumentError(operation, "cp_comm_type='a2a+p2p' without two groups", _PAIR, do)
        raise ArgumentError(
            operation,
            f"a module that was pickled with context groups of {self.context.size} ranks",
            "the groups of this process: process groups are not pickled",
            "call set_context_parallel_group before the first forward",
        )

    def communicators(self, operation: str) -> Communicator | tuple[Communicator, ...]:
        """What connects the ranks, for one call of the module."""
        try:
            pairs = zip(self.groups, self.agreed, strict=True)
            made: tuple[Communicator, ...] = tuple([GroupCommunicator(g, agreed) for g, agreed in pairs])
        except ValueError as error:  # torch does not know the group any more
            raise ArgumentError(
                operation,
                f"a cp_group that is gone ({error})",
                "a group of torch.distributed as it is now: destroy_process_group ends all groups",
                "make the group again, and call set_context_parallel_group with it",
            ) from error
        return made if len(made) > 1 else made[0]


def context_groups(
    operation: str, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str
) -> ContextGroups:
    """The groups that were given, checked."""
    if cp_comm_type not in MODES:
        raise choice_error(operation, "cp_comm_type", cp_comm_type, MODES)
    several, given = isinstance(cp_group, (list, tuple)), (cp_group, cp_global_ranks, cp_stream)
    groups = [group_of(operation, g, "cp_group") for g in (cp_group if several else [cp_group])]
    if several and cp_comm_type != "a2a+p2p":
        got = f"a list of {len(groups)} groups with cp_comm_type={cp_comm_type!r}"
        raise ArgumentError(operation, got, "one group; a list of two with a2a+p2p", "pass the group, or 'a2a+p2p'")
    if cp_comm_type == "a2a+p2p" and (not several or len(groups) != 2 or any(g is None for g in groups)):
        return ContextGroups(_WITHOUT_GROUPS, given=given)
    if groups[0] is None:
        return ContextGroups(given=given)
    if not dist.is_initialized() or any(dist.get_rank(group) < 0 for group in groups):
        raise ArgumentError(
            operation,
            "a cp_group that this process is not in",
            "a process group with this rank in it",
            "make the groups on all ranks, and pass each rank its own",
        )
    sizes = [dist.get_world_size(group) for group in groups]
    try:  # as te_core's runtimes know a stream
        stream = "" if cp_stream is None else hex(cp_stream.cuda_stream)
    except AttributeError:
        got, allowed = f"cp_stream={cp_stream!r}", "a torch.cuda.Stream; None: one of our own"
        raise ArgumentError(operation, got, allowed, "pass torch.cuda.Stream(), or None") from None
    _check_ranks(operation, groups, cp_global_ranks)
    if max(sizes) == 1:
        return ContextGroups(given=given)
    if min(sizes) == 1 or len(sizes) == 1:
        at = sizes.index(max(sizes))
        mode = cp_comm_type if len(sizes) == 1 else ("a2a", "p2p")[at]
        return ContextGroups(Context(mode, sizes[at], stream=stream), (groups[at],), dist.get_rank(groups[at]), given)
    inner, outer = map(dist.get_rank, groups)
    context = Context("a2a+p2p", sizes[0] * sizes[1], sizes[0], stream)
    return ContextGroups(context, tuple(groups), outer * sizes[0] + inner, given)


def _check_ranks(operation: str, groups: Sequence[Any], given: Any) -> None:
    """The global ranks that were given, in any order, are those of the groups.

    Of two groups that this rank is in, trainers name all ranks of the rectangle: more than are in either group.
    """
    if given is None:
        return
    ranks = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
    try:
        named = {int(rank) for rank in given}
    except TypeError:
        named = set()
    rectangle = len(named) == prod(map(dist.get_world_size, groups)) and ranks < named
    if named != ranks and not rectangle:
        got = f"cp_global_ranks={given!r} with groups of ranks {sorted(ranks)}"
        raise ArgumentError(operation, got, "the global ranks of the groups", "correct cp_global_ranks, or pass None")
