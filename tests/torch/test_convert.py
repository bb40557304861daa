"""`te_torch.convert`: the converted model computes what it did, with the same parameters; the rest is left alone."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from te_torch.base.quantized_init import quantized_model_init
from te_torch.tools.convert import convert
from tests.backends import on_devices
from tests.tolerances import DB, snr_db
from tests.world import NO_REGION, on, randomise, step, values


class Block(nn.Module):
    """All that is converted: single layers, both fused patterns, a tied weight, a layer used twice."""

    def __init__(self, bias: bool = True, act: type[nn.Module] = nn.SiLU, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(48, eps=1e-4)
        self.qkv = nn.Sequential(norm(48, eps=1e-3), nn.Linear(48, 80, bias=bias))
        self.down = nn.Linear(80, 48, bias=bias)
        self.mlp = nn.Sequential(norm(48, eps=1e-3), nn.Linear(48, 72, bias=bias), act(), nn.Linear(72, 48, bias=bias))
        self.again = self.down
        self.tied = nn.Linear(80, 48)
        self.tied.weight = self.down.weight
        self.planes = norm((4, 12), eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.qkv(self.norm(x)))
        x = x + self.mlp(x)
        x = x + self.tied(self.qkv(x)) + self.again(self.qkv(x))
        return self.planes(x.unflatten(-1, (4, 12))).flatten(-2)


def gelu() -> nn.Module:
    return nn.GELU(approximate="tanh")


BLOCKS: dict[str, Callable[[], Block]] = {
    "silu": Block,
    "relu": lambda: Block(act=lambda: nn.ReLU(inplace=True)),
    "gelu": lambda: Block(act=gelu),
    "rms": lambda: Block(norm=nn.RMSNorm),
    "no bias": lambda: Block(bias=False),
}


def made(kind: str, device: str, dtype: torch.dtype) -> Block:
    torch.manual_seed(0)
    block = BLOCKS[kind]().to(device, dtype)
    randomise(block)
    return block


def became(report: Any) -> dict[str, str]:
    return {row.name: row.became for row in report.rows}


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
def test_computes_the_same(kind: str, dtype: torch.dtype, device: str) -> None:
    """Output, input gradient and every parameter's, by their new names.

    In bfloat16 a gradient has been rounded at every step on its way, by torch and by us: ours may be no further from
    the float32 model than twice torch's distance (6 dB).
    """
    block = made(kind, device, dtype)
    x = values(6, 48, device=device, dtype=dtype)
    exact = step(made(kind, device, torch.float32), x.float(), NO_REGION)
    before = step(block, x, NO_REGION)
    report = convert(block)
    after = step(block, x, NO_REGION)
    assert not any(isinstance(m, (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Sequential)) for m in block.modules())
    assert {report.keys.get(name, name) for name in before} == set(after)
    assert snr_db(after["y"], before["y"]) > DB["fp32" if dtype == torch.float32 else "bf16"]
    for name, value in before.items():
        new = after[report.keys.get(name, name)]
        on(device, new)
        assert new.dtype == dtype
        if dtype == torch.float32:
            assert snr_db(new, value) > DB["fp32"], name
        else:
            assert snr_db(new, exact[name]) > snr_db(value, exact[name]) - 6, name


@on_devices
def test_what_became_of_it(device: str) -> None:
    block = made("silu", device, torch.bfloat16)
    block.down.weight.requires_grad_(False)
    block.qkv.eval()
    parameters = dict(block.named_parameters())
    state = block.state_dict()
    report = convert(block)
    assert became(report) == {
        "norm": "LayerNorm",
        "qkv": "LayerNormLinear",
        "down": "Linear",
        "mlp": "LayerNormMLP",
        "again": "Linear",
        "tied": "Linear",
        "planes": "LayerNorm",
    }
    assert report.kept == [] and block.again is block.down and block.tied.weight is block.down.weight
    new = dict(block.named_parameters())
    assert {report.keys.get(name, name) for name in parameters} == set(new)
    for name, parameter in parameters.items():
        assert new[report.keys.get(name, name)] is parameter
    assert not block.down.weight.requires_grad and block.down.training and not block.qkv.training
    new_names = {"qkv.0": "layer_norm_", "qkv.1": "", "mlp.0": "layer_norm_", "mlp.1": "fc1_", "mlp.3": "fc2_"}
    assert report.keys == {
        f"{old}.{kind}": f"{old[:3]}.{now}{kind}" for old, now in new_names.items() for kind in ("weight", "bias")
    }
    assert block.qkv.eps == block.mlp.eps == 1e-3 and block.norm.eps == 1e-4
    block.load_state_dict({report.keys.get(k, k): v for k, v in state.items()}, strict=True)
    back = report.as_before(te.plain_state_dict(block))
    assert back.keys() == state.keys() and all(torch.equal(back[name], t) for name, t in state.items())


def test_dry_run_changes_nothing() -> None:
    block = made("silu", "cpu", torch.float32)
    before = list(block.modules())
    dry = convert(block, dry_run=True)
    assert all(a is b for a, b in zip(before, block.modules(), strict=True))
    assert "would be converted" in str(dry)
    real = convert(block)
    assert real.rows == dry.rows and real.keys == dry.keys
    assert convert(block).rows == [], "nothing is left to convert"


class Sub(nn.Linear):
    pass


def hooked(module: nn.Module, kind: str) -> nn.Module:
    getattr(module, f"register_{kind}")(lambda *args: None)
    return module


def patched(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


def with_buffer(module: nn.Module) -> nn.Module:
    module.register_buffer("mask", torch.ones(4))
    return module


def reshaped(module: nn.Linear, bias: int) -> nn.Linear:
    module.bias = nn.Parameter(torch.zeros(bias))
    return module


def half_bias() -> nn.Linear:
    module = nn.Linear(4, 4)
    module.bias.data = module.bias.data.half()
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: Sub(4, 4), "a subclass of nn.Linear"),
    "lazy": (lambda: nn.LazyLinear(4), "a subclass of nn.Linear"),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "parametrized"),
    "old weight norm": (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), "forward_pre_hooks"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), "forward_pre_hooks"),
    **{
        kind: (lambda kind=kind: hooked(nn.Linear(4, 4), kind), f"it has {name}")
        for kind, name in {
            "forward_hook": "forward_hooks",
            "forward_pre_hook": "forward_pre_hooks",
            "full_backward_hook": "backward_hooks",
            "full_backward_pre_hook": "backward_pre_hooks",
            "state_dict_post_hook": "state_dict_hooks",
            "load_state_dict_pre_hook": "load_state_dict_pre_hooks",
        }.items()
    },
    "patched": (lambda: patched(nn.Linear(4, 4)), "replaced on the instance"),
    "buffer": (lambda: with_buffer(nn.LayerNorm(4)), "members that LayerNorm does not know: mask"),
    "bias of another shape": (lambda: reshaped(nn.Linear(4, 4), 1), "shape of out_features, in_features = (4, 4)"),
    "mixed": (half_bias, "differ in dtype"),
    "double": (lambda: nn.Linear(4, 4, dtype=torch.float64), "float64"),
    "no weight": (lambda: nn.LayerNorm(4, elementwise_affine=False), "elementwise_affine=False"),
    "rms no weight": (lambda: nn.RMSNorm(4, elementwise_affine=False), "elementwise_affine=False"),
    "norm without bias": (lambda: nn.LayerNorm(4, bias=False), "bias=False"),
    "eps none": (lambda: nn.RMSNorm(4), "eps=None"),
    "long rows": (lambda: nn.LayerNorm(65537), "65536"),
    "embedding": (lambda: nn.Embedding(5, 4), "nothing here replaces it"),
    "attention": (lambda: nn.MultiheadAttention(4, 1), "nothing here replaces it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_left_alone(case: str) -> None:
    """By name, with the reason, and the module stays the same object."""
    make, why = REFUSED[case]
    model = nn.ModuleDict({"odd": make(), "plain": nn.Linear(4, 4)})
    odd = model["odd"]
    report = convert(model)
    assert model["odd"] is odd and isinstance(model["plain"], te.Linear)
    row = report.kept[0]
    assert row.name == "odd" and why in row.note and row.became == ""
    assert "odd" in str(report) and row.note in str(report)


def seq(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


NOT_FUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "erf gelu": (lambda: seq(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), "no activation equal"),
    "tanh": (lambda: seq(nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), "no activation equal"),
    "width": (lambda: seq(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5)), "widths are hidden, ffn"),
    "one bias": (
        lambda: seq(nn.LayerNorm(4), nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4)),
        "two biases or none",
    ),
    "planes": (lambda: seq(nn.LayerNorm((2, 4)), nn.Linear(4, 8)), "the norm is over (2, 4)"),
    "hook": (lambda: hooked(seq(nn.LayerNorm(4), nn.Linear(4, 8)), "forward_hook"), "it has forward_hooks"),
    "hook on the activation": (
        lambda: seq(nn.LayerNorm(4), nn.Linear(4, 8), hooked(nn.ReLU(), "forward_hook"), nn.Linear(8, 4)),
        "2: it has forward_hooks",
    ),
    "hook inside": (lambda: seq(nn.LayerNorm(4), hooked(nn.Linear(4, 8), "forward_hook")), "1: it has forward_hooks"),
    "dtypes": (lambda: seq(nn.LayerNorm(4).half(), nn.Linear(4, 8)), "differ in dtype"),
}


@pytest.mark.parametrize("case", NOT_FUSED)
def test_not_fused(case: str) -> None:
    """The members are converted one by one where they can be."""
    make, why = NOT_FUSED[case]
    model = nn.ModuleDict({"block": make()})
    block = model["block"]
    report = convert(model)
    assert model["block"] is block and type(block[0]) is te.LayerNorm
    assert why in report.kept[0].note and report.kept[0].name == "block"
    assert isinstance(block[1], nn.Linear if case == "hook inside" else te.Linear)
    assert report.keys == {}


OTHER_MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "a longer sequence": (
        lambda: nn.ModuleDict({"net": seq(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.0))}),
        {"net.0": "LayerNorm", "net.1": "Linear"},
    ),
    "names in a sequence": (
        lambda: nn.ModuleDict({"net": nn.Sequential(OrderedDict(ln=nn.LayerNorm(8), proj=nn.Linear(8, 4)))}),
        {"net": "LayerNormLinear"},
    ),
    "the model itself": (lambda: nn.Linear(8, 8), {"(model)": ""}),
    "the model itself, fused": (
        lambda: seq(nn.LayerNorm(8), nn.Linear(8, 4)),
        {"(model)": "", "0": "LayerNorm", "1": "Linear"},
    ),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_what_became_of_other_models(name: str) -> None:
    """Sequences keep their places, and a model has no place of its own that another one could take."""
    make, wanted = OTHER_MODELS[name]
    model, x = make(), values(3, 8)

    def run() -> torch.Tensor:
        return (model["net"] if isinstance(model, nn.ModuleDict) else model)(x)

    before = run()
    report = convert(model)
    assert became(report) == wanted and snr_db(run(), before) > DB["fp32"]
    assert "(model)" not in wanted or "no place" in report.rows[0].note
    if name == "names in a sequence":
        assert report.keys["net.ln.weight"] == "net.layer_norm_weight"
        assert report.keys["net.proj.bias"] == "net.bias"


def test_filter() -> None:
    """Asked by name and module; a no to a fusion leaves its members to be asked."""
    asked: dict[str, nn.Module] = {}
    block = made("silu", "cpu", torch.float32)

    def only_linear(name: str, module: nn.Module) -> bool:
        asked[name] = module
        return isinstance(module, nn.Linear) and name != "tied"

    report = convert(block, filter=only_linear)
    names = "norm qkv qkv.0 qkv.1 down mlp mlp.0 mlp.1 mlp.3 again tied planes"
    assert set(asked) == set(names.split())
    assert {row.name for row in report.converted} == {"qkv.1", "down", "mlp.1", "mlp.3", "again"}
    assert all(row.note == "the filter said no" for row in report.kept)
    assert block.tied.weight is block.down.weight and type(block.tied) is nn.Linear


def test_the_model_itself() -> None:
    layer = nn.Linear(4, 4)
    (row,) = convert(layer).rows
    assert row.name == "(model)" and "no place" in row.note
    fusable = seq(nn.LayerNorm(4), nn.Linear(4, 4))
    assert became(convert(fusable)) == {"(model)": "", "0": "LayerNorm", "1": "Linear"}
    assert isinstance(fusable[1], te.Linear)


def test_fused_torch_layers_are_left_alone() -> None:
    """Their fast path would take the weights and skip the module, and with it the region."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    report = convert(nn.ModuleDict({"layer": layer}))
    assert report.converted == []
    assert {row.name for row in report.kept if "may never call it" in row.note} >= {"layer.linear1", "layer.norm2"}
    assert type(layer.linear1) is nn.Linear


