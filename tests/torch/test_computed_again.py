"""What backward computes again is not kept: an MLP's inside (`checkpoint=True`), a norm's output
(`recompute_norm_output = True`), the quantized copy of an input (`save_original_input=True`). That no bit changes is
asked by test_ways.py; here stands what keeps it from doing so, and what else these options meet.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import te_torch as te
from te_core import dtypes
from te_core.ops import raw
from te_core.precision import Operand
from te_core.quantize.operands import repeats
from te_core.recipe import CustomRecipe, DelayedScaling
from te_torch.base.residual import Branch
from te_torch.custom_recipes.quantizer_factories import current_scaling_factory
from te_torch.tensors import DelayedScalingRequest, HybridQuantizer, MXFP8Quantizer
from tests.backends import on_devices
from tests.covering import covering
from tests.recipes import KINDS, OVERRIDES, RECIPES, region
from tests.world import WIDTH, differences, fp8_state, gradient_for, randomise, step, values
from tests.world import make as plain

some_recipes = pytest.mark.parametrize("recipe", [None, "delayed", "current"])
BF16 = torch.bfloat16

# ------------------------------------------------------------------------------------------ MLPs and norms


@on_devices
@some_recipes
def test_an_mlp_keeps_its_input_alone(recipe: str | None, device: str) -> None:
    """And a few scales; the graph may be kept for a second backward."""
    saved = {}
    for checkpoint in (True, False):
        module = plain("LayerNormMLP", device, BF16, checkpoint=checkpoint)
        x = values(512, WIDTH, device=device, dtype=BF16, seed=1).requires_grad_() * 1
        with region(recipe), te.measure_saved(module) as measured:
            y = module(x)
        saved[checkpoint] = measured.total
        loss = y.float().sum()
        loss.backward(retain_graph=True)
        once = module.fc1_weight.grad.clone()
        module.zero_grad()
        loss.backward()
        assert torch.equal(module.fc1_weight.grad, once) or recipe == "delayed"  # whose gradient scale has moved
    size = 512 * WIDTH * 2
    assert size <= saved[True] <= size + 64 and saved[True] < saved[False] / 3


@on_devices
@pytest.mark.parametrize("recipe", [*KINDS, *(pytest.param(name, marks=pytest.mark.full) for name in OVERRIDES)])
def test_an_mlp_beside_other_options(recipe: str, device: str) -> None:
    """With weights cached by microbatches, and with weight gradients fused or put off: the bits of one that keeps."""
    x = values(2, 32, 64, device=device, dtype=BF16, seed=1)
    for kw in ({}, {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}):
        kept, again = [te.LayerNormMLP(64, 128, params_dtype=BF16, checkpoint=c, device=device, **kw) for c in (0, 1)]
        again.load_state_dict(kept.state_dict())
        for weight in (*kept.parameters(), *again.parameters()):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        for first in (True, False):
            found = []
            for module in (kept, again):
                torch.manual_seed(9)
                leaf = x.clone().requires_grad_()
                with region(recipe):
                    y = module(leaf, is_first_microbatch=first)
                y.backward(gradient_for(y))
                module.backward_dw()
                gave = {"y": y.detach(), "dx": leaf.grad, **fp8_state(module)}
                for name, p in module.named_parameters():
                    gave |= {f"main {name}": p.main_grad.clone()} | ({} if p.grad is None else {name: p.grad})
                found.append(gave)
                module.zero_grad()
            assert not differences(*found), kw


def pair(kind: str, device: str) -> tuple[Any, Any]:
    """(the module that computes its norm again, its twin that keeps)."""
    twin = plain(kind, device, BF16)
    module = copy.deepcopy(twin)
    module.recompute_norm_output = True
    return module, twin


@on_devices
@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
@some_recipes
def test_a_norm_of_a_sum_that_it_formed(recipe: str | None, kind: str, device: str) -> None:
    """In microbatches, with dropped paths."""
    results = []
    numbers = torch.tensor([11, 12], dtype=torch.int64, device=device)
    for module in pair(kind, device):
        x, residual = (values(24, WIDTH, device=device, dtype=BF16, seed=s).requires_grad_() for s in (1, 2))
        with region(recipe):
            for first in (True, False):
                y, total = module(Branch(x, residual, None, 0.3, numbers), is_first_microbatch=first)
                (y.sum() + (total * gradient_for(total)).sum()).backward()
        grads = {name: p.grad for name, p in module.named_parameters()}
        results.append({"y": y.detach(), "dx": x.grad, "dr": residual.grad, **grads, **fp8_state(module)})
    assert not differences(*results)


@on_devices
@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
@some_recipes
def test_a_norms_output_is_not_kept(recipe: str | None, kind: str, device: str) -> None:
    """In FP8 it is a byte an element for wgrad, and one where fprop's copy lies in the same memory."""
    kept = []
    for module in pair(kind, device):
        x = values(64, WIDTH, device=device, dtype=BF16, seed=1).requires_grad_()
        with te.measure_saved(module) as saved, region(recipe):
            y = module(x)
        kept.append(te.memory_report(module, saved).totals["saved"])
        del y
    less, elements, small = kept[1] - kept[0], 64 * WIDTH, 64  # scales are small
    least = 2 if recipe is None else 1
    assert least * elements - small <= less <= 2 * elements + small


