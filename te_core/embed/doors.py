"""The doors that C knocks at, by name: each takes words and gives (words, texts, a program's bytes)."""

from __future__ import annotations

import atexit
import ctypes
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from te_core import program
from te_core.calls import Call
from te_core.embed import recorded
from te_core.embed.layers import Host, Opened, State, alike, read
from te_core.errors import ArgumentError, UnsupportedError
from te_core.tape.program_file import pack
from te_core.tensor import CPU, Tensor

Answer = tuple[Any, ...]
_things: dict[int, Any] = {}  # what C has a number of, until it drops it
_numbers = itertools.count(1)
_closers: dict[int, None] = {}  # of each library in the process, what is told when the interpreter ends


def _number(thing: Any) -> int:
    number = next(_numbers)
    _things[number] = thing
    return number


@atexit.register
def _close() -> None:
    """The interpreter ends: nobody may call it any more, nor is memory given back to runtimes that have ended."""
    for address in _closers:
        ctypes.CFUNCTYPE(None)(address)()
    for host in [thing for thing in list(_things.values()) if isinstance(thing, Host)]:
        host.there = False


def _text(address: int) -> str | None:
    return ctypes.string_at(address).decode(errors="replace") if address else None


def _runtime(kind: int, index: int, stream: int, address: int, take: int, give: int, close: int, *_: int) -> Answer:
    _closers[close] = None
    return (_number(Host(kind, index, stream, address, take, give)),), ()


def _open(host: int, name: int, options: int, *_: int) -> Answer:
    layer = Opened(_things[host], _text(name) or "", _text(options))
    flags, texts = layer.slots()
    outputs = len(layer.named.layer.outputs)
    return (_number(layer), len(layer.names), outputs, layer.history, *flags), texts


def _scaling(layer: int, *_: int) -> Answer:
    state = State(_things[layer])
    addresses = [t.ptr for t in state.tensors()]
    return (_number(state), *(addresses or [0] * recorded.STATES)), ()


def _drop(number: int, *_: int) -> Answer:
    thing = _things.pop(number)
    if isinstance(thing, Host):
        thing.there = False  # garbage that is found later gives nothing back: the runtime has ended
    return (), ()


# ------------------------------------------------------------------------------------------------------- on the CPU


class Kept(NamedTuple):
    """A forward on the CPU, and what it has saved."""

    layer: Opened
    call: Call
    given: list[Tensor | None]
    outputs: tuple[Tensor, ...]
    saved: Any


def _put(layer: Opened, operation: str, named: list[tuple[str, Tensor | None, Any, Tensor | None]]) -> None:
    """Results into tensors of the caller's, all or none; memory for those that have none."""
    for name, value, place, t in named:
        if (value is None) != (place is None) or (value is not None and t is not None and not alike(value, t)):
            allowed = f"{value!r}, dense" if value is not None else "NULL: there is no such result"
            raise ArgumentError(operation, f"{name} = {t!r}", allowed, "correct the tensor")
    taken = []
    try:
        for _, value, place, _ in named:
            if place is not None and value is not None and not place.data and value.nbytes:
                taken.append((place, layer.host.take(value.nbytes, layer.host.stream)))
    except MemoryError:
        for _, address in taken:
            layer.host.give(address, layer.host.stream)
        raise
    for place, address in taken:
        place.data, place.byte_offset, place.device_type, place.device_id = address, 0, 1, 0
    for _, value, place, _ in named:
        if value is not None and value.nbytes:
            host = np.ascontiguousarray(value.numpy())
            ctypes.memmove(place.data + place.byte_offset, host.ctypes.data, value.nbytes)


def _forward(
    number: int, scaling: int, inputs: int, count: int, outputs: int, places: int, keep: int, *_: int
) -> Answer:
    layer: Opened = _things[number]
    rt = layer.host.runtime()
    given = read(inputs, count, CPU)[1]
    into, tensors = read(outputs, places, CPU)
    call, arguments = layer.call(given, bool(keep), rt)
    made = call.forward(rt, *arguments, **layer.scales(_things.get(scaling)))
    if len(made[0]) != places:
        got, do = f"{places} outputs", "pass as many"
        raise ArgumentError(layer.name, got, f"{len(made[0])}, which its options ask for", do)
    _put(layer, layer.name, list(zip(layer.named.layer.outputs, made[0], into, tensors, strict=False)))
    return (_number(Kept(layer, call, given, *made)) if keep else 0,), ()


def _backward(number: int, scaling: int, dy: int, count: int, gradients: int, places: int, *_: int) -> Answer:
    kept: Kept = _things[number]
    layer, rt = kept.layer, kept.layer.host.runtime()
    given = read(dy, count, CPU)[1]
    into, tensors = read(gradients, places, CPU)
    grads = recorded.gradients_of_outputs(layer, kept.outputs, given)
    call, wanted = recorded.narrowed(layer, kept.call, kept.given, into, rt)
    found = call.backward(rt, *grads, kept.saved, **layer.scales(_things.get(scaling)))
    by_name = dict(zip(layer.named.gradients, found, strict=False))
    results = [by_name[name] if name in wanted else None for name in layer.names]
    _put(layer, f"{layer.name} backward", list(zip(layer.names, results, into, tensors, strict=False)))
    return (), ()


def _states(addresses: int, count: int) -> list[State]:
    return [_things[n] for n in (ctypes.c_uint64 * count).from_address(addresses)]


def _update(host: int, scalings: int, count: int, *_: int) -> Answer:
    states = [(state.layer, state.states) for state in _states(scalings, count)]
    recorded.update(_things[host].runtime(), recorded.grouped(states))
    return (), ()


# --------------------------------------------------------------------------------------------------------- on a GPU


def _record(
    number: int, scaling: int, inputs: int, count: int, outputs: int, places: int, keep: int, *_: int
) -> Answer:
    layer: Opened = _things[number]
    device = layer.host.device
    given, into = read(inputs, count, device)[1], read(outputs, places, device)[1]
    call = recorded.Forward(layer, given, into, _things.get(scaling), bool(keep))
    return (_number(call), *call.plan), (), call.content


def _record_backward(number: int, scaling: int, dy: int, count: int, gradients: int, places: int, *_: int) -> Answer:
    call: recorded.Forward = _things[number]
    device = call.layer.host.device
    given, into = read(dy, count, device)[1], read(gradients, places, device)[1]
    plan, content = call.backward(given, into, _things.get(scaling))
    return (0, *plan), (), content


def _record_update(host: int, scalings: int, count: int, *_: int) -> Answer:
    plan, content = recorded.record_update(_things[host], _states(scalings, count))
    return (0, *plan), (), content


def _save(number: int, path: int, *_: int) -> Answer:
    layer: Opened = _things[number]
    if layer.host.device is CPU:
        do = "save a layer of a runtime on a GPU"
        raise UnsupportedError("te_layer_save", "a layer on the CPU", "layers on a GPU, whose calls are recorded", do)
    with layer.lock:
        if not layer.program.entries:
            raise ArgumentError("te_layer_save", "a layer that was not called", "layers with calls", "call te_forward")
        recorded.add_update(layer)
        content = pack(layer.program)
    program.write("te_layer_save", _text(path) or "", content)
    return (), ()


DOORS: dict[str, Callable[..., Answer]] = {
    "runtime": _runtime, "open": _open, "scaling": _scaling, "drop": _drop, "forward": _forward, "backward": _backward,
    "update": _update, "record": _record, "record_backward": _record_backward, "record_update": _record_update,
    "save": _save,
}  # fmt: skip
