"""Features on attention in FP8: they look at its tensors, keep it in high precision, change what its emulation has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import UnsupportedError
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.backends import devices
from tests.core.covering_lists import covering_lists
from tests.debug.conftest import config

HEADS, WIDTH = 2, 64
DEPTH, TOKENS = 128, 64  # heads that cuDNN takes in FP8
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


# ------------------------------------------------------------------------------------- what features change

HIGH: dict[str, dict[str, Any]] = {
    "DisableFP8Layer": {},
    "DisableQuantizationLayer": {},
    "DisableFP8GEMM": {"gemms": ["fprop", "dgrad", "wgrad"]},
    "DisableQuantizationGEMM": {"gemms": ["fprop"]},  # a backward reads what its forward kept
}
OPTIONS: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "params_dtype": torch.bfloat16}


def results(net: Any, recipe: Any, device: str, steps: int = 2) -> list[torch.Tensor]:
    """Outputs and gradients."""
    shape = (TOKENS, 2, HEADS, DEPTH) if isinstance(net, te.DotProductAttention) else (TOKENS, 2, HEADS * DEPTH)
    torch.manual_seed(5)
    x = [torch.randn(shape).to(device, torch.bfloat16).requires_grad_() for _ in range(3 if len(shape) == 4 else 1)]
    found = [run(net, recipe, x) for _ in range(steps)]
    return [*found, *[t.grad for t in x], *[p.grad for p in net.parameters()]]  # type: ignore[list-item]


def attention() -> Any:
    return te.DotProductAttention(HEADS, DEPTH, attention_dropout=0.0, name="t.core_attention")


def emulate_if_needed(monkeypatch: pytest.MonkeyPatch, name: str, device: str) -> None:
    """A GPU's FusedAttention takes delayed scaling alone."""
    if device == "cuda" and name == "current":
        monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")


