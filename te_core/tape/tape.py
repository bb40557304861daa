"""`Tape`: what a layer did in one call, as a list of steps over slots of memory, to be done again in another.

A slot is memory: what the caller brings (these come first), what is taken from the allocator for the call, or scratch
memory of the replaying thread. Steps hold plans and, in the places of addresses, slots and offsets; so a tape is
immutable, belongs to no thread, stream or memory, and `print(tape)` says all that the layer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from te_core.dtypes import DType
from te_core.errors import LibraryError
from te_core.runtime import Runtime
from te_core.symbols import Patch
from te_core.tensor import Tensor


class Step(Protocol):
    """A launch, a library's call, a fill, or a change of what memory is held."""

    @property
    def patches(self) -> Sequence[Patch]:
        """Where it takes addresses."""

    def run(self, rt: Runtime, executor: Any, at: list[int], held: list[Any]) -> None:
        """Do it. `at` has the address of each slot, `held` the tensor over it and, last, the call's other objects."""


class Result(Protocol):
    """What the layer returned, over the memory of a call."""

    slots: set[int]  # whose memory is in it

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


class Take:
    """Take memory from the allocator."""

    __slots__ = ("dtype", "mask", "shape", "slot")
    patches: tuple[Patch, ...] = ()

    def __init__(self, slot: int, shape: tuple[int, ...], dtype: DType, alignment: int) -> None:
        self.slot, self.shape, self.dtype, self.mask = slot, shape, dtype, alignment - 1

    def run(self, rt: Runtime, executor: Any, at: list[int], held: list[Any]) -> None:
        """Hold it."""
        made = held[self.slot] = rt.allocator.empty(self.shape, self.dtype, rt.stream)
        at[self.slot] = made.ptr
        if made.ptr & self.mask:
            self._refuse(rt, made)

    def _refuse(self, rt: Runtime, made: Tensor) -> None:
        raise LibraryError(
            "replay",
            f"memory at {made.ptr:#x} from {type(rt.allocator).__name__}",
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

    def run(self, rt: Runtime, executor: Any, at: list[int], held: list[Any]) -> None:
        """Hold it no longer."""
        if self.given:
            held[self.slot].owner = None
        else:
            held[self.slot] = None

    def __repr__(self) -> str:
        return f"drop t{self.slot}"


class Tape:
    """A recorded call."""

    __slots__ = ("_scratch", "inputs", "keeps", "peak", "result", "slots", "steps", "what")

    def __init__(
        self, what: str, slots: Sequence[Slot], steps: Sequence[Step], peak: int, result: Result, keeps: Sequence[Any]
    ) -> None:
        self.what = what
        self.slots = tuple(slots)
        self.steps = tuple(steps)
        self.inputs = sum(slot.kind == "input" for slot in slots)
        self.keeps = tuple(keeps)  # plans whose constants the steps point at
        self.peak = peak  # the most bytes that it takes at once
        self.result = result
        self._scratch = tuple(
            (i, slot.name, slot.nbytes, slot.zeroed) for i, slot in enumerate(slots) if slot.kind == "scratch"
        )

    def replay(self, rt: Runtime, inputs: Sequence[Tensor], wholes: Sequence[Any]) -> Any:
        """Do it again on these inputs: what the layer would have returned.

        `wholes` are its other objects: quantized tensors that some of the inputs are pieces of, communicators.
        """
        more = len(self.slots) - self.inputs
        at, held = [t.ptr for t in inputs] + [0] * more, [*inputs, *[None] * more, wholes]
        for slot, name, nbytes, zeroed in self._scratch:
            at[slot] = rt.workspace(name, nbytes, zeroed)
        executor = rt.executor()
        entered = executor.driver.enter(executor.context) if executor.context else False
        try:
            for step in self.steps:
                step.run(rt, executor, at, held)
        finally:
            if entered:
                executor.driver.leave()
        return self.result(at, held)

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
