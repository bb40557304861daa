"""The table of layers: what each takes and gives by name, for all that call layers by name.

Names are those of te_torch's parameters and options. What a layer of `te_core.layers` takes or gives besides is not
offered by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from te_core.attention import FORMATS, MASK_ALIASES, MASKS, SOFTMAX, AttentionSpec, canonical_mask, with_mask
from te_core.errors import UnsupportedError
from te_core.layers import (
    activation,
    attention,
    graph,
    grouped_linear,
    l2_norm,
    linear,
    mlp,
    norm,
    norm_linear,
    permute,
    rope,
    router,
    softmax,
)
from te_core.layers import residual as added
from te_core.layers.blocks import AttentionBlock, TransformerBlock
from te_core.layers.entries import Argument, Asked, Layer, Option
from te_core.layers.graph import Graph
from te_core.layers.linear import LinearSpec
from te_core.layers.residual import AddSpec, BranchNeeds, Stream
from te_core.ops.activation import KINDS, Clamp
from te_core.ops.norm import KINDS as NORMS
from te_core.ops.router import FORMS as ROUTINGS
from te_core.ops.router import SCORES, RouterTerms
from te_core.ops.softmax import band_of


def _clamp(asked: Asked) -> Clamp | None:
    values = [asked.options[name] for name in ("limit", "alpha", "glu_linear_offset")]
    if values == [None] * 3:
        return None
    return Clamp(*[float(b if a is None else a) for a, b in zip(values, Clamp(), strict=True)])


def _norm(asked: Asked, kind: str = "") -> norm.NormSpec:
    o = asked.options
    options = kind or o["normalization"], float(o["eps"]), o["zero_centered_gamma"]
    return norm.NormSpec(asked.dtype, *options, *o.get("sm_margins", ()))


def _stream(asked: Asked) -> Stream | None:
    """The residual stream of a layer that begins with a norm; without `hidden_dropout` (None) nothing is added."""
    o = asked.options
    if not o["stream"]:
        return None
    needs = BranchNeeds(*[name in asked.needs for name in ("x", "residual_bias", "residual")])
    return Stream(None if o["hidden_dropout"] is None else AddSpec(float(o["hidden_dropout"]), needs))


_INTO_NORM = "x", "layer_norm_weight", "layer_norm_bias", "residual", "residual_bias"


def _of_norm(asked: Asked, product: LinearSpec) -> dict[str, Any]:
    """Fields of a spec that begins with a norm, before this product."""
    o = asked.options
    return {
        "norm": _norm(asked),
        "return_norm": o["return_layernorm_output"],
        "stream": _stream(asked),
        "again": o.get("recompute_norm_output", False),
        "gather_norm": o.get("return_layernorm_output_gathered", False) and product.parallel is not None,
    }


def _norm_linear_spec(asked: Asked) -> norm_linear.NormLinearSpec:
    product = asked.linear("weight", "bias", *_INTO_NORM)
    return norm_linear.NormLinearSpec(linear=product, **_of_norm(asked, product))


def _mlp_spec(asked: Asked) -> mlp.MLPSpec:
    fc1 = asked.linear("fc1_weight", "fc1_bias", *_INTO_NORM)
    fc2 = asked.linear("fc2_weight", "fc2_bias", *_INTO_NORM, "fc1_weight", "fc1_bias", product=1)
    o, more = asked.options, _of_norm(asked, fc1)
    return mlp.MLPSpec(fc1, fc2, activation=o["activation"], clamp=_clamp(asked), checkpoint=o["checkpoint"], **more)


def _grouped_spec(asked: Asked) -> grouped_linear.GroupedSpec:
    products = range(asked.options["num_gemms"])
    return grouped_linear.GroupedSpec(tuple(asked.linear("weight", "bias", "x", product=i) for i in products))


def _attention_spec(asked: Asked) -> attention.AttentionLayerSpec:
    o = asked.options
    mask, form = canonical_mask("attention", o["attn_mask_type"]), o["qkv_format"]
    scale = o["softmax_scale"]
    core = AttentionSpec(
        o["head_dim_qk"] ** -0.5 if scale is None else float(scale),
        form,
        form,
        bias=o["core_attention_bias_type"],
        softmax=o["softmax_type"],
        softcap=float(o["logit_softcap"]),
        dropout=float(o["attention_dropout"]),
        deterministic=o["deterministic"],
        max_q=o["max_seqlen_q"],
        max_kv=o["max_seqlen_kv"],
    )
    core = with_mask(core, mask, o["window_size"] or (-1, -1), o["bottom_right_diagonal"])
    core = replace(core, padded=True) if form == "thd" else core
    needs = attention.AttentionNeeds(*[n in asked.needs for n in ("q", "k", "v", "core_attention_bias")])
    needs = needs._replace(sink="softmax_offset" in asked.needs)
    sizes = o["num_attention_heads"], o["num_gqa_groups"], o["head_dim_qk"], o["head_dim_v"]
    return attention.AttentionLayerSpec(core, *sizes, needs)


def _softmax_spec(asked: Asked) -> softmax.SoftmaxSpec:
    o = asked.options
    left, right = o["window_size"] or (-1, -1)
    return softmax.SoftmaxSpec(float(o["scale"]), band_of(o["causal"], left, right), "softmax_offset" in asked.needs)


def _add_spec(asked: Asked) -> AddSpec:
    needs = BranchNeeds(*[name in asked.needs for name in ("x", "bias", "residual")])
    return AddSpec(float(asked.options["hidden_dropout"]), needs)


def _permute_spec(asked: Asked) -> permute.PermuteSpec:
    o = asked.options
    return permute.PermuteSpec(o["tokens"], o["rows"], o["map_type"] == "mask")


def _router_spec(asked: Asked) -> router.RouterSpec:
    o = asked.options
    names = "use_pre_softmax", "num_groups", "group_topk", "scaling_factor"
    terms = RouterTerms(o["topk"], o["score_function"], *[o[name] for name in names if name in o])
    more = [o[name] for name in ("return_tokens_per_expert", "qb_bins") if name in o]
    return router.RouterSpec(terms, o["routing_map_format"], *more)


def _aux_loss_spec(asked: Asked) -> router.AuxLossSpec:
    return router.AuxLossSpec(asked.options["num_experts"], asked.options["topk"], float(asked.options["coeff"]))


def _stochastic(asked: Asked) -> bool:
    """Whether gradients are rounded by draws."""
    grad = None if asked.precision is None else asked.precision.grad
    rules = () if grad is None else (grad, grad.columnwise or grad)
    return bool(asked.needs) and any(rule.stochastic for rule in rules)


def _dropped(asked: Asked) -> bool:
    o = asked.options
    return bool(o.get("stream", True) and o.get("hidden_dropout", 0.0))


_X = Argument("x", "x", "... K")
_DRAWS = Argument("", "rng", dtypes="draws", optional=True, gradient=False)


_FLAG, _COUNT = Option(False, bool), Option(0, int, least=0, most=2**31 - 1)
_PART, _NUMBER = Option(0.0, float, least=0.0, most=1.0), Option(None, float, none=True)
_EPS = "Number that is added to the variance, or to the mean square, before the square root."
_NORM = {
    "eps": Option(1e-5, float, least=0.0, about=_EPS),
    "zero_centered_gamma": _FLAG._replace(about="Whether the norm's weight is stored as its distance from 1."),
}
_TURNED = {"turned": _FLAG._replace(about="Whether weights lie [in, out], as JAX keeps them.")}
_NORMED = {"normalization": Option("LayerNorm", str, NORMS, about="Which norm it is."), **_NORM}
_DROPPED = "Probability that an element is dropped before it is added to the residual stream."
_DROPOUT = {"hidden_dropout": _PART._replace(about=_DROPPED)}
_BEFORE = {
    **_NORMED,
    "return_layernorm_output": _FLAG._replace(about="Whether the output of the norm is returned, too."),
    **_DROPOUT,
    **_TURNED,
    "stream": Option(False, bool, implied=True),
}
_CLAMP = {
    "limit": Option(None, float, least=0.0, none=True, about='Bound of the values of "clamped_swiglu". None is 7.'),
    "alpha": _NUMBER._replace(about='Factor within the sigmoid of "clamped_swiglu". None is 1.702.'),
    "glu_linear_offset": _NUMBER._replace(about='Addend of the linear part of "clamped_swiglu". None is 1.'),
}
_STREAM = (
    Argument("residual", "residual", "... K", optional=True),
    Argument("residual_bias", "branch_bias", "K", optional=True),
    Argument("", "branch_rng", dtypes="draws", optional=True, gradient=False),
)
_GAMMA = Argument("layer_norm_weight", "gamma", "K", "any")
_BETA = Argument("layer_norm_bias", "beta", "K", "any", optional=True)
_WRITES = ("amax_history_fwd", "amax_history_bwd", "into")
_CU = Argument("cu_seqlens", "cu_seqlens", "S", "int32", optional=True, gradient=False)
_SEEN = """How many keys to the left and to the right of its own place a query sees; -1 is no bound. None bounds
nothing but what the mask does."""
_WINDOW = Option(None, tuple, none=True, about=_SEEN)
_IMPLIED = Option(1, int, least=1, implied=True)

_LINEAR = (
    _X,
    Argument("weight", "weight", "N K", "weight"),
    Argument("bias", "bias", "N", "weight", optional=True),
    _DRAWS,
)
_NORM_LINEAR = (_X, _GAMMA, _BETA, *_LINEAR[1:], *_STREAM)
_MLP = (
    _X,
    _GAMMA,
    _BETA,
    Argument("fc1_weight", "w1", "F' K", "weight"),
    Argument("fc1_bias", "b1", "F'", "weight", optional=True),
    Argument("fc2_weight", "w2", "N F", "weight"),
    Argument("fc2_bias", "b2", "N", "weight", optional=True),
    _DRAWS,
    *_STREAM,
)
_GROUPED = (
    Argument("x", "x", "T K"),
    Argument("weight", "inputs", "N K", "weight", several=True),
    Argument("bias", "inputs", "N", "weight", optional=True, several=True),
    _DRAWS._replace(core="inputs"),
)
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_ATTENTION = (
    Argument("q", "a", "LEAD H D", strided=True),
    Argument("k", "b", "LEAD' G D", strided=True),
    Argument("v", "c", "LEAD' G V", strided=True),
    Argument("core_attention_bias", "bias", "1|B 1|H 1|Q S", optional=True),
    Argument("alibi_slopes", "slopes", "* H", "float32", optional=True, gradient=False),
    Argument("softmax_offset", "sink", "H", "float32", optional=True),
    *[
        Argument(name, core, "C", "int32", optional=True, gradient=False)
        for name, core in zip(_LENGTHS, ("cu_q", "cu_kv", "cu_q_padded", "cu_kv_padded"), strict=True)
    ],
    Argument("attention_mask", "mask", "1|B 1|H 1|Q S", "bool|uint8", optional=True, gradient=False),
    Argument("", "pages", optional=True, gradient=False),
    _DRAWS,
)
_PACKED = 'sequence and batch first ("sbhd"), batch first ("bshd"), or packed\n("thd").'
_FORM = Option("sbhd", str, FORMATS, about=f"How queries, keys and values lie: {_PACKED}")
_MASK = Option("causal", str, (*MASKS, *MASK_ALIASES), about="What is hidden.")
_ALIGNED = """Whether a causal mask and a window are aligned to the last key, and not to the first.
None follows from the mask's name."""
_DENOMINATOR = 'Denominator: "off-by-one" adds 1 to it, "learnable" adds exp(`softmax_offset`).'
_CAP = "Bound c of the scores: c * tanh(score / c). 0 leaves them as they are."
_BIASES = ("no_bias", "post_scale_bias", "alibi")
_WEIGHTS_DROPPED = {"attention_dropout": _PART._replace(about="Probability that a weight of attention is dropped.")}
_ATTENTION_OPTIONS = {
    "qkv_format": _FORM,
    "attn_mask_type": _MASK,
    "window_size": _WINDOW,
    "bottom_right_diagonal": _FLAG._replace(default=None, none=True, about=_ALIGNED),
    "softmax_scale": _NUMBER._replace(about="Factor of the scores. None is 1 / sqrt(channels of a key)."),
    "softmax_type": Option("vanilla", str, SOFTMAX, about=_DENOMINATOR),
    "logit_softcap": Option(0.0, float, least=0.0, about=_CAP),
    "core_attention_bias_type": Option("no_bias", str, _BIASES, about="Which bias there is."),
    **_WEIGHTS_DROPPED,
    "deterministic": _FLAG._replace(about="Whether two calls have to give the same bits."),
    "max_seqlen_q": _COUNT._replace(about='Length of the longest query sequence; needed with "thd". 0 elsewhere.'),
    "max_seqlen_kv": _COUNT._replace(about='Length of the longest sequence of keys; needed with "thd". 0 elsewhere.'),
    "num_attention_heads": _IMPLIED,
    "num_gqa_groups": _IMPLIED,
    "head_dim_qk": _IMPLIED,
    "head_dim_v": _IMPLIED,
}
_SOFTMAX = (
    Argument("x", "x", "B H Q S"),
    Argument("mask", "mask", "1|B 1|H 1|Q S", "bool|uint8", optional=True, gradient=False),
    Argument("cu_seqlens_q", "cu_seqlens_q", "C", "int32", optional=True, gradient=False),
    Argument("cu_seqlens_kv", "cu_seqlens_kv", "C", "int32", optional=True, gradient=False),
    Argument("softmax_offset", "sink", "H", "float32", optional=True),
)
_CORNER = "To which corner a causal mask is aligned. None has no causal mask."
_SOFTMAX_OPTIONS = {
    "scale": Option(1.0, float, about="Factor of the scores."),
    "causal": Option(None, str, ("top_left", "bottom_right"), none=True, about=_CORNER),
    "window_size": _WINDOW,
}
_ROPE = (
    Argument("t", "t", "... D", strided=True),
    Argument("freqs", "freqs", "* R", "float32", gradient=False),
    _CU,
    Argument("start_positions", "start_positions", "P", "int32", optional=True, gradient=False),
)


