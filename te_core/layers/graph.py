"""`Graph`: layers wired by the names of their values, run as one layer, forward and backward.

A node calls a layer as it is called alone, and nodes run in the order of the graph: same bits, maxima, draws, launches.
Memory lives as long as somebody will read it. A value goes when its last node has run. In backward, with `release`,
what a node saved goes when the node's backward has run. The gradients of a value that several nodes read are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import unwrap
from itertools import repeat
from math import prod
from types import CodeType
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.arguments import explained
from te_core.errors import UnsupportedError
from te_core.layers.communicator import Communicator, Groups, groups_of
from te_core.layers.linear import Sink
from te_core.ops import raw as ops
from te_core.quantize.operands import Value
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS, Scales
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor


class Functions(NamedTuple):
    """A layer's two functions, and whether its backward takes `release`."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    releases: bool = False


class View(NamedTuple):
    """An input whose last dimensions the node takes in another shape: `of` the value, and `to` what the node takes."""

    place: int
    of: tuple[int, ...]
    to: tuple[int, ...]


class Node(NamedTuple):
    """A layer of a graph."""

    layer: Any  # `Functions`, or an object with the same attributes
    spec: Any
    inputs: tuple[str, ...]  # the values that forward takes, in its order; "" is None
    outputs: tuple[str, ...]  # the values that forward gives, one for each gradient that backward takes; "": not read
    wanted: bool = True  # a gradient of some input is wanted
    products: int = 0  # how many of `ready` and of `sinks` are the node's
    rows: int = 0  # how many products' slots it has in a scaling state
    ranks: str = ""  # who shares its work: "tensor" (`Groups.tensor`), "context", or "" nobody
    views: tuple[View, ...] = ()
    states: int = 1  # how many scaling states are the node's, where nodes do not share one


@dataclass(frozen=True)
class Graph:
    """What is computed: nodes, each behind those whose values it reads, and the names of what goes in and comes out."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    #: Of each node the values that no later node reads.
    last: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)
    #: Of each node the values that it reads, by the layer's names for them: a saved field of such a name is that value.
    named: tuple[Mapping[str, str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known, reader = {"", *self.inputs}, {}
        for i, node in enumerate(self.nodes):
            missing = {*node.inputs} - known
            if missing:
                what = f"a node that reads {min(missing)!r}"
                raise UnsupportedError("Graph", what, "values made before", "reorder it")
            if _inspected(node.spec):
                raise UnsupportedError("Graph", "a node with an inspector", "others", "run the layers one by one")
            known.update(node.outputs)
            reader.update(dict.fromkeys(node.inputs + node.outputs, i))
        kept = {"", *self.inputs, *self.outputs}
        last: list[tuple[str, ...]] = [()] * len(self.nodes)
        for name, at in reader.items():
            if name not in kept:
                last[at] += (name,)
        object.__setattr__(self, "last", tuple(last))
        object.__setattr__(self, "named", tuple([dict(zip(_names(n), n.inputs, strict=False)) for n in self.nodes]))

    def shares(self, options: dict[str, Sequence[Any]]) -> Iterator[tuple[Node, dict[str, Any]]]:
        """Each node with its share of the scaling state, and of `options`, which have one entry for each product."""
        scales = options.pop("scales")
        product = row = state = 0
        for node in self.nodes:
            share = {
                name: tuple(each[product : product + node.products])
                for name, each in options.items()
                if node.products and each
            }
            if type(scales) is tuple:
                own = scales[state : state + node.states]
                of_node: Any = own if node.states > 1 and any(own) else next(iter(own), None)
            else:
                of_node = _slots(scales, row, node.rows)  # type: ignore[arg-type]
            yield node, {"spec": node.spec, "scales": of_node, **share}
            product, row, state = product + node.products, row + node.rows, state + node.states

    @cached_property
    def of_states(self) -> tuple[int, ...]:
        """Of each scaling state the number of the node that it belongs to."""
        return tuple([i for i, node in enumerate(self.nodes) for _ in range(node.states)])

    @cached_property
    def reach(self) -> tuple[frozenset[int], tuple[frozenset[int], ...]]:
        """(all nodes that have a backward, for each input those that its gradient goes through)."""
        each = []
        for name in self.inputs:
            behind, through = {name}, []
            for i, node in enumerate(self.nodes):
                if node.wanted and not behind.isdisjoint(node.inputs):
                    through.append(i)
                    behind |= {*node.outputs} - {""}
            each.append(frozenset(through))
        return frozenset().union(*each), tuple(each)

    def made(self, i: int, name: str) -> bool:
        """Whether the graph made the memory of this field of what node i saved: no caller's input stands there."""
        return self.named[i].get(name) not in self.inputs


