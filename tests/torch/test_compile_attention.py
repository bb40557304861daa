"""DotProductAttention under torch.compile: no graph break, one program for modules that are alike, equal to eager."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests import recipes
from tests.backends import devices
from tests.module_steps import differences, fp8_state

BF16 = torch.bfloat16
on_devices = pytest.mark.parametrize("device", devices())
UNFUSED = {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0"}
FP8 = {"delayed": DelayedScaling(fp8_dpa=True, amax_history_len=3), "current": Float8CurrentScaling(fp8_dpa=True)}


def pairs(names: Iterable[str], leave_out: str) -> list[tuple[str, str]]:
    """Every name on every device, but for the one that CUDA has not."""
    return [(name, device) for device in devices() for name in names if device == "cpu" or name != leave_out]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def tensors(form: str, width: int, device: str, seed: int) -> list[torch.Tensor]:
    shape = {"bshd": (2, 32, 2, width), "sbhd": (32, 2, 2, width), "thd": (48, 2, width)}[form]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, BF16) for _ in range(3)]


def step(module: Any, given: list[torch.Tensor], recipe: Any, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)  # dropout draws alike
    leaves = [t.clone().requires_grad_() for t in given]
    with te.autocast(enabled=recipe is not None, recipe=recipe, emulate=True):
        y = module(*leaves, **options)
    y.backward(y.detach() + 0.5)
    found = {"y": y.detach()} | {name: t.grad for name, t in zip("qkv", leaves, strict=True)}
    found |= {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return found  # type: ignore[return-value]


def check(make: Any, form: str, width: int, recipe: Any, device: str, **options: Any) -> None:
    """Steps of three modules that are alike, each compiled by itself."""
    modules = [make().to(device) for _ in range(3)]
    eager = [copy.deepcopy(module) for module in modules]
    counter = CompileCounterWithBackend("aot_eager")
    for module in modules:
        module.compile(fullgraph=True, backend=counter)
    for i in range(3):
        for number, (module, other) in enumerate(zip(modules, eager, strict=True)):
            given = tensors(form, width, device, 9 * i + number)
            assert not differences(step(module, given, recipe, **options), step(other, given, recipe, **options))
            assert not differences(fp8_state(module), fp8_state(other))
    assert counter.frame_count == 1


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "no mask": {"attn_mask_type": "no_mask"},
    "window": {"window_size": (8, 0)},
    "dropout": {"attention_dropout": 0.3},
    "sink": {"softmax_type": "learnable"},
    "softcap": {"logit_softcap": 5.0},
    "sbhd": {"qkv_format": "sbhd"},
}


OFTEN = {("causal", "0"), ("dropout", "1"), ("sink", "0"), ("softcap", "1")}


# On CUDA a compiler's draw of dropout's seed is another one than eager code's, so there is nothing to compare.
@pytest.mark.parametrize(
    ("case", "device", "fused_softmax"),
    [
        pytest.param(case, device, fused, marks=[] if (case, fused) in OFTEN else [pytest.mark.full])
        for case, device in pairs(CASES, leave_out="dropout")
        for fused in ("0", "1")
    ],
)
def test_unfused(case: str, fused_softmax: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**UNFUSED, "NVTE_MASKED_SOFTMAX_FUSION": fused_softmax}.items():
        monkeypatch.setenv(name, value)
    options = {"qkv_format": "bshd", **CASES[case]}

    def make() -> Any:
        return te.DotProductAttention(2, 16, **options)

    check(make, options["qkv_format"], 16, None, device)


@on_devices
def test_unfused_packed_sequences(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in UNFUSED.items():
        monkeypatch.setenv(name, value)
    cu = torch.tensor([0, 16, 20, 48], dtype=torch.int32, device=device)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu.clone(), "max_seqlen_q": 28, "max_seqlen_kv": 28}

    def make() -> Any:
        return te.DotProductAttention(2, 16, qkv_format="thd", attn_mask_type="padding_causal")

    check(make, "thd", 16, None, device, **lengths)


@pytest.mark.parametrize(("recipe", "device"), pairs(FP8, leave_out="current"))  # GPUs: delayed scaling only
def test_fp8(recipe: str, device: str) -> None:
    check(lambda: te.DotProductAttention(2, 128, qkv_format="bshd"), "bshd", 128, FP8[recipe], device)


@on_devices
def test_fp8_with_the_region_inside(device: str) -> None:
    module = te.DotProductAttention(2, 128, qkv_format="bshd")
    eager = copy.deepcopy(module)
    rule = FP8["delayed"]

    def run(owner: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=rule, emulate=True):
            return owner(q, k, v)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for i in range(3):
        given = tensors("bshd", 128, device, i)
        assert torch.equal(compiled(module, *given), run(eager, *given))
        assert not differences(fp8_state(module), fp8_state(eager))


@pytest.mark.filterwarnings("ignore:DotProductAttention. attention_mask is not read")
def test_a_mask_that_is_not_read() -> None:
    module, mask = te.DotProductAttention(2, 16, qkv_format="bshd"), torch.zeros(2, 1, 1, 32, dtype=torch.bool)
    given = tensors("bshd", 16, "cpu", 0)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given, attention_mask=mask), module(*given))


def test_modules_that_differ() -> None:
    """Of modules that differ in one constant each computes its own."""
    modules = [te.DotProductAttention(2, 16, qkv_format="bshd", softmax_scale=scale) for scale in (0.25, 2.0)]
    given = tensors("bshd", 16, "cpu", 0)
    for module in modules:
        eager = copy.deepcopy(module)
        module.compile(fullgraph=True, backend="aot_eager")
        assert torch.equal(module(*given), eager(*given))


def cross_attention() -> torch.nn.Module:
    return te.MultiheadAttention(32, 2, attention_type="cross", attention_dropout=0.0, device="cpu")


def decoder() -> torch.nn.Module:
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu"}
    return te.TransformerLayer(32, 64, 2, layer_type="decoder", **options)


TWICE: dict[str, tuple[Any, Any]] = {
    "q, k and v": (lambda: te.DotProductAttention(2, 16), lambda module, x: module(*[x.unflatten(-1, (2, 16))] * 3)),
    "k and v": (
        lambda: te.DotProductAttention(2, 16),
        lambda module, x: module((2 * x).unflatten(-1, (2, 16)), *[x.unflatten(-1, (2, 16))] * 2),
    ),
    "hidden and encoder's states": (cross_attention, lambda module, x: module(x, encoder_output=x)),
    "a decoder's two inputs": (decoder, lambda module, x: module(x, encoder_output=x)),
    "the weights of groups": (lambda: shared(te.GroupedLinear(2, 32, 32, device="cpu")), lambda m, x: m(x, [4, 4])),
    "input and weight": (lambda: te.Linear(32, 32, device="cpu"), lambda module, x: module(module.weight)),
}


def shared(module: Any) -> torch.nn.Module:
    module.weight1, module.bias1 = module.weight0, module.bias0
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("recipe", [None, "current"])
def test_one_tensor_for_several_inputs(name: str, recipe: str | None) -> None:
    """Its gradient is the sum of theirs."""
    make, call = TWICE[name]
    module, found = make(), []
    x = torch.randn(8, 2, 32)[:, 0].contiguous() if "groups" in name else torch.randn(8, 2, 32)
    for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with recipes.region(recipe):
            y = run(module, leaf)
        y = y[0] if isinstance(y, tuple) else y
        y.square().sum().backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        found.append([y.detach(), *gradients, *([] if leaf.grad is None else [leaf.grad])])
    assert len(found[0]) > 1
    torch.testing.assert_close(*found)
