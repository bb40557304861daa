"""Calls of opened layers on a GPU, as programs for the player in C; and what each tensor of a program is to the caller.

A number stands for memory that C knows the address of (bindings/c/src/layers.c has the same): each input, each tensor
of a scaling state, each gradient of an output, and each slot of a forward's program, whose outputs backward reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

from te_core import symbols
from te_core.calls import Call
from te_core.embed.layers import Host, Opened, State, alike
from te_core.errors import ArgumentError, UnsupportedError
from te_core.functional.scaling import views_of
from te_core.ops import raw as ops
from te_core.ops.quantize import ScalingState
from te_core.program import Example, said, tape_of
from te_core.runtime import Runtime
from te_core.tape.hosted import at_place, place_of
from te_core.tape.program import add_entry
from te_core.tape.program_file import Entry, Program, pack
from te_core.tape.tape import Tape
from te_core.tape.walk import tensors_of
from te_core.tensor import Tensor

OF_STATE, OF_GRADIENT, OF_SLOT, STATES = 64, 96, 128, 6
Lows = dict[int, int]


def _alignment(tensors: Iterable[Tensor | None]) -> int:
    return min([256, *[t.ptr & -t.ptr for t in tensors if t is not None and t.ptr]])


def _stand_in(number: int, like: Tensor) -> Tensor:
    """A tensor at an address that says the number, aligned as this one."""
    at = place_of(number) + (_alignment([like]) & 255)
    return Tensor(at, like.shape, like.dtype, like.device, like.shape, like.strides)


def _states(states: Sequence[ScalingState], first: int) -> list[ScalingState]:
    """Stand-ins for a state, in the order of `State.tensors`."""
    return [
        ScalingState(
            _stand_in(first + 2 * i, s.scale),
            _stand_in(first + 2 * i + 1, s.history),
            _stand_in(first + 4 + i, s.used),
            s.limit,
        )
        for i, s in enumerate(states)
    ]


def _apart(rt: Any, tensors: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
    """Results, each in memory of its own, which then is the caller's: others are copied."""
    seen: set[int] = set()
    for t in tensors:
        if t is not None:
            slot = rt.whole.slots[symbols.slot_of(t.ptr)]
            if slot.kind != "memory" or t.ptr in seen or (t.ptr, t.nbytes) != (slot.base, slot.nbytes):
                t = ops.resize(rt, t.reshape(1, t.size), 1, t.size).reshape(*t.shape)
            seen.add(t.ptr)
        yield t


class _Recorded:
    """A function's tape on stand-ins, and its plan for C.

    `lows`: of numbers, what their addresses are beyond a multiple of 256.
    """

    def __init__(
        self, rt: Runtime, name: str, call: tuple[Callable[..., Any], Any, dict[str, Any]], lows: Lows
    ) -> None:
        function, arguments, options = call
        self.tape: Tape = tape_of(name, Example(rt, function, tuple(arguments), options))
        self._given = tensors_of([*arguments, *options.values()])
        self._index, self._lows, first = rt.device.index, lows, len(self._given)
        numbers = range(OF_SLOT + first, OF_SLOT + len(self.tape.slots))
        self.lows = lows | dict.fromkeys(numbers, rt.alignment & 255)
        at = [t.ptr for t in self._given] + [place_of(n) + self.lows[n] for n in numbers]
        self.result = self.tape.result(at, [*self._given, *[object()] * len(numbers), ()])

    def added(self, program: Program, name: str, call: str, results: Sequence[str] | None = None) -> Entry:
        """As an entry of a program, which has its name once."""
        count = sum(entry.name.partition(".")[0] == name for entry in program.entries)
        return add_entry(program, f"{name}.{count + 1}" if count else name, self.tape, call, self._index, results)

    def plan(self, results: Sequence[tuple[int, Tensor]]) -> tuple[list[int], bytes]:
        """(for C: how many numbers there are, inputs, outputs; number and offset of each input; of each output its
        number, the index of the caller's tensor (-1: it is kept), dtype and shape; the program).

        `results`: the caller's tensors with their index.
        """
        program, words = Program(), []
        self.added(program, "call", "{}")
        for t in self._given:
            number, offset = at_place(t.ptr)
            words += [number, offset - self._lows.get(number, 0)]
        places = {at_place(t.ptr).number - OF_SLOT: (index, t) for index, t in results}
        outputs = [i for i in range(self.tape.inputs, len(self.tape.slots)) if i in self.tape.kept]
        for slot in outputs:
            words += [OF_SLOT + slot, -1, 0, 0, 0]
            if slot in places:
                index, t = places[slot]
                words[-4:] = [index, t.dtype.dlpack_code, t.dtype.bits, len(t.shape), *t.shape]
        return [OF_SLOT + len(self.tape.slots), len(self._given), len(outputs), *words], pack(program)


