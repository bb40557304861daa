"""MultiheadAttention and TransformerLayer against the golden files of the peer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.backends import devices
from tests.golden import load, tree
from tests.tolerances import DB, snr_db

RECIPES = {
    "high": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
CASES = sorted({tuple(k.split("/")[:2]) for k in load("layers")})

#: Constructor arguments besides the sizes, as the parameters' names and shapes tell; the rest are defaults.
VARIANTS: dict[str, dict[str, Any]] = {
    "MultiheadAttention": {"input_layernorm": True},
    "TransformerLayer_gpt": {},
    "TransformerLayer_llama": {
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "bias": False,
        "num_gqa_groups": 2,
        "fuse_qkv_params": True,
    },
    "TransformerLayer_qknorm": {"qk_norm_type": "RMSNorm"},
}


def build(case: str, device: str) -> torch.nn.Module:
    """The module that a golden case was written with."""
    module = make(case, device)
    params = tree("layers", f"{case}/high/param/")
    named = dict(module.named_parameters())
    assert set(named) == set(params)
    with torch.no_grad():
        for name, p in named.items():
            assert p.shape == params[name].shape and p.dtype == params[name].dtype, name
            p.copy_(params[name])
    return module


def make(case: str, device: str) -> torch.nn.Module:
    """The same as its constructor fills it."""
    options = {"attention_dropout": 0.0, "layer_number": 1, "params_dtype": torch.bfloat16, "device": device}
    if case == "MultiheadAttention":
        return te.MultiheadAttention(64, 4, **options, **VARIANTS[case])
    return te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, **options, **VARIANTS[case])


def second_step(case: str, recipe: str, device: str) -> dict[str, torch.Tensor]:
    """Output and all gradients of the second step."""
    x = load("layers")[f"{case}/high/x"].to(device)
    module = build(case, device)
    rule = RECIPES[recipe]
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        with te.autocast(enabled=rule is not None, recipe=rule):
            y = module(leaf)
        y.backward((0.5 + 0.25 * x.flatten()[: y.shape[-1]]).expand_as(y))
    return {"y": y, "dx": leaf.grad, **{f"grad/{n}": p.grad for n, p in module.named_parameters()}}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("case", "recipe"), CASES)
def test_layers(case, recipe, device):
    """Output and all gradients of the second step."""
    golden = tree("layers", f"{case}/{recipe}/")
    results = second_step(case, recipe, device)
    wanted = {k for k in golden if not k.startswith(("param/", "extra_state/"))} - {"x"}
    assert wanted == set(results)
    floor = DB["bf16"] if recipe == "high" else DB["fp8 gemm"]
    for key, value in results.items():
        if key.endswith("key_bias") and not case.endswith("qknorm"):
            # Adding one vector to all keys changes no weight: the gradient is zero but for rounding.
            beside = results[key.replace("key_bias", "query_bias")].float().norm()
            assert max(t.float().norm() for t in (value, golden[key])) <= 0.01 * beside, key
            continue
        got = snr_db(value, golden[key])
        assert got >= floor, f"{key}: {got:.1f} dB"
