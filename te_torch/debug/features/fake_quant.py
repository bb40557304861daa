"""`FakeQuant`: a tensor as FP8 would hold it, multiplied in high precision."""

from __future__ import annotations

from typing import Any

import torch
from nvdlfw_inspect.registry import api_method

from te_core import dtypes
from te_core.ops import raw as ops
from te_core.quantized import Cast, Format
from te_torch.debug.features.api import SELECTORS, Changing
from te_torch.runtime import TO_CORE, runtime_for, to_core, to_torch

FORMATS = {
    "FP8E4M3": Format(dtypes.float8_e4m3, "tensor"),
    "FP8E5M2": Format(dtypes.float8_e5m2, "tensor"),
    "MXFP8E4M3": Format(dtypes.float8_e4m3, "mxfp8"),
    "MXFP8E5M2": Format(dtypes.float8_e5m2, "mxfp8"),
}


def fake_quantize(tensor: torch.Tensor, quant_format: str, out: torch.Tensor | None = None) -> torch.Tensor | None:
    """The tensor quantized and back, in its own dtype; into `out`, if given."""
    rt, x = runtime_for(tensor), to_core(tensor.contiguous())
    q = ops.quantize(rt, x.matrix(), Cast(FORMATS[quant_format], rowwise=True, columnwise=False))
    made = to_torch(ops.dequantize(rt, q, TO_CORE[tensor.dtype])).view(tensor.shape)
    if out is None:
        return made
    out.copy_(made)
    return None


class FakeQuant(Changing):
    """Rounds tensors to a format and back; their GEMMs run in high precision.

    quant_format:             FP8E4M3, FP8E5M2, MXFP8E4M3, MXFP8E5M2
    gemms, gemms_struct:      fprop, dgrad, wgrad
    tensors, tensors_struct:  activation, weight, gradient
    """

    keys, in_fp8 = SELECTORS | {"quant_format"}, False

    def _format(self, config: dict[str, Any]) -> str:
        found = config.get("quant_format")
        if found not in FORMATS:
            raise ValueError(f"FakeQuant: quant_format is {found!r}. Allowed: {', '.join(FORMATS)}.")
        return str(found)

    @api_method
    def modify_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Those that are configured."""
        self._format(config)
        return super().modify_tensor_enabled(config, layer_name, gemm, tensor_name, iteration)

    def _changed(
        self, config: dict[str, Any], layer: str, tensor: torch.Tensor, quantizer: Any, out: Any, dtype: Any
    ) -> Any:
        """The tensor as the format holds it."""
        made = fake_quantize(tensor, self._format(config), out)
        return made if made is None or dtype is None else made.to(dtype)
