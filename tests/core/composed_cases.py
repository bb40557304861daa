"""Composed layers with their options, in memory of any runtime; and the same parts called one after another, as a model
of parts calls them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from te_core import ops
from te_core.attention import AttentionSpec
from te_core.dtypes import DType
from te_core.layers import (
    attention,
    attention_fp8,
    linear,
    mlp,
    multihead,
    norm,
    norm_linear,
    residual,
    rope,
    transformer,
)
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec, AttentionNeeds
from te_core.layers.attention_fp8 import AttentionFp8Spec
from te_core.layers.communicator import Communicator
from te_core.layers.linear import LinearSpec, Needs, Sink
from te_core.layers.mlp import MLPSpec
from te_core.layers.multihead import Angles, MultiheadDraws, MultiheadInputs, MultiheadSpec, MultiheadWeights, Parts
from te_core.layers.multihead import Residual as BranchInputs
from te_core.layers.norm import NormSpec
from te_core.layers.norm_linear import NormLinearSpec
from te_core.layers.parallel import Split
from te_core.layers.residual import AddSpec, BranchNeeds, Stream
from te_core.layers.rope import RopeSpec, SplitSpec
from te_core.layers.transformer import (
    LayerDraws,
    LayerParts,
    MLPWeights,
    NormWeights,
    TransformerInputs,
    TransformerSpec,
)
from te_core.precision import Precision
from te_core.quantize.state import Scales
from te_core.recipe import DelayedScaling, Float8CurrentScaling, resolve, the_one
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core import tape_cases
from tests.core.tape_cases import BF16, FP32, I32, I64, call
from tests.core.tape_proof import Call, Round

Found = dict[str, Any]


class Maker(tape_cases.Maker):
    """Tensors with values where there is memory: normal ones, pairs for draws, scales."""

    def __call__(self, *shape: int, dtype: DType = BF16) -> Tensor:
        """A tensor."""
        if self.rt.device.kind != "cpu":
            return super().__call__(*shape, dtype=dtype)
        self.count += 1
        draw = np.random.default_rng(self.count + self.shift)
        if dtype is I64:
            return self.rt.tensor(draw.integers(0, 1 << 40, shape))
        return self.rt.tensor((0.5 * draw.standard_normal(shape)).astype(dtype.numpy))

    def scales(self, gemms: int, history: bool = True, recorded: bool = True, nonfinite: bool = False) -> Scales:
        """A state whose slots differ, with maxima that begin at nothing."""
        if self.rt.device.kind != "cpu":
            return super().scales(gemms, history, recorded, nonfinite)
        self.count += 1
        draw = np.random.default_rng(self.count)
        vectors = [draw.uniform(4, 60, n * gemms).astype(np.float32) for n in (3, 2)]
        views = [self.rt.tensor(t) for scale in vectors for t in (scale, np.zeros_like(scale))]
        return Scales(*views)


class Wants(NamedTuple):
    """What gradients are wanted of."""

    x: bool = True
    norms: bool = True
    qkv: bool = True
    proj: bool = True
    mlp: bool = True
    biases: bool = True
    encoded: bool = True
    added: bool = True  # the biases that are added with the residual


@dataclass(frozen=True)
class Layer:
    """A layer of a Transformer, or its attention alone."""

    recipe: str | None = None
    alone: bool = False  # attention by itself
    normed: bool = True  # alone: behind a norm
    form: str = "sbhd"
    tokens: int = 16
    hidden: int = 64
    heads: int = 4
    groups: int = 2
    d: int = 16
    inner: int = 96
    interleaved: bool = True
    kind: str = "LayerNorm"
    activation: str = "gelu"
    bias: bool = True
    p: float = 0.1
    core: tuple[tuple[str, Any], ...] = (("right", 0),)  # of the AttentionSpec
    recompute: bool = False
    late: bool = False  # the norm's output is what is added to
    output: bool = False
    beside: bool = False
    cross: bool = False
    turned: bool = False
    fp8: str = ""  # "dpa"; "mha": handed over between the parts
    wants: Wants = Wants()
    sink: str = ""
    ready: bool = False
    held: str = "plain"  # or the weights are quantized themselves, with these copies
    again: bool = False
    release: bool = True
    ranks: int = 1  # heads and inner are those of one
    sequence: bool = False  # and so are tokens of what comes in and out

    # ---------------------------------------------------------------------------------------- the specs

    def precision(self) -> Precision | None:
        """That of the products, and of attention."""
        if not self.fp8:
            return tape_cases.precision_of(self.recipe)
        recipe = DelayedScaling if self.recipe == "delayed" else Float8CurrentScaling
        made = resolve(recipe(fp8_dpa=True, fp8_mha=self.fp8 == "mha"))
        return the_one(replace(made, emulate=True))

    def linear(self, needs: Needs, mode: str, **options: Any) -> LinearSpec:
        """A product, whose weight is cut by rows ("column") or columns ("row") if there are several ranks."""
        split = Split(mode, self.ranks, self.sequence) if self.ranks > 1 else None
        return LinearSpec(BF16, self.precision(), needs, weight_dtype=BF16, parallel=split, **options)

    @property
    def norm(self) -> NormSpec:
        """Any of the norms."""
        return NormSpec(BF16, self.kind, 1e-5)

    def multihead(self, before: bool, stream: Stream | None, cross: bool = False) -> MultiheadSpec:
        """An attention; `before`: a gradient of its input is wanted."""
        wants, normed = self.wants, self.normed and not self.output
        bias = self.bias and wants.biases
        own = Needs(before or (normed and wants.norms), wants.qkv, bias)
        mha = self.fp8 == "mha"
        hand = mha and not self.turned and self.recipe == "delayed"
        project: Any = self.linear(own, "column", quantize_output=hand)
        if normed:
            project = NormLinearSpec(self.norm, project, self.late, stream, self.again)
        pair = self.linear(Needs(wants.encoded, wants.qkv, bias), "column", quantize_output=hand) if cross else None
        q, kv = any(own), any(pair.needs) if pair is not None else any(own)
        core = AttentionSpec(0.25, self.form, self.form, **dict(self.core))
        sink, scores = core.softmax == "learnable", core.bias == "post_scale_bias"
        packing = "separate" if self.turned else "kv" if cross else "qkv"
        layer: Any = AttentionLayerSpec(
            core,
            *(self.heads, self.groups, self.d, self.d),
            AttentionNeeds(q, kv, kv, scores, sink),
            packing,
            self.interleaved and not self.turned,
            self.recompute,
        )
        split = turn = None
        if self.turned:
            heads, row = (0, 2 * self.groups) if cross else (self.heads, self.heads + 2 * self.groups)
            rotation = RopeSpec(self.form)
            dims = (self.d,) * 3
            split = SplitSpec(heads, self.groups, dims, self.interleaved, (row * self.d,), rotation)
            turn = rotation if cross else None
        out = self.fp8 and (mha or self.recipe == "current")
        grad = bool(out) and self.recipe == "delayed"
        if self.fp8:
            rule = self.precision().attention  # type: ignore[union-attr]
            assert rule is not None
            layer = AttentionFp8Spec(layer, rule, BF16, bool(out), hand and not cross)
        alone = self.alone or self.beside
        proj = self.linear(Needs(any((q, kv, scores, sink)), wants.proj, alone and bias), "row", quantize_grad=grad)
        return MultiheadSpec(project, layer, proj, not alone, pair, split, turn)

    def spec(self) -> Any:
        """The layer's."""
        wants, bias = self.wants, self.bias and self.wants.biases
        added = self.bias and wants.added
        if self.alone:
            return self.multihead(wants.x, Stream() if self.normed and not self.late else None)
        first = self.multihead(wants.x, Stream())
        own = isinstance(first.qkv, NormLinearSpec)
        along = any(first.qkv.linear.needs) if isinstance(first.qkv, NormLinearSpec) else wants.x
        crossed = None
        out = any(first.proj.needs)
        if self.cross:
            assert own
            crossed = self.multihead(
                out or added or along, Stream(AddSpec(self.p, BranchNeeds(out, added, along))), cross=True
            )
            out, along = any(crossed.proj.needs), True
        stream = Stream() if self.beside else Stream(AddSpec(self.p, BranchNeeds(out, added, along)))
        fc1 = Needs(out or (added and not self.beside) or along or wants.norms, wants.mlp, bias)
        fc2 = Needs(any(fc1), wants.mlp, self.beside and bias)
        inner = MLPSpec(
            self.linear(fc1, "column"),
            self.linear(fc2, "row"),
            self.norm,
            self.activation,
            self.late,
            stream=stream,
            again=self.again,
        )
        closing = AddSpec(self.p, BranchNeeds(any(fc2), added and not self.beside, any(fc2)))
        return TransformerSpec(first, inner, closing, crossed, self.norm if self.output else None, self.beside)

    # ---------------------------------------------------------------------------------------- the tensors

    def lead(self) -> tuple[int, ...]:
        """The dimensions of tokens."""
        return {"sbhd": (self.tokens, 2), "bshd": (2, self.tokens), "thd": (2 * self.tokens,)}[self.form]

    def attention_inputs(self, make: Maker, spec: MultiheadSpec) -> MultiheadInputs:
        """Those of an attention."""
        h, q, kv = self.hidden, self.heads * self.d, self.groups * self.d
        of = lambda *shape: make(*shape) if self.bias else None  # noqa: E731
        cross = spec.key_value is not None
        width = q if cross else q + 2 * kv
        held = lambda *shape: make.weight(shape, self.precision(), self.held)  # noqa: E731
        gamma, beta = make(h), make(h) if "Layer" in self.kind else None
        if not isinstance(spec.qkv, NormLinearSpec):
            gamma = beta = None  # type: ignore[assignment]
        weights = MultiheadWeights(held(width, h), of(width), held(h, q), of(h), gamma, beta)
        core = multihead.attention_of(spec).core
        terms = AttentionInputs(None, rng=make.rng() if core.dropout else None)
        if core.padded:
            sums = np.array([0, self.tokens - 3, 2 * self.tokens - 5], np.int32)
            cu = make.rt.tensor(sums) if make.rt.device.kind == "cpu" else make(3, dtype=I32)
            terms = terms._replace(cu_q=cu, cu_kv=cu)
        if core.bias == "post_scale_bias":
            terms = terms._replace(bias=make(1, self.heads, self.tokens, self.tokens))
        if core.softmax == "learnable":
            terms = terms._replace(sink=make(self.heads, dtype=FP32))
        draws = MultiheadDraws(make.rng(), make.rng(), make.rng() if cross else None)
        found = MultiheadInputs(weights, terms, draws)
        if cross:
            weights = weights._replace(key_value=held(2 * kv, h), key_value_bias=of(2 * kv))
            found = found._replace(weights=weights, encoded=make(*self.lead(), h))
        if self.turned:
            angles = [make(self.tokens, 1, 1, self.d, dtype=FP32) for _ in range(2)]
            cu = terms.cu_q if self.form == "thd" else None
            found = found._replace(angles=Angles(*angles, cu, cu))
        return found

    def inputs(self, make: Maker, spec: Any) -> tuple[Tensor, Any]:
        """(x, what is given besides)."""
        x = make(*self.lead(), self.hidden)
        if self.alone:
            return x, self.attention_inputs(make, spec)
        first = self.attention_inputs(make, spec.attention)
        wide = self.inner * (2 if ops.is_gated(self.activation) else 1)
        norms = [make(self.hidden), make(self.hidden) if "Layer" in self.kind else None]
        of = lambda n: make(n) if self.bias else None  # noqa: E731
        w1, w2 = (
            make.weight(shape, self.precision(), self.held)
            for shape in ((wide, self.hidden), (self.hidden, self.inner))
        )
        weights = MLPWeights(*norms, w1, of(wide), w2, of(self.hidden))
        draws = LayerDraws(make.rng(), make.rng(), make.rng(), make.rng())
        crossed = None if spec.cross is None else self.attention_inputs(make, spec.cross)
        output = NormWeights(*norms) if self.output else NormWeights()
        return x, TransformerInputs(first, weights, draws, crossed, output)

    def states(self, make: Maker) -> Any:
        """A scaling state for each part that has one."""
        history = self.recipe == "delayed"
        if not history and not self.fp8:
            return LayerParts() if not self.alone else Parts()

        def of() -> Parts:
            each = [make.scales(1) if history else None for _ in range(3)]
            own = make.scales(3) if self.fp8 else None
            return Parts(each[0], own, each[1], each[2] if self.cross else None)

        if self.alone:
            return of()
        return LayerParts(of(), make.scales(2) if history else None, of() if self.cross else ())

    def sinks(self, make: Maker, given: Any) -> Any:
        """Where weights' gradients go."""

        def to(w: Any) -> Sink | None:
            wanted = self.sink and w is not None
            return tape_cases.sink(make, self.sink, w.shape) if wanted else None

        def of(one: MultiheadInputs | None) -> Any:
            return (
                () if one is None else Parts(to(one.weights.qkv), None, to(one.weights.proj), to(one.weights.key_value))
            )

        if self.alone:
            return of(given)
        return LayerParts(of(given.attention), (to(given.mlp.fc1), to(given.mlp.fc2)), of(given.cross))

    def copies(self, make: Maker, given: Any) -> Any:
        """Weights quantized before."""
        p = self.precision()

        def to(w: Any) -> Any:
            return None if w is None or p is None or not self.ready else make.quantized(w.shape, p.weight, "both")

        def of(one: MultiheadInputs | None) -> Any:
            return (
                () if one is None else Parts(to(one.weights.qkv), None, to(one.weights.proj), to(one.weights.key_value))
            )

        if self.alone:
            return of(given)
        return LayerParts(of(given.attention), (to(given.mlp.fc1), to(given.mlp.fc2)), of(given.cross))

    @property
    def module(self) -> Any:
        """The core's."""
        return multihead if self.alone else transformer

    def __call__(self, rt: Runtime, comm: Communicator | None = None) -> Round:
        """One round, on this rank."""
        make, spec, spread = Maker(rt), self.spec(), {} if comm is None else {"comm": comm}
        x, given = self.inputs(make, spec)
        states, sinks, copies = self.states(make), self.sinks(make, given), self.copies(make, given)

        def backward(outputs: Any, saved: Any) -> Call:
            grads: Any = tuple(make(*t.shape) for t in outputs)
            grads = grads if self.alone else grads[0]
            options = {**spread, **({"release": True} if self.release else {})}
            return call(self.module, "backward", spec, grads, saved, scales=states, sinks=sinks, **options)

        begins = call(self.module, "forward", spec, x, given, scales=states, ready=copies, **spread)
        return Round(begins, backward)


