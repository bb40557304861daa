"""Composed layers with their options, in memory of any runtime; and the same parts called one after another, as a model
of parts calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from te_core import ops
from te_core.attention import AttentionSpec
from te_core.dtypes import DType
from te_core.layers import attention, attention_fp8, graph, linear, mlp, norm, norm_linear, residual, rope
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec, AttentionNeeds
from te_core.layers.attention_fp8 import AttentionFp8Spec
from te_core.layers.blocks import TERMS, AttentionBlock, TransformerBlock
from te_core.layers.communicator import Communicator
from te_core.layers.graph import Graph
from te_core.layers.linear import LinearSpec, Needs, Sink
from te_core.layers.mlp import MLPSpec
from te_core.layers.norm import NormSpec
from te_core.layers.norm_linear import NormLinearSpec
from te_core.layers.parallel import Split
from te_core.layers.residual import AddSpec, BranchNeeds, Stream
from te_core.layers.rope import RopeSpec, SplitSpec
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

    def multihead(self, before: bool, stream: Stream | None, cross: bool = False) -> AttentionBlock:
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
        return AttentionBlock(project, layer, proj, not alone, pair, split, turn)

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
        return TransformerBlock(first, inner, closing, crossed, self.norm if self.output else None, self.beside)

    # ---------------------------------------------------------------------------------------- the tensors

    def lead(self) -> tuple[int, ...]:
        """The dimensions of tokens."""
        return {"sbhd": (self.tokens, 2), "bshd": (2, self.tokens), "thd": (2 * self.tokens,)}[self.form]

    def values(self, make: Maker, spec: Graph) -> dict[str, Any]:
        """A tensor for each of the layer's inputs, by name."""
        return {name: self._value(name, make) for name in spec.inputs}

    def _value(self, name: str, make: Maker) -> Any:
        part = name.removeprefix("inter_attention_")
        q, kv, wide = self.heads * self.d, self.groups * self.d, self.inner * (1 + ops.is_gated(self.activation))
        rows = {"key_value": 2 * kv, "proj": self.hidden, "layernorm_mlp_fc1": wide, "layernorm_mlp_fc2": self.hidden}
        rows |= {"layernorm_qkv": q + 2 * kv, "qkv": q + 2 * kv, "layernorm_query": q, "query_layer": q}
        owner, _, kind = part.rpartition("_")
        if part in ("x", "encoded"):
            return make(*self.lead(), self.hidden)
        if part.endswith("_rng"):
            return make.rng()
        if part.endswith("angles"):
            return make(self.tokens, 1, 1, self.d, dtype=FP32)
        if "cu_seqlens" in part:
            sums = np.array([0, self.tokens - 3, 2 * self.tokens - 5], np.int32)
            return make.rt.tensor(sums) if make.rt.device.kind == "cpu" else make(3, dtype=I32)
        if part == "core_attention_bias":
            return make(1, self.heads, self.tokens, self.tokens)
        if part == "softmax_offset":
            return make(self.heads, dtype=FP32)
        if owner.endswith("layer_norm") or owner == "layernorm":
            return make(self.hidden) if kind == "weight" or "Layer" in self.kind else None
        if kind == "bias":
            return make(rows[owner]) if self.bias else None
        assert kind == "weight", name
        width = {"proj": q, "layernorm_mlp_fc2": self.inner}.get(owner, self.hidden)
        return make.weight((rows[owner], width), self.precision(), self.held)

    def states(self, make: Maker, spec: Graph) -> tuple[Scales | None, ...]:
        """A scaling state for each node that has one."""
        history = self.recipe == "delayed"
        return tuple(
            make.scales(node.rows) if node.rows and (history or not node.products) else None for node in spec.nodes
        )

    def sinks(self, make: Maker, values: dict[str, Any]) -> dict[str, Sink | None]:
        """Where weights' gradients go, by their names."""
        return {w: tape_cases.sink(make, self.sink, values[w].shape) for w in weights_of(values) if self.sink}

    def copies(self, make: Maker, values: dict[str, Any]) -> dict[str, Any]:
        """Weights quantized before, by their names."""
        p = self.precision()
        if p is None or not self.ready:
            return {}
        return {w: make.quantized(values[w].shape, p.weight, "both") for w in weights_of(values)}

    def given(self, make: Maker, spec: Graph) -> tuple[dict[str, Any], Any, Any]:
        """(tensors, scaling states, weights quantized before)."""
        values = self.values(make, spec)
        return values, self.states(make, spec), self.copies(make, values)

    def __call__(self, rt: Runtime, comm: Communicator | None = None) -> Round:
        """One round, on this rank."""
        make, spec, spread = Maker(rt), self.spec().graph(), {} if comm is None else {"comm": comm}
        values, states, copies = self.given(make, spec)
        sinks = in_order(spec, self.sinks(make, values))

        def backward(outputs: Any, saved: Any) -> Call:
            grads = [make(*t.shape) for t in outputs]
            options = {**spread, **({"release": True} if self.release else {})}
            return call(graph, "backward", spec, *grads, saved, scales=states, sinks=sinks, **options)

        options = {"scales": states, "ready": in_order(spec, copies), **spread}
        return Round(call(graph, "forward", spec, *values.values(), **options), backward)