def differ(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[int]:
    return [i for i, pair in enumerate(zip(a, b, strict=True)) if not torch.equal(*pair)]


@pytest.mark.filterwarnings("ignore:DisableFP8", "ignore:fp8_mha")
@pytest.mark.parametrize("device", devices())
@covering_lists(
    pytest.mark.parametrize("feature", HIGH),
    pytest.mark.parametrize("name", RECIPES),
    pytest.mark.parametrize("mha", [False, True]),
)
def test_attention_in_high_precision(
    debugging: Any, monkeypatch: pytest.MonkeyPatch, feature: str, name: str, mha: bool, device: str
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    emulate_if_needed(monkeypatch, name, device)
    selected = {"layer_types": ["core_attention"]} if mha else {"layer_name_regex_pattern": r"core_att\w+$"}
    recipe = dataclasses.replace(RECIPES[name], fp8_mha=mha)
    without = dataclasses.replace(recipe, fp8_dpa=False, fp8_mha=False)

    def made(recipe: Any) -> list[list[torch.Tensor]]:
        torch.manual_seed(3)
        layer = te.TransformerLayer(HEADS * DEPTH, WIDTH, HEADS, name="t", device=device, **OPTIONS)
        return [results(net, recipe, device) for net in (attention(), layer)]

    low, want = made(recipe), made(without)
    debugging(config(selected, **{feature: HIGH[feature]}))
    for got, other, fp8 in zip(made(recipe), want, low, strict=True):
        assert differ(got, other) == []
        assert differ(got, fp8)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", RECIPES)
def test_its_backward_alone_in_high_precision(
    debugging: Any, monkeypatch: pytest.MonkeyPatch, name: str, device: str
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    emulate_if_needed(monkeypatch, name, device)
    net = attention()
    torch.manual_seed(5)
    x = [torch.randn(TOKENS, 2, HEADS, DEPTH).to(device, torch.bfloat16).requires_grad_() for _ in range(3)]

    def step(**options: Any) -> list[torch.Tensor]:
        net = attention()
        with te.autocast(recipe=RECIPES[name]):
            out = net(*x, **options)
        out.float().square().sum().backward()
        found = [out.detach(), *[t.grad for t in x]]
        for t in x:
            t.grad = None
        return found  # type: ignore[return-value]

    want, low = step(bf16_backward=True), step()
    debugging(config({"exact_layer_names": [net.name]}, DisableQuantizationGEMM={"gemms": ["dgrad"]}))
    found = step()
    assert differ(found, want) == [] and differ(found, low) == [1, 2, 3]


CHANGES = {
    "FakeQuant": {"gemms": ["fprop"], "tensors": ["q", "k", "v"], "quant_format": "FP8E5M2"},
    "PerTensorScaling": {"gemms": ["fprop"], "tensors": ["q"]},
}


@pytest.mark.parametrize("feature", CHANGES)
def test_changes_of_fused_attention_are_refused(debugging: Any, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    debugging(config(**{feature: CHANGES[feature]}))
    monkeypatch.delenv("NVTE_UnfusedDPA_Emulate_FP8", raising=False)
    with pytest.raises(UnsupportedError, match=r"another [kq].*modify_tensor.*looking at it.*NVTE_FUSED_ATTN=0"):
        results(attention(), RECIPES["delayed"], "cpu")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0", "NVTE_UnfusedDPA_Emulate_FP8": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("emulated")
def test_fake_quantization_in_the_emulation(debugging: Any) -> None:
    """q, k and v are rounded by the feature, and nothing else is."""
    torch.manual_seed(5)
    x = [torch.randn(TOKENS, 2, HEADS, DEPTH).bfloat16().requires_grad_() for _ in range(3)]
    gemms = {"gemms": ["fprop", "dgrad"], "tensors": ["q", "k", "v"], "quant_format": "FP8E5M2"}
    debugging(config(FakeQuant=gemms))
    found = run(attention(), RECIPES["current"], x)
    scales = [57344 / t.detach().abs().max().float() for t in x]
    rounded = [
        ((t.detach().float() * s).to(torch.float8_e5m2).float() / s).bfloat16() for t, s in zip(x, scales, strict=True)
    ]
    q, k, v = (t.float().permute(1, 2, 0, 3) for t in rounded)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(t.detach().float().permute(1, 2, 0, 3) for t in x), is_causal=True
    )
    want, plain = (t.permute(2, 0, 1, 3).reshape(found.shape) for t in (want, plain))
    assert (found.float() - want).norm() < 0.01 * want.norm() < 0.2 * (plain - want).norm()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("tensor", ["q", "k", "v", "s", "do", "dp"])
def test_a_tensor_changed_in_the_emulation(debugging: Any, tmp_path: Path, tensor: str) -> None:
    from tests.debug.test_gemms import written

    gemm = "dgrad" if tensor.startswith("d") else "fprop"
    before = results(attention(), RECIPES["current"], "cpu", 1)
    _, seen = written(debugging, tmp_path / "features", f"{gemm} {tensor}")
    after = results(attention(), RECIPES["current"], "cpu", 1)
    assert ("modify", gemm, tensor, "t.core_attention") in seen
    (shown,) = [call for call in seen if call[:2] == ("inspect", tensor)]
    factor = 2 if gemm == "fprop" else 3
    assert shown[3] == pytest.approx(factor * shown[2], rel=0.01)
    assert differ(before, after), "the change acts"
    assert torch.equal(before[0], after[0]) == (gemm == "dgrad")


def test_a_change_of_backward_is_refused_in_forward(debugging: Any, tmp_path: Path) -> None:
    from tests.debug.test_gemms import written

    written(debugging, tmp_path / "features", "dgrad do")
    x = [torch.randn(TOKENS, 2, HEADS, DEPTH).bfloat16().requires_grad_() for _ in range(3)]
    with te.autocast(recipe=RECIPES["current"]), pytest.raises(UnsupportedError, match="another do"):
        attention()(*x)
