"""torch's collectives as we call them: by the names that this torch has, and with one error where a rank is missing.

Of a rank that died, or that does not come within the group's timeout, torch speaks in its backend's words ("Connection
closed by peer"). What a user reads here is the operation that he called, the ranks that it is over, and where to look.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from te_core.errors import LibraryError, UnsupportedError

_T = TypeVar("_T")

#: These two have new names in torch 2.13, where the older ones warn.
ALL_GATHER, REDUCE_SCATTER = (
    new if hasattr(dist, new) else old
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)
REDUCTIONS = (
    {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN} if dist.is_available() else {}
)

# Each call has its own `except`, not one function around it: they are in every step, whose calls are counted. What has
# nothing to do with other ranks passes as it is: an error of ours (a quantized tensor's refusal), a want of memory.
PASSING = (UnsupportedError, LibraryError, torch.OutOfMemoryError)


def failed(operation: str, group: Any, error: BaseException) -> LibraryError:
    """The error of a collective that did not end well."""
    try:
        ranks: Any = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    except (KeyError, RuntimeError, TypeError, ValueError):
        ranks = "of a group that is gone"
    return LibraryError(
        operation,
        f"a failure over ranks {ranks}: {error}",
        "ranks that are all alive and come to each collective within the group's timeout, with tensors that its "
        "backend takes",
        "if torch's words do not say what is wrong here, look for the first error among the other ranks' outputs; one "
        "that left out a step is missing too",
    )


class Pending:
    """torch's handle of a collective on its way, but for `wait`, which says what failed."""

    def __init__(self, operation: str, group: Any, work: Any) -> None:
        self._operation, self._group, self._work = operation, group, work

    def wait(self, *timeout: Any, **named: Any) -> Any:
        """Have the current stream (or, with gloo, the host) wait for the result."""
        try:
            return self._work.wait(*timeout, **named)
        except RuntimeError as error:
            raise failed(self._operation, self._group, error) from error

    def __getattr__(self, name: str) -> Any:
        if name == "_work":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._work, name)


def all_gather(operation: str, out: torch.Tensor, inp: torch.Tensor, group: Any, async_op: bool = False) -> Any:
    """Every rank's `inp`, one after another in `out`. With `async_op` a handle is returned, as by each of these."""
    try:
        work = getattr(dist, ALL_GATHER)(out, inp, group=group, async_op=async_op)
    except PASSING:
        raise
    except RuntimeError as error:
        raise failed(operation, group, error) from error
    return None if work is None else Pending(operation, group, work)


def reduce_scatter(operation: str, out: torch.Tensor, inp: torch.Tensor, group: Any, async_op: bool = False) -> Any:
    """This rank's part of the sum of every rank's `inp`, in `out`."""
    try:
        work = getattr(dist, REDUCE_SCATTER)(out, inp, group=group, async_op=async_op)
    except PASSING:
        raise
    except RuntimeError as error:
        raise failed(operation, group, error) from error
    return None if work is None else Pending(operation, group, work)


def all_reduce(operation: str, t: torch.Tensor, group: Any, reduction: str = "sum", async_op: bool = False) -> Any:
    """t = the sum, maximum or minimum of all ranks' tensors."""
    try:
        work = dist.all_reduce(t, REDUCTIONS[reduction], group=group, async_op=async_op)
    except PASSING:
        raise
    except RuntimeError as error:
        raise failed(operation, group, error) from error
    return None if work is None else Pending(operation, group, work)


def all_gather_object(operation: str, mine: Any, group: Any) -> list[Any]:
    """Every rank's object, by rank."""
    found: list[Any] = [None] * dist.get_world_size(group)
    with telling(operation, group):
        dist.all_gather_object(found, mine, group)
    return found


@contextmanager
def telling(operation: str, group: Any) -> Iterator[None]:
    """The same error for what else ranks do together inside."""
    try:
        yield
    except PASSING:
        raise
    except RuntimeError as error:
        raise failed(operation, group, error) from error


#: What this process keeps of each group, as long as the group lives: ids and names are used again.
_of_groups: weakref.WeakKeyDictionary[Any, dict[Callable[[], Any], Any]] = weakref.WeakKeyDictionary()
_in_graphs: dict[int, tuple[torch.Tensor, ...]] = {}


def of_group(group: Any, kind: Callable[[], _T]) -> _T:
    """The one thing of this kind that belongs to a group."""
    kept = _of_groups.setdefault(group, {})
    found: _T | None = kept.get(kind)
    return kept.setdefault(kind, kind()) if found is None else found


def keep_for_graphs(*tensors: torch.Tensor) -> None:
    """What a graph captured now reads and writes: to be there as long as the graph, whose end nobody tells."""
    _in_graphs[tensors[0].data_ptr()] = tensors
