"""A module whose parts run as one layer of the core: one recording and one node of autograd.

The first call runs the parts one by one and notes what each of them ran. If all that the parts took came from the
module's inputs, its parameters, draws, and from calls before, these calls are a graph (te_core/layers/graph.py), which
does the same in one call: `composed`. Later calls run the graph as long as nothing of the parts changes (`GraphPlan`):
a hook, another module in a part's place, an inspector, a checkpoint or a hook on saved tensors, and the parts run by
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch.nn.modules import module as hooks

from te_core.errors import UnsupportedError
from te_core.layers import graph as core
from te_core.layers.graph import Graph, Node, View
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch.autocast import Now, active
from te_torch.base.plans import Plan, Prepared, state_of
from te_torch.calls import Layer, register
from te_torch.function import apply
from te_torch.noting import Noted, Notes, Of
from te_torch.replays import alike
from te_torch.reruns import in_backward, may_run_again
from te_torch.state import ScalingState, States

# ------------------------------------------------------------------------------------------------ the core's layer


def _forward(rt: Runtime, *inputs: Any, spec: Graph, scales: Sequence[Any] | None = None) -> Any:
    """The graph on its inputs; what its nodes save comes in a row."""
    outputs, saved = core.forward(rt, *inputs, spec=spec, scales=None if scales is None else (*scales,))
    return outputs, tuple([t for part in saved if part is not None for t in part])


def _backward(
    rt: Runtime, dy: Tensor, row: Sequence[Any], *, spec: Graph, scales: Any = None, release: bool = False
) -> tuple[Any, ...]:
    """The gradients, in the order of the inputs."""
    rest, saved = iter(row), []
    for node in spec.nodes:
        kind: Any = node.layer.saved
        saved.append(kind(*[next(rest) for _ in kind._fields]) if node.wanted else None)
    del row, rest
    scales = None if scales is None else (*scales,)
    return core.backward(rt, dy, tuple(saved), spec=spec, scales=scales, release=release)


GRAPH = Layer("graph", _forward, _backward, lambda *saved: saved, releases=True)


# ---------------------------------------------------------------------------------------------- what the parts ran


def composed(module: Any, inputs: Sequence[torch.Tensor], y: Any, notes: Notes) -> Prepared | None:
    """The module's call as one, if these calls of its parts are all that it did with its inputs; else None."""
    noted = notes.calls
    if len(noted) < 2 or not all(map(is_plain, noted)) or parts_of(module) is None:
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
    state = None if all(s is None for s in states) else States(states)
    call = register(GRAPH, spec, any(n.call.needs_grad for n in noted))
    tensors, of_inputs = zip(*values.inputs.values(), strict=True)
    return Prepared(call, state, False, tensors, of_inputs, shaped=True, units=[n.unit for n in noted])


def is_plain(noted: Noted) -> bool:
    """Whether a call depends on nothing besides its tensors and its state: on no ranks, inspectors, sinks."""
    by_itself = not noted.call.options and noted.plain and hasattr(noted.call.layer.saved, "_fields")
    return by_itself and (noted.state is None or (isinstance(noted.state, ScalingState) and noted.unit is not None))


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
        return Node(layer, noted.call.spec, tuple(places), tuple(outputs), noted.call.needs_grad, views=tuple(views))

    def _find(self, t: torch.Tensor, place: int, noted: Noted) -> tuple[str | None, Any]:
        """(the value's name, in which other shape it is taken, if it is)."""
        name = self.names.get(id(t))
        if name is not None:
            return name, None
        source = noted.sources[place] if noted.sources else None
        names = (source,) if isinstance(source, str) else source
        if id(t) in self.sources:  # drawn, or a bias that a part returned
            source = self.sources[id(t)][1]
        elif names.__class__ is tuple:
            source = Of(noted.unit, names)
        else:
            before = self.memory.get(_where(t)) if t.is_contiguous() else None
            if before is None or not _is_view(t, before):
                return None, None
            shapes = _shapes(tuple(before.shape), tuple(t.shape))
            return self.names[id(before)], shapes if shapes[0] != shapes[1] else None
        if isinstance(source, Of) and not all(name in source.unit._parameters for name in source.names):
            return None, None  # something stands in a parameter's place
        return self._enters(t, source), None


def _where(t: torch.Tensor) -> Any:
    return t.data_ptr(), t.dtype, t.numel()


def _is_view(t: torch.Tensor, of: torch.Tensor) -> bool:
    """Whether gradients of t are those of the other one, in another shape."""
    if not t.requires_grad:
        return not of.requires_grad or not torch.is_grad_enabled()
    node = t.grad_fn
    return node is not None and "View" in node.name() and node.next_functions[0][0] is of.grad_fn


