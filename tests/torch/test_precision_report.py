"""What the report says of each GEMM, in every recipe and situation; and what `strict` makes of it."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch

import te_torch as te
from te_core import device as devices_of_core
from te_core.device import DeviceInfo
from te_core.dtypes import bfloat16
from te_core.errors import UnsupportedError
from te_core.layers.linear import LinearSpec, Needs
from te_core.layers.parallel import Split
from te_core.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, resolve
from te_core.tensor import cuda_device
from te_core.tools.explain import PRODUCTS, explain_linear
from te_torch.attention import env
from te_torch.tools.precision_report import precision_report
from tests.backends import capability, on_devices, requires_cuda
from tests.covering import covering
from tests.recipes import KINDS, OVERRIDES, RECIPES, region, rule
from tests.world import GEMM_MODULES, WIDTH, gradient_for, make, values

gemm_modules = pytest.mark.parametrize("kind", GEMM_MODULES)

E4M3, E5M2, E2M1 = "float8_e4m3", "float8_e5m2", "float4_e2m1"
#: Operands of fprop, dgrad and wgrad by recipe: input x weight, gradient x weight, gradient x input.
_A_TENSOR, _BLOCKS, _FOURS = f"{E4M3} per tensor", f"{E4M3} 1x128", f"{E2M1} 1x16"
OPERANDS = {
    "delayed": (_A_TENSOR, _A_TENSOR, f"{E5M2} per tensor"),
    "delayed e4m3": (_A_TENSOR,) * 3,
    "current": (_A_TENSOR, _A_TENSOR, f"{E5M2} per tensor"),
    "current e4m3 pow2": (_A_TENSOR,) * 3,
    "block": (_BLOCKS, f"{E4M3} 128x128", _BLOCKS),
    "block f32": (_BLOCKS, f"{E4M3} 128x128", _BLOCKS),
    "block hybrid": (_BLOCKS, f"{E4M3} 128x128", f"{E5M2} 1x128"),
    "block no tiles": (_BLOCKS,) * 3,
    "block tiled x": (f"{E4M3} 128x128", _BLOCKS, _BLOCKS),
    "block tiled grad": (_BLOCKS, _BLOCKS, f"{E4M3} 128x128"),
    "mxfp8": (f"{E4M3} 1x32",) * 3,
    "mxfp8 hybrid": (f"{E4M3} 1x32", f"{E4M3} 1x32", f"{E5M2} 1x32"),
    "mxfp8 tiled": (f"{E4M3} 1x32", f"{E4M3} 32x32", f"{E4M3} 1x32"),
    **{name: (_FOURS, f"{E2M1} 16x16", _FOURS) for name in RECIPES if name.startswith("nvfp4")},
    "nvfp4 no tiles": (_FOURS,) * 3,
    "nvfp4 rows": (f"{_FOURS}, an amax a row", f"{E2M1} 16x16", _FOURS),
}


def after(module: Any, device: str, around: Any, *, grad: bool = True, backward: bool = True) -> Any:
    """The report after a step."""
    x = values(16, WIDTH, device=device, dtype=torch.bfloat16, seed=1).requires_grad_(grad)
    with around:
        y = module(x)
    if backward and y.requires_grad:
        y.backward(gradient_for(y))
    return precision_report(module)


def facts(report: Any) -> dict[tuple[str, str], Any]:
    return {(row.layer, row.facts.gemm): row.facts for row in report.rows}


@on_devices
@covering(kind=GEMM_MODULES, recipe=RECIPES)
def test_every_recipe(kind: str, recipe: str, device: str) -> None:
    """Formats per operand, accumulation, who multiplies; nothing is called a fallback where nothing fell back."""
    module = make(kind, device, torch.bfloat16, name="it")
    report = after(module, device, region(recipe))
    found = facts(report)
    layers = ["it.fc1", "it.fc2"] if kind == "LayerNormMLP" else ["it"]
    assert set(found) == {(layer, gemm) for layer in layers for gemm in ("fprop", "dgrad", "wgrad")}
    x, w, dy = OPERANDS[recipe]
    split = {g: getattr(resolve(rule(recipe)), g).split_accumulator for g in ("fprop", "dgrad", "wgrad")}
    for (_, gemm), fact in found.items():
        assert (fact.a, fact.b) == {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}[gemm]
        if device == "cpu":
            assert fact.as_asked and "NumPy" in fact.family and not fact.reason
            assert fact.accumulation == ("split" if split[gemm] else "fast")
        elif fact.as_asked:
            assert fact.family.startswith("cublasLt") and "dequantizing" not in fact.family
        else:
            assert fact.reason and "float32 after dequantizing" in fact.family and fact.accumulation == "float32"
    scaling = resolve(rule(recipe)).input.scaling
    native = device == "cpu" or scaling in ("delayed", "current") or (scaling == "block" and capability()[0] == 9)
    assert (not report.fallbacks) == native


HIGHER: dict[str, tuple[dict[str, Any], str]] = {
    "no recipe": ({}, "outside of autocast"),
    "a recipe": ({"recipe": RECIPES["block"]}, "outside of autocast"),
    "calibrating": ({"recipe": RECIPES["delayed"], "calibrating": True}, "calibrating"),
}


@on_devices
@gemm_modules
def test_in_high_precision(kind: str, device: str) -> None:
    module = make(kind, device, torch.bfloat16)
    for options, reason in HIGHER.values():
        report = after(module, device, te.autocast(enabled=False, **options))
        assert not report.fallbacks
        assert {(f.a, f.b) for f in facts(report).values()} == {("bfloat16", "bfloat16")}
        assert all(reason in f.reason for f in facts(report).values())


@on_devices
@covering(kind=GEMM_MODULES, recipe=OVERRIDES)
def test_backward_override(kind: str, recipe: str, device: str) -> None:
    """Backward in high precision is as asked, and says where it comes from."""
    found = facts(after(make(kind, device, torch.bfloat16), device, region(recipe)))
    override = rule(recipe).backward_override
    for (_, gemm), fact in found.items():
        if gemm == "fprop":
            assert "bfloat16" not in fact.a and "backward_override" not in fact.reason
        else:
            assert (fact.a, fact.b, fact.as_asked) == ("bfloat16", "bfloat16", True)
            assert repr(override) in fact.reason


@on_devices
@pytest.mark.parametrize("recipe", [None, *KINDS])
def test_unneeded_gradients(recipe: str | None, device: str) -> None:
    """A GEMM that is not computed is named as such: a frozen weight, an input without gradient, no_grad."""
    module = make("Linear", device, torch.bfloat16)
    found = facts(after(module, device, region(recipe), grad=False))
    computed = {gemm: bool(f.family) for (_, gemm), f in found.items()}
    assert computed == {"fprop": True, "dgrad": False, "wgrad": True}
    assert all("nobody needs" in f.reason for f in found.values() if not f.family)
    module.weight.requires_grad_(False)
    found = facts(after(module, device, region(recipe)))
    assert {gemm: bool(f.family) for (_, gemm), f in found.items()} == {"fprop": True, "dgrad": True, "wgrad": False}
    with torch.no_grad():
        report = after(module, device, region(recipe))
    assert [bool(f.family) for f in facts(report).values()] == [True, False, False]
    assert recipe in ("mxfp8", "nvfp4") or not report.fallbacks


@on_devices
@pytest.mark.parametrize("scaling", ["delayed", "current"])
@gemm_modules
def test_e5m2(kind: str, scaling: str, device: str) -> None:
    """No tensor core multiplies E5M2 by E5M2: said of every GEMM, and an error under strict. Factories ask for it."""
    module = make(kind, device, torch.bfloat16)
    request = te.DelayedScalingRequest(fp8_format=Format.E5M2)
    current = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2)
    recipe = CustomRecipe(lambda role: request if scaling == "delayed" else current)
    report = after(module, device, te.autocast(recipe=recipe))
    assert len(report.fallbacks) == len(report.rows)
    for row in report.fallbacks:
        assert "E5M2 by E5M2" in row.facts.reason and "bfloat16 after dequantizing" in row.facts.family
    assert "NOT AS ASKED: no tensor core" in str(report)
    assert f"{len(report.rows)} of {len(report.rows)} not as the recipe asks" in str(report)
    with pytest.raises(UnsupportedError, match="E5M2 by E5M2"):
        after(module, device, te.autocast(recipe=recipe, strict=True))


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
def test_strict_lets_pass_what_is_as_asked(recipe: str, device: str) -> None:
    """The same numbers, and no error where the report has nothing to say."""
    results = []
    for options in ({}, {"strict": True}):
        module = make("Linear", device, torch.bfloat16)
        torch.manual_seed(0)
        report = after(module, device, region(recipe, **options))
        results.append(module.weight.grad)
    assert torch.equal(*results)
    assert (not report.fallbacks) or (device == "cuda" and ("nvfp4" in recipe or "mxfp8" in recipe))


@on_devices
def test_idle_modules_and_names(device: str) -> None:
    """Rows in the model's order under its names; what has not run is listed, what is no layer of ours is not."""
    model = torch.nn.ModuleDict(
        {
            "a": make("Linear", device),
            "other": torch.nn.Linear(4, 4),
            "norm": make("LayerNorm", device),
            "mlp": make("LayerNormMLP", device),
            "never": make("LayerNormLinear", device),
        }
    )
    assert precision_report(model).idle == ["a", "mlp", "never"] and not precision_report(model).rows
    x = values(4, WIDTH, device=device)
    with region("current"):
        model["a"](x)
    model["mlp"](x)
    report = precision_report(model)
    assert [row.layer for row in report.rows[::3]] == ["a", "mlp.fc1", "mlp.fc2"] and report.idle == ["never"]
    assert "not run yet: never" in str(report)
    told = report.as_dict()
    assert told["idle"] == ["never"] and len(told["gemms"]) == 9
    assert told["gemms"][0] == {"layer": "a", **report.rows[0].facts._asdict()}
    assert {g["a"] for g in told["gemms"][:1]} == {f"{E4M3} per tensor"} and told["gemms"][3]["a"] == "float32"


