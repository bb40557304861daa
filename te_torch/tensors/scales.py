"""The scale of an FP8 tensor that has one, where it comes from the tensor's own maximum."""

from __future__ import annotations

from typing import Any

import torch

from te_torch.exchange import all_reduce


def scale_of(amax: torch.Tensor, top: float, power_of_two: bool, epsilon: float) -> torch.Tensor:
    """The scale of current scaling for maxima that are already reduced (float32)."""
    if epsilon:
        amax = torch.where(amax < epsilon, epsilon, amax)
    usable = (amax > 0) & (amax < torch.inf)
    scale = torch.full_like(amax, top).div_(amax).clamp_(max=torch.finfo(torch.float32).max)
    scale = torch.where(usable, scale, 1.0)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def own_scale(
    values: torch.Tensor, top: float, margin: int, otherwise: torch.Tensor, group: Any = None
) -> torch.Tensor:
    """The scale from which delayed scaling starts for these values; `otherwise` if their maximum is no use.

    `group`: of the processes whose shards this scale is for, too.
    """
    amax = values.abs().amax().float() if values.numel() else torch.zeros((), device=values.device)
    if group is not None:
        all_reduce("scale of shards", amax, group, "max")
    made = (top * 2.0**-margin / amax).clamp(max=torch.finfo(torch.float32).max)  # of a tiny maximum, as an update
    return torch.where(torch.isfinite(amax) & (amax > 0), made, otherwise)


def start_from(values: torch.Tensor, margin: int, quantizer: Any, group: Any = None) -> None:
    """Let a delayed quantizer start from these values; what it has noted of earlier ones no longer counts."""
    with torch.no_grad():
        found = own_scale(values, quantizer.dtype.core.max, margin, quantizer.scale, group)
        quantizer.scale.copy_(found.reshape(quantizer.scale.shape))
        quantizer.amax.zero_()
