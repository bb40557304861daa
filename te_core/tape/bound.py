"""`Bound`: a tape in one executor, as little more than a list of calls in C.

Handles, descriptors and argument blocks belong to an executor, which is one thread's on one device. So a tape is bound
to it at its first replay there: each step says what is called, and with what. All that steps take stands in one list,
`at`: the addresses of the slots, the stream, addresses inside of slots, constants. What a call takes is a choice of its
elements, made by one call in C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Protocol

from te_core.dtypes import DType
from te_core.runtime import Runtime
from te_core.symbols import STREAM, Patch, Way
from te_core.tape.beside import runtime_at

#: A step's own way to run: (runtime, executor, at, held). `at` and `held` have for each slot its address and what holds
#: its memory; the last of `held` are the call's other objects.
Run = Callable[[Any, Any, list[Any], list[Any]], None]


class Step(Protocol):
    """A launch, a library's call, a fill, or a change of what memory is held.

    It may have `explain(error)`: what is raised in the place of an error of its calls.
    """

    @property
    def patches(self) -> Sequence[Patch]:
        """Where it takes addresses."""

    def bind(self, bound: Bound, rt: Runtime) -> None:
        """Enter what a replay in the calling thread's executor does for it."""


class Group:
    """Steps in the order in which a replay does them: takes, then calls, then what runs its own way, then drops.

    Takes and drops keep their order among themselves, and so the bytes that are held at each take. Between the two a
    call may come after a take that followed it, and before a drop that it followed.
    """

    __slots__ = ("calls", "drops", "runs", "takes")

    def __init__(self) -> None:
        self.takes: list[tuple[Any, ...]] = []
        self.calls: list[tuple[Callable[..., Any], Callable[[list[Any]], Sequence[Any]]]] = []
        self.runs: list[Run] = []
        self.drops: list[int] = []


class Bound:
    """What a replay does. Steps enter themselves by `call`, `run`, `take` and `drop`."""

    __slots__ = (
        "_beside",
        "_groups",
        "_inside",
        "_kept",
        "_now",
        "_steps",
        "_taken",
        "beside",
        "blocks",
        "groups",
        "inside",
        "more",
        "nothing",
        "stream",
    )

    def __init__(
        self, blocks: Sequence[tuple[tuple[int, ...], DType]], inputs: int, steps: Sequence[Step], rt: Any
    ) -> None:
        self.blocks = blocks  # what memory is in each slot; the first ones are inputs
        more = len(blocks) - inputs
        self.stream = len(blocks)  # where in `at` it is
        self.more: list[Any] = [0] * (more + 1)  # of `at`, behind the inputs: slots, the stream, and what is added here
        self.nothing = [None] * more
        self._beside: dict[Way, int] = {}  # where in `at` other streams are
        self._now: Way = ()  # whose steps are bound
        self._taken: dict[int, tuple[tuple[int, int], ...]] = {}  # by slot that is taken: addresses inside of it
        self._inside: dict[tuple[int, int], int] = {}  # by slot and offset
        self._kept: list[Any] = []
        self._steps: dict[int, Step] = {}  # by the choice of its arguments: whose call it is
        self._groups = [Group()]
        for step in steps:
            self.enter(step, rt)
        self.close()
        for slot in self._taken:  # now all addresses inside are known: where in `at` they are, and their offsets
            self._taken[slot] = tuple((at, offset) for (of, offset), at in self._inside.items() if of == slot)
        for group in self._groups:
            group.takes = [(*take, self._taken[take[1]]) for take in group.takes]
        self.beside = tuple(self._beside.items())
        #: As a replay goes through them.
        self.groups = tuple((tuple(g.takes), tuple(g.calls), tuple(g.runs), tuple(g.drops)) for g in self._groups)
        self.inside = tuple((at, *where) for where, at in self._inside.items() if where[0] not in self._taken)

    def enter(self, step: Step, rt: Any) -> None:
        """A step enters itself."""
        step.bind(self, rt)

    def close(self) -> None:
        """All have."""

    def _group(self, rank: int) -> Group:
        """The one that a step of this rank (0 takes, 1 calls, 2 runs, 3 drops) goes into."""
        last = self._groups[-1]
        if ((last.runs or last.drops), last.runs, last.drops, ())[rank]:
            self._groups.append(Group())
        return self._groups[-1]

    def _add(self, value: Any) -> int:
        self.more.append(value)
        return len(self.blocks) + len(self.more) - len(self.nothing) - 1

    def of(self, slot: int, offset: int) -> int:
        """Where in `at` the address of a slot plus an offset is."""
        if not offset:
            return slot
        found = self._inside.get((slot, offset))
        if found is None:
            found = self._inside[slot, offset] = self._add(0)
        return found

    def call(self, step: Step, function: Callable[..., Any], arguments: Sequence[Any], found: Sequence[Patch]) -> None:
        """The function is called with these: constants, `STREAM`, and addresses at the numbers of the patches."""
        at = {number: self.of(slot, offset) for number, slot, offset in found}
        where = [
            at[i] if i in at else self._stream() if value is STREAM else self._add(value)
            for i, value in enumerate(arguments)
        ]
        assert len(where) > 1, step  # one alone would come without a tuple around it
        chosen = itemgetter(*where)
        self._steps[id(chosen)] = step
        self._group(1).calls.append((function, chosen))

    def keep(self, value: Any) -> None:
        """What is pointed at lives as long as this."""
        self._kept.append(value)

    @contextmanager
    def on(self, way: Way) -> Iterator[None]:
        """What is entered inside is done on another stream."""
        self._now = way
        try:
            yield
        finally:
            self._now = ()

    def _stream(self) -> int:
        """Where in `at` the stream is on which something is done."""
        if not self._now:
            return self.stream
        if self._now not in self._beside:
            self._beside[self._now] = self._add(0)
        return self._beside[self._now]

    def run(self, run: Run) -> None:
        """It runs its own way."""
        way = self._now
        if way:
            on_call, run = run, lambda rt, *more: on_call(runtime_at(rt, way), *more)
        self._group(2).runs.append(run)

    def take(self, take: Any, slot: int, mask: int) -> None:
        """Memory is taken."""
        self._taken[slot] = ()
        self._group(0).takes.append((take, slot, mask))

    def take_by(self, slot: int, run: Run) -> None:
        """Memory is taken, and its address put into `at`, by this."""
        taken = self._taken  # and nothing more of this, which would be a cycle
        taken[slot] = ()

        def take(rt: Any, executor: Any, at: list[Any], held: list[Any]) -> None:
            run(rt, executor, at, held)
            for place, offset in taken[slot]:
                at[place] = at[slot] + offset

        self.run(take)

    def drop(self, slot: int) -> None:
        """Memory is let go of."""
        self._group(3).drops.append(slot)

    def explain(self, error: Exception, chosen: Any) -> None:
        """Raise what the step whose call failed (`chosen` is known of it) makes of the error, if anything."""
        explain = getattr(self._steps.get(id(chosen)), "explain", None)
        said = None if explain is None else explain(error)
        if said is not None:
            try:
                raise said from error
            finally:
                del said  # whose traceback leads here