def test_a_report_of_nothing_says_so() -> None:
    """No layer of ours, none that has run, none that ran in a region: each is said, and none is called as asked."""
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), te.LayerNorm(4, device="cpu"))
    assert str(precision_report(other)).startswith("nothing to report: the model holds no layer of te_torch")
    assert "te.convert" in str(precision_report(other))
    model = torch.nn.Sequential(*(te.Linear(WIDTH, WIDTH, device="cpu") for _ in range(2)))
    assert str(precision_report(model)) == "nothing has run yet: {0..1} x2"
    model(values(4, WIDTH))
    assert "all in high precision: nothing ran inside te.autocast" in str(precision_report(model))
    with te.autocast(enabled=False):
        model(values(4, WIDTH))
    assert "nothing ran inside te.autocast" in str(precision_report(model))
    with region("current"):
        model[0](values(4, WIDTH))
    assert "all as the recipe asks; 3 of 5 outside of te.autocast" in str(precision_report(model))
    with region("current"):
        model(values(4, WIDTH))
    assert str(precision_report(model)).endswith("all as the recipe asks")
    for text in (str(precision_report(m)) for m in (other, make("Linear", "cpu"))):
        assert "as the recipe asks" not in text and "gemm" not in text


class Deep(torch.nn.Module):
    """32 equal layers, of which some may be special, each with experts."""

    def __init__(self, layers: int = 32) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for _ in range(layers):
            experts = torch.nn.ModuleList(te.Linear(16, 16, device="cpu") for _ in range(3))
            self.layers.append(torch.nn.ModuleDict({"mlp": te.LayerNormMLP(16, 16, device="cpu"), "experts": experts}))
        self.head = te.Linear(16, 16, device="cpu")

    def forward(self, x: torch.Tensor, plain: tuple[int, ...] = (), left_out: tuple[int, ...] = ()) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            for part in (layer["mlp"], *layer["experts"]):
                if i not in left_out:
                    with te.autocast(enabled=i not in plain, recipe=RECIPES["current"]):
                        x = part(x)
        return self.head(x)


