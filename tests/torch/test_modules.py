"""Every module in every dtype and recipe against float64: outputs and the gradients of all that is differentiable."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from tests.backends import on_devices
from tests.covering import covering
from tests.reference import modules as reference
from tests.tolerances import DB, snr_db
from tests.world import (
    GEMM_MODULES,
    MODULES,
    RECIPES,
    WIDTH,
    differences,
    fp8_state,
    gradient_for,
    make,
    on,
    region,
    step,
    values,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
recipes = pytest.mark.parametrize("recipe", RECIPES)
all_in_recipes = covering(kind=MODULES, recipe=RECIPES)
gemms_in_recipes = covering(kind=GEMM_MODULES, recipe=RECIPES)
all_modules = pytest.mark.parametrize("kind", MODULES)
gemm_modules = pytest.mark.parametrize("kind", GEMM_MODULES)


def fp8_floor(kind: str) -> float:
    return DB["fp8 mlp" if kind == "LayerNormMLP" else "fp8 linear"]


def check(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], floor: float, exact: float, kind: str) -> None:
    """All of a step by the dB table; `exact` holds for what no quantized operand enters."""
    assert set(got) == set(wanted) - {"norm"}, set(got) ^ set(wanted)
    for name, value in got.items():
        # The last bias sees dy only.
        plain = name == "fc2_bias" or (name == "bias" and kind != "LayerNorm")
        limit = exact if plain else floor
        assert snr_db(value, wanted[name]) >= limit, f"{name}: {snr_db(value, wanted[name]):.1f} dB < {limit}"


@on_devices
@recipes
@pytest.mark.parametrize("dtype", DTYPES)
@all_modules
def test_against_float64(kind: str, dtype: str, recipe: str, device: str) -> None:
    module = make(kind, device, DTYPES[dtype])
    x = values(3, 16, WIDTH, device=device, dtype=DTYPES[dtype], seed=1)
    for _ in range(3):  # delayed scaling finds its scales
        got = step(module, x, recipe)
    on(device, *got.values())
    assert {t.dtype for t in got.values()} == {DTYPES[dtype]}
    wanted = reference.results(module, x, gradient_for(got["y"]))
    fp8 = recipe != "plain" and kind in GEMM_MODULES
    check(got, wanted, fp8_floor(kind) if fp8 else DB[dtype], DB[dtype], kind)
    if fp8:  # and it is FP8, not something better
        matrices = [n for n in got if n.endswith("weight") and got[n].ndim == 2]
        assert all(snr_db(got[n], wanted[n]) < DB["bf16"] for n in ("y", "dx", *matrices))


SMALL = {"limit": 1.0, "alpha": 0.7, "glu_linear_offset": -0.25}
ACTIVATIONS = ("gelu", "qgelu", "relu", "srelu", "squared_relu", "silu", "clamped_swiglu", *sorted(reference.GATED))
#: What constructors may be asked for besides sizes.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{kind} {norm} {centred}": (kind, {"normalization": norm, "zero_centered_gamma": centred, "eps": 0.5})
        for kind in GEMM_MODULES[1:]
        for norm in ("LayerNorm", "RMSNorm")
        for centred in (False, True)
    },
    **{f"{kind} without bias": (kind, {"bias": False}) for kind in GEMM_MODULES},
    **{name: ("LayerNormMLP", {"activation": name}) for name in ACTIVATIONS},
    **{
        f"clamped {i}": ("LayerNormMLP", {"activation": "clamped_swiglu", "activation_params": params})
        for i, params in enumerate(({}, {"limit": 0.5}, SMALL))
    },
}


@on_devices
@covering(option=OPTIONS, recipe=RECIPES)
def test_options_against_float64(option: str, recipe: str, device: str) -> None:
    kind, options = OPTIONS[option]
    if options.get("activation_params"):  # where rounding carries a value over a limit, a whole term flips
        recipe = "plain"
    module = make(kind, device, **options)
    names = {name for name, _ in module.named_parameters()}
    assert ("layer_norm_bias" in names) == (kind != "Linear" and options.get("normalization") != "RMSNorm")
    for name in {"bias", "fc1_bias", "fc2_bias"} & {*dir(module)} - names:
        held = getattr(module, name)
        assert held.numel() == 0 and not isinstance(held, torch.nn.Parameter) and name not in module.state_dict()
    x = values(48, WIDTH, device=device, seed=1)
    for _ in range(3):
        got = step(module, x, recipe)
    wanted = reference.results(module, x, gradient_for(got["y"]))
    check(got, wanted, DB["fp32"] if recipe == "plain" else fp8_floor(kind), DB["fp32"], kind)


@on_devices
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norm_over_several_dimensions(kind: str, zero_centered: bool, device: str) -> None:
    module = getattr(te, kind)((4, 6), eps=0.25, zero_centered_gamma=zero_centered, device=device)
    with torch.no_grad():
        [p.add_(0.3 * values(4, 6, device=device, seed=5)) for p in module.parameters()]
    x = values(2, 5, 4, 6, device=device, seed=1)
    got = step(module, x, "plain")
    flat = copy.deepcopy(module)
    for name, p in module.named_parameters():
        flat._parameters[name] = torch.nn.Parameter(p.detach().reshape(24))
    wanted = reference.results(flat, x.reshape(10, 24), gradient_for(got["y"]).reshape(10, 24))
    for name, value in got.items():
        assert snr_db(value, wanted[name].reshape(value.shape)) >= DB["fp32"], name


@on_devices
@covering(turns=2, kind=["LayerNormLinear", "LayerNormMLP"], used=["both", "norm only", "out only"], recipe=RECIPES)
def test_returned_norm_output(kind: str, used: str, recipe: str, device: str) -> None:
    """The second output is the norm's, in the input's dtype, and a gradient that comes through it is added."""
    module = make(kind, device, torch.bfloat16, return_layernorm_output=True)
    x = values(2, 24, WIDTH, device=device, dtype=torch.bfloat16, seed=1)
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        with region(recipe):
            y, n = module(leaf)
        grads = [gradient_for(y), gradient_for(n, seed=8)]
        if used != "both":
            grads[used == "out only"] = None
        pairs = [(t, g) for t, g in zip((y, n), grads, strict=True) if g is not None]
        torch.autograd.backward(*zip(*pairs, strict=True))
    on(device, y, n)
    wanted = reference.results(module, x, *grads)
    assert n.dtype == torch.bfloat16 and snr_db(n, wanted["norm"]) >= DB["bf16"]
    floor = DB["bf16"] if recipe == "plain" else DB["fp8 linear"]
    assert snr_db(y, wanted["y"]) >= floor
    for name, got in [("dx", leaf.grad), *((n, p.grad) for n, p in module.named_parameters())]:
        if wanted[name] is None:
            assert got is None or not got.any(), name
        else:
            assert snr_db(got, wanted[name]) >= floor, f"{name}: {snr_db(got, wanted[name]):.1f} dB"


@on_devices
@gemms_in_recipes
def test_return_bias(kind: str, recipe: str, device: str) -> None:
    """(out without the bias, bias): added by the caller they are the plain module, gradients too."""
    plain = make(kind, device, torch.bfloat16)
    parted = make(kind, device, torch.bfloat16, return_bias=True)
    x = values(32, WIDTH, device=device, dtype=torch.bfloat16, seed=1)
    with region(recipe):
        out, bias = parted(x)
    name = "fc2_bias" if kind == "LayerNormMLP" else "bias"
    assert torch.equal(bias, getattr(parted, name)) and bias.requires_grad
    assert snr_db(out + bias, step(plain, x, recipe)["y"]) >= DB["bf16"]
    (out + bias).backward(gradient_for(out))
    expected = gradient_for(out).double().sum(0)
    assert snr_db(getattr(parted, name).grad, expected) >= DB["bf16"]
    empty = make(kind, device, torch.bfloat16, return_bias=True, bias=False)
    with region(recipe):
        out, bias = empty(x)
    assert bias.numel() == 0 and bias.dtype == out.dtype


# ----------------------------------------------------------------------------------------- shapes and layouts


SHAPES = {str(shape): shape for shape in [(), (1,), (0,), (0, 5), (2, 3, 4), (1, 1, 7, 1)]}


@on_devices
@covering(turns=2, named=SHAPES, kind=MODULES, recipe=RECIPES)
def test_leading_dimensions(named: str, kind: str, recipe: str, device: str) -> None:
    """Any leading dimensions give what the flattened rows give, a single vector and no rows at all included."""
    module, shape = make(kind, device, torch.bfloat16), SHAPES[named]
    rows = torch.Size(shape).numel()
    x = values(rows, WIDTH, device=device, dtype=torch.bfloat16, seed=1)
    flat, shaped = copy.deepcopy(module), copy.deepcopy(module)
    dy = values(rows, module(x).shape[-1], device=device, dtype=torch.bfloat16, seed=2)
    for _ in range(2):
        wanted = step(flat, x, recipe, dy=dy)
        got = step(shaped, x.reshape(*shape, WIDTH), recipe, dy=dy.reshape(*shape, dy.shape[-1]))
    assert got["y"].shape == (*shape, dy.shape[-1]) and got["dx"].shape == (*shape, WIDTH)
    got["y"], got["dx"] = got["y"].reshape(dy.shape), got["dx"].reshape(x.shape)
    assert not differences(got, wanted)
    if rows == 0:
        assert all(not t.any() for t in got.values())
    assert not differences(fp8_state(shaped), fp8_state(flat))


@on_devices
@all_in_recipes
def test_non_contiguous_input_and_gradient(kind: str, recipe: str, device: str) -> None:
    module = make(kind, device, torch.bfloat16)
    other = copy.deepcopy(module)
    x = values(WIDTH, 2, 16, device=device, dtype=torch.bfloat16, seed=1).permute(2, 1, 0)
    dy = values(module(x).shape[-1], 16, 2, device=device, dtype=torch.bfloat16, seed=2).permute(1, 2, 0)
    assert not x.is_contiguous() and not dy.is_contiguous()
    for _ in range(2):
        got = step(module, x, recipe, dy=dy)
        wanted = step(other, x.contiguous(), recipe, dy=dy.contiguous())
    assert not differences(got, wanted)
    spread = torch.ones((), device=device, dtype=torch.bfloat16)  # all strides zero: what sum().backward() sends
    got = step(module, x, recipe, dy=spread.expand(got["y"].shape))
    wanted = step(other, x, recipe, dy=spread.expand(got["y"].shape).contiguous())
    assert not differences(got, wanted)


@on_devices
@all_modules
def test_outputs_may_be_changed_in_place(kind: str, device: str) -> None:
    """`x = norm(x); x += y` is everyday code."""
    module = make(kind, device)
    for shape in ((8, WIDTH), (2, 4, WIDTH)):
        x = values(*shape, device=device, seed=1)
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.mul_(2)
        y.backward(gradient_for(y))
        assert torch.equal(leaf.grad, step(module, x, "plain", dy=2 * gradient_for(y))["dx"]), shape


@on_devices
@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
def test_returned_norm_may_be_changed_in_place(kind: str, device: str) -> None:
    """With FP8 operands backward reads no plain norm output, so changing it is everyday code there."""
    module = make(kind, device, return_layernorm_output=True)
    with region("current"):
        y, n = module(values(2, 8, WIDTH, device=device).requires_grad_())
    before = n.detach().clone()
    n.add_(1)
    (y.sum() + n.sum()).backward()
    assert torch.equal(n, before + 1)


@on_devices
@all_modules
def test_wrong_inputs(kind: str, device: str) -> None:
    module = make(kind, device)
    for x in (values(4, WIDTH + 1), values(4, WIDTH).double(), torch.zeros(4, WIDTH, dtype=torch.int64), values(1)[0]):
        with pytest.raises(ArgumentError) as error:
            module(x.to(device))
        assert all((error.value.operation, error.value.got, error.value.allowed, error.value.do))


@on_devices
@all_modules
def test_tensors_of_another_device(kind: str, device: str) -> None:
    """Their addresses would be read on the device of the first input."""
    module = make(kind, device)
    x = values(4, WIDTH, device=device)
    for elsewhere in ("meta", "cpu") if device == "cuda" else ("meta",):
        for name, parameter in list(module.named_parameters()):
            other = copy.deepcopy(module)
            setattr(other, name, torch.nn.Parameter(torch.empty_like(parameter, device=elsewhere)))
            with pytest.raises(ArgumentError, match=f"a tensor on {elsewhere} beside one on {device}"):
                other(x)


@on_devices
@gemm_modules
def test_parameters_of_another_dtype(kind: str, device: str) -> None:
    module = make(kind, device, torch.float32)
    for recipe in RECIPES:
        with region(recipe), pytest.raises(TypeError, match="Data types for parameters must match"):
            module(values(4, WIDTH, device=device, dtype=torch.bfloat16))


# --------------------------------------------------------------------------------- what is asked, what is kept


def step_under_autocast(module: Any, x: torch.Tensor, recipe: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype), region(recipe):
        y = module(leaf)
    y.backward(gradient_for(y))
    found = {"y": y.detach(), "dx": leaf.grad} | {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return found


@on_devices
@all_in_recipes
def test_torch_autocast(kind: str, recipe: str, device: str) -> None:
    """fp32 parameters and input, bf16 computation, fp32 gradients; the region applies as well."""
    module = make(kind, device)
    x = values(32, WIDTH, device=device, seed=1)
    for _ in range(3):
        got = step_under_autocast(module, x, recipe, torch.bfloat16)
    assert got["y"].dtype == torch.bfloat16
    assert {t.dtype for n, t in got.items() if n != "y"} == {torch.float32}
    wanted = reference.results(module, x, gradient_for(got["y"]))
    fp8 = recipe != "plain" and kind in GEMM_MODULES
    check(got, wanted, DB["fp8 linear"] if fp8 else DB["bf16"], DB["bf16"], kind)
    assert snr_db(got["y"], wanted["y"]) < 70, "computed in bf16, not in fp32"


@on_devices
@covering(turns=2, kind=["Linear", "LayerNormLinear"], split=[False, True], recipe=RECIPES)
def test_torch_autocast_over_the_other_half(kind: str, split: bool, recipe: str, device: str) -> None:
    """float16 parameters under bfloat16: parts of a weight are joined out of reach of torch's rule for mixed dtypes."""
    parts = ("query", "key", "value") if split else None
    module = getattr(te, kind)(WIDTH, 96, parameters_split=parts, params_dtype=torch.float16, device=device)
    x = values(32, WIDTH, device=device, seed=1)
    got = step_under_autocast(module, x, recipe, torch.bfloat16)
    assert got["y"].dtype == torch.bfloat16 and got["dx"].dtype == torch.float32
    assert {t.dtype for n, t in got.items() if n not in ("y", "dx")} == {torch.float16}
    wanted = step(copy.deepcopy(module).float(), x, "plain", dy=gradient_for(got["y"]).float())
    floor = DB["bf16"] if recipe == "plain" else DB["fp8 linear"]
    for name, value in got.items():
        assert snr_db(value, wanted[name]) >= floor, name


