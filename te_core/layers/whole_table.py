"""What attention between its projections, and a layer of a Transformer, take by name: for te_core/layers/table.py.

A parameter is called by the last two parts of its name in te_torch's module, with an underscore between.
"""

from __future__ import annotations

from typing import Any

from te_core.attention import MASK_ALIASES, MASKS, AttentionSpec, canonical_mask, with_mask
from te_core.errors import UnsupportedError
from te_core.layers.attention import AttentionLayerSpec, AttentionNeeds
from te_core.layers.entries import Argument, Asked, Option
from te_core.layers.mlp import MLPSpec
from te_core.layers.multihead import MultiheadSpec
from te_core.layers.norm_linear import NormLinearSpec
from te_core.layers.residual import AddSpec, BranchNeeds, Stream
from te_core.layers.rope import RopeSpec, SplitSpec
from te_core.layers.transformer import TransformerSpec
from te_core.ops.activation import Clamp

_FLAG = Option(False, bool)
_PART = Option(0.0, float, least=0.0, most=1.0)
_HEADS = Option(None, int, least=1, none=True)
#: Of both. Head counts are words of the caller's; how wide a head is follows from the projection's rows.
OPTIONS = {
    "num_attention_heads": _HEADS,
    "num_gqa_groups": _HEADS,
    "qkv_format": Option("sbhd", str, ("sbhd", "bshd")),
    "attn_mask_type": Option("causal", str, (*[m for m in MASKS if m != "arbitrary"], *MASK_ALIASES)),
    "window_size": Option(None, tuple, none=True),
    "qkv_weight_interleaved": Option(True, bool),
    "rotary_pos_interleaved": _FLAG,
    "attention_dropout": _PART,
    "kv_channels": Option(1, int, least=1, implied=True),
    "turned_by_angles": Option(False, bool, implied=True),
}
_MORE = (
    Argument("rotary_pos_emb", "inputs", "* A", "float32", optional=True, gradient=False),
    Argument("cu_seqlens_q", "inputs", "C", "int32", optional=True, gradient=False),
)
_DRAWS = Argument("", "inputs", dtypes="draws", optional=True, gradient=False)
_X = Argument("x", "x", "S B H")


def _parameter(name: str, shape: str, dtypes: str = "weight") -> Argument:
    return Argument(name, "inputs", shape, dtypes, optional=name.endswith("_bias"))


MULTIHEAD = (
    _X,
    _parameter("qkv_weight", "R H"),
    _parameter("qkv_bias", "R"),
    _parameter("proj_weight", "N P"),
    _parameter("proj_bias", "N"),
    *_MORE,
    *[_DRAWS] * 3,
)
#: The biases behind proj and fc2 are added with the residual.
TRANSFORMER = (
    _X,
    _parameter("layernorm_qkv_layer_norm_weight", "H", "any"),
    _parameter("layernorm_qkv_layer_norm_bias", "H", "any"),
    _parameter("layernorm_qkv_weight", "R H"),
    _parameter("layernorm_qkv_bias", "R"),
    _parameter("proj_weight", "H P"),
    _parameter("proj_bias", "H", "x"),
    _parameter("layernorm_mlp_layer_norm_weight", "H", "any"),
    _parameter("layernorm_mlp_layer_norm_bias", "H", "any"),
    _parameter("layernorm_mlp_fc1_weight", "F' H"),
    _parameter("layernorm_mlp_fc1_bias", "F'"),
    _parameter("layernorm_mlp_fc2_weight", "H F"),
    _parameter("layernorm_mlp_fc2_bias", "H", "x"),
    *_MORE,
    *[_DRAWS] * 6,
)
PRODUCTS = ("layernorm_qkv_weight", "proj_weight", "layernorm_mlp_fc1_weight", "layernorm_mlp_fc2_weight")


def multihead_spec(asked: Asked) -> MultiheadSpec:
    """Of attention between its projections."""
    qkv = asked.linear("qkv_weight", "qkv_bias", "x")
    before = "x", "qkv_weight", "qkv_bias"
    return _attention(asked, qkv, before, asked.linear("proj_weight", "proj_bias", *before))


def transformer_spec(asked: Asked, clamp: Clamp | None) -> TransformerSpec:
    """Of a layer."""
    o = asked.options
    normed = "x", "layernorm_qkv_layer_norm_weight", "layernorm_qkv_layer_norm_bias"
    project = asked.linear("layernorm_qkv_weight", "layernorm_qkv_bias", *normed)
    qkv = NormLinearSpec(asked.norm(), project, stream=Stream())
    attended = *normed, "layernorm_qkv_weight", "layernorm_qkv_bias"
    proj = asked.linear("proj_weight", "", *attended)
    out = *attended, "proj_weight"
    added = *out, "proj_bias", "layernorm_mlp_layer_norm_weight", "layernorm_mlp_layer_norm_bias"
    fc1 = asked.linear("layernorm_mlp_fc1_weight", "layernorm_mlp_fc1_bias", *added)
    inner = *added, "layernorm_mlp_fc1_weight", "layernorm_mlp_fc1_bias"
    fc2 = asked.linear("layernorm_mlp_fc2_weight", "", *inner)
    p = float(o["hidden_dropout"])
    needs = BranchNeeds(asked.any(*out), "proj_bias" in asked.needs, asked.any(*normed))
    stream = Stream(AddSpec(p, needs))
    inside = MLPSpec(fc1, fc2, asked.norm(), o["activation"], clamp=clamp, stream=stream)
    before = asked.any(*inner, "layernorm_mlp_fc2_weight")
    closing = AddSpec(p, BranchNeeds(before, "layernorm_mlp_fc2_bias" in asked.needs, before))
    return TransformerSpec(_attention(asked, qkv, attended, proj, return_bias=True), inside, closing)


def _attention(asked: Asked, qkv: Any, before: tuple[str, ...], proj: Any, return_bias: bool = False) -> MultiheadSpec:
    """An attention between these projections."""
    o = asked.options
    op = "transformer_layer" if return_bias else "multihead_attention"
    if asked.precision is not None and asked.precision.attention is not None:
        got, do = "a recipe with fp8_dpa or fp8_mha", "leave both out, or give a module of te_torch this recipe"
        raise UnsupportedError(op, got, "recipes whose attention runs in the activations' dtype", do)
    d, form = o["kv_channels"], o["qkv_format"]
    heads, groups = o["num_attention_heads"] or 1, o["num_gqa_groups"] or o["num_attention_heads"] or 1
    core = AttentionSpec(d**-0.5, form, form, dropout=float(o["attention_dropout"]))
    core = with_mask(core, canonical_mask(op, o["attn_mask_type"]), o["window_size"] or (-1, -1), None)
    turned, interleaved = o["turned_by_angles"], o["qkv_weight_interleaved"]
    needs = AttentionNeeds(*[asked.any(*before)] * 3)
    packing = "separate" if turned else "qkv"
    layer = AttentionLayerSpec(core, heads, groups, d, d, needs, packing, interleaved and not turned)
    split = None
    if turned:
        rotation = RopeSpec(form, o["rotary_pos_interleaved"])
        split = SplitSpec(heads, groups, (d,) * 3, interleaved, ((heads + 2 * groups) * d,), rotation)
    return MultiheadSpec(qkv, layer, proj, return_bias, split=split)
