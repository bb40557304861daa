"""Modules, layers and scaling state against the golden files of the peer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from tests.backends import devices
from tests.golden import load, tree
from tests.tolerances import DB, snr_db

DEVICES = devices()

TRACES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "delayed_most_recent_margin2": DelayedScaling(amax_history_len=8, amax_compute_algo="most_recent", margin=2),
    "delayed_e4m3": DelayedScaling(amax_history_len=1, fp8_format=Format.E4M3),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TRACES)
def test_delayed_state_trace(name: str, device: str) -> None:
    """Scales and histories of 20 steps exactly; outputs and gradients by the dB table."""
    trace = tree("delayed_state_trace", f"{name}/")
    weight, bias = trace["weight"], trace["bias"]
    module = te.Linear(weight.shape[1], weight.shape[0], params_dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)
    for step in range(20):
        golden = {k.removeprefix(f"step{step:02d}/"): v for k, v in trace.items() if k.startswith(f"step{step:02d}/")}
        x = golden["x"].detach().clone().to(device).requires_grad_()
        with te.autocast(recipe=TRACES[name]):
            y = module(x)
        y.backward(golden["go"].to(device))
        state = module.fp8_state
        for direction in ("fwd", "bwd"):
            for ours, theirs in (("scale", "scale"), ("amax_history", "amax_history")):
                mine = getattr(state, f"{ours}_{direction}").cpu()
                gold = golden[f"scaling_{direction}.{theirs}"]
                used = (0, 1) if direction == "fwd" else (0,)  # the other slots are never cast
                assert torch.equal(mine[..., used], gold[..., used]), f"step {step}, {ours}_{direction}"
        results = {"y": y, "dx": x.grad, "dw": module.weight.grad, "db": module.bias.grad}
        for key, value in results.items():
            gold = golden[key]
            if gold.float().abs().max() == 0:
                assert value.float().abs().max() == 0
            else:
                assert snr_db(value, gold) >= DB["bf16"], f"step {step}, {key}: {snr_db(value, gold):.1f} dB"
        module.zero_grad(set_to_none=True)


RECIPES = {"high": None, "current": Float8CurrentScaling(), "block": Float8BlockScaling(), **TRACES}
#: Constructor arguments besides the sizes, as the parameters' names and shapes tell; the rest are defaults.
LAYERS: dict[str, dict[str, Any]] = {
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


def make(case: str, width: int, params: dict[str, torch.Tensor], device: str) -> torch.nn.Module:
    """The module of a golden case, as its constructor fills it."""
    kind, _, variant = case.partition("_")
    if kind == "Linear":
        module = te.Linear(width, params["weight"].shape[0], device=device)
    elif kind == "LayerNormLinear":
        module = te.LayerNormLinear(
            width,
            params["weight"].shape[0],
            device=device,
            normalization="LayerNorm" if "layer_norm_bias" in params else "RMSNorm",
        )
    elif kind == "LayerNormMLP":
        module = te.LayerNormMLP(
            width,
            params["fc2_weight"].shape[1],
            activation=variant,
            device=device,
            bias="fc1_bias" in params,
            normalization="LayerNorm" if "layer_norm_bias" in params else "RMSNorm",
        )
    elif kind == "LayerNorm":
        module = te.LayerNorm(width, zero_centered_gamma=variant == "zc", device=device)
    else:
        module = te.RMSNorm(width, device=device)
    return module


def make_layer(case: str, device: str) -> torch.nn.Module:
    """The same of an attention or a whole layer."""
    options = {"attention_dropout": 0.0, "layer_number": 1, "params_dtype": torch.bfloat16, "device": device}
    if case == "MultiheadAttention":
        return te.MultiheadAttention(64, 4, **options, **LAYERS[case])
    return te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, **options, **LAYERS[case])


CASES = [
    (file, *case) for file in ("modules", "layers") for case in sorted({tuple(k.split("/")[:2]) for k in load(file)})
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("file", "case", "recipe"), CASES)
def test_modules(file: str, case: str, recipe: str, device: str) -> None:
    """Output and all gradients of the third step of a module, of the second one of a layer."""
    golden, given = tree(file, f"{case}/{recipe}/"), tree(file, f"{case}/{'high' if file == 'layers' else recipe}/")
    params = {k.removeprefix("param/"): v for k, v in given.items() if k.startswith("param/")}
    x = given["x"].to(device)
    module = make_layer(case, device) if file == "layers" else make(case, x.shape[-1], params, device)
    assert {n: p.dtype for n, p in module.named_parameters()} == {n: p.dtype for n, p in params.items()}
    module.load_state_dict(params)
    rule = RECIPES[recipe]
    for _ in range(2 if file == "layers" else 3):
        module.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        with te.autocast(enabled=rule is not None, recipe=rule):
            y = module(leaf)
        y.backward((0.5 + 0.25 * x.flatten()[: y.shape[-1]]).expand_as(y))
    results = {"y": y, "dx": leaf.grad} | {f"grad/{n}": p.grad for n, p in module.named_parameters()}
    assert {k for k in golden if not k.startswith(("param/", "extra_state/"))} - {"x"} == set(results)
    # The peer's own fp32 GEMMs are TF32; its FP8 casts see values that differ in the last bits after a norm.
    floor = DB["fp8 gemm"] if recipe != "high" else DB["bf16" if file == "layers" else "tf32"]
    for key, value in results.items():
        if key.endswith("key_bias") and not case.endswith("qknorm"):
            # Adding one vector to all keys changes no weight: the gradient is zero but for rounding.
            beside = results[key.replace("key_bias", "query_bias")].float().norm()
            assert max(t.float().norm() for t in (value, golden[key])) <= 0.01 * beside, key
            continue
        got = snr_db(value, golden[key])
        assert got >= floor, f"{key}: {got:.1f} dB"
