"""`Plan`: what a module decided in one call, for the calls that are like it.

A module's `_prepare` looks at everything: the region, its options, its parameters, who looks on. What it says of itself
(`Prepared`) depends on little, and `Plan.run` compares that: the precision and the modes that are on, the options of
the call, and a version that each change of an attribute advances. Tensors are collected anew in each call, by name:
parameters, or what stands in a parameter's place. Whether they are like those of a recorded call is for the call's
replays to say (te_torch/replays.py).

A plan holds no module that holds it: a model goes as soon as nobody else has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, getitem, itemgetter
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from te_torch.autocast import Now
from te_torch.calls import Call
from te_torch.draws import random_pair
from te_torch.function import Run, run_node
from te_torch.nonfinite import Counted
from te_torch.noting import Drawn, Noted, Of, noting
from te_torch.replays import Found
from te_torch.runtime import amp_dtype, outside_autocast, runtime_for

_grad_on, _inference_on = torch.is_grad_enabled, torch.is_inference_mode_enabled
_amp_on = torch._C._is_any_autocast_enabled
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_dtype_of = attrgetter("dtype")
_same_of = attrgetter("_number", "_recompute", "_wanted", "_amp_on", "_amp", "_options", "_shapes")
#: Source of a layer's input that a plan cannot collect.
UNKNOWN: Any = object()
_WANTS = repeat("requires_grad"), repeat(False)  # what `getattr` takes besides each object


class Join(NamedTuple):
    """Parameters that are joined: how they are chosen from a pool, and the dtype of each."""

    parts: Callable[[Any], tuple[Any, ...]]
    dtypes: list[torch.dtype]


class Part(NamedTuple):
    """A part of a module that runs as one: what its call depends on besides tensors."""

    unit: Any
    weights: Sequence[str] = ()  # whose `_extra` it is asked for, with this `is_first_microbatch`
    products: int = 0  # how many weights it has
    first_microbatch: Any = None


class Prepared(NamedTuple):
    """What a module decided for one call."""

    call: Any  # a `Call`; in traced code its key
    state: Any
    recompute: bool
    tensors: Sequence[torch.Tensor | None]  # the layer's inputs
    #: Of each of them where it comes from: the place of an input of the module, names of its parameters (several are
    #: joined), `Of`, `Drawn`, or None where there is none. Under torch.autocast what comes from there is converted.
    sources: Sequence[Any]
    extra: Any = None
    weights: Sequence[str] = ()  # whose `_extra` it is
    shaped: bool = False  # it depends on the shapes of the module's inputs
    last: Sequence[tuple[str, Any]] = ()  # what reports are told of it: attributes of the module
    parts: Sequence[Part] = ()  # of a graph: who has its states and its weights, one for each state


class Plan:
    """A call that was prepared once."""

    __slots__ = (
        "_amp", "_amp_on", "_casts", "_dicts", "_drawn", "_dtypes", "_joins", "_names", "_number", "_options", "_order",
        "_parts_ask", "_recompute", "_rule", "_samples", "_shapes", "_sources", "_units", "_version", "_wanted",
        "_weights", "call", "last",
    )  # fmt: skip

    def __init__(
        self, unit: Any, prepared: Prepared, inputs: Sequence[Any], options: tuple[Any, ...], now: Now
    ) -> None:
        self.call: Call = prepared.call
        self.last = (("_last", prepared.call), *prepared.last)
        self._version, self._options, self._weights = unit._version, options, prepared.weights
        self._parts_ask: Any = None  # of a graph: see `GraphPlan`
        self._number, self._recompute = now[0], now[1]
        self._amp_on = _amp_on()
        self._amp = amp_dtype(inputs[0].device.type) if self._amp_on else None
        self._rule = self._rules(unit, prepared)
        self._shapes, self._sources = shapes_of(inputs) if prepared.shaped else None, prepared.sources
        self._collect(unit, prepared, inputs)
        #: Of the input and the weights, where the weights may be quantized before it is known whether the call fits.
        self._dtypes = [prepared.tensors[i].dtype for i in (0, *self.call.weights)] if prepared.weights else []

    def _rules(self, unit: Any, prepared: Prepared) -> Any:
        """The rule that the module's state has to follow; None where there is no state."""
        return None if prepared.state is None else unit.fp8_state.precision

    def _collect(self, unit: Any, prepared: Prepared, inputs: Sequence[Any]) -> None:
        """How the layer's inputs are chosen from a pool: inputs, parameters, pairs, what was joined, nothing."""
        sources, tensors = prepared.sources, prepared.tensors
        named_by = [*map(_names_of, sources)]
        found = [(getattr(s, "unit", None), name) for s, names in zip(sources, named_by, strict=True) for name in names]
        #: Of each named tensor the part that has it (None: the module itself), and that part's parameters.
        self._units, self._names = tuple([part for part, _ in found]), tuple([name for _, name in found])
        self._dicts = tuple([(unit if part is None else part)._parameters for part in self._units])
        draws = [i for i, s in enumerate(sources) if isinstance(s, Drawn)]
        #: Pairs that stand for those to come until a call is known to fit: what does not run draws nothing.
        self._samples = [tensors[i] for i in draws]
        self._drawn = tuple((i, sources[i].fork) for i in sorted(draws, key=lambda i: sources[i].order))
        place, pairs = len(inputs), len(inputs) + len(found)
        joined = pairs + len(draws)
        order: list[int] = []
        self._joins: list[Join] = []
        for s, names in zip(sources, named_by, strict=True):
            if s is None:
                order.append(-1)
            elif isinstance(s, Drawn):
                order.append(pairs)
                pairs += 1
            elif not names:
                order.append(s)
            elif len(names) == 1:
                order.append(place)
            else:
                order.append(joined + len(self._joins))
                self._joins.append(Join(itemgetter(*range(place, place + len(names))), []))
            place += len(names)
        self._order = itemgetter(*order) if len(order) > 1 else lambda pool: (pool[order[0]],)
        pool = self._pool(unit, inputs)
        self._wanted = wanted(pool)
        casts: dict[int, torch.dtype] = {}
        for i, t in zip(order, tensors, strict=True):
            if t is None or t is pool[i]:
                continue
            join = self._joins[i - joined] if joined <= i < joined + len(self._joins) else None
            parts = (i,) if join is None else join.parts(range(len(pool)))
            casts |= {part: t.dtype for part in parts if pool[part].dtype != t.dtype}
            if join is not None:
                join.dtypes.extend(casts.get(part, pool[part].dtype) for part in parts)
        self._casts = tuple(casts.items())

    @classmethod
    def of(
        cls, unit: Any, prepared: Prepared, inputs: Sequence[Any], options: tuple[Any, ...], now: Now
    ) -> Plan | None:
        """The plan of this call; None where the next one has to look at everything again."""
        if unit._inspected or isinstance(prepared.state, Counted) or any([s is UNKNOWN for s in prepared.sources]):
            return None
        if hasattr(unit, "parametrizations"):  # each look at such a parameter computes it
            return None
        found = cls(unit, prepared, inputs, options, now)
        return found if found._amp is not None or not found._casts else None

    def same(self, other: Plan) -> bool:
        """Whether another one stands for the same calls: this one was of an older version, say."""
        return self.call is other.call and _same_of(self) == _same_of(other)

    def _pool(self, unit: Any, inputs: Sequence[Any]) -> list[Any]:
        """What the layer's inputs are chosen from: the module's inputs first, then the named ones; [None]: one is gone,
        of which the interpreted call says so."""
        try:
            named = [*map(getitem, self._dicts, self._names)]
        except KeyError:  # FSDP1 has views in the place of parameters, pruning a product, a program a buffer
            units = [unit if part is None else part for part in self._units]
            named = [getattr(part, name, None) for part, name in zip(units, self._names, strict=True)]
            if any(t is None for t in named):
                return [None]
        return [*inputs, *named, *self._samples, *self._joins, None]

    def run(self, unit: Any, inputs: Sequence[Any], options: tuple[Any, ...], now: Now) -> tuple[Any, ...] | None:
        """The layer's outputs, if this call is like the prepared one and like one that was recorded."""
        number, recompute, region, _, read = now
        if (
            number != self._number
            or unit._version != self._version
            or unit.__dict__.get("inspector") is not None  # debugging sets it past `__setattr__`, in each iteration
            or recompute is not self._recompute
            or _amp_on() is not self._amp_on
            or options != self._options
            or (self._shapes is not None and shapes_of(inputs) != self._shapes)
        ):
            return None
        pool = self._pool(unit, inputs)
        if pool[0].__class__ not in _PLAIN:
            return None
        # `wanted(pool)`, without a call of a function.
        if ([*map(getattr, pool, *_WANTS)] if _grad_on() else _inference_on()) != self._wanted:
            return None
        if (self._amp_on or self._joins) and not self._made(pool):
            return None
        state = scales = extra = None
        if self._rule is not None:
            state = self._state(unit, region, read, recompute)
            if state is None:
                return None
            scales = state.scales(recompute)
        call, tensors, rt = self.call, self._order(pool), runtime_for(pool[0])
        of_call = call.options
        if self._weights:
            weights, x = [*map(tensors.__getitem__, call.weights)], tensors[0]
            # An error that the interpreted call raises comes before it quantizes.
            if [*map(_dtype_of, (x, *weights))] != self._dtypes:
                return None
            if self._shapes is None and x.shape[-1:] != weights[0].shape[-1:]:
                return None
            ask = unit._extra if self._parts_ask is None else self._extra_of_parts
            extra = ask(self._weights, weights, number, state, recompute, options[0])
            if extra is not None:
                of_call = extra.with_options(of_call)
        for replay in call.forward.known:
            given = replay.fits(rt, tensors, scales, of_call, False)
            if given is not None:
                break
        else:
            return self._unknown(unit, state, tensors, extra)
        if replay is not call.forward.known[0]:
            call.forward.first(replay)
        if self._drawn:
            tensors = self._with_draws(tensors, given)
        if call.needs_grad:
            outputs: Any = run_node(Run(call, state, recompute, extra, unit._token, (rt, replay, given)), *tensors)
        elif forward_ad._current_level >= 0:
            return None
        else:
            outputs = replay.forward(rt, *given)[0]
        if noting.notes is not None:
            asked = self._weights, options[0] if self._weights else None
            noting.notes.calls.append(
                Noted(call, tensors, outputs, unit, self._sources, state, extra, recompute, *asked)
            )
        return outputs

    def _unknown(self, unit: Any, state: Any, tensors: tuple[Any, ...], extra: Any) -> tuple[Any, ...] | None:
        """The outputs of a call that is like the prepared one, but like none that was recorded."""
        return None

    def _state(self, unit: Any, region: Any, read: Any, recompute: bool) -> Any:
        """The scaling state as this call reads it; None if it follows another rule."""
        state = state_of(unit, self._rule, region)
        return state if read is None or state is None else read.of_state(state, recompute)

    def _made(self, pool: list[Any]) -> bool:
        """Convert what torch.autocast converts, and join what is joined; False if a dtype is another one now."""
        if self._amp_on:
            if amp_dtype(pool[0].device.type) is not self._amp:
                return False
            for place, dtype in self._casts:
                pool[place] = pool[place].to(dtype)
        for n, (choose, dtypes) in enumerate(self._joins):
            parts = choose(pool)
            if [t.dtype for t in parts] != dtypes:  # torch.cat would promote them
                return False
            with outside_autocast(pool[0]):
                pool[n - 1 - len(self._joins)] = torch.cat(parts)
        return True

    def _with_draws(self, tensors: tuple[Any, ...], found: Found | None) -> tuple[Any, ...]:
        """The layer's inputs with pairs that are drawn now, in the place of those that stood for them."""
        given = [*tensors]
        for i, fork in self._drawn:
            sample, pair = given[i], random_pair(given[0], fork)
            given[i] = pair
            if found is not None:
                at, held, _ = found
                place = next(n for n, t in enumerate(held) if t is sample)
                at[place], held[place] = pair.data_ptr(), pair
        return tuple(given)


def wanted(pool: Sequence[Any]) -> Any:
    """What autograd wants of a call on these tensors, by which a plan is chosen: in grad mode which of them want a
    gradient, quantized or not, else whether torch infers. Which layer a module runs depends on it (`needs` of a spec).
    """
    return [*map(getattr, pool, *_WANTS)] if _grad_on() else _inference_on()


def state_of(unit: Any, rule: Any, region: Any) -> Any:
    """A module's scaling state, which the region is told of; None if the state follows another rule."""
    state = unit._modules["fp8_state"]
    if state is None or state.precision is not rule or (unit._primary and unit._linked != state.layout):
        return None
    if region is not None and region.ran is not None:
        region.ran.states[state.token] = None
        state.__dict__["group"] = region.group
    return state


def shapes_of(inputs: Sequence[Any]) -> list[Any]:
    """The shapes of a module's inputs."""
    return [getattr(t, "shape", None) for t in inputs]


def _names_of(source: Any) -> tuple[str, ...]:
    """The names of the parameters that a source is made of."""
    if isinstance(source, str):
        return (source,)
    if isinstance(source, Of):
        return source.names
    return source if source.__class__ is tuple else ()