# ------------------------------------------------------------------------------------ one part after another


class Apart:
    """The parts of a case called one by one, forward; then backward, from the last to the first."""

    def __init__(
        self, rt: Runtime, case: Layer, inputs: tuple[Tensor, Any], states: Any, copies: Any, comm: Any = None
    ) -> None:
        self.rt, self.spec, self.comm = rt, case.spec(), comm
        self.x, self.given, self.states, self.copies = *inputs, states, copies
        self.release, self.cut = case.release, case.ranks if case.sequence else 1
        self.saved: dict[str, Any] = {}
        self.found: Found = {}

    # -- attention

    def attend(self, name: str, x: Tensor, spec: MultiheadSpec, given: MultiheadInputs, own: Any) -> list[Any]:
        """(out, what comes out beside it)."""
        rt, w, draws = self.rt, given.weights, given.draws
        states, copies = (Parts(*parts) for parts in own)
        kv = None
        if spec.key_value is not None:
            args = given.encoded, w.key_value, w.key_value_bias, draws.key_value
            options = {
                "spec": spec.key_value,
                "comm": self.comm,
                "scales": states.key_value,
                "ready": (copies.key_value,),
            }
            (kv,), self.saved[f"{name}.key_value"] = linear.forward(rt, *args, **options)  # type: ignore[arg-type]
        options = {"spec": spec.qkv, "comm": self.comm, "scales": states.qkv, "ready": (copies.qkv,)}
        if isinstance(spec.qkv, NormLinearSpec):
            args = x, w.gamma, w.beta, w.qkv, w.qkv_bias, draws.qkv, *given.branch
            (packed, *beside), self.saved[f"{name}.qkv"] = norm_linear.forward(rt, *args, **options)  # type: ignore[arg-type]
        else:
            (packed,), self.saved[f"{name}.qkv"] = linear.forward(rt, x, w.qkv, w.qkv_bias, draws.qkv, **options)  # type: ignore[arg-type]
            beside = []
        context = self.core(name, packed, kv, spec, given, states.attention, x)
        del packed, kv
        bias = None if spec.return_bias else w.proj_bias
        options = {"spec": spec.proj, "comm": self.comm, "scales": states.proj, "ready": (copies.proj,)}
        (out,), self.saved[f"{name}.proj"] = linear.forward(rt, context, w.proj, bias, draws.proj, **options)  # type: ignore[arg-type]
        return [out.reshape(*x.shape[:-1], out.shape[-1]), *beside]

    def core(self, name: str, a: Any, b: Any, spec: Any, given: MultiheadInputs, scales: Any, x: Tensor) -> Any:
        """Attention, and what comes between the projections and it."""
        rt, c, layer, angles = self.rt, None, multihead.attention_of(spec), given.angles
        lead, width = self.lead_of(x), (layer.heads, layer.d_qk)
        if spec.split is not None and spec.key_value is None:
            (a, b, c), self.saved[f"{name}.split"] = rope.split_forward(
                rt, a, angles.q, angles.k, angles.cu_q, None, spec=spec.split
            )
        elif spec.split is not None:
            (a,), self.saved[f"{name}.turn"] = rope.forward(
                rt, a.reshape(*lead, *width), angles.q, angles.cu_q, None, spec=spec.turn
            )
            (b, c), self.saved[f"{name}.split"] = rope.split_forward(
                rt, b, None, angles.k, angles.cu_kv, None, spec=spec.split
            )
        elif b is not None and not isinstance(spec.attention, AttentionFp8Spec):
            a = a.reshape(*lead, *width)
        if not isinstance(spec.attention, AttentionFp8Spec):
            inputs = given.terms._replace(a=a, b=b, c=c)
            (context,), self.saved[f"{name}.attention"] = attention.forward(rt, *inputs, spec=spec.attention)
            return context
        if spec.split is not None:
            a, b, c = (t.reshape(*t.shape[:-2], prod(t.shape[-2:])) for t in (a, b, c))
        frames = [rt.empty((*lead, 0), tape_cases.dtypes.uint8) for t in (a, b) if t is not None]
        inputs = given.terms._replace(a=a, b=b, c=c)
        (context,), self.saved[f"{name}.attention"] = attention_fp8.forward(
            rt, *inputs, *frames, spec=spec.attention, scales=scales
        )
        return context

    def attend_back(self, name: str, grads: list[Any], spec: MultiheadSpec, own: Any, x: Tensor) -> dict[str, Any]:
        """The gradients of x and of the branch; the parameters' join what was found."""
        rt = self.rt
        states, into = (Parts(*parts) for parts in own)
        saved = lambda part: self.saved.pop(f"{name}.{part}")  # noqa: E731
        options: Any = {"spec": spec.proj, "comm": self.comm, "scales": states.proj, "sinks": (into.proj,)}
        dcontext, *found = linear.backward(rt, grads.pop(0), saved("proj"), **options)
        self.note(name, proj=found[0], proj_bias=found[1])
        if dcontext is None:
            return {}
        kept = saved("attention")
        if isinstance(spec.attention, AttentionFp8Spec):
            da, db, dc = attention_fp8.backward(rt, dcontext, kept, spec=spec.attention, scales=states.attention)
        else:
            da, db, dc, dbias, _, dsink = attention.backward(rt, dcontext, None, kept, spec=spec.attention)  # type: ignore[arg-type]
            self.note(name, bias=dbias, sink=dsink)
        del kept, dcontext
        layer, lead = multihead.attention_of(spec), self.lead_of(x)
        if spec.split is not None and da is not None:
            widths = ((layer.heads, layer.d_qk), (layer.groups, layer.d_qk), (layer.groups, layer.d_v))
            da, db, dc = (t.reshape(*lead, *w) for t, w in zip((da, db, dc), widths, strict=True))  # type: ignore[union-attr]
            if spec.key_value is None:
                (da,) = rope.split_backward(rt, da, db, dc, saved("split"), spec=spec.split)
            else:
                (db,) = rope.split_backward(rt, db, dc, saved("split"), spec=spec.split)
                (da,) = rope.backward(rt, da, saved("turn"), spec=spec.turn)  # type: ignore[arg-type]
        if spec.key_value is not None and da is not None:
            da = da.reshape(*lead, layer.heads * layer.d_qk)
        del dc
        of_branch = self.project_back(name, [da, *grads], spec, (states, into), x)
        if spec.key_value is not None and db is not None:
            options = {
                "spec": spec.key_value,
                "comm": self.comm,
                "scales": states.key_value,
                "sinks": (into.key_value,),
            }
            dencoded, dw, dbias = linear.backward(rt, db, saved("key_value"), **options)
            self.note(name, encoded=dencoded, key_value=dw, key_value_bias=dbias)
        return of_branch

    def project_back(self, name: str, grads: list[Any], spec: MultiheadSpec, own: Any, x: Tensor) -> dict[str, Any]:
        """That of the projection of x."""
        states, into = own
        if grads[0] is None:
            return {}
        kept, options = (
            self.saved.pop(f"{name}.qkv"),
            {"spec": spec.qkv, "comm": self.comm, "scales": states.qkv, "sinks": (into.qkv,)},
        )
        if isinstance(spec.qkv, NormLinearSpec):
            three = (*grads, None, None)[:3]
            dx, dgamma, dbeta, dw, db, _, dres, dbias = norm_linear.backward(self.rt, *three, kept, **options)  # type: ignore[arg-type]
            self.note(name, qkv=dw, qkv_bias=db, gamma=dgamma, beta=dbeta)
            return {"x": dx, "residual": dres, "bias": dbias}
        dx, dw, db = linear.backward(self.rt, grads[0], kept, **options)  # type: ignore[arg-type]
        self.note(name, qkv=dw, qkv_bias=db)
        if dx is not None:
            dx = dx.reshape(*x.shape)  # type: ignore[union-attr]
            if len(grads) > 1 and grads[1] is not None:
                dx = ops.add(self.rt, grads[1], dx)
        return {"x": dx}

    def lead_of(self, x: Tensor) -> tuple[int, ...]:
        """The dimensions of the tokens that attention sees."""
        return (x.shape[0] * self.cut, *x.shape[1:-1])

    def note(self, name: str, **gradients: Any) -> None:
        """They join what was found."""
        self.found |= {f"{name}.{part}": t for part, t in gradients.items() if t is not None}

    # -- the layer

    def forward(self) -> list[Any]:
        """What the layer gives."""
        rt, spec, given = self.rt, self.spec, self.given
        if isinstance(spec, MultiheadSpec):
            return self.attend("attention", self.x, spec, given, (self.states, self.copies))
        states, copies = LayerParts(*self.states), LayerParts(*self.copies)
        out, *beside = self.attend(
            "attention", self.x, spec.attention, given.attention, (states.attention, copies.attention)
        )
        read, bias, rng = beside[0] if beside else self.x, given.attention.weights.proj_bias, given.draws.attended
        if spec.cross is not None:
            crossed = given.cross._replace(branch=BranchInputs(read, bias, rng))
            out, read, *_ = self.attend("cross", out, spec.cross, crossed, (states.cross, copies.cross))
            bias, rng = given.cross.weights.proj_bias, given.draws.crossed
        w, options = (
            given.mlp,
            {"spec": spec.mlp, "comm": self.comm, "scales": states.mlp, "ready": copies.mlp or (None, None)},
        )
        if spec.beside:
            (other, read, *_), self.saved["mlp"] = mlp.forward(rt, read, *w, given.draws.mlp, **options)
            out = ops.add(rt, out, other)
        else:
            args = *w[:5], None, given.draws.mlp, read, bias, rng
            (out, read, *_), self.saved["mlp"] = mlp.forward(rt, out, *args, **options)
        last = None if spec.beside else w.fc2_bias
        (y,), self.saved["closing"] = residual.forward(rt, out, last, read, given.draws.closing, spec=spec.closing)
        del out, read
        if spec.output is not None:
            (y,), self.saved["output"] = norm.forward(rt, y, *given.output, spec=spec.output)
        return [y]

    def backward(self, grads: list[Any], sinks: Any) -> Found:
        """The gradients, by name."""
        rt, spec = self.rt, self.spec
        if isinstance(spec, MultiheadSpec):
            found = self.attend_back("attention", grads, spec, (self.states, sinks), self.x)
            self.note("", **found)
            return self.found
        states, into, dy = LayerParts(*self.states), LayerParts(*sinks), grads[0]
        if spec.output is not None:
            dy, dgamma, dbeta = norm.backward(rt, dy, self.saved.pop("output"), spec=spec.output)
            self.note("output", gamma=dgamma, beta=dbeta)
        branch, dbias, along = residual.backward(rt, dy, self.saved.pop("closing"), spec=spec.closing)
        del dy
        if branch is None:
            return self.found
        options = {
            "spec": spec.mlp,
            "comm": self.comm,
            "scales": states.mlp,
            "sinks": into.mlp or (None, None),
            "release": self.release,
        }
        dx, *of_mlp, _, dread, dbranch = mlp.backward(rt, branch, along, None, self.saved.pop("mlp"), **options)
        names = ("gamma", "beta", "fc1", "fc1_bias", "fc2", "fc2_bias")
        self.note("mlp", **dict(zip(names, of_mlp, strict=True)))
        if not spec.beside:
            self.note("mlp", fc2_bias=dbias)
        branch, along = (branch, dx) if spec.beside else (dx, dread)
        del dx, dread
        if spec.cross is not None:
            self.note("cross", proj_bias=dbranch)
            found = self.attend_back("cross", [branch, along], spec.cross, (states.cross, into.cross), self.x)
            branch, along, dbranch = (found.get(name) for name in ("x", "residual", "bias"))
            del found
        self.note("attention", proj_bias=dbranch)
        if branch is not None:
            two = [branch, along]
            del branch, along
            self.note(
                "", **self.attend_back("attention", two, spec.attention, (states.attention, into.attention), self.x)
            )
        return self.found


def by_name(found: Any, alone: bool) -> Found:
    """The gradients of a composed layer under the same names."""

    def of(name: str, one: Any) -> Found:
        parts = {**one.weights._asdict(), "bias": one.bias, "sink": one.sink, "encoded": one.encoded}
        return {f"{name}.{part}": t for part, t in parts.items() if t is not None}

    if alone:
        own = {".x": found.x, **{f".{name}": t for name, t in found.branch._asdict().items()}}
        return {k: t for k, t in own.items() if t is not None} | of("attention", found)
    made = of("attention", found.attention) | of("cross", found.cross)
    for name, part in (("mlp", found.mlp), ("output", found.output)):
        made |= {f"{name}.{key}": t for key, t in part._asdict().items() if t is not None}
    return made if found.x is None else made | {".x": found.x}
