"""`Tape`: what a layer did in one call, as a list of steps over slots of memory, to be done again in another.

A slot is memory: what the caller brings (these come first), what is taken from the allocator for the call, or scratch
memory of the replaying thread. Steps hold plans and, in the places of addresses, slots and offsets; so a tape is
immutable, belongs to no thread, stream or memory, and `print(tape)` says all that the layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, NoReturn, Protocol

from te_core.dtypes import DType
from te_core.errors import LibraryError
from te_core.runtime import Runtime
from te_core.symbols import Patch
from te_core.tensor import Tensor

_address_of = attrgetter("ptr")


class Step(Protocol):
    """A launch, a library's call, a fill, or a change of what memory is held."""

    @property
    def patches(self) -> Sequence[Patch]:
        """Where it takes addresses."""

    def place(self, places: Places) -> None:
        """Note where in `at` it finds what it takes."""

    def run(self, rt: Runtime, executor: Any, at: list[Any], held: list[Any]) -> None:
        """Do it. `at` has the address of each slot and, behind these, all else that steps take (`Places`); `held` has
        what holds the memory of each slot and, last, the call's other objects."""


class Result(Protocol):
    """What the layer returned, over the memory of a call."""

    slots: set[int]  # whose memory is in it
    plain: Any  # the same as slots and shapes, for who makes no views of it: see `Result`

    def __call__(self, at: list[int], held: list[Any]) -> Any:
        """Make it."""


class Slot(NamedTuple):
    """Memory of a tape."""

    kind: str  # "input", "memory", "scratch"; "handle" of a collective on its way
    name: str
    shape: tuple[int, ...]
    dtype: DType
    nbytes: int
    base: int  # its symbolic address
    zeroed: bool = False  # scratch memory that begins as zeros


