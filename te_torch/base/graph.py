"""A module whose parts run as one layer of the core: one recording and one node of autograd.

The first call runs the parts one by one and notes what each of them ran. If all that the parts took came from the
module's inputs, its parameters, draws, and from calls before, these calls are a graph (te_core/layers/graph.py), which
does the same in one call: `composed`. Later calls run the graph as long as nothing of the parts changes (`GraphPlan`):
a hook, another module in a part's place, an inspector, a checkpoint or a hook on saved tensors, and the parts run by
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.nn.modules import module as hooks

from te_core.errors import UnsupportedError
from te_core.layers import graph as core
from te_core.layers.communicator import Groups
from te_core.layers.graph import Graph, Node, View
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch.autocast import Now, active
from te_torch.base.plans import Part, Plan, Prepared, state_of
from te_torch.calls import Layer, register
from te_torch.function import Extra, apply
from te_torch.noting import Noted, Notes, Of
from te_torch.replays import alike, chosen
from te_torch.reruns import in_backward, may_run_again
from te_torch.state import ScalingState, States

# ------------------------------------------------------------------------------------------------ the core's layer


def _forward(rt: Runtime, *inputs: Any, spec: Graph, scales: Any = None, **options: Any) -> Any:
    """The graph on its inputs; what its nodes save comes in a row."""
    scales = None if scales is None else (*scales,)
    outputs, saved = core.forward(rt, *inputs, spec=spec, scales=scales, **options)
    return outputs, tuple([t for part in saved if part is not None for t in part])


def _backward(
    rt: Runtime, dy: Tensor, row: Sequence[Any], *, spec: Graph, scales: Any = None, **options: Any
) -> tuple[Any, ...]:
    """The gradients, in the order of the inputs."""
    rest, saved = iter(row), []
    for node in spec.nodes:
        kind: Any = node.layer.saved
        saved.append(kind(*[next(rest) for _ in kind._fields]) if node.wanted else None)
    del row, rest
    scales = None if scales is None else (*scales,)
    return core.backward(rt, dy, tuple(saved), spec=spec, scales=scales, **options)


def _weights(spec: Graph) -> tuple[int, ...]:
    """Which inputs are the weights of the nodes' products, in their order."""
    return tuple(spec.inputs.index(node.inputs[i]) for node in spec.nodes for i in node.layer.weights)


GRAPH = Layer(
    "graph", _forward, _backward, lambda *saved: saved, weights=_weights, releases=True, reach=attrgetter("reach")
)


# ---------------------------------------------------------------------------------------------- what the parts ran


def composed(module: Any, inputs: Sequence[torch.Tensor], y: Any, notes: Notes) -> Prepared | None:
    """The module's call as one, if these calls of its parts are all that it did with its inputs; else None."""
    noted = notes.calls
    if len(noted) < 2 or not all(map(_is_node, noted)) or parts_of(module) is None:
        return None
    values = _Values(inputs, notes.sources)
    nodes = []
    for n in noted:
        node = values.node(n)
        if node is None:
            return None
        nodes.append(node)
    output = values.names.get(id(y))
    if output is None:
        return None
    try:
        spec = Graph(tuple(nodes), tuple(values.inputs), (output,))
    except UnsupportedError:
        return None
    states = [n.state for n in noted]
    state = None if all([s is None for s in states]) else States(states)
    comms: dict[str, Any] = {}
    for n, node in zip(noted, nodes, strict=True):
        comm = n.call.options.get("comm")
        if node.ranks and _groups(comms.setdefault(node.ranks, comm)) != _groups(comm):
            return None
    call = register(GRAPH, spec, any(n.call.needs_grad for n in noted), comm=Groups(**comms) if comms else None)
    tensors, of_inputs = zip(*values.inputs.values(), strict=True)
    parts = [Part(n.unit, n.weights, len(n.call.weights), n.first_microbatch) for n in noted]
    return Prepared(call, state, False, tensors, of_inputs, shaped=True, parts=parts)


def _groups(comm: Any) -> list[int]:
    """The groups of ranks that a layer works with."""
    return [id(one.group) for one in (comm if isinstance(comm, Sequence) else (comm,))]


def _is_node(noted: Noted) -> bool:
    """Whether a call can be one of several: nobody looks at it, and nothing of it is put off or done once more."""
    call, extra = noted.call, noted.extra
    return (
        not call.options.keys() - {"comm"}
        and hasattr(call.layer.saved, "_fields")
        and not noted.again
        and (extra is None or (extra.queue is None and extra.splits is None and bool(noted.weights)))
        and (noted.state is None or (isinstance(noted.state, ScalingState) and noted.unit is not None))
    )


