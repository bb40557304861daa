"""Attention between its projections as one layer: y = attention(norm(x) w^T + b) w_proj^T + b_proj.

self     a projection gives qkv in one tensor, which attention reads by strides (packing "qkv")
cross    a projection of x gives q, one of `encoded` keys and values in one tensor (packing "kv")
turned   with `split` (and `turn`, the queries of cross attention) q, k and v are first copied apart, q and k turned

The norm is optional. Each part is a layer of its own (norm_linear, linear, attention, attention_fp8, rope), called as
it is alone, in the order in which parts run one after another: same bits, maxima and draws. What a part saved is let go
of as soon as its backward has read it, where nobody else will (`release`).

Shapes: x [.., H], w [width of a token's q, k and v, H], w_proj [H', heads * d_v]. Scaling states, sinks and weights
quantized before come for each part (`Parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import unwrap
from math import prod
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.arguments import explained
from te_core.errors import UnsupportedError
from te_core.layers import attention, attention_fp8, linear, norm_linear, rope
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec, AttentionSaved
from te_core.layers.attention_fp8 import AttentionFp8Spec
from te_core.layers.communicator import Communicator, Groups, groups_of
from te_core.layers.linear import LinearSaved, LinearSpec, Sink
from te_core.layers.meeting import meet
from te_core.layers.norm_linear import NormLinearSaved, NormLinearSpec
from te_core.layers.rope import RopeSaved, RopeSpec, SplitSaved, SplitSpec
from te_core.ops import raw as ops
from te_core.quantize.operands import Value
from te_core.quantize.state import Scales
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

# The parts' functions without the look at what failed, which this layer's own has.
_linear_forward, _linear_backward = unwrap(linear.forward), unwrap(linear.backward)
_norm_linear_forward, _norm_linear_backward = unwrap(norm_linear.forward), unwrap(norm_linear.backward)
_attention_forward, _attention_backward = unwrap(attention.forward), unwrap(attention.backward)
_fp8_forward, _fp8_backward = unwrap(attention_fp8.forward), unwrap(attention_fp8.backward)
_turn_forward, _turn_backward = unwrap(rope.forward), unwrap(rope.backward)
_split_forward, _split_backward = unwrap(rope.split_forward), unwrap(rope.split_backward)


@dataclass(frozen=True, slots=True)
class MultiheadSpec:
    """The specs of the parts, each as the part has it alone."""

    qkv: LinearSpec | NormLinearSpec  # of the queries alone in cross attention
    attention: AttentionLayerSpec | AttentionFp8Spec
    proj: LinearSpec
    return_bias: bool = False  # proj's bias is not added: who adds the residual adds it
    key_value: LinearSpec | None = None  # cross attention
    split: SplitSpec | None = None  # q, k and v (cross: k and v) are copied apart, and turned by angles
    turn: RopeSpec | None = None  # cross attention: queries are turned

    def __post_init__(self) -> None:
        layer, cross = attention_of(self), self.key_value is not None
        packing = "separate" if self.split is not None else "kv" if cross else "qkv"
        watched = [
            part for part in (linear_of(self.qkv), self.proj, self.key_value) if part and part.inspect is not None
        ]
        got = ""
        if layer.packing != packing:
            got = f"attention of packing={layer.packing!r} (here {packing!r} is what it is given)"
        elif layer.core.max_logit:
            got = "attention that returns its largest logits"
        elif watched:
            got = "a part that an inspector looks at"
        if got:
            raise UnsupportedError(
                "MultiheadSpec", got, "parts that take what the one before gives", "run the parts one by one"
            )


class Parts(NamedTuple):
    """Something of each part: its scaling state, where its weight's gradient goes, its weight quantized before."""

    qkv: Any = None
    attention: Any = None
    proj: Any = None
    key_value: Any = None


class MultiheadWeights(NamedTuple):
    """The parameters, or their gradients. In cross attention `qkv` makes the queries alone."""

    qkv: Value | None
    qkv_bias: Tensor | None
    proj: Value | None
    proj_bias: Tensor | None
    gamma: Tensor | None = None
    beta: Tensor | None = None
    key_value: Value | None = None
    key_value_bias: Tensor | None = None


