"""The quantizer that a recipe's cast stands for, as features get it."""

from __future__ import annotations

from typing import Any

import torch

from te_core.precision import rule_of
from te_core.quantized import Cast, QuantizedTensor
from te_torch.runtime import piece_to_torch
from te_torch.tensors import Float8CurrentScalingQuantizer, Float8Quantizer, quantizer_of
from te_torch.tensors.dtype import of_core


def quantizer_for(cast: Cast | None, q: QuantizedTensor | None, device: torch.device, group: Any = None) -> Any:
    """By the cast; where a weight was quantized before, by its format.

    group: of the ranks that have other parts of the tensor, which need one scale. (That of a recipe with a history is
    equal on all of them. Who scales otherwise finds the group in `amax_reduction_group`.)
    """
    form = cast.format if cast is not None else None if q is None else q.format
    if form is None:
        return None
    if group is not None and form.scaling == "tensor":
        made = quantizer_for(cast, q, device).copy()
        made.amax_reduction_group = group
        if isinstance(made, Float8CurrentScalingQuantizer):
            made.with_amax_reduction = True
        return made
    if form.scaling == "tensor" and cast is not None and cast.scale is not None:
        scale = piece_to_torch(cast.scale)
        amax = torch.zeros_like(scale) if cast.amax is None else piece_to_torch(cast.amax)
        return Float8Quantizer(scale, amax, of_core(form.dtype))
    options: dict[str, Any] = {"tiled": form.tiled, "row_scaled": form.row_scaled, "bound": form.bound}
    if cast is not None:
        options |= {name: getattr(cast, name) for name in ("epsilon", "power_of_two", "transform")}
    return quantizer_of(rule_of(form.dtype, "current" if form.scaling == "tensor" else form.scaling, **options), device)
