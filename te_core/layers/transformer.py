"""A layer of a Transformer as one: attention and an MLP, each added to what it read.

x1 = x  + dropout(attention(norm(x)) + bias)
x2 = x1 + dropout(cross(norm(x1)) + bias)                (with `cross`)
y  = x2 + dropout(mlp(norm(x2)) + bias)                  (with `output` then the norm of that)

The norm of the part that comes next forms the sum (te_core/layers/residual.py), the last one has a pass of its own.
What a part adds to is what its norm read, or, where the part's spec returns it, its norm's output. With `beside` the
MLP reads x itself, and one step adds both.

Each part is the layer that it is alone, called in the order in which parts run one after another: same bits, maxima and
draws. What a part saved is let go of as soon as its backward has read it, where nobody else will (`release`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, NamedTuple

from te_core.arguments import explained
from te_core.errors import UnsupportedError
from te_core.layers import mlp, multihead, norm, residual
from te_core.layers.communicator import Communicator, Groups, groups_of
from te_core.layers.linear import Sink
from te_core.layers.meeting import meet
from te_core.layers.mlp import MLPSaved, MLPSpec
from te_core.layers.multihead import (
    MultiheadGradients,
    MultiheadInputs,
    MultiheadSaved,
    MultiheadSpec,
    Residual,
    let_go,
    own,
)
from te_core.layers.norm import NormSaved, NormSpec
from te_core.layers.norm_linear import NormLinearSaved, NormLinearSpec
from te_core.layers.residual import AddSaved, AddSpec, Stream
from te_core.ops import raw as ops
from te_core.quantize.operands import Value
from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tensor import Tensor

# The parts' functions without the look at what failed, which this layer's own has.
_attention_forward, _attention_backward = unwrap(multihead.forward), unwrap(multihead.backward)
_mlp_forward, _mlp_backward = unwrap(mlp.forward), unwrap(mlp.backward)
_norm_forward, _norm_backward = unwrap(norm.forward), unwrap(norm.backward)
_add_forward, _add_backward = unwrap(residual.forward), unwrap(residual.backward)


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """The specs of the parts, each as the part has it alone, with the stream that its norm carries."""

    attention: MultiheadSpec
    mlp: MLPSpec
    closing: AddSpec  # the last addition
    cross: MultiheadSpec | None = None
    output: NormSpec | None = None  # of the sum
    beside: bool = False  # attention and MLP read the same

    def __post_init__(self) -> None:
        got, adds = "", [_adds(_stream_of(part)) for part in (self.cross, self.mlp) if part is not None]
        if self.beside and (self.cross is not None or self.mlp.stream != Stream()):
            got = "beside=True with cross attention, or with an MLP that reads another stream than x"
        elif not self.beside and not all(adds):
            got = "a part behind attention whose norm does not form the sum"
        elif _adds(_stream_of(self.attention)):
            got = "a first norm that forms a sum"
        elif self.mlp.checkpoint:
            got = "an MLP that computes again what it does not keep (checkpoint)"
        elif self.mlp.fc1.inspect is not None or self.mlp.fc2.inspect is not None:
            got = "a part that an inspector looks at"
        if got:
            allowed = "x, then parts whose streams add the branch before (beside=True: the same stream for both)"
            raise UnsupportedError("TransformerSpec", got, allowed, "correct it, or run the parts one by one")


class LayerParts(NamedTuple):
    """Something of each part: of the attentions `te_core.layers.multihead.Parts`; of the MLP its scaling state, or a
    pair: where the gradients of its weights go, its weights quantized before."""

    attention: Sequence[Any] = ()
    mlp: Any = None
    cross: Sequence[Any] = ()


class MLPWeights(NamedTuple):
    """The MLP's parameters, or their gradients."""

    gamma: Tensor | None
    beta: Tensor | None
    fc1: Value | None
    fc1_bias: Tensor | None
    fc2: Value | None
    fc2_bias: Tensor | None  # added with the residual, unless attention is beside


class NormWeights(NamedTuple):
    """Those of the output's norm."""

    gamma: Tensor | None = None
    beta: Tensor | None = None


class LayerDraws(NamedTuple):
    """The random pairs of this layer; those of the attentions stand with theirs. A model of parts draws `attended` and
    `crossed` as the norm behind begins, before that part's own pairs (but behind those of keys and values)."""

    attended: Tensor | None = None  # dropout of attention's branch
    crossed: Tensor | None = None  # of cross attention's
    mlp: Tensor | None = None  # stochastic rounding
    closing: Tensor | None = None  # dropout of the MLP's branch


