"""Operations of a chain as one layer of the core: a graph, which is recorded once and replayed, behind one node of
autograd.

    norm, linear, activation, linear    one node, as in LayerNormMLP; also without the norm
    norm, linear                        one node, as in LayerNormLinear
    linear, activation, norm, ...       a node each; a bias belongs to the linear before it

`is_node` says which operations can be part of a graph. Operations of users, and operations that write into the caller's
memory, run by themselves; the operations between them are a `Stretch`. Where operations do not fit together (several
dtypes, say), the call runs them one by one.
"""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import torch

from te_core.layers import activation, l2_norm
from te_core.layers.graph import Graph, Node
from te_core.layers.mlp import MLPSpec
from te_core.layers.norm import NormSpec
from te_core.layers.norm_linear import NormLinearSpec
from te_core.layers.product import LinearSpec, Needs
from te_core.layers.residual import AddSpec, BranchNeeds
from te_core.ops.activation import is_gated
from te_torch import updates
from te_torch.autocast import Now, precision_now
from te_torch.base.graph import GRAPH, GraphPlan, extra_of_parts, parts_of
from te_torch.base.module import CallingModule
from te_torch.base.plans import Part, Prepared
from te_torch.base.residual import ADD
from te_torch.calls import Call, Layer, key_of, of_table, register
from te_torch.draws import random_pair
from te_torch.export import layers
from te_torch.function import Run, apply, backward_of, ran
from te_torch.likeness import of_token
from te_torch.modules.layernorm_linear import NORM_LINEAR
from te_torch.modules.layernorm_mlp import MLP
from te_torch.modules.linear import LINEAR
from te_torch.modules.norm import L2_NORM, NORM
from te_torch.noting import Drawn, Of
from te_torch.ops.basic.activations import _Activation
from te_torch.ops.basic.linear import BasicLinear
from te_torch.ops.basic.norms import L2Normalization, _ChainNorm
from te_torch.ops.basic.small import AddExtraInput, Bias, Dropout, Identity, MakeExtraOutput
from te_torch.ops.values import dense, is_quantized
from te_torch.precisions import draws, precision_of, recipe_of
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import FLOATS, TO_CORE, amp_cast, amp_dtype, constant_at_trace
from te_torch.state import States

ACTIVATION = of_table("activation", activation.ActivationSaved, plain=layers.activation)


class Begun(NamedTuple):
    """What is known of a call before its operations run."""

    entered: dict[int, Any]  # of each operation, by its id, what `_enter_chain` said
    number: int  # of the precision
    given: list[tuple[Any, ...]]  # of each operation the extra inputs that come from the caller
    first: int  # operation that backward comes to
    amp: torch.dtype | None  # of torch.autocast
    joined: bool = True  # a linear, an activation and a linear may be one node, which has two states

    @property
    def again(self) -> bool:
        """Whether a checkpoint runs the call once more."""
        return any(again for _, state, again in self.entered.values() if state is not None)


class ChainPlan(GraphPlan):
    """The plan of a chain, which has one node of autograd in any case."""

    __slots__ = ()

    def __init__(self, unit: Any, prepared: Prepared, inputs: Any, options: tuple[Any, ...], now: Now) -> None:
        super().__init__(unit, prepared, inputs, options, now)
        self.last, self._large = tuple(prepared.last), False
        self._lasts = [
            (op.__dict__, {name: getattr(op, name) for name in ("_quantizers", "_followed")})
            for op, *_ in prepared.parts
        ]