def _layer(
    name: str,
    functions: Any,
    about: str,
    arguments: tuple[Argument, ...],
    options: dict[str, Option],
    spec: Any,
    **more: Any,
) -> Layer:
    return Layer(name, functions.forward, functions.backward, arguments, options, spec, about=about, **more)


def _draws(asked: Asked) -> bool:
    return _stochastic(asked) or _dropped(asked)


_PRODUCT: dict[str, Any] = {"products": ("weight",), "draws": _stochastic, "writes": _WRITES}
_BEHIND: dict[str, Any] = {"outputs": ("y", "normed", "stream"), "draws": _draws, "writes": _WRITES}
_GAMMA_BETA = Argument("weight", "gamma", "K", "any"), Argument("bias", "beta", "K", "any")
_RMSNORM = _X, _GAMMA_BETA[0], Argument("", "beta", optional=True, gradient=False)
_MORE = Argument("bias", "bias", "K", optional=True), Argument("residual", "residual", "... K", optional=True)
_ACTIVATION = {"activation": Option("gelu", str, KINDS, about="Function of the MLP, or of the input."), **_CLAMP}
_PAIRS = _FLAG._replace(about="Whether angles turn neighbouring channels, and not those of the two halves.")
_ROPE_OPTIONS = {"tensor_format": _FORM._replace(about=f"How `t` lies: {_PACKED}"), "interleaved": _PAIRS}
_ROWS = Option(0, int, least=0, most=2**31 - 1, implied=True)
_MAP = {"map_type": Option("mask", str, ("mask", "index"), about="What the map is."), "tokens": _ROWS, "rows": _ROWS}
_PERMUTE = (
    Argument("x", "x", "T K"),
    Argument("routing_map", "routing", "T E", "bool|uint8|int32|int64", gradient=False),
    Argument("probs", "probs", "T E", "any", optional=True),
)
_ALL = "Number of rows of the result; what lies behind is dropped. -1 drops nothing."
_PERMUTE_OPTIONS = {"num_out_tokens": _ROWS._replace(default=-1, least=-1, implied=False, about=_ALL), **_MAP}
_UNPERMUTE = (
    Argument("x", "x", "R K"),
    Argument("row_id_map", "row_map", "* M", "int32", gradient=False),
    Argument("merging_probs", "weights", "T E", "any", optional=True),
)
_BACK = "Number of tokens of the result. None takes it from the map or from `merging_probs`."
_UNPERMUTE_OPTIONS = {"num_tokens": _ROWS._replace(default=None, none=True, implied=False, about=_BACK), **_MAP}
_LOGITS = Argument("logits", "logits", "... E")
_ROUTED = (
    _LOGITS,
    Argument("expert_bias", "bias", "E", "float32", optional=True, gradient=False),
    Argument("qb_bin_bounds", "bounds", "L", "float32", optional=True, gradient=False),
)
_WEIGHED = (
    Argument("probs", "probs", "T C"),
    Argument("tokens_per_expert", "weights", "C", "int32|int64|float32|bfloat16", gradient=False),
    Argument("total_num_tokens", "total", "N", "int32|int64", gradient=False),
)
_FORMATS = """How the routing map is written: a byte or a bit for each expert (the lowest bit first), or the numbers of
the chosen experts."""
_SCORED = {
    "topk": Option(1, int, least=1, about="Number of experts of each token."),
    "score_function": Option("softmax", str, SCORES, about="What makes scores of logits."),
    "routing_map_format": Option("bytemap", str, tuple(ROUTINGS), about=_FORMATS),
}
_PRE = "Whether softmax is over all experts, and not over the chosen ones."
_KEPT = "Number of groups of which experts are chosen, those with the best scores. 0 is all experts."
_BINS = "Number of bins of the histogram of quantile balancing, which is returned last. 0 returns none."
_ROUTED_OPTIONS = {
    **_SCORED,
    "use_pre_softmax": _FLAG._replace(about=_PRE),
    "num_groups": _COUNT._replace(about="Number of groups of experts, as many in each. 0 has no groups."),
    "group_topk": _COUNT._replace(about=_KEPT),
    "scaling_factor": Option(1.0, float, about="Factor of the probabilities of chosen experts."),
    "return_tokens_per_expert": _FLAG._replace(about="Whether the number of tokens of each expert is returned, too."),
    "qb_bins": _COUNT._replace(about=_BINS),
}
_LOSS_OPTIONS = {
    "num_experts": Option(1, int, least=1, about="Number of experts."),
    "topk": _SCORED["topk"],
    "coeff": Option(1.0, float, about="Factor of the loss."),
}
_AGAIN = "Whether backward computes the MLP again, so that only the input is kept for it."
_MLP_OPTIONS = _BEFORE | _ACTIVATION | {"checkpoint": _FLAG._replace(about=_AGAIN)}
_EACH, _L2 = {"num_gemms": _IMPLIED}, {"eps": _NORM["eps"]._replace(default=1e-6)}
_ENTRIES = (
    _layer("linear", linear, "y = x w^T + b", _LINEAR, _TURNED, lambda a: a.linear("weight", "bias", "x"), **_PRODUCT),
    _layer("layernorm", norm, "LayerNorm of rows", (_X, *_GAMMA_BETA), _NORM, lambda asked: _norm(asked, "LayerNorm")),
    _layer("rmsnorm", norm, "RMSNorm of rows", _RMSNORM, _NORM, lambda asked: _norm(asked, "RMSNorm")),
    _layer(
        "layernorm_linear", norm_linear, "y = norm(x) w^T + b", _NORM_LINEAR, _BEFORE, _norm_linear_spec,
        products=("weight",), **_BEHIND,
    ),
    _layer(
        "layernorm_mlp", mlp, "y = act(norm(x) w1^T + b1) w2^T + b2", _MLP, _MLP_OPTIONS, _mlp_spec,
        products=("fc1_weight", "fc2_weight"), releases=True, **_BEHIND,
    ),
    _layer("grouped_linear", grouped_linear, "y_i = x_i w_i^T + b_i", _GROUPED, _EACH, _grouped_spec, **_PRODUCT),
    _layer(
        "attention", attention, "softmax(q k^T) v, the heads of a token side by side", _ATTENTION, _ATTENTION_OPTIONS,
        _attention_spec, draws=lambda asked: bool(asked.options["attention_dropout"]),
    ),
    _layer(
        "rope", rope, "heads turned by their tokens' angles", _ROPE, _ROPE_OPTIONS,
        lambda asked: rope.RopeSpec(asked.options["tensor_format"], asked.options["interleaved"]),
    ),
    _layer("softmax", softmax, "softmax of attention scores", _SOFTMAX, _SOFTMAX_OPTIONS, _softmax_spec),
    _layer(
        "activation", activation, "act(x); a gated one halves rows", (_X,), _ACTIVATION,
        lambda asked: activation.ActivationLayerSpec(asked.options["activation"], _clamp(asked)),
    ),
    _layer(
        "l2_norm", l2_norm, "x / sqrt(sum(x^2) + eps)", (_X,), _L2,
        lambda asked: l2_norm.L2NormSpec(float(asked.options["eps"])),
    ),
    _layer(
        "bias_dropout_add", added, "residual + dropout(x + bias)", (_X, *_MORE, _DRAWS), _DROPOUT,
        _add_spec, draws=_dropped,
    ),
    _layer(
        "moe_permute", permute, "a row for each token and expert", _PERMUTE, _PERMUTE_OPTIONS, _permute_spec,
        outputs=("y", "row_id_map", "permuted_probs"),
    ),
    Layer(
        "moe_unpermute", permute.unpermute_forward, permute.unpermute_backward, _UNPERMUTE, _UNPERMUTE_OPTIONS,
        _permute_spec, about="each token's rows added up",
    ),
    _layer(
        "router_topk", router, "each token's best experts: their probabilities, and a map of them", _ROUTED,
        _ROUTED_OPTIONS, _router_spec, outputs=("probs", "routing_map", "tokens_per_expert", "qb_histogram"),
    ),
    Layer(
        "router_scores", router.scores_forward, router.scores_backward, (_LOGITS,), _SCORED, _router_spec,
        outputs=("scores", "routing_map"), about="scores of all experts for the auxiliary loss, and a map of the best",
    ),
    Layer(
        "router_aux_loss", router.aux_loss_forward, router.aux_loss_backward, _WEIGHED, _LOSS_OPTIONS, _aux_loss_spec,
        about="coeff num_experts / (topk N^2) * sum(tokens_per_expert * sum(probs)) of N tokens",
    ),
)  # fmt: skip
# ------------------------------------------------------------------------------------------------ blocks, as graphs

