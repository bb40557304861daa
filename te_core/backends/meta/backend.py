"""The backend that computes nothing: the ops floor checks arguments and makes outputs, and that is all.

A layer run on it tells the shapes and dtypes of its outputs, which is what a tracing compiler asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import local
from typing import Any

import numpy as np

from te_core.errors import UnsupportedError
from te_core.runtime import Runtime
from te_core.tensor import Device, Tensor

name = "meta"


@dataclass(frozen=True, slots=True)
class MetaPlan:
    """Its own description."""

    spec: Any
    family: str = "meta"
    swizzled: bool = False

    def run(self, rt: Runtime, operands: Any) -> None:
        """Nothing."""


def _plan(rt: Runtime, spec: Any, *rest: Any) -> MetaPlan:
    return MetaPlan(spec)


def _run(rt: Runtime, *operands: Any) -> None:
    pass


plan_attention_backward = plan_attention_forward = _plan
plan_attention_fp8_backward = plan_attention_fp8_forward = plan_attention_scored = _plan
plan_gemm = plan_update = _plan
activation_backward = activation_forward = _run
attention_backward = attention_forward = attention_scored = _run
attention_fp8_backward = attention_fp8_forward = scale_pairs = _run
attention_merge = attention_sink_grad = context_sum = _run
context_draws = context_lengths = context_mark = context_max = context_rows = _run
add = bias_dropout_add = bias_dropout_add_backward = rank_sum = _run
kv_append = kv_gather = kv_move = _run
l2_norm_backward = l2_norm_forward = norm_backward = norm_forward = _run
loss_rows = loss_values = _run
adam = adam_quantized = norm_many = scale_many = sgd = _run
column_sum = resize = padding_order = _run
permute = row_map = unpermute = unpermute_backward = _run
amax = amax_many = count_nonfinite = run_update = statistics = transpose = swizzle_scales = _run
quantize = quantize_block = quantize_grouped = quantize_mxfp8 = quantize_nvfp4 = _run
dequantize = dequantize_block = dequantize_mxfp8 = dequantize_nvfp4 = _run
rope = rope_qkv = softmax_backward = softmax_forward = _run


def executors(rt: Runtime) -> local:
    """A place for nothing."""
    return local()


def executor(rt: Runtime) -> None:
    """Nothing to write into."""


def default_allocator(device: Device) -> Any:
    """None: who asks for shapes brings what makes them."""


def stream(rt: Runtime, name: str) -> int:
    """Nothing runs on any."""
    return 0


def copy_to_host(rt: Runtime, tensor: Tensor) -> np.ndarray[Any, Any]:
    """There are no values."""
    raise UnsupportedError("copy_to_host", f"{tensor!r}", "tensors with memory", "run on a device, cpu or cuda")


order = zero = copy_from_host = _run