class Recorded(CallingModule):
    """A chain that runs as a graph where it can; else its operations run one by one."""

    _in_regions = _has_parts = True
    _plan_kind = ChainPlan
    ops: list[Any]
    sources: list[list[Any]]
    chain: Any  # a weak reference to the OperationFuser, so that a model goes at once; None of a stretch
    number: int  # by which traced code finds it
    wired: dict[str, Any]  # what it has noted of its nodes there
    fused: Any = None  # what is fused, where operations run one by one; users look at it

    def __init__(self, ops: list[Any], sources: list[list[Any]], chain: Any = None) -> None:
        super().__init__()
        self.__dict__.update(ops=ops, sources=sources, chain=chain and ref(chain))
        self._modules = {str(i): op for i, op in enumerate(ops)}
        # Of an operation by itself the chain is new in each call, and what it knows is not.
        self.__dict__.update(_calls=ops[0]._calls, number=self._token, _token=ops[0]._token)

    def _unplanned(self, inputs: tuple[Any, ...], options: tuple[Any, ...], now: Now) -> Any:
        chain = self.chain()
        begun = chain.begin(inputs)
        grad = torch.is_grad_enabled()
        made = self.as_graph(inputs, begun, grad, grad and inputs[0].requires_grad) if self.fused.whole else None
        if made is None:
            return chain.one_by_one(inputs, begun)
        how: Any = {"extra": made.extra, "caller": self._token}
        outputs = apply(made.call, made.state, made.recompute, *made.tensors, **how)
        if not made.recompute and parts_of(self) is not None:
            self._plan(made, inputs, options, now)
        return self._returned(outputs, inputs)

    def _traced(self, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        """The nodes one after another in traced code; None where the chain is no graph."""
        x = amp_cast(inputs[0]) if torch._C._is_any_autocast_enabled() else inputs[0]
        entered = [op._enter(x) if isinstance(op, BasicLinear) else (x, 0, None, False) for op in self.ops]
        numbers = tuple([number for _, number, _, _ in entered])
        joined = all([state is None for _, _, state, _ in entered])
        facts = tuple([(t.dtype, t.ndim, t.shape[-1] if t.ndim else 0, t.requires_grad) for t in (x, *inputs[1:])])
        how = amp_dtype(x.device.type), torch.is_grad_enabled(), joined, precision_now(self)[0]
        key = _trace_chain(self.number, numbers, how, facts)
        if not key:
            return None
        goes_in, nodes = self.wired[key]
        values: dict[str, Any] = {"": None}
        for value, place, name in goes_in:
            if name == "draws":
                values[value] = random_pair(x, self.ops[place]._fork)
            elif name == "input":
                values[value] = inputs[place] if place else x
            else:
                values[value] = _parameter(self.ops[place], name, x.dtype, numbers[place])
        y = None
        for call, places, value, place in nodes:
            _, _, state, again = entered[place] if place >= 0 else (x, 0, None, False)
            y = values[value] = apply(call, state, again, *[values[name] for name in places])[0]
        return y

    def wiring(self, inputs: tuple[Any, ...], begun: Begun, grad: bool, before: bool) -> _Wiring | None:
        """The nodes of such a call; None where operations run one by one."""
        rule = precision_of(begun.number)
        if rule is not None and rule.check_finite:
            return None
        try:
            return _Wiring(self.ops, self.sources, inputs, begun, grad, before)
        except _ApartError:
            return None

    def as_graph(self, inputs: tuple[Any, ...], begun: Begun, grad: bool, before: bool) -> Prepared | None:
        """The call as one of the graph layer's; None where operations run one by one. `grad`: gradients are wanted;
        `before`: that of the input, too."""
        wiring = self.wiring(inputs, begun, grad, before)
        if wiring is None:
            return None
        tensors, sources = zip(*wiring.inputs.values(), strict=True)
        spec = Graph(tuple(wiring.nodes), tuple(wiring.inputs), (wiring.value,))
        call: Any = self._find_call((spec, wiring.wanted[wiring.value]))
        state = States(wiring.states) if any(wiring.states) else None
        names = [name for part in wiring.parts for name in part.weights]
        extra = None
        if names:
            weights = [tensors[i] for i in call.weights]
            extra = extra_of_parts(wiring.parts, weights, begun.number, state, begun.again)
        more: Any = {"last": (("fused", self.fused),), "parts": wiring.parts}
        return Prepared(call, state, begun.again, tensors, sources, extra, names, **more)

    def _new_call(self, spec: Graph, needs_grad: bool) -> Call:
        return register(GRAPH, spec, needs_grad)


@constant_at_trace
def _trace_chain(token: int, numbers: tuple[int, ...], how: tuple[Any, ...], facts: tuple[Any, ...]) -> str:
    """The name of a chain's nodes for such inputs, by which they are noted with the chain; "": it is no graph."""
    recorded, (amp, grad, joined, number) = of_token(token), how
    ops, chain = recorded.ops, recorded.chain()
    if any(n < 2 for _, n, _, _ in facts):
        return ""
    inputs = [torch.empty((*[2] * (n - 1), width), dtype=dtype, device="meta") for dtype, n, width, _ in facts]
    for t, (*_, wanted) in zip(inputs, facts, strict=True):
        t.requires_grad_(wanted)
    chain.maybe_fuse_ops(0, recipe_of(number))
    entered = {id(op): (number, None, False) for op, number in zip(ops, numbers, strict=True)}
    wiring = None
    if recorded.fused.whole:
        wiring = recorded.wiring(
            tuple(inputs), Begun(entered, number, [], 0, amp, joined), grad, inputs[0].requires_grad
        )
    if wiring is None or any(part.weights for part in wiring.parts) or wiring.dtype != inputs[0].dtype:
        return ""
    goes_in = []
    for name, (_, source) in wiring.inputs.items():
        if isinstance(source, Of):
            goes_in.append((name, ops.index(source.unit), source.names[0]))
        elif isinstance(source, Drawn):
            goes_in.append((name, next(i for i, op in enumerate(ops) if op._fork is source.fork), "draws"))
        else:
            goes_in.append((name, source, "input"))
    nodes, units = [], iter([part.unit for part in wiring.parts])
    for node in wiring.nodes:
        unit = [next(units) for _ in range(node.products)]
        call = key_of(register(node.layer, node.spec, node.wanted))
        nodes.append((call, node.inputs, node.outputs[0], ops.index(unit[0]) if unit else -1))
    found = tuple(goes_in), tuple(nodes)
    key = repr(found)
    recorded.__dict__["wired"] = {**recorded.__dict__.get("wired", {}), key: found}
    return key


def _parameter(op: Any, name: str, dtype: torch.dtype, number: int) -> torch.Tensor:
    """A parameter in a graph's dtype, but for a norm's, and a weight that is quantized."""
    if isinstance(op, BasicLinear):
        return op._weight(name, dtype, number)
    t: torch.Tensor = op._tensor(name)
    return t.to(dtype) if isinstance(op, Bias) and t.dtype != dtype else t


def is_node(op: Any, public: list[bool]) -> bool:
    """Whether an operation can be part of a graph. `public`: of its extra outputs whether the caller gets them."""
    if not type(op).__module__.startswith("te_torch."):
        return False
    if isinstance(op, AddExtraInput | MakeExtraOutput):
        return not op._in_place and not any(public)
    if isinstance(op, BasicLinear):
        return op.tensor_parallel_mode is None
    if isinstance(op, _Activation):
        return op._in_core and not op.cache_quantized_input and op.glu_interleave_size is None
    return isinstance(op, Bias | Dropout | Identity | L2Normalization) or (
        isinstance(op, _ChainNorm) and len(op._shape) == 1
    )


class Stretch:
    """Operations that follow one another in a chain with others, as one: a graph where they fit together."""

    def __init__(self, ops: list[Any]) -> None:
        self.ops = ops
        self.recorded = Recorded(ops, [[None] * op.num_extra_inputs for op in ops])

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, begun, **given):
        """As a fused operation's."""
        ctx, grad = basic_op_ctxs[0], basic_op_ctxs[-1].requires_grad
        extra = [t for some in basic_op_extra_inputs for t in some]
        before = ctx.requires_grad and ctx.input_requires_grad
        made = self.recorded.as_graph((input_, *extra), begun, grad, before)
        ctx.run = None
        if made is None:
            return self._one_by_one(basic_op_ctxs, input_, basic_op_extra_inputs, given)
        ctx.run = Run(made.call, made.state, made.recompute, made.extra, self.recorded._token)
        ctx.sources, ctx.within = made.sources, updates.this_pass() if begun.again else -1
        (y,), saved = ran(ctx.run, made.tensors)
        ctx.save_for_backward(*saved)
        return y, [()] * len(self.ops)

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        """As a fused operation's."""
        ctx, run = basic_op_ctxs[0], basic_op_ctxs[0].run
        if run is None:
            return self._back_one_by_one(basic_op_ctxs, grad_output)
        node: Any = SimpleNamespace(run=run, saved_tensors=ctx.saved_tensors, inputs=len(ctx.sources))
        node.within, node.next_functions, node.maybe_clear_saved_tensors = ctx.within, (), lambda: None
        node.weights = None if run.extra is None else run.extra.parameters
        dy = grad_output if isinstance(grad_output, torch.Tensor) else dense(grad_output)
        found = dict(zip(ctx.sources, backward_of(node, dy)[1:], strict=True))
        # An operation that is there twice has one gradient.
        parameters = [
            tuple([found.pop(Of(op, (name,)), None) for name, p in op._parameters.items() if p is not None])
            for op in self.ops
        ]
        places = count(1)
        extra = [tuple([found.get(next(places)) for _ in range(op.num_extra_inputs)]) for op in self.ops]
        return found.get(0), parameters, extra

    def _one_by_one(self, contexts, x, extra, given):
        before, after = (given[f"{name}_quantizer"] for name in ("prev_op_grad_output", "next_op_input"))
        befores = [before, *[op.get_grad_output_quantizer() for op in self.ops[:-1]]]
        afters = [*[op.get_input_quantizer() for op in self.ops[1:]], after]
        for op, context, *more in zip(self.ops, contexts, extra, befores, afters, strict=True):
            names = "basic_op_extra_inputs", "prev_op_grad_output_quantizer", "next_op_input_quantizer"
            more[0] = [more[0]]
            x, _ = op.fuser_forward([context], x, basic_op_kwargs=[{}], **dict(zip(names, more, strict=True)))
        return x, [()] * len(self.ops)

    def _back_one_by_one(self, contexts, grad):
        parameters, extra = [None] * len(self.ops), [None] * len(self.ops)
        for i, (op, context) in reversed([*enumerate(zip(self.ops, contexts, strict=True))]):
            if not context.requires_grad:
                return None, parameters, extra
            grad, (parameters[i],), (extra[i],) = op.fuser_backward([context], grad, basic_op_grad_extra_outputs=[()])
        return grad, parameters, extra