#: A parameter is called by the last two parts of its name in te_torch's module, with an underscore between.
_ANGLES = Argument("rotary_pos_emb", "rotary_pos_emb", "* A", "float32", optional=True, gradient=False)
_LENGTHS_OF_BOTH = Argument("cu_seqlens_q", "cu_seqlens_q", "C", "int32", optional=True, gradient=False)
_HEADS = Option(None, int, least=1, none=True, about="Number of heads of queries. It has to be given.")
_GROUPS = "Number of heads of keys and values, which divides that of queries. None is as many as queries have."
_BY_HEADS = """Whether rows of the first weight are ordered by heads, and not queries before keys before
values."""
#: Head counts are words of the caller's; how wide a head is follows from the projection's rows.
_BLOCK_OPTIONS = {
    "num_attention_heads": _HEADS,
    "num_gqa_groups": _HEADS._replace(about=_GROUPS),
    "qkv_format": _FORM._replace(choices=("sbhd", "bshd")),
    "attn_mask_type": _MASK._replace(choices=(*[m for m in MASKS if m != "arbitrary"], *MASK_ALIASES)),
    "window_size": _WINDOW,
    "qkv_weight_interleaved": _FLAG._replace(default=True, about=_BY_HEADS),
    "rotary_pos_interleaved": _PAIRS,
    **_WEIGHTS_DROPPED,
    "kv_channels": _IMPLIED,
    "turned_by_angles": Option(False, bool, implied=True),
}