def shown(report: Any) -> list[str]:
    """The first column of the printed table, each layer once."""
    lines = str(report).splitlines()
    end = lines.index("")
    cells = (line.split("  ")[0] for line in lines[2:end])
    return list(dict.fromkeys(cells))


def test_equal_layers_are_printed_once() -> None:
    """What is the same in every respect stands in one row, with exactly the layers that it stands for."""
    model, x = Deep(), values(16, 16)
    model(x)
    report = precision_report(model)
    assert shown(report) == [
        "layers.{0..31}.mlp.fc1 x32",
        "layers.{0..31}.mlp.fc2 x32",
        "layers.{0..31}.experts.{0..2} x96",
        "head",
    ]
    assert len(str(report).splitlines()) < 20
    assert len(report.as_dict()["gemms"]) == len(report.rows) == 3 * (32 * 5 + 1), "programs get all of it"
    model(x, plain=(0, 7, 8))
    report = precision_report(model)
    rest = "layers.{1..6,9..31}"
    assert shown(report) == [
        "layers.{0,7..8}.mlp.fc1 x3",
        "layers.{0,7..8}.mlp.fc2 x3",
        "layers.{0,7..8}.experts.{0..2} x9",
        f"{rest}.mlp.fc1 x29",
        f"{rest}.mlp.fc2 x29",
        f"{rest}.experts.{{0..2}} x87",
        "head",
    ]
    fresh = Deep(8)
    fresh(x, left_out=(3, 5))
    idle = "not run yet: layers.{3,5}.mlp x2, layers.{3,5}.experts.{0..2} x6"
    assert idle in str(precision_report(fresh)) and len(precision_report(fresh).idle) == 8