def kept(module: Any, x: torch.Tensor, recipe: str) -> list[torch.Tensor]:
    """Every tensor that one forward leaves for backward."""
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t), region(recipe):
        module(x)
    return packed


FREEZE = {
    "input only": lambda name: True,
    "matrices only": lambda name: "weight" not in name or "norm" in name,
    "biases only": lambda name: "bias" not in name or "norm" in name,
    "last matrix only": lambda name: name not in ("fc2_weight", "weight"),
    "norm only": lambda name: "norm" not in name,
}


@on_devices
@covering(turns=3, kind=GEMM_MODULES, frozen=FREEZE, recipe=RECIPES)
def test_frozen_parts(kind: str, frozen: str, recipe: str, device: str) -> None:
    """What still needs gradients gets those it had; nothing that only the others read is kept for backward."""
    if kind == "Linear" and frozen == "norm only":
        pytest.skip("no norm in Linear")
    module = make(kind, device, torch.bfloat16)
    part = copy.deepcopy(module)
    for name, p in part.named_parameters():
        p.requires_grad_(not FREEZE[frozen](name))
    x = values(24, WIDTH, device=device, dtype=torch.bfloat16, seed=1)
    dy = values(24, module(x).shape[-1], device=device, dtype=torch.bfloat16, seed=2)
    for _ in range(2):
        wanted = step(module, x, recipe, dy=dy)
        leaf = x.clone().requires_grad_(frozen == "input only")
        part.zero_grad()
        with region(recipe):
            y = part(leaf)
        y.backward(dy)
    assert torch.equal(y, wanted["y"])
    got = {"dx": leaf.grad} | {n: p.grad for n, p in part.named_parameters()}
    for name, grad in got.items():
        needed = name == "dx" if frozen == "input only" else name != "dx" and not FREEZE[frozen](name)
        assert (grad is not None) == needed, name
        assert grad is None or torch.equal(grad, wanted[name]), name
    assert not differences(
        fp8_state(part), fp8_state(part) | {n: t for n, t in fp8_state(module).items() if "fwd" in n}
    )
    assert activations_kept(kept(part, leaf, recipe)) == NEEDED[kind, frozen]


