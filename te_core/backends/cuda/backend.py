"""The CUDA backend, as `te_core.backend.Backend` lists it: each operation is a function of a file beside this one.

Importing them imports no library of CUDA's: those are opened when they are first used.
"""

from __future__ import annotations

from te_core.backends.cuda.activation import activation_backward, activation_forward
from te_core.backends.cuda.attention import (
    attention_backward,
    attention_forward,
    plan_attention_backward,
    plan_attention_forward,
)
from te_core.backends.cuda.attention_fp8 import (
    attention_fp8_backward,
    attention_fp8_forward,
    plan_attention_fp8_backward,
    plan_attention_fp8_forward,
)
from te_core.backends.cuda.attention_merge import attention_merge, attention_sink_grad, context_sum
from te_core.backends.cuda.attention_scored import attention_scored, plan_attention_scored
from te_core.backends.cuda.context import context_draws, context_lengths, context_mark, context_max
from te_core.backends.cuda.context_rows import context_rows
from te_core.backends.cuda.elementwise import add, bias_dropout_add, bias_dropout_add_backward, rank_sum
from te_core.backends.cuda.executor import executor, executors
from te_core.backends.cuda.gemm import plan_gemm
from te_core.backends.cuda.kv_cache import kv_append, kv_gather, kv_move
from te_core.backends.cuda.l2_norm import l2_norm_backward, l2_norm_forward
from te_core.backends.cuda.loss import loss_rows, loss_values
from te_core.backends.cuda.matrix import column_sum, resize
from te_core.backends.cuda.memory import copy_from_host, copy_to_host, default_allocator, order, stream, zero
from te_core.backends.cuda.norm import norm_backward, norm_forward
from te_core.backends.cuda.optimizer import adam, adam_quantized, norm_many, scale_many, sgd
from te_core.backends.cuda.padding_order import padding_order
from te_core.backends.cuda.permute import permute, row_map, unpermute, unpermute_backward
from te_core.backends.cuda.quantize import (
    amax,
    amax_many,
    count_nonfinite,
    dequantize,
    plan_update,
    quantize,
    run_update,
    transpose,
)
from te_core.backends.cuda.quantize_block import dequantize_block, quantize_block
from te_core.backends.cuda.quantize_grouped import quantize_grouped
from te_core.backends.cuda.quantize_mxfp8 import dequantize_mxfp8, quantize_mxfp8, swizzle_scales
from te_core.backends.cuda.quantize_nvfp4 import dequantize_nvfp4, quantize_nvfp4
from te_core.backends.cuda.rope import rope, rope_qkv
from te_core.backends.cuda.scale_pairs import scale_pairs
from te_core.backends.cuda.softmax import softmax_backward, softmax_forward
from te_core.backends.cuda.statistics import statistics

name = "cuda"