@on_devices
def test_norms_of_a_whole_layer_are_not_kept(device: str) -> None:
    """Its parts each have the attribute."""
    kept = []
    torch.manual_seed(0)
    layer = te.TransformerLayer(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device)
    parts = [module for module in layer.modules() if hasattr(module, "recompute_norm_output")]
    assert len(parts) == 2
    for again in (True, False):
        for part in parts:
            part.recompute_norm_output = again
        with te.measure_saved(layer) as saved:
            y = layer(values(32, 2, 64, device=device, seed=1).requires_grad_())
        kept.append(te.memory_report(layer, saved).totals["saved"])
        del y
    assert kept[1] - kept[0] == 2 * 32 * 2 * 64 * 4


# ----------------------------------------------------------------------------------------- original inputs

both = pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
#: All but delayed scaling, which refuses it.
SAFE = [name for name in (*RECIPES, *OVERRIDES) if not name.startswith("delayed")]
K, N, SPLITS = 128, 96, [37, 0, 5, 64]


def make(kind: str, device: str, **options: Any) -> Any:
    shape = (K, N) if kind == "Linear" else (len(SPLITS), K, N)
    module = getattr(te, kind)(*shape, params_dtype=BF16, device=device, **options)
    randomise(module)
    return module


def batch(device: str, seed: int = 0) -> torch.Tensor:
    return values(sum(SPLITS), K, device=device, dtype=BF16, seed=seed).requires_grad_()


def call(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(x, *splits(module))


def splits(module: Any) -> list[Any]:
    return [SPLITS] if isinstance(module, te.GroupedLinear) else []


def stepped(module: Any, x: torch.Tensor, entered: Any) -> dict[str, torch.Tensor]:
    """The same draws in each call."""
    torch.manual_seed(3)
    return step(module, x, entered, *splits(module))


def kept(module: Any, x: torch.Tensor, entered: Any) -> int:
    """Bytes that a forward keeps for backward, besides what is there anyway: its input and the parameters."""
    there = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    found: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), entered:
        call(module, x)
    return sum(n for address, n in found.items() if address not in there)


@on_devices
@covering(kind=["Linear", "GroupedLinear"], name=[None, *SAFE])
def test_the_same_bits_and_less_kept(kind: str, name: str | None, device: str) -> None:
    """Every gradient is the default's; what is kept is less by the input's quantized copy, where there was one."""
    module, own = make(kind, device), make(kind, device, save_original_input=True)
    x = batch(device)
    for seed in range(2):
        x = batch(device, seed)
        assert not differences(stepped(module, x, region(name)), stepped(own, x, region(name)))
    usual, less = kept(module, x, region(name)), kept(own, x, region(name))
    if name is None or "high_precision" in name or "dequantized" in name:
        assert less == usual
    else:
        assert usual - less >= x.numel() // 2  # 4 bits an element at least


@on_devices
@both
def test_frozen_parts_and_no_grad(kind: str, device: str) -> None:
    """Without a weight gradient nothing of x is kept; without gradients nothing at all."""
    own = make(kind, device, save_original_input=True)
    for p in own.parameters():
        p.requires_grad_(False)
    usual = make(kind, device).requires_grad_(False)
    x = batch(device)
    assert not differences(stepped(own, x, region("current")), stepped(usual, x, region("current")))
    assert kept(own, x, region("current")) == kept(usual, x, region("current"))
    with torch.no_grad():
        assert kept(own, x, region("current")) == 0


