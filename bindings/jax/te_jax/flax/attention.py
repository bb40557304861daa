"""Attention, attention between its projections, and biases by distance, as modules."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from te_core.errors import ArgumentError, UnsupportedError
from te_jax.attention import SequenceDescriptor, fused_attn
from te_jax.calling import call_layer
from te_jax.flax import base
from te_jax.flax.base import W_FSDP_AXES, W_JOINED_AXES, W_NO_SHARD_AXES, W_TP_AXES, Axes, Initializer
from te_jax.flax.dense import DenseGeneral, LayerNormDenseGeneral
from te_jax.record import note

_NO_CONTEXT_PARALLEL = "leave it out: te_jax does not divide the tokens of a sequence"


def _descriptor(kind: str, given: Any) -> tuple[str, SequenceDescriptor | None]:
    """(the mask, the lengths) of a mask or of lengths. Without either nothing is padded."""
    if "padding" not in kind:
        if given is not None and not isinstance(given, SequenceDescriptor):
            note(f"DotProductAttention: attn_mask_type={kind!r} reads no mask")
        return kind, given if isinstance(given, SequenceDescriptor) else None
    if given is None:
        return {"padding": "no_mask"}.get(kind, kind.removeprefix("padding_")), None
    if isinstance(given, SequenceDescriptor):
        return kind, given
    mask = jnp.asarray(given)
    if mask.ndim != 4 or mask.shape[1] != 1:
        got, do = (
            f"a mask {list(mask.shape)}",
            "pass a mask, True where a key is not seen, or te_jax.SequenceDescriptor",
        )
        raise ArgumentError("DotProductAttention", got, "[batch, 1, queries, keys]", do)
    seen = mask[:, 0] == 0
    of_q, of_kv = (seen.any(axis).sum(-1, dtype=jnp.int32) for axis in (2, 1))
    return kind, SequenceDescriptor((of_q, of_kv))


class DotProductAttention(nn.Module):
    """softmax(scale_factor q k^T + bias) v, of [batch, length, heads, head_dim].

    A mask is read as lengths: the tokens at the end of a sequence that no one sees, or that see no one, are padding.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dtype: Any = None
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False  # they always are
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool | None = None
    window_size: tuple[int, int] | None = None
    max_segments_per_seq: int = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Any = None
    score_mod_bprop: Any = None

    def __post_init__(self) -> None:
        base.refuse(
            self,
            {
                "context_parallel_causal_load_balanced": (False, _NO_CONTEXT_PARALLEL),
                "context_parallel_axis": ("", _NO_CONTEXT_PARALLEL),
                "context_parallel_strategy": ("DEFAULT", _NO_CONTEXT_PARALLEL),
                "context_checkpoint_name": ("context", 'name "te_jax.fused_attn" in the policy of jax.checkpoint'),
                **base.NO_SCORE_MOD,
            },
        )
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        query: Any,
        key: Any = None,
        value: Any = None,
        sequence_descriptor: Any = None,
        bias: Any = None,
        *,
        deterministic: bool = False,
        mask: Any = None,
    ) -> Any:
        """The output [batch, queries, heads, head_dim], of the queries' dtype."""
        qkv = [a for a in (query, key, value) if a is not None]
        self._check(qkv)
        if self.transpose_batch_sequence:
            qkv = [a.swapaxes(0, 1) for a in qkv]
        kind, lengths = _descriptor(self.attn_mask_type, mask if sequence_descriptor is None else sequence_descriptor)
        offset = None
        if self.softmax_type == "learnable":
            axes, zeros = (None, base.HEAD_AXES, None, None), nn.initializers.zeros
            shape = (1, self.num_attention_heads, 1, 1)
            boxed = nn.with_logical_partitioning(zeros, axes)
            offset = self.param("softmax_offset", boxed, shape, jnp.float32).reshape(-1)
        dropout = 0.0 if deterministic else self.attention_dropout
        y = fused_attn(
            qkv,
            None if bias is None else jnp.asarray(bias, qkv[0].dtype),
            lengths,
            base.random_key(self, self.dropout_rng_name) if dropout else None,
            self.attn_bias_type,
            kind,
            self.qkv_layout,
            self.softmax_type,
            self.head_dim**-0.5 if self.scale_factor is None else self.scale_factor,
            dropout,
            max_segments_per_seq=self.max_segments_per_seq,
            window_size=self.window_size,
            softmax_offset=offset,
        )
        return y.swapaxes(0, 1) if self.transpose_batch_sequence else y

    def _check(self, qkv: list[Any]) -> None:
        if self.dtype is not None and jnp.dtype(self.dtype) != qkv[0].dtype:
            got, do = f"dtype={jnp.dtype(self.dtype)} with a query of {qkv[0].dtype}", "leave dtype out"
            raise ArgumentError("DotProductAttention", got, "the dtype of the query", do)
        q_heads, kv_heads = self.num_attention_heads, self.num_gqa_groups or self.num_attention_heads
        for i, array in enumerate(qkv):
            wanted = (q_heads if i == 0 else kv_heads), self.head_dim
            if array.shape[-2:] != wanted:
                got = f"{('query', 'key', 'value')[i]} {list(array.shape)}"
                allowed = f"[..., {wanted[0]}, {wanted[1]}]: heads, head_dim"
                raise ArgumentError("DotProductAttention", got, allowed, "correct the fields, or reshape the array")


