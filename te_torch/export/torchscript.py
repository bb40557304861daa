"""The operators of an exported program for torch's older exporter (`dynamo=False`, the default before torch 2.9)."""

from __future__ import annotations

from typing import Any

import torch

from te_torch.export.mode import not_exported
from te_torch.export.operators import OPSET, opset_refused

_OLDEST = 7  # opset that this exporter writes
_E5M2 = 23  # TorchScript's number of torch.float8_e5m2


def register() -> None:
    """Tell the exporter what per-tensor FP8 is in ONNX, and to refuse what it cannot write."""
    from torch.onnx import symbolic_helper, utils

    quantize = symbolic_helper.parse_args("v", "v", "i")(_quantize)
    for name, symbolic in (("fp8_quantize", quantize), ("fp8_dequantize", _dequantize)):
        utils.register_custom_op_symbolic(f"tex::{name}", _too_old, _OLDEST)
        utils.register_custom_op_symbolic(f"tex::{name}", symbolic, OPSET)
    utils.register_custom_op_symbolic("tex::mxfp8_quantize", _no_blocks, _OLDEST)


def _too_old(g: Any, *args: Any) -> Any:
    raise opset_refused(g.opset)


def _no_blocks(g: Any, *args: Any) -> Any:
    raise not_exported("MXFP8 by torch's older exporter", "torch.onnx.export(.., dynamo=True)", "pass dynamo=True")


def _quantize(g: Any, x: Any, scale: Any, dtype: int) -> Any:
    zero = torch.zeros((), dtype=torch.float8_e5m2 if dtype == _E5M2 else torch.float8_e4m3fn)
    return g.op("QuantizeLinear", x, g.op("Reciprocal", scale), g.op("Constant", value_t=zero))


def _dequantize(g: Any, q: Any, scale: Any) -> Any:
    *_, zero = q.node().inputs()
    return g.op("DequantizeLinear", q, g.op("Reciprocal", scale), zero)
