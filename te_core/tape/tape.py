"""`Tape`: what a layer did in one call, as a list of steps over slots of memory, to be done again in another.

A slot is memory: what the caller brings (these come first), what is taken from the allocator for the call, or scratch
memory of the replaying thread. Steps hold plans and, in the places of addresses, slots and offsets; so a tape is
immutable, belongs to no thread, stream or memory, and `print(tape)` says all that the layer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, Protocol

from te_core import c_library, env
from te_core.dtypes import DType
from te_core.errors import LibraryError
from te_core.runtime import Runtime
from te_core.symbols import Patch, Way
from te_core.tape.beside import runtime_at
from te_core.tape.bound import Bound, Step
from te_core.tensor import Tensor

_address_of = attrgetter("ptr")
c_library.USERS["replays of layers"] = lambda: f"done by {env.word('TE_CORE_PLAYER')} (TE_CORE_PLAYER)"


class Result(Protocol):
    """What the layer returned, over the memory of a call."""

    slots: set[int]  # whose memory is in it
    plain: Any  # the same as slots and shapes, for who makes no views of it: see `Result`

    def __call__(self, at: list[int], held: list[Any]) -> Any:
        """Make it."""


class Slot(NamedTuple):
    """Memory of a tape."""

    kind: str  # "input", "memory", "scratch"; "handle" of a collective on its way; "room": memory that peers read
    name: str
    shape: tuple[int, ...]
    dtype: DType
    nbytes: int
    base: int  # its symbolic address
    zeroed: bool = False  # scratch memory that begins as zeros
    way: Way = ()  # the stream that it is memory of
    strides: tuple[int, ...] | None = None  # of an input; None: it is dense


class Take:
    """Take memory from the allocator."""

    __slots__ = ("asked", "dtype", "mask", "shape", "slot", "way")
    patches: tuple[Patch, ...] = ()

    def __init__(self, slot: int, like: Slot, alignment: int) -> None:
        self.slot, self.shape, self.dtype, self.way = slot, like.shape, like.dtype, like.way
        self.mask = alignment - 1
        #: Scratch memory of another stream: it is asked for where the layer did, when that stream has waited. Before
        #: that it would be no part of a capture, and its memory not the graph's.
        self.asked = (like.name, like.nbytes, like.zeroed) if like.kind == "scratch" else None

    def bind(self, bound: Bound, rt: Runtime) -> None:
        """See `Step`."""
        if self.way:
            bound.take_by(self.slot, self._take_beside)
        else:
            bound.take(self, self.slot, self.mask)

    def _take_beside(self, rt: Runtime, executor: Any, at: list[Any], held: list[Any]) -> None:
        beside = runtime_at(rt, self.way)
        if self.asked is not None:
            at[self.slot] = beside.workspace(*self.asked)
            return
        block = beside.empty(self.shape, self.dtype)
        at[self.slot] = block.ptr
        held[self.slot] = block.owner if hasattr(rt.allocator, "makers") else block  # as `Tape.replay` holds others
        if block.ptr & self.mask:
            self.refuse(rt, block.ptr)

    def refuse(self, rt: Runtime, address: int) -> NoReturn:
        """The allocator broke its promise."""
        got = f"memory at {address:#x} from {type(rt.allocator).__name__}"
        allowed = f"multiples of {self.mask + 1} bytes, as its `alignment` promises"
        raise LibraryError("replay", got, allowed, "correct the allocator, or the promise")

    def __repr__(self) -> str:
        beside = f" on {' '.join(self.way)}" if self.way else ""
        return f"take t{self.slot} {self.dtype}{list(self.shape)}{beside}"


class Drop:
    """Let go of memory that no later step reads: what was taken, or what the caller gave up."""

    __slots__ = ("given", "slot")
    patches: tuple[Patch, ...] = ()

    def __init__(self, slot: int, given: bool) -> None:
        self.slot, self.given = slot, given

    def bind(self, bound: Bound, rt: Runtime) -> None:
        """See `Step`."""
        bound.drop(self.slot)

    def __repr__(self) -> str:
        return f"drop t{self.slot}"


class Tape:
    """A recorded call."""

    __slots__ = ("_bound", "_scratch", "given", "inputs", "keeps", "peak", "result", "slots", "steps", "takes", "what")

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
            (i, slot.name, slot.nbytes, slot.zeroed)
            for i, slot in enumerate(slots)
            if slot.kind == "scratch" and not slot.way  # that of other streams is taken on the way
        )
        self.takes = tuple(step for step in self.steps if isinstance(step, Take) and not step.way)
        self._bound: dict[int, Bound] = {}  # by the executor's number

    def replay(self, rt: Runtime, at: list[Any], held: list[Any], wholes: Sequence[Any]) -> None:
        """Do it again. `at` has the addresses of the inputs and `held` what holds them; both become those of all slots,
        from which `result` makes what the layer would have returned.

        `wholes` are the call's other objects: quantized tensors that some of the inputs are pieces of, communicators.
        """
        executor = rt.executor()
        bound = self._bound.get(executor.number) or self._bind(rt, executor)
        at += bound.more
        held += bound.nothing
        held.append(wholes)
        at[bound.stream] = rt.stream
        for slot, name, nbytes, zeroed in self._scratch:
            at[slot] = rt.workspace(name, nbytes, zeroed)
        for way, place in bound.beside:
            at[place] = runtime_at(rt, way).stream
        for place, slot, offset in bound.inside:
            at[place] = at[slot] + offset
        makers: Any = getattr(rt.allocator, "makers", None)
        if makers is not None:
            makers, address_of = makers(self.given, self.takes), rt.allocator.address_of  # type: ignore[attr-defined]
        else:  # an allocator that keeps no such list
            empty, stream, address_of = rt.allocator.empty, rt.stream, _address_of
            makers = {t.slot: partial(empty, t.shape, t.dtype, stream) for t in self.takes}
        entered = executor.driver.enter(executor.context) if executor.context else False
        chosen = None
        try:
            for takes, calls, runs, drops in bound.groups:
                for take, slot, mask, inside in takes:
                    held[slot] = makers[slot]()  # held by nothing else
                    at[slot] = address = address_of(held[slot])
                    if address & mask:
                        take.refuse(rt, address)
                    for place, offset in inside:
                        at[place] = address + offset
                for call, chosen in calls:
                    call(*chosen(at))
                chosen = None
                for run in runs:
                    run(rt, executor, at, held)
                for slot in drops:
                    if held[slot].__class__ is Tensor:  # the caller's view of it goes on living, without memory
                        held[slot].owner = None
                    held[slot] = None
        except Exception as error:
            bound.explain(error, chosen)
            raise
        finally:
            if entered:
                executor.driver.leave()

    def _bind(self, rt: Runtime, executor: Any) -> Bound:
        """For this executor. There are as many as threads work at once on a device; they are never destroyed."""
        blocks = [(slot.shape, slot.dtype) for slot in self.slots]
        bind: type[Bound] = Bound
        if rt.device.kind == "cuda" and env.chosen("TE_CORE_PLAYER") == "c":
            from te_core.tape.native import Played as bind  # noqa: N813  what it imports knows tapes
        entered = executor.driver.enter(executor.context) if executor.context else False  # handles are a device's
        try:
            made = self._bound[executor.number] = bind(blocks, self.inputs, self.steps, rt)
        finally:
            if entered:
                executor.driver.leave()
        return made

    @property
    def kept(self) -> frozenset[int]:
        """The slots whose memory is the result's."""
        return frozenset(self.result.slots)

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