class TransformerInputs(NamedTuple):
    """The layer's tensors besides x. The bias of an attention's projection is added with the residual."""

    attention: MultiheadInputs
    mlp: MLPWeights
    draws: LayerDraws = LayerDraws()
    cross: MultiheadInputs | None = None
    output: NormWeights = NormWeights()


class TransformerSaved(NamedTuple):
    """What backward reads: what each part saved; None of parts that have no gradient."""

    attention: MultiheadSaved | None
    mlp: MLPSaved | None
    closing: AddSaved
    cross: MultiheadSaved | None = None
    output: NormSaved | None = None


class TransformerGradients(NamedTuple):
    """The gradients; None where nothing wants them."""

    x: Tensor | None = None
    attention: MultiheadGradients = MultiheadGradients(None)
    mlp: MLPWeights = MLPWeights(None, None, None, None, None, None)
    cross: MultiheadGradients = MultiheadGradients(None)
    output: NormWeights = NormWeights()


@explained
def forward(
    rt: Runtime,
    x: Tensor,
    given: TransformerInputs,
    *,
    spec: TransformerSpec,
    scales: Sequence[Any] = (),
    ready: Sequence[Any] = (),
    comm: Communicator | Groups | None = None,
) -> tuple[tuple[Tensor], TransformerSaved]:
    """((y,), saved). `scales` and `ready` are `LayerParts`, or come in their order."""
    states, copies, draws = LayerParts(*scales), LayerParts(*ready), given.draws
    tensor = groups_of(comm).tensor
    if tensor is not None:
        operands = {"weight": given.attention.weights.qkv, "fc1_weight": given.mlp.fc1, "fc2_weight": given.mlp.fc2}
        meet(rt, tensor, "TransformerLayer", spec, input=x, **operands)
    options: dict[str, Any] = {"spec": spec.attention, "scales": states.attention, "ready": copies.attention}
    (out, *beside), kept = _attention_forward(rt, x, given.attention, **options, comm=comm)
    read = beside[0] if beside else x  # what is added to
    del beside
    saved = TransformerSaved(kept if any(spec.attention.proj.needs) else None, None, AddSaved(draws.closing))
    bias, rng = given.attention.weights.proj_bias, draws.attended
    if spec.cross is not None:
        assert given.cross is not None
        options = {"spec": spec.cross, "scales": states.cross, "ready": copies.cross}
        branch = given.cross._replace(branch=Residual(read, bias, rng))
        (out, read, *_), kept = _attention_forward(rt, out, branch, **options, comm=comm)
        del branch
        saved = saved._replace(cross=kept if any(spec.cross.proj.needs) else None)
        bias, rng = given.cross.weights.proj_bias, draws.crossed
    del kept
    if spec.beside:
        other, read, kept_mlp = _through_mlp(rt, read, given, spec, (states.mlp, copies.mlp, tensor), Residual())
        out = ops.add(rt, out, other, out=out)
        del other
    else:
        branch_of = Residual(read, bias, rng)
        del read
        out, read, kept_mlp = _through_mlp(rt, out, given, spec, (states.mlp, copies.mlp, tensor), branch_of)
        del branch_of
    saved = saved._replace(mlp=kept_mlp if any(spec.mlp.fc2.needs) else None)
    del kept_mlp
    (y,), _ = _add_forward(rt, out, None if spec.beside else given.mlp.fc2_bias, read, draws.closing, spec=spec.closing)
    if spec.output is not None:
        del out, read
        assert given.output.gamma is not None
        (y,), kept_output = _norm_forward(rt, y, *given.output, spec=spec.output)
        saved = saved._replace(output=kept_output)
    return (y,), saved


