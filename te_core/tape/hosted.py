"""A tape for a host that brings all memory, such as XLA: it takes nothing from an allocator.

Its slots are the inputs, then what the result lies in, then one block for all that a call needs besides: temporaries
and scratch memory, each at its place. A host brings the result's memory for the whole call: until a part of it is
written, temporaries lie there (of an FP8 MLP's backward: the activation's gradient, where that of a weight will be).
`brought` records a call whose tensors lie anywhere in the host's operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple, NoReturn

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import LibraryError
from te_core.runtime import ByStream, Runtime
from te_core.symbols import Patch
from te_core.tape.beside import Beside, Noticed, Waited
from te_core.tape.layout import Lives, lives_of, side_by_side
from te_core.tape.recorder import Recorder, RecordingRuntime, record
from te_core.tape.tape import Drop, Slot, Take, Tape
from te_core.tape.walk import NotRecordedError, tensors_of
from te_core.tensor import Tensor

_SHIFT = 40


class NoMemory(ByStream):
    """An allocator for calls whose memory is a host's: nothing is taken."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> NoReturn:
        """Refuse it."""
        raise LibraryError("a host's call", f"memory for {dtype}{list(shape)}", "the host's alone", "report this")

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Nothing of its own is given away."""


class _Elsewhere:
    """The result of a tape of a host's, which knows where it lies."""

    plain = None

    def __init__(self) -> None:
        self.slots: set[int] = set()

    def __call__(self, at: list[int], held: list[Any]) -> tuple[()]:
        """Nothing is made of it."""
        return ()


class Hosted(NamedTuple):
    """A tape of which every slot is the host's."""

    tape: Tape
    kept: tuple[int, ...]  # the recorded tape's slots in which its result lies: here they follow the inputs
    block: int  # the bytes of the last slot: where the memory of the result has no room

    def results(self) -> tuple[Slot, ...]:
        """The memory of the result."""
        inputs = len(self.tape.slots) - len(self.kept) - 1
        return self.tape.slots[inputs:-1]


def hosted(rt: Runtime, tape: Tape) -> Hosted:
    """The same work in memory of a host's. The block has to be aligned as the runtime's allocations are."""
    steps = [copy(step) for step in tape.steps if not isinstance(step, (Take, Drop))]
    if any(slot.way for slot in tape.slots) or any(isinstance(step, (Beside, Noticed, Waited)) for step in steps):
        raise NotRecordedError("work on other streams, in a host's memory")
    kept = tuple(sorted(i for i in tape.kept if tape.slots[i].kind == "memory"))
    where = {i: (i, 0) for i in range(tape.inputs)} | {i: (tape.inputs + n, 0) for n, i in enumerate(kept)}
    uses = lives_of(tape.slots, steps, ())[1]
    if any(tape.slots[i].kind in ("handle", "room") for i in uses):
        raise NotRecordedError("a collective, in a host's memory")
    # When memory is used that no result lies in; what begins as zeros from the first step on.
    lives: Lives = {
        i: (0 if tape.slots[i].zeroed else first, last)
        for i, (first, last) in uses.items()
        if tape.slots[i].kind in ("memory", "scratch") and i not in kept
    }
    size = {i: tape.slots[i].nbytes for i in lives}
    for room in sorted(kept, key=lambda i: -tape.slots[i].nbytes):
        before = {i: life for i, life in lives.items() if i not in where and life[1] <= uses.get(room, (0, 0))[0]}
        found, _ = side_by_side(before, size, tape.slots[room].nbytes)
        where |= {i: (where[room][0], at) for i, at in found.items()}
    last = tape.inputs + len(kept)
    places, block = side_by_side({i: life for i, life in lives.items() if i not in where}, size)
    where |= {i: (last, at) for i, at in places.items()}
    for step in steps:
        step.patches = tuple(Patch(p.number, where[p.slot][0], p.offset + where[p.slot][1]) for p in step.patches)
    zeroed = [_fill(rt, where[i], size[i]) for i in lives if tape.slots[i].zeroed]
    brought = [tape.slots[i]._replace(kind="input") for i in (*range(tape.inputs), *kept)]
    slots = [*brought, Slot("input", "temporaries", (block,), dtypes.uint8, block, rt.alignment)]
    return Hosted(Tape(tape.what, slots, [*zeroed, *steps], block, _Elsewhere(), tape.keeps), kept, block)


def _fill(rt: Runtime, place: tuple[int, int], nbytes: int) -> Any:
    """The step that fills a part of the block with zeros."""
    recorder = Recorder(rt, 1)
    given = recorder.input("temporaries", Tensor(0, (nbytes,), dtypes.uint8, rt.device, None))
    on = RecordingRuntime(rt, recorder)
    on.backend.zero(on, given)
    (step,) = recorder.steps
    slot, offset = place
    step.patches = tuple(Patch(p.number, slot, p.offset + offset) for p in step.patches)  # type: ignore[misc]
    return step


# ------------------------------------------------------------------------------------------- calls on a host's operands


class At(NamedTuple):
    """Where a tensor lies: in an operand, or in a result, which are counted behind them."""

    number: int
    offset: int


def place_of(number: int) -> int:
    """An address that stands for an operand or a result."""
    return (number + 1) << _SHIFT


def at_place(address: int) -> At:
    """What an address behind such a one stands for."""
    return At((address >> _SHIFT) - 1, address & ((1 << _SHIFT) - 1))


class Brought(NamedTuple):
    """A call on a host's operands, recorded on a device."""

    made: Hosted
    places: tuple[At, ...]  # of the tape's inputs
    structure: Callable[[Sequence[int]], Any]  # of the addresses of operands and results: what the function returned


def brought(
    rt: Runtime, name: str, function: Callable[..., Any], given: tuple[Any, Any], operands: int, alignment: int
) -> Brought:
    """Record a function of these arguments and options, whose tensors lie at `place_of` so many operands."""
    arguments, options = given
    found = tensors_of((*arguments, *options.values()))
    tape = record(rt, name, function, given, alignment)
    made = hosted(rt, tape)
    places = tuple(at_place(t.ptr) for t in found)
    order = {slot: operands + n for n, slot in enumerate(made.kept)}

    def structure(addresses: Sequence[int]) -> Any:
        at = [addresses[p.number] + p.offset for p in places]
        held: list[Any] = [
            Tensor(a, t.shape, t.dtype, rt.device, t.owner, t.strides) for a, t in zip(at, found, strict=True)
        ]
        for slot in range(len(found), len(tape.slots)):
            at.append(addresses[order[slot]] if slot in order else 0)
            held.append(object())
        return tape.result(at, [*held, ()])

    return Brought(made, places, structure)
