"""A product, a norm, and a norm with a product behind it, as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from te_core.errors import ArgumentError
from te_jax.flax import base
from te_jax.flax.base import Axes, Initializer
from te_jax.layers import dense, layernorm, layernorm_dense


class LayerNorm(nn.Module):
    """LayerNorm or RMSNorm of the last dimension, with parameters `scale` and `ln_bias`."""

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = ("embed",)
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ("embed",)
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False  # a norm does not look at it

    def __post_init__(self) -> None:
        base.one_of(self, "layernorm_type", ("layernorm", "rmsnorm"))
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """The norm of x, of x's shape and dtype."""
        gamma, beta = base.norm_parameters(self, x.shape[-1], self.bias_init, self.bias_axes)
        return layernorm(x, gamma, beta, self.layernorm_type, self.zero_centered_gamma, self.epsilon)


def _last(module: nn.Module, x: Any, axis: int | Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """x with the dimensions of these axes last, and their sizes."""
    axes = tuple(a % x.ndim if -x.ndim <= a < x.ndim else a for a in base.counted(axis))
    if len(set(axes)) != len(axes) or not set(axes) <= set(range(x.ndim)):
        got, allowed = f"axis={axis!r} with {x.ndim} dimensions", "dimensions of the inputs, each once"
        raise ArgumentError(type(module).__name__, got, allowed, "correct axis")
    places = tuple(range(x.ndim - len(axes), x.ndim))
    moved = x if axes == places else jnp.moveaxis(x, axes, places)
    return moved, moved.shape[x.ndim - len(axes) :]


class DenseGeneral(nn.Module):
    """x @ `kernel` + `bias` over the dimensions `axis` of x; the kernel is [*in, *features]."""

    features: int | Sequence[int]
    kernel_init: Initializer | None = None
    kernel_axes: Axes = ()
    use_bias: bool = True
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    input_axes: Axes = ()
    transpose_batch_sequence: bool = False  # a product does not look at it
    quantization_checkpoint_name: str | None = None

    def __post_init__(self) -> None:
        base.refuse(self, {**base.NO_ADAPTATION, **base.NO_CHECKPOINT_NAME, "input_axes": base.NO_CONSTRAINT})
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        """The product, of the input's dtype."""
        x, inner = _last(self, inputs, self.axis)
        outer = base.counted(self.features)
        kernel = base.parameter(
            self, "kernel", self.kernel_init or base.KERNEL_INIT, self.kernel_axes, (*inner, *outer)
        )
        bias = base.bias_parameter(self, "bias", self.bias_axes, outer)
        kernel, bias = base.as_read(x, kernel, bias)
        dims = tuple(range(-len(inner), 0)), tuple(range(len(inner)))
        return dense(x, kernel, bias, contracting_dims=dims, **base.quantizing(self, "scaling", dense))


class LayerNormDenseGeneral(nn.Module):
    """(norm(x) @ `kernel` + `bias`, norm(x) or None). The norm's output is rounded and returned if you ask for it."""

    features: int | Sequence[int]
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Initializer | None = None
    kernel_axes: Axes = ()
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ()
    return_layernorm_output: bool = False
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    layernorm_input_axes: Axes | None = None
    dot_input_axes: Axes | None = None
    depth_scaling: float | None = None
    transpose_batch_sequence: bool = False  # neither of both looks at it
    quantization_checkpoint_name: str | None = None

    def __post_init__(self) -> None:
        base.one_of(self, "layernorm_type", ("layernorm", "rmsnorm"))
        constraints = dict.fromkeys(("layernorm_input_axes", "dot_input_axes"), base.NO_CONSTRAINT)
        base.refuse(self, {**base.NO_ADAPTATION, **base.NO_CHECKPOINT_NAME, **constraints})
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Any) -> tuple[Any, Any]:
        """The product and the norm's output, which is None unless it is asked for."""
        x, inner = _last(self, inputs, self.axis)
        if len(inner) != 1 and self.enable_layernorm:
            got = f"axis={self.axis!r} with a norm"
            raise ArgumentError("LayerNormDenseGeneral", got, "one dimension", "join these dimensions before")
        outer, normed = base.counted(self.features), None
        if self.enable_layernorm:
            gamma, beta = base.norm_parameters(self, inner[0], self.ln_bias_init, self.ln_bias_axes)
            norm = self.layernorm_type, self.zero_centered_gamma, self.epsilon
        kernel = base.parameter(
            self, "kernel", self.kernel_init or base.KERNEL_INIT, self.kernel_axes, (*inner, *outer)
        )
        bias = base.bias_parameter(self, "bias", self.bias_axes, outer)
        kernel, bias = base.as_read(x, kernel, bias)
        if self.enable_layernorm and not self.return_layernorm_output:
            more = base.quantizing(self, "scaling", layernorm_dense)
            y = layernorm_dense(x, kernel, gamma, beta, bias, *norm, **more)
        else:
            if self.enable_layernorm:
                x = normed = layernorm(x, gamma, beta, *norm)
            dims = tuple(range(-len(inner), 0)), tuple(range(len(inner)))
            y = dense(x, kernel, bias, contracting_dims=dims, **base.quantizing(self, "scaling", dense))
        return y if self.depth_scaling is None else y / self.depth_scaling, normed