class _Values:
    """The names of the tensors that calls read, and of those that come from outside of the calls what they are."""

    def __init__(self, inputs: Sequence[torch.Tensor], sources: dict[int, Any]) -> None:
        self.sources, self.made = sources, 0
        self.names: dict[int, str] = {}
        self.memory: dict[Any, torch.Tensor] = {}  # the same tensors by where they lie
        self.inputs: dict[str, tuple[torch.Tensor, Any]] = {}
        for place, t in enumerate(inputs):
            self._enters(t, place)

    def _enters(self, t: torch.Tensor, source: Any) -> str:
        name = f"i{len(self.inputs)}"
        self.inputs[name] = t, source
        self.memory[_where(t)] = t
        return self.names.setdefault(id(t), name)

    def node(self, noted: Noted) -> Node | None:
        """A call as a node; None if it read what nobody knows."""
        layer, places, views = noted.call.layer, [], []
        for i, t in enumerate(noted.inputs):
            name, view = ("", None) if t is None else self._find(t, i, noted)
            if name is None:
                return None
            places.append(name)
            if view is not None:
                views.append(View(i, *view))
        outputs = []
        for t in noted.outputs:
            self.made += 1
            self.names[id(t)] = f"v{self.made}"
            self.memory[_where(t)] = t
            outputs.append(f"v{self.made}")
        outputs += [""] * (layer.outputs - len(outputs))
        call, products = noted.call, len(noted.call.weights)
        ranks = "" if "comm" not in call.options else "tensor" if products else "context"
        names = tuple(places), tuple(outputs)
        return Node(layer, call.spec, *names, call.needs_grad, products, 0, ranks, tuple(views))

    def _find(self, t: torch.Tensor, place: int, noted: Noted) -> tuple[str | None, Any]:
        """(the value's name, in which other shape it is taken, if it is)."""
        source = noted.sources[place] if noted.sources else None
        names = (source,) if isinstance(source, str) else source
        name = self.names.get(id(t))
        if name is not None:
            before = self.inputs.get(name)
            # One parameter under two names may be two parameters in the next call.
            tied = before is not None and names.__class__ is tuple and before[1] != Of(noted.unit, names)
            return (None if tied else name), None
        if id(t) in self.sources:  # drawn, or a bias that a part returned
            source = self.sources[id(t)][1]
        elif names.__class__ is tuple:
            source = Of(noted.unit, names)
        else:
            there = self.memory.get(_where(t)) if t.is_contiguous() else None
            if there is None or not there.is_contiguous() or not _is_view(t, there):
                return None, None
            of, to = tuple(there.shape), tuple(t.shape)
            if of == to:
                return self.names[id(there)], None
            # What is another one in the two shapes, behind the dimensions in front that both have.
            same = next((i for i, (a, b) in enumerate(zip(of, to, strict=False)) if a != b), min(len(of), len(to)))
            return self.names[id(there)], (of[same:], to[same:])
        if isinstance(source, Of):
            known = source.unit._parameters.keys() | source.unit._buffers.keys()
            if not known.issuperset(source.names):  # a hook computes what stands in a parameter's place
                return None, None
        return self._enters(t, source), None


def _where(t: torch.Tensor) -> Any:
    return t.data_ptr(), t.dtype, t.numel()


def _is_view(t: torch.Tensor, of: torch.Tensor) -> bool:
    """Whether gradients of t are those of the other one, in another shape."""
    if not t.requires_grad:
        return not of.requires_grad or not torch.is_grad_enabled()
    node = t.grad_fn
    return node is not None and "View" in node.name() and node.next_functions[0][0] is of.grad_fn


def parts_of(module: Any) -> list[Any] | None:
    """The module's parts, itself left out; None if one of them is not as our own class was made."""
    found = [module]
    for one in found:
        found += one._modules.values() if one is not None else ()
    found = [p for p in dict.fromkeys(found[1:]) if p is not None and not isinstance(p, ScalingState)]
    for part in found:
        kind: Any = type(part)
        if not kind.__module__.startswith("te_torch.") or getattr(kind, "_as_made", None) != _calls_of(kind):
            return None
        if {"forward", "_compiled_call_impl"} & part.__dict__.keys():
            return None
    return found


def extra_of_parts(
    parts: Sequence[Part], weights: Sequence[torch.Tensor], number: int, state: States | None, recompute: bool
) -> Extra | None:
    """What the parts' calls depend on besides their tensors, in the order of all weights."""
    states = [None] * len(parts) if state is None else state.each
    ready: list[Any] = []
    parameters: list[Any] = []
    rest, known = iter(weights), None
    for (part, own, count, first_microbatch), state_of_part in zip(parts, states, strict=True):
        some = [next(rest) for _ in range(count)]
        extra = part._extra(own, some, number, state_of_part, recompute, first_microbatch) if own else None
        known = extra or known
        ready += [None] * count if extra is None or extra.ready is None else extra.ready
        parameters += some if extra is None else extra.parameters
    if known is None:
        return None
    of_all = None if all([one is None for one in ready]) else ready
    return Extra(of_all, known.fused, known.first_microbatch, None, parameters=parameters)


# ------------------------------------------------------------------------------------------------------ the plan

_version_of, _inspector_of = attrgetter("_version"), attrgetter("inspector")
_calls_of = attrgetter("forward", "__call__")
_OF_PARTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [getattr(hooks, f"_global{name}") for name in _OF_PARTS]
#: Gradients of one node arrive together. Of more bytes than these, the peak would rise where gradients are there before
#: them, or where a hook uses up each as it arrives.
_SMALL = 32 << 20


