"""Weights held quantized (`quantized_model_init`), quantized outputs and gradients, and custom recipes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import UnsupportedError
from te_core.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, Recipe
from tests import recipes
from tests.backends import on_devices
from tests.tolerances import DB, snr_db

RECIPES = {name: recipes.RECIPES["nvfp4 nearest" if name == "nvfp4" else name] for name in recipes.KINDS}
all_recipes = pytest.mark.parametrize("name", RECIPES)
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP")
all_kinds = pytest.mark.parametrize("kind", KINDS)
K, N = 256, 192


def region(name: str) -> te.autocast:
    return te.autocast(recipe=RECIPES[name], emulate=True)


def build(kind: str, name: str | None, device: str, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    with te.quantized_model_init(name is not None, RECIPES[name] if name else None, **options):
        return getattr(te, kind)(K, N, params_dtype=torch.bfloat16, device=device)


def inputs(device: str, rows: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, K, generator=generator).to(device, torch.bfloat16).requires_grad_()


def gemm_weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p for n, p in module.named_parameters() if n.endswith("weight") and "norm" not in n]


# ------------------------------------------------------------------------------------------- what is held


@on_devices
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_one_byte_a_weight(name: str, device: str) -> None:
    """Measured in the buffers: one copy of a byte an element, and scales."""
    with te.quantized_model_init(recipe=RECIPES[name]):
        module = te.Linear(1024, 2048, bias=False, params_dtype=torch.bfloat16, device=device)
    held = te.memory_report(module).totals
    assert held["rowwise"] == 1024 * 2048 and held["columnwise"] == 0
    assert held["scales"] <= 1024 * 2048 * 4 // 128**2 * 4 + 64
    assert held["parameters"] == 0


@on_devices
@all_recipes
def test_high_precision_initial_value(name: str, device: str) -> None:
    plain = build("Linear", None, device)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            module = build("Linear", name, device, preserve_high_precision_init_val=True)
        weight = module.weight
        initial = weight.get_high_precision_init_val()
        assert initial.device.type == "cpu" and torch.equal(initial, plain.weight.detach().cpu())
        bound = DB["nvfp4 linear"] if name == "nvfp4" else DB["fp8 gemm"]
        assert snr_db(weight.dequantize(), initial) >= bound
        moved = module.to(device)
        assert torch.equal(moved.weight.get_high_precision_init_val(), initial)
        weight.clear_high_precision_init_val()
        assert weight.get_high_precision_init_val() is None
    assert not hasattr(build("Linear", name, device).weight, "get_high_precision_init_val")


def test_nested_and_disabled() -> None:
    with te.quantized_model_init(recipe=RECIPES["current"]):
        with te.quantized_model_init(enabled=False):
            assert not te.Linear(16, 16, device="cpu").primary_weights_in_fp8
        assert te.Linear(16, 16, device="cpu").primary_weights_in_fp8
    assert not te.Linear(16, 16, device="cpu").primary_weights_in_fp8
    with pytest.warns(DeprecationWarning), te.fp8_model_init(recipe=RECIPES["current"]):
        assert te.Linear(16, 16, device="cpu").primary_weights_in_fp8


# ----------------------------------------------------------------------------------------- what it computes


@on_devices
@all_kinds
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_the_same_as_quantizing_the_initial_value(name: str, kind: str, device: str) -> None:
    """Bit for bit what a module with the initial values in high precision computes."""
    quantized = build(kind, name, device)
    plain = build(kind, None, device)
    results = []
    for module in (quantized, plain):
        x = inputs(device)
        with region(name):
            y = module(x)
        torch.manual_seed(5)
        y.backward(torch.randn_like(y))
        results.append([y, x.grad, *[p.grad for p in module.parameters()]])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@on_devices
@all_kinds
@all_recipes
def test_an_optimizer_changes_it(name: str, kind: str, device: str) -> None:
    """A step requantizes in place: the next forward is that of the new values, and torch knows of the change."""
    module = build(kind, name, device)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    x = inputs(device)
    with region(name):
        y = module(x)
    y.float().square().mean().backward()
    before = [(w.dequantize().float(), w._version, w.grad.float()) for w in gemm_weights(module)]
    optimizer.step()
    for weight, (old, version, grad) in zip(gemm_weights(module), before, strict=True):
        assert isinstance(weight, te.QuantizedTensor) and weight._version > version
        bound = DB["nvfp4 linear"] if name == "nvfp4" else 20.0
        assert snr_db(weight.dequantize(), (old - grad).to(torch.bfloat16)) >= bound
    with region(name):
        z = module(x)
    assert not torch.equal(y, z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        with region(name):
            y = module(x)
        optimizer.step()
        y.sum().backward()


@on_devices
@all_recipes
def test_frozen_base_with_adapters(name: str, device: str) -> None:
    """LoRA: a frozen quantized base passes gradients to its input and gets none; adapters in bf16 learn."""
    base = build("Linear", name, device).requires_grad_(False)
    down = torch.nn.Linear(K, 8, bias=False, device=device, dtype=torch.bfloat16)
    up = torch.nn.Linear(8, N, bias=False, device=device, dtype=torch.bfloat16)
    x = inputs(device)
    with region(name):
        y = base(x) + up(down(x))
    y.float().square().sum().backward()
    assert base.weight.grad is None and base.bias.grad is None
    assert down.weight.grad is not None and up.weight.grad.abs().sum() > 0
    exact = (2 * y.detach().float()).to(torch.bfloat16).float()
    expected = exact @ base.weight.dequantize().float() + (exact @ up.weight.float()) @ down.weight.float()
    assert snr_db(x.grad, expected) >= (8 if name == "nvfp4" else 20)


@on_devices
def test_outside_of_a_region_it_is_dequantized_with_a_warning(device: str) -> None:
    module = build("Linear", "current", device)
    x = inputs(device)
    with pytest.warns(UserWarning, match="outside autocast"):
        y = module(x)
    expected = torch.nn.functional.linear(x, module.weight.dequantize(), module.bias)
    assert snr_db(y, expected) >= DB["bf16"]
    y.sum().backward()
    assert x.grad is not None and module.weight.grad is not None
    assert not te.precision_report(module).rows[0].facts.as_asked


@on_devices
@all_kinds
@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.filterwarnings("ignore:.*outside autocast")
def test_calibration_reads_what_is_held(name: str, kind: str, device: str) -> None:
    """It runs in high precision, as outside of a region, and a weight is noted as it is."""
    module = build(kind, name, device)
    x = inputs(device)
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPES[name]):
        y = module(x)
    y.sum().backward()
    assert torch.equal(module(x), y)
    if name == "delayed":
        both = build(kind, None, device), module  # what was cast, and what is held of it
        largest = [torch.stack([w.detach().abs().max().float() for w in gemm_weights(m)]) for m in both]
        noted = module.fp8_state.amax_history_fwd.amax(0)[1::3]
        assert torch.equal(noted.cpu(), torch.maximum(*largest).cpu())
    with region(name):
        module(x)


# ------------------------------------------------------------------------------------------------ checkpoints


@on_devices
@all_kinds
@all_recipes
def test_copies_and_plain_values(name: str, kind: str, device: str) -> None:
    module = build(kind, name, device)
    x = inputs(device)
    with region(name):
        module(x).sum().backward()
    with torch.no_grad(), region(name):
        assert torch.equal(copy.deepcopy(module)(x), module(x))
    plain = te.plain_state_dict(module)
    assert all(type(t) is torch.Tensor for t in plain.values())
    into = build(kind, None, device)
    into.load_state_dict({k: v for k, v in plain.items() if "fp8_state" not in k})
    for a, b in zip(gemm_weights(into), gemm_weights(module), strict=True):
        assert torch.equal(a, b.dequantize())


@on_devices
@pytest.mark.parametrize("stateful", [False, True])
@all_recipes
def test_plain_values_are_quantized_with_their_own_scale(name: str, stateful: bool, device: str) -> None:
    """A high-precision checkpoint of weights far larger than the initial ones loses nothing to their old scales."""
    trained = build("LayerNormMLP", None, device)
    with torch.no_grad():
        for weight in gemm_weights(trained):
            weight.mul_(30)
    state = trained.state_dict()
    module = build("LayerNormMLP", name, device)
    if stateful:
        with region(name):
            module(inputs(device))
    module.load_state_dict(state)
    for weight, plain in zip(gemm_weights(module), gemm_weights(trained), strict=True):
        assert snr_db(weight.dequantize(), plain) >= (DB["nvfp4 linear"] if name == "nvfp4" else DB["fp8 gemm"])


ATTENTION_LAYERS: dict[str, Any] = {
    "TransformerLayer": lambda **o: te.TransformerLayer(32, 64, 2, device="cpu", **o),
    "TransformerLayer, decoder": lambda **o: te.TransformerLayer(32, 64, 2, layer_type="decoder", device="cpu", **o),
    "MultiheadAttention": lambda **o: te.MultiheadAttention(32, 2, device="cpu", **o),
    "MultiheadAttention, with norm": lambda **o: te.MultiheadAttention(32, 2, input_layernorm=True, device="cpu", **o),
    "MultiheadAttention, cross": lambda **o: te.MultiheadAttention(32, 2, attention_type="cross", device="cpu", **o),
}


@pytest.mark.parametrize("kind", ATTENTION_LAYERS)
def test_query_key_and_value_in_one_piece(kind: str) -> None:
    """A layer whose weights are apart is refused by the option that its user knows, and taken with that option."""
    make = ATTENTION_LAYERS[kind]
    with pytest.raises(UnsupportedError, match="fuse_qkv_params"), te.quantized_model_init(recipe=RECIPES["current"]):
        make()
    with te.quantized_model_init(recipe=RECIPES["current"]):
        layer = make(fuse_qkv_params=True)
    linears = [m for m in layer.modules() if isinstance(m, (te.Linear, te.LayerNormLinear, te.LayerNormMLP))]
    assert len(linears) >= 2 and all(m.primary_weights_in_fp8 for m in linears)


# ------------------------------------------------------------------------------------- outputs and gradients


@on_devices
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
@all_recipes
def test_quantized_results(name: str, kind: str, device: str) -> None:
    """fp8_output and fp8_grad: the same results, quantized by the recipe's rule; outside of a region plain."""
    module = build(kind, None, device)
    results = []
    for quantized in (False, True):
        one = copy.deepcopy(module)
        x = inputs(device)
        for _ in range(3):  # delayed scaling: the scales of the results settle
            x.grad = None
            with region(name):
                y = one(x, fp8_output=quantized, fp8_grad=quantized)
            y.backward(torch.ones(y.shape, dtype=y.dtype, device=device))
        results.append((y, x.grad))
    for plain, other in zip(*results, strict=True):
        assert type(plain) is torch.Tensor and isinstance(other, te.QuantizedTensor) and other.shape == plain.shape
        assert snr_db(other.dequantize(), plain) >= (DB["nvfp4 linear"] if name == "nvfp4" else DB["fp8 gemm"])
    assert type(module(inputs(device), fp8_output=True)) is torch.Tensor