class _ApartError(Exception):
    """The operations of this call do not make one graph."""


def _together(fits: Any) -> None:
    if not fits:
        raise _ApartError


class _Wiring:
    """The graph of one call of a chain: its nodes, and what goes in, each tensor with its source."""

    def __init__(
        self, ops: list[Any], sources: list[list[Any]], inputs: tuple[Any, ...], begun: Begun, grad: bool, before: bool
    ) -> None:
        x, *extra = inputs
        self.entered, self.grad, self.amp, self.joined = begun.entered, grad, begun.amp, begun.joined
        linears = [op for op in ops if isinstance(op, BasicLinear)]
        _together(not is_quantized(x) and x.ndim > 1 and x.dtype in FLOATS and len({*linears}) == len(linears))
        weights = [p for op in ops for p in op._parameters.values()]
        self.dtype = self.amp or (weights[0].dtype if weights else x.dtype)
        converts = isinstance(ops[0], BasicLinear | _ChainNorm)
        _together(x.dtype == self.dtype or self.amp is not None or converts)
        _together(self.amp is not None or all(p.dtype == self.dtype for p in weights))
        self.x = x if x.dtype == self.dtype else x.to(self.dtype)
        #: By the names of values: tensors that go in, with their sources; whether a gradient is wanted.
        self.inputs: dict[str, tuple[Any, Any]] = {}
        self.wanted = {"": False}
        self.names: dict[tuple[int, str], str] = {}
        self.value, self.width = self._enters(self.x, 0, before), x.shape[-1]
        self.nodes: list[Node] = []
        self.parts: list[Part] = []
        self.states: list[Any] = []
        self.made: dict[tuple[int, int], str] = {}  # extra outputs
        self.extra = iter([*enumerate(extra, 1)])
        self._wire(ops, sources)
        _together(self.nodes)

    def _wire(self, ops: list[Any], sources: list[list[Any]]) -> None:
        i = 0
        while i < len(ops):
            op, norm = ops[i], None
            if isinstance(op, _ChainNorm) and isinstance(next(iter(ops[i + 1 :]), None), BasicLinear):
                norm, i = op, i + 1
            first, after = _linear_at(ops, i)
            if first is not None:
                act = ops[after] if after < len(ops) and isinstance(ops[after], _Activation) else None
                second, end = _linear_at(ops, after + 1) if act is not None and self.joined else (None, after)
                if second is None:
                    self._products(norm, [first])
                    i = after
                else:
                    self._products(norm, [first, second], act)
                    i = end
                continue
            self._single(op, i, sources[i])
            i += 1

    # ------------------------------------------------------------------------------------------- what goes in

    def _enters(self, t: torch.Tensor, source: Any, wanted: bool) -> str:
        name = f"i{len(self.inputs)}"
        self.inputs[name] = t, source
        self.wanted[name] = self.grad and wanted
        return name

    def _parameter(self, op: Any, name: str) -> str:
        """A parameter's name in the graph."""
        known = self.names.get((id(op), name))
        if known is None:
            t = _parameter(op, name, self.dtype, self.entered[id(op)][0])
            # Of what it is converted from: in a forward of autograd's the other wants nothing.
            known = self.names[id(op), name] = self._enters(t, Of(op, (name,)), op._tensor(name).requires_grad)
        return known

    def _draws(self, fork: Any) -> str:
        return self._enters(random_pair(self.x, fork), Drawn(fork), False)

    def _node(self, layer: Layer, spec: Any, names: list[str], wanted: bool, width: int, products: int = 0) -> None:
        y = f"v{len(self.nodes)}"
        outputs = (y, *[""] * (layer.outputs - 1))
        node = Node(layer, spec, (self.value, *names), outputs, wanted, products, states=products)
        self.nodes.append(node)
        self.value, self.width, self.wanted[y] = y, width, wanted

    # ------------------------------------------------------------------------------------------ products

    def _products(self, norm: Any, linears: list[tuple[Any, Any]], act: Any = None) -> None:
        """A norm perhaps, a linear, and perhaps an activation and a second one, as one node."""
        of_norm, before = [], self.wanted[self.value]
        if norm is not None:
            of_norm = self._of_norm(norm)
            before = before or any([self.wanted[name] for name in of_norm])
        specs, names, drawn, wanted = [], list[str](), None, before
        for linear, bias in linears:
            self._check(linear, bias)
            w, b = self._parameter(linear, "weight"), "" if bias is None else self._parameter(bias, "bias")
            number, state, _ = self.entered[id(linear)]
            weight = self.inputs[w][0]
            needs = Needs(wanted, self.wanted[w], self.wanted[b])
            of_weight = TO_CORE[weight.dtype] if linear._primary else None
            rule = linear._precision(number, 0)
            specs.append(LinearSpec(TO_CORE[self.dtype], rule, needs, weight_dtype=of_weight))
            names += (w, b)
            drawn = drawn or (linear if number and draws(number) else None)
            self.parts.append(Part(linear, ("weight",) if linear._special else (), 1))
            self.states.append(state)
            wanted = any(needs)
            self.width = linear.local_out_features
            if act is not None and linear is linears[0][0]:
                self.width = self._activated(act)
        rng = "" if drawn is None else self._draws(drawn._fork)
        kind = None if norm is None else self._norm_spec(norm, before)
        if act is not None:
            spec: Any = MLPSpec(specs[0], specs[1], kind, act.kind, clamp=act._clamp)
            self._node(MLP, spec, [*(of_norm or ("", "")), *names, rng], wanted, self.width, 2)
        elif kind is not None:
            spec = NormLinearSpec(kind, specs[0])
            self._node(NORM_LINEAR, spec, [*of_norm, *names, rng], wanted, self.width, 1)
        else:
            self._node(LINEAR, specs[0], [*names, rng], wanted, self.width, 1)

    def _check(self, linear: Any, bias: Any) -> None:
        """A linear that fits, with a weight in the recipe's format if it is held quantized."""
        _together(linear.local_in_features == self.width)
        _together(bias is None or bias.local_size == linear.local_out_features)
        weight, rule = linear._tensor("weight"), precision_of(self.entered[id(linear)][0])
        if isinstance(weight, QuantizedTorch):
            held = None if weight._quantizer is None else weight._quantizer.operand
            asked = None if rule is None else rule.weight
            _together(held and asked and (held.scaling, held.format) == (asked.scaling, asked.format))
        _together(not linear._special or hasattr(weight, "main_grad") or hasattr(weight, "get_main_grad"))
        _together(not self.parts or bool(self.parts[0].weights) is linear._special)

    # ------------------------------------------------------------------------------------------- the others

    def _of_norm(self, norm: Any) -> list[str]:
        _together(tuple(norm._shape) == (self.width,))
        return [self._parameter(norm, name) if name in norm._parameters else "" for name in ("weight", "bias")]

    def _norm_spec(self, norm: Any, wanted: bool) -> NormSpec:
        margins = norm._margins["forward" if wanted else "inference"], norm._margins["backward"]
        return NormSpec(TO_CORE[self.dtype], norm.kind, float(norm.eps), norm.zero_centered_gamma, *margins)

    def _activated(self, act: Any) -> int:
        """The width behind an activation."""
        gated = is_gated(act.kind)
        _together(not gated or self.width % 2 == 0)
        return self.width // 2 if gated else self.width

    def _single(self, op: Any, i: int, sources: list[Any]) -> None:
        """An operation that is a node by itself, or none at all."""
        before = self.wanted[self.value]
        if isinstance(op, _ChainNorm):
            names = self._of_norm(op)
            wanted = before or any([self.wanted[name] for name in names])
            self._node(NORM, self._norm_spec(op, wanted), names, wanted, self.width)
        elif isinstance(op, _Activation):
            spec = activation.ActivationLayerSpec(op.kind, op._clamp)
            self._node(ACTIVATION, spec, [], before, self._activated(op))
        elif isinstance(op, L2Normalization):
            self._node(L2_NORM, l2_norm.L2NormSpec(float(op.eps)), [], before, self.width)
        elif isinstance(op, Bias):
            _together(op.local_size == self.width)
            self._added(0.0, [self._parameter(op, "bias"), "", ""])
        elif isinstance(op, AddExtraInput):
            (source,) = sources
            if source is None:
                place, t = next(self.extra)
                shape = (*self.x.shape[:-1], self.width)
                _together(not is_quantized(t) and t.dtype == self.dtype and tuple(t.shape) == shape)
                other = self._enters(t, place, t.requires_grad)
            else:
                other = self.made[source]
            self._added(0.0, ["", other, ""])
        elif isinstance(op, MakeExtraOutput):
            self.made[i, 0] = self.value
        elif isinstance(op, Dropout):
            if op.training and op.dropout_probability:
                self._added(float(op.dropout_probability), ["", "", self._draws(None)])

    def _added(self, p: float, names: list[str]) -> None:
        needs = BranchNeeds(*[self.wanted[name] for name in (self.value, *names[:2])])
        self._node(ADD, AddSpec(p, needs), names, any(needs), self.width)


def _linear_at(ops: list[Any], i: int) -> tuple[tuple[Any, Any] | None, int]:
    """((the linear that stands here, its bias or None), what follows); None if none does."""
    if i >= len(ops) or not isinstance(ops[i], BasicLinear):
        return None, i
    bias = ops[i + 1] if i + 1 < len(ops) and isinstance(ops[i + 1], Bias) else None
    return (ops[i], bias), i + 1 + (bias is not None)