def test_marks_and_shared_parents() -> None:
    """A user's attributes go along; a parent that is met twice is converted once, and both names' keys are told."""
    layer = nn.Linear(4, 4)
    layer.residual_scale = 0.5  # type: ignore[assignment]
    shared = nn.ModuleDict({"inner": seq(nn.LayerNorm(4), nn.Linear(4, 4))})
    model = nn.ModuleDict({"layer": layer, "a": shared, "b": shared})
    report = convert(model)
    assert model["layer"].residual_scale == 0.5 and model["layer"].name == "layer"
    assert model["a"] is model["b"] and isinstance(shared["inner"], te.LayerNormLinear)
    assert report.keys["a.inner.1.weight"] == "a.inner.weight" and report.keys["b.inner.1.weight"] == "b.inner.weight"
    assert set(report.keys.values()) <= set(model.state_dict())


@pytest.mark.parametrize("held", [False, True])
def test_meta_models(held: bool) -> None:
    """A model without memory is converted, and gets it afterwards; its weights are quantized then."""
    with torch.device("meta"):
        model = nn.ModuleDict({"l": nn.Linear(32, 32), "s": seq(nn.LayerNorm(32), nn.Linear(32, 32, bias=False))})
    with quantized_model_init(enabled=held, recipe=Float8CurrentScaling()):
        convert(model)
    if not held:
        model.to_empty(device="cpu")
    for module in model.values():
        module.reset_parameters()
        y = module(values(2, 32).to(module.weight.device))
        assert y.shape == (2, 32) and y.isfinite().all() and isinstance(module.weight, te.Float8Tensor) is held


