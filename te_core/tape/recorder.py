"""Recording: a layer's function runs once, on symbolic tensors and a runtime that launches nothing.

What is decided on the way (plans, tuning, the building of graphs) is decided on the real runtime, at the alignment that
symbolic addresses have. What would run becomes a step: on a GPU each launch and library call, on the CPU each call of
the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from inspect import Signature, signature
from math import prod
from types import FunctionType
from typing import Any

from te_core import dtypes, symbols
from te_core.dtypes import DType
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.symbols import Patch, Way
from te_core.tape.beside import Alongside, Noticed, Waited
from te_core.tape.bound import Bound, Step
from te_core.tape.collectives import RecordedCommunicator
from te_core.tape.layout import laid_out
from te_core.tape.result import Result
from te_core.tape.tape import Slot, Tape
from te_core.tape.walk import NotRecordedError, exchanged, names_of
from te_core.tensor import Tensor

#: Of a backend's functions those that wait for the device, or ask for what a tape cannot hold.
_REFUSED = frozenset(("copy_to_host", "copy_from_host", "stream", "order"))


class Owner:
    """What keeps a symbolic tensor's memory: a slot."""

    __slots__ = ("recorder", "slot")

    def __init__(self, slot: int, recorder: Recorder) -> None:
        self.slot, self.recorder = slot, recorder

    def __del__(self) -> None:
        recorder = getattr(self, "recorder", None)
        if recorder is not None:  # one that an interrupt left half made has nothing to tell
            recorder.ends[self.slot] = len(recorder.steps)

    def __getattr__(self, name: str) -> Any:
        """A layer that asks its tensors' owners for something works with a framework's tensors."""
        if name in Owner.__slots__:
            raise AttributeError(name)
        raise NotRecordedError("a layer in a framework's own operations")


class Recorder:
    """What a recording has found so far."""

    def __init__(self, rt: Runtime, alignment: int | Sequence[int]) -> None:
        self.alignment = alignment  # of all inputs, or of each
        self.promise = min(rt.alignment, 256) if rt.device.kind == "cuda" else 256
        self.slots: list[Slot] = []
        self.bases: list[int] = []
        self.steps: list[Step] = []
        self.begins: dict[int, int] = {}  # memory, by slot: the step before which the layer took it,
        self.ends: dict[int, int] = {}  # and that before which the layer let go of it; also of what it was given
        self.plans: dict[int, Any] = {}  # that were asked for, by their ids
        self._scratch: dict[tuple[str, Way], int] = {}

    def _slot(self, kind: str, name: str, like: tuple[tuple[int, ...], DType, int], alignment: int, **more: Any) -> int:
        number = len(self.slots)
        self.bases.append(symbols.base(number, alignment))
        self.slots.append(Slot(kind, name, *like, self.bases[-1], **more))
        return number

    def input(self, name: str, given: Tensor) -> Tensor:
        """A symbolic tensor in the place of one that the caller brings."""
        each = self.alignment
        alignment = each if isinstance(each, int) else each[len(self.bases)]
        like = given.shape, given.dtype, given.nbytes
        number = self._slot("input", name, like, alignment, strides=given.strides)
        owner = Owner(number, self)
        return Tensor(self.bases[number], given.shape, given.dtype, given.device, owner, given.strides)

    def memory(self, shape: tuple[int, ...], dtype: DType, device: Any, way: Way) -> Tensor:
        """Memory of the call, taken for this stream."""
        number = self._slot("memory", "", (tuple(shape), dtype, dtype.nbytes(prod(shape))), self.promise, way=way)
        self.begins[number] = len(self.steps)
        return Tensor(self.bases[number], shape, dtype, device, Owner(number, self))

    def scratch(self, name: str, nbytes: int, zeroed: bool, way: Way) -> int:
        """The address of a stream's scratch memory; the most that is asked for under a name."""
        number = self._scratch.get((name, way))
        if number is None:
            like = (nbytes,), dtypes.uint8, nbytes
            number = self._slot("scratch", name, like, self.promise, zeroed=zeroed, way=way)
            self._scratch[name, way] = number
        elif self.slots[number].nbytes < nbytes:
            self.slots[number] = self.slots[number]._replace(nbytes=nbytes, shape=(nbytes,))
        return self.bases[number]

    def handle(self, name: str) -> int:
        """A place for a collective on its way."""
        return self._slot("handle", name, ((), dtypes.uint8, 0), 1)

    def room(self, kind: str, nbytes: int, device: Any) -> Tensor:
        """This rank's piece of a room, in one use of it."""
        number = self._slot("room", kind, ((nbytes,), dtypes.uint8, nbytes), self.promise)
        return Tensor(self.bases[number], (nbytes,), dtypes.uint8, device, Owner(number, self))

    def add(self, step: Step) -> None:
        """Something that would run."""
        self.steps.append(step)

    def add_call(self, function: Callable[..., None], arguments: tuple[Any, ...], what: str = "") -> None:
        """A call of the CPU backend."""
        self.steps.append(Called(what or function.__name__, function, arguments, self.bases))

    def add_note(self, what: str, function: Callable[[], Any]) -> None:
        """Something that reports read, to be noted by every replay."""
        self.steps.append(Noted(what, function))

    def refused(self, reason: str) -> NotRecordedError:
        """What is raised where something cannot be recorded."""
        return NotRecordedError(reason)


