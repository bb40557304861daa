"""FP8 attention between projections, and emulated, under torch.compile: one graph, equal to eager, FP8 state too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.backends import devices
from tests.module_steps import differences, fp8_state

BF16 = torch.bfloat16
RECIPES = {
    "dpa": DelayedScaling(fp8_dpa=True, amax_history_len=3),
    "mha": DelayedScaling(fp8_dpa=True, fp8_mha=True, amax_history_len=3),
    "current": Float8CurrentScaling(fp8_dpa=True, fp8_mha=True),
}
EMULATED = {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0", "NVTE_UnfusedDPA_Emulate_FP8": "1"}
HEADS, WIDTH = 2, 256  # GPUs train heads of 128


def pairs(native: bool = True) -> list[Any]:
    """Every recipe on every device, but that GPUs have native FP8 attention in delayed scaling only. One recipe that
    hands FP8 from part to part runs by default."""
    return [
        pytest.param(name, device, marks=[] if name == "mha" else [pytest.mark.full])
        for device in devices()
        for name in RECIPES
        if device == "cpu" or name != "current" or not native
    ]


def attention(device: str, **options: Any) -> te.MultiheadAttention:
    options = {"qkv_format": "sbhd", "attention_dropout": 0.0, **options}
    return te.MultiheadAttention(WIDTH, HEADS, layer_number=1, params_dtype=BF16, device=device, **options)


def dtype_of(device: str) -> torch.dtype:
    """In bf16 a layer's eager gradient along the stream is rounded once, a compiler's twice; a GPU's FP8 needs it."""
    return torch.float32 if device == "cpu" else BF16


def layer(device: str) -> te.TransformerLayer:
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype_of(device)}
    return te.TransformerLayer(WIDTH, 2 * WIDTH, HEADS, layer_number=1, device=device, **options)


def tokens(seed: int, device: str, rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, 2, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device, BF16)


def step(module: Any, x: torch.Tensor, recipe: Any, options: Any) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    with te.autocast(recipe=recipe, emulate=True):
        y = module(x, **options)
    y.backward(y.detach() * 0.01 + 0.005)
    found = {"y": y.detach(), "dx": x.grad} | {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found  # type: ignore[return-value]


def check(make: Any, recipe: Any, device: str, **options: Any) -> None:
    """Three steps of two modules that are alike, each compiled by itself: one program."""
    exact, dtype = device == "cpu" or make is not layer, dtype_of(device) if make is layer else BF16
    torch._dynamo.reset()
    eager = [make(device) for _ in range(2)]
    compiled = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    for module in compiled:
        module.compile(fullgraph=True, backend=counter)
    for i in range(3):
        for n, (one, other) in enumerate(zip(eager, compiled, strict=True)):
            x = (tokens(9 * i + n, device) * (i + 1)).to(dtype)
            got, expected = step(other, x, recipe, options), step(one, x, recipe, options)
            assert fp8_state(one)
            if exact:
                assert not differences(got, expected) and not differences(fp8_state(other), fp8_state(one))
            else:
                torch.testing.assert_close(got["y"], expected["y"], atol=0.2, rtol=0.1)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("recipe", "device"), pairs())
def test_transformer_layer(recipe: str, device: str) -> None:
    check(layer, RECIPES[recipe], device)


CASES: dict[str, dict[str, Any]] = {
    "norm": {"input_layernorm": True, "num_gqa_groups": 1},
    "interleaved": {"qkv_weight_interleaved": True, "fuse_qkv_params": True, "qkv_format": "bshd"},
    "no bias": {"bias": False, "return_bias": False, "qkv_format": "bshd"},
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.more if case == "interleaved" else pytest.mark.full) for case in CASES],
)
@pytest.mark.parametrize(("recipe", "device"), pairs())
def test_attention(recipe: str, device: str, case: str) -> None:
    check(lambda device: attention(device, **CASES[case]), RECIPES[recipe], device)


@pytest.mark.parametrize(("recipe", "device"), pairs())
def test_cross_attention(recipe: str, device: str) -> None:
    def make(device: str) -> te.MultiheadAttention:
        return attention(device, attention_type="cross", attn_mask_type="no_mask")

    check(make, RECIPES[recipe], device, encoder_output=tokens(77, device, 48))


@pytest.mark.more
@pytest.mark.parametrize(("recipe", "device"), pairs())
def test_attention_that_is_computed_again(recipe: str, device: str) -> None:
    check(attention, RECIPES[recipe], device, checkpoint_core_attention=True)


@pytest.mark.parametrize(("recipe", "device"), pairs(native=False))
def test_emulated(recipe: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EMULATED.items():
        monkeypatch.setenv(name, value)
    check(attention, RECIPES[recipe], device)


def test_attention_is_quantized_once_in_a_checkpoint() -> None:
    """A checkpoint in the graph runs the parts again, with the scales of then."""
    torch._dynamo.reset()
    eager = attention("cpu", return_bias=False)
    other = copy.deepcopy(eager)

    def again(module: Any, x: torch.Tensor) -> Any:
        return te.checkpoint(module, x)

    program = torch.compile(again, fullgraph=True, backend="aot_eager")
    for i in range(3):
        found = []
        for run, module in ((again, eager), (program, other)):
            x = tokens(i, "cpu").requires_grad_()
            with te.autocast(recipe=RECIPES["mha"], emulate=True):
                y = run(module, x)
            y.sum().backward()
            found.append({"y": y.detach(), "dx": x.grad} | {k: p.grad for k, p in module.named_parameters()})
            module.zero_grad()
        assert not differences(found[1], found[0]) and not differences(fp8_state(other), fp8_state(eager))


def test_who_watches_a_projection_sees_values() -> None:
    """With a hook nothing but plain tensors of the values' shape goes in and out."""
    torch._dynamo.reset()
    module, seen = attention("cpu"), []
    module.proj.register_forward_pre_hook(lambda m, args: seen.append(args[0].abs().amax()) or None)
    other = copy.deepcopy(module)
    other.compile(backend="eager")
    x = tokens(3, "cpu")
    with te.autocast(recipe=RECIPES["mha"], emulate=True):
        y, z = other(x), module(x)
    torch.testing.assert_close(y, z, atol=0.1, rtol=0.1)
    torch.testing.assert_close(seen[0], seen[1], atol=0.1, rtol=0.1)


def test_a_quantized_output_of_a_module_by_itself_is_refused() -> None:
    torch._dynamo.reset()
    module = te.Linear(32, 32, device="cpu")
    module.compile(backend="aot_eager")
    with te.autocast(recipe=RECIPES["mha"], emulate=True), pytest.raises(Exception, match="leave fp8_output out"):
        module(torch.randn(32, 32), fp8_output=True)
