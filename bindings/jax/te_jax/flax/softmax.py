"""Softmax of scores of attention, as a module."""

from __future__ import annotations

from enum import Enum
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from te_core.errors import ArgumentError
from te_jax.calling import call_layer
from te_jax.flax import base


class SoftmaxType(str, Enum):
    """Which scores count."""

    SCALED = "scaled"
    SCALED_MASKED = "scaled_masked"
    SCALED_UPPER_TRIANG_MASKED = "scaled_upper_triang_masked"


class Softmax(nn.Module):
    """softmax(scale_factor x + bias) of x [batch, heads, queries, keys]; a mask is True where none is counted."""

    scale_factor: float = 1.0
    softmax_type: SoftmaxType = SoftmaxType.SCALED

    def __post_init__(self) -> None:
        base.one_of(self, "softmax_type", tuple(SoftmaxType))
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Any, mask: Any = None, bias: Any = None) -> Any:
        masked = self.softmax_type == SoftmaxType.SCALED_MASKED
        if masked != (mask is not None):
            got = f"softmax_type={self.softmax_type!r} {'without' if mask is None else 'with'} a mask"
            raise ArgumentError("Softmax", got, "a mask with SCALED_MASKED, and only there", "correct one of both")
        x, scale = inputs, self.scale_factor
        if bias is not None:
            x, scale = (inputs * scale + bias).astype(inputs.dtype), 1.0
        causal = "top_left" if self.softmax_type == SoftmaxType.SCALED_UPPER_TRIANG_MASKED else None
        arrays = {"x": x, "mask": None if mask is None else jnp.asarray(mask, bool)}
        (y,) = call_layer("softmax", arrays, {"scale": scale, "causal": causal})
        return y
