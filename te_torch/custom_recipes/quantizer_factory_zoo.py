"""Mixes of formats: another one in backward than in forward, or for attention than for linear layers.

The rowwise copies of input and weight are read in forward, their columnwise ones in backward.
"""

from __future__ import annotations

from te_torch.custom_recipes.quantizer_factories import (
    current_scaling_factory,
    is_gradient,
    is_weight,
    mxfp8_factory,
    nvfp4_factory,
)
from te_torch.tensors import HybridQuantizer, IdentityQuantizer, NVFP4Quantizer, Quantizer, QuantizerRole


def _mixed(forward: Quantizer, backward: Quantizer) -> HybridQuantizer:
    return HybridQuantizer(rowwise_quantizer=forward, columnwise_quantizer=backward)


def _row_scaled(role: QuantizerRole | None) -> NVFP4Quantizer:
    """NVFP4 of the forward product: an amax for each row of activations, tiles for weights."""
    return NVFP4Quantizer(with_2d_quantization=True) if is_weight(role) else NVFP4Quantizer(row_scaled_nvfp4=True)


def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """High precision in forward, MXFP8 in backward."""
    return mxfp8_factory(role) if is_gradient(role) else _mixed(IdentityQuantizer(), mxfp8_factory(role))


def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """MXFP8 in forward, NVFP4 in backward."""
    return nvfp4_factory(role) if is_gradient(role) else _mixed(mxfp8_factory(role), nvfp4_factory(role))


def nvfp4_1d_weight_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4 with 1x16 blocks for weights too."""
    return NVFP4Quantizer() if is_weight(role) else nvfp4_factory(role)


def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """MXFP8 in forward, high precision in backward."""
    return IdentityQuantizer() if is_gradient(role) else _mixed(mxfp8_factory(role), IdentityQuantizer())


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4 with an amax for each row in forward, MXFP8 in backward."""
    return mxfp8_factory(role) if is_gradient(role) else _mixed(_row_scaled(role), mxfp8_factory(role))


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4 with an amax for each row in forward, high precision in backward."""
    return IdentityQuantizer() if is_gradient(role) else _mixed(_row_scaled(role), IdentityQuantizer())


def nvfp4_linear_fp8_dpa_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4 for linear layers, per-tensor FP8 for attention."""
    attention = role is not None and (role.module_type == "dpa" or "dpa_" in role.name)
    return current_scaling_factory(role) if attention else nvfp4_factory(role)