class MultiheadDraws(NamedTuple):
    """The random pairs of stochastic rounding. That of dropout stands among attention's terms. A model of parts draws
    key_value's, qkv's, attention's, proj's."""

    qkv: Tensor | None = None
    proj: Tensor | None = None
    key_value: Tensor | None = None


class Residual(NamedTuple):
    """What a norm whose stream adds makes its sum of: residual + dropout(x + bias); or the gradients."""

    residual: Tensor | None = None
    bias: Tensor | None = None
    rng: Tensor | None = None


class Angles(NamedTuple):
    """By what queries and keys are turned, and where tokens of packed sequences begin."""

    q: Tensor | None = None
    k: Tensor | None = None
    cu_q: Tensor | None = None
    cu_kv: Tensor | None = None


class MultiheadInputs(NamedTuple):
    """The layer's tensors besides x."""

    weights: MultiheadWeights
    terms: AttentionInputs = AttentionInputs(None)  # attention's, without q, k and v
    draws: MultiheadDraws = MultiheadDraws()
    branch: Residual = Residual()
    encoded: Tensor | None = None  # what keys and values of cross attention are made of
    angles: Angles = Angles()


class MultiheadSaved(NamedTuple):
    """What backward reads: what each part saved; None of parts that have no gradient."""

    qkv: NormLinearSaved | LinearSaved | None
    attention: AttentionSaved | None
    proj: LinearSaved | None
    key_value: LinearSaved | None = None
    split: SplitSaved | None = None
    turn: RopeSaved | None = None


class MultiheadGradients(NamedTuple):
    """The gradients; None where nothing wants them."""

    x: Tensor | None
    weights: MultiheadWeights = MultiheadWeights(None, None, None, None)
    bias: Tensor | None = None  # of attention's scores
    sink: Tensor | None = None
    branch: Residual = Residual()
    encoded: Tensor | None = None


@explained
def forward(
    rt: Runtime,
    x: Tensor,
    given: MultiheadInputs,
    *,
    spec: MultiheadSpec,
    scales: Sequence[Scales | None] = (),
    ready: Sequence[QuantizedTensor | None] = (),
    comm: Communicator | Groups | None = None,
) -> tuple[tuple[Tensor, ...], MultiheadSaved]:
    """((y,), saved); what the norm gives besides (its output, the stream) comes behind y.

    `scales` and `ready` are `Parts`, or come in their order.
    """
    weights, draws, states, copies = given.weights, given.draws, Parts(*scales), Parts(*ready)
    tensor, ranks = groups_of(comm)
    if tensor is not None:
        operands = {"weight": weights.qkv, "bias": weights.qkv_bias, "proj": weights.proj, "encoded": given.encoded}
        meet(rt, tensor, "MultiheadAttention", spec, input=x, **operands)
    assert weights.qkv is not None and weights.proj is not None
    made: list[Value] = []  # handed on in a list, so that what reads it for the last time holds it alone
    kept_kv = None
    if spec.key_value is not None:  # before the queries, as a model of parts has it
        assert given.encoded is not None and weights.key_value is not None
        options = _options(spec.key_value, states.key_value, copies.key_value, tensor)
        (kv,), kept_kv = _linear_forward(
            rt, given.encoded, weights.key_value, weights.key_value_bias, draws.key_value, **options
        )
        made.append(kv)
        del kv
    returned, kept_qkv = _projected(rt, x, given, made, _options(spec.qkv, states.qkv, copies.qkv, tensor))
    context, kept = _attended(rt, made, given, spec, (states.attention, ranks), x)
    (y,), kept_proj = _linear_forward(
        rt,
        context,
        weights.proj,
        None if spec.return_bias else weights.proj_bias,
        draws.proj,
        **_options(spec.proj, states.proj, copies.proj, tensor),
    )
    assert isinstance(y, Tensor)
    saved = kept._replace(
        qkv=own_copy(kept_qkv) if any(linear_of(spec.qkv).needs) else None,
        proj=own_copy(kept_proj._replace(x=own(kept_proj.x))) if any(spec.proj.needs) else None,
        key_value=None if kept_kv is None or not any(spec.key_value.needs) else own_copy(kept_kv),  # type: ignore[union-attr]
    )
    return (_in_lead(y, x.shape[:-1]), *returned), saved