def test_recipe_in_the_report() -> None:
    """What the recipe means, for the model and for each layer: what is stored wider than it is."""

    def notes(recipe: Any) -> tuple[dict[str, str], str]:
        model = nn.ModuleDict(
            {"odd": nn.Linear(100, 50), "whole": nn.Linear(64, 32), "even": nn.Linear(48, 32), "norm": nn.LayerNorm(4)}
        )
        report = convert(model, recipe=recipe, dry_run=True)
        return {row.name: row.note for row in report.rows}, str(report)

    layers, text = notes(DelayedScaling())
    assert layers["odd"] == "50 x 100 stored as 64 x 112, filled with zeros"
    assert layers["whole"] == layers["even"] == "" and layers["norm"] == "in high precision"
    assert "input float8_e4m3 per tensor (delayed)" in text and "gradient float8_e5m2 per tensor (delayed)" in text
    layers, text = notes(MXFP8BlockScaling())
    assert layers["odd"] == "50 x 100 stored as 64 x 128, filled with zeros"
    assert layers["even"] == "32 x 48 stored as 32 x 64, filled with zeros"
    if not torch.cuda.is_available():
        assert "on this machine: no GPU; the CPU backend emulates it" in text
    with pytest.raises(ArgumentError, match="recipe='mxfp8'"):
        convert(nn.ModuleDict(), recipe="mxfp8")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ what the report says


