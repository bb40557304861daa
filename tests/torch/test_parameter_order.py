"""The order of parameters: as documented and in the golden files, since optimizer states number parameters by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import Float8CurrentScaling
from tests.backends import requires_cuda
from tests.golden import load, tree
from tests.torch.test_golden import make as make_module
from tests.torch.test_golden import make_layer

NORM = "layer_norm_weight layer_norm_bias"
QKV = "query_weight key_weight value_weight query_bias key_bias value_bias"
MLP = f"{NORM} fc1_weight fc1_bias fc2_weight fc2_bias"


def under(prefix: str, names: str) -> str:
    return " ".join(f"{prefix}.{name}" for name in names.split())


#: A module's constructor, and its parameters as documented.
ORDERS: dict[str, tuple[Any, str]] = {
    "linear": (lambda **kw: te.Linear(32, 48, **kw), "weight bias"),
    "linear without bias": (lambda **kw: te.Linear(32, 48, bias=False, **kw), "weight"),
    "linear split": (lambda **kw: te.Linear(32, 48, parameters_split=("query", "key_", "value"), **kw), QKV),
    "linear split by sizes": (
        lambda **kw: te.Linear(32, 48, parameters_split={"b": 32, "a": 16}, bias=False, **kw),
        "b_weight a_weight",
    ),
    "layernorm linear": (lambda **kw: te.LayerNormLinear(32, 48, **kw), f"{NORM} weight bias"),
    "rmsnorm linear": (
        lambda **kw: te.LayerNormLinear(32, 48, normalization="RMSNorm", **kw),
        "layer_norm_weight weight bias",
    ),
    "layernorm linear split": (
        lambda **kw: te.LayerNormLinear(32, 48, parameters_split=["query", "key", "value"], **kw),
        f"{NORM} {QKV}",
    ),
    "mlp": (lambda **kw: te.LayerNormMLP(32, 48, **kw), MLP),
    "gated mlp": (lambda **kw: te.LayerNormMLP(32, 48, activation="swiglu", **kw), MLP),
    "mlp with rmsnorm": (
        lambda **kw: te.LayerNormMLP(32, 48, normalization="RMSNorm", **kw),
        MLP.replace("layer_norm_bias ", ""),
    ),
    "mlp without bias": (lambda **kw: te.LayerNormMLP(32, 48, bias=False, **kw), f"{NORM} fc1_weight fc2_weight"),
    "grouped": (lambda **kw: te.GroupedLinear(3, 32, 48, **kw), "weight0 bias0 weight1 bias1 weight2 bias2"),
    "grouped without bias": (lambda **kw: te.GroupedLinear(2, 32, 48, bias=False, **kw), "weight0 weight1"),
    "layernorm": (lambda **kw: te.LayerNorm(32, device=kw["device"]), "weight bias"),
    "rmsnorm": (lambda **kw: te.RMSNorm(32, device=kw["device"]), "weight"),
    "attention": (
        lambda **kw: te.MultiheadAttention(32, 2, **kw),
        f"{under('qkv', QKV)} {under('proj', 'weight bias')}",
    ),
    "attention with everything": (
        lambda **kw: te.MultiheadAttention(
            32, 2, input_layernorm=True, fuse_qkv_params=True, qk_norm_type="LayerNorm", softmax_type="learnable", **kw
        ),
        f"{under('q_norm', 'weight bias')} {under('k_norm', 'weight bias')} "
        f"{under('layernorm_qkv', NORM + ' weight bias')} core_attention.softmax_offset {under('proj', 'weight bias')}",
    ),
    "cross attention": (
        lambda **kw: te.MultiheadAttention(32, 2, attention_type="cross", **kw),
        f"{under('query_layer', 'query_weight query_bias')} "
        f"{under('key_value', 'key_weight value_weight key_bias value_bias')} {under('proj', 'weight bias')}",
    ),
    "decoder": (
        lambda **kw: te.TransformerLayer(32, 48, 2, layer_type="decoder", output_layernorm=True, **kw),
        f"{under('self_attention.qkv', QKV)} {under('self_attention.proj', 'weight bias')} "
        f"{under('inter_attention.layernorm_query', NORM + ' query_weight query_bias')} "
        f"{under('inter_attention.key_value', 'key_weight value_weight key_bias value_bias')} "
        f"{under('inter_attention.proj', 'weight bias')} {under('layernorm_mlp', MLP)} layernorm.weight layernorm.bias",
    ),
}
orders = pytest.mark.parametrize("name", ORDERS)


@orders
def test_parameters_stand_in_the_documented_order(name: str) -> None:
    make, wanted = ORDERS[name]
    module = make(device="cpu")
    assert [n for n, _ in module.named_parameters()] == wanted.split() == list(module.state_dict())
    waiting = make(device="meta")
    for part in waiting.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert [n for n, _ in waiting.named_parameters()] == wanted.split()


@pytest.mark.parametrize("make", ["linear", "layernorm linear", "mlp", "grouped"])
def test_quantized_parameters_stand_where_plain_ones_do(make: str) -> None:
    build, wanted = ORDERS[make]
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        module = build(device="cpu")
    assert [n for n, _ in module.to("cpu", torch.bfloat16).named_parameters()] == wanted.split()


def golden_parameters(file: str) -> dict[str, list[str]]:
    """The parameters of each golden case, in the file's order."""
    found: dict[str, list[str]] = {}
    for key in load(file):
        case, recipe, kind, *rest = key.split("/")
        if recipe == "high" and kind == "param":
            found.setdefault(case, []).append(rest[0])
    return found


GOLDEN = [(file, case) for file in ("modules", "layers") for case in golden_parameters(file)]


def golden_module(file: str, case: str, device: str) -> torch.nn.Module:
    """A golden case's module as its constructor fills it."""
    if file == "layers":
        return make_layer(case, device)
    return make_module(case, load(file)[f"{case}/high/x"].shape[-1], tree(file, f"{case}/high/param/"), device)


@pytest.mark.parametrize(("file", "case"), GOLDEN)
def test_parameters_stand_in_the_order_of_the_golden_files(file: str, case: str) -> None:
    module = golden_module(file, case, "cpu")
    assert [n for n, _ in module.named_parameters()] == golden_parameters(file)[case]


@pytest.mark.parametrize("name", [n for n in ORDERS if n not in ("layernorm", "rmsnorm")])
def test_weights_are_drawn_in_their_order(name: str) -> None:
    make, _ = ORDERS[name]
    drawn: list[torch.Tensor] = []

    def init(weight: torch.Tensor) -> None:
        drawn.append(weight)
        weight.data.fill_(len(drawn))

    two = "mlp" in name or "attention" in name or name == "decoder"  # these have an initialiser of their last weight
    module = make(device="cpu", init_method=init, **({"output_layer_init_method": init} if two else {}))
    weights = [p for p in module.parameters() if p.ndim == 2]
    assert [int(p.flatten()[0]) for p in weights] == list(range(1, len(drawn) + 1))


@requires_cuda
@pytest.mark.parametrize(("file", "case"), GOLDEN)
def test_seeded_weights_are_the_golden_ones(file: str, case: str) -> None:
    """The golden files' modules were made after torch.manual_seed(1): their weights are the first draws."""
    torch.manual_seed(1)
    module = golden_module(file, case, "cuda")
    for name, p in module.named_parameters():
        assert torch.equal(p.detach().cpu(), load(file)[f"{case}/high/param/{name}"]), name