@explained
def backward(
    rt: Runtime,
    dy: Tensor,
    saved: TransformerSaved,
    *,
    spec: TransformerSpec,
    scales: Sequence[Any] = (),
    sinks: Sequence[Any] = (),
    release: bool = False,
    comm: Communicator | Groups | None = None,
) -> TransformerGradients:
    """The gradients. With `release` nobody will read `saved` again: what forward made is let go of as soon as it was
    read."""
    states, into = LayerParts(*scales), LayerParts(*sinks)
    found = TransformerGradients()
    if spec.output is not None:
        assert saved.output is not None
        dy, *of_norm = _norm_backward(rt, dy, saved.output, spec=spec.output)
        found = found._replace(output=NormWeights(*of_norm))
        if release:
            let_go(saved.output.x, saved.output.mean, saved.output.rstd)
    # What comes back along the stream and, as a branch, through the part.
    branch, dbias, along = _add_backward(rt, dy, saved.closing, spec=spec.closing)
    del dy
    if not spec.beside:  # it comes also where nothing before it has a gradient
        found = found._replace(mlp=found.mlp._replace(fc2_bias=dbias))
    if branch is None or saved.mlp is None:
        return found
    spread = groups_of(comm).tensor if spec.mlp.fc1.parallel is not None else None
    options: dict[str, Any] = {"scales": states.mlp, "sinks": into.mlp or (None, None), "comm": spread}
    dx, *grads, _, dread, dbranch_bias = _mlp_backward(
        rt, branch, along, None, saved.mlp, spec=spec.mlp, release=release, **options
    )
    weights = MLPWeights(*grads)
    found = found._replace(mlp=weights if spec.beside else weights._replace(fc2_bias=dbias))
    if release:
        _free_mlp(saved.mlp, spec.mlp, into.mlp)
    branch, along = (branch, dx) if spec.beside else (dx, dread)
    del dx, dread
    if spec.cross is not None:
        found = found._replace(cross=_with_bias(MultiheadGradients(None), dbranch_bias))
        if branch is None or saved.cross is None:
            return found
        options = {"spec": spec.cross, "scales": states.cross, "sinks": into.cross, "release": release, "comm": comm}
        taken = [branch, along]
        del branch, along
        cross = _attention_backward(rt, taken, saved.cross, **options)
        found = found._replace(cross=_with_bias(cross, dbranch_bias))
        branch, along, dbranch_bias = cross.x, cross.branch.residual, cross.branch.bias
        del cross
        if release and isinstance(saved.cross.qkv, NormLinearSaved):
            let_go(saved.cross.qkv.x)
    attention = MultiheadGradients(None)
    if branch is not None and saved.attention is not None:
        options = {"spec": spec.attention, "scales": states.attention, "sinks": into.attention, "release": release}
        taken = [branch, along]
        del branch, along
        attention = _attention_backward(rt, taken, saved.attention, **options, comm=comm)
    return found._replace(x=attention.x, attention=_with_bias(attention, dbranch_bias))


def _stream_of(part: MultiheadSpec | MLPSpec | None) -> Stream | None:
    """The stream that a part's norm carries."""
    if isinstance(part, MultiheadSpec):
        return part.qkv.stream if isinstance(part.qkv, NormLinearSpec) else None
    return None if part is None else part.stream


def _adds(stream: Stream | None) -> bool:
    return stream is not None and stream.add is not None


def _through_mlp(
    rt: Runtime,
    x: Tensor,
    given: TransformerInputs,
    spec: TransformerSpec,
    options: tuple[Scales | None, Any, Communicator | None],
    branch: Residual,
) -> tuple[Tensor, Tensor, MLPSaved]:
    """(the MLP's result, what is added to, what backward reads)."""
    weights, (scales, ready, comm) = given.mlp, options
    if not spec.beside:
        weights = weights._replace(fc2_bias=None)
    (out, read, *_), saved = _mlp_forward(
        rt,
        x,
        *weights,
        given.draws.mlp,
        *branch,
        spec=spec.mlp,
        scales=scales,
        ready=ready or (None, None),
        comm=comm if spec.mlp.fc1.parallel is not None else None,
    )
    return out, read, saved._replace(w1q=own(saved.w1q), w2q=own(saved.w2q))


def _with_bias(found: MultiheadGradients, dbias: Tensor | None) -> MultiheadGradients:
    """An attention's gradients with that of the bias that was added with the residual."""
    return found if dbias is None else found._replace(weights=found.weights._replace(proj_bias=dbias))


def _free_mlp(saved: MLPSaved, spec: MLPSpec, sinks: Sequence[Sink | None] | None) -> None:
    """Let go of what the MLP's backward has not: what its norm made, and fc1's weight."""
    let_go(saved.mean, saved.rstd, saved.scale, saved.w1q, saved.x if _adds(spec.stream) else None)
    if not sinks or sinks[0] is None or sinks[0].queue is None:  # else fc1's weight gradient still reads it
        let_go(saved.n)