@explained
def backward(
    rt: Runtime,
    grads: Sequence[Tensor | None],
    saved: MultiheadSaved,
    *,
    spec: MultiheadSpec,
    scales: Sequence[Scales | None] = (),
    sinks: Sequence[Sink | None] = (),
    release: bool = False,
    comm: Communicator | Groups | None = None,
) -> MultiheadGradients:
    """The gradients from those of y and of what came out beside it, in order; in a list these are taken out of it.

    With `release` nobody will read `saved` again: what forward made is let go of as soon as it was read. x is not, nor
    what the norm formed in its place: that came out.
    """
    states, into, (tensor, ranks) = Parts(*scales), Parts(*sinks), groups_of(comm)
    taken = grads if isinstance(grads, list) else [*grads]
    assert taken[0] is not None and saved.proj is not None
    lead = taken[0].shape[:-1]
    options = _options(spec.proj, states.proj, None, tensor) | {"sinks": (into.proj,)}
    dcontext, dproj, dproj_bias = _linear_backward(rt, taken.pop(0), saved.proj, **options)
    if release:
        free(saved.proj, into.proj, saved.proj.x)
    found = MultiheadGradients(None, MultiheadWeights(None, None, dproj, dproj_bias))
    if dcontext is None or saved.attention is None:
        return found
    made: list[Any] = [dcontext]
    del dcontext
    dbias, dsink = _attention_gradients(rt, made, saved, spec, (states.attention, ranks))
    if release:
        kept = saved.attention
        assert kept is not None
        let_go(*[t for t in (*kept[:3], kept.out, kept.stats, kept.pairs) if isinstance(t, Tensor)])
    found = found._replace(bias=dbias, sink=dsink)
    dqkv, dkv = _together(rt, made, saved, spec)
    del made
    if dqkv is not None and saved.qkv is not None:
        options = _options(spec.qkv, states.qkv, None, tensor) | {"sinks": (into.qkv,)}
        found = _projection_gradients(rt, dqkv, taken, saved.qkv, found, options)
        if found.x is not None:
            found = found._replace(x=_in_lead(found.x, lead))
        if release:
            free(saved.qkv, into.qkv)
    del dqkv
    if dkv is not None and saved.key_value is not None:
        assert spec.key_value is not None
        options = _options(spec.key_value, states.key_value, None, tensor) | {"sinks": (into.key_value,)}
        dencoded, dw, db = _linear_backward(rt, dkv, saved.key_value, **options)
        found = found._replace(encoded=dencoded, weights=found.weights._replace(key_value=dw, key_value_bias=db))
        if release:
            free(saved.key_value, into.key_value)
    return found


# -------------------------------------------------------------------------------------------- the projections


def linear_of(spec: LinearSpec | NormLinearSpec) -> LinearSpec:
    """The linear of a projection."""
    return spec.linear if isinstance(spec, NormLinearSpec) else spec


def _options(
    spec: LinearSpec | NormLinearSpec, scales: Scales | None, ready: QuantizedTensor | None, comm: Communicator | None
) -> dict[str, Any]:
    """How a projection is called."""
    spread = linear_of(spec).parallel is not None
    found: dict[str, Any] = {"spec": spec, "scales": scales, "comm": comm if spread else None}
    return found if ready is None else {**found, "ready": (ready,)}


def _projected(
    rt: Runtime, x: Tensor, given: MultiheadInputs, made: list[Value], options: dict[str, Any]
) -> tuple[list[Any], NormLinearSaved | LinearSaved]:
    """(what comes out beside, what backward reads); qkv, or q, joins what is `made`."""
    w, rng = given.weights, given.draws.qkv
    if isinstance(options["spec"], NormLinearSpec):
        parameters = w.gamma, w.beta, w.qkv, w.qkv_bias
        (packed, *returned), kept = _norm_linear_forward(rt, x, *parameters, rng, *given.branch, **options)
        made.append(packed)
        return returned, kept
    (packed,), kept_plain = _linear_forward(rt, x, w.qkv, w.qkv_bias, rng, **options)
    made.append(packed)
    return [], kept_plain


