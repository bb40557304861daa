"""Layers of the core, and calls of them: made once, run often, and named for compiled programs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import unwrap
from typing import Any, NamedTuple

import torch

from te_core.layers.linear import LinearSpec
from te_core.layers.table import LAYERS
from te_core.quantize.state import GRAD_INPUT, GRAD_OUTPUT, INPUT, OUTPUT
from te_core.tape.taped import Taped
from te_torch.doors import door
from te_torch.export.mode import exporting
from te_torch.program_names import name_of_program, not_written, read, unknown, written
from te_torch.replays import Replayed
from te_torch.runtime import constant_at_trace

#: Layers by name, for programs of other processes. Of a family there is one for each number.
_layers: dict[str, Layer] = {}
named = _layers.get  # the layer of this name, if it is made already
families: dict[str, Callable[[int], Layer]] = {}


class Slots(NamedTuple):
    """Where scales are, in a layer's state, of what other layers give it quantized, and of what it gives: columns."""

    inputs: int  # how many of the first inputs may come quantized
    input: int  # their scale, and that of their gradient
    grad_input: int
    output: int  # that of the first output, and of its gradient
    grad_output: int


#: Of a linear; of one behind a norm, which takes no quantized input.
OF_LINEAR = Slots(1, INPUT, GRAD_INPUT, OUTPUT, GRAD_OUTPUT)
OF_NORM_LINEAR = OF_LINEAR._replace(inputs=0)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of the core: its two functions, the tuple it saves, and what its outputs are."""

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    saved: Callable[..., Any]
    outputs: int = 1  # at most; backward takes as many gradients
    weight: str = "weight"  # the saved tensor whose rows are the width of the first output
    weights: Any = ()  # which inputs are the weights of its GEMMs; of a graph, a function of its spec
    releases: bool = False  # its backward takes `release`
    recomputes: bool = False  # its backward takes `ready`
    twins: tuple[int, int] | None = None  # two inputs that may have one gradient
    strided: bool = False  # takes inputs of any strides whose last one is 1; otherwise they are made contiguous
    partial: bool = False  # its backward takes None for the gradient of an output that nobody used
    differentiable: int | None = None  # so many of its outputs have gradients, the first ones; None: all
    copies: Callable[[Any], Sequence[Any]] = lambda saved: ()  # what of the saved was made of weights
    linears: Callable[[Any], tuple[LinearSpec, ...]] = lambda spec: ()  # the specs of its linears, one a weight
    plain: Callable[..., Any] | None = None  # its forward in torch's operators, for exporters (te_torch/export)
    slots: Slots | None = None  # of what comes and goes quantized
    entry: str = ""  # its name in the core's table
    #: Of a graph, by its spec: (all nodes that have a backward, for each input those through which its gradient goes).
    #: Where fewer than all are asked for, its backward takes `nodes`.
    reach: Callable[[Any], tuple[frozenset[int], Sequence[frozenset[int]]]] | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):  # modules have checked what they pass: it need not be explained
            object.__setattr__(self, name, unwrap(getattr(self, name)))
        _layers[self.name] = self


def of_table(entry: str, saved: Callable[..., Any], *, name: str = "", **more: Any) -> Layer:
    """A layer with what the core's table says of it; `name` is that of its programs, if it is another one."""
    core = LAYERS[entry]
    places = {argument.name: place for place, argument in enumerate(core.arguments)}
    known: dict[str, Any] = {
        "entry": entry,
        "outputs": len(core.outputs),
        "weights": tuple(places[product] for product in core.products),
        "releases": core.releases,
        "strided": core.arguments[0].strided,
    }
    return Layer(name or entry, core.forward, core.backward, saved, **known | more)


