"""`PerTensorScaling`: current scaling of some tensors under delayed scaling."""

from __future__ import annotations

from typing import Any

import torch
from nvdlfw_inspect.logging import custom_assert
from nvdlfw_inspect.registry import api_method

from te_torch.debug.features.api import SELECTORS, Changing
from te_torch.tensors import Float8CurrentScalingQuantizer, Float8Quantizer


class PerTensorScaling(Changing):
    """Scales tensors by their own maximum, in a region of DelayedScaling. Ranks that gather parts agree on it.

    gemms, gemms_struct:      fprop, dgrad, wgrad
    tensors, tensors_struct:  activation, weight, gradient
    """

    keys, in_fp8 = SELECTORS, True

    @api_method
    def modify_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: torch.Tensor,
        default_quantizer: Any,
        iteration: int,
        out: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """The tensor by its own scale."""
        custom_assert(
            type(default_quantizer) is Float8Quantizer,
            f"PerTensorScaling of {layer_name}: it needs a region of DelayedScaling, not {type(default_quantizer)}.",
        )
        self._say("process_tensor", layer_name, gemm, tensor_name)
        group = getattr(default_quantizer, "amax_reduction_group", None)
        over_ranks: dict[str, Any] = {"with_amax_reduction": group is not None, "amax_reduction_group": group}
        quantizer = Float8CurrentScalingQuantizer(default_quantizer.dtype, tensor.device, **over_ranks)
        if out is None:
            return quantizer.quantize(tensor, dtype=dtype)
        quantizer.update_quantized(tensor, out)
        return None
