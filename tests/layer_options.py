"""What `tests/layer_draws.py` draws: the options of a layer, of a recipe, of a call, and ways of calling.

A draw says everything in names and numbers; tensors are made of it when it runs. Most of what does not go together is
taken out again: a refusal says nothing about the rest.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from te_core.ops.activation import KINDS as ACTIVATIONS
from te_core.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_torch.custom_recipes import quantizer_factories as factories

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PADDED = ("padding", "padding_causal", "padding_causal_bottom_right", "causal,padding")
MASKS = ("causal", "no_mask", "causal_bottom_right", "arbitrary", *PADDED)
GAP = 3  # at most so many tokens behind a packed sequence belong to none

LAYER: dict[str, tuple[Any, ...]] = {
    "layernorm_epsilon": (1e-3,),
    "window_size": ((2, 0), (0, 0), (3, 3), (-1, -1), (5, -1)),
    "bottom_right_diagonal": (True, False),
    "apply_residual_connection_post_layernorm": (True,),
    "output_layernorm": (True,),
    "parallel_attention_mlp": (True,),
    "fuse_qkv_params": (True,),
    "qkv_weight_interleaved": (False,),
    "rotary_pos_interleaved": (True,),
    "zero_centered_gamma": (True,),
    "bias": (False,),
    "activation": ACTIVATIONS,
    "normalization": ("RMSNorm",),
    "layer_number": (1, 3),
    "qk_norm_type": ("L2Normalization", "RMSNorm", "LayerNorm"),
    "qk_norm_before_rope": (True,),
    "softmax_type": ("off-by-one", "learnable"),
    "qk_norm_eps": (1e-3,),
    "kv_channels": (8, 12, 32),
}
RATES = {"hidden_dropout": (0.2, 1.0), "attention_dropout": (0.2, 1.0), "drop_path_rate": (0.3, 1.0)}
CROSS = {"enc_dec_window_size": ((2, 1),), "enc_dec_bottom_right_diagonal": (True, False)}
#: Of MultiheadAttention alone, and of linears one behind the other (`tests.layer_draws.Linears`).
ATTENTION = {"return_bias": (True,), "return_layernorm_output": (True,), "input_layernorm": (True,)}
LINEARS = {
    "return_bias": (True,),
    "return_layernorm_output": (True,),
    "parameters_split": (("a", "b"),),
    "fp8_output": (True,),
    "checkpoint": (True,),
    "delay_wgrad_compute": (True,),
}

FP8 = {"fp8_dpa": (True,), "fp8_mha": (True,)}
OVERRIDE = {"backward_override": ("high_precision", "dequantized")}
FACTORIES = (
    "delayed_scaling_factory",
    "current_scaling_factory",
    "float8_block_scaling_factory",
    "mxfp8_factory",
    "nvfp4_factory",
    "high_precision_factory",
)
RECIPES: dict[str, tuple[type[Recipe], dict[str, tuple[Any, ...]]]] = {
    "delayed": (DelayedScaling, {
        "fp8_format": (Format.E4M3,), "amax_history_len": (1, 3), "amax_compute_algo": ("most_recent",),
        "margin": (1,), "reduce_amax": (False,), **FP8}),
    "current": (Float8CurrentScaling, {
        "fp8_format": (Format.E4M3,), "use_power_2_scales": (True,), **OVERRIDE, **FP8}),
    "block": (Float8BlockScaling, {
        "fp8_format": (Format.HYBRID,), "use_f32_scales": (True,), "w_block_scaling_dim": (1,),
        "grad_block_scaling_dim": (2,), "x_block_scaling_dim": (2,), **OVERRIDE}),
    "mxfp8": (MXFP8BlockScaling, {
        "fp8_format": (Format.HYBRID,), "enable_2d_quantization": (True,), "fp8_dpa": (True,), **OVERRIDE}),
    "nvfp4": (NVFP4BlockScaling, {
        "disable_rht": (True,), "disable_stochastic_rounding": (True,), "disable_2d_quantization": (True,),
        "row_scaled_activation": (True,), "nvfp4_4over6": ("weights", "all"), **OVERRIDE}),
    "custom": (CustomRecipe, {"fp8_dpa": (True,), **OVERRIDE}),
}  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """One layer in one recipe, called in one way."""

    seed: int
    device: str
    kind: str  # TransformerLayer, MultiheadAttention or Linears
    layer: dict[str, Any]  # of its constructor; those of TransformerLayer, which also say what the others are made of
    recipe: str  # "" for none
    recipe_options: dict[str, Any]
    sizes: tuple[int, int, int]  # longest sequence, batch, length of encoder_output
    call: dict[str, Any]  # what else is passed
    way: dict[str, Any]

    def __str__(self) -> str:
        recipe = {"recipe": self.recipe, **self.recipe_options} if self.recipe else "no recipe"
        return f"seed {self.seed}: {self.kind} {self.layer} {recipe} {self.sizes} {self.call} {self.way}"

    @property
    def form(self) -> str:
        """Where tokens lie."""
        return str(self.layer["attn_input_format"])

    @property
    def cross(self) -> bool:
        """Whether there is an encoder's output to look at."""
        return self.layer.get("layer_type") == "decoder"

    @property
    def dtype(self) -> torch.dtype:
        """What the result is in."""
        return DTYPES[self.way.get("amp") or self.layer["params_dtype"]]

    @property
    def drops_otherwise(self) -> bool:
        """Whether the same layer in float32 drops other elements.

        Stochastic rounding draws from the same generator; on a GPU each backend of attention draws in its own way.
        """
        drops = any(self.layer.get(name) for name in RATES) and not self.way.get("eval")
        own = self.device != "cpu" and 0 < self.layer["attention_dropout"] < 1
        return bool(drops and (self.recipe in ("nvfp4", "custom") or own))

    @property
    def low(self) -> tuple[bool, bool]:
        """Whether the operands of linears, and of attention, have to be in FP8 or FP4."""
        linears = self.recipe not in ("", "custom") and not self.way.get("calibrating")
        return linears, linears and any(self.recipe_options.get(name) for name in FP8)

    def make_recipe(self) -> Recipe | None:
        """The recipe, made anew."""
        options = dict(self.recipe_options)
        if "qfactory" in options:
            options["qfactory"] = getattr(factories, options["qfactory"])
        return RECIPES[self.recipe][0](**options) if self.recipe else None