@on_devices
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_quantized_result_is_used_as_it_is(name: str, device: str) -> None:
    """A Linear takes over what another one quantized, forward and backward: no second rounding."""
    first = te.Linear(K, 96, params_dtype=torch.bfloat16, device=device)
    second = te.Linear(96, N, params_dtype=torch.bfloat16, device=device)
    x = inputs(device)
    for _ in range(3):
        with region(name):
            handed = first(x, fp8_output=True)
            y = second(handed)
        y.float().sum().backward()
    weight = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, None)(second.weight.detach()).dequantize()
    exact = torch.nn.functional.linear(handed.dequantize().double(), weight.double(), second.bias.double())
    assert snr_db(y, exact) >= (DB["fp8 gemm"] if name == "delayed" else DB["bf16"])
    rounded = torch.nn.functional.linear(first(x).double(), weight.double(), second.bias.double())
    assert snr_db(y, exact) > snr_db(y, rounded) + 3


READERS: dict[str, Any] = {
    "LayerNorm": lambda d: te.LayerNorm(96, dtype=torch.bfloat16, device=d),
    "RMSNorm": lambda d: te.RMSNorm(96, dtype=torch.bfloat16, device=d),
    "LayerNormLinear": lambda d: te.LayerNormLinear(96, 64, params_dtype=torch.bfloat16, device=d),
    "LayerNormMLP": lambda d: te.LayerNormMLP(96, 64, params_dtype=torch.bfloat16, device=d),
    "MultiheadAttention": lambda d: te.MultiheadAttention(96, 3, 32, 0.0, params_dtype=torch.bfloat16, device=d),
}


