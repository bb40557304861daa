"""The reference backend: NumPy on the CPU, bit-exact in FP8. Slow beside a GPU, but right.

Each file holds the operations of the ops file of the same name; `codec.py` is how narrow types are read and
written, `executor.py` the scratch memory. Threads may call at once: scratch belongs to the calling thread.
"""

from __future__ import annotations

import ctypes
from threading import local
from typing import Any

import numpy as np

from te_core.backends.cpu.activation import (
    activation_backward,
    activation_forward,
    plan_activation_backward,
    plan_activation_forward,
)
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
from te_core.backends.cpu.elementwise import add, bias_dropout_add, bias_dropout_add_backward
from te_core.backends.cpu.executor import Executor
from te_core.backends.cpu.gemm import gemm, plan_gemm
from te_core.backends.cpu.kv_cache import kv_append, kv_gather, kv_move, plan_kv_append, plan_kv_gather, plan_kv_move
from te_core.backends.cpu.l2_norm import l2_norm_backward, l2_norm_forward, plan_l2_norm_backward, plan_l2_norm_forward
from te_core.backends.cpu.matrix import column_sum, resize
from te_core.backends.cpu.norm import norm_backward, norm_forward, plan_norm_backward, plan_norm_forward
from te_core.backends.cpu.quantize import (
    amax,
    count_nonfinite,
    dequantize,
    plan_quantize,
    plan_update,
    quantize,
    run_update,
    transpose,
)
from te_core.backends.cpu.quantize_block import dequantize_block, plan_quantize_block, quantize_block
from te_core.backends.cpu.quantize_grouped import plan_quantize_grouped, quantize_grouped
from te_core.backends.cpu.quantize_mxfp8 import (
    dequantize_mxfp8,
    plan_quantize_mxfp8,
    plan_swizzle_scales,
    quantize_mxfp8,
    swizzle_scales,
)
from te_core.backends.cpu.quantize_nvfp4 import dequantize_nvfp4, plan_quantize_nvfp4, quantize_nvfp4
from te_core.backends.cpu.rope import plan_rope, plan_rope_qkv, rope, rope_qkv
from te_core.backends.cpu.softmax import plan_softmax_backward, plan_softmax_forward, softmax_backward, softmax_forward
from te_core.runtime import Runtime
from te_core.tensor import Tensor


class CpuBackend:
    """The operations, gathered from the files beside this one."""

    name = "cpu"

    plan_gemm = staticmethod(plan_gemm)
    gemm = staticmethod(gemm)
    plan_norm_forward = staticmethod(plan_norm_forward)
    norm_forward = staticmethod(norm_forward)
    plan_norm_backward = staticmethod(plan_norm_backward)
    norm_backward = staticmethod(norm_backward)
    plan_activation_forward = staticmethod(plan_activation_forward)
    activation_forward = staticmethod(activation_forward)
    plan_activation_backward = staticmethod(plan_activation_backward)
    activation_backward = staticmethod(activation_backward)
    plan_quantize = staticmethod(plan_quantize)
    quantize = staticmethod(quantize)
    dequantize = staticmethod(dequantize)
    plan_quantize_block = staticmethod(plan_quantize_block)
    quantize_block = staticmethod(quantize_block)
    dequantize_block = staticmethod(dequantize_block)
    plan_quantize_grouped = staticmethod(plan_quantize_grouped)
    quantize_grouped = staticmethod(quantize_grouped)
    plan_quantize_nvfp4 = staticmethod(plan_quantize_nvfp4)
    quantize_nvfp4 = staticmethod(quantize_nvfp4)
    dequantize_nvfp4 = staticmethod(dequantize_nvfp4)
    plan_quantize_mxfp8 = staticmethod(plan_quantize_mxfp8)
    quantize_mxfp8 = staticmethod(quantize_mxfp8)
    dequantize_mxfp8 = staticmethod(dequantize_mxfp8)
    plan_swizzle_scales = staticmethod(plan_swizzle_scales)
    swizzle_scales = staticmethod(swizzle_scales)
    transpose = staticmethod(transpose)
    amax = staticmethod(amax)
    count_nonfinite = staticmethod(count_nonfinite)
    plan_update = staticmethod(plan_update)
    run_update = staticmethod(run_update)
    resize = staticmethod(resize)
    column_sum = staticmethod(column_sum)
    add = staticmethod(add)
    bias_dropout_add = staticmethod(bias_dropout_add)
    bias_dropout_add_backward = staticmethod(bias_dropout_add_backward)
    plan_rope = staticmethod(plan_rope)
    rope = staticmethod(rope)
    plan_rope_qkv = staticmethod(plan_rope_qkv)
    rope_qkv = staticmethod(rope_qkv)
    plan_softmax_forward = staticmethod(plan_softmax_forward)
    softmax_forward = staticmethod(softmax_forward)
    plan_softmax_backward = staticmethod(plan_softmax_backward)
    softmax_backward = staticmethod(softmax_backward)
    plan_l2_norm_forward = staticmethod(plan_l2_norm_forward)
    l2_norm_forward = staticmethod(l2_norm_forward)
    plan_l2_norm_backward = staticmethod(plan_l2_norm_backward)
    l2_norm_backward = staticmethod(l2_norm_backward)
    plan_attention_forward = staticmethod(plan_attention_forward)
    attention_forward = staticmethod(attention_forward)
    plan_attention_backward = staticmethod(plan_attention_backward)
    attention_backward = staticmethod(attention_backward)
    plan_attention_fp8_forward = staticmethod(plan_attention_fp8_forward)
    attention_fp8_forward = staticmethod(attention_fp8_forward)
    plan_attention_fp8_backward = staticmethod(plan_attention_fp8_backward)
    attention_fp8_backward = staticmethod(attention_fp8_backward)
    scale_pairs = staticmethod(scale_pairs)
    plan_kv_append = staticmethod(plan_kv_append)
    kv_append = staticmethod(kv_append)
    plan_kv_move = staticmethod(plan_kv_move)
    kv_move = staticmethod(kv_move)
    plan_kv_gather = staticmethod(plan_kv_gather)
    kv_gather = staticmethod(kv_gather)

    def executors(self, rt: Runtime) -> local:
        """A place for this runtime alone, whose allocator gives the scratch memory; it goes when the thread ends."""
        return local()

    def executor(self, rt: Runtime) -> Executor:
        """Scratch memory for the calling thread."""
        return Executor(rt.allocator)

    def copy_to_host(self, rt: Runtime, tensor: Tensor) -> np.ndarray[Any, Any]:
        """A copy of the values."""
        return tensor.numpy().copy()

    def copy_from_host(self, rt: Runtime, array: np.ndarray[Any, Any], out: Tensor) -> None:
        """Fill a tensor with the values of an array."""
        out.numpy()[...] = array

    def zero(self, rt: Runtime, out: Tensor) -> None:
        """Fill a dense tensor with zero bytes."""
        ctypes.memset(out.ptr, 0, out.nbytes)


BACKEND = CpuBackend()
