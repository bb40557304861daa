"""Every recipe in every module: against float64, and what its numerics promise exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_torch as te
from te_core import dtypes, ops
from te_core.precision import Operand
from te_core.quantize.state import GRAD_INPUT, GRAD_OUTPUT, backward_cast
from te_core.quantized import Cast
from te_core.recipe import resolve
from te_torch.runtime import runtime_for, to_core, to_torch
from tests import world as module_steps
from tests.backends import on_devices
from tests.covering import covering
from tests.recipes import KINDS, OVERRIDES, RECIPES, region, rule
from tests.reference import modules as reference
from tests.tolerances import DB, snr_db
from tests.world import GEMM_MODULES, differences, gradient_for, on, randomise, values

gemm_modules = pytest.mark.parametrize("kind", GEMM_MODULES)
EVERY = [*RECIPES, *OVERRIDES]
all_recipes = covering(kind=GEMM_MODULES, recipe=RECIPES)
every = covering(kind=GEMM_MODULES, recipe=EVERY)
# One of each kind, and the others in the complete matrix.
mostly = pytest.mark.parametrize(
    "recipe", [n if n in KINDS else pytest.param(n, marks=pytest.mark.full) for n in EVERY]
)

BF16 = torch.bfloat16


def build(
    kind: str, device: str, width: int = 144, wide: int = 176, dtype: torch.dtype = BF16, **options: Any
) -> torch.nn.Module:
    """A module of more than one 128-block each way."""
    module = getattr(te, kind)(width, wide, params_dtype=dtype, device=device, **options)
    randomise(module)
    return module


def step(
    module: Any, x: torch.Tensor, recipe: str | None, dy: torch.Tensor | None = None, seed: int = 5
) -> dict[str, torch.Tensor]:
    """y, dx and the parameters' gradients of one step; all its draws come from the seed."""
    torch.manual_seed(seed)
    return module_steps.step(module, x, region(recipe), dy=dy)


def floor_of(recipe: str, kind: str) -> float:
    """The bound of targets by format: two casts and a product, or two of these in a row."""
    narrow = "nvfp4" if "nvfp4" in recipe else "fp8"
    return DB[f"{narrow} mlp" if kind == "LayerNormMLP" else f"{narrow} linear"]


def check_against_float64(module: torch.nn.Module, inputs: list[torch.Tensor], recipe: str, device: str) -> None:
    """A step of each input, all together against float64."""
    steps, references = [], []
    for i, x in enumerate(inputs):
        dy = gradient_for(module(x), seed=7 + i)
        for _ in range(3 if rule(recipe).delayed() else 1):  # delayed scaling finds its scales
            got = step(module, x, recipe, dy, seed=i)
        steps.append(got)
        references.append(reference.results(module, x, dy))
    on(device, *steps[0].values())
    kind = type(module).__name__
    for name, first in steps[0].items():
        # The last bias sees dy only, which nobody rounds before summing it.
        limit = DB["bf16"] if name in ("bias", "fc2_bias") else floor_of(recipe, kind)
        assert first.dtype == BF16 and first.shape == references[0][name].shape
        found = snr_db(torch.stack([s[name] for s in steps]), torch.stack([r[name] for r in references]))
        assert found >= limit, f"{name}: {found:.1f} dB < {limit}"
        if name == "y":
            assert found < DB["bf16"], "this was not quantized"


@on_devices
@covering(turns=2, kind=GEMM_MODULES, shape=[(2, 80, 144), (37, 100), (1, 100)], recipe=EVERY)
def test_against_float64(kind: str, shape: tuple[int, ...], recipe: str, device: str) -> None:
    """Of more than one block each way, and with no side a multiple of anything."""
    inputs = 8 if shape[0] == 1 else 1  # a single row is too few values to judge by
    xs = [values(*shape, device=device, dtype=BF16, seed=i) for i in range(1, inputs + 1)]
    module = build(kind, device) if shape[-1] == 144 else build(kind, device, 100, 60)
    check_against_float64(module, xs, recipe, device)


@on_devices
@every
def test_no_rows(kind: str, recipe: str, device: str) -> None:
    """An empty input gives an empty output, and gradients that are zero and not what memory held."""
    got = step(build(kind, device, 100, 60), torch.empty(0, 100, device=device, dtype=BF16), recipe)
    assert got["y"].shape == (0, 100 if kind == "LayerNormMLP" else 60) and got["dx"].shape == (0, 100)
    assert all(not t.any() for t in got.values())


