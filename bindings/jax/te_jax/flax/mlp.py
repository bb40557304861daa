"""An MLP with a norm in front of it, as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from te_jax.flax import base
from te_jax.flax.base import Axes, Initializer
from te_jax.layers import activation, dense, layernorm, layernorm_dense, layernorm_mlp


class LayerNormMLP(nn.Module):
    """(act(norm(x) @ `wi_kernel` + `wi_bias`) @ `wo_kernel` + `wo_bias`, norm(x) or None).

    wi_kernel is [in, activations, intermediate_dim], wo_kernel [intermediate_dim, in]. All of it is one call where
    nothing stands between: without dropout behind the activation, and without the norm's output as a result.
    """

    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Initializer | None = None
    kernel_axes_1: Axes = ("embed", "act", "mlp")
    kernel_axes_2: Axes = ("mlp", "embed")
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes_1: Axes = ("act", "mlp")
    bias_axes_2: Axes = ("embed",)
    return_layernorm_output: bool = False
    activations: Sequence[Any] = ("gelu",)
    activation_params: Any = None
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.0
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    layernorm_input_axes: Axes | None = None
    dot_1_input_axes: Axes | None = None
    dot_2_input_axes: Axes | None = None
    ffn1_ckpt_name: str = "ffn1"
    ffn2_ckpt_name: str = "ffn2"
    transpose_batch_sequence: bool = False  # no part of it looks at it
    quantization_checkpoint_name: str | None = None

    def __post_init__(self) -> None:
        base.one_of(self, "layernorm_type", ("layernorm", "rmsnorm"))
        constraints = ("layernorm_input_axes", "dot_1_input_axes", "dot_2_input_axes")
        clamps = {"activation_params": (None, "leave it out: te_jax clamps nothing")}
        axis = {"axis": (-1, "move the dimension to the end")}
        both = dict.fromkeys(constraints, base.NO_CONSTRAINT)
        names = {name: (name.removesuffix("_ckpt_name"), base.POLICY) for name in ("ffn1_ckpt_name", "ffn2_ckpt_name")}
        base.refuse(self, {**base.NO_ADAPTATION, **base.NO_CHECKPOINT_NAME, **names, **clamps, **axis, **both})
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Any, deterministic: bool = False) -> tuple[Any, Any]:
        """The MLP's output and the norm's, which is None unless it is asked for."""
        width, acts, hidden = inputs.shape[-1], tuple(base.counted(self.activations)), self.intermediate_dim
        gamma = beta = None
        if self.enable_layernorm:
            gamma, beta = base.norm_parameters(self, width, self.ln_bias_init, self.ln_bias_axes)
        one = self.kernel_init or base.KERNEL_INIT
        init = base.side_by_side(*[one] * len(acts))
        wi = base.parameter(self, "wi_kernel", init, self.kernel_axes_1, (width, len(acts), hidden))
        wo = base.parameter(self, "wo_kernel", one, self.kernel_axes_2, (hidden, width))
        bi = base.bias_parameter(self, "wi_bias", self.bias_axes_1, (len(acts), hidden))
        bo = base.bias_parameter(self, "wo_bias", self.bias_axes_2, (width,))
        wi, wo, bi, bo = base.as_read(inputs, wi, wo, bi, bo)
        norm = self.layernorm_type, self.zero_centered_gamma, self.epsilon
        alone = self.enable_layernorm and not self.return_layernorm_output
        if alone and not self.intermediate_dropout_rate:
            more = base.quantizing(self, "scaling", layernorm_mlp)
            y = layernorm_mlp(inputs, gamma, beta, [wi, wo], [bi, bo], *norm, activation_type=acts, **more)
            return y, None
        normed = None
        if alone:
            more = base.quantizing(self, "wi_scaling", layernorm_dense)
            inner = layernorm_dense(inputs, wi, gamma, beta, bi, *norm, **more)
        else:
            normed = layernorm(inputs, gamma, beta, *norm) if self.enable_layernorm else None
            more = base.quantizing(self, "wi_scaling", dense)
            inner = dense(inputs if normed is None else normed, wi, bi, **more)
        between = activation(inner, acts)
        if self.intermediate_dropout_rate:
            stream, dims = self.intermediate_dropout_rng_name, self.intermediate_hidden_dropout_dims
            between = base.dropped(between, self.intermediate_dropout_rate, dims, stream, deterministic)
        return dense(between, wo, bo, **base.quantizing(self, "wo_scaling", dense)), normed