def weights_of(names: Any) -> list[str]:
    """Those of products."""
    return [
        name for name in names if name.endswith("_weight") and "layer_norm" not in name and name != "layernorm_weight"
    ]


def in_order(spec: Graph, by_name: dict[str, Any]) -> tuple[Any, ...]:
    """What was given for weights by name, in the order of the graph's products."""
    return tuple(by_name[w] for node in spec.nodes for w in weights_of(node.inputs)) if by_name else ()


# ------------------------------------------------------------------------------------ one part after another


class Apart:
    """The parts of a case called one by one, forward; then backward, from the last to the first."""

    def __init__(self, rt: Runtime, case: Layer, given: tuple[dict[str, Any], Any, Any], comm: Any = None) -> None:
        self.rt, self.spec, self.comm, self.case = rt, case.spec(), comm, case
        self.values, states, self.copies = given
        nodes = self.spec.graph().nodes
        self.states = {node.outputs[0]: state for node, state in zip(nodes, states, strict=True)}
        self.cut = case.ranks if case.sequence else 1
        self.saved: dict[str, Any] = {}
        self.found: Found = {}
        self.sinks: dict[str, Any] = {}

    def options(self, spec: Any, state: str, *weights: str) -> dict[str, Any]:
        """Those of a product's forward."""
        ready = tuple(self.copies.get(w) for w in weights)
        return {"spec": spec, "comm": self.comm, "scales": self.states[state], "ready": ready}

    def options_back(self, spec: Any, state: str, *weights: str) -> dict[str, Any]:
        """And of its backward."""
        sinks = tuple(self.sinks.get(w) for w in weights)
        return {"spec": spec, "comm": self.comm, "scales": self.states[state], "sinks": sinks}

    def named(self, name: str, *parts: str) -> list[Any]:
        """Inputs whose names begin alike."""
        return [self.values.get(f"{name}_{part}") for part in parts]

    # -- attention

    def attend(self, at: str, x: Tensor, spec: AttentionBlock, branch: Sequence[Any] = ()) -> list[Any]:
        """(out, what comes out beside it)."""
        rt, kv, base = self.rt, None, spec.named(at)
        if spec.key_value is not None:
            name, encoded = f"{at}key_value", self.values[f"{at}encoded"]
            args, options = (
                self.named(name, "weight", "bias", "rng"),
                self.options(spec.key_value, name, f"{name}_weight"),
            )
            (kv,), self.saved[name] = linear.forward(rt, encoded, *args, **options)
        args, options = self.named(base, "weight", "bias", "rng"), self.options(spec.qkv, base, f"{base}_weight")
        beside: list[Any] = []
        if isinstance(spec.qkv, NormLinearSpec):
            norms = self.named(base, "layer_norm_weight", "layer_norm_bias")
            (packed, *beside), self.saved[base] = norm_linear.forward(rt, x, *norms, *args, *branch, **options)
        else:
            (packed,), self.saved[base] = linear.forward(rt, x, *args, **options)
        context = self.core(at, packed, kv, spec, x)
        del packed, kv
        weight, bias, rng = self.named(f"{at}proj", "weight", "bias", "rng")
        options = self.options(spec.proj, f"{at}out", f"{at}proj_weight")
        bias = None if spec.return_bias else bias
        (out,), self.saved[f"{at}proj"] = linear.forward(rt, context, weight, bias, rng, **options)
        return [out.reshape(*x.shape[:-1], out.shape[-1]), *beside]

    def core(self, at: str, a: Any, b: Any, spec: AttentionBlock, x: Tensor) -> Any:
        """Attention, and what comes between the projections and it."""
        rt, c, layer = self.rt, None, spec.layer
        lead, width = self.lead_of(x), (layer.heads, layer.d_qk)
        names = "q_angles", "k_angles", "cu_seqlens_q", "cu_seqlens_kv"
        q_angles, k_angles, cu_q, cu_kv = (self.values.get(at + name) for name in names)
        if spec.split is not None and spec.split.rope.fmt != "thd":
            cu_q = cu_kv = None
        if spec.split is not None and spec.key_value is None:
            (a, b, c), self.saved[f"{at}split"] = rope.split_forward(
                rt, a, q_angles, k_angles, cu_q, None, spec=spec.split
            )
        elif spec.split is not None:
            a = a.reshape(*lead, *width)
            (a,), self.saved[f"{at}turn"] = rope.forward(rt, a, q_angles, cu_q, None, spec=spec.turn)
            (b, c), self.saved[f"{at}split"] = rope.split_forward(rt, b, None, k_angles, cu_kv, None, spec=spec.split)
        elif b is not None and not isinstance(spec.attention, AttentionFp8Spec):
            a = a.reshape(*lead, *width)
        terms = [self.values.get(at + TERMS.get(f, "")) for f in AttentionInputs._fields[3:]]
        if not isinstance(spec.attention, AttentionFp8Spec):
            (context,), self.saved[f"{at}attention"] = attention.forward(rt, a, b, c, *terms, spec=spec.attention)
            return context
        if spec.split is not None:
            a, b, c = (t.reshape(*t.shape[:-2], prod(t.shape[-2:])) for t in (a, b, c))
        frames = [rt.empty((*lead, 0), tape_cases.dtypes.uint8) for t in (a, b) if t is not None]
        scales = self.states[f"{at}context"]
        (context,), self.saved[f"{at}attention"] = attention_fp8.forward(
            rt, a, b, c, *terms, *frames, spec=spec.attention, scales=scales
        )
        return context

    def attend_back(self, at: str, grads: list[Any], spec: AttentionBlock, x: Tensor) -> dict[str, Any]:
        """The gradients of x and of the branch; the parameters' join what was found."""
        rt = self.rt
        options: Any = self.options_back(spec.proj, f"{at}out", f"{at}proj_weight")
        dcontext, *found = linear.backward(rt, grads.pop(0), self.saved.pop(f"{at}proj"), **options)
        self.note(f"{at}proj_", weight=found[0], bias=found[1])
        if dcontext is None:
            return {}
        kept = self.saved.pop(f"{at}attention")
        if isinstance(spec.attention, AttentionFp8Spec):
            scales = self.states[f"{at}context"]
            da, db, dc = attention_fp8.backward(rt, dcontext, kept, spec=spec.attention, scales=scales)
        else:
            da, db, dc, dbias, _, dsink = attention.backward(rt, dcontext, None, kept, spec=spec.attention)  # type: ignore[arg-type]
            self.note(at, core_attention_bias=dbias, softmax_offset=dsink)
        del kept, dcontext
        layer, lead = spec.layer, self.lead_of(x)
        if spec.split is not None and da is not None:
            widths = ((layer.heads, layer.d_qk), (layer.groups, layer.d_qk), (layer.groups, layer.d_v))
            da, db, dc = (t.reshape(*lead, *w) for t, w in zip((da, db, dc), widths, strict=True))  # type: ignore[union-attr]
            split = self.saved.pop(f"{at}split")
            if spec.key_value is None:
                (da,) = rope.split_backward(rt, da, db, dc, split, spec=spec.split)
            else:
                (db,) = rope.split_backward(rt, db, dc, split, spec=spec.split)
                (da,) = rope.backward(rt, da, self.saved.pop(f"{at}turn"), spec=spec.turn)  # type: ignore[arg-type]
        if spec.key_value is not None and da is not None:
            da = da.reshape(*lead, layer.heads * layer.d_qk)
        del dc
        of_branch = self.project_back(spec.named(at), [da, *grads], spec, x)
        if spec.key_value is not None and db is not None:
            name = f"{at}key_value"
            options = self.options_back(spec.key_value, name, f"{name}_weight")
            dencoded, dw, dbias = linear.backward(rt, db, self.saved.pop(name), **options)
            self.note(at, encoded=dencoded, key_value_weight=dw, key_value_bias=dbias)
        return of_branch

    def project_back(self, base: str, grads: list[Any], spec: AttentionBlock, x: Tensor) -> dict[str, Any]:
        """That of the projection of x."""
        if grads[0] is None:
            return {}
        kept, options = self.saved.pop(base), self.options_back(spec.qkv, base, f"{base}_weight")
        if isinstance(spec.qkv, NormLinearSpec):
            three = (*grads, None, None)[:3]
            dx, dgamma, dbeta, dw, db, _, dres, dbias = norm_linear.backward(self.rt, *three, kept, **options)  # type: ignore[arg-type]
            self.note(f"{base}_", weight=dw, bias=db, layer_norm_weight=dgamma, layer_norm_bias=dbeta)
            return {"x": dx, "residual": dres, "bias": dbias}
        dx, dw, db = linear.backward(self.rt, grads[0], kept, **options)  # type: ignore[arg-type]
        self.note(f"{base}_", weight=dw, bias=db)
        if dx is not None:
            dx = dx.reshape(*x.shape)  # type: ignore[union-attr]
            if len(grads) > 1 and grads[1] is not None:
                dx = ops.add(self.rt, grads[1], dx)
        return {"x": dx}

    def lead_of(self, x: Tensor) -> tuple[int, ...]:
        """The dimensions of the tokens that attention sees."""
        return (x.shape[0] * self.cut, *x.shape[1:-1])

    def note(self, at: str, **gradients: Any) -> None:
        """They join what was found."""
        self.found |= {f"{at}{part}": t for part, t in gradients.items() if t is not None}

    # -- the layer

    def forward(self) -> list[Any]:
        """What the layer gives."""
        rt, spec, values = self.rt, self.spec, self.values
        x = values["x"]
        if isinstance(spec, AttentionBlock):
            return self.attend("", x, spec)
        out, *beside = self.attend("", x, spec.attention)
        read, bias, rng = beside[0] if beside else x, values.get("proj_bias"), values.get("attended_rng")
        if spec.cross is not None:
            at = "inter_attention_"
            out, read, *_ = self.attend(at, out, spec.cross, (read, bias, rng))
            bias, rng = values.get(f"{at}proj_bias"), values["crossed_rng"]
        name = "layernorm_mlp"
        weights = self.named(name, "layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight")
        last, draw = self.named(name, "fc2_bias", "rng")
        options = self.options(spec.mlp, f"{name}_out", f"{name}_fc1_weight", f"{name}_fc2_weight")
        if spec.beside:
            (other, read, *_), self.saved["mlp"] = mlp.forward(rt, read, *weights, last, draw, **options)
            out, last = ops.add(rt, out, other), None
        else:
            branch = read, bias, rng
            (out, read, *_), self.saved["mlp"] = mlp.forward(rt, out, *weights, None, draw, *branch, **options)
        draw = values["closing_rng"]
        (y,), self.saved["closing"] = residual.forward(rt, out, last, read, draw, spec=spec.closing)
        del out, read
        if spec.output is not None:
            args = self.named("layernorm", "weight", "bias")
            (y,), self.saved["output"] = norm.forward(rt, y, *args, spec=spec.output)
        return [y]

    def backward(self, grads: list[Any], sinks: dict[str, Any]) -> Found:
        """The gradients, by name."""
        rt, spec, self.sinks = self.rt, self.spec, sinks
        x = self.values["x"]
        if isinstance(spec, AttentionBlock):
            self.note("", **self.attend_back("", grads, spec, x))
            return self.found
        dy = grads[0]
        if spec.output is not None:
            dy, dgamma, dbeta = norm.backward(rt, dy, self.saved.pop("output"), spec=spec.output)
            self.note("layernorm_", weight=dgamma, bias=dbeta)
        branch, dbias, along = residual.backward(rt, dy, self.saved.pop("closing"), spec=spec.closing)
        del dy
        if not spec.beside:
            self.note("layernorm_mlp_", fc2_bias=dbias)
        if branch is None:
            return self.found
        name = "layernorm_mlp"
        options = self.options_back(spec.mlp, f"{name}_out", f"{name}_fc1_weight", f"{name}_fc2_weight")
        saved = self.saved.pop("mlp")
        dx, *of_mlp, _, dread, dbranch = mlp.backward(
            rt, branch, along, None, saved, **options, release=self.case.release
        )
        names = ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
        self.note("layernorm_mlp_", **dict(zip(names, of_mlp, strict=True)))
        branch, along = (branch, dx) if spec.beside else (dx, dread)
        del dx, dread, saved
        if spec.cross is not None:
            at = "inter_attention_"
            self.note(at, proj_bias=dbranch)
            found = self.attend_back(at, [branch, along], spec.cross, x)
            branch, along, dbranch = (found.get(name) for name in ("x", "residual", "bias"))
            del found
        self.note("", proj_bias=dbranch)
        if branch is not None:
            two = [branch, along]
            del branch, along
            self.note("", **self.attend_back("", two, spec.attention, x))
        return self.found
