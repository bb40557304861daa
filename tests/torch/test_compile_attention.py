"""Attention under torch.compile: no graph break, one program for modules that are alike, equal to eager, also in FP8
between projections, and emulated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests import recipes
from tests.backends import devices
from tests.world import differences, fp8_state, step

BF16 = torch.bfloat16
UNFUSED = {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0"}
EMULATED = {**UNFUSED, "NVTE_UnfusedDPA_Emulate_FP8": "1"}
FP8 = {
    "dpa": DelayedScaling(fp8_dpa=True, amax_history_len=3),
    "mha": DelayedScaling(fp8_dpa=True, fp8_mha=True, amax_history_len=3),
    "current": Float8CurrentScaling(fp8_dpa=True, fp8_mha=True),
}
HEADS, WIDTH = 2, 256  # GPUs train heads of 128


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def pairs(names: Iterable[str], leave_out: str, often: Iterable[str] | None = None) -> list[Any]:
    """Every name on every device, but for the one that CUDA has not; these by default, the others in full."""
    return [
        pytest.param(name, device, marks=[] if often is None or name in often else [pytest.mark.full])
        for device in devices()
        for name in names
        if device == "cpu" or name != leave_out
    ]


def check(
    make: Callable[[], Any],
    given: Callable[[int], list[torch.Tensor]],
    recipe: Any = None,
    exact: bool = True,
    **options: Any,
) -> None:
    """Three steps of two modules that are alike, each compiled by itself: one program."""
    eager = [make() for _ in range(2)]
    compiled = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    for module in compiled:
        module.compile(fullgraph=True, backend=counter)
    for i in range(3):
        for n, (one, other) in enumerate(zip(eager, compiled, strict=True)):
            inputs = [t * (i + 1) for t in given(9 * i + n)]
            region = partial(te.autocast, enabled=recipe is not None, recipe=recipe, emulate=True)
            found = []
            for module in (other, one):
                torch.manual_seed(7)  # dropout draws alike
                found.append(step(module, inputs, region(), **options))
            got, expected = found
            if exact:
                assert not differences(got, expected) and not differences(fp8_state(other), fp8_state(one))
            else:
                torch.testing.assert_close(got["y"], expected["y"], atol=0.2, rtol=0.1)
    assert counter.frame_count == 1


def heads(form: str, width: int, device: str, seed: int) -> list[torch.Tensor]:
    shape = {"bshd": (2, 32, 2, width), "sbhd": (32, 2, 2, width), "thd": (48, 2, width)}[form]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, BF16) for _ in range(3)]


# ----------------------------------------------------------------------------------------- attention by itself

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
    ("case", "fused_softmax", "device"),
    [
        pytest.param(case, fused, device, marks=[] if (case, fused) in OFTEN else [pytest.mark.full])
        for device in devices()
        for case in CASES
        for fused in ("0", "1")
        if device == "cpu" or case != "dropout"
    ],
)
def test_unfused(case: str, fused_softmax: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**UNFUSED, "NVTE_MASKED_SOFTMAX_FUSION": fused_softmax}.items():
        monkeypatch.setenv(name, value)
    options = {"qkv_format": "bshd", **CASES[case]}
    check(
        lambda: te.DotProductAttention(2, 16, **options).to(device), partial(heads, options["qkv_format"], 16, device)
    )


@pytest.mark.parametrize("device", devices())
def test_unfused_packed_sequences(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in UNFUSED.items():
        monkeypatch.setenv(name, value)
    cu = torch.tensor([0, 16, 20, 48], dtype=torch.int32, device=device)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu.clone(), "max_seqlen_q": 28, "max_seqlen_kv": 28}

    def make() -> Any:
        return te.DotProductAttention(2, 16, qkv_format="thd", attn_mask_type="padding_causal")

    check(make, partial(heads, "thd", 16, device), **lengths)


@pytest.mark.parametrize(("recipe", "device"), pairs(FP8, "current", often=("dpa", "current")))  # GPUs: delayed only
def test_fp8(recipe: str, device: str) -> None:
    check(lambda: te.DotProductAttention(2, 128, qkv_format="bshd"), partial(heads, "bshd", 128, device), FP8[recipe])


# -------------------------------------------------------------------------------- between projections, in FP8


def attention(device: str, **options: Any) -> te.MultiheadAttention:
    options = {"qkv_format": "sbhd", "attention_dropout": 0.0, **options}
    return te.MultiheadAttention(WIDTH, HEADS, layer_number=1, params_dtype=BF16, device=device, **options)


def tokens(seed: int, device: str, rows: int = 32, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(rows, 2, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize(("recipe", "device"), pairs(FP8, "current", often=("mha",)))
def test_transformer_layer(recipe: str, device: str) -> None:
    """In bf16 a layer's eager gradient along the stream is rounded once, a compiler's twice; a GPU's FP8 needs it."""
    dtype = torch.float32 if device == "cpu" else BF16
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype}

    def make() -> te.TransformerLayer:
        return te.TransformerLayer(WIDTH, 2 * WIDTH, HEADS, layer_number=1, device=device, **options)

    check(make, lambda seed: [tokens(seed, device, dtype=dtype)], FP8[recipe], exact=device == "cpu")


