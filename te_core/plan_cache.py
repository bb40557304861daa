"""A bounded cache of plans, shared by all runtimes of a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any

from te_core.tensor import Tensor


def known(asked: Any) -> Any:
    """What a plan depends on of what it is made for: of tensors, at any depth, what their memory is like."""
    if isinstance(asked, Tensor):
        return asked.dtype, asked.shape, asked.strides, asked.device, asked.ptr & 15
    return tuple(map(known, asked)) if isinstance(asked, (tuple, list)) else asked


def drop_oldest(kept: dict[Any, Any]) -> None:
    """Let go of what has been in a small cache for longest; several threads may want to at once."""
    try:
        kept.pop(next(iter(kept)), None)
    except (RuntimeError, StopIteration):  # another thread has changed it, or emptied it: there is room
        pass


class PlanCache:
    """Plans that were not used for long go first.

    There are two generations. A new plan, or one of the older generation that is used again, joins the younger; when
    that holds half the capacity it becomes the older one, and what was left there goes. So no plan goes before half the
    capacity of others have been made or used since it was. A hit costs one look-up: to keep plans in the order of their
    use would cost a second, and it is the hash of a key that takes long.

    Threads may share a cache. One that goes on running a plan which has left it holds it by that: a plan frees what it
    has when nobody holds it. Two threads that miss at once build a plan twice, and the later one stays.
    """

    __slots__ = ("_before", "_half", "_lock", "_plans", "builds", "capacity")

    def __init__(self, capacity: int = 4096) -> None:
        self.capacity = capacity
        self.builds = 0
        self._half = max(1, capacity // 2)
        self._lock = RLock()  # a plan that goes may free what comes back here
        self._plans: dict[Hashable, Any] = {}  # the younger generation: nearly every hit
        self._before: dict[Hashable, Any] = {}

    def find(self, rt: Any, make: Callable[[Any, Any], Any], asked: Any, *beside: Hashable, like: Any = None) -> Any:
        """make(rt, asked), made once for all that is alike (see `known`); `beside` counts, too.

        `like` counts in the place of `asked`, of which the cache is to keep nothing alive.
        """
        key = make, known(asked if like is None else like), beside
        plan = self.get(key)
        return self.put(key, make(rt, asked)) if plan is None else plan

    def get(self, key: Hashable) -> Any:
        """The plan of this key, or None."""
        plans = self._plans
        if not plans:  # also of no capacity, whose keys cannot be hashed
            return None
        found = plans.get(key)
        return self._again(key) if found is None else found

    def _again(self, key: Hashable) -> Any:
        """A plan of the older generation, which thereby joins the younger."""
        with self._lock:
            found = self._before.pop(key, None)
            if found is None:
                return self._plans.get(key)  # nobody's, or another thread was faster
            self._keep(key, found)
        return found

    def put(self, key: Hashable, plan: Any) -> Any:
        """Remember a new plan and return it."""
        with self._lock:
            self.builds += 1
            if self.capacity:
                self._before.pop(key, None)
                self._keep(key, plan)
        return plan

    def _keep(self, key: Hashable, plan: Any) -> None:
        if len(self._plans) >= self._half and key not in self._plans:
            self._before = self._plans
            self._plans = {}
        self._plans[key] = plan

    def __len__(self) -> int:
        return len(self._before) + len(self._plans)

    def values(self) -> list[Any]:
        """The plans, those that joined last at the end."""
        return [*self._before.values(), *self._plans.values()]
