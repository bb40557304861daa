"""The built-in recipes, with their defaults, as factories of quantizers for `CustomRecipe`."""

from __future__ import annotations

from te_torch.tensors import (
    DelayedScalingRequest,
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizerRole,
)

_GRADIENTS = ("grad_output", "grad_input", "do", "dp")


def is_weight(role: QuantizerRole | None) -> bool:
    """Whether a role is that of a weight."""
    return role is not None and role.tensor_type == "weight"


def is_gradient(role: QuantizerRole | None) -> bool:
    """Whether a role is that of a gradient."""
    return role is not None and (role.tensor_type in _GRADIENTS or "dpa_grad_input" in role.name)


def high_precision_factory(role: QuantizerRole | None) -> IdentityQuantizer:
    """Nothing is quantized."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:
    """As `DelayedScaling`."""
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Float8CurrentScalingQuantizer:
    """As `Float8CurrentScaling`."""
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if is_gradient(role) else DType.kFloat8E4M3)


def float8_block_scaling_factory(role: QuantizerRole | None) -> Float8BlockQuantizer:
    """As `Float8BlockScaling`: tiles for weights, pieces for all else."""
    return Float8BlockQuantizer(
        DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=2 if is_weight(role) else 1
    )


def mxfp8_factory(role: QuantizerRole | None) -> MXFP8Quantizer:
    """As `MXFP8BlockScaling`."""
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: QuantizerRole | None) -> NVFP4Quantizer:
    """As `NVFP4BlockScaling`: tiles for weights; the transform for all else, and stochastic rounding for gradients."""
    if is_weight(role):
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=is_gradient(role))