def test_groups_of_layers_are_exact() -> None:
    """Layers that are not all of a rectangle of numbers are not called so."""
    model, x = Deep(4), values(16, 16)
    model(x)
    model.layers[2]["experts"][1](x)  # outside of a region
    text = shown(precision_report(model))
    assert [cell for cell in text if "experts" in cell] == [
        "layers.{0..1,3}.experts.{0..2} x9",
        "layers.2.experts.{0,2} x2",
        "layers.2.experts.1",
    ]
    grouped = te.GroupedLinear(3, 16, 16, device="cpu", name="experts")
    with region("current"):
        grouped(x, [5, 0, 11])
    assert shown(precision_report(grouped)) == ["experts.weight{0..2} x3"]


@on_devices
def test_the_last_forward_counts(device: str) -> None:
    module = make("Linear", device, torch.bfloat16)
    for recipe, a in (("current", f"{E4M3} per tensor"), ("block", f"{E4M3} 1x128"), (None, "bfloat16")):
        assert after(module, device, region(recipe)).rows[0].facts.a == a


@on_devices
def test_one_layer_in_high_precision_inside_a_region(device: str) -> None:
    """A nested region that switches off is seen where it is."""
    model = torch.nn.Sequential(make("Linear", device, torch.bfloat16), te.Linear(64, 32, device=device).bfloat16())
    x = values(16, WIDTH, device=device, dtype=torch.bfloat16)
    with region("current"):
        h = model[0](x)
        with te.autocast(enabled=False):
            model[1](h)
    found = facts(precision_report(model))
    assert found["0", "fprop"].a == f"{E4M3} per tensor" and found["1", "fprop"].a == "bfloat16"


# ---------------------------------------------------------------------------------------------- attention

LOW = (f"{E4M3} per tensor", f"{E4M3} per tensor")
LOW_BACK = (f"{E5M2} per tensor", f"{E4M3} per tensor")
HIGH = ("bfloat16", "bfloat16")


def attended(module: Any, device: str, recipe: Any, *, grad: bool = True, **options: Any) -> Any:
    """The report after a step of attention, and the backend that explain names."""
    q, k, v = (
        values(16, 2, 2, 128, device=device, dtype=torch.bfloat16, seed=s).requires_grad_(grad) for s in (1, 2, 3)
    )
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        backend = module.explain(q, k, v, **options).backend
        y = module(q, k, v, **options)
    if grad:
        y.sum().backward()
    return precision_report(torch.nn.ModuleDict({"it": module})), backend


