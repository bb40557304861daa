"""`te_core.functional`'s whole layers against the modules of te_torch, bit for bit, with the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch
from te_core import functional as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.backends import requires_cuda

RECIPES = {"none": None, "delayed": DelayedScaling(amax_history_len=2), "current": Float8CurrentScaling()}
TOKENS, HIDDEN = 16, 32
DEVICES = ["cpu", pytest.param("cuda", marks=requires_cuda)]
#: What a module and a function are told, each in its words.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "llama": (
        {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "num_gqa_groups": 2, "rope": True},
        {"normalization": "RMSNorm", "activation": "swiglu", "num_gqa_groups": 2},
    ),
    "bshd": (
        {"attn_input_format": "bshd", "zero_centered_gamma": True, "layernorm_epsilon": 1e-3, "num_gqa_groups": 1},
        {"qkv_format": "bshd", "zero_centered_gamma": True, "eps": 1e-3, "num_gqa_groups": 1},
    ),
    "window": (
        {"self_attn_mask_type": "no_mask", "window_size": (3, 2), "rope": True, "rotary_pos_interleaved": True},
        {"attn_mask_type": "no_mask", "window_size": (3, 2), "rotary_pos_interleaved": True},
    ),
    "not interleaved": ({"qkv_weight_interleaved": False, "num_gqa_groups": 2},) * 2,
    "padding": ({"self_attn_mask_type": "padding", "lengths": (16, 9)}, {"attn_mask_type": "padding"}),
}
OF_LAYER = ("normalization", "activation", "zero_centered_gamma", "eps")
RENAMED = {"attn_input_format": "qkv_format", "self_attn_mask_type": "attn_mask_type"}


def named(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """By the last two parts of their names."""
    return {"_".join(name.split(".")[-2:]): p for name, p in module.named_parameters()}


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """With values that are no one's defaults."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return module


def case_of(name: str, alone: bool, device: str, dtype: torch.dtype) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """(module, x, forward's arguments, the function's options and arrays)."""
    torch.manual_seed(0)
    given, options = dict(CASES[name][0]), {**CASES[name][1], "num_attention_heads": 4}
    rope, lengths = given.pop("rope", False), given.pop("lengths", None)
    if alone:
        given = {RENAMED.get(k, k): v for k, v in given.items() if k not in ("activation", "zero_centered_gamma")}
        given.pop("normalization", None)
        options = {k: v for k, v in options.items() if k not in OF_LAYER}
    shared = {"fuse_qkv_params": True, "params_dtype": dtype, "device": device, "attention_dropout": 0.0, **given}
    if alone:
        module: Any = te_torch.MultiheadAttention(HIDDEN, 4, **shared)
    else:
        module = te_torch.TransformerLayer(HIDDEN, 64, 4, hidden_dropout=0.0, **shared)
    x = torch.randn(*((2, TOKENS) if "bshd" in given.values() else (TOKENS, 2)), HIDDEN, dtype=dtype, device=device)
    more: dict[str, Any] = {}
    if rope:
        more["rotary_pos_emb"] = options["rotary_pos_emb"] = te_torch.RotaryPositionEmbedding(8)(TOKENS).to(device)
    if lengths:
        cu = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device)
        more |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        options["cu_seqlens_q"] = cu
    return filled(module), x, more, options


def state_of(module: Any, function: Any, recipe: Any, x: torch.Tensor) -> te.Scaling | None:
    """A state with the values of those of the module's parts, in their order."""
    if recipe is None:
        return None
    scaling = te.Scaling(recipe, function, like=x)
    if scaling.arrays():
        parts = [m.fp8_state for m in module.modules() if getattr(m, "fp8_state", None) is not None]
        names = scaling.arrays()
        scaling.load({n: torch.cat([getattr(p, n) for p in parts], -1) for n in names})
    return scaling


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alone", [False, True], ids=["layer", "attention"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_module(name: str, recipe: str, alone: bool, device: str) -> None:
    made = RECIPES[recipe]
    dtype = torch.float32 if name == "bshd" and device == "cpu" else torch.bfloat16  # cuDNN takes no float32
    module, x, more, options = case_of(name, alone, device, dtype)
    function = te.multihead_attention if alone else te.transformer_layer
    for step in range(2):
        scaling = state_of(module, function, made, x) if step else None
        module.zero_grad()
        given = x.detach().clone().requires_grad_()
        with te_torch.autocast(enabled=made is not None, recipe=made):
            wanted = module(given, **more)
        dy = torch.randn_like(wanted)
        wanted.backward(dy)
    parameters = {n: p.detach() for n, p in named(module).items()}
    y, back = function(x, **parameters, **options, recipe=made, scaling=scaling)
    grads = back(dy)
    assert torch.equal(y, wanted)
    assert set(grads) == {"x", *parameters}
    assert torch.equal(grads["x"], given.grad)
    for n, p in named(module).items():
        assert torch.equal(grads[n], p.grad), n
    if scaling is not None and scaling.arrays():
        te.update(scaling)
        after = state_of(module, function, made, x)
        assert after is not None
        assert all(torch.equal(t, after.arrays()[n]) for n, t in scaling.arrays().items() if "scale" in n)
