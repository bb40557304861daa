"""Features on attention in FP8: they look at its tensors, and at nothing where it is in high precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.debug.conftest import config

pytest.importorskip("nvdlfw_inspect", reason="the extra `debug` brings nvdlfw_inspect")

HEADS, WIDTH = 2, 64
TENSORS = ["q", "k", "v", "kv", "qkv", "do"]
RECIPES = {"delayed": DelayedScaling(fp8_dpa=True), "current": Float8CurrentScaling(fp8_dpa=True)}


def run(net: Any, recipe: Any, x: list[torch.Tensor]) -> torch.Tensor:
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out: torch.Tensor = net(*x)
    out.float().square().sum().backward()
    return out.detach()


@pytest.mark.parametrize("name", RECIPES)
def test_statistics(debugging: Any, name: str) -> None:
    session = debugging(
        config(
            {"exact_layer_names": ["block.core_attention"]},
            LogTensorStats={"stats": ["max", "l1_norm"], "tensors": TENSORS, "freq": 2},
            LogFp8TensorStats={"stats": ["mse", "scale_inv_max"], "tensors": TENSORS, "freq": 2},
        )
    )
    net = te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.0, name="block.core_attention")
    x = [(torch.randn(16, 2, HEADS, WIDTH) * 4**i).bfloat16().requires_grad_() for i in range(3)]
    outs = [run(net, None, x)]
    session.step()
    assert session.lines("nvdlfw_inspect_statistics_logs") == []
    for _ in range(2):
        outs.append(run(net, RECIPES[name], x))
        session.step()
    found = session.statistics()
    assert {iteration for _, iteration in found} == {2}
    for tensor, t in zip("qkv", x, strict=True):
        where = f"block.core_attention_{tensor}_"
        assert found[where + "max", 2] == pytest.approx(t.max().item(), abs=1e-4)
        assert found[where + "l1_norm", 2] == pytest.approx(t.float().abs().sum().item(), rel=1e-5)
        if name == "current":
            scale = t.abs().max().item() / 448
            assert found[where + "scale_inv_max", 2] == pytest.approx(scale, rel=0.01, abs=1e-4)
            q = (t.detach().float() / scale).to(torch.float8_e4m3fn).float() * scale
            error = (q - t.detach().float()).square().mean().item()  # written with four digits
            assert found[where + "mse", 2] == pytest.approx(error, rel=0.05, abs=1e-4)
    assert found["block.core_attention_do_max", 2] > 0
    assert net.inspector is not None or net._door.due > 3  # type: ignore[union-attr]
    session.api.end_debug()
    assert net.inspector is None


def test_a_layer_looked_at_as_a_whole(debugging: Any) -> None:
    session = debugging(config(LogTensorStats={"stats": ["max"], "tensors": ["qkv", "activation"]}))
    layer = te.TransformerLayer(WIDTH, WIDTH, HEADS, name="t", params_dtype=torch.bfloat16, device="cpu")
    run(layer, RECIPES["delayed"], [torch.randn(16, 2, WIDTH).bfloat16()])
    session.step()
    assert {name for name, _ in session.statistics()} == {
        "t.self_attention.layernorm_linear_qkv_activation_max",
        "t.self_attention.core_attention_qkv_max",
        "t.self_attention.proj_activation_max",
        "t.layernorm_mlp.fc1_activation_max",
        "t.layernorm_mlp.fc2_activation_max",
    }
