"""The operations as our own layers call them: nothing looks at what failed (`te_core.ops` does, for 0.2 us a call)."""

from te_core.ops.activation import activation_backward, activation_forward, is_gated
from te_core.ops.attention import attention_backward, attention_forward
from te_core.ops.attention_fp8 import attention_fp8_backward, attention_fp8_forward, scale_pairs
from te_core.ops.attention_merge import attention_merge, attention_sink_grad, context_sum
from te_core.ops.attention_scored import attention_scored_backward, attention_scored_forward
from te_core.ops.context import context_draws, context_lengths, context_mark, context_max
from te_core.ops.context_rows import context_rows
from te_core.ops.elementwise import add, bias_dropout_add, bias_dropout_add_backward, rank_sum
from te_core.ops.gemm import gemm
from te_core.ops.gemm_grouped import gemm_grouped
from te_core.ops.gemm_quantized import gemm_quantized, gemm_route
from te_core.ops.kv_cache import KVCache, kv_append, kv_gather, kv_move
from te_core.ops.l2_norm import l2_norm_backward, l2_norm_forward
from te_core.ops.loss import loss_facts, loss_gradient, loss_values
from te_core.ops.matrix import column_sum, resize
from te_core.ops.norm import norm_backward, norm_forward
from te_core.ops.optimizer import adam, adam_quantized, norm_many, scale_many, sgd
from te_core.ops.padding_order import padding_order
from te_core.ops.permute import chunk_row_map, index_row_map, mask_row_map, permute, unpermute, unpermute_backward
from te_core.ops.quantize import (
    amax,
    amax_many,
    count_nonfinite,
    dequantize,
    plan_update,
    quantize,
    run_update,
    transpose,
    update_scales,
)
from te_core.ops.quantize_grouped import quantize_grouped, quantize_many
from te_core.ops.rope import packed_width, rope, rope_qkv, rope_qkv_backward
from te_core.ops.softmax import softmax_backward, softmax_forward
from te_core.ops.statistics import statistics
from te_core.ops.swizzle import swizzle_scales

__all__ = [
    "KVCache", "activation_backward", "activation_forward", "adam", "adam_quantized", "add", "amax", "amax_many",
    "attention_backward", "attention_forward", "attention_fp8_backward", "attention_fp8_forward", "attention_merge",
    "attention_scored_backward", "attention_scored_forward", "attention_sink_grad", "bias_dropout_add",
    "bias_dropout_add_backward", "chunk_row_map", "column_sum", "context_draws", "context_lengths", "context_mark",
    "context_max", "context_rows", "context_sum", "count_nonfinite", "dequantize", "gemm", "gemm_grouped",
    "gemm_quantized", "gemm_route", "index_row_map", "is_gated", "kv_append", "kv_gather", "kv_move",
    "l2_norm_backward", "l2_norm_forward", "loss_facts", "loss_gradient", "loss_values", "mask_row_map",
    "norm_backward", "norm_forward", "norm_many", "packed_width", "padding_order", "permute", "plan_update", "quantize",
    "quantize_grouped", "quantize_many", "rank_sum", "resize", "rope", "rope_qkv", "rope_qkv_backward", "run_update",
    "scale_many", "scale_pairs", "sgd", "softmax_backward", "softmax_forward", "statistics", "swizzle_scales",
    "transpose", "unpermute", "unpermute_backward", "update_scales",
]  # fmt: skip