#: Activations that backward reads: "x" as wide as the input, "h" as wide as the MLP's inside.
NEEDED = {
    ("Linear", "input only"): set(),
    ("Linear", "matrices only"): {"x"},
    ("Linear", "last matrix only"): {"x"},
    ("Linear", "biases only"): set(),
    ("LayerNormLinear", "input only"): {"x"},
    ("LayerNormLinear", "matrices only"): {"x"},
    ("LayerNormLinear", "last matrix only"): {"x"},
    ("LayerNormLinear", "biases only"): set(),
    ("LayerNormLinear", "norm only"): {"x"},
    ("LayerNormMLP", "input only"): {"x", "h"},
    ("LayerNormMLP", "matrices only"): {"x", "h"},
    ("LayerNormMLP", "last matrix only"): {"h"},
    ("LayerNormMLP", "biases only"): {"h"},
    ("LayerNormMLP", "norm only"): {"x", "h"},
}


def activations_kept(tensors: list[torch.Tensor]) -> set[str]:
    """By their elements: 24 rows in bf16, or 32 padded ones in FP8, once or in both orientations, and a scale."""
    found = set()
    for name, width in (("x", WIDTH), ("h", 80)):
        sizes = {torch.bfloat16: (24 * width,), torch.uint8: (32 * width + 16, 64 * width + 16)}
        if any(t.numel() in sizes.get(t.dtype, ()) for t in tensors):
            found.add(name)
    return found


