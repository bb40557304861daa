"""save_original_input: backward quantizes the caller's own input again, to the same bits, and less is kept."""

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
from te_torch.custom_recipes.quantizer_factories import current_scaling_factory
from te_torch.tensors import DelayedScalingRequest, Float8CurrentScalingQuantizer, HybridQuantizer, MXFP8Quantizer
from tests.backends import devices
from tests.covering import covering
from tests.module_steps import randomise, values
from tests.recipes import OVERRIDES, RECIPES, region

on_devices = pytest.mark.parametrize("device", devices())
both = pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
#: All but delayed scaling, which refuses it.
SAFE = [name for name in (*RECIPES, *OVERRIDES) if not name.startswith("delayed")]
K, N, SPLITS = 128, 96, [37, 0, 5, 64]


def make(kind: str, device: str, **options: Any) -> Any:
    shape = (K, N) if kind == "Linear" else (len(SPLITS), K, N)
    module = getattr(te, kind)(*shape, params_dtype=torch.bfloat16, device=device, **options)
    randomise(module)
    return module


def batch(device: str, seed: int = 0) -> torch.Tensor:
    return values(sum(SPLITS), K, device=device, dtype=torch.bfloat16, seed=seed).requires_grad_()


def call(module: Any, x: torch.Tensor) -> torch.Tensor:
    splits = (SPLITS,) if isinstance(module, te.GroupedLinear) else ()
    return module(x, *splits)


def step(module: Any, x: torch.Tensor, entered: Any) -> list[torch.Tensor | None]:
    """y, dx and the parameters' gradients; the same draws in each call."""
    torch.manual_seed(3)
    x.grad = None
    module.zero_grad()
    with entered:
        y = call(module, x)
    y.backward(values(*y.shape, device=str(x.device), dtype=y.dtype, seed=9))
    return [y.detach(), x.grad, *[p.grad for p in module.parameters()]]


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


def same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return all(s is t is None or torch.equal(s, t) for s, t in zip(a, b, strict=True))  # type: ignore[arg-type]


@on_devices
@covering(kind=["Linear", "GroupedLinear"], name=[None, *SAFE])
def test_the_same_bits_and_less_kept(kind: str, name: str | None, device: str) -> None:
    """Every gradient is the default's; what is kept is less by the input's quantized copy, where there was one."""
    plain, own = make(kind, device), make(kind, device, save_original_input=True)
    x = batch(device)
    for seed in range(2):
        x = batch(device, seed)
        assert same(step(plain, x, region(name)), step(own, x, region(name)))
    usual, less = kept(plain, x, region(name)), kept(own, x, region(name))
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
    assert same(step(own, x, region("current"))[:2], step(usual, x, region("current"))[:2])
    assert kept(own, x, region("current")) == kept(usual, x, region("current"))
    with torch.no_grad():
        assert kept(own, x, region("current")) == 0


@on_devices
@both
def test_options_beside_it(kind: str, device: str) -> None:
    """Delayed weight gradients, gradients into main_grad, quantized parameters, a checkpoint, a copy of the module."""
    x = batch(device)
    expected = step(make(kind, device), x, region("block"))
    own = make(kind, device, save_original_input=True)
    assert same(step(copy.deepcopy(own), x, region("block")), expected)
    later = make(kind, device, save_original_input=True, delay_wgrad_compute=True)
    step(later, x, region("block"))
    later.backward_dw()
    assert same([p.grad for p in later.parameters()], expected[2:])
    fused = make(kind, device, save_original_input=True, fuse_wgrad_accumulation=True)
    weights = [p for p in fused.parameters() if p.ndim == 2]
    for p in weights:
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    step(fused, x, region("block"))
    reference = [g for g in expected[2:] if g is not None and g.ndim == 2]
    for p, g in zip(weights, reference, strict=True):
        assert torch.equal(p.main_grad.to(g.dtype), g)
    with region("block"):
        y = te.checkpoint(lambda x: call(own, x), x, use_reentrant=False)
    x.grad = None
    y.backward(values(*y.shape, device=device, dtype=y.dtype, seed=9))
    assert torch.equal(x.grad, expected[1])