@pytest.mark.parametrize(("recipe", "device"), pairs(FP8, "current", often=("mha",)))
@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.more)])
def test_cross_attention(recipe: str, again: bool, device: str) -> None:
    def make() -> te.MultiheadAttention:
        return attention(device, attention_type="cross", attn_mask_type="no_mask")

    options = {"encoder_output": tokens(77, device, 48), "checkpoint_core_attention": again}
    check(make, lambda seed: [tokens(seed, device)], FP8[recipe], **options)


@pytest.mark.parametrize(("recipe", "device"), pairs(FP8, "", often=("mha",)))
def test_emulated(recipe: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in EMULATED.items():
        monkeypatch.setenv(name, value)
    check(lambda: attention(device), lambda seed: [tokens(seed, device)], FP8[recipe])


def test_attention_is_quantized_once_in_a_checkpoint() -> None:
    """A checkpoint in the graph runs the parts again, with the scales of then."""
    eager = attention("cpu", return_bias=False)
    other = copy.deepcopy(eager)

    def again(module: Any, x: torch.Tensor) -> Any:
        return te.checkpoint(module, x)

    program = torch.compile(again, fullgraph=True, backend="aot_eager")
    for i in range(3):
        found = []
        for run, module in ((again, eager), (program, other)):
            x = tokens(i, "cpu").requires_grad_()
            with te.autocast(recipe=FP8["mha"], emulate=True):
                y = run(module, x)
            y.sum().backward()
            found.append({"y": y.detach(), "dx": x.grad} | {k: p.grad for k, p in module.named_parameters()})
            module.zero_grad()
        assert not differences(found[1], found[0]) and not differences(fp8_state(other), fp8_state(eager))


def test_who_watches_a_projection_sees_values() -> None:
    """With a hook nothing but plain tensors of the values' shape goes in and out."""
    module, seen = attention("cpu"), []
    module.proj.register_forward_pre_hook(lambda m, args: seen.append(args[0].abs().amax()) or None)
    other = copy.deepcopy(module)
    other.compile(backend="eager")
    x = tokens(3, "cpu")
    with te.autocast(recipe=FP8["mha"], emulate=True):
        y, z = other(x), module(x)
    torch.testing.assert_close(y, z, atol=0.1, rtol=0.1)
    torch.testing.assert_close(seen[0], seen[1], atol=0.1, rtol=0.1)


def test_a_quantized_output_of_a_module_by_itself_is_refused() -> None:
    module = te.Linear(32, 32, device="cpu")
    module.compile(backend="aot_eager")
    with te.autocast(recipe=FP8["mha"], emulate=True), pytest.raises(Exception, match="leave fp8_output out"):
        module(torch.randn(32, 32), fp8_output=True)


# ---------------------------------------------------------------------------------------------- other inputs


@pytest.mark.filterwarnings("ignore:DotProductAttention. attention_mask is not read")
def test_a_mask_that_is_not_read() -> None:
    module, mask = te.DotProductAttention(2, 16, qkv_format="bshd"), torch.zeros(2, 1, 1, 32, dtype=torch.bool)
    given = heads("bshd", 16, "cpu", 0)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given, attention_mask=mask), module(*given))


def test_modules_that_differ() -> None:
    """Of modules that differ in one constant each computes its own."""
    modules = [te.DotProductAttention(2, 16, qkv_format="bshd", softmax_scale=scale) for scale in (0.25, 2.0)]
    given = heads("bshd", 16, "cpu", 0)
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