@explained
def forward(
    rt: Runtime,
    *inputs: Value | None,
    spec: Graph,
    scales: Scales | tuple[Scales | None, ...] | None = None,
    ready: Sequence[QuantizedTensor | None] = (),
    comm: Communicator | Groups | None = None,
) -> tuple[tuple[Value, ...], tuple[Any, ...]]:
    """(outputs, what each node saved). `scales`: the state that all products share, or those of all nodes in a row
    (`Node.states`); `ready`: the products' weights quantized before."""
    values: dict[str, Any] = dict(zip(spec.inputs, inputs, strict=True)) | {"": None}
    leads = {name: t.shape[:-1] for name, t in values.items() if type(t) is Tensor}
    saved: list[Any] = []
    shares = enumerate(spec.shares({"scales": scales, "ready": ready}))  # type: ignore[dict-item]
    for (i, (node, options)), last in zip(shares, spec.last, strict=True):
        taken = [values[name] for name in node.inputs]
        for view in node.views:
            taken[view.place] = _viewed(taken[view.place], view.of, view.to)
        for name in last:
            values.pop(name, None)
        lead, matrix = leads.get(node.inputs[0], ()), type(taken[0]) is QuantizedTensor
        made, kept = unwrap(node.layer.forward)(rt, *taken, **options, **_ranks(node, comm))
        del taken
        for name, t in zip(node.outputs, made, strict=False):
            if name and name not in last:
                values[name] = _in_lead(t, lead) if matrix else t
                leads[name] = _scaled(t, lead) if type(t) is QuantizedTensor else values[name].shape[:-1]
        del made, t
        if node.wanted:
            # In the value's own shape: te_torch knows an input of the caller in no other one.
            kept = _shaped(node, kept, forth=False)
            fields = zip(kept._fields, kept, strict=True)
            kept = kept._make(_own(t) if spec.made(i, name) or _is_bytes(t) else t for name, t in fields)
        saved.append(kept if node.wanted else None)
        del kept
    return tuple(values[name] for name in spec.outputs), tuple(saved)


@explained
def backward(
    rt: Runtime,
    *grads_and_saved: Any,
    spec: Graph,
    scales: Scales | tuple[Scales | None, ...] | None = None,
    sinks: Sequence[Sink | None] = (),
    release: bool = False,
    comm: Communicator | Groups | None = None,
    nodes: Sequence[int] | None = None,
) -> tuple[Value | None, ...]:
    """The gradients of the inputs, from those of the outputs and from what forward saved. With `release` nobody will
    read `saved` again. `nodes`: only these run (`Graph.reach`)."""
    *grads, saved = grads_and_saved
    lead = next(g.shape[:-1] for g in grads if g is not None)
    sums = _Sums(rt, dict(zip(spec.outputs, grads, strict=True)))
    del grads, grads_and_saved
    shares = [*enumerate(spec.shares({"scales": scales, "sinks": sinks}))]  # type: ignore[dict-item]
    for (i, (node, options)), kept in zip(reversed(shares), reversed(saved), strict=True):
        taken = [sums.take(name) for name in node.outputs]
        if kept is None or taken[0] is None or (nodes is not None and i not in nodes):
            continue
        if node.layer.releases:
            options["release"] = release
        quantized = type(taken[0]) is QuantizedTensor
        kept = _shaped(node, kept, forth=True)
        made = [*unwrap(node.layer.backward)(rt, *taken, kept, **options, **_ranks(node, comm))]
        if release and not any(sink is not None and sink.queue is not None for sink in options.get("sinks", ())):
            for name, t in zip(kept._fields, kept, strict=True):
                if type(t) is Tensor and (spec.made(i, name) or _is_bytes(t)):
                    t.owner = None
        del taken
        if quantized and node.products:  # a matrix of tokens
            made[0] = _in_lead(made[0], lead)
        views = {view.place: view for view in node.views}
        for place, name in enumerate(node.inputs[: len(made)]):
            g, made[place] = made[place], None
            if name and g is not None:
                sums.add(name, _viewed(g, views[place].to, views[place].of) if place in views else g)
            del g
    return tuple(sums.take(name) for name in spec.inputs)


