"""The quantizer that a recipe's cast stands for, as features get it."""

from __future__ import annotations

from typing import Any

import torch

from te_core.quantized import Cast, Format, QuantizedTensor
from te_torch.runtime import piece_to_torch
from te_torch.tensors import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
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
    kind = of_core(form.dtype)
    if form.scaling == "tensor" and cast is not None and cast.scale is not None:
        scale = piece_to_torch(cast.scale)
        amax = torch.zeros_like(scale) if cast.amax is None else piece_to_torch(cast.amax)
        return Float8Quantizer(scale, amax, kind)
    return _stateless(form, kind, cast, device)


def _stateless(form: Format, kind: Any, cast: Cast | None, device: torch.device) -> Any:
    epsilon, power_of_two = (0.0, False) if cast is None else (cast.epsilon, cast.power_of_two)
    if form.scaling == "tensor":
        return Float8CurrentScalingQuantizer(kind, device, force_pow_2_scales=power_of_two, amax_epsilon=epsilon)
    if form.scaling == "block":
        return Float8BlockQuantizer(
            kind,
            rowwise=True,
            columnwise=True,
            amax_epsilon=epsilon,
            force_pow_2_scales=power_of_two,
            block_scaling_dim=2 if form.tiled else 1,
        )
    if form.scaling == "mxfp8":
        return MXFP8Quantizer(kind, with_2d_quantization=form.tiled)
    transform = cast is not None and cast.transform
    return NVFP4Quantizer(
        with_rht=transform,
        with_post_rht_amax=transform,
        with_2d_quantization=form.tiled,
        row_scaled_nvfp4=form.row_scaled,
        nvfp4_e4m3_max=form.bound,
    )
