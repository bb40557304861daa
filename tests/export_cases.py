"""Modules to be exported, each with its inputs: for tests with an exporter and for those without one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, Recipe

H, F, HEADS = 64, 96, 4
RECIPES: dict[str, Recipe | None] = {
    "high": None,
    "delayed": DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
    "delayed e4m3": DelayedScaling(amax_history_len=1, fp8_format=Format.E4M3),
    "current": Float8CurrentScaling(),
    "current pow2": Float8CurrentScaling(use_power_2_scales=True),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 tiled": MXFP8BlockScaling(enable_2d_quantization=True),
}
#: Attention in FP8, too.
FP8_ATTENTION: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", fp8_dpa=True),
    "delayed mha": DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", fp8_dpa=True, fp8_mha=True),
    "current": Float8CurrentScaling(fp8_dpa=True),
}
#: One of each kind that an export knows.
KINDS = ("high", "delayed", "current", "mxfp8")
ACTIVATIONS = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED = ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")


def region(recipe: Recipe | None) -> Any:
    return te.autocast(enabled=recipe is not None, recipe=recipe, emulate=True)


class Case(NamedTuple):
    module: Callable[..., torch.nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    named: Callable[[], dict[str, Any]] = dict


class Turned(torch.nn.Module):
    """A layer with angles of its own, as a model has them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = layer(**options)
        self.register_buffer("angles", te.RotaryPositionEmbedding(H // HEADS)(32).cpu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, rotary_pos_emb=self.angles)


def layer(**options: Any) -> torch.nn.Module:
    return te.TransformerLayer(H, F, HEADS, **{"device": "cpu", **options})


def rows() -> tuple[Any, ...]:
    return (torch.randn(6, 2, H),)


def heads(*counts: int, lead: tuple[int, ...] = (6, 2)) -> tuple[Any, ...]:
    return tuple(torch.randn(*lead, n, 16) for n in counts)


def padding(*lengths: int, left: bool = False, of: int = 6) -> torch.Tensor:
    mask = torch.arange(of) >= torch.tensor(lengths)[:, None]
    return (mask.flip(1) if left else mask).view(len(lengths), 1, 1, of)


def sums() -> dict[str, Any]:
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    return {"cu_seqlens_q": cu, "cu_seqlens_kv": cu.clone(), "max_seqlen_q": 8, "max_seqlen_kv": 8}


def _module(kind: str, *args: Any, **fixed: Any) -> Callable[..., torch.nn.Module]:
    return lambda **options: getattr(te, kind)(*args, **{"device": "cpu", **fixed, **options})


def _attention(*args: Any, **fixed: Any) -> Callable[..., torch.nn.Module]:
    return lambda **_: te.DotProductAttention(*args, **fixed)


def _layer(**fixed: Any) -> Callable[..., torch.nn.Module]:
    return lambda **options: layer(**fixed, **options)


def _turned(**fixed: Any) -> Callable[..., torch.nn.Module]:
    return lambda **options: Turned(**fixed, **options)


#: Modules with GEMMs: in every recipe.
PRODUCTS: dict[str, Case] = {
    "Linear": Case(_module("Linear", H, F), rows),
    "Linear in parts": Case(_module("Linear", H, F, parameters_split=("a", "b"), return_bias=True), rows),
    "Linear of odd sizes": Case(_module("Linear", 50, 33), lambda: (torch.randn(7, 50),)),
    "LayerNormLinear": Case(_module("LayerNormLinear", H, F, return_layernorm_output=True), rows),
    "LayerNormMLP": Case(_module("LayerNormMLP", H, F), rows),
    "GroupedLinear": Case(_module("GroupedLinear", 3, H, F), lambda: (torch.randn(8, H), [3, 0, 5])),
    "MultiheadAttention": Case(
        _module("MultiheadAttention", H, HEADS, input_layernorm=True, return_layernorm_output=True), rows
    ),
    "TransformerLayer": Case(_layer(), rows),
    "TransformerLayer with GQA": Case(_turned(num_gqa_groups=2, fuse_qkv_params=True, normalization="RMSNorm"), rows),
}
#: Everything else, in high precision.
OTHERS: dict[str, Case] = {
    "LayerNorm": Case(_module("LayerNorm", (2, H)), rows),
    "LayerNorm centred": Case(_module("LayerNorm", H, zero_centered_gamma=True), rows),
    "RMSNorm": Case(_module("RMSNorm", H), rows),
    "RMSNorm centred": Case(_module("RMSNorm", H, zero_centered_gamma=True), rows),
    "decoder": Case(_layer(layer_type="decoder"), rows, lambda: {"encoder_output": torch.randn(5, 2, H)}),
    "parallel": Case(_layer(parallel_attention_mlp=True), rows),
    "late": Case(_layer(apply_residual_connection_post_layernorm=True), rows),
    "output norm": Case(_layer(output_layernorm=True, attn_input_format="bshd"), rows),
    "interleaved": Case(_turned(rotary_pos_interleaved=True, qk_norm_type="L2Normalization"), rows),
    "turned late": Case(_turned(qk_norm_type="RMSNorm", qk_norm_before_rope=True), rows),
    "cross": Case(
        _module("MultiheadAttention", H, HEADS, attention_type="cross", attn_mask_type="no_mask"),
        rows,
        lambda: {"encoder_output": torch.randn(5, 2, H)},
    ),
    "padding": Case(_layer(self_attn_mask_type="padding"), lambda: (*rows(), padding(4, 6))),
    "padding_causal": Case(_layer(self_attn_mask_type="padding_causal"), lambda: (*rows(), padding(4, 6))),
    "padding before": Case(
        _layer(self_attn_mask_type="padding_causal", window_size=(2, 0)), lambda: (*rows(), padding(4, 6, left=True))
    ),
    "bottom right": Case(
        _attention(4, 16, attn_mask_type="padding_causal_bottom_right"),
        lambda: (torch.randn(6, 2, 4, 16), *heads(4, 4, lead=(5, 2))),
        lambda: {"attention_mask": (padding(6, 4), padding(5, 3, left=True, of=5))},
    ),
    "arbitrary": Case(_layer(self_attn_mask_type="arbitrary"), lambda: (*rows(), torch.rand(2, 1, 6, 6) > 0.6)),
    "window": Case(_layer(window_size=(2, 0)), rows),
    "no_mask": Case(_layer(self_attn_mask_type="no_mask"), rows),
    "off-by-one": Case(_layer(softmax_type="off-by-one"), rows),
    "learnable": Case(_layer(softmax_type="learnable"), rows),
    "alibi": Case(_layer(), rows, lambda: {"core_attention_bias_type": "alibi"}),
    "alibi padded": Case(
        _layer(self_attn_mask_type="padding_causal"),
        lambda: (*rows(), padding(4, 6, left=True)),
        lambda: {"core_attention_bias_type": "alibi"},
    ),
    "bias": Case(
        _layer(),
        rows,
        lambda: {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.randn(1, HEADS, 6, 6)},
    ),
    # Batch times groups is the number of heads: what onnxscript's optimizer once took for the same shape.
    "DotProductAttention": Case(_attention(4, 16, num_gqa_groups=2), lambda: heads(4, 2, 2)),
    "softcap": Case(_attention(4, 16, logit_softcap=5.0), lambda: heads(4, 4, 4)),
    "largest logits": Case(_attention(4, 16, return_max_logit=True), lambda: heads(4, 4, 4)),
    "packed": Case(
        _attention(4, 16, qkv_format="thd", attn_mask_type="padding_causal"), lambda: heads(4, 4, 4, lead=(12,)), sums
    ),
    **{
        f"LayerNormMLP {kind}": Case(_module("LayerNormMLP", H, F, activation=kind), rows)
        for kind in itertools.chain(ACTIVATIONS, GATED)
    },
}

#: Those with attention, and what it can do in FP8.
ATTENTION: dict[str, Case] = {
    **{n: PRODUCTS[n] for n in ("MultiheadAttention", "TransformerLayer", "TransformerLayer with GQA")},
    **{
        n: OTHERS[n]
        for n in ("decoder", "cross", "padding", "padding_causal", "arbitrary", "window", "no_mask", "off-by-one")
    },
    **{n: OTHERS[n] for n in ("alibi", "DotProductAttention", "softcap", "packed", "bottom right")},
    "interleaved groups": Case(
        _module("MultiheadAttention", H, HEADS, num_gqa_groups=2, fuse_qkv_params=True, qkv_format="bshd"), rows
    ),
    "left padding": Case(
        _attention(4, 16, attn_mask_type="padding_causal"),
        lambda: heads(4, 4, 4),
        lambda: {"attention_mask": padding(4, 6, left=True)},
    ),
    "two masks": Case(
        _module("MultiheadAttention", H, HEADS, attn_mask_type="padding"),
        lambda: (*rows(), (padding(6, 4), padding(6, 3))),
    ),
}


def alike_in_fp8(value: Any, reference: Any) -> None:
    """Equal, but for sums in another order and what comes of them: an FP8 value next to a tie on its other side.

    Such a value has moved by a step of E4M3, at most an eighth of it, and with it what its row leads to. So no element
    is further off than an eighth of the largest, and few rows are off at all.
    """
    a, b = (torch.as_tensor(t).double() for t in (value, reference))
    assert a.shape == b.shape
    if b.numel():
        error = (a - b).abs() / b.abs().max()
        off = (error > 4e-6).double().mean().item()
        assert error.max() <= 1 / 8 and off <= 1 / 4, f"{off:.0%} are off, by {error.max():.1e} at most"


def made(case: Case, recipe: Recipe | None, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """(module in eval mode, inputs, named inputs): of this dtype, parameters at random, run twice where scales grow."""
    torch.manual_seed(0)
    module = case.module(**({} if dtype == torch.float32 else {"params_dtype": dtype}), **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim > 1 else 1.0))
    args, named = case.inputs(), case.named()
    args = tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args)
    named = {k: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for k, t in named.items()}
    module.eval()
    if recipe is not None:
        for _ in range(2):
            with region(recipe):
                module(*args, **named)
    return module, args, named


@contextmanager
def exporting(recipe: Recipe | None, enabled: bool = True) -> Iterator[None]:
    with torch.no_grad(), region(recipe), te.onnx_export(enabled=True) if enabled else nullcontext():
        yield


def listed(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def eager(module: Any, recipe: Recipe | None, args: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor]:
    with exporting(recipe, enabled=False):
        return [t.detach() for t in listed(module(*args, **named))]
