"""A bounded cache of plans, shared by all runtimes of a device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any


class PlanCache:
    """Least recently used plans go first; a plan that holds handles is told by `close()`.

    Lookups and insertions are single OrderedDict operations, which the interpreter makes atomic, so threads
    may share a cache; two threads that miss at once build the plan twice and the later one stays.
    """

    __slots__ = ("_plans", "builds", "capacity")

    def __init__(self, capacity: int = 4096) -> None:
        self.capacity = capacity
        self.builds = 0
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """The plan of this key, or None."""
        return self._plans.get(key) if self._plans else None

    def put(self, key: Hashable, plan: Any) -> Any:
        """Remember a new plan and return it; the oldest ones make room."""
        self.builds += 1
        if not self.capacity:
            return plan
        self._plans[key] = plan
        while len(self._plans) > self.capacity:
            _, old = self._plans.popitem(last=False)
            close = getattr(old, "close", None)
            if close is not None:
                close()
        return plan

    def touch(self, key: Hashable) -> None:
        """Mark a plan as used now (called by holders of long-lived plans, not on every run)."""
        if key in self._plans:
            self._plans.move_to_end(key)

    def __len__(self) -> int:
        return len(self._plans)

    def values(self) -> list[Any]:
        """The plans, oldest first."""
        return list(self._plans.values())