def test_a_report_of_nothing_says_so() -> None:
    embedding = nn.ModuleDict({"words": nn.Embedding(4, 4)})
    text = str(convert(nn.ModuleDict({"act": nn.ReLU()})))
    assert text == "nothing to convert: the model holds no nn.Linear, nn.LayerNorm or nn.RMSNorm"
    assert str(convert(embedding)).endswith("nothing was converted, 1 left as it is")
    assert str(convert(embedding, dry_run=True)).endswith("nothing would be converted, 1 left as it is")
    block = made("silu", "cpu", torch.float32)
    refused = convert(block, filter=lambda name, module: False)
    assert "nothing was converted, " in str(refused) and not refused.converted
    convert(block)
    assert str(convert(block)).endswith("nn.RMSNorm; 6 of its layers are te_torch's already")


def test_equal_layers_are_printed_once() -> None:
    model = nn.Sequential(*(nn.ModuleDict({"q": nn.Linear(8, 8), "act": nn.PReLU()}) for _ in range(12)))
    report = convert(model)
    lines = str(report).splitlines()
    assert lines[2].split() == ["{0..11}.q", "x12", "Linear", "Linear"] and len(lines) == 5
    assert lines[3].startswith("{0..11}.act x12") and len(report.rows) == 24


def test_what_comes_back_is_a_report() -> None:
    """`model = convert(model)` is noticed at the first use of what is no model."""
    with pytest.raises(AttributeError, match="changes the model in place.*go on with the model"):
        convert(made("silu", "cpu", torch.float32)).parameters()
    report = convert(made("silu", "cpu", torch.float32))
    assert copy.deepcopy(report) == report and not hasattr(report, "train")
    with pytest.raises(ArgumentError, match="a torch.nn.Module"):
        convert(report)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- weights held quantized