def rotated(x: Any, windows: tuple[int, int], pairs: str) -> Any:
    """Heads [batch, length, heads, width] turned by their places' angles; wavelengths lie between the windows."""
    width, (least, most) = x.shape[-1], windows
    if width % 2:
        do = "choose an even head_dim"
        raise ArgumentError("MultiHeadAttention", f"head_dim={width} with rotary positions", "an even one", do)
    scales = least * (most / least) ** (np.arange(0, width, 2) / width)
    angles = np.arange(x.shape[1])[:, None] / scales
    angles = np.repeat(angles, 2, 1) if pairs == "consecutive" else np.tile(angles, 2)
    options = {"tensor_format": "bshd", "interleaved": pairs == "consecutive"}
    (y,) = call_layer("rope", {"t": x, "freqs": jnp.asarray(angles, jnp.float32)}, options)
    return y


class MultiHeadAttention(nn.Module):
    """(attention between its projections, the norm's output or None).

    Called with one array twice it has the projection `qkv` (`query` and `kv` with groups of queries), else `query` and
    `kv`; without fuse_qkv_params `query`, `key` and `value`; and always `out`. A norm belongs to the first of them.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Initializer | None = None
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool | None = None
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    float32_logits: bool = False  # they always are
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Any = None
    score_mod_bprop: Any = None

    def __post_init__(self) -> None:
        base.one_of(self, "layernorm_type", ("layernorm", "rmsnorm"))
        base.one_of(self, "rotary_pos_emb_group_method", ("consecutive", "alternate"))
        base.refuse(self, {**base.NO_SCOPE, **base.NO_SEQUENCE_PARALLEL, **base.NO_SCORE_MOD})
        if self.num_attention_heads % (self.num_gqa_groups or 1):
            got = f"num_attention_heads={self.num_attention_heads} with num_gqa_groups={self.num_gqa_groups}"
            raise ArgumentError("MultiHeadAttention", got, "groups that divide the heads", "correct one of both")
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        inputs_q: Any,
        inputs_kv: Any,
        mask: Any = None,
        bias: Any = None,
        *,
        decode: bool = False,
        deterministic: bool = False,
    ) -> tuple[Any, Any]:
        """The output, of the shape of `inputs_q`, and the norm's, which is None unless it is asked for."""
        if decode:
            do = "call te_jax.fused_attn with keys and values that you keep"
            raise UnsupportedError("MultiHeadAttention", "decode=True", "decode=False: it has no cache of keys", do)
        q, k, v, normed = self._projected(inputs_q, inputs_kv)
        heads, groups = self.num_attention_heads, self.num_gqa_groups or self.num_attention_heads
        qkv = [a.reshape(*a.shape[:2], n, self.head_dim) for a, n in ((q, heads), (k, groups), (v, groups))]
        if self.transpose_batch_sequence:
            qkv = [a.swapaxes(0, 1) for a in qkv]
        if self.enable_rotary_pos_emb:
            turn = self.rotary_pos_emb_windows, self.rotary_pos_emb_group_method
            qkv = [rotated(qkv[0], *turn), rotated(qkv[1], *turn), qkv[2]]
        y = DotProductAttention(
            head_dim=self.head_dim,
            num_attention_heads=heads,
            num_gqa_groups=groups,
            attention_dropout=self.attention_dropout,
            attn_mask_type=self.attn_mask_type,
            attn_bias_type=self.attn_bias_type,
            dropout_rng_name=self.dropout_rng_name,
            scale_factor=self.head_dim**-0.5 if self.scale_attn_logits else 1.0,
            window_size=self.window_size,
            softmax_type=self.softmax_type,
        )(*qkv, mask, bias, deterministic=deterministic)
        y = base.from_heads(y.swapaxes(0, 1) if self.transpose_batch_sequence else y)
        axes = (W_TP_AXES, W_FSDP_AXES), (W_NO_SHARD_AXES,)
        out = DenseGeneral(features=inputs_q.shape[-1], **self._projection("out", *axes, self._init))
        return out(y), normed

    def _projection(self, name: str, axes: Axes, bias_axes: Axes, init: Initializer) -> dict[str, Any]:
        biased = {"use_bias": self.use_bias, "bias_init": self.bias_init, "bias_axes": bias_axes}
        return {"kernel_init": init, "kernel_axes": axes, **biased, "dtype": self.dtype, "name": name}

    def _projected(self, inputs_q: Any, inputs_kv: Any) -> tuple[Any, Any, Any, Any]:
        """(q, k, v, the norm's output), heads side by side."""
        heads, groups = self.num_attention_heads, self.num_gqa_groups or self.num_attention_heads
        itself, one = inputs_q is inputs_kv, self._init
        of_query = self._query_init if self.scaled_query_init else one
        single, joined = (
            ((W_FSDP_AXES, W_TP_AXES), (W_TP_AXES,)),
            ((W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES), (W_JOINED_AXES, W_TP_AXES)),
        )
        whole = self.fuse_qkv_params and itself and heads == groups
        normed_too = self.return_layernorm_output or (itself and not whole)
        norm = {
            "enable_layernorm": self.input_layernorm,
            "layernorm_type": self.layernorm_type,
            "epsilon": self.layernorm_epsilon,
            "zero_centered_gamma": self.zero_centered_gamma,
            "scale_axes": (W_NO_SHARD_AXES,),
            "ln_bias_axes": (W_NO_SHARD_AXES,),
            "return_layernorm_output": normed_too,
        }
        if whole:
            options = self._projection("qkv", *joined, base.side_by_side(of_query, one, one))
            qkv, normed = LayerNormDenseGeneral((3, heads * self.head_dim), **norm, **options)(inputs_q)
            return qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :], normed
        options = self._projection("query", *single, of_query)
        q, normed = LayerNormDenseGeneral(heads * self.head_dim, **norm, **options)(inputs_q)
        of = normed if itself and normed is not None else inputs_kv
        normed = normed if self.return_layernorm_output else None
        width = groups * self.head_dim
        if self.fuse_qkv_params:
            kv = DenseGeneral((2, width), **self._projection("kv", *joined, base.side_by_side(one, one)))(of)
            return q, kv[..., 0, :], kv[..., 1, :], normed
        k, v = (DenseGeneral(width, **self._projection(name, *single, one))(of) for name in ("key", "value"))
        return q, k, v, normed

    @property
    def _init(self) -> Initializer:
        return self.kernel_init or base.ATTENTION_KERNEL_INIT

    def _query_init(self, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._init(key, shape, dtype) / jnp.asarray(self.head_dim**0.5, dtype)


class RelativePositionBiases(nn.Module):
    """Biases of scores by how far a key lies from a query, [1, heads, queries, keys]: one for each of some distances.

    Half of the buckets are distances of their own; the others are distances up to max_distance, logarithmically.
    """

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Initializer = nn.linear.default_embed_init
    embedding_axes: Axes = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> Any:
        """The biases [1, heads, queries, keys]."""
        shape = self.num_attention_heads, self.num_buckets
        table = base.parameter(self, "rel_embedding", self.embedding_init, self.embedding_axes, shape)
        behind = np.arange(q_seqlen)[:, None] - np.arange(k_seqlen)[None]
        return table[:, self._bucket(behind, bidirectional)][None]

    def _bucket(self, behind: np.ndarray[Any, Any], bidirectional: bool) -> np.ndarray[Any, Any]:
        """The bucket of each distance of a query behind a key."""
        count = self.num_buckets // 2 if bidirectional else self.num_buckets
        far = np.abs(behind) if bidirectional else np.maximum(behind, 0)
        exact = count // 2
        # (The epsilon lifts distances at a bucket's border over it, as in T5.)
        ratio = np.maximum(far, 1) / exact + np.finfo(np.float32).eps
        steps = np.log(ratio) / np.log(self.max_distance / exact) * (count - exact)
        bucket = np.where(far < exact, far, np.minimum(exact + steps.astype(np.int32), count - 1))
        found: np.ndarray[Any, Any] = bucket + count * (bidirectional and behind < 0)
        return found
