"""A `TransformerLayer` as one layer of the core: one recording and one node of autograd.

The first call runs the parts one by one and notes what each of them ran. If these calls are those of a plain layer,
each reading what the one before gave, the core's composed layer (te_core/layers/transformer.py) has the parts' own
specs and does the same in one call: `composed`. Later calls run it as long as nothing of the parts changes
(`LayerPlan`): a hook, another module in any place, another `forward` of a part's class, an inspector, a checkpoint or a
hook on saved tensors, and the parts run by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.nn.modules import module as hooks

from te_core.errors import UnsupportedError
from te_core.layers import transformer as core
from te_core.layers.attention import AttentionInputs, AttentionSaved
from te_core.layers.linear import LinearSaved
from te_core.layers.mlp import MLPSaved
from te_core.layers.multihead import (
    Angles,
    MultiheadDraws,
    MultiheadInputs,
    MultiheadSaved,
    MultiheadSpec,
    MultiheadWeights,
    Parts,
)
from te_core.layers.norm_linear import NormLinearSaved
from te_core.layers.residual import AddSaved
from te_core.layers.rope import SplitSaved
from te_core.layers.transformer import LayerDraws, LayerParts, MLPWeights, TransformerInputs, TransformerSaved
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch.attention.dot_product import DotProductAttention
from te_torch.attention.fused import ATTENTION
from te_torch.attention.rope import SPLIT_QKV
from te_torch.autocast import Now, active
from te_torch.base.plans import Drawn, Of, Plan, Prepared, state_of
from te_torch.base.residual import ADD
from te_torch.calls import Layer, register
from te_torch.function import Noted, apply
from te_torch.modules.layernorm_linear import NORM_LINEAR, LayerNormLinear
from te_torch.modules.layernorm_mlp import MLP, LayerNormMLP
from te_torch.modules.linear import LINEAR, Linear
from te_torch.replays import alike, chosen
from te_torch.reruns import in_backward, may_run_again
from te_torch.state import ScalingState, States
from te_torch.transformer.multihead import MultiheadAttention

# ------------------------------------------------------------------------------------------------ the core's layer

#: What the parts save, in the order in which it stands in what the layer saves.
_SAVED: tuple[Any, ...] = NormLinearSaved, SplitSaved, AttentionSaved, LinearSaved, MLPSaved, AddSaved
_LENGTHS = [len(kind._fields) for kind in _SAVED]
#: The parts with a state: the projection to queries, keys and values, the output's, the MLP.
_PARTS = 3


def _forward(rt: Runtime, x: Tensor, *given: Any, spec: Any, scales: Sequence[Any] | None = None) -> Any:
    """The core's layer on its inputs in a row (`_inputs`); what is saved comes in a row, too."""
    qkv_scales, proj_scales, mlp_scales = scales or (None,) * 3
    states = LayerParts(Parts(qkv_scales, None, proj_scales), mlp_scales)
    outputs, saved = core.forward(rt, x, _inputs(*given), spec=spec, scales=states)
    attention = saved.attention or MultiheadSaved(None, None, None)
    parts = attention.qkv, attention.split, attention.attention, attention.proj, saved.mlp, saved.closing
    row: list[Any] = []
    for kind, part in zip(_SAVED, parts, strict=True):
        row += [None] * len(kind._fields) if part is None else part
    return outputs, tuple(row)


def _inputs(*given: Any) -> TransformerInputs:
    gamma, beta, qkv, qkv_bias, qkv_rng, proj, proj_bias, proj_rng, attended_rng, *mlp = given
    *of_mlp, mlp_rng, closing_rng, q_angles, k_angles = mlp
    weights = MultiheadWeights(qkv, qkv_bias, proj, proj_bias, gamma, beta)
    draws = MultiheadDraws(qkv_rng, proj_rng)
    attention = MultiheadInputs(weights, AttentionInputs(None), draws, angles=Angles(q_angles, k_angles))
    return TransformerInputs(attention, MLPWeights(*of_mlp), LayerDraws(attended_rng, None, mlp_rng, closing_rng))


def _backward(
    rt: Runtime,
    dy: Tensor,
    saved: Any,
    *,
    spec: Any,
    scales: Sequence[Any] | None = None,
    release: bool = False,
    parts: int = _PARTS,
) -> tuple[Any, ...]:
    """The gradients, in the order of `_forward`'s inputs; of so many parts with a state, the last ones."""
    row, each = iter(saved), []
    for kind, length in zip(_SAVED, _LENGTHS, strict=True):
        fields = [next(row) for _ in range(length)]
        each.append(kind(*fields))
    qkv, split, attention, proj, mlp, closing = each
    of_qkv = qkv if any(spec.attention.qkv.linear.needs) else None
    of_split = None if spec.attention.split is None else split
    attended = MultiheadSaved(of_qkv, attention if parts == _PARTS else None, proj, None, of_split)
    whole = TransformerSaved(
        attended if parts > 1 and any(spec.attention.proj.needs) else None,
        mlp if parts > 0 and any(spec.mlp.fc2.needs) else None,
        closing,
    )
    qkv_scales, proj_scales, mlp_scales = scales or (None,) * 3
    states = LayerParts(Parts(qkv_scales, None, proj_scales), mlp_scales)
    found = core.backward(rt, dy, whole, spec=spec, scales=states, release=release)
    w, m = found.attention.weights, found.mlp
    of_attention = w.gamma, w.beta, w.qkv, w.qkv_bias, None, w.proj, w.proj_bias, None, None
    return (found.x, *of_attention, *m, None, None, None, None)