def _projection_gradients(
    rt: Runtime,
    dqkv: Value,
    beside: list[Tensor | None],
    saved: NormLinearSaved | LinearSaved,
    found: MultiheadGradients,
    options: dict[str, Any],
) -> MultiheadGradients:
    """The gradients with those of qkv's projection, or q's. What went round a projection without a norm is added."""
    second, third = (*beside, None, None)[:2]
    if isinstance(saved, NormLinearSaved):
        dx, dgamma, dbeta, dw, db, _, *branch = _norm_linear_backward(rt, dqkv, second, third, saved, **options)
        weights = found.weights._replace(qkv=dw, qkv_bias=db, gamma=dgamma, beta=dbeta)
        return found._replace(x=dx, weights=weights, branch=Residual(*branch))
    dx, dw, db = _linear_backward(rt, dqkv, saved, **options)
    if second is not None and isinstance(dx, Tensor):
        dx = ops.add(rt, dx.matrix(), second.matrix(), out=dx.matrix())
    return found._replace(x=dx, weights=found.weights._replace(qkv=dw, qkv_bias=db))


# -------------------------------------------------------------------------------------------- attention


def attention_of(spec: MultiheadSpec) -> AttentionLayerSpec:
    """Attention's layer, in FP8 or not."""
    return spec.attention.attention if isinstance(spec.attention, AttentionFp8Spec) else spec.attention