class Tied(nn.Module):
    """A projection that shares its weight with an embedding, and two that share one with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 48)
        self.block = Block()
        self.head = nn.Linear(48, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


def test_trained_values_bring_their_scale() -> None:
    """Of small values little is left at scale 1, with which a new module's weights are cast by delayed scaling."""
    model = nn.Sequential(nn.Linear(64, 64))
    nn.init.normal_(model[0].weight, std=1e-3)
    old = model[0].weight.detach().clone()
    with quantized_model_init(recipe=DelayedScaling()):
        convert(model)
    assert snr_db(model[0].weight.dequantize(), old) > DB["fp8 gemm"]


@on_devices
@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), MXFP8BlockScaling()], ids=type)
def test_inside_quantized_model_init(recipe: Any, device: str) -> None:
    """GEMM weights are held as quantized tensors of the old values, the rest as it is; what is tied stays tied."""
    torch.manual_seed(0)
    model = Tied().to(device)
    randomise(model)
    old = {name: p.detach().clone() for name, p in model.state_dict().items()}
    model.block.mlp[1].weight.requires_grad_(False)
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        dry = convert(model, dry_run=True, include_head=True)
        report = convert(model, include_head=True)
    assert dry.rows == report.rows
    quantized = {n for n, p in model.named_parameters() if isinstance(p, te.QuantizedTensor)}
    assert quantized == {"block.qkv.weight", "block.down.weight", "block.mlp.fc1_weight", "block.mlp.fc2_weight"}
    assert model.block.down is model.block.again and model.block.tied.weight is model.block.down.weight
    assert model.head.weight is model.words.weight and not model.head.primary_weights_in_fp8
    notes = {row.name: row.note for row in report.rows}
    assert "shared with words" in notes["head"] and "in high precision" in notes["head"]
    assert "held as float8_e4m3" in notes["block.down"] and "held" not in notes["block.norm"]
    assert not model.block.mlp.fc1_weight.requires_grad and model.block.mlp.fc2_weight.requires_grad
    for name in quantized:
        before = next(n for n in old if report.keys.get(n, n) == name)
        weight = model.get_parameter(name)
        assert snr_db(weight.dequantize(), old[before]) > DB["fp8 gemm"]
        assert torch.equal(weight.get_high_precision_init_val(), old[before].cpu())
    x = values(6, 48, device=device)
    with te.autocast(recipe=recipe, emulate=True):
        y = model(x)
    y.sum().backward()
    assert model.block.down.weight.grad is not None and y.isfinite().all()
    plain = Tied().to(device)
    plain.load_state_dict(old)
    convert(plain, include_head=True)
    with te.autocast(recipe=recipe, emulate=True):
        # Delayed scaling of a plain weight begins with a scale of 1, not of its maximum.
        assert snr_db(y, plain(x)) > 20 if recipe.delayed() else torch.equal(y, plain(x))