class Forward:
    """A forward of an opened layer on tensors like these, and what its backward is recorded from."""

    def __init__(
        self, layer: Opened, given: Sequence[Any], into: Sequence[Any], state: State | None, keep: bool
    ) -> None:
        rt = layer.host.runtime(_alignment(into))
        self.layer = layer
        self._given = [t if t is None else _stand_in(i, t) for i, t in enumerate(given)]
        lows = {i: t.ptr & 255 for i, t in enumerate(self._given) if t is not None}
        self._call, arguments = layer.call(self._given, keep, rt)
        self._scales = layer.scales(state)
        if self._scales:
            assert state is not None
            self._scales = {"scales": views_of(_states(state.states, OF_STATE))}
        taped, spec = self._call.forward, self._call.spec
        plain = taped.function

        @wraps(plain)
        def forward(rt: Any, *arguments: Any, **options: Any) -> Any:
            outputs, saved = plain(rt, *arguments, spec=spec, **options)
            return tuple(_apart(rt, outputs)), saved

        if taped.reason:  # what no recording holds
            do = "call te_core in Python"
            raise UnsupportedError(taped.name, taped.reason, "calls that te_core records", do)
        made = _Recorded(rt, f"{layer.name} forward", (forward, arguments, self._scales), lows)
        self.outputs, self._saved = made.result
        self._lows = made.lows
        if len(self.outputs) != len(into):
            got, do = f"{len(into)} outputs", "pass as many"
            raise ArgumentError(layer.name, got, f"{len(self.outputs)}, which its options ask for", do)
        self.plan, self.content = made.plan(list(enumerate(self.outputs)))
        with layer.lock:
            made.added(layer.program, "forward", said(Example(rt, self._call, ())))

    def backward(self, given: Sequence[Any], into: Sequence[Any], state: State | None) -> tuple[list[int], bytes]:
        """(plan, program) of its backward."""
        layer, rt = self.layer, self.layer.host.runtime(_alignment(into))
        grads = [t if t is None else _stand_in(OF_GRADIENT + i, t) for i, t in enumerate(given)]
        lows = self._lows | {OF_GRADIENT + i: t.ptr & 255 for i, t in enumerate(grads) if t is not None}
        call, wanted = narrowed(layer, self._call, self._given, into, rt)
        layer.scales(state)
        plain, spec, names = call.backward.function, call.spec, layer.named.gradients

        @wraps(plain)
        def backward(rt: Any, *arguments: Any, **options: Any) -> Any:
            found = dict(zip(names, plain(rt, *arguments, spec=spec, **options), strict=False))
            return tuple(_apart(rt, [found[name] for name in wanted]))

        arguments = *gradients_of_outputs(layer, self.outputs, grads), self._saved
        made = _Recorded(rt, f"{layer.name} backward", (backward, arguments, self._scales), lows)
        results = [(layer.names.index(name), t) for name, t in zip(wanted, made.result, strict=True)]
        with layer.lock:
            said_so = said(Example(rt, call, (), backward=True))
            made.added(layer.program, "backward", said_so, [f"grad.{name}" for name in wanted])
        return made.plan(results)


def narrowed(
    layer: Opened, call: Call, given: Sequence[Tensor | None], into: Sequence[Any], rt: Runtime
) -> tuple[Call, list[str]]:
    """(the call whose backward gives these gradients alone, and their names)."""
    wanted = [name for name, t in zip(layer.names, into, strict=False) if t is not None]
    if not set(wanted) <= call.asked.needs:
        others, do = ", ".join(sorted(set(wanted) - call.asked.needs)), "pass NULL for it, or name it in needs"
        allowed = ", ".join(name for name in layer.names if name in call.asked.needs) or "none"
        raise ArgumentError(f"{layer.name} backward", f"a gradient of {others}", allowed, do)
    if call.asked.needs == set(wanted):
        return call, wanted
    tensors = dict.fromkeys(layer.names) | dict(zip(layer.names, given, strict=False))
    return layer.asked(tensors, frozenset(wanted), rt), wanted


# ------------------------------------------------------------------------------------------------------- scaling


def update(rt: Runtime, groups: Sequence[tuple[str, list[ScalingState]]]) -> tuple[()]:
    """The next scales of states, by the rule of their recipe."""
    for algo, states in groups:
        ops.update_scales(rt, states, algo)
    return ()


def grouped(states: Sequence[tuple[Opened, Sequence[ScalingState]]]) -> list[tuple[str, list[ScalingState]]]:
    """Those of one rule together."""
    found: dict[str, list[ScalingState]] = {}
    for layer, parts in states:
        assert layer.precision is not None and layer.precision.history is not None
        found.setdefault(str(layer.precision.history.amax_algo), []).extend(parts)
    return list(found.items())


def _updated(host: Host, states: Sequence[State]) -> _Recorded:
    stood = [(s.layer, _states(s.states, STATES * i)) for i, s in enumerate(states)]
    return _Recorded(host.runtime(), "update", (update, (grouped(stood),), {}), {})


def record_update(host: Host, states: Sequence[State]) -> tuple[list[int], bytes]:
    """(plan, program) of the update of these; number 6 i + k is tensor k of state i."""
    return _updated(host, states).plan([])


def add_update(layer: Opened) -> None:
    """The update of a state of this layer joins what was recorded of it."""
    known = any(entry.name == "update" for entry in layer.program.entries)
    if layer.state is not None and layer.history and not known:
        _updated(layer.host, [layer.state]).added(layer.program, "update", '{"function": "update_scales"}')


def gradients_of_outputs(
    layer: Opened, outputs: Sequence[Tensor], given: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """As a layer's backward takes them."""
    right = len(given) <= len(outputs) and bool(given) and given[0] is not None
    if not right or not all(t is None or alike(y, t) for t, y in zip(given, outputs, strict=False)):
        allowed = f"gradients like the outputs {list(outputs)}; NULL behind the first for those that were not used"
        raise ArgumentError(f"{layer.name} backward", f"gradients {list(given)}", allowed, "correct them")
    return [*given, *[None] * (layer.named.results - len(given))]
