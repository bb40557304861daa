"""Rows of messages of te_torch; tests/messages/test_messages.py says how to add one."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

import te_torch as te
from te_core import functional
from te_core.ops.norm import MAX_ROW
from te_core.recipe import Float8CurrentScaling
from te_torch.modules.norm import L2Normalization
from tests.messages.rows import Rows
from tests.torch.test_bad_options import make

ROWS = Rows()
NAN = float("nan")

# ------------------------------------------------------------------------------------------------- constructors

CONSTRUCTORS: dict[str, tuple[dict[str, Any], ...]] = {
    "Linear": (
        {"parallel_mode": "diagonal"},
        {"parallel_mode": "colum"},
        {"parallel_mode": "Row", "tp_size": 7},
        {"parallel_mode": "column", "tp_size": 7},
        {"symmetric_ar_type": "ring"},
        {"symmetric_ar_type": "oneshot"},
        {"ub_name": "query"},
        {"ub_overlap_ag": True},
        {"ub_overlap_ag": True, "ub_name": "proj", "parallel_mode": "column"},
        {"biass": 1},
    ),
    "LayerNormLinear": (
        {"parallel_mode": "row"},
        {"normalization": "BatchNorm"},
        {"normalization": "layernorm"},
        {"ub_overlap_rs_dgrad": True, "ub_bulk_dgrad": True},
        {"in_features": MAX_ROW + 1, "device": "meta"},
        {"epsilon": 1},
    ),
    "LayerNormMLP": (
        {"set_parallel_mode": True, "tp_size": 7},
        {"normalization": "BatchNorm"},
        {"ub_overlap_rs_dgrad": True, "ub_bulk_wgrad": True},
        {"ub_bulk_wgrad": True, "delay_wgrad_compute": True},
        {"hidden_size": MAX_ROW + 1, "device": "meta"},
        {"ffn_size": 1},
    ),
    "GroupedLinear": (
        {"ub_overlap_rs": True},
        {"ub_overlap_ag": True},
        {"tp_size": 2},
        {"parallel_mode": "both"},
        {"parallel_mode": "Rows"},
        {"num_gemms": 0},
        {"tp_size": 3, "bias": False, "parallel_mode": "row"},
        {"use_grouped_tensor": 1},
        {"num_gemm": 1},
    ),
    "MoELayer": (
        {"topk": 9},
        {"num_groups": 3, "group_topk": 1},
        {"num_groups": 4, "group_topk": 2, "topk": 3},
        {"score_function": "softmx"},
        {"expert_bias": True},
        {"activation": "swigly"},
        {"shared_gate": True},
        {"aux_loss_coeff": -0.1},
        {"expert_biass": True},
    ),
    "LayerNorm": ({"normalized_shape": MAX_ROW + 1, "device": "meta"}, {"normalised_shape": 1}),
    "RMSNorm": ({"normalized_shape": (2, MAX_ROW), "device": "meta"}, {"zero_centred_gamma": 1}),
    "MultiheadAttention": (
        {"layer_number": 0},
        {"attention_type": "both"},
        {"attention_type": "slef"},
        {"attn_mask_type": "casual"},
        {"qkv_format": "bhsd"},
        {"qk_norm_type": "BatchNorm"},
        {"qk_norm_type": "rmsnorm"},
        {"tp_size": 7, "set_parallel_mode": True},
        {"ub_overlap_rs_dgrad": True, "ub_bulk_dgrad": True},
        {"fuse_wgrad_accumulation": True},
        {"normalization": "BatchNorm", "input_layernorm": True},
        {"num_gqa_group": 1},
    ),
    "DotProductAttention": (
        {"num_gqa_groups": 3},
        {"cp_group": object()},
        {"cp_group": [None, "cp"]},
        {"attn_mask_type": "none"},
        {"attention_type": "corss"},
        {"cp_comm_type": "p2"},
        {"atention_dropout": 1},
    ),
    "TransformerLayer": (
        {"layer_type": "both"},
        {"layer_type": "encodr"},
        {"hidden_dropout": 1.5},
        {"drop_path_rate": 1.25},
        {"drop_path_rate": -0.5},
        {"parallel_attention_mlp": True, "layer_type": "decoder"},
        {"parallel_attention_mlp": True, "apply_residual_connection_post_layernorm": True},
        {"parallel_attention_mlp": True, "output_layernorm": True},
        {"fuse_wgrad_accumulation": True},
        {"self_attn_mask_type": "casual"},
        {"enc_dec_attn_mask_type": "paddding"},
        {"activation": "swish"},
        {"attn_input_format": "bhsd"},
        {"attn_input_format": "sbdh"},
        {"softmax_type": "vanila"},
        {"qk_norm_type": "BatchNorm"},
        {"normalization": "BatchNorm"},
        {"tp_size": 7, "set_parallel_mode": True},
        {"ub_tp_comm_overlap": True, "ub_overlap_rs_dgrad": True},
        {"self_attn_mask": 1},
    ),
    "RotaryPositionEmbedding": ({"rotary_percentage": 1},),
    "Fp8Padding": ({"alignment_size": 1},),
    "Fp8Unpadding": ({"colour": 1},),
    "InferenceParams": ({"qkv_format": "bsh"}, {"max_batchsize": 1}),
}
for kind, mistakes in CONSTRUCTORS.items():
    for mistake in mistakes:
        ROWS.add(make, kind, **mistake)
for kind in ("MultiheadAttention", "TransformerLayer"):
    for sizes in (
        {"hidden_size": 100, "num_attention_heads": 7},
        {"num_attention_heads": 0},
        {"num_attention_heads": -4},
        {"num_gqa_groups": 0},
        {"num_gqa_groups": 3},
        {"num_gqa_groups": 5},
        {"kv_channels": -8},
        {"hidden_size": 0},
    ):
        ROWS.add(make, kind, **{"hidden_size": 64, "num_attention_heads": 4, **sizes})
ROWS.each(L2Normalization, eps=(-1.0, NAN, "1"))

# ------------------------------------------------------------------------------------------------- calls


def call(kind: str, **options: Any) -> None:
    """A module's forward, with a wrong option."""
    make(kind)(torch.randn(4, 1, 32), **options)


for kind, options in (
    ("MultiheadAttention", {"window_size": 3}),
    ("TransformerLayer", {"window_size": 3}),
    ("TransformerLayer", {"enc_dec_window_size": 3}),
    ("TransformerLayer", {"self_attn_mask_type": "casual"}),
    ("TransformerLayer", {"enc_dec_attn_mask_type": "paddding"}),
):
    ROWS.add(call, kind, **options)

# ------------------------------------------------------------------------------------------------- functions

X, IDS = torch.randn(4, 8), torch.zeros(4, 1, dtype=torch.int32)
ROWS.add(te.moe_permute, X, IDS, map_type="indx")
ROWS.add(te.linear_cross_entropy, X, X, IDS[:, 0], reduction="men")
ROWS["functional.attention(qkv_format='sbdh')"] = partial(
    functional.attention, *np.ones((3, 4, 1, 2, 16), "f4"), qkv_format="sbdh"
)


def model_init(*args: Any, **options: Any) -> None:
    """A region of quantized_model_init."""
    te.quantized_model_init(*args, **options).__enter__()


ROWS.add(model_init, Float8CurrentScaling())  # whose weights would be in the default recipe's format
ROWS.add(model_init, preserve_high_precision_init_val="yes")
ROWS.add(te.autocast, recpe=None)
ROWS.add(te.autocast, fp8_recipe=None)