@on_devices
@all_in_recipes
def test_inference_keeps_nothing(kind: str, recipe: str, device: str) -> None:
    module = make(kind, device, torch.bfloat16)
    x = values(40, WIDTH, device=device, dtype=torch.bfloat16, seed=1).requires_grad_()
    wanted = step(copy.deepcopy(module), x, recipe)["y"]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not kept(copy.deepcopy(module), x, recipe)
            with region(recipe):
                y = copy.deepcopy(module)(x)
        assert torch.equal(y, wanted) and not y.requires_grad
    frozen = copy.deepcopy(module).requires_grad_(False)
    assert not kept(frozen, x.detach(), recipe)
    with region(recipe):
        assert not frozen(x.detach()).requires_grad


@on_devices
@gemms_in_recipes
def test_training_after_inference_mode(kind: str, recipe: str, device: str) -> None:
    """State that was made in inference mode trains, is saved and is loaded like any other."""
    module = make(kind, device)
    x = values(16, WIDTH, device=device, seed=1)
    trained = copy.deepcopy(module)
    with torch.inference_mode(), region(recipe):
        module(x)
    got, wanted = step(module, x, recipe), step(trained, x, recipe)
    if recipe != "delayed":  # where the earlier call leaves its maximum
        assert not differences(got, wanted)
    module.load_state_dict(copy.deepcopy(trained.state_dict()))
    assert not differences(step(module, x, recipe), step(trained, x, recipe))