def _shapes(of: tuple[int, ...], to: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is another one in two shapes, behind the dimensions in front that both have."""
    same = next((i for i, (a, b) in enumerate(zip(of, to, strict=False)) if a != b), min(len(of), len(to)))
    return of[same:], to[same:]


def parts_of(module: Any) -> list[Any] | None:
    """The module's parts, itself left out; None if one of them is not as our own class has it."""
    found = [part for part in module.modules() if part is not module and not isinstance(part, ScalingState)]
    for part in found:
        kind = type(part)
        if not kind.__module__.startswith("te_torch.") or {"forward", "_compiled_call_impl"} & part.__dict__.keys():
            return None
    return found


# ------------------------------------------------------------------------------------------------------ the plan

_GLOBAL_HOOKS = (
    hooks._global_forward_hooks,
    hooks._global_forward_pre_hooks,
    hooks._global_backward_hooks,
    hooks._global_backward_pre_hooks,
)
_OF_PARTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Gradients of one node arrive together. Of more bytes than these, the peak would rise where gradients are there before
#: them, or where a hook uses up each as it arrives.
_SMALL = 32 << 20


class GraphPlan(Plan):
    """The plan of a module that runs as one: nothing of its parts may have changed."""

    __slots__ = ("_alike", "_dicts", "_hooks", "_inner", "_large", "_lasts", "_own", "_parts", "_versions", "_watched")

    def __init__(
        self, unit: Any, prepared: Prepared, inputs: Sequence[Any], options: tuple[Any, ...], now: Now
    ) -> None:
        parts = parts_of(unit)
        assert parts is not None
        self._parts, self._versions = parts, [part._version for part in parts if hasattr(part, "_version")]
        #: The parts of parts, in the dictionaries where they stand. (The module's own would hold the module.)
        blocks = [part for part in parts if any(child in parts for child in part.children())]
        self._own, self._inner = (*unit._modules.values(),), [(b._modules, (*b._modules.values(),)) for b in blocks]
        self._hooks = [*_GLOBAL_HOOKS, *[getattr(part, name) for part in parts for name in _OF_PARTS]]
        self._watched = [part for part in parts if hasattr(part, "inspector")]
        with_plans = [part for part in parts if getattr(part, "_plans", ())]
        self._lasts = [(part.__dict__, dict(part._plans[0].last)) for part in with_plans]
        super().__init__(unit, prepared, inputs, options, now)
        self.last = ()
        pool = self._pool(unit, inputs)
        self._made(pool)
        self._alike = alike([*filter(_is_there, self._order(pool))])
        size = sum(t.numel() * t.element_size() for t in prepared.tensors[len(inputs) :] if t is not None)
        self._large = size > _SMALL

    def _rules(self, unit: Any, prepared: Prepared) -> Any:
        """The rule of each node's state."""
        state = prepared.state
        if state is None:
            return None
        return tuple((part, s and s.precision) for part, s in zip(prepared.units, state.each, strict=True))

    def _found(self, names: list[Any], unit: Any) -> tuple[Any, ...]:
        self._elsewhere = False
        self._dicts = tuple(part._parameters for part, _ in names)
        return tuple(name for _, name in names)

    def _pool(self, unit: Any, inputs: Sequence[Any]) -> list[Any]:
        return [*inputs, *map(dict.get, self._dicts, self._names), *self._samples, *self._joins, None]

    def run(self, unit: Any, inputs: Sequence[Any], options: tuple[Any, ...], now: Now) -> tuple[Any, ...] | None:
        """As any plan, if nothing of the parts has changed and nothing asks for them."""
        own = unit._modules.values()
        if (
            len(own) != len(self._own)
            or not all(map(is_, own, self._own))
            or not all([len(d) == len(each) and all(map(is_, d.values(), each)) for d, each in self._inner])
            or [part._version for part in self._parts if hasattr(part, "_version")] != self._versions
            or any([part.inspector for part in self._watched])
            or any(self._hooks)
            or active.running is not None
            or in_backward()
            or may_run_again()
            or (self._large and self._wants_parts())
        ):
            return None
        outputs = Plan.run(self, unit, inputs, options, now)
        if outputs is not None:
            for attributes, last in self._lasts:
                attributes.update(last)
        return outputs

    def _unknown(self, unit: Any, state: Any, tensors: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self._alike(*filter(_is_there, tensors)):
            return None
        return apply(self.call, state, False, *self._with_draws(tensors, None), caller=unit._token)

    def _wants_parts(self) -> bool:
        """Whether gradients are there already, or are used up as they arrive (an optimizer inside of backward)."""
        parameters = [p for p in map(dict.get, self._dicts, self._names) if p is not None]
        return any(p.grad is not None or p._post_accumulate_grad_hooks for p in parameters)

    def _state(self, unit: Any, region: Any, read: Any, recompute: bool) -> Any:
        states: list[Any] = []
        for part, rule in self._rule:
            state = None if rule is None else state_of(part, rule, region)
            if state is None and rule is not None:
                return None
            states.append(state)
        return States(states)


def _is_there(t: torch.Tensor | None) -> bool:
    return t is not None