#: `Layer.reach`: up to the projection to queries, keys and values; proj; its bias, which the MLP's norm adds, and the
#: MLP; fc2's bias, which is added behind the MLP.
_REACH = *[_PARTS] * 6, 2, *[1] * 8, *[0] * 5
TRANSFORMER = Layer("transformer", _forward, _backward, lambda *saved: saved, releases=True, reach=_REACH)


# ---------------------------------------------------------------------------------------------- what the parts ran


def composed(layer: Any, inputs: Sequence[torch.Tensor], y: Any, noted: list[Noted]) -> Prepared | None:
    """The layer's call as one, if these calls of its parts are all that it did; else None.

    `inputs`: its input, and the angles by which queries and keys are turned, if they are.
    """
    x, *angles = inputs
    split = noted[1] if angles and len(noted) == 6 and noted[1].call.layer is SPLIT_QKV else None
    calls = noted if split is None else [noted[0], *noted[2:]]
    if [n.call.layer for n in calls] != [NORM_LINEAR, ATTENTION, LINEAR, MLP, ADD] or bool(angles) is (split is None):
        return None
    qkv, attended, proj, mlp, closing = calls
    units = parts_of(layer)
    if units is None or not all(map(_is_plain, calls)):
        return None
    if any(n.unit is not part or part._inspected for n, part in zip(calls, units[1:], strict=False)):
        return None
    stream, bias, rng_after = mlp.inputs[8:11]
    own_rng = mlp.sources[10]
    if mlp.inputs[6] is not None or proj.inputs[2] is not None or not (own_rng is None or own_rng == Drawn(None, -1)):
        return None
    operands = qkv.outputs[:1] if split is None else split.outputs
    linked = [
        (qkv.inputs[0], x),
        *zip(attended.inputs, operands, strict=False),
        (proj.inputs[0], attended.outputs[0]),
        (mlp.inputs[0], proj.outputs[0]),
        (stream, qkv.outputs[-1]),
        (closing.inputs[0], mlp.outputs[0]),
        (closing.inputs[2], mlp.outputs[-1]),
        (y, closing.outputs[0]),
    ]
    if split is not None:
        linked.append((split.inputs[0], qkv.outputs[0]))
        if [t is None or t.data_ptr() for t in split.inputs[1:]] != [*[t.data_ptr() for t in angles], True, True]:
            return None
    if not all(a is b for a, b in linked) or any(t is not None for t in attended.inputs[len(operands) :]):
        return None
    try:
        parts = qkv.call.spec, attended.call.spec, proj.call.spec
        attention = MultiheadSpec(*parts, return_bias=True, split=None if split is None else split.call.spec)
        spec = core.TransformerSpec(attention, mlp.call.spec, closing.call.spec)
    except UnsupportedError:
        return None
    s_qkv, s_proj, s_mlp = ([_of(n.unit, s) for s in n.sources] for n in (qkv, proj, mlp))
    of_bias = None if bias is None else Of(proj.unit, proj.unit._part_names["bias"])
    of_closing = None if closing.inputs[1] is None else Of(mlp.unit, ("fc2_bias",))
    rng_closing = closing.inputs[3]
    sources = [
        *(0, *s_qkv[1:5], _in_order(s_qkv[5], 0), s_proj[1], of_bias, _in_order(s_proj[3], 1)),
        *(None if rng_after is None else Drawn(None, 2), *s_mlp[1:6], of_closing, _in_order(s_mlp[7], 3)),
        *(None if rng_closing is None else Drawn(None, 4), *((1, 2) if angles else (None, None))),
    ]
    tensors = [
        *(x, *qkv.inputs[1:6], proj.inputs[1], bias, proj.inputs[3], rng_after),
        *(
            *mlp.inputs[1:6],
            closing.inputs[1],
            mlp.inputs[7],
            rng_closing,
            *(split.inputs[1:3] if split else (None, None)),
        ),
    ]
    states = [n.state for n in (qkv, proj, mlp)]
    state = None if all(s is None for s in states) else States(states)
    call = register(TRANSFORMER, spec, any(n.call.needs_grad for n in noted))
    return Prepared(call, state, False, tensors, sources, shaped=True)


def _is_plain(noted: Noted) -> bool:
    """Whether a call depends on nothing besides its tensors and its state: on no ranks, inspectors, sinks."""
    return not noted.call.options and noted.plain and (noted.state is None or isinstance(noted.state, ScalingState))