@on_devices
@all_modules
def test_double_backward_is_refused(kind: str, device: str) -> None:
    x = values(4, WIDTH, device=device).requires_grad_()
    y = make(kind, device)(x)
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


# ---------------------------------------------------------------------------------------- state, and a weight of two


@on_devices
@gemm_modules
@pytest.mark.parametrize("cast", ["half", "to"])
def test_state_stays_float32(cast: str, kind: str, device: str) -> None:
    module = make(kind, device)
    x = values(32, WIDTH, device=device, seed=1)
    for _ in range(2):
        step(module, x, "delayed")
    before = fp8_state(module)
    module = module.half() if cast == "half" else module.to(torch.bfloat16)
    dtype = torch.float16 if cast == "half" else torch.bfloat16
    assert not differences(fp8_state(module), before) and {t.dtype for t in before.values()} == {torch.float32}
    assert next(module.parameters()).dtype == dtype
    got = step(module, x.to(dtype), "delayed")
    wanted = reference.results(module, x.to(dtype), gradient_for(got["y"]))
    assert snr_db(got["y"], wanted["y"]) >= DB["fp8 linear"]
    assert differences(fp8_state(module), before), "the state that moved is the one that is updated"


@on_devices
@recipes
def test_shared_weight(recipe: str, device: str) -> None:
    first, second = (te.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(2))
    second.weight = first.weight
    x = values(24, WIDTH, device=device, seed=1)
    for _ in range(3):
        first.zero_grad()
        with region(recipe):
            y = second(first(x))
        y.backward(gradient_for(y))
    w = first.weight.detach().cpu().double().requires_grad_()
    wanted = (x.cpu().double() @ w.T) @ w.T
    wanted.backward(gradient_for(y).cpu().double())
    floor = DB["fp32"] if recipe == "plain" else DB["fp8 linear"]
    assert snr_db(y, wanted.detach()) >= floor and snr_db(first.weight.grad, w.grad) >= floor
    assert second.weight.grad is first.weight.grad
    if recipe == "delayed":  # the scaling state is each module's own
        a, b = (m.fp8_state.scale_fwd[:2].tolist() for m in (first, second))
        assert a[1] == b[1] and a[0] != b[0]