def _parameter(name: str, shape: str, dtypes: str = "weight") -> Argument:
    return Argument(name, name, shape, dtypes, optional=name.endswith("_bias"))


def _pairs(*names: str) -> tuple[Argument, ...]:
    return tuple(_DRAWS._replace(core=f"{name}_rng") for name in names)


_MULTIHEAD = (
    Argument("x", "x", "S B H"),
    _parameter("qkv_weight", "R H"),
    _parameter("qkv_bias", "R"),
    _parameter("proj_weight", "N P"),
    _parameter("proj_bias", "N"),
    _ANGLES,
    _LENGTHS_OF_BOTH,
    *_pairs("attention", "qkv", "proj"),
)
#: The biases behind proj and fc2 are added with the residual.
_TRANSFORMER = (
    Argument("x", "x", "S B H"),
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
    _ANGLES,
    _LENGTHS_OF_BOTH,
    *_pairs("attention", "layernorm_qkv", "proj", "attended", "closing", "layernorm_mlp"),
)


#: One tensor stands for what is offered once; what is not offered is not there.
_OFFERED = {"q_angles": "rotary_pos_emb", "k_angles": "rotary_pos_emb", "cu_seqlens_kv": "cu_seqlens_q"}
_OFFERED |= {"cu_seqlens_q_padded": "", "cu_seqlens_kv_padded": ""}


