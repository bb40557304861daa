"""The operators of an exported program for torch's older exporter (`dynamo=False`, the default before torch 2.9)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

OPSET = 19  # the first that has FP8
_E5M2 = 23  # TorchScript's number of torch.float8_e5m2


@cache
def register() -> None:
    """Tell the exporter what per-tensor FP8 is in ONNX; once a process."""
    from torch.onnx import symbolic_helper, utils

    quantize = symbolic_helper.parse_args("v", "v", "i")(_quantize)
    for name, symbolic in (("fp8_quantize", quantize), ("fp8_dequantize", _dequantize)):
        utils.register_custom_op_symbolic(f"tex::{name}", symbolic, OPSET)


def _quantize(g: Any, x: Any, scale: Any, dtype: int) -> Any:
    zero = torch.zeros((), dtype=torch.float8_e5m2 if dtype == _E5M2 else torch.float8_e4m3fn)
    return g.op("QuantizeLinear", x, g.op("Reciprocal", scale), g.op("Constant", value_t=zero))


def _dequantize(g: Any, q: Any, scale: Any) -> Any:
    *_, zero = q.node().inputs()
    return g.op("DequantizeLinear", q, g.op("Reciprocal", scale), zero)
