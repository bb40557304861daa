"""A device whose graphs run their Python again, so that all around a replay can be tested on a CPU.

What is run again must not do what a replay cannot: mark states as run, or find a module as it is now. So it runs with
the caches and queues that the modules had at the capture, and what it marks is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from te_torch.base.module import BaseModule

_SEEN = ("_weight_cache", "_special", "_microbatch", "wgrad_store")


class FakeGraph:
    """Work, the tensors that it returned at first, and what the modules looked like."""

    def __init__(self, device: FakeDevice, generators: Iterable[torch.Generator] = ()) -> None:
        self.device = device
        self.generators = list(generators)
        self.replays = 0

    def capture(self, work: Callable[[], Any], pool: Any) -> Any:
        assert self.device.inside is None
        self.pool = pool
        self.work = work
        self.seen = [(m, {name: m.__dict__.get(name) for name in _SEEN}) for m in self.device.modules()]
        self.device.inside = self
        try:
            self.made = work()
        finally:
            self.device.inside = None
        self.device.graphs.append(self)
        self.marks = self._marks()  # what a captured address stands for
        return self.made

    def replay(self) -> None:
        assert self.work is not None, "a replay of what was let go of"
        self.replays += 1
        with self._as_it_was(), torch.enable_grad():
            again = self.work()
        with torch.no_grad():
            leaves = torch.utils._pytree.tree_leaves
            for old, new in zip(leaves(self.made), leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old is not new and not isinstance(old, torch.nn.Parameter):
                    old.data.copy_(new)

    def reset(self) -> None:
        self.work = self.made = None

    def _marks(self) -> dict[Any, dict[str, Any]]:
        states = [m.fp8_state for m, _ in self.seen if m.fp8_state is not None]
        return {state: {"due": state.due, "group": state.group} for state in states}

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        states = self._marks()
        for state, marks in self.marks.items():
            state.__dict__.update(marks)
        now = [(m, {name: m.__dict__.get(name) for name in _SEEN}) for m, _ in self.seen]
        for m, values in self.seen:
            m.__dict__.update(values)
        try:
            yield
        finally:
            for m, values in now:
                m.__dict__.update(values)
            for state, marks in states.items():
                state.__dict__.update(marks)


class FakeDevice:
    """In the place of te_torch.training.graphs.device.Cuda."""

    def __init__(self, *roots: torch.nn.Module) -> None:
        self.roots = roots
        self.graphs: list[FakeGraph] = []
        self.inside: FakeGraph | None = None
        self.streams: list[tuple[Any, Any]] = []
        self.lent: list[torch.Tensor] = []
        self.warm = 0

    def modules(self) -> list[BaseModule]:
        return [m for root in self.roots for m in root.modules() if isinstance(m, BaseModule)]

    def require(self, tensors: Iterable[torch.Tensor]) -> None:
        self.roots = self.roots or ()

    def pool(self) -> Any:
        return object()

    def graph(self, generators: Iterable[torch.Generator]) -> FakeGraph:
        return FakeGraph(self, generators)

    def holds(self, generator: torch.Generator) -> bool:
        return True

    @contextmanager
    def warming(self) -> Iterator[None]:
        self.warm += 1
        yield

    def replay(self, graphs: Iterable[FakeGraph], stream: Any, event: Any) -> None:
        self.streams.append((stream, event))
        for graph in graphs:
            graph.replay()

    def borrowed(self, t: torch.Tensor) -> torch.Tensor:
        self.lent.append(t)
        return t
