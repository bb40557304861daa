"""Softmax of scores of attention, as a module."""

from __future__ import annotations

from typing import Any

from flax import linen as nn

from te_jax.flax import base
from te_jax.layers import SoftmaxType, softmax


class Softmax(nn.Module):
    """softmax(scale_factor (x + bias)) of x [batch, heads, queries, keys]. A mask is True where no score counts."""

    scale_factor: float = 1.0
    softmax_type: SoftmaxType = SoftmaxType.SCALED

    def __post_init__(self) -> None:
        base.one_of(self, "softmax_type", tuple(SoftmaxType))
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Any, mask: Any = None, bias: Any = None) -> Any:
        """The softmax over keys, of the scores' dtype."""
        if bias is None:
            return softmax(inputs, mask, self.scale_factor, self.softmax_type)
        biased = (inputs + bias).astype(inputs.dtype)
        return softmax(biased, mask, self.scale_factor, self.softmax_type)
