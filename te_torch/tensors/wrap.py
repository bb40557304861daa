"""From the core's formats and rules to the classes here, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.precision import Operand
from te_core.quantized import QuantizedTensor
from te_torch.tensors import kinds
from te_torch.tensors.base import Quantizer
from te_torch.tensors.buffers import of_core as buffers_of_core
from te_torch.tensors.dtype import of_core
from te_torch.tensors.float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from te_torch.tensors.float8_blockwise import Float8BlockQuantizer
from te_torch.tensors.hybrid import HybridQuantizer
from te_torch.tensors.identity import IdentityQuantizer
from te_torch.tensors.mxfp8 import MXFP8Quantizer
from te_torch.tensors.nvfp4 import NVFP4Quantizer


def from_core(
    q: QuantizedTensor, shape: Sequence[int], dtype: torch.dtype, quantizer: Any = None, *, internal: bool = False
) -> Any:
    """A tensor (or storage) over what a torch runtime quantized."""
    options = () if quantizer is None else quantizer._options()
    kind = kinds.of_format(q.format)
    cls = kind.storage if internal else kind.tensor
    if q.format.scaling == "nvfp4" and not options:
        options = (False,)
    return cls._of(tuple(shape), dtype, q.format, buffers_of_core(q), quantizer, options)


def quantizer_of(rule: Operand | None, device: torch.device | None = None) -> Quantizer:
    """A quantizer that follows a rule. One of delayed scaling starts with scale 1, to be pointed elsewhere."""
    if rule is not None and rule.columnwise is not None:
        row = quantizer_of(replace(rule, columnwise=None), device)
        return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=quantizer_of(rule.columnwise, device))
    if rule is None or rule.scaling == "none":
        return IdentityQuantizer()
    kind = of_core(rule.dtype)
    if rule.scaling == "delayed":
        scale = torch.ones(1, dtype=torch.float32, device=device)
        return Float8Quantizer(scale, torch.zeros_like(scale), kind)
    if rule.scaling == "current":
        return Float8CurrentScalingQuantizer(
            kind, device, force_pow_2_scales=rule.power_of_two, amax_epsilon=rule.epsilon
        )
    if rule.scaling == "block":
        return Float8BlockQuantizer(
            kind,
            rowwise=True,
            columnwise=True,
            amax_epsilon=rule.epsilon,
            force_pow_2_scales=rule.power_of_two,
            block_scaling_dim=2 if rule.tiled else 1,
        )
    if rule.scaling == "mxfp8":
        return MXFP8Quantizer(kind, with_2d_quantization=rule.tiled)
    if rule.scaling == "nvfp4":
        return NVFP4Quantizer(
            with_rht=rule.transform,
            with_post_rht_amax=rule.transform,
            with_2d_quantization=rule.tiled,
            stochastic_rounding=rule.stochastic,
            row_scaled_nvfp4=rule.row_scaled,
            nvfp4_use_4over6=rule.four_over_six is not None,
            nvfp4_e4m3_max=rule.bound,
            nvfp4_4over6_err_mode=rule.four_over_six or "MAE",
        )
    raise ArgumentError(
        "quantizer_of", f"scaling {rule.scaling!r}", "delayed, current, block, mxfp8, nvfp4", "use one of these"
    )
