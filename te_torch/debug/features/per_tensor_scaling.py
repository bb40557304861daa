"""`PerTensorScaling`: current scaling of some tensors under delayed scaling."""

from __future__ import annotations

from typing import Any

import torch
from nvdlfw_inspect.logging import custom_assert

from te_torch.debug.features.api import SELECTORS, Changing
from te_torch.tensors import Float8CurrentScalingQuantizer, Float8Quantizer


class PerTensorScaling(Changing):
    """Scales tensors by their own maximum, in a region of DelayedScaling. Ranks that gather parts agree on it.

    gemms, gemms_struct:      fprop, dgrad, wgrad
    tensors, tensors_struct:  activation, weight, gradient
    """

    keys, in_fp8 = SELECTORS, True

    def _changed(
        self, config: dict[str, Any], layer: str, tensor: torch.Tensor, quantizer: Any, out: Any, dtype: Any
    ) -> Any:
        """The tensor by its own scale."""
        custom_assert(
            type(quantizer) is Float8Quantizer,
            f"PerTensorScaling of {layer}: it needs a region of DelayedScaling, not {type(quantizer)}.",
        )
        group = getattr(quantizer, "amax_reduction_group", None)
        over_ranks: dict[str, Any] = {"with_amax_reduction": group is not None, "amax_reduction_group": group}
        own = Float8CurrentScalingQuantizer(quantizer.dtype, tensor.device, **over_ranks)
        if out is None:
            return own.quantize(tensor, dtype=dtype)
        own.update_quantized(tensor, out)
        return None
