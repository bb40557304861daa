"""Right calls of `te_core.functional`, drawn from a seed: arguments, options, recipes. Shared by tests and draws."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from te_core import functional as te
from te_core.ops.activation import KINDS, is_gated
from te_core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

DTYPES: dict[str, Any] = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
RECIPES: dict[str, Recipe | None] = {
    "plain": None,
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "override": Float8CurrentScaling(backward_override="high_precision"),
}
for _recipe in RECIPES.values():
    if _recipe is not None and type(_recipe).__name__.startswith(("MX", "NV")):
        _recipe.emulate = True
FUNCTIONS = (
    "linear layernorm rmsnorm layernorm_linear layernorm_mlp grouped_linear attention rope softmax activation l2_norm "
    "bias_dropout_add moe_permute moe_unpermute router_topk router_scores router_aux_loss multihead_attention "
    "transformer_layer"
).split()
WHOLE = ("multihead_attention", "transformer_layer")
OF_RECIPES = ("linear", "layernorm_linear", "layernorm_mlp", "grouped_linear", *WHOLE)
ROWS = (1, 2, 5, 16)


class Right(NamedTuple):
    """One right call."""

    function: te.Function
    arrays: dict[str, Any]
    options: dict[str, Any]
    recipe: Recipe | None
    dtype: Any

    def scaling(self) -> te.Scaling | None:
        """A new state for it, if it takes one."""
        if self.recipe is None or self.function.layer.name not in OF_RECIPES:
            return None
        count = len(self.arrays["weight"]) if "m_splits" in self.options else None
        return te.Scaling(self.recipe, self.function, like=self.arrays["x"], gemms=count)


def right(seed: int, name: str = "", recipe: str = "") -> Right:
    """The call of this seed; by name, if the caller has one."""
    r, draw = random.Random(seed), np.random.default_rng(seed)
    name = name or r.choice(FUNCTIONS)
    kind = recipe or (r.choice([*RECIPES]) if name in OF_RECIPES else "plain")
    dtype = DTYPES[r.choice([*DTYPES])]

    def array(*shape: int, dtype: Any = dtype) -> Any:
        return (draw.standard_normal(shape) * 0.5).astype(dtype)

    def maybe(value: Any) -> Any:
        return value if r.random() < 0.6 else None

    arrays, options = globals()[f"_{name}"](r, array, maybe)
    arrays = {key: value for key, value in arrays.items() if value is not None}
    if kind == "nvfp4" or "dropout" in " ".join(options):
        options["seed"] = (seed, 8)
    return Right(getattr(te, name), arrays, options, RECIPES[kind], dtype)


def _lead(r: random.Random) -> tuple[int, ...]:
    return r.choice(((16,), (5,), (2, 3), (4, 2, 2), (1,)))


def _linear(r: random.Random, array: Any, maybe: Any) -> Any:
    k, n = r.choice((16, 20, 32)), r.choice((16, 24, 7))
    return {"x": array(*_lead(r), k), "weight": array(n, k), "bias": maybe(array(n))}, {}


def _layernorm(r: random.Random, array: Any, maybe: Any) -> Any:
    k = r.choice((16, 20, 33))
    options = {"eps": r.choice((1e-5, 1e-3)), "zero_centered_gamma": r.random() < 0.5}
    return {"x": array(*_lead(r), k), "weight": array(k), "bias": array(k)}, options


def _rmsnorm(r: random.Random, array: Any, maybe: Any) -> Any:
    arrays, options = _layernorm(r, array, maybe)
    return {**arrays, "bias": None}, options


def _before(r: random.Random, array: Any, maybe: Any, lead: tuple[int, ...], k: int) -> Any:
    kind = r.choice(("LayerNorm", "RMSNorm"))
    arrays = {"x": array(*lead, k), "layer_norm_weight": array(k)}
    if kind == "LayerNorm":
        arrays["layer_norm_bias"] = array(k)
    options: dict[str, Any] = {"normalization": kind, "return_layernorm_output": r.random() < 0.3}
    if r.random() < 0.4:
        arrays |= {"residual": array(*lead, k), "residual_bias": maybe(array(k))}
        if r.random() < 0.5:
            options["hidden_dropout"] = 0.25
    return arrays, options


def _layernorm_linear(r: random.Random, array: Any, maybe: Any) -> Any:
    k, n = r.choice((16, 32)), r.choice((16, 24))
    arrays, options = _before(r, array, maybe, _lead(r), k)
    return {**arrays, "weight": array(n, k), "bias": maybe(array(n))}, options


def _layernorm_mlp(r: random.Random, array: Any, maybe: Any) -> Any:
    k, f, n = r.choice((16, 32)), r.choice((16, 32)), r.choice((16, 24))
    arrays, options = _before(r, array, maybe, _lead(r), k)
    kind = r.choice(KINDS)
    wide = f * (1 + is_gated(kind))
    options |= {"activation": kind, "checkpoint": r.random() < 0.2}
    weights = {"fc1_weight": array(wide, k), "fc1_bias": maybe(array(wide)), "fc2_weight": array(n, f)}
    return {**arrays, **weights, "fc2_bias": maybe(array(n))}, options


def _grouped_linear(r: random.Random, array: Any, maybe: Any) -> Any:
    sizes = [r.choice((0, 3, 16)) for _ in range(r.choice((1, 2, 3)))]
    weights = [array(24, 16) for _ in sizes]
    bias = maybe([array(24) for _ in sizes])
    return {"x": array(sum(sizes), 16), "weight": weights, "bias": bias}, {"m_splits": sizes}


def _attention(r: random.Random, array: Any, maybe: Any) -> Any:
    form, heads = r.choice(("sbhd", "bshd", "thd")), r.choice((2, 4))
    groups = r.choice((1, 2, heads))
    mask = r.choice(("no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "arbitrary"))
    options: dict[str, Any] = {"qkv_format": form, "softmax_scale": r.choice((None, 0.3))}
    arrays: dict[str, Any] = {}
    b, s = 2, 5
    if form == "thd":
        mask = r.choice(("padding", "padding_causal"))
        options |= {"max_seqlen_q": s, "max_seqlen_kv": s}
    if "padding" in mask:
        arrays |= {f"cu_seqlens_{side}": np.array([0, 3, 8], np.int32) for side in ("q", "kv")}
    if mask == "arbitrary":
        arrays["attention_mask"] = np.tri(s, s, 1)[None, None] == 0
    kind = r.choice(("vanilla", "off-by-one", "learnable"))
    if kind == "learnable":
        arrays["softmax_offset"] = array(heads, dtype=np.float32)
    if form != "thd" and r.random() < 0.3:
        options["core_attention_bias_type"] = "post_scale_bias"
        arrays["core_attention_bias"] = array(1, heads, s, s)
    if r.random() < 0.2:
        options["attention_dropout"] = 0.2
    if r.random() < 0.3:
        options["window_size"] = (2, 0 if "causal" in mask else 1)
    lead = {"sbhd": (s, b), "bshd": (b, s), "thd": (8,)}[form]
    q, k, v = array(*lead, heads, 8), array(*lead, groups, 8), array(*lead, groups, 8)
    return {"q": q, "k": k, "v": v, **arrays}, {**options, "attn_mask_type": mask, "softmax_type": kind}


def _rope(r: random.Random, array: Any, maybe: Any) -> Any:
    form = r.choice(("sbhd", "bshd", "thd"))
    shape = {"sbhd": (5, 2, 3, 8), "bshd": (2, 5, 3, 8), "thd": (8, 3, 8)}[form]
    arrays = {"t": array(*shape), "freqs": array(9, 1, 1, r.choice((4, 8)), dtype=np.float32)}
    if form == "thd":
        arrays["cu_seqlens"] = np.array([0, 3, 8], np.int32)
    arrays["start_positions"] = maybe(np.array([0, 1], np.int32))
    return arrays, {"tensor_format": form, "interleaved": r.random() < 0.5}


def _softmax(r: random.Random, array: Any, maybe: Any) -> Any:
    arrays = {"x": array(2, 3, 4, 6), "softmax_offset": maybe(array(3, dtype=np.float32))}
    arrays["mask"] = maybe(np.tri(4, 6, 2)[None, None] == 0)
    if r.random() < 0.3:
        arrays |= {f"cu_seqlens_{s}": np.array([0, 2, 6], np.int32) for s in ("q", "kv")}
    return arrays, {"scale": 0.7, "causal": r.choice((None, "top_left", "bottom_right"))}


def _activation(r: random.Random, array: Any, maybe: Any) -> Any:
    kind = r.choice(KINDS)
    return {"x": array(*_lead(r), 16)}, {"activation": kind} | ({"limit": 1.0} if "clamped" in kind else {})


def _l2_norm(r: random.Random, array: Any, maybe: Any) -> Any:
    return {"x": array(*_lead(r), 16)}, {"eps": 1e-4}


def _bias_dropout_add(r: random.Random, array: Any, maybe: Any) -> Any:
    lead = _lead(r)
    arrays = {"x": array(*lead, 16), "bias": maybe(array(16)), "residual": maybe(array(*lead, 16))}
    return arrays, {"hidden_dropout": r.choice((0.0, 0.3))}


def _routing(r: random.Random, kind: str) -> Any:
    """Of 6 tokens to 4 experts, two each."""
    chosen = np.array([r.sample(range(4), 2) for _ in range(6)], np.int32)
    return chosen if kind == "index" else (chosen[:, :, None] == np.arange(4)).any(1)


def _moe_permute(r: random.Random, array: Any, maybe: Any) -> Any:
    kind = r.choice(("mask", "index"))
    probs = maybe(array(6, 4, dtype=np.float32)) if kind == "mask" else None
    options = {"map_type": kind, "num_out_tokens": r.choice((-1, 12, 9, 16))}
    return {"x": array(6, 16), "routing_map": _routing(r, kind), "probs": probs}, options


def _moe_unpermute(r: random.Random, array: Any, maybe: Any) -> Any:
    kind = r.choice(("mask", "index"))
    (_, row_map), _ = te.moe_permute(array(6, 16), _routing(r, kind), map_type=kind, needs=())
    probs = maybe(array(6, 4 if kind == "mask" else 2, dtype=np.float32))
    return {"x": array(12, 16), "row_id_map": row_map, "merging_probs": probs}, {"map_type": kind, "num_tokens": 6}


def _router_topk(r: random.Random, array: Any, maybe: Any) -> Any:
    arrays, options = _router_scores(r, array, maybe)
    options |= {"scaling_factor": r.choice((1.0, 2.5)), "use_pre_softmax": r.random() < 0.5}
    options["return_tokens_per_expert"] = r.random() < 0.5
    if r.random() < 0.4:
        options |= {"num_groups": 4, "group_topk": 2}
    elif options["score_function"] == "sigmoid":
        arrays["qb_bin_bounds"], options["qb_bins"] = np.array([-0.1, 0.3], np.float32), 7
    if options["score_function"] != "softmax":
        arrays["expert_bias"] = array(20, dtype=np.float32)
    return arrays, options


def _router_scores(r: random.Random, array: Any, maybe: Any) -> Any:
    options = {"topk": r.choice((2, 4)), "score_function": r.choice(("softmax", "sigmoid", "sqrtsoftplus"))}
    options["routing_map_format"] = r.choice(("bytemap", "bitmap_u8", "int16", "int32", "int64"))
    return {"logits": array(*_lead(r), 20)}, options


def _router_aux_loss(r: random.Random, array: Any, maybe: Any) -> Any:
    counts = np.arange(12).astype(r.choice((np.int32, np.int64, np.float32, ml_dtypes.bfloat16)))
    total = np.array([5], r.choice((np.int32, np.int64)))
    arrays = {"probs": array(5, 12), "tokens_per_expert": counts, "total_num_tokens": total}
    return arrays, {"num_experts": r.choice((12, 4)), "topk": 2, "coeff": 0.5}


def _of_attention(r: random.Random, array: Any, maybe: Any, before: str) -> Any:
    heads, d, form = 4, 8, r.choice(("sbhd", "bshd"))
    groups = r.choice((1, 2, 4))
    mask = r.choice(("no_mask", "causal", "causal_bottom_right", "padding", "padding_causal"))
    rows = (heads + 2 * groups) * d
    arrays: dict[str, Any] = {"x": array(*((5, 2) if form == "sbhd" else (2, 5)), 32)}
    arrays |= {f"{before}qkv_weight": array(rows, 32), f"{before}qkv_bias": maybe(array(rows))}
    arrays |= {"proj_weight": array(32, heads * d), "proj_bias": maybe(array(32))}
    if r.random() < 0.5:
        arrays["rotary_pos_emb"] = array(9, 1, 1, r.choice((4, 8)), dtype=np.float32)
    if "padding" in mask:
        arrays["cu_seqlens_q"] = np.array([0, 3, 8], np.int32)
    options: dict[str, Any] = {"num_attention_heads": heads, "num_gqa_groups": groups if groups < 4 else None}
    options |= {"qkv_format": form, "attn_mask_type": mask, "qkv_weight_interleaved": r.random() < 0.5}
    if r.random() < 0.3:
        options["rotary_pos_interleaved"] = True
    if r.random() < 0.3:
        options["window_size"] = (2, 0 if "causal" in mask else 1)
    if r.random() < 0.3:
        options["attention_dropout"] = 0.2
    return arrays, options


def _multihead_attention(r: random.Random, array: Any, maybe: Any) -> Any:
    return _of_attention(r, array, maybe, "")


def _transformer_layer(r: random.Random, array: Any, maybe: Any) -> Any:
    arrays, options = _of_attention(r, array, maybe, "layernorm_")
    kind, activation = r.choice(("LayerNorm", "RMSNorm")), r.choice(KINDS)
    wide = 32 * (1 + is_gated(activation))
    for part in ("layernorm_qkv", "layernorm_mlp"):
        arrays[f"{part}_layer_norm_weight"] = array(32)
        arrays[f"{part}_layer_norm_bias"] = array(32) if kind == "LayerNorm" else None
    arrays |= {"layernorm_mlp_fc1_weight": array(wide, 32), "layernorm_mlp_fc1_bias": maybe(array(wide))}
    arrays |= {"layernorm_mlp_fc2_weight": array(32, 32), "layernorm_mlp_fc2_bias": maybe(array(32))}
    options |= {"normalization": kind, "activation": activation, "zero_centered_gamma": r.random() < 0.5}
    return arrays, options | ({"hidden_dropout": 0.3} if r.random() < 0.4 else {})