class Language(nn.Module):
    """A model with a head by one of the signs of one; its other layers have none."""

    def __init__(self, sign: str) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(40, 32), nn.Embedding(32, 32)
        self.inner = nn.Linear(32, 32)  # as wide as there are places
        self.last = seq(nn.LayerNorm(32), nn.Linear(32, 40 if sign in ("as many rows", "shared") else 48, bias=False))
        if sign == "its name":
            self.last = nn.ModuleDict({"lm_head": nn.Linear(32, 48)})
        elif sign == "shared":
            self.last[1].weight = self.words.weight
        elif sign == "said":
            self.get_output_embeddings = lambda: self.inner


@pytest.mark.parametrize("sign", ["as many rows", "its name", "shared", "said", "none"])
def test_the_head_is_left_alone(sign: str) -> None:
    """And the norm before it is converted by itself; who asks for the head has it."""
    model = Language(sign)
    report = convert(model)
    head = {"its name": "last.lm_head", "said": "inner", "none": ""}.get(sign, "last.1")
    kinds = {name: type(m) for name, m in model.named_modules()}
    assert [row.name for row in report.kept if row.note.startswith("the head")] == [head] * (sign != "none")
    assert sign == "none" or kinds[head] is nn.Linear
    linears = {name for name, kind in kinds.items() if issubclass(kind, nn.Linear)}
    assert linears == ({head} if head else set()) and (head != "last.1" or kinds["last.0"] is te.LayerNorm)
    model = Language(sign)
    report = convert(model, include_head=True)
    assert not any(isinstance(m, nn.Linear) for m in model.modules())


def test_quantized_and_reported_in_two_recipes() -> None:
    with quantized_model_init(recipe=Float8CurrentScaling()):
        with pytest.raises(ArgumentError, match="quantized_model_init"):
            convert(made("silu", "cpu", torch.float32), MXFP8BlockScaling())
        convert(made("silu", "cpu", torch.float32), Float8CurrentScaling())


def test_a_quantizer_that_fails_leaves_the_model_as_it_was() -> None:
    def factory(role: Any) -> Any:
        if role.name == "down":
            raise KeyError("no")
        return te.IdentityQuantizer()

    block = made("silu", "cpu", torch.float32)
    before = list(block.modules())
    with pytest.raises(KeyError), quantized_model_init(recipe=CustomRecipe(qfactory=factory)):
        convert(block)
    assert all(a is b for a, b in zip(before, block.modules(), strict=True))