def _graph(block: AttentionBlock | TransformerBlock, arguments: tuple[Argument, ...]) -> Graph:
    """The block of these arguments."""
    made = block.graph()
    nodes = [node._replace(inputs=tuple(_OFFERED.get(name, name) for name in node.inputs)) for node in made.nodes]
    return Graph(tuple(nodes), tuple(argument.core for argument in arguments), made.outputs)


def _multihead_spec(asked: Asked) -> Graph:
    before = "x", "qkv_weight", "qkv_bias"
    projections = asked.linear("qkv_weight", "qkv_bias", "x"), asked.linear("proj_weight", "proj_bias", *before)
    return _graph(_attention_block("multihead_attention", asked, projections, before), _MULTIHEAD)


def _transformer_spec(asked: Asked) -> Graph:
    o = asked.options
    normed = "x", "layernorm_qkv_layer_norm_weight", "layernorm_qkv_layer_norm_bias"
    project = asked.linear("layernorm_qkv_weight", "layernorm_qkv_bias", *normed)
    qkv = norm_linear.NormLinearSpec(_norm(asked), project, stream=Stream())
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
    inside = mlp.MLPSpec(fc1, fc2, _norm(asked), o["activation"], clamp=_clamp(asked), stream=stream)
    before = asked.any(*inner, "layernorm_mlp_fc2_weight")
    closing = AddSpec(p, BranchNeeds(before, "layernorm_mlp_fc2_bias" in asked.needs, before))
    block = replace(_attention_block("transformer_layer", asked, (qkv, proj), attended), return_bias=True)
    return _graph(TransformerBlock(block, inside, closing), _TRANSFORMER)