@on_devices
@pytest.mark.parametrize("name", ["delayed", "block"])
@pytest.mark.parametrize("reader", READERS)
def test_a_quantized_result_is_read_by_every_module(reader: str, name: str, device: str) -> None:
    """By its values where nothing better is to be had; its gradient goes back."""
    first, module = te.Linear(K, 96, params_dtype=torch.bfloat16, device=device), READERS[reader](device)
    x = inputs(device)
    with region(name):
        handed = first(x, fp8_output=True).view(32, 2, 96) if "head" in reader else first(x, fp8_output=True)
    assert isinstance(handed, te.QuantizedTensor)
    y = module(handed)
    assert type(y) is torch.Tensor and snr_db(y, module(handed.dequantize())) >= DB["bf16"]
    y.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and x.grad.any()


# -------------------------------------------------------------------------------------------- custom recipes


def current_like(role: te.QuantizerRole) -> te.Quantizer:
    kind = te.DType.kFloat8E5M2 if role.tensor_type == "grad_output" else te.DType.kFloat8E4M3
    return te.Float8CurrentScalingQuantizer(kind, None)


def high_precision_backward(role: te.QuantizerRole) -> te.Quantizer:
    return te.IdentityQuantizer() if role.tensor_type == "grad_output" else te.MXFP8Quantizer(te.DType.kFloat8E4M3)