class Places:
    """The list `at` of a tape: the addresses of its slots, addresses inside of them, and constants.

    So what a step takes is a choice of elements, made by one call in C.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.inside: dict[tuple[int, int], int] = {}  # by slot and offset
        self.values: list[Any] = []  # behind the slots: constants, and room for addresses inside of them

    def _add(self, value: Any) -> int:
        self.values.append(value)
        return len(self.slots) + len(self.values) - 1

    def of(self, slot: int, offset: int) -> int:
        """Where the address of a slot plus an offset is."""
        if not offset:
            return slot
        found = self.inside.get((slot, offset))
        if found is None:
            found = self.inside[slot, offset] = self._add(0)
        return found

    def chosen(self, constants: Sequence[Any], patches: Sequence[Patch]) -> Callable[[list[Any]], Sequence[Any]]:
        """What chooses these of `at`: constants, and at the numbers of the patches addresses."""
        addresses = {number: self.of(slot, offset) for number, slot, offset in patches}
        where = [addresses[i] if i in addresses else self._add(value) for i, value in enumerate(constants)]
        return itemgetter(*where) if len(where) > 1 else lambda at: [at[i] for i in where]


class Take:
    """Take memory from the allocator."""

    __slots__ = ("dtype", "inside", "mask", "shape", "slot")
    patches: tuple[Patch, ...] = ()
    inside: tuple[tuple[int, int], ...]  # which places are addresses inside of it, and their offsets

    def __init__(self, slot: int, shape: tuple[int, ...], dtype: DType, alignment: int) -> None:
        self.slot, self.shape, self.dtype, self.mask = slot, shape, dtype, alignment - 1
        self.inside = ()

    def place(self, places: Places) -> None:
        """See `Step`: when all other steps are placed."""
        self.inside = tuple((place, at) for (slot, at), place in places.inside.items() if slot == self.slot)

    def refuse(self, rt: Runtime, address: int) -> NoReturn:
        """The allocator broke its promise."""
        raise LibraryError(
            "replay",
            f"memory at {address:#x} from {type(rt.allocator).__name__}",
            f"multiples of {self.mask + 1} bytes, as its `alignment` promises",
            "correct the allocator, or the promise",
        )

    def __repr__(self) -> str:
        return f"take t{self.slot} {self.dtype}{list(self.shape)}"


class Drop:
    """Let go of memory that no later step reads: what was taken, or what the caller gave up."""

    __slots__ = ("given", "slot")
    patches: tuple[Patch, ...] = ()

    def __init__(self, slot: int, given: bool) -> None:
        self.slot, self.given = slot, given

    def place(self, places: Places) -> None:
        """See `Step`."""

    def run(self, rt: Runtime, executor: Any, at: list[int], held: list[Any]) -> None:
        """Hold it no longer."""
        was, held[self.slot] = held[self.slot], None
        if self.given and was.__class__ is Tensor:  # the caller's view of it goes on living, without memory
            was.owner = None

    def __repr__(self) -> str:
        return f"drop t{self.slot}"


def _in_order(steps: Sequence[Any]) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
    """The steps as a replay does them: some takes, with all that it reads of them, then what others do, and so on."""
    takes: list[Any] = []
    others: list[Any] = []
    for step in steps:
        if isinstance(step, Take):
            if others:
                yield tuple(takes), tuple(others)
                takes, others = [], []
            takes.append((step, step.slot, step.mask, step.inside))
        else:
            others.append(step.run)
    yield tuple(takes), tuple(others)


class Tape:
    """A recorded call."""

    __slots__ = (
        "_inside",
        "_more",
        "_nothing",
        "_order",
        "_scratch",
        "given",
        "inputs",
        "keeps",
        "peak",
        "result",
        "slots",
        "steps",
        "takes",
        "what",
    )

    def __init__(
        self, what: str, slots: Sequence[Slot], steps: Sequence[Step], peak: int, result: Result, keeps: Sequence[Any]
    ) -> None:
        self.what = what
        self.given: dict[Any, Any] = {}  # by allocator: how it gives the memory that is taken
        self.slots = tuple(slots)
        self.steps: tuple[Any, ...] = tuple(steps)
        self.inputs = sum(slot.kind == "input" for slot in slots)
        self.keeps = tuple(keeps)  # plans whose constants the steps point at
        self.peak = peak  # the most bytes that it takes at once
        self.result = result
        self._scratch = tuple(
            (i, slot.name, slot.nbytes, slot.zeroed) for i, slot in enumerate(slots) if slot.kind == "scratch"
        )
        self.takes = tuple(step for step in self.steps if isinstance(step, Take))
        places = Places(self.slots)
        for step in sorted(self.steps, key=lambda step: isinstance(step, Take)):
            step.place(places)
        more = len(self.slots) - self.inputs
        self._nothing, self._more = [None] * more, [0] * more + places.values
        self._order = tuple(_in_order(self.steps))
        known = {step.slot for step in self.takes}
        self._inside = tuple((at, *where) for where, at in places.inside.items() if where[0] not in known)

    def replay(self, rt: Runtime, at: list[Any], held: list[Any], wholes: Sequence[Any]) -> None:
        """Do it again. `at` has the addresses of the inputs and `held` what holds them; both become those of all slots,
        from which `result` makes what the layer would have returned.

        `wholes` are the call's other objects: quantized tensors that some of the inputs are pieces of, communicators.
        """
        at += self._more
        held += self._nothing
        held.append(wholes)
        for slot, name, nbytes, zeroed in self._scratch:
            at[slot] = rt.workspace(name, nbytes, zeroed)
        for place, slot, offset in self._inside:
            at[place] = at[slot] + offset
        executor = rt.executor()
        makers: Any = getattr(rt.allocator, "makers", None)
        if makers is not None:
            makers, address_of = makers(self.given, self.takes), rt.allocator.address_of  # type: ignore[attr-defined]
        else:
            makers, address_of = self._makers(rt), _address_of
        entered = executor.driver.enter(executor.context) if executor.context else False
        try:
            for takes, others in self._order:
                for take, slot, mask, inside in takes:
                    held[slot] = makers[slot]()  # held by nothing else
                    at[slot] = address = address_of(held[slot])
                    if address & mask:
                        take.refuse(rt, address)
                    for place, offset in inside:
                        at[place] = address + offset
                for run in others:
                    run(rt, executor, at, held)
        finally:
            if entered:
                executor.driver.leave()

    def _makers(self, rt: Runtime) -> dict[int, Callable[[], Any]]:
        """By slot, what takes its memory and gives what holds it: for an allocator that keeps no such list."""
        empty, stream = rt.allocator.empty, rt.stream
        return {t.slot: partial(empty, t.shape, t.dtype, stream) for t in self.takes}

    @property
    def kept(self) -> frozenset[int]:
        """The slots whose memory is the result's."""
        return frozenset(self.result.slots)

    @property
    def released(self) -> frozenset[int]:
        """The inputs that the caller gives up."""
        return frozenset(step.slot for step in self.steps if isinstance(step, Drop) and step.given)

    def __repr__(self) -> str:
        return f"Tape({self.what}: {self.inputs} inputs, {len(self.steps)} steps, {self.peak} bytes)"

    def __str__(self) -> str:
        lines = [self.what]
        for number, slot in enumerate(self.slots):
            if slot.kind in ("input", "scratch"):
                size = f"{slot.dtype}{list(slot.shape)}" if slot.kind == "input" else f"{slot.nbytes} bytes"
                lines.append(f"  t{number} {slot.kind} {slot.name}: {size}")
        for step in self.steps:
            places = ", ".join(f"t{p.slot}" + (f"+{p.offset}" if p.offset else "") for p in step.patches)
            lines.append(f"  {step!r}" + (f" ({places})" if places else ""))
        return "\n".join(lines)