@on_devices
@both
def test_gradients_that_are_put_off_and_go_elsewhere(kind: str, device: str) -> None:
    x = batch(device)
    expected = stepped(make(kind, device), x, region("block"))
    options = {"save_original_input": True, "delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}
    own = copy.deepcopy(make(kind, device, **options))
    for p in own.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    stepped(own, x, region("block"))
    own.backward_dw()
    for name, p in own.named_parameters():
        assert p.ndim == 1 or torch.equal(p.main_grad.to(BF16), expected[name])


@on_devices
@both
def test_delayed_scaling_is_refused(kind: str, device: str) -> None:
    """Its scale may have moved on before backward: a ValueError; under a custom recipe a warning."""
    own, x = make(kind, device, save_original_input=True), batch(device)
    with pytest.raises(
        ValueError, match=r"DelayedScaling recipe is not supported with save_original_input.*Float8CurrentScaling"
    ):
        stepped(own, x, region("delayed"))
    plain_step = stepped(make(kind, device), x, region("current"))
    assert not differences(stepped(own, x, region("current")), plain_step)  # the module is whole
    recipe = CustomRecipe(lambda role: DelayedScalingRequest())
    with pytest.warns(UserWarning, match="save_original_input is ignored.*scale may have changed"):
        found = stepped(own, x, te.autocast(recipe=recipe))
    assert not differences(found, stepped(make(kind, device), x, te.autocast(recipe=recipe)))
    with te.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        call(own, x).sum().backward()


@on_devices
@both
@pytest.mark.parametrize("what", ["own class", "hybrid"])
def test_custom_recipes(kind: str, what: str, device: str) -> None:
    """Ignored, with a warning, where quantizing again would give other values; two formats are repeated."""

    class Rounded(te.Quantizer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(rowwise=True, columnwise=True)

        def quantize(self, tensor: torch.Tensor, **_: Any) -> torch.Tensor:
            return (tensor * 8).round() / 8

    def factory(role: Any) -> Any:
        if role.tensor_type == "input" and what == "hybrid":  # along columns in another format
            columns = MXFP8Quantizer(te.DType.kFloat8E4M3)
            return HybridQuantizer(rowwise_quantizer=current_scaling_factory(role), columnwise_quantizer=columns)
        if what == "hybrid":
            return (
                MXFP8Quantizer(te.DType.kFloat8E4M3)
                if role.tensor_type == "grad_output"
                else current_scaling_factory(role)
            )
        return Rounded() if role.tensor_type == "input" else te.IdentityQuantizer()

    recipe = CustomRecipe(factory)
    own, x = make(kind, device, save_original_input=True), batch(device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = stepped(own, x, te.autocast(recipe=recipe, emulate=True))
    assert any("save_original_input is ignored" in str(w.message) for w in said) == (what != "hybrid")
    assert not differences(found, stepped(make(kind, device), x, te.autocast(recipe=recipe, emulate=True)))


@on_devices
@both
def test_the_input_is_the_callers_own(kind: str, device: str) -> None:
    """What is saved is that very tensor: autograd notices that it was changed in place before backward."""
    own, x = make(kind, device, save_original_input=True), batch(device)
    with region("current"):
        y = call(own, x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@both
def test_each_copy_is_made_where_it_is_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """x along rows in forward, along columns in backward: neither of them twice."""
    made: list[tuple[bool, bool]] = []

    def noted(name: str) -> Any:
        run = getattr(raw, name)

        def call(rt: Any, x: Any, *rest: Any, **options: Any) -> Any:
            casts = rest[0] if name == "quantize" else rest[1][0]
            if x.shape[1] == K and x.shape[0] == sum(SPLITS):
                made.append((casts.rowwise, casts.columnwise))
            return run(rt, x, *rest, **options)

        return call

    for name in ("quantize", "quantize_rows"):
        monkeypatch.setattr(raw, name, noted(name))
    own, x = make(kind, "cpu", save_original_input=True), batch("cpu")
    stepped(own, x, region("current"))
    assert made == [(True, False), (False, True)]


def test_what_can_be_repeated() -> None:
    """Rounding at random and delayed scales cannot; of two rules that of the columns counts."""
    current, delayed = (Operand(dtypes.float8_e4m3, scaling) for scaling in ("current", "delayed"))
    assert repeats(None) and repeats(current) and not repeats(delayed)
    assert not repeats(replace(current, stochastic=True)) and not repeats(replace(current, scaling="custom"))
    assert repeats(replace(delayed, columnwise=current)) and not repeats(replace(current, columnwise=delayed))
