"""Blocks of a Transformer as graphs: attention between its projections, and whole layers.

    x1 = x  + dropout(attention(norm(x)) + bias)
    x2 = x1 + dropout(cross(norm(x1)) + bias)            (with `cross`)
    y  = x2 + dropout(mlp(norm(x2)) + bias)              (with `output` then the norm of that)

The norm of the part that comes next forms the sum (te_core/layers/residual.py), the last one has a pass of its own.
What a part adds to is what its norm read, or, where the part's spec returns it, its norm's output. With `beside` the
MLP reads x itself, and one step adds both.

Values are called by the last two parts of a parameter's name in te_torch's module, with an underscore between; random
pairs by what draws them. Those of cross attention in a layer begin with "inter_attention_".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from te_core.attention import AttentionSpec
from te_core.errors import UnsupportedError
from te_core.layers import attention, attention_fp8, linear, mlp, norm, norm_linear, residual, rope
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec
from te_core.layers.attention_fp8 import AttentionFp8Spec
from te_core.layers.graph import Functions, Graph, Node, View
from te_core.layers.linear import LinearSpec
from te_core.layers.mlp import MLPSpec
from te_core.layers.norm import NormSpec
from te_core.layers.norm_linear import NormLinearSpec
from te_core.layers.residual import AddSpec, BranchNeeds, Stream
from te_core.layers.rope import RopeSpec, SplitSpec

LINEAR = Functions(linear.forward, linear.backward)
NORM_LINEAR = Functions(norm_linear.forward, norm_linear.backward)
MLP = Functions(mlp.forward, mlp.backward, releases=True)
ATTENTION = Functions(attention.forward, attention.backward)
ATTENTION_FP8 = Functions(attention_fp8.forward, attention_fp8.backward)
NORM = Functions(norm.forward, norm.backward)
ADD = Functions(residual.forward, residual.backward)
TURN = Functions(rope.forward, rope.backward)
SPLIT = Functions(rope.split_forward, rope.split_backward)

#: What attention reads besides q, k and v, as `AttentionInputs` and as values call it.
TERMS = {
    "bias": "core_attention_bias",
    "slopes": "alibi_slopes",
    "sink": "softmax_offset",
    "cu_q": "cu_seqlens_q",
    "cu_kv": "cu_seqlens_kv",
    "cu_q_padded": "cu_seqlens_q_padded",
    "cu_kv_padded": "cu_seqlens_kv_padded",
    "mask": "attention_mask",
    "rng": "attention_rng",
}


@dataclass(frozen=True)
class AttentionBlock:
    """The specs of attention between its projections, each as the layer has it alone."""

    qkv: LinearSpec | NormLinearSpec  # of the queries alone in cross attention
    attention: AttentionLayerSpec | AttentionFp8Spec
    proj: LinearSpec
    return_bias: bool = False  # proj's bias is not added: who adds the residual adds it
    key_value: LinearSpec | None = None  # cross attention
    split: SplitSpec | None = None  # q, k and v (cross: k and v) are copied apart, and turned by angles
    turn: RopeSpec | None = None  # cross attention: queries are turned

    def __post_init__(self) -> None:
        packing = "separate" if self.split is not None else "kv" if self.key_value is not None else "qkv"
        got = ""
        if self.layer.packing != packing:
            got = f"attention of packing={self.layer.packing!r} (here {packing!r} is what it is given)"
        elif self.layer.core.max_logit:
            got = "attention that returns its largest logits"
        if got:
            raise UnsupportedError(
                "AttentionBlock", got, "parts that take what the one before gives", "run the parts one by one"
            )

    @property
    def layer(self) -> AttentionLayerSpec:
        """Attention's, in FP8 or not."""
        return self.attention.attention if isinstance(self.attention, AttentionFp8Spec) else self.attention

    @property
    def normed(self) -> bool:
        """Whether a norm comes first."""
        return isinstance(self.qkv, NormLinearSpec)

    def named(self, at: str) -> str:
        """What the names of the parameters of x's projection begin with, and how its result is called."""
        name = "qkv" if self.key_value is None else "query" if self.normed else "query_layer"
        return f"{at}layernorm_{name}" if self.normed else at + name

    def nodes(self, x: str = "x", at: str = "", branch: Sequence[str] = ()) -> tuple[Node, ...]:
        """The block's nodes, which make `{at}out` and, where the norm gives them, `{at}normed` and `{at}stream` of the
        value `x`; `branch`: the residual, the bias and the random pair of the sum that the norm forms."""
        base = self.named(at)
        nodes: list[Node] = []
        if self.key_value is not None:  # before the queries, as a model of parts has it
            kv = f"{at}key_value"
            nodes.append(product(LINEAR, self.key_value, f"{at}encoded", kv, (kv,)))
        if isinstance(self.qkv, NormLinearSpec):
            outputs = returned(base, at, self.qkv.return_norm, self.qkv.stream)
            nodes.append(product(NORM_LINEAR, self.qkv, x, base, outputs, branch))
        else:
            nodes.append(product(LINEAR, self.qkv, x, base, (base,)))
        nodes += self._core(x, at, base)
        bias = "" if self.return_bias else f"{at}proj_bias"
        proj = product(LINEAR, self.proj, f"{at}context", f"{at}proj", (f"{at}out",))
        nodes.append(proj._replace(inputs=(*proj.inputs[:2], bias, *proj.inputs[3:])))
        return tuple(nodes)

    def _core(self, x: str, at: str, base: str) -> list[Node]:
        """Attention, and what comes between the projections and it."""
        layer, low = self.layer, isinstance(self.attention, AttentionFp8Spec)
        kv = f"{at}key_value" if self.key_value is not None else ""
        heads = (layer.heads, layer.d_qk), (layer.groups, layer.d_qk), (layer.groups, layer.d_v)
        sides = [View(i, of, (of[0] * of[1],)) for i, of in enumerate(heads)]
        apart = View(0, sides[0].to, heads[0])
        nodes: list[Node] = []
        operands: tuple[str, ...] = base, kv, ""
        inputs: tuple[str, ...]
        if self.split is not None:
            q, *others = (f"{at}{name}" for name in "qkv")
            angles, cu = (f"{at}q_angles", f"{at}k_angles"), ("", "")
            if self.split.rope.fmt == "thd":
                cu = f"{at}cu_seqlens_q", f"{at}cu_seqlens_kv"
            if not kv:
                inputs = base, *angles, cu[0], ""
                nodes.append(Node(SPLIT, self.split, inputs, (q, *others), any(layer.needs[:3])))
            else:
                inputs = kv, "", angles[1], cu[1], ""
                nodes.append(Node(SPLIT, self.split, inputs, tuple(others), any(layer.needs[1:3])))
                if self.turn is not None:
                    inputs = base, angles[0], cu[0], ""
                    nodes.insert(0, Node(TURN, self.turn, inputs, (q,), layer.needs.q, views=(apart,)))
            operands = base if kv and self.turn is None else q, *others
        if low:
            views = [side for side, name in zip(sides, operands, strict=True) if name not in (base, kv, "")]
        else:
            views = [apart] if kv and operands[0] == base else []
        terms = [f"{at}{TERMS[f]}" if f in used(layer.core) else "" for f in AttentionInputs._fields[3:]]
        node = Node(ATTENTION, self.attention, (*operands, *terms), (f"{at}context", ""), any(layer.needs))
        if low:
            frames = x, f"{at}encoded" if kv else ""
            node = node._replace(layer=ATTENTION_FP8, inputs=(*node.inputs, *frames), outputs=node.outputs[:1], rows=3)
        return [*nodes, node._replace(ranks="context", views=tuple(views))]

    def graph(self, inputs: Sequence[str] = ()) -> Graph:
        """The block by itself."""
        outputs = ["out"]
        if isinstance(self.qkv, NormLinearSpec):
            outputs += [n for n in returned("", "", self.qkv.return_norm, self.qkv.stream) if n]
        return graph_of(self.nodes(), inputs, outputs)