class GraphPlan(Plan):
    """The plan of a module that runs as one: nothing of its parts may have changed."""

    __slots__ = (
        "_alike", "_calls", "_hooks", "_inner", "_kinds", "_large", "_lasts", "_modules", "_there", "_versioned",
        "_versions", "_watched",
    )  # fmt: skip

    def __init__(
        self, unit: Any, prepared: Prepared, inputs: Sequence[Any], options: tuple[Any, ...], now: Now
    ) -> None:
        parts = parts_of(unit)
        assert parts is not None
        self._versioned, self._versions = parts, [*map(_version_of, parts)]
        self._kinds = [*dict.fromkeys(map(type, parts))]
        self._calls = [*map(_calls_of, self._kinds)]
        #: The dictionaries in which parts of parts stand, and all modules that stand there or in the module's own.
        there = set(parts)
        self._inner = [part._modules for part in parts if not there.isdisjoint(part._modules.values())]
        self._modules = [*unit._modules.values()]
        for inner in self._inner:
            self._modules += inner.values()
        self._hooks = [*_GLOBAL_HOOKS, *[getattr(part, name) for part in parts for name in _OF_PARTS]]
        self._watched = [part for part in parts if hasattr(part, "inspector")]
        with_plans = [part for part in parts if part._plans]
        self._lasts = [(part.__dict__, dict(part._plans[0].last)) for part in with_plans]
        super().__init__(unit, prepared, inputs, options, now)
        self.last = ()
        self._parts_ask = prepared.parts
        self._weights = [name for part in prepared.parts for name in part.weights]
        self._dtypes = [prepared.tensors[i].dtype for i in (0, *self.call.weights)]  # type: ignore[union-attr]
        pool = self._pool(unit, inputs)
        if not self._made(pool):  # weights of several dtypes were joined, of which `of` makes no plan
            return
        tensors = self._order(pool)
        self._there = chosen([i for i, t in enumerate(tensors) if t is not None])
        self._alike = alike(self._there(tensors))
        size = sum([t.numel() * t.element_size() for t in prepared.tensors[len(inputs) :] if t is not None])
        self._large = size > _SMALL

    @classmethod
    def of(
        cls, unit: Any, prepared: Prepared, inputs: Sequence[Any], options: tuple[Any, ...], now: Now
    ) -> Plan | None:
        """The plan of this call; None where hooks ran in it: they may have frozen or unfrozen what a part had read."""
        found = super().of(unit, prepared, inputs, options, now)
        return None if isinstance(found, GraphPlan) and any(found._hooks) else found

    def _rules(self, unit: Any, prepared: Prepared) -> Any:
        """The rule of each node's state."""
        state = prepared.state
        if state is None:
            return None
        return tuple((part.unit, s and s.precision) for part, s in zip(prepared.parts, state.each, strict=True))

    def run(self, unit: Any, inputs: Sequence[Any], options: tuple[Any, ...], now: Now) -> tuple[Any, ...] | None:
        """As any plan, if nothing of the parts has changed and nothing asks for them."""
        modules = [*unit._modules.values()]
        for inner in self._inner:
            modules += inner.values()
        if (
            len(modules) != len(self._modules)
            or not all(map(is_, modules, self._modules))
            or [*map(_version_of, self._versioned)] != self._versions
            or [*map(_calls_of, self._kinds)] != self._calls
            or any(map(_inspector_of, self._watched))
            or any(self._hooks)
            or active.running is not None
            or in_backward()
            or may_run_again()
            or (self._large and self._wants_parts(unit))
        ):
            return None
        outputs = Plan.run(self, unit, inputs, options, now)
        if outputs is not None:
            for attributes, last in self._lasts:
                attributes.update(last)
        return outputs

    def _unknown(self, unit: Any, state: Any, tensors: tuple[Any, ...], extra: Any) -> tuple[Any, ...] | None:
        if not self._alike(*self._there(tensors)):
            return None
        tensors = self._with_draws(tensors, None)
        return apply(self.call, state, False, *tensors, extra=extra, caller=unit._token)

    def _extra_of_parts(
        self, names: Any, weights: Sequence[Any], number: int, state: Any, recompute: bool, first: Any
    ) -> Extra | None:
        return extra_of_parts(self._parts_ask, weights, number, state, recompute)

    def _wants_parts(self, unit: Any) -> bool:
        """Whether gradients are there already, or are used up as they arrive (an optimizer inside of backward)."""
        named = self._pool(unit, ())[: len(self._names)]
        return any(p is None or (p.is_leaf and (p.grad is not None or p._post_accumulate_grad_hooks)) for p in named)

    def _state(self, unit: Any, region: Any, read: Any, recompute: bool) -> Any:
        states: list[Any] = []
        for part, rule in self._rule:
            state = None if rule is None else state_of(part, rule, region)
            if state is None and rule is not None:
                return None
            states.append(state)
        return States(states)
