"""Work on other streams in a tape: what a layer does on `rt.side(name)`, and where streams wait for one another.

A stream is known by its way: the names by which a layer asked for it, from the runtime of its call on, whose own way is
(). So a tape belongs to no stream: each replay finds those beside its own.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from te_core.runtime import Runtime
from te_core.symbols import Patch, Way
from te_core.tensor import Tensor


def runtime_at(rt: Runtime, way: Way) -> Runtime:
    """The runtime of that stream."""
    for name in way:
        rt = rt.side(name)
    return rt


def _called(way: Way) -> str:
    return " ".join(way) or "the call's stream"


class Beside:
    """A step on another stream."""

    __slots__ = ("step", "way")

    def __init__(self, step: Any, way: Way) -> None:
        self.step, self.way = step, way

    @property
    def patches(self) -> tuple[Patch, ...]:
        """See `Step`."""
        return self.step.patches  # type: ignore[no-any-return]

    @patches.setter
    def patches(self, moved: tuple[Patch, ...]) -> None:
        self.step.patches = moved

    def __copy__(self) -> Beside:
        return Beside(copy(self.step), self.way)

    def bind(self, bound: Any, rt: Runtime) -> None:
        """See `Step`."""
        with bound.on(self.way):
            bound.enter(self.step, rt)

    def __repr__(self) -> str:
        return f"on {_called(self.way)}: {self.step!r}"


class Waited:
    """Later work of one stream waits for what another one has been given by now."""

    __slots__ = ("other", "way")
    patches: tuple[Patch, ...] = ()

    def __init__(self, way: Way, other: Way) -> None:
        self.way, self.other = way, other

    def bind(self, bound: Any, rt: Runtime) -> None:
        """See `Step`."""
        bound.run(lambda rt, *_: runtime_at(rt, self.way).wait(runtime_at(rt, self.other)))

    def __repr__(self) -> str:
        return f"{_called(self.way)} waits for {_called(self.other)}"


class Noticed:
    """Memory is not given away, once it is let go of, before the work that a stream has then is done."""

    __slots__ = ("patches", "way")

    def __init__(self, way: Way, slot: int) -> None:
        self.way, self.patches = way, (Patch(0, slot, 0),)

    def bind(self, bound: Any, rt: Runtime) -> None:
        """See `Step`."""
        slot = self.patches[0].slot
        shape, dtype = bound.blocks[slot]

        def run(rt: Runtime, executor: Any, at: list[Any], held: list[Any]) -> None:
            runtime_at(rt, self.way).record(Tensor(at[slot], shape, dtype, rt.device, held[slot]))

        bound.run(run)

    def __repr__(self) -> str:
        return f"recorded with {_called(self.way)}"


class Alongside:
    """A recorder as work on another stream sees it: its steps are that stream's."""

    def __init__(self, recorder: Any, way: Way) -> None:
        self._recorder, self._way = recorder, way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)

    def add(self, step: Any) -> None:
        """Something that would run there."""
        self._recorder.add(Beside(step, self._way))