def operands(report: Any) -> list[tuple[str, str]]:
    assert [(row.layer, row.facts.gemm) for row in report.rows] == [("it", product) for product in PRODUCTS]
    return [(row.facts.a, row.facts.b) for row in report.rows]


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


@on_devices
@pytest.mark.parametrize("recipe", [None, DelayedScaling(), DelayedScaling(fp8_dpa=True)], ids=["none", "off", "dpa"])
def test_attention(recipe: Any, device: str, variables: Any) -> None:
    """Both products each way, by the backend that explain names, in FP8 where the recipe says so."""
    report, backend = attended(te.DotProductAttention(2, 128), device, recipe)
    low = recipe is not None and recipe.fp8_dpa
    assert operands(report) == ([LOW, LOW, LOW_BACK, LOW_BACK] if low else [HIGH] * 4)
    assert not report.fallbacks and not report.idle
    for row in report.rows:
        assert row.facts.family.startswith(backend) and ("NumPy" in row.facts.family) == (device == "cpu")
        assert ("fp8_dpa" in row.facts.reason) != low and bool(row.facts.accumulation) == (not low or device == "cpu")


def test_attention_that_has_not_run_or_needs_no_gradient(variables: Any) -> None:
    module = te.DotProductAttention(2, 128, name="attend")
    assert precision_report(module).idle == ["attend"]
    report, _ = attended(module, "cpu", DelayedScaling(fp8_dpa=True), grad=False)
    assert operands(report) == [LOW, LOW, ("", ""), ("", "")]
    assert [bool(row.facts.family) for row in report.rows] == [True, True, False, False]


def test_the_last_attention_counts(variables: Any) -> None:
    """Also where its plan was made before that of another one."""
    module = te.DotProductAttention(2, 128)
    for recipe in (None, DelayedScaling(fp8_dpa=True)) * 2:
        assert operands(attended(module, "cpu", recipe)[0])[0] == (HIGH if recipe is None else LOW)
    current = Float8CurrentScaling(fp8_dpa=True, fp8_format=Format.E4M3)
    assert operands(attended(module, "cpu", current)[0]) == [LOW] * 4
    assert precision_report(copy.deepcopy(module)).idle


@pytest.mark.parametrize("backend", ["FusedAttention", "UnfusedDotProductAttention"])
@pytest.mark.parametrize("by", ["variable", "argument"])
def test_backward_of_attention_in_high_precision(by: str, backend: str, variables: Any) -> None:
    if by == "variable":
        variables("NVTE_FP8_DPA_BWD", "0")
    if backend != "FusedAttention":
        variables("NVTE_FUSED_ATTN", "0")
        variables("NVTE_UnfusedDPA_Emulate_FP8", "1")
    module = te.DotProductAttention(2, 128)
    report, _ = attended(module, "cpu", DelayedScaling(fp8_dpa=True), bf16_backward=by == "argument")
    assert operands(report) == [LOW, LOW, HIGH, HIGH]
    assert all(row.facts.as_asked and "activation dtype" in row.facts.reason for row in report.rows[2:])
    assert (module.fp8_state.scale_bwd == 1).all() and (module.fp8_state.scale_fwd != 1).any()


def test_emulated_attention_is_not_as_asked(variables: Any) -> None:
    variables("NVTE_FUSED_ATTN", "0")
    variables("NVTE_UnfusedDPA_Emulate_FP8", "1")
    report, backend = attended(te.DotProductAttention(2, 128), "cpu", DelayedScaling(fp8_dpa=True))
    assert operands(report) == [LOW, LOW, LOW_BACK, LOW_BACK] and len(report.fallbacks) == 4
    assert backend == "UnfusedDotProductAttention" and {row.facts.family for row in report.rows} == {backend}
    assert "4 of 4 not as the recipe asks" in str(report) and "multiplied in bfloat16" in str(report)