def two_formats(role: te.QuantizerRole) -> te.Quantizer:
    if role.tensor_type == "grad_output":
        return te.NVFP4Quantizer()
    return te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(te.DType.kFloat8E4M3), columnwise_quantizer=te.NVFP4Quantizer()
    )


class Quarters(te.Quantizer):
    """A user's own format: multiples of 1/64."""

    def __init__(self) -> None:
        super().__init__(rowwise=True, columnwise=True)

    def quantize(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return (tensor * 64).round() / 64


def steps(module: torch.nn.Module, recipe: Recipe, device: str, count: int = 2) -> list[torch.Tensor]:
    for _ in range(count):
        module.zero_grad(set_to_none=True)
        x = inputs(device)
        with te.autocast(recipe=recipe, emulate=True):
            y = module(x)
        y.backward(torch.ones_like(y))
    return [y, x.grad, *[p.grad for p in module.parameters()]]


@on_devices
@pytest.mark.parametrize("held", [False, True])
@all_kinds
def test_a_factory_like_a_recipe_gives_the_recipe(kind: str, held: bool, device: str) -> None:
    """Delayed scaling, too, whose scales and history are the module's own; weights are held as a factory says."""
    for factory, recipe in (
        (current_like, Float8CurrentScaling()),
        (lambda role: te.DelayedScalingRequest(amax_history_len=4), DelayedScaling(amax_history_len=4)),
    ):
        found = []
        for rule in (CustomRecipe(qfactory=factory), recipe):
            torch.manual_seed(0)
            with te.quantized_model_init(enabled=held, recipe=rule):
                module = getattr(te, kind)(K, N, params_dtype=torch.bfloat16, device=device)
            assert all(isinstance(w, te.QuantizedTensor) is held for w in gemm_weights(module))
            found.append(steps(module, rule, device))
        for a, b in zip(*found, strict=True):
            # A factory knows no fast accumulation by itself: fprop of delayed scaling may round otherwise.
            assert torch.equal(a, b) or held and snr_db(a, b) >= DB["fp8 fast"]


@on_devices
@all_kinds
def test_formats_may_be_mixed(kind: str, device: str) -> None:
    plain = steps(build(kind, None, device), CustomRecipe(qfactory=lambda role: te.IdentityQuantizer()), device)
    module = build(kind, None, device)
    x = inputs(device)
    y = module(x)
    y.backward(torch.ones_like(y))
    for a, b in zip(plain, [y, x.grad, *[p.grad for p in module.parameters()]], strict=True):
        assert torch.equal(a, b)  # identity everywhere is no quantization at all
    for factory, bound in ((high_precision_backward, 20.0), (two_formats, 8.0)):
        module = build(kind, None, device)
        for a, b in zip(steps(module, CustomRecipe(qfactory=factory), device), plain, strict=True):
            assert snr_db(a, b) >= bound
    report = te.precision_report(module).as_dict()["gemms"]
    assert "float8_e4m3 1x32" in report[0]["a"] and "float4_e2m1 1x16" in report[1]["a"]


@on_devices
def test_a_users_own_format(device: str) -> None:
    module = te.Linear(K, N, params_dtype=torch.float32, device=device)
    with torch.no_grad():
        module.weight.mul_(20)
    x = inputs(device).detach().float()
    with te.autocast(recipe=CustomRecipe(qfactory=lambda role: Quarters())):
        y = module(x)
    rounded = [(t * 64).round() / 64 for t in (x, module.weight.detach())]
    exact = torch.nn.functional.linear(*[r.double() for r in rounded], module.bias.double())
    assert snr_db(y, exact) >= 60


def test_roles() -> None:
    asked = []

    def factory(role: te.QuantizerRole) -> te.Quantizer:
        asked.append(str(role))
        return te.IdentityQuantizer()

    module = te.LayerNormMLP(32, 64, name="mlp", device="cpu")
    with te.autocast(recipe=CustomRecipe(qfactory=factory)):
        module(torch.randn(4, 32))
        module(torch.randn(4, 32))
    parts = ("input", "weight", "grad_output")
    assert asked == [f"module_type=linear|tensor_type={t}|name=mlp.{g}" for g in ("fc1", "fc2") for t in parts], (
        "each role once"
    )
    linear = te.Linear(32, 32, name="head", device="cpu")
    linear.output_quantizer_role = te.QuantizerRole("", "", "boundary")
    del asked[:]
    with te.autocast(recipe=CustomRecipe(qfactory=factory)):
        linear(torch.randn(4, 32))
    assert asked[-1] == "name=boundary" and len(asked) == 4


def test_a_parametrization_runs_once_a_call() -> None:
    """Also in a call that is the first of its kind, which looks at what weights are held in."""

    class Halved(torch.nn.Module):
        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return x * 0.5

    recipe = Float8CurrentScaling()
    with te.quantized_model_init(recipe=recipe):
        module = te.Linear(32, 32, device="cpu")
    halved = Halved()
    torch.nn.utils.parametrize.register_parametrization(module, "weight", halved)
    for _ in range(3):
        before = halved.runs
        with te.autocast(recipe=recipe):
            module(torch.randn(16, 32)).sum().backward()
        assert halved.runs == before + 1