@dataclass(frozen=True)
class TransformerBlock:
    """The specs of the parts of a layer, each as the part has it alone, with the stream that its norm carries."""

    attention: AttentionBlock
    mlp: MLPSpec
    closing: AddSpec  # the last addition
    cross: AttentionBlock | None = None
    output: NormSpec | None = None  # of the sum
    beside: bool = False  # attention and MLP read the same

    def __post_init__(self) -> None:
        got, adds = "", [_adds(part) for part in (self.cross, self.mlp) if part is not None]
        if self.beside and (self.cross is not None or self.mlp.stream != Stream()):
            got = "beside=True with cross attention, or with an MLP that reads another stream than x"
        elif not self.beside and not all(adds):
            got = "a part behind attention whose norm does not form the sum"
        elif _adds(self.attention):
            got = "a first norm that forms a sum"
        if got:
            allowed = "x, then parts whose streams add the branch before (beside=True: the same stream for both)"
            raise UnsupportedError("TransformerBlock", got, allowed, "correct it, or run the parts one by one")

    def graph(self, inputs: Sequence[str] = ()) -> Graph:
        """The layer."""
        nodes = [*self.attention.nodes()]
        out, read = "out", stream_behind(self.attention, "", "x")
        branch = read, "" if self.beside else "proj_bias", "attended_rng"
        if self.cross is not None:
            at = "inter_attention_"
            nodes += self.cross.nodes(out, at, branch)
            out, read = f"{at}out", stream_behind(self.cross, at, read)
            branch = read, f"{at}proj_bias", "crossed_rng"
        at = "layernorm_mlp"
        outputs = returned(f"{at}_out", f"{at}_", self.mlp.return_norm, self.mlp.stream)
        inputs_of = [f"{at}_{n}" for n in ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias")]
        inputs_of += [f"{at}_fc2_weight", f"{at}_fc2_bias" if self.beside else "", f"{at}_rng"]
        x, entry = (read, ()) if self.beside else (out, branch)
        ranks = "" if self.mlp.fc1.parallel is None else "tensor"
        wanted = any(self.mlp.fc2.needs)
        nodes.append(Node(MLP, self.mlp, (x, *inputs_of, *entry), outputs, wanted, 2, 2, ranks))
        read = f"{at}_normed" if self.mlp.return_norm else f"{at}_stream"
        last, bias = f"{at}_out", f"{at}_fc2_bias"
        if self.beside:
            needs = BranchNeeds(any(self.attention.proj.needs), False, wanted)
            nodes.append(Node(ADD, AddSpec(0.0, needs), (out, "", last, ""), ("both",), any(needs)))
            last, bias = "both", ""
        added = "y" if self.output is None else "sum"
        nodes.append(Node(ADD, self.closing, (last, bias, read, "closing_rng"), (added,), any(self.closing.needs)))
        if self.output is not None:
            nodes.append(Node(NORM, self.output, ("sum", "layernorm_weight", "layernorm_bias"), ("y",)))
        return graph_of(nodes, inputs, ("y",))


def product(layer: Functions, spec: Any, x: str, name: str, outputs: Sequence[str], branch: Sequence[str] = ()) -> Node:
    """A linear of the value x, behind a norm or not, whose parameters' names begin with this one's."""
    own = spec.linear if isinstance(spec, NormLinearSpec) else spec
    norm_of = (f"{name}_layer_norm_weight", f"{name}_layer_norm_bias") if own is not spec else ()
    inputs = (x, *norm_of, f"{name}_weight", f"{name}_bias", f"{name}_rng", *branch)
    ranks = "" if own.parallel is None else "tensor"
    return Node(layer, spec, inputs, tuple(outputs), any(own.needs), 1, 1, ranks)


def returned(out: str, at: str, return_norm: bool, stream: Stream | None) -> tuple[str, str, str]:
    """The outputs of a layer that begins with a norm, by place."""
    beside = [f"{at}normed"] * return_norm + [f"{at}stream"] * (stream is not None)
    return (out, *beside, "", "")[:3]  # type: ignore[return-value]


def used(core: AttentionSpec) -> set[str]:
    """Which terms an attention reads."""
    names = {"rng"} if core.dropout else set()
    names |= {"cu_q", "cu_kv", "cu_q_padded", "cu_kv_padded"} if core.padded else set()
    names |= {"bias"} if core.bias == "post_scale_bias" else set()
    names |= {"slopes"} if core.bias == "alibi" and not core.default_slopes else set()
    names |= {"sink"} if core.softmax == "learnable" else set()
    return names | ({"mask"} if core.masked else set())


def stream_behind(block: AttentionBlock, at: str, x: str) -> str:
    """The value that the branch of an attention is added to: its norm's output, its stream, or what it read."""
    if not isinstance(block.qkv, NormLinearSpec):
        return x
    return f"{at}normed" if block.qkv.return_norm else f"{at}stream"


def graph_of(nodes: Sequence[Node], inputs: Sequence[str], outputs: Sequence[str]) -> Graph:
    """The graph of these nodes; without `inputs` it takes what they read, in the order in which they read it."""
    made = {name for node in nodes for name in node.outputs}
    read = dict.fromkeys(name for node in nodes for name in node.inputs if name and name not in made)
    return Graph(tuple(nodes), tuple(inputs or read), tuple(outputs))


def _adds(part: AttentionBlock | MLPSpec) -> bool:
    """Whether a part's norm forms the sum that the stream carries."""
    stream = getattr(part.qkv, "stream", None) if isinstance(part, AttentionBlock) else part.stream
    return stream is not None and stream.add is not None