class TestOnAPretendedGpu:
    """What the report and dispatch say of a GPU that is not here: both ask the same route."""

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        info = DeviceInfo("Pretended", (9, 0), 100, 1, 1, (13, 0))
        monkeypatch.setattr(devices_of_core, "info", lambda index=0: info)
        monkeypatch.setattr(cuda_device(0), "_kept", {})
        monkeypatch.setitem(precision_report.__globals__, "_place", lambda weight: cuda_device(0))

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_emulation(self, recipe: str) -> None:
        """Blackwell's formats are refused, or emulated where asked; E4M3 with tiles and pieces is cuBLASLt's."""
        p = resolve(rule(recipe))
        for emulate in (False, True):
            module = make("Linear", "cpu", torch.bfloat16)
            found = facts(after(module, "cpu", te.autocast(recipe=rule(recipe), emulate=emulate)))
            for fact in found.values():
                if p.input.scaling in ("delayed", "current", "block"):
                    assert fact.as_asked and fact.family.startswith("cublasLt FP8, a scale a")
                    continue
                assert not fact.as_asked and fact.reason
                assert fact.family == ("cublasLt float32 after dequantizing" if emulate else "refused")

    def test_text(self) -> None:
        module = make("Linear", "cpu", torch.bfloat16)
        report = after(module, "cpu", te.autocast(recipe=MXFP8BlockScaling(), emulate=True))
        assert "3 of 3 not as the recipe asks" in str(report) and "needs compute capability 10.0" in str(report)

    def test_what_travelled_beside_why_it_is_emulated(self) -> None:
        split = Split("column", 2, sequence=True)
        split.came["fprop"] = "float8_e4m3 1x32"
        precision = dataclasses.replace(resolve(MXFP8BlockScaling()), emulate=True)
        spec = LinearSpec(bfloat16, precision, Needs(True, True, False), parallel=split)
        fprop, dgrad, _ = (fact.reason for fact in explain_linear(spec, cuda_device(0)))
        assert "needs compute capability 10.0" in fprop and "over 2 ranks as float8_e4m3 1x32" in fprop
        assert "needs compute capability 10.0" in dgrad and "ranks" not in dgrad


def kind_of_kernel(name: str) -> str:
    """What a GEMM kernel's name says of its operands: cuBLASLt's have q for E4M3, r for E5M2, and their block sizes."""
    if "vec128" in name or "blk128" in name:
        return "block"
    return "tensor" if re.search(r"nvjet_sm\d+_[qr]{2}", name) or "e4m3" in name else "high"


@requires_cuda
@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block", "block f32", "mxfp8", "override"])
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_the_profiler_agrees(kind: str, recipe: str | None) -> None:
    """The kernels of a step, in order, are of the kind that the report says of each GEMM."""
    chosen = RECIPES["current"] if recipe == "override" else rule(recipe)
    if recipe == "override":
        chosen = dataclasses.replace(chosen, backward_override="dequantized")
    module = getattr(te, kind)(512, 1024, params_dtype=torch.bfloat16)
    x = torch.randn(256, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def step() -> None:
        with te.autocast(enabled=recipe is not None, recipe=chosen, emulate=True):
            y = module(x)
        y.sum().backward()
        torch.cuda.synchronize()

    step()  # the first one compiles kernels and chooses algorithms
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    names = [e.name.lower() for e in sorted(profile.events(), key=lambda e: e.time_range.start)]
    ran = [kind_of_kernel(n) for n in names if re.search("gemm|nvjet|cutlass|xmma", n)]
    said = []
    for row in precision_report(module).rows:
        family = row.facts.family
        said.append("tensor" if "a scale a tensor" in family else "block" if "a scale a block" in family else "high")
    if kind == "LayerNormMLP":  # the report goes by layer, a step forward through both and backward from the second
        fprop, dgrad, wgrad = said[0::3], said[1::3], said[2::3]
        said = [*fprop, dgrad[1], wgrad[1], dgrad[0], wgrad[0]]
    if recipe == "mxfp8":  # a product in float32 may take several kernels
        assert set(ran) == set(said) == {"high"}, names
        return
    assert ran == said, names