@on_devices
def test_quantized_parameters_and_input(device: str) -> None:
    """An input that comes quantized is kept as it came; a weight that is held quantized changes nothing."""
    made = []
    for option in (False, True):
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=RECIPES["current"]):
            module = te.Linear(K, N, params_dtype=torch.bfloat16, device=device, save_original_input=option)
        made.append(module)
    x = batch(device)
    assert same(step(made[0], x, region("current")), step(made[1], x, region("current")))
    plain, own = make("Linear", device), make("Linear", device, save_original_input=True)
    quantizer = Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=torch.device(device))
    results = []
    for module in (plain, own):
        q = quantizer(batch(device).detach()[:32])
        with region("current"):
            y = module(q)
        y.sum().backward()
        results.append([y.detach(), module.weight.grad])
    assert same(*results)


@on_devices
@both
def test_delayed_scaling_is_refused(kind: str, device: str) -> None:
    """Its scale may have moved on before backward: a ValueError; under a custom recipe a warning."""
    own, x = make(kind, device, save_original_input=True), batch(device)
    with pytest.raises(
        ValueError, match=r"DelayedScaling recipe is not supported with save_original_input.*Float8CurrentScaling"
    ):
        step(own, x, region("delayed"))
    assert same(step(own, x, region("current")), step(make(kind, device), x, region("current")))  # the module is whole
    recipe = CustomRecipe(lambda role: DelayedScalingRequest())
    with pytest.warns(UserWarning, match="save_original_input is ignored.*scale may have changed"):
        found = step(own, x, te.autocast(recipe=recipe))
    assert same(found, step(make(kind, device), x, te.autocast(recipe=recipe)))
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
        found = step(own, x, te.autocast(recipe=recipe, emulate=True))
    assert any("save_original_input is ignored" in str(w.message) for w in said) == (what != "hybrid")
    assert same(found, step(make(kind, device), x, te.autocast(recipe=recipe, emulate=True)))


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

    for name in ("quantize", "quantize_grouped"):
        monkeypatch.setattr(raw, name, noted(name))
    own, x = make(kind, "cpu", save_original_input=True), batch("cpu")
    step(own, x, region("current"))
    assert made == [(True, False), (False, True)]


def test_compiled() -> None:
    """The compiled module gives the bits of eager code, and the refusal reaches the user."""
    own, x = make("Linear", "cpu", save_original_input=True), batch("cpu")
    with region("current"):
        expected = step(own, x, region("current"))
        compiled = torch.compile(own, fullgraph=True, backend="aot_eager")
        x.grad = None
        own.zero_grad()
        y = compiled(x)
        y.backward(values(*y.shape, dtype=y.dtype, seed=9))
    assert same([y.detach(), x.grad, *[p.grad for p in own.parameters()]], expected)


def test_what_an_inspector_sees() -> None:
    """Each point once, and what it is shown is what backward reads."""

    class Watch:
        request = frozenset([("wgrad", "activation"), ("fprop", "activation")])

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def inspect(self, rt: Any, point: Any, *_: Any, **__: Any) -> None:
            self.seen.append(point)

    own, x = make("Linear", "cpu", save_original_input=True), batch("cpu")
    expected = step(own, x, region("current"))
    own.inspector = Watch()
    assert same(step(own, x, region("current")), expected)
    assert sorted(own.inspector.seen) == sorted(set(own.inspector.seen)) and len(own.inspector.seen) == 2


def test_what_can_be_repeated() -> None:
    """Rounding at random and delayed scales cannot; of two rules that of the columns counts."""
    current, delayed = (Operand(dtypes.float8_e4m3, scaling) for scaling in ("current", "delayed"))
    assert repeats(None) and repeats(current) and not repeats(delayed)
    assert not repeats(replace(current, stochastic=True)) and not repeats(replace(current, scaling="custom"))
    assert repeats(replace(delayed, columnwise=current)) and not repeats(replace(current, columnwise=delayed))


def test_a_recipe_that_changes_between_steps() -> None:
    """Each call goes by its own region: one module, with and without what it can repeat."""
    own, plain, x = make("Linear", "cpu", save_original_input=True), make("Linear", "cpu"), batch("cpu")
    for name in ("current", None, "mxfp8", "block", "current high_precision"):
        assert same(step(own, x, region(name)), step(plain, x, region(name)))
