"""A layer of a Transformer, of an encoder or a decoder, as a module."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from te_core.errors import ArgumentError, UnsupportedError
from te_jax.flax import base
from te_jax.flax.attention import MultiHeadAttention, RelativePositionBiases
from te_jax.flax.base import W_FSDP_AXES, W_JOINED_AXES, W_NO_SHARD_AXES, W_TP_AXES, Initializer
from te_jax.flax.dense import LayerNorm
from te_jax.flax.mlp import LayerNormMLP


class TransformerLayerType(Enum):
    """Whether a layer also attends to what an encoder gave."""

    ENCODER = "encoder"
    DECODER = "decoder"


class TransformerLayer(nn.Module):
    """x1 = x + attention(norm(x)), y = x1 + mlp(norm(x1)); a decoder's has attention to `encoded` in between.

    Parts: `attention` (of a decoder: `self_attention`, `encoder_decoder_attention`), `mlp`, `relpos_bias`, and
    `output_layernorm`, if there is one.
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    hidden_dropout: float = 0.1
    hidden_dropout_dims: Sequence[int] = ()
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    intermediate_dropout_dims: Sequence[int] = ()
    dropout_rng_name: str = "dropout"
    mha_kernel_init: Initializer | None = None
    mlp_kernel_init: Initializer | None = None
    mlp_activations: Sequence[str] = ("gelu",)
    mlp_activation_params: Any = None
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    float32_attention_logits: bool = False  # they always are
    layer_type: TransformerLayerType = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: str | None = None
    enable_relative_embedding: bool = True
    relative_embedding: nn.Module | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    drop_path: float = 0.0
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Any = None
    score_mod_bprop: Any = None

    def __post_init__(self) -> None:
        base.one_of(self, "layernorm_type", ("layernorm", "rmsnorm"))
        base.one_of(self, "layer_type", tuple(TransformerLayerType))
        clamps = {"mlp_activation_params": (None, "leave it out: te_jax clamps nothing")}
        base.refuse(self, {**base.NO_SCOPE, **base.NO_SEQUENCE_PARALLEL, **base.NO_SCORE_MOD, **clamps})
        if self.hidden_size % self.num_attention_heads:
            got = f"hidden_size={self.hidden_size} with num_attention_heads={self.num_attention_heads}"
            raise ArgumentError("TransformerLayer", got, "heads that divide it", "correct one of both")
        if self.output_layernorm and self.apply_residual_connection_post_layernorm:
            got = "apply_residual_connection_post_layernorm=True with output_layernorm=True"
            do = "leave one of both out"
            raise ArgumentError("TransformerLayer", got, "a norm in front of the attention, or none", do)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        inputs: Any,
        encoded: Any = None,
        attention_mask: Any = None,
        encoder_decoder_mask: Any = None,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
    ) -> Any:
        """The layer's output, of the shape of `inputs`."""
        decoder = self.layer_type is TransformerLayerType.DECODER
        self._check(inputs, encoded, decode or max_decode_length is not None)
        post, drop = self.apply_residual_connection_post_layernorm, not deterministic
        bias = self._biases(inputs) if self.enable_relative_embedding else None
        y, normed = self._attention(
            "self_attention" if decoder else "attention", self.self_attn_mask_type, self.self_attn_bias_type,
            not self.output_layernorm,
        )(inputs, inputs, attention_mask, bias, deterministic=not drop)  # fmt: skip
        x = self._path(self._hidden(y, drop), drop) + (normed if post else inputs)
        if decoder:
            cross = self._attention("encoder_decoder_attention", "padding", None, True)
            y, normed = cross(x, encoded, encoder_decoder_mask, deterministic=not drop)
            x = self._hidden(y, drop) + (normed if post else x)
        y, normed = self._mlp()(x, deterministic=not drop)
        x = self._path(self._hidden(y, drop), drop) + (normed if post else x)
        if self.output_layernorm:
            axes = {"scale_axes": (W_NO_SHARD_AXES,), "bias_axes": (W_NO_SHARD_AXES,)}
            x = LayerNorm(**self._norm("epsilon"), **axes, dtype=self.dtype, name="output_layernorm")(x)
        return x

    def _check(self, inputs: Any, encoded: Any, decode: bool) -> None:
        if decode:
            do = "call te_jax.fused_attn with keys and values that you keep"
            raise UnsupportedError("TransformerLayer", "decode=True", "decode=False: it has no cache of keys", do)
        if inputs.ndim != 3 or inputs.shape[-1] != self.hidden_size:
            got, allowed = f"inputs {list(inputs.shape)}", f"[batch, length, {self.hidden_size}]"
            raise ArgumentError("TransformerLayer", got, allowed, "correct the inputs or hidden_size")
        if (encoded is None) == (self.layer_type is TransformerLayerType.DECODER):
            got = f"encoded {'left out' if encoded is None else 'given'} with {self.layer_type}"
            raise ArgumentError("TransformerLayer", got, "encoded in a decoder, and only there", "correct layer_type")

    def _norm(self, epsilon: str) -> dict[str, Any]:
        same = {"layernorm_type": self.layernorm_type, "zero_centered_gamma": self.zero_centered_gamma}
        return {**same, epsilon: self.layernorm_epsilon}

    def _biases(self, inputs: Any) -> Any:
        length = inputs.shape[0 if self.transpose_batch_sequence else 1]
        made = self.relative_embedding
        if made is None:
            made = RelativePositionBiases(
                num_buckets=32,
                max_distance=128,
                num_attention_heads=self.num_attention_heads,
                dtype=self.dtype,
                embedding_init=nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
                name="relpos_bias",
            )
        return made(length, length, self.layer_type is TransformerLayerType.ENCODER)

    def _attention(self, name: str, mask: str, bias: str | None, norm: bool) -> MultiHeadAttention:
        return MultiHeadAttention(
            head_dim=self.hidden_size // self.num_attention_heads,
            num_attention_heads=self.num_attention_heads,
            num_gqa_groups=self.num_gqa_groups,
            attention_dropout=self.attention_dropout,
            dropout_rng_name=self.dropout_rng_name,
            input_layernorm=norm,
            **self._norm("layernorm_epsilon"),
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            kernel_init=self.mha_kernel_init,
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            attn_mask_type=mask,
            attn_bias_type=bias,
            enable_rotary_pos_emb=self.enable_rotary_pos_emb,
            rotary_pos_emb_windows=self.rotary_pos_emb_windows,
            rotary_pos_emb_group_method=self.rotary_pos_emb_group_method,
            dtype=self.dtype,
            fuse_qkv_params=self.fuse_qkv_params,
            transpose_batch_sequence=self.transpose_batch_sequence,
            scale_attn_logits=self.scale_attn_logits,
            scaled_query_init=self.scaled_query_init,
            window_size=self.window_size,
            softmax_type=self.softmax_type,
            name=name,
        )

    def _mlp(self) -> LayerNormMLP:
        return LayerNormMLP(
            intermediate_dim=self.mlp_hidden_size,
            **self._norm("epsilon"),
            scale_axes=(W_NO_SHARD_AXES,),
            ln_bias_axes=(W_NO_SHARD_AXES,),
            kernel_init=self.mlp_kernel_init,
            kernel_axes_1=(W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES),
            kernel_axes_2=(W_TP_AXES, W_FSDP_AXES),
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            bias_axes_1=(W_JOINED_AXES, W_TP_AXES),
            bias_axes_2=(W_NO_SHARD_AXES,),
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            activations=self.mlp_activations,
            intermediate_dropout_rng_name=self.dropout_rng_name,
            intermediate_dropout_rate=self.intermediate_dropout,
            intermediate_hidden_dropout_dims=self.intermediate_dropout_dims,
            dtype=self.dtype,
            name="mlp",
        )

    def _hidden(self, x: Any, drop: bool) -> Any:
        return base.dropped(x, self.hidden_dropout, self.hidden_dropout_dims, self.dropout_rng_name, not drop)

    def _path(self, x: Any, drop: bool) -> Any:
        """x, but for the sequences whose whole branch is dropped."""
        if not self.drop_path:
            return x
        dims = (0, 2) if self.transpose_batch_sequence else (1, 2)
        return base.dropped(x, self.drop_path, dims, self.dropout_rng_name, not drop)