def _of(unit: Any, source: Any) -> Any:
    """A part's source as the layer has it."""
    names = (source,) if isinstance(source, str) else source
    return Of(unit, names) if names.__class__ is tuple else source


def _in_order(source: Any, order: int) -> Any:
    return source._replace(order=order) if isinstance(source, Drawn) else source


def _calls_of() -> list[Any]:
    """What a call of each part runs, which a program may exchange on the classes."""
    return [*map(_call_of, _KINDS)]


_KINDS = (MultiheadAttention, LayerNormLinear, DotProductAttention, Linear, LayerNormMLP)
_call_of = attrgetter("forward", "__call__")
_CALLS = _calls_of()
#: The attention block's parts, by name.
_OF_ATTENTION = ("layernorm_qkv", "core_attention", "proj")


def parts_of(layer: Any) -> list[Any] | None:
    """[attention block, qkv projection, attention, output projection, MLP], if all are our own classes."""
    block: Any = layer._modules.get("self_attention")
    mlp: Any = layer._modules.get("layernorm_mlp")
    if block is None or mlp is None:
        return None
    found = [block, *map(block._modules.get, _OF_ATTENTION), mlp]
    if not all(part.__class__ is kind for part, kind in zip(found, _KINDS, strict=True)) or _calls_of() != _CALLS:
        return None
    return None if any({"forward", "_compiled_call_impl"} & part.__dict__.keys() for part in found) else found


# ------------------------------------------------------------------------------------------------------ the plan

_inspector_of = attrgetter("inspector")
_version_of = attrgetter("_version")
_GLOBAL_HOOKS = (
    hooks._global_forward_hooks,
    hooks._global_forward_pre_hooks,
    hooks._global_backward_hooks,
    hooks._global_backward_pre_hooks,
)
#: Gradients of one node arrive together. Of more bytes than these, the peak would rise where gradients are there before
#: them, or where a hook uses up each as it arrives.
_SMALL = 32 << 20


class LayerPlan(Plan):
    """The plan of a layer that runs as one: nothing of its parts may have changed."""

    __slots__ = ("_alike", "_hooks", "_inner", "_large", "_lasts", "_modules", "_parts", "_there", "_versions")

    def __init__(
        self, unit: Any, prepared: Prepared, inputs: Sequence[Any], options: tuple[Any, ...], now: Now
    ) -> None:
        block = unit._modules["self_attention"]
        self._parts = parts_of(unit)
        assert self._parts is not None
        #: All modules of the layer and of its attention block, parts or not.
        self._inner = block._modules
        self._modules = [*unit._modules.values(), *self._inner.values()]
        self._versions = [*map(_version_of, self._parts)]
        of_parts = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self._hooks = [*_GLOBAL_HOOKS, *[getattr(part, name) for part in self._parts for name in of_parts]]
        self._lasts = [(part.__dict__, dict(part._plans[0].last)) for part in self._parts[1:] if part._plans]
        super().__init__(unit, prepared, inputs, options, now)
        self.last = ()
        pool = self._pool(unit, inputs)
        self._made(pool)
        tensors = self._order(pool)
        self._there = chosen([i for i, t in enumerate(tensors) if t is not None])
        self._alike = alike(self._there(tensors))
        size = sum(t.numel() * t.element_size() for t in prepared.tensors[1:] if t is not None)
        self._large = size > _SMALL

    @classmethod
    def of(
        cls, unit: Any, prepared: Prepared, inputs: Sequence[Any], options: tuple[Any, ...], now: Now
    ) -> Plan | None:
        """The plan of this call; None where hooks ran in it: they may have frozen or unfrozen what a part had read."""
        found = super().of(unit, prepared, inputs, options, now)
        return None if isinstance(found, LayerPlan) and any(found._hooks) else found

    def _rules(self, unit: Any, state: Any) -> Any:
        """The rule of each part's state."""
        assert self._parts is not None
        with_state = self._parts[1], self._parts[3], self._parts[4]
        if state is None:
            return None
        return tuple((part, s and s.precision) for part, s in zip(with_state, state.each, strict=True))

    def run(self, unit: Any, inputs: Sequence[Any], options: tuple[Any, ...], now: Now) -> tuple[Any, ...] | None:
        """As any plan, if nothing of the parts has changed and nothing asks for them."""
        parts, modules = self._parts, [*unit._modules.values(), *self._inner.values()]
        assert parts is not None
        if (
            len(modules) != len(self._modules)
            or not all(map(is_, modules, self._modules))
            or [*map(_version_of, parts)] != self._versions
            or [*map(_call_of, _KINDS)] != _CALLS
            or any(map(_inspector_of, parts[1:]))
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

    def _unknown(self, unit: Any, state: Any, tensors: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self._alike(*self._there(tensors)):
            return None
        return apply(self.call, state, False, *self._with_draws(tensors, None), caller=unit._token)

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
