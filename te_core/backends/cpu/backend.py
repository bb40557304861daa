"""The reference backend, as `te_core.backend.Backend` lists it: each operation is a function of a file beside this one.

Each file holds the operations of the ops file of the same name; `codec.py` is how narrow types are read and
written, `executor.py` the scratch memory. Threads may call at once: scratch belongs to the calling thread.
"""

from __future__ import annotations

from te_core.backends.cpu.activation import activation_backward, activation_forward
from te_core.backends.cpu.attention import (
    attention_backward,
    attention_forward,
    plan_attention_backward,
    plan_attention_forward,
)
from te_core.backends.cpu.attention_fp8 import (
    attention_fp8_backward,
    attention_fp8_forward,
    plan_attention_fp8_backward,
    plan_attention_fp8_forward,
    scale_pairs,
)
from te_core.backends.cpu.attention_merge import attention_merge, attention_sink_grad, context_sum
from te_core.backends.cpu.attention_scored import attention_scored, plan_attention_scored
from te_core.backends.cpu.context import context_draws, context_lengths, context_mark, context_max
from te_core.backends.cpu.context_rows import context_rows
from te_core.backends.cpu.elementwise import add, bias_dropout_add, bias_dropout_add_backward, rank_sum
from te_core.backends.cpu.executor import executor, executors
from te_core.backends.cpu.gemm import plan_gemm
from te_core.backends.cpu.kv_cache import kv_append, kv_gather, kv_move
from te_core.backends.cpu.l2_norm import l2_norm_backward, l2_norm_forward
from te_core.backends.cpu.loss import loss_rows, loss_values
from te_core.backends.cpu.matrix import column_sum, resize
from te_core.backends.cpu.memory import copy_from_host, copy_to_host, default_allocator, order, stream, zero
from te_core.backends.cpu.norm import norm_backward, norm_forward
from te_core.backends.cpu.optimizer import adam, adam_quantized, norm_many, scale_many, sgd
from te_core.backends.cpu.padding_order import padding_order
from te_core.backends.cpu.permute import permute, row_map, unpermute, unpermute_backward
from te_core.backends.cpu.quantize import (
    amax,
    amax_many,
    count_nonfinite,
    dequantize,
    plan_update,
    quantize,
    run_update,
    transpose,
)
from te_core.backends.cpu.quantize_block import dequantize_block, quantize_block
from te_core.backends.cpu.quantize_grouped import quantize_grouped
from te_core.backends.cpu.quantize_mxfp8 import dequantize_mxfp8, quantize_mxfp8, swizzle_scales
from te_core.backends.cpu.quantize_nvfp4 import dequantize_nvfp4, quantize_nvfp4
from te_core.backends.cpu.rope import rope, rope_qkv
from te_core.backends.cpu.softmax import softmax_backward, softmax_forward
from te_core.backends.cpu.statistics import statistics

name = "cpu"