# ------------------------------------------------------------------------------------------ invariances


def given(module: Any, device: str, rows: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """An input, and a gradient of the output."""
    x = values(rows, 144, device=device, dtype=BF16, seed=1)
    return x, values(rows, module(x).shape[-1], device=device, dtype=BF16, seed=2)


@on_devices
@all_recipes
def test_powers_of_two_pass_through(kind: str, recipe: str, device: str) -> None:
    """Inputs, weights and gradients times powers of two: every result times the right power, bit for bit.

    Every recipe makes that true: its scales follow the maxima exactly. Delayed scaling knows them a step later.
    """
    weight = "fc2_weight" if kind == "LayerNormMLP" else "weight"
    module = build(kind, device, bias=False)
    scaled = copy.deepcopy(module)
    # The norms have an epsilon, so only their linears' weights are scaled.
    px, pw, pg = (2.0**9 if kind == "Linear" else 1.0), 2.0**-7, 2.0**-5
    with torch.no_grad():
        getattr(scaled, weight).mul_(pw)
    x, dy = given(module, device)
    for _ in range(6 if "delayed" in recipe else 1):  # until the history has forgotten the first step
        got, wanted = step(scaled, px * x, recipe, pg * dy), step(module, x, recipe, dy)
    powers = {"y": px * pw, "dx": pw * pg, weight: px * pg}
    assert not differences(got, {n: t * powers.get(n, pw * pg) for n, t in wanted.items()})


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for the order in which a product sums, which a library may choose by the number and place of rows
    (cuBLASLt does, and so does OpenBLAS on some processors). What a wrong scale does to a result is far larger.
    """
    return torch.equal(a, b) or snr_db(a, b) >= DB["bf16"]


@on_devices
@all_recipes
def test_rows_of_zeros_change_nothing(kind: str, recipe: str, device: str) -> None:
    """Padding: appended zeros (in the gradient too) leave a Linear's y and dx of the other rows as they are.

    A zero raises no maximum, whatever shares it. Behind a norm, whose bias is no zero, only scales of a row's own
    promise that. Weight gradients are sums over more terms, and the columnwise copies of stochastic rounding take other
    draws, so these agree to the recipe's rounding only.
    """
    module, padded = (build(kind, device) for _ in range(2))
    x, dy = given(module, device)
    zeros = {t: t.new_zeros(33, t.shape[1]) for t in (x, dy)}
    for _ in range(2):
        got = step(padded, torch.cat([x, zeros[x]]), recipe, torch.cat([dy, zeros[dy]]))
        wanted = step(module, x, recipe, dy)
    floor = floor_of(recipe, kind)
    for name in ("y", "dx"):
        # A norm turns a row of zeros into its bias, an MLP's fc1 into something else again: these have maxima.
        if kind == "Linear" or per_row(recipe):
            assert alike(got[name][:40], wanted[name]), name
        else:
            assert snr_db(got[name][:40], wanted[name]) >= floor, name
    for name in set(got) - {"y", "dx"}:
        assert snr_db(got[name], wanted[name]) >= floor, f"{name}: {snr_db(got[name], wanted[name]):.1f} dB"


def per_row(recipe: str) -> bool:
    """Whether no scale of inputs and gradients is shared by two rows."""
    p = resolve(rule(recipe))
    return all(o.scaling in ("block", "mxfp8") and not o.tiled or o.row_scaled for o in (p.input, p.grad))


@on_devices
@all_recipes
def test_the_order_of_rows_is_free(kind: str, recipe: str, device: str) -> None:
    """Rows (so batches too) in another order give the same rows of y and dx in that order.

    Not promised where 128 rows share tiles, nor for the gradients of stochastic rounding: draws belong to places.
    """
    p = resolve(rule(recipe))
    module, other = (build(kind, device) for _ in range(2))
    x, dy = given(module, device, 160)
    order = torch.randperm(160, generator=torch.Generator().manual_seed(3)).to(device)
    for _ in range(2):
        got, wanted = step(other, x[order], recipe, dy[order]), step(module, x, recipe, dy)
    free = {"y": not p.input.tiled, "dx": not (p.grad.tiled or p.grad.stochastic or p.input.tiled and kind != "Linear")}
    for name, exact in free.items():
        if exact:
            assert alike(got[name], wanted[name][order]), name
        else:
            assert snr_db(got[name], wanted[name][order]) >= floor_of(recipe, kind), name


CAUSAL = {n for n in RECIPES if n.split()[0] in ("delayed", "block", "mxfp8")} - {"block tiled x"} | {"nvfp4 rows"}


@on_devices
@all_recipes
def test_causality(kind: str, recipe: str, device: str) -> None:
    """What later rows hold changes y of no earlier row, where the recipe's statistics are a row's own.

    So with block scaling, MXFP8 and row-scaled NVFP4; and with delayed scaling, whose scales are those of earlier
    steps. Not with current scaling, NVFP4's one maximum, or tiled inputs: these see every row.
    """
    p = resolve(rule(recipe))
    module = build(kind, device)
    x, _ = given(module, device)
    later = x.clone()
    later[range(20, 40), range(0, 140, 7)] += 900  # one spike a row: a norm takes a mere factor out
    for _ in range(2):
        step(module, x, recipe)
    before, after = (step(copy.deepcopy(module), t, recipe)["y"] for t in (x, later))
    assert not torch.equal(before[20:], after[20:])
    if recipe in CAUSAL:
        assert torch.equal(before[:20], after[:20])
    elif kind == "Linear" or not p.input.power_of_two:  # a power of two only moves what falls below the format
        assert not torch.equal(before[:20], after[:20])


# ----------------------------------------------------------------------------- fused, overridden, repeated


@on_devices
@mostly
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_fused_norm_equals_the_parts(normalization: str, recipe: str, device: str) -> None:
    """LayerNormLinear is a norm and a Linear, bit for bit, gradients too."""
    fused = build("LayerNormLinear", device, normalization=normalization)
    norm = getattr(te, normalization)(144, dtype=BF16, device=device)
    linear = te.Linear(144, 176, params_dtype=BF16, device=device)
    state = fused.state_dict()
    norm.load_state_dict({n.removeprefix("layer_norm_"): t for n, t in state.items() if n.startswith("layer_norm_")})
    linear.load_state_dict({n: t for n, t in state.items() if not n.startswith("layer_norm_")})
    x = values(75, 144, device=device, dtype=BF16, seed=1)
    for _ in range(2):
        got, wanted = step(fused, x, recipe), step(torch.nn.Sequential(norm, linear), x, recipe)
    names = {"0.weight": "layer_norm_weight", "0.bias": "layer_norm_bias", "1.weight": "weight", "1.bias": "bias"}
    assert not differences(got, {names.get(n, n): t for n, t in wanted.items()})


PARTS = {
    "first.layer_norm_weight": "layer_norm_weight",
    "first.layer_norm_bias": "layer_norm_bias",
    "first.weight": "fc1_weight",
    "first.bias": "fc1_bias",
    "second.weight": "fc2_weight",
    "second.bias": "fc2_bias",
}


class Parts(torch.nn.Module):
    """What LayerNormMLP with relu is made of."""

    def __init__(self, mlp: Any, device: str) -> None:
        super().__init__()
        self.first = te.LayerNormLinear(144, 176, params_dtype=BF16, device=device)
        self.second = te.Linear(176, 144, params_dtype=BF16, device=device)
        self.load_state_dict({mine: mlp.state_dict()[theirs] for mine, theirs in PARTS.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@on_devices
@mostly
def test_fused_mlp_equals_the_parts(recipe: str, device: str) -> None:
    """y of LayerNormMLP bit for bit, gradients too where nothing is drawn; fc1's bias gradient but for its order."""
    mlp = build("LayerNormMLP", device, activation="relu")
    parts = Parts(mlp, device)
    x = values(75, 144, device=device, dtype=BF16, seed=1)
    for _ in range(2):
        got, wanted = step(mlp, x, recipe), step(parts, x, recipe)
    wanted = {PARTS.get(n, n): t for n, t in wanted.items()}
    assert torch.equal(got["y"], wanted["y"])
    grad = resolve(rule(recipe)).grad
    if grad.stochastic and rule(recipe).backward_override is None:
        return  # the two linears draw for themselves
    db1 = got.pop("fc1_bias"), wanted.pop("fc1_bias")
    assert snr_db(*db1) >= DB["bf16"]
    assert not differences(got, wanted)


@on_devices
@pytest.mark.parametrize("recipe", [n for n in OVERRIDES if "high_precision" in n])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_override_high_precision(kind: str, recipe: str, device: str) -> None:
    """Backward is the unquantized module's: its GEMMs on the original operands, bit for bit."""
    module = build(kind, device)
    x = values(75, 144, device=device, dtype=BF16, seed=1)
    got, plain = step(module, x, recipe), step(module, x, None)
    assert not torch.equal(got.pop("y"), plain.pop("y"))
    assert snr_db(got.pop("bias"), plain.pop("bias")) >= DB["bf16"]  # summed by another kernel
    assert not differences(got, plain)


@on_devices
@pytest.mark.parametrize("recipe", OVERRIDES)
def test_override_behind_a_quantized_input(recipe: str, device: str) -> None:
    """What comes quantized, as attention's output does, is read along its rows in backward, too."""
    first, second = build("Linear", device), te.Linear(176, 80, params_dtype=BF16, device=device)
    x = values(75, 144, device=device, dtype=BF16, seed=1)
    found = []
    for quantized in (False, True):
        with region(recipe):
            y = second(first(x, fp8_output=quantized))
        found.append(torch.autograd.grad(y, [*second.parameters(), *first.parameters()], gradient_for(y)))
    for got, wanted in zip(found[1], found[0], strict=True):
        assert snr_db(got, wanted) >= DB["nvfp4 linear" if "nvfp4" in recipe else "fp8 linear"]


CALIBRATING = "calibrating"


@on_devices
@covering(
    turns=2, kind=GEMM_MODULES, dtype=[torch.float16, torch.float32], recipe=[None, CALIBRATING, *KINDS, *OVERRIDES]
)
def test_parameters_of_another_type(kind: str, dtype: torch.dtype, recipe: str | None, device: str) -> None:
    """Under torch.autocast(bfloat16): also where a GEMM reads the weight itself (backward in high precision)."""
    module = build(kind, device, dtype=dtype)
    x = values(75, 144, device=device, seed=1).requires_grad_()
    calibrating = te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"])
    with torch.autocast(device, BF16), calibrating if recipe == CALIBRATING else region(recipe):
        y = module(x)
    assert y.dtype == BF16
    y.backward(gradient_for(y))
    plain = build(kind, device, dtype=torch.float32)
    plain.load_state_dict(module.state_dict(), strict=False)
    wanted = step(plain, x, None, dy=gradient_for(y).float())
    for name, p in module.named_parameters():
        assert p.grad.dtype == dtype
        floor = "bf16" if recipe in (None, CALIBRATING) else "nvfp4 mlp" if "nvfp4" in recipe else "fp8 mlp"
        assert snr_db(p.grad, wanted[name]) >= DB[floor], name


def dequantized(t: torch.Tensor, operand: Operand) -> torch.Tensor:
    """The values of a rowwise copy."""
    rt = runtime_for(t)
    cast = Cast(
        operand.format,
        rowwise=True,
        columnwise=False,
        power_of_two=operand.power_of_two,
        epsilon=operand.epsilon,
        four_over_six=operand.four_over_six,
    )
    return to_torch(ops.dequantize(rt, ops.quantize(rt, to_core(t.detach()), cast), dtypes.float32)).view(t.shape)


@on_devices
@pytest.mark.parametrize("recipe", [n for n in OVERRIDES if "dequantized" in n])
def test_override_dequantized(recipe: str, device: str) -> None:
    """Backward multiplies the unquantized gradient with what the rowwise copies hold."""
    p = resolve(rule(recipe))
    module = build("Linear", device, dtype=torch.float32)
    x = values(75, 144, device=device, seed=1)
    got = step(module, x, recipe)
    dy = gradient_for(got["y"]).double()
    held_x, held_w = (dequantized(t, o).double() for t, o in ((x, p.input), (module.weight, p.weight)))
    assert snr_db(got["dx"].double(), dy @ held_w) >= DB["fp32"]
    assert snr_db(got["weight"].double(), dy.T @ held_x) >= DB["fp32"]
    assert snr_db(got["y"].double(), held_x @ held_w.T + module.bias.double()) >= DB["fp8 fast"]


@on_devices
@gemm_modules
def test_stochastic_rounding_draws(kind: str, device: str) -> None:
    """Another draw gives other gradients of equal quality, and the same y; their mean is better than each."""
    module = build(kind, device)
    x = values(75, 144, device=device, dtype=BF16, seed=1)
    torch.manual_seed(5)
    leaf = x.clone().requires_grad_()
    found = []
    for _ in range(16):
        with region("nvfp4 no rht"):
            y = module(leaf)
        y.backward(gradient_for(y))
        found.append((y.detach(), leaf.grad.double()))
        leaf.grad = None
    assert all(torch.equal(y, found[0][0]) for y, _ in found)
    assert len({dx.sum().item() for _, dx in found}) == len(found)
    wanted = reference.results(module, x, gradient_for(y))["dx"]
    mean = torch.stack([dx for _, dx in found]).mean(0).cpu()
    # The draws' errors average out; the weights' rounding (and an MLP's of its own activations) stays.
    assert snr_db(mean, wanted) >= snr_db(found[0][1].cpu(), wanted) + 1.5


@on_devices
@gemm_modules
def test_the_transform_is_of_wgrad_alone(kind: str, device: str) -> None:
    """It cancels in the product that both its operands enter, so only their rounding shows, and only there."""
    module = build(kind, device)
    x = values(75, 144, device=device, dtype=BF16, seed=1)
    turned, plain = (step(module, x, recipe) for recipe in ("nvfp4", "nvfp4 no rht"))
    weights = {n for n, p in module.named_parameters() if p.ndim == 2}
    assert set(differences(turned, plain)) == weights


def handed_on(given: Any, recipe: str, device: str, grad: bool) -> tuple[dict[str, float], Any]:
    """How well two Linears' weight gradients are those of plain values, where the second reads what `given` makes of
    the first one's output, or (`grad`) its input's gradient goes back quantized. And what came."""
    made = [te.Linear(a, b, params_dtype=BF16, device=device) for a, b in ((144, 80), (80, 176))]
    for module in made:
        randomise(module)
    first, second = made
    x = values(75, 144, device=device, dtype=BF16, seed=1)
    dy = values(75, 176, device=device, dtype=BF16, seed=2)
    for _ in range(3 if rule(recipe).delayed() else 1):  # type: ignore[union-attr]
        first.zero_grad(), second.zero_grad()
        torch.manual_seed(5)
        with region(recipe):
            h = given(first, x)
            y = second(h, fp8_grad=grad)
        y.backward(dy)
    read = h.dequantize() if isinstance(h, te.QuantizedTensor) else h
    wanted = {"second": dy.double().T @ read.detach().double()}
    if grad:
        wanted["first"] = (dy.double() @ second.weight.double()).T @ x.double()
    return {name: snr_db({"first": first, "second": second}[name].weight.grad, w) for name, w in wanted.items()}, h


@on_devices
@mostly
@pytest.mark.parametrize("grad", [False, True])
def test_what_comes_quantized_has_its_weight_gradient(recipe: str, grad: bool, device: str) -> None:
    """Both operands of wgrad lie in one domain, whoever quantized them."""
    found, h = handed_on(lambda first, x: first(x, fp8_output=not grad), recipe, device, grad)
    if not grad and recipe.split()[-1] not in ("high_precision", "dequantized"):
        assert isinstance(h, te.QuantizedTensor)
    assert all(quality >= floor_of(recipe, "LayerNormMLP" if grad else "Linear") for quality in found.values()), found


@on_devices
@pytest.mark.parametrize("copies", [(True, True), (True, False)], ids=["both copies", "rows"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4 no rht"])
def test_a_columnwise_copy_of_unknown_domain(recipe: str, turned: bool, copies: tuple[bool, bool], device: str) -> None:
    """What a user's quantizer has transformed, or not, is read right by a recipe that does not, or does."""
    quantizer = te.NVFP4Quantizer(
        rowwise=copies[0], columnwise=copies[1], with_rht=turned, with_post_rht_amax=turned, stochastic_rounding=False
    )
    found, _ = handed_on(lambda first, x: quantizer(first(x).detach()), recipe, device, False)
    assert found["second"] >= DB["nvfp4 linear"], found


def test_layers_draw_for_themselves() -> None:
    """Each slot of each GEMM has draws of its own."""
    grad, rng = resolve(RECIPES["nvfp4"]).grad, to_core(torch.zeros(2, dtype=torch.int64))
    casts = [
        backward_cast(grad, None, gemm, rowwise=True, columnwise=True, slot=slot, rng=rng)
        for gemm in range(3)
        for slot in (GRAD_OUTPUT, GRAD_INPUT)
    ]
    assert len({cast.site for cast in casts}) == 6