class Chance(random.Random):
    """Draws of options."""

    def of(self, *values: Any) -> Any:
        """One of these."""
        return values[int(self.random() * len(values))]

    def some(self, p: float) -> bool:
        """True with probability p."""
        return self.random() < p

    def options(self, p: float, table: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Of each of the options one of its values, with probability p."""
        return {name: self.of(*values) for name, values in table.items() if self.some(p)}


def draw(seed: int, device: str = "cpu") -> Draw:
    """The draw of this seed."""
    r = Chance(seed)
    kind = r.of(*["TransformerLayer"] * 7, "MultiheadAttention", "MultiheadAttention", "Linears")
    layer = _layer(r, device)
    recipe = r.of("", "delayed", "delayed", "delayed", "current", "current", "block", "mxfp8", "nvfp4", "custom")
    sizes = (r.of(1, 2, 5, 8, 13, 16), r.of(1, 2, 3), r.of(1, 4, 9))
    call, way = _call(r, layer), _way(r, recipe, layer)
    if kind == "MultiheadAttention":
        call["attention"] = r.options(0.4, ATTENTION)
    elif kind == "Linears":
        call["linears"] = r.options(0.3, LINEARS)
        call.pop("needs_more", None)
        if layer["fuse_wgrad_accumulation"] or "quantized" in way or "delay_wgrad_compute" in call["linears"]:
            call["linears"].pop("parameters_split", None)
    elif r.some(0.06):
        _cache(r, layer, call, way)
    return Draw(seed, device, kind, layer, recipe, _recipe_options(r, recipe), sizes, call, way)


def _layer(r: Chance, device: str) -> dict[str, Any]:
    form = r.of("sbhd", "sbhd", "bshd", "bshd", "thd")
    heads = r.of(2, 4, 1, 3)
    layer: dict[str, Any] = {
        "hidden_size": r.of(32, 64, 48, 40, 33),
        "ffn_hidden_size": r.of(64, 32, 50, 35),
        "num_attention_heads": heads,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attn_input_format": form,
        "kv_channels": 16,
        "params_dtype": r.of("fp32", "bf16", "bf16", "fp16"),
        "fuse_wgrad_accumulation": False,
    } | r.options(0.15, LAYER)
    if device != "cpu":  # the width that FP8 training takes on Hopper
        layer["kv_channels"] = r.of(layer["kv_channels"], 128)
    if r.some(0.4):
        layer["num_gqa_groups"] = r.of(*[n for n in range(1, heads + 1) if heads % n == 0])
    if r.some(0.3):
        layer |= r.options(0.4, RATES)
    likely = PADDED if form == "thd" or r.some(0.3) else MASKS[:4]
    layer["self_attn_mask_type"] = r.of(*likely) if r.some(0.97) else r.of(*MASKS)
    if r.some(0.2):
        layer |= {"layer_type": "decoder", **r.options(0.2, CROSS)}
        layer["enc_dec_attn_mask_type"] = r.of(*PADDED[:2]) if form == "thd" else r.of("no_mask", *MASKS)
    if r.some(0.95):
        _reconcile(layer)
    return layer


def _reconcile(layer: dict[str, Any]) -> None:
    """Take out what does not go together."""
    if layer.get("window_size") == (5, -1) and "causal" not in layer["self_attn_mask_type"]:
        layer["window_size"] = (5, 1)
    if layer.get("parallel_attention_mlp"):
        for name in ("apply_residual_connection_post_layernorm", "output_layernorm"):
            layer.pop(name, None)
        if layer.get("layer_type") == "decoder":
            del layer["parallel_attention_mlp"]
    if not layer.get("qkv_weight_interleaved", True):
        layer["fuse_qkv_params"] = True


def _recipe_options(r: Chance, recipe: str) -> dict[str, Any]:
    options = r.options(0.3, RECIPES[recipe][1]) if recipe else {}
    if recipe == "custom":
        options["qfactory"] = r.of(*FACTORIES)
    if r.some(0.1):
        return options
    if recipe == "block" and {"x_block_scaling_dim", "grad_block_scaling_dim"} & set(options):
        options |= {"x_block_scaling_dim": 2, "w_block_scaling_dim": 1, "grad_block_scaling_dim": 1}
    if recipe == "nvfp4" and {"row_scaled_activation", "nvfp4_4over6"} & set(options):
        options["disable_rht"] = True
    return options


def _call(r: Chance, layer: dict[str, Any]) -> dict[str, Any]:
    call: dict[str, Any] = {"lengths": r.of("mask", "left mask", "mask of holes", "cu_seqlens")}
    if layer["attn_input_format"] == "thd":
        call = {"lengths": r.of("cu_seqlens", "cu_seqlens", "gaps")}
        call |= r.options(0.5, {"max_seqlen": (True,)})
        if call["lengths"] != "gaps":
            call |= r.options(0.2, {"pad_between_seqs": (True, False)})
    call |= r.options(0.5, {"needs_more": (True,)})
    if r.some(0.35):
        call["rotary"] = r.of("whole", "half", "longer", "pair")
    if r.some(0.2) and layer.get("layer_type") != "decoder":  # one bias would have to fit both attentions
        call["bias"] = r.of(
            "post 11ss", "post 1hss", "post b1ss", "pre 1hss", "post 111s", "alibi", "alibi h", "alibi bh"
        )
    return call | r.options(
        0.1, {"checkpoint_core_attention": (True,), "window_size": ((1, 0), (2, 2)), "unread_mask": (True,)}
    )


def _way(r: Chance, recipe: str, layer: dict[str, Any]) -> dict[str, Any]:
    way: dict[str, Any] = {}
    if r.some(0.25):
        way["eval"] = True
    if r.some(0.2):
        way["grad"] = r.of("no_grad", "inference_mode")
    elif r.some(0.15):
        way["checkpoint"] = r.of("reentrant", "not reentrant")
    if r.some(0.15):
        way |= {"amp": r.of("bf16", "fp16"), "input": r.of(*DTYPES)}
    if r.some(0.2):
        way["frozen"] = r.of("norms", "matrices", "biases", "input", "half", "all")
    if recipe:
        way |= r.options(0.12, {"microbatches": (True,), "calibrating": (True,), "inner": (True,)})
    way |= r.options(0.15, {"unfused": (True,)})
    whole = r.some(0.9)
    if recipe and r.some(0.12):
        way["quantized"] = True
        layer["fuse_qkv_params"] = layer.get("fuse_qkv_params", whole)
    if r.some(0.07) and "checkpoint" not in way:
        way["main_grad"] = layer["fuse_wgrad_accumulation"] = True
        layer["fuse_qkv_params"] = layer.get("fuse_qkv_params", whole)
    return way


def _cache(r: Chance, layer: dict[str, Any], call: dict[str, Any], way: dict[str, Any]) -> None:
    """Make it a step of generation: all tokens but the last, then the last, through a KV cache."""
    for name in ("layer_type", "parallel_attention_mlp", "window_size", *CROSS, "enc_dec_attn_mask_type"):
        layer.pop(name, None)
    layer |= {"layer_number": 1, "self_attn_mask_type": "padding_causal", "attn_input_format": r.of("sbhd", "bshd")}
    rotary = call.get("rotary")
    call.clear()
    call |= {"lengths": "cu_seqlens"} | ({"rotary": rotary} if rotary else {})
    for name in ("checkpoint", "frozen", "microbatches", "main_grad", "calibrating"):
        way.pop(name, None)
    layer["fuse_wgrad_accumulation"] = False
    way |= {"eval": True, "grad": r.of("no_grad", "inference_mode"), "cache": r.of("rows", "pages")}
