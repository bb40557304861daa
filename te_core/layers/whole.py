"""`multihead` and `transformer` with all that they take and give in a row, for callers that know tensors by name.

The order of a row is that of te_core/layers/whole_table.py. One scaling state serves all products of a layer, in the
order of their weights: each part reads its slots of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import unwrap
from typing import Any

from te_core.arguments import explained
from te_core.layers import multihead, transformer
from te_core.layers.attention import AttentionInputs
from te_core.layers.linear import Sink
from te_core.layers.multihead import (
    Angles,
    MultiheadDraws,
    MultiheadInputs,
    MultiheadSaved,
    MultiheadSpec,
    MultiheadWeights,
    Parts,
)
from te_core.layers.transformer import (
    LayerDraws,
    LayerParts,
    MLPWeights,
    TransformerInputs,
    TransformerSaved,
    TransformerSpec,
)
from te_core.quantize.operands import Value
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS, Scales
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_multihead_forward, _multihead_backward = unwrap(multihead.forward), unwrap(multihead.backward)
_transformer_forward, _transformer_backward = unwrap(transformer.forward), unwrap(transformer.backward)


@explained
def multihead_forward(
    rt: Runtime,
    x: Tensor,
    *inputs: Value | None,
    spec: MultiheadSpec,
    scales: Scales | None = None,
    ready: Sequence[QuantizedTensor | None] = (None, None),
) -> tuple[tuple[Tensor, ...], MultiheadSaved]:
    """((y,), saved). `inputs`: qkv's weight and bias, proj's, angles, running sums; the draws of dropout, qkv, proj."""
    qkv, qkv_bias, proj, proj_bias, *more = inputs
    weights = MultiheadWeights(qkv, qkv_bias, proj, proj_bias)  # type: ignore[arg-type]
    states = Parts(_slots(scales, 0), None, _slots(scales, 1))
    given = _attention(weights, more, spec)
    outputs, saved = _multihead_forward(rt, x, given, spec=spec, scales=states, ready=Parts(ready[0], None, ready[1]))
    return outputs, saved


@explained
def multihead_backward(
    rt: Runtime,
    dy: Tensor,
    saved: MultiheadSaved,
    *,
    spec: MultiheadSpec,
    scales: Scales | None = None,
    sinks: Sequence[Sink | None] = (None, None),
    release: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, of qkv's weight and bias, and of proj's."""
    states = Parts(_slots(scales, 0), None, _slots(scales, 1))
    into = Parts(sinks[0], None, sinks[1])
    found = _multihead_backward(rt, [dy], saved, spec=spec, scales=states, sinks=into, release=release)
    return found.x, *found.weights[:4]


@explained
def forward(
    rt: Runtime,
    x: Tensor,
    *inputs: Value | None,
    spec: TransformerSpec,
    scales: Scales | None = None,
    ready: Sequence[QuantizedTensor | None] = (None, None, None, None),
) -> tuple[tuple[Tensor], TransformerSaved]:
    """((y,), saved). `inputs`: the parameters of the norm and qkv, of proj, of the MLP; angles, running sums; the draws
    of attention's dropout, of rounding in qkv and proj, of dropout behind attention and the MLP, of rounding there."""
    of_mlp, more = inputs[6:12], inputs[12:]
    gamma, beta, qkv, qkv_bias, proj, proj_bias = inputs[:6]
    of_attention = MultiheadWeights(qkv, qkv_bias, proj, proj_bias, gamma, beta)  # type: ignore[arg-type]
    attention = _attention(of_attention, more[:5], spec.attention)
    attended, closing, rounding = more[5:]
    draws = LayerDraws(attended, None, rounding, closing)  # type: ignore[arg-type]
    given = TransformerInputs(attention, MLPWeights(*of_mlp), draws)  # type: ignore[arg-type]
    copies = LayerParts(Parts(ready[0], None, ready[1]), tuple(ready[2:]))
    outputs, saved = _transformer_forward(rt, x, given, spec=spec, scales=_states(scales), ready=copies)
    return outputs, saved


@explained
def backward(
    rt: Runtime,
    dy: Tensor,
    saved: TransformerSaved,
    *,
    spec: TransformerSpec,
    scales: Scales | None = None,
    sinks: Sequence[Sink | None] = (None, None, None, None),
    release: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of x and of the parameters, in forward's order."""
    into = LayerParts(Parts(sinks[0], None, sinks[1]), tuple(sinks[2:]))
    found = _transformer_backward(rt, dy, saved, spec=spec, scales=_states(scales), sinks=into, release=release)
    w = found.attention.weights
    return found.x, w.gamma, w.beta, *w[:4], *found.mlp


def _attention(weights: MultiheadWeights, more: Sequence[Any], spec: MultiheadSpec) -> MultiheadInputs:
    """An attention's inputs of its weights, and of angles, running sums and draws in a row."""
    angles, cu, dropout, qkv, proj = more
    drops = multihead.attention_of(spec).core.dropout > 0.0  # else the draws are there for rounding alone
    terms = AttentionInputs(None, cu_q=cu, cu_kv=cu, rng=dropout if drops else None)
    return MultiheadInputs(weights, terms, MultiheadDraws(qkv, proj), angles=Angles(angles, angles))


def _states(scales: Scales | None) -> LayerParts:
    return LayerParts(Parts(_slots(scales, 0), None, _slots(scales, 1)), _slots(scales, 2, 2))


def _slots(scales: Scales | None, first: int, count: int = 1) -> Scales | None:
    """What products from the `first` one on have of a state."""
    if scales is None:
        return None

    def part(t: Tensor | None, slots: int) -> Tensor | None:
        return None if t is None else t.rows(first * slots, (first + count) * slots)

    forward = scales.forward_scale, scales.forward_amax
    backward = scales.backward_scale, scales.backward_amax
    return Scales(*[part(t, FORWARD_SLOTS) for t in forward], *[part(t, BACKWARD_SLOTS) for t in backward])