class _Sums:
    """Gradients by the names of their values."""

    def __init__(self, rt: Runtime, grads: dict[str, Any]) -> None:
        self.rt, self.grads = rt, grads
        self.given = {id(g.owner) for g in grads.values() if g is not None}

    def take(self, name: str) -> Any:
        """The gradient of a value, for the one who reads it."""
        return self.grads.pop(name, None)

    def add(self, name: str, g: Any) -> None:
        """One more part of a value's gradient; it is written into, where nobody else reads it."""
        before = self.grads.pop(name, None)
        if before is not None:
            others = {id(t.owner) for t in (before, *self.grads.values()) if t is not None} | self.given
            out = None if id(g.owner) in others else g.matrix()
            g = ops.add(self.rt, g.matrix(), before.matrix(), out=out).reshape(*g.shape)
        self.grads[name] = g


def _slots(scales: Scales | None, first: int, count: int) -> Scales | None:
    """What `count` products from the `first` one on have of a state."""
    if scales is None or not count:
        return None

    def part(t: Tensor | None, slots: int) -> Tensor | None:
        return None if t is None else t.rows(first * slots, (first + count) * slots)

    forward = scales.forward_scale, scales.forward_amax
    backward = scales.backward_scale, scales.backward_amax
    return Scales(*[part(t, FORWARD_SLOTS) for t in forward], *[part(t, BACKWARD_SLOTS) for t in backward])


def _ranks(node: Node, comm: Communicator | Groups | None) -> dict[str, Any]:
    return {"comm": getattr(groups_of(comm), node.ranks)} if node.ranks else {}


def _names(node: Node) -> tuple[str, ...]:
    """What the layer calls its inputs; from its code, for `signature` costs a new graph too much."""
    code: CodeType = unwrap(node.layer.forward).__code__
    return code.co_varnames[1 : code.co_argcount]


def _inspected(spec: Any) -> bool:
    """Whether somebody looks at what a layer of this spec computes."""
    within = [spec]
    for one in within:  # a loop, for a new shape makes a new graph: a call for each value would double its cost
        if getattr(one, "inspect", None) is not None:
            return True
        within += map(getattr, repeat(one), getattr(one, "__dataclass_fields__", ()), repeat(None))
    return False


def _is_bytes(t: Any) -> bool:
    """Whether it is a copy that a layer quantized of a caller's input, and saved under the input's name."""
    return type(t) is Tensor and t.dtype is dtypes.uint8


def _own(t: Any) -> Any:
    """A view of its own, which can be let go of: others may hold what it is a view of."""
    if type(t) is QuantizedTensor:
        t = t.block
    return t if type(t) is not Tensor else Tensor(t.ptr, t.shape, t.dtype, t.device, t.owner, t.strides)


def _viewed(t: Tensor, of: tuple[int, ...], to: tuple[int, ...]) -> Tensor:
    return t.reshape(*t.shape[: len(t.shape) - len(of)], *to)


def _shaped(node: Node, kept: Any, forth: bool) -> Any:
    """What a node saved, with inputs that it takes in another shape in the value's shape, or back (`forth`)."""
    for name, t in zip(kept._fields, kept, strict=True) if node.views else ():
        for view in node.views:
            of, to = (view.of, view.to) if forth else (view.to, view.of)
            if _names(node)[view.place] == name and type(t) is Tensor and t.shape[len(t.shape) - len(of) :] == of:
                kept = kept._replace(**{name: _viewed(t, of, to)})
    return kept


def _scaled(t: Any, lead: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of a matrix's tokens: over ranks it may have more rows, or fewer, than what it was made of."""
    return (lead[0] * t.shape[0] // max(prod(lead), 1), *lead[1:]) if lead else ()


def _in_lead(t: Any, lead: tuple[int, ...]) -> Any:
    """A matrix of tokens in their dimensions; anything else as it is."""
    if type(t) is not Tensor or len(t.shape) != 2 or len(lead) < 2:
        return t
    return t.reshape(*_scaled(t, lead), t.shape[-1])
