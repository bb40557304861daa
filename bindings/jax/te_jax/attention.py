"""Attention of JAX arrays, by the names of transformer_engine.jax.attention."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from te_core.errors import ArgumentError, UnsupportedError
from te_core.spelling import choice_error
from te_jax.calling import call_layer, number


class AttnBiasType(str, Enum):
    """What is added to scores."""

    NO_BIAS = "no_bias"
    PRE_SCALE_BIAS = "pre_scale_bias"
    POST_SCALE_BIAS = "post_scale_bias"


class AttnMaskType(str, Enum):
    """Which keys a query sees."""

    NO_MASK = "no_mask"
    PADDING_MASK = "padding"
    CAUSAL_MASK = "causal"
    PADDING_CAUSAL_MASK = "padding_causal"
    CAUSAL_BOTTOM_RIGHT_MASK = "causal_bottom_right"
    PADDING_CAUSAL_BOTTOM_RIGHT_MASK = "padding_causal_bottom_right"


class AttnSoftmaxType(str, Enum):
    """What softmax divides by."""

    VANILLA_SOFTMAX = "vanilla"
    OFF_BY_ONE_SOFTMAX = "off-by-one"
    LEARNABLE_SOFTMAX = "learnable"


class QKVLayout(str, Enum):
    """How queries, keys and values lie: in one array, two, or three; b batch, s length, t tokens of all sequences."""

    BS3HD = "bs3hd"
    BSHD_BS2HD = "bshd_bs2hd"
    BSHD_BSHD_BSHD = "bshd_bshd_bshd"
    T3HD = "t3hd"
    THD_T2HD = "thd_t2hd"
    THD_THD_THD = "thd_thd_thd"


class SequenceDescriptor(NamedTuple):
    """The lengths of sequences: int32 [batch], of queries and of keys. Packed ones follow one another without gaps."""

    seqlens: tuple[Any, Any]

    @classmethod
    def from_seqlens(cls, seqlens: Any) -> SequenceDescriptor:
        """Of (lengths of queries, lengths of keys), or of one array for both."""
        if isinstance(seqlens, (tuple, list)) and len(seqlens) == 2 and np.ndim(seqlens[0]) == 1:
            return cls((seqlens[0], seqlens[1]))
        return cls((seqlens, seqlens))


def _one_of(kind: type[Enum], name: str, value: Any) -> str:
    try:  # programs also write "BSHD_BSHD_BSHD", and "off_by_one"
        return str(kind(value.lower().replace("off_by_one", "off-by-one")).value)
    except (ValueError, AttributeError):
        raise choice_error("fused_attn", name, value, [member.value for member in kind]) from None


def _parted(qkv: Sequence[Any], layout: str) -> tuple[Any, Any, Any]:
    count = 1 if layout.endswith("3hd") else 2 if "2hd" in layout else 3
    if not isinstance(qkv, (tuple, list)) or len(qkv) != count:
        got = f"qkv of {len(qkv) if isinstance(qkv, (tuple, list)) else type(qkv).__name__} with {layout}"
        raise ArgumentError("fused_attn", got, f"a tuple of {count}", "correct qkv or qkv_layout")
    packed = jnp.asarray(qkv[-1])
    parts = qkv if count == 3 else [*qkv[:-1], *(packed[..., i, :, :] for i in range(4 - count))]
    q, k, v = map(jnp.asarray, parts)
    return q, k, v


def fused_attn(
    qkv: Sequence[Any],
    bias: Any = None,
    sequence_descriptor: SequenceDescriptor | None = None,
    seed: Any = None,
    attn_bias_type: Any = None,
    attn_mask_type: Any = AttnMaskType.CAUSAL_MASK,
    qkv_layout: Any = QKVLayout.BSHD_BSHD_BSHD,
    softmax_type: Any = AttnSoftmaxType.VANILLA_SOFTMAX,
    scaling_factor: float | None = None,
    dropout_probability: float = 0.0,
    is_training: bool = True,
    max_segments_per_seq: int = 1,
    window_size: tuple[int, int] | None = None,
    *,
    softmax_offset: Any = None,
) -> Any:
    """softmax(scaling_factor q k^T + bias) v: [batch, length, heads, width], packed [tokens, heads, width].

    `qkv`: a tuple of one, two or three arrays, as `qkv_layout` says. `sequence_descriptor`: the lengths of sequences,
    with padding and in packed layouts. `seed`: a key of jax.random for dropout, another one in each step.

    Raises:
        ArgumentError: Arrays, options and lengths do not fit together.
        UnsupportedError: `max_segments_per_seq` is above 1.

    Example:
        import jax.numpy as jnp
        import te_jax

        q = k = v = jnp.ones((2, 16, 4, 32))
        y = te_jax.fused_attn((q, k, v))  # [2, 16, 4, 32]
    """
    layout = _one_of(QKVLayout, "qkv_layout", qkv_layout)
    mask = _one_of(AttnMaskType, "attn_mask_type", attn_mask_type)
    usual = "no_bias" if bias is None else "post_scale_bias"
    kind = _one_of(AttnBiasType, "attn_bias_type", attn_bias_type or usual)
    q, k, v = _parted(qkv, layout)
    packed = layout.startswith("t")
    _check(kind, bias, packed or "padding" in mask, sequence_descriptor, max_segments_per_seq)
    dropout = number("fused_attn", "dropout_probability", dropout_probability) if is_training else 0.0
    arrays = {"q": q, "k": k, "v": v, "core_attention_bias": bias, "softmax_offset": softmax_offset}
    if sequence_descriptor is not None:
        for name, lengths in zip(("cu_seqlens_q", "cu_seqlens_kv"), sequence_descriptor.seqlens, strict=True):
            lengths = jnp.asarray(lengths)
            if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.ndim != 1:
                got, do = f"lengths {lengths.dtype}{list(lengths.shape)}", "pass one integer for each sequence"
                raise ArgumentError("fused_attn", got, "integers [batch]", do)
            sums = jnp.cumsum(lengths, dtype=jnp.int32)
            arrays[name] = jnp.concatenate([jnp.zeros(1, jnp.int32), sums])
    options = {
        "qkv_format": "thd" if packed else "bshd",
        "attn_mask_type": mask,
        "softmax_type": _one_of(AttnSoftmaxType, "softmax_type", softmax_type),
        "softmax_scale": scaling_factor,
        "attention_dropout": dropout,
        "window_size": None if window_size is None else tuple(window_size),
        "bottom_right_diagonal": mask.endswith("bottom_right"),
        "core_attention_bias_type": kind,
        "max_seqlen_q": q.shape[0] if packed else 0,
        "max_seqlen_kv": k.shape[0] if packed else 0,
    }
    (y,) = call_layer("attention", arrays, options, seed=seed if dropout else None)
    return y.reshape(*q.shape[:-1], v.shape[-1])


def _check(kind: str, bias: Any, padded: bool, lengths: Any, segments: int) -> None:
    if (kind == "no_bias") != (bias is None) or kind == "pre_scale_bias":
        got = f"attn_bias_type={kind!r} {'without' if bias is None else 'with'} bias"
        raise ArgumentError("fused_attn", got, "no_bias without, post_scale_bias with one", "correct the bias")
    if padded != isinstance(lengths, SequenceDescriptor):
        what = "none" if lengths is None else f"a {type(lengths).__name__}"
        got = f"{what} as sequence_descriptor {'with' if padded else 'without'} padding"
        do = "pass te_jax.SequenceDescriptor.from_seqlens(...) with padding, and nothing without"
        raise ArgumentError("fused_attn", got, "lengths where there is padding", do)
    if segments != 1:
        do = "pass packed sequences as [tokens, heads, width] with their lengths"
        raise UnsupportedError("fused_attn", f"max_segments_per_seq={segments}", "1", do)