def _attention_block(op: str, asked: Asked, projections: Any, before: tuple[str, ...]) -> AttentionBlock:
    """An attention between these projections."""
    o = asked.options
    if asked.precision is not None and asked.precision.attention is not None:
        got, do = "a recipe with fp8_dpa or fp8_mha", "leave both out, or give a module of te_torch this recipe"
        raise UnsupportedError(op, got, "recipes whose attention runs in the activations' dtype", do)
    d, form = o["kv_channels"], o["qkv_format"]
    heads, groups = o["num_attention_heads"] or 1, o["num_gqa_groups"] or o["num_attention_heads"] or 1
    core = AttentionSpec(d**-0.5, form, form, dropout=float(o["attention_dropout"]))
    core = with_mask(core, canonical_mask(op, o["attn_mask_type"]), o["window_size"] or (-1, -1), None)
    turned, interleaved = o["turned_by_angles"], o["qkv_weight_interleaved"]
    needs = attention.AttentionNeeds(*[asked.any(*before)] * 3)
    packing, (qkv, proj) = "separate" if turned else "qkv", projections
    layer = attention.AttentionLayerSpec(core, heads, groups, d, d, needs, packing, interleaved and not turned)
    split = None
    if turned:
        rotation, row = rope.RopeSpec(form, o["rotary_pos_interleaved"]), ((heads + 2 * groups) * d,)
        split = rope.SplitSpec(heads, groups, (d,) * 3, interleaved, row, rotation)
    return AttentionBlock(qkv, layer, proj, split=split)


