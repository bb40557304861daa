"""One function per operation: states the contract, checks arguments, makes outputs, asks the backend."""

from te_core.ops.activation import activation_backward, activation_forward, is_gated
from te_core.ops.elementwise import add, bias_dropout_add, bias_dropout_add_backward
from te_core.ops.gemm import gemm
from te_core.ops.gemm_quantized import gemm_quantized, gemm_route
from te_core.ops.matrix import column_sum, resize
from te_core.ops.norm import norm_backward, norm_forward
from te_core.ops.quantize import amax, dequantize, plan_update, quantize, run_update, transpose, update_scales
from te_core.ops.quantize_grouped import quantize_grouped, quantize_many
from te_core.ops.swizzle import swizzle_scales

__all__ = [
    "activation_backward", "activation_forward", "add", "amax", "bias_dropout_add", "bias_dropout_add_backward",
    "column_sum", "dequantize", "gemm", "gemm_quantized", "gemm_route", "is_gated", "norm_backward", "norm_forward",
    "plan_update", "quantize", "quantize_grouped", "quantize_many", "resize", "run_update", "swizzle_scales",
    "transpose", "update_scales",
]  # fmt: skip