class Noted:
    """A recorded note."""

    __slots__ = ("_function", "_what")
    patches: tuple[Patch, ...] = ()

    def __init__(self, what: str, function: Callable[[], Any]) -> None:
        self._what, self._function = what, function

    def bind(self, bound: Bound, rt: Runtime) -> None:
        """See `Step`."""
        bound.run(lambda *_: self._function())

    def __repr__(self) -> str:
        return f"note: {self._what}"


class Called:
    """A recorded call of a function of the CPU backend."""

    __slots__ = ("arguments", "function", "patches", "what")

    def __init__(
        self, what: str, function: Callable[..., None], arguments: tuple[Any, ...], bases: Sequence[int]
    ) -> None:
        self.what, self.function = what, function
        found: list[Tensor] = []

        def seen(t: Tensor) -> Tensor:
            found.append(t)
            return Tensor(t.ptr, t.shape, t.dtype, t.device, None, t.strides)

        wholes: list[QuantizedTensor] = []
        self.arguments = exchanged(arguments, seen, wholes)  # nothing of it keeps the recording's memory alive,
        for q in wholes:
            q.owner = None  # nor the caller's
        self.patches = tuple(
            Patch(i, symbols.slot_of(t.ptr), t.ptr - bases[symbols.slot_of(t.ptr)]) for i, t in enumerate(found)
        )

    def bind(self, bound: Bound, rt: Runtime) -> None:
        """See `Step`."""
        bound.run(self._call)

    def _call(self, rt: Runtime, executor: Any, at: list[Any], held: list[Any]) -> None:
        """Call it with tensors over what is there now."""
        places = iter(self.patches)

        def real(t: Tensor) -> Tensor:
            _, slot, offset = next(places)
            return Tensor(at[slot] + offset, t.shape, t.dtype, t.device, held[slot], t.strides)

        self.function(rt, *exchanged(self.arguments, real))

    def __repr__(self) -> str:
        return self.what


class _Backend:
    """A backend as a recording sees it: on the CPU, what would run becomes a step."""

    def __init__(self, rt: Runtime, recorder: Recorder) -> None:
        self._rt, self._recorder = rt, recorder
        self.name = rt.backend.name

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED:
            raise NotRecordedError(f"{name} in a layer")
        found: Any = getattr(self._rt.backend, name)
        if name.startswith("plan_") or self._rt.device.kind == "cuda":
            return found
        return lambda rt, *arguments: self._recorder.add_call(found, arguments)


class _Plans:
    """The real runtime's plans. The tape keeps those that are found: steps point at constants that they hold."""

    def __init__(self, rt: Runtime, found: dict[int, Any]) -> None:
        self._rt, self._found = rt, found

    def find(self, rt: Runtime, make: Any, asked: Any, *beside: Any, like: Any = None) -> Any:
        """See `PlanCache.find`."""
        plan = self._rt.plans.find(self._rt, make, asked, *beside, like=like)
        self._found[id(plan)] = plan
        return plan