def _with_attention(draws: Callable[[Asked], bool]) -> Callable[[Asked], bool]:
    return lambda asked: draws(asked) or bool(asked.options["attention_dropout"])


_WHOLE = (
    _layer(
        "multihead_attention", graph, "attention(x w^T + b) w_proj^T + b_proj, x [tokens, sequences, H]", _MULTIHEAD,
        _BLOCK_OPTIONS, _multihead_spec, products=("qkv_weight", "proj_weight"), releases=True,
        draws=_with_attention(_stochastic), writes=_WRITES,
    ),
    _layer(
        "transformer_layer", graph, "x1 = x + attention(norm(x)), y = x1 + mlp(norm(x1))", _TRANSFORMER,
        {**_NORMED, **_ACTIVATION, **_BLOCK_OPTIONS, **_DROPOUT}, _transformer_spec,
        products=("layernorm_qkv_weight", "proj_weight", "layernorm_mlp_fc1_weight", "layernorm_mlp_fc2_weight"),
        releases=True, draws=_with_attention(_draws), writes=_WRITES,
    ),
)  # fmt: skip
LAYERS = {layer.name: layer for layer in (*_ENTRIES, *_WHOLE)}
#: Options by their own names, as the first layer has them.
OPTIONS = {name: o for layer in reversed(LAYERS.values()) for name, o in layer.options.items() if not o.implied}
