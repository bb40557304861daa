"""What `inspect` shows of attention in FP8: its inputs and the gradient of its output, each with its cast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.backends import on_devices

HEADS, WIDTH, TOKENS = 2, 128, 64  # heads that cuDNN takes in FP8
SHAPE = (TOKENS, 2, HEADS, WIDTH)
DELAYED, CURRENT = DelayedScaling(fp8_dpa=True), Float8CurrentScaling(fp8_dpa=True)


def inputs(device: str) -> list[torch.Tensor]:
    """q, k and v of different sizes."""
    made = [torch.randn(SHAPE, device=device) * 4.0**i for i in range(3)]
    return [t.bfloat16().requires_grad_() for t in made]


def step(model: Any, x: list[torch.Tensor], recipe: Any, **options: Any) -> list[torch.Tensor]:
    with te.autocast(recipe=recipe):
        out = model(*x, **options)
    out.float().square().sum().backward()
    grads = [t.grad.clone() for t in x]  # type: ignore[union-attr]
    for t in x:
        t.grad = None
    return [out.detach(), *grads]


def of(seen: Any) -> dict[str, Any]:
    return {s.tensor: s for s in seen.report().series}


@on_devices
def test_inputs_and_gradient(device: str) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.0))
    x, other = inputs(device), copy.deepcopy(net)
    with te.debug.inspect(net) as seen:
        looked = step(net[0], x, DELAYED)
    alone = step(other[0], x, DELAYED)
    assert all(torch.equal(a, b) for a, b in zip(looked, alone, strict=True))
    found = of(seen)
    assert found.keys() == {"q", "k", "v", "do"}
    assert {s.layer for s in found.values()} == {"0"}
    for name, t in zip("qkv", x, strict=True):  # a first scale of 1: nothing but the format rounds
        held = t.detach().float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
        noise = (held - t.detach().float()).square().sum()
        snr = 10 * (t.detach().float().square().sum() / noise).log10().item()
        assert found[name].snr[0] == pytest.approx(snr, abs=1e-3)
        assert found[name].amax[0] == t.abs().max().item()
        assert found[name].gemms == ("fprop",)
    dy = (2 * looked[0].float()).bfloat16()
    assert found["do"].amax[0] == pytest.approx(dy.abs().max().item(), rel=1e-2)
    assert found["do"].kind.element == "float8_e5m2"


def test_packed(device: str = "cpu") -> None:
    layer = te.MultiheadAttention(WIDTH, HEADS, attention_dropout=0.0, params_dtype=torch.bfloat16, device=device)
    x = torch.randn(TOKENS, 2, WIDTH, device=device).bfloat16().requires_grad_()
    for recipe in (DELAYED, CURRENT):
        with te.debug.inspect(layer, layers="core_attention") as seen:
            step(layer, [x], recipe)
        assert {s.tensor for s in seen.report().series} == {"qkv", "do"}
    with te.debug.inspect(layer) as seen:
        step(layer, [x], DelayedScaling())  # attention in high precision is not seen, and not missed
    assert "core_attention" not in str(seen)


@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_scores_where_they_are_tensors(monkeypatch: pytest.MonkeyPatch, recipe: Any) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    net = torch.nn.Sequential(te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.0, attn_mask_type="no_mask"))
    with te.debug.inspect(net) as seen:
        step(net[0], inputs("cpu"), recipe)
    found = of(seen)
    assert found.keys() == {"q", "k", "v", "s", "do", "dp"}
    assert found["s"].count[0] == found["dp"].count[0] == 2 * HEADS * TOKENS * TOKENS
    assert 0 < found["s"].amax[0] <= 1


def test_what_is_run_again_is_seen_once() -> None:
    net = te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.0)
    x = inputs("cpu")
    counts = []
    for options in ({}, {"checkpoint_core_attention": True}):
        with te.debug.inspect(net) as seen:
            step(net, x, DELAYED, **options)
        counts.append({name: s.count[0] for name, s in of(seen).items()})
    with te.debug.inspect(net) as seen:
        step(lambda *x: te.checkpoint(net, *x, use_reentrant=False), x, DELAYED)
    counts.append({name: s.count[0] for name, s in of(seen).items()})
    assert counts[0] == counts[1] == counts[2]
    assert counts[0]["q"] == x[0].numel()


def test_that_a_compiled_one_is_refused() -> None:
    net = te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.0)
    traced, x = torch.compile(lambda *x: net(*x), backend="eager"), inputs("cpu")
    with te.debug.inspect(net), te.autocast(recipe=DELAYED), pytest.raises(Exception, match="compiled model"):
        traced(*x)