class RecordingRuntime(Runtime):
    """A runtime that launches and allocates nothing."""

    __slots__ = ("real", "way", "whole")

    def __init__(self, rt: Runtime, whole: Recorder, way: Way = ()) -> None:
        for name in ("device", "stream", "allocator", "joins", "alignment"):
            setattr(self, name, getattr(rt, name))
        self.real, self.whole, self.way = rt, whole, way
        self.recorder = Alongside(whole, way) if way else whole
        self.backend: Any = _Backend(rt, self.recorder)
        self.plans: Any = _Plans(rt, whole.plans)
        self._sides = {}

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Symbolic memory."""
        return self.whole.memory(shape, dtype, self.device, self.way)

    def workspace(self, name: str, nbytes: int, zeroed: bool = False) -> int:
        """Symbolic scratch memory."""
        return self.whole.scratch(name, nbytes, zeroed, self.way)

    def executor(self) -> Any:
        """The real one: some planning looks at it."""
        return self.real.executor()

    def side(self, name: str = "side") -> Runtime:
        """Another stream, whose work becomes steps, too."""
        found = self._sides.get(name)
        if found is None:
            real = self.real.side(name)
            if real is self.real:
                return self
            found = self._sides[name] = RecordingRuntime(real, self.whole, (*self.way, name))
        return found

    def wait(self, other: Runtime) -> None:
        """A step."""
        if not isinstance(other, RecordingRuntime):
            raise NotRecordedError("a wait for a stream that is not beside the call's")
        if other.way != self.way:
            self.whole.add(Waited(self.way, other.way))

    def record(self, *tensors: Tensor) -> None:
        """A step for each."""
        self.real._of_allocator("record_stream")
        for t in tensors:
            if not symbols.is_symbol(t.ptr):
                raise NotRecordedError("memory that is not the call's, recorded with a stream")
            self.whole.add(Noticed(self.way, symbols.slot_of(t.ptr)))

    def _not_here(self, *arguments: Any, **options: Any) -> Any:
        raise NotRecordedError("a runtime of its own, or work on the host")

    fresh = apart = tensor = numpy = _not_here


@lru_cache(maxsize=256)
def _signature(function: Callable[..., Any]) -> Signature:
    """Of a layer's function: to find it takes longer than to record a launch."""
    return signature(function)


def _recorded(part: Any, recorder: Recorder, wholes: list[Any]) -> Any:
    """An argument, where it is a communicator, or several, in the form that records what it is asked for."""
    if hasattr(part, "all_gather"):
        number = next(i for i, whole in enumerate(wholes) if whole is part)
        return RecordedCommunicator(recorder, number, part)
    if not isinstance(part, (tuple, list)) or not _communicates(part):
        return part
    parts = [_recorded(one, recorder, wholes) for one in part]
    return part.__class__(*parts) if hasattr(part, "_fields") else tuple(parts)


def _communicates(part: Any) -> bool:
    """Whether a communicator is in it."""
    return hasattr(part, "all_gather") or (isinstance(part, (tuple, list)) and any(map(_communicates, part)))


def record(
    rt: Runtime,
    what: str,
    function: Callable[..., Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    alignment: int | Sequence[int],
) -> Tape:
    """The tape of function(rt, *call[0], **call[1]), whose tensors have this alignment: all, or each its own.

    Raises `NotRecordedError`, or what the function raises; then nothing has happened.
    """
    recorder = Recorder(rt, alignment)
    arguments, options = call
    inputs: list[Tensor] = []
    wholes: list[Any] = []
    plain = function.func if isinstance(function, partial) else function
    named = _signature(plain) if isinstance(plain, FunctionType) else signature(plain)
    bound = named.bind_partial(rt, *arguments).arguments  # (a tuple, of those that have one name)
    names = names_of(dict([*bound.items()][1:]) | options)

    def symbolic(t: Tensor) -> Tensor:
        inputs.append(recorder.input(next(names), t))
        return inputs[-1]

    given = tuple(
        _recorded(part, recorder, wholes) for part in exchanged((*arguments, *options.values()), symbolic, wholes)
    )
    on = RecordingRuntime(rt, recorder)
    result = function(on, *given[: len(arguments)], **dict(zip(options, given[len(arguments) :], strict=True)))
    made = Result(result, inputs, wholes, recorder.slots)
    released = frozenset(i for i, t in enumerate(inputs) if t.owner is None)
    interpreted = recorder.begins, recorder.ends
    promised = rt.alignment if rt.device.kind == "cuda" else 1  # the host reads any address
    places = laid_out(recorder.slots, recorder.steps, interpreted, made.slots, released, promised)
    return Tape(what, *places, made, tuple(recorder.plans.values()))