@dataclass(eq=False)
class Call:
    """A layer with its spec: what one module does in one precision. Made once, then shared by all its calls."""

    layer: Layer
    spec: Any
    needs_grad: bool
    options: dict[str, Any]  # further keyword arguments of the layer's functions
    weights: tuple[int, ...] = field(init=False, repr=False)  # `Layer.weights` of this spec
    forward: Replayed = field(init=False, repr=False)  # the layer's functions with this spec, as they are called
    backward: Replayed = field(init=False, repr=False)
    #: Of its operators (te_torch/operators.py), known since their shapes were worked out. Per key, plan of copies and
    #: carried inputs, where each saved tensor comes from: input i is i, output i is -2 - i (kept copies of weights come
    #: behind the outputs), neither is -1; None if absent. And which input gradients backward returns.
    origins: dict[tuple[str, str, str], tuple[int | None, ...]] = field(default_factory=dict, init=False, repr=False)
    gives: tuple[bool, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        weights = self.layer.weights
        self.weights = weights(self.spec) if callable(weights) else weights
        self.forward, self.backward = (
            Replayed(Taped(f"{self.layer.name} {name}", getattr(self.layer, name), self.spec))
            for name in ("forward", "backward")
        )


# Calls live as long as a module has them, those of compiled programs for good.
_by_spec: weakref.WeakValueDictionary[Any, Call] = weakref.WeakValueDictionary()
_of_programs: dict[str, Call] = {}


def register(
    layer: Layer, spec: Any, needs_grad: bool, inspectors: Sequence[Any] | None = None, comm: Any = None
) -> Call:
    """The call of this spec; modules that do the same share one, unless inspectors tell them apart, or ranks that they
    are spread over."""
    options = {name: value for name, value in (("comm", comm), ("inspectors", inspectors)) if value is not None}
    if options:
        return Call(layer, spec, needs_grad, options)
    identity = (layer.name, spec, needs_grad)
    found = _by_spec.get(identity)
    if found is None:
        found = _by_spec[identity] = Call(layer, spec, needs_grad, {})
    return found


def key_of(call: Call) -> str:
    """The name by which a program calls it, which it may do for good: a digest, or all there is to say where the
    program is exported, to other processes."""
    if torch.compiler.is_exporting() and not exporting.on:
        if call.options:
            raise not_written("an inspector")
        key = f"{call.layer.name} {written((call.spec, call.needs_grad))}"
        _of_programs.setdefault(key, call)
        return key
    name = name_of_program(call.layer.name, (call.spec, call.needs_grad), shared=not call.options)
    key, others = name, itertools.count(1)
    while _of_programs.setdefault(key, call) is not call:  # another one that reads the same, such as one inspected
        key = f"{name}-{next(others)}"
    return key


def made_of_constants(make: Callable[..., Call]) -> Callable[..., Any]:
    """`make`, which makes a call of constants: eager code gets what it made for these, traced code the call's key."""
    kept = lru_cache(maxsize=512)(make)
    return door(kept, constant_at_trace(lambda *constants: key_of(kept(*constants))))


def call_of(key: str) -> Call:
    """The call of this name, in a program; of one that another process exported, its name says all there is."""
    found = _of_programs.get(key)
    if found is not None:
        return found
    name, _, text = key.partition(" ")
    layer, (family, _, number) = _layers.get(name), name.rpartition("_")
    if layer is None and family in families and number.isdecimal():
        layer = families[family](int(number))
    if layer is None or not text:
        raise unknown(key)
    spec, needs_grad = read(text)
    return _of_programs.setdefault(key, register(layer, spec, needs_grad))


def complete(
    layer: Layer, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor | None], call: Call | None = None
) -> list[Any]:
    """A gradient for each output the layer can have; the first as zeros if only another output was used."""
    first, rest = grads[0], grads[1:]
    if first is not None and layer.outputs == 1:
        return [first]
    if layer.partial:
        return [*grads, *[None] * (layer.outputs - len(grads))]
    if first is None:
        weight = getattr(layer.saved(*saved), layer.weight)
        which, other = next((i, g) for i, g in enumerate(rest) if g is not None)
        leading = other.shape[:-1]
        if call is not None and "comm" in call.options:
            leading = _leading_of_first(call, tuple(leading), which)
        first = other.new_zeros(*leading, weight.shape[0])
    return [first, *rest, *[None] * (layer.outputs - 1 - len(rest))]


def _leading_of_first(call: Call, leading: tuple[int, ...], which: int) -> Any:
    """The leading dimensions of a spread layer's first output, given those of another one: the norm's output, or the
    stream. With sequence parallelism each has all rows or this rank's."""
    last = call.layer.linears(call.spec)[-1].parallel
    if last is None or not last.sequence:
        return leading
    whole = call.spec.gather_norm and which == 0
    if whole == (last.mode == "column"):
        return leading
    rows, *rest = leading
    return (rows // last.size if whole else rows * last.size, *rest)