def _lead_of(made: Value, source: Tensor) -> tuple[int, ...]:
    """The dimensions of the tokens of a projection: over ranks it may have more rows than what it was made of."""
    if isinstance(made, Tensor):
        return made.shape[:-1]
    lead = source.shape[:-1]
    return (lead[0] * made.shape[0] // max(prod(lead), 1), *lead[1:])


def _in_lead(t: Tensor, lead: tuple[int, ...]) -> Tensor:
    """What came of a quantized tensor, which is a matrix of tokens, in their dimensions."""
    return t if len(t.shape) > len(lead) else t.reshape(*lead, t.shape[-1])


def _attended(
    rt: Runtime,
    made: list[Value],
    given: MultiheadInputs,
    spec: MultiheadSpec,
    options: tuple[Scales | None, Any],
    x: Tensor,
) -> tuple[Value, MultiheadSaved]:
    """(attention's output, what backward reads) of the projections, which are taken out of `made`. `options`: its
    scales and ranks."""
    (scales, ranks), layer, leads = options, attention_of(spec), [_lead_of(made[-1], x)]
    if given.encoded is not None:
        leads.append(_lead_of(made[0], given.encoded))
    operands, split, turn = _apart(rt, made, given.angles, spec)
    context: Value
    if isinstance(spec.attention, AttentionLayerSpec):
        if layer.packing == "kv":
            operands[0] = operands[0].reshape(*leads[0], layer.heads, layer.d_qk)
        inputs = given.terms._replace(a=operands[0], b=operands[1], c=operands[2])
        operands.clear()
        (context, *_), saved = _attention_forward(rt, *inputs, spec=spec.attention, comm=ranks)
    else:
        if spec.split is not None:
            operands = [t.reshape(*t.shape[:-2], t.shape[-2] * t.shape[-1]) for t in operands]
        inputs = given.terms._replace(a=operands[0], b=operands[1], c=operands[2])
        operands.clear()
        frames = [rt.empty((*lead, 0), dtypes.uint8) for lead in leads]
        (context,), saved = _fp8_forward(rt, *inputs, *frames, spec=spec.attention, scales=scales, comm=ranks)
        blocks = [t.block if isinstance(t, QuantizedTensor) else t for t in saved[:3]]
        saved = saved._replace(a=blocks[0], b=blocks[1], c=blocks[2])
    if not any(layer.needs):
        return context, MultiheadSaved(None, None, None)
    return context, MultiheadSaved(None, saved, None, None, split, turn)


def _apart(
    rt: Runtime, made: list[Value], angles: Angles, spec: MultiheadSpec
) -> tuple[list[Any], SplitSaved | None, RopeSaved | None]:
    """q, k and v as attention takes them, and what backward reads of how they came apart."""
    q, kv = made.pop(), made.pop() if made else None
    if spec.split is None:
        return [q, kv, None], None, None
    if kv is None:
        assert isinstance(q, Tensor)
        parts, split = _split_forward(rt, q, angles.q, angles.k, angles.cu_q, None, spec=spec.split)
        return [*parts], split, None
    assert isinstance(q, Tensor) and isinstance(kv, Tensor)
    layer, turn = attention_of(spec), None
    q = q.reshape(*q.shape[:-1], layer.heads, layer.d_qk)
    if spec.turn is not None:
        assert angles.q is not None
        (q,), turn = _turn_forward(rt, q, angles.q, angles.cu_q, None, spec=spec.turn)
    parts, split = _split_forward(rt, kv, None, angles.k, angles.cu_kv, None, spec=spec.split)
    return [q, *parts], split, turn


def _attention_gradients(
    rt: Runtime, made: list[Any], saved: MultiheadSaved, spec: MultiheadSpec, options: tuple[Scales | None, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of attention's bias and sink; that of its output, in `made`, becomes those of its inputs."""
    kept, (scales, ranks) = saved.attention, options
    assert kept is not None
    if isinstance(spec.attention, AttentionLayerSpec):
        *parts, dbias, _, dsink = _attention_backward(rt, made.pop(), None, kept, spec=spec.attention, comm=ranks)
    else:
        grads = _fp8_backward(rt, made.pop(), kept, spec=spec.attention, scales=scales, comm=ranks)
        parts, dbias, dsink = [*grads], None, None
    made += parts
    return dbias, dsink


def _together(
    rt: Runtime, made: list[Any], saved: MultiheadSaved, spec: MultiheadSpec
) -> tuple[Value | None, Tensor | None]:
    """The gradients of the projections of x and of `encoded`, from those of q, k and v, which are taken."""
    da, db, dc = made
    made.clear()
    layer = attention_of(spec)
    if spec.split is None:
        return (da, None) if spec.key_value is None else (_rows(da, layer), db)
    widths = (layer.heads, layer.d_qk), (layer.groups, layer.d_qk), (layer.groups, layer.d_v)
    if isinstance(spec.attention, AttentionFp8Spec):
        da, db, dc = (
            None if t is None else t.reshape(*t.shape[:-1], *width)
            for t, width in zip((da, db, dc), widths, strict=True)
        )
    assert saved.split is not None
    if spec.key_value is None:
        return None if da is None else _split_backward(rt, da, db, dc, saved.split, spec=spec.split)[0], None
    dkv = None if db is None and dc is None else _split_backward(rt, db, dc, saved.split, spec=spec.split)[0]
    if da is not None and spec.turn is not None:
        assert saved.turn is not None
        (da,) = _turn_backward(rt, da, saved.turn, spec=spec.turn)
    return _rows(da, layer), dkv


def _rows(q: Tensor | None, layer: AttentionLayerSpec) -> Tensor | None:
    """The gradient of queries, heads side by side."""
    lead = len(layer.core.q_format) - 2
    return None if q is None else q.reshape(*q.shape[:lead], layer.heads * layer.d_qk)


# -------------------------------------------------------------------------------------------- what is let go of


def let_go(*tensors: Tensor | None) -> None:
    """Drop the owners of tensors that were read for the last time."""
    for t in tensors:
        if t is not None:
            t.owner = None


def free(saved: LinearSaved | NormLinearSaved, sink: Sink | None, *made: Tensor | None) -> None:
    """Let go of what a projection's forward made: `made`, what the norm made, quantized copies. A weight gradient that
    is computed later still reads the input."""
    let_go(saved.w)
    if isinstance(saved, NormLinearSaved):
        let_go(saved.mean, saved.rstd, saved.scale)
        made = (*made, saved.n)
    elif saved.x is not None and saved.x.dtype is dtypes.uint8:  # a plain one is the caller's
        made = (*made, saved.x)
    if sink is None or sink.queue is None:
        let_go(*made)


def own(t: Tensor | None) -> Tensor | None:
    """A view of its own, which can be let go of: what it is a view of may be another part's, or a cache's."""
    return None if t is None else Tensor(t.ptr, t.shape, t.dtype, t.device, t.owner, t.strides)


def own_copy(saved: Any) -> Any:
    """The same with views of its own of quantized weights."""
    return saved._replace(w=own(saved.w))
