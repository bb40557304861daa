"""One function per operation: states the contract, checks arguments, makes outputs, asks the backend."""

from te_core.arguments import explained
from te_core.described import Describer
from te_core.described.ops import TEXT
from te_core.ops import raw
from te_core.ops.raw import KVCache, gemm_route, is_gated, packed_width

activation_backward = explained(raw.activation_backward)
activation_forward = explained(raw.activation_forward)
adam = explained(raw.adam)
adam_quantized = explained(raw.adam_quantized)
add = explained(raw.add)
amax = explained(raw.amax)
amax_many = explained(raw.amax_many)
attention_backward = explained(raw.attention_backward)
attention_forward = explained(raw.attention_forward)
attention_fp8_backward = explained(raw.attention_fp8_backward)
attention_fp8_forward = explained(raw.attention_fp8_forward)
attention_merge = explained(raw.attention_merge)
attention_sink_grad = explained(raw.attention_sink_grad)
bias_dropout_add = explained(raw.bias_dropout_add)
bias_dropout_add_backward = explained(raw.bias_dropout_add_backward)
chunk_row_map = explained(raw.chunk_row_map)
column_sum = explained(raw.column_sum)
context_draws = explained(raw.context_draws)
context_lengths = explained(raw.context_lengths)
context_mark = explained(raw.context_mark)
context_max = explained(raw.context_max)
context_rows = explained(raw.context_rows)
context_sum = explained(raw.context_sum)
count_nonfinite = explained(raw.count_nonfinite)
dequantize = explained(raw.dequantize)
gemm = explained(raw.gemm)
gemm_grouped = explained(raw.gemm_grouped)
gemm_quantized = explained(raw.gemm_quantized)
index_row_map = explained(raw.index_row_map)
kv_append = explained(raw.kv_append)
kv_gather = explained(raw.kv_gather)
kv_move = explained(raw.kv_move)
l2_norm_backward = explained(raw.l2_norm_backward)
l2_norm_forward = explained(raw.l2_norm_forward)
loss_facts = explained(raw.loss_facts)
loss_gradient = explained(raw.loss_gradient)
loss_values = explained(raw.loss_values)
mask_row_map = explained(raw.mask_row_map)
norm_backward = explained(raw.norm_backward)
norm_forward = explained(raw.norm_forward)
norm_many = explained(raw.norm_many)
padding_order = explained(raw.padding_order)
permute = explained(raw.permute)
plan_update = explained(raw.plan_update)
quantize = explained(raw.quantize)
quantize_grouped = explained(raw.quantize_grouped)
quantize_many = explained(raw.quantize_many)
rank_sum = explained(raw.rank_sum)
resize = explained(raw.resize)
rope = explained(raw.rope)
rope_qkv = explained(raw.rope_qkv)
rope_qkv_backward = explained(raw.rope_qkv_backward)
run_update = explained(raw.run_update)
scale_many = explained(raw.scale_many)
scale_pairs = explained(raw.scale_pairs)
sgd = explained(raw.sgd)
softmax_backward = explained(raw.softmax_backward)
softmax_forward = explained(raw.softmax_forward)
statistics = explained(raw.statistics)
swizzle_scales = explained(raw.swizzle_scales)
transpose = explained(raw.transpose)
unpermute = explained(raw.unpermute)
unpermute_backward = explained(raw.unpermute_backward)
update_scales = explained(raw.update_scales)

__all__ = [
    "KVCache", "activation_backward", "activation_forward", "adam", "adam_quantized", "add", "amax", "amax_many",
    "attention_backward", "attention_forward", "attention_fp8_backward", "attention_fp8_forward", "attention_merge",
    "attention_sink_grad", "bias_dropout_add", "bias_dropout_add_backward", "chunk_row_map", "column_sum",
    "context_draws", "context_lengths", "context_mark", "context_max", "context_rows", "context_sum", "count_nonfinite",
    "dequantize", "gemm", "gemm_grouped", "gemm_quantized", "gemm_route", "index_row_map", "is_gated", "kv_append",
    "kv_gather", "kv_move", "l2_norm_backward", "l2_norm_forward", "loss_facts", "loss_gradient", "loss_values",
    "mask_row_map", "norm_backward", "norm_forward", "norm_many", "packed_width", "padding_order", "permute",
    "plan_update", "quantize", "quantize_grouped", "quantize_many", "rank_sum", "resize", "rope", "rope_qkv",
    "rope_qkv_backward", "run_update", "scale_many", "scale_pairs", "sgd", "softmax_backward", "softmax_forward",
    "statistics", "swizzle_scales", "transpose", "unpermute", "unpermute_backward", "update_scales",
]  # fmt: skip

Describer(TEXT).describe(globals()[name] for name in __all__)
