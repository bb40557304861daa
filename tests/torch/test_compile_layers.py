"""Layers of one shape that are compiled one by one share what is compiled for the first of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import te_torch as te
from te_core.recipe import CustomRecipe, DelayedScaling, Recipe
from te_torch import state
from te_torch.quantized import QuantizedTorch
from te_torch.tensors import Float8CurrentScalingQuantizer
from tests import recipes
from tests.backends import on_devices
from tests.covering import covering
from tests.world import MODULES, WIDTH, differences, fp8_state, make, region, step, values

BF16 = torch.bfloat16
COUNT = 10  # more than the eight programs that torch makes of one function

LAYERS: dict[str, Any] = {
    **{name: lambda name=name, **kw: make(name, dtype=BF16, **kw) for name in MODULES},
    "TransformerLayer": lambda seed=0, **kw: te.TransformerLayer(
        WIDTH, 80, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, **kw
    ),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def counting() -> CompileCounterWithBackend:
    return CompileCounterWithBackend("aot_eager")


def compiled(layers: list[Any], counter: Any) -> None:
    for layer in layers:
        layer.compile(fullgraph=True, backend=counter)


def used(layer: Any) -> dict[str, torch.Tensor]:
    """The scales from before the last update, with which a forward that is run again quantizes."""
    return {name: t for name, t in layer.named_buffers() if name.endswith("used_fwd")}


def train(layers: list[Any], eager: list[Any], recipe: Any, device: str, steps: int = 3) -> None:
    """Steps of all layers, compared with those of the eager ones."""
    for i in range(steps):
        x = values(32, 1, WIDTH, device=device, dtype=BF16, seed=i) * (1 + 3 * i)
        for number, (layer, other) in enumerate(zip(layers, eager, strict=True)):
            got, wanted = step(layer, x, recipe), step(other, x, recipe)
            if isinstance(layer, te.TransformerLayer):  # a compiler sees the residual's addition by itself
                noise = (got["dx"] - wanted["dx"]).float().norm() / wanted["dx"].float().norm()
                assert noise < 0.1, (i, number)
            else:
                assert not differences(got, wanted), (i, number)
                assert not differences(fp8_state(layer), fp8_state(other)), (i, number)
                assert not differences(used(layer), used(other)), (i, number)


@on_devices
@covering(kind=LAYERS, recipe=["plain", *recipes.KINDS])
def test_layers_share_one_program(kind: str, recipe: str, device: str) -> None:
    """One compile for all of them, in all steps, whatever their scales are."""
    rule = None if recipe == "plain" else recipes.RECIPES[recipe]
    if recipe == "nvfp4":
        rule = recipes.RECIPES["nvfp4 nearest"]  # a compiler draws other numbers
    layers = [LAYERS[kind](seed=i, device=device) for i in range(COUNT)]
    eager = [copy.deepcopy(layer) for layer in layers]
    counter = counting()
    compiled(layers, counter)
    train(layers, eager, rule, device)
    assert counter.frame_count == 1


@on_devices
@torch.no_grad()  # half of the programs
def test_modules_that_differ_do_not_share(device: str) -> None:
    """What a call depends on is guarded: of layers that differ in one thing each has its own program."""
    options: list[dict[str, Any]] = [
        {},
        {"eps": 0.5},
        {"zero_centered_gamma": True},
        {"activation": "relu"},
        {"normalization": "RMSNorm"},
        {"return_layernorm_output": True},
    ]
    layers = [te.LayerNormMLP(WIDTH, 80, device=device, **kw) for kw in options]
    eager = [copy.deepcopy(layer) for layer in layers]
    counter = counting()
    compiled(layers, counter)
    x = values(32, WIDTH, device=device)
    for layer, other in zip(layers, eager, strict=True):
        got, wanted = layer(x), other(x)
        for a, b in zip(*([t] if isinstance(t, torch.Tensor) else t for t in (got, wanted)), strict=True):
            assert torch.equal(a, b)
    assert len(options) <= counter.frame_count <= len(options) + 1  # a float that differs is first tried as a symbol
    layers[0].eps = eager[0].eps = 0.25  # and an attribute that changes is noticed
    eager[0]._calls.clear()
    assert torch.equal(layers[0](x), eager[0](x))


@on_devices
def test_an_inspected_layer_has_its_own(device: str) -> None:
    class Sees:
        request = frozenset(("y",))

        def __init__(self) -> None:
            self.seen = 0

        def inspect(self, rt: Any, point: str, value: Any) -> Any:
            self.seen += 1
            return value

    layers = [make("Linear", device) for _ in range(3)]
    layers[1].inspector = Sees()
    counter = counting()
    compiled(layers, counter)
    with torch.no_grad():
        for layer in layers:
            layer(values(16, WIDTH, device=device))
    assert counter.frame_count == 2


def changes(kind: str) -> list[Recipe]:
    first = DelayedScaling(amax_history_len=4)
    others = {
        "margin": DelayedScaling(amax_history_len=4, margin=1),
        "algorithm": DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
        "longer": DelayedScaling(amax_history_len=6),
        "shorter": DelayedScaling(amax_history_len=2),
    }
    return [first, others[kind], first]


@on_devices
@pytest.mark.filterwarnings("ignore:amax histories of another length")
@pytest.mark.parametrize(
    "kind", ["margin", "shorter", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("algorithm", "longer"))]
)
def test_a_changed_rule_reaches_every_layer(kind: str, device: str) -> None:
    """Also those whose program was not traced for themselves, and also when a program is run that there was before."""
    layers = [make("Linear", device, BF16, seed=i) for i in range(COUNT)]
    eager = [copy.deepcopy(layer) for layer in layers]
    counter = counting()
    compiled(layers, counter)
    for rule in changes(kind):
        train(layers, eager, rule, device)
    assert counter.frame_count <= 4
    own = [layer.fp8_state for layer in layers]
    assert sum(state.by_token(token) in own for token in state.watched) == COUNT


@on_devices
@pytest.mark.filterwarnings("ignore:amax histories of another length")
def test_a_region_inside_takes_a_shorter_history(device: str) -> None:
    layers = [make("Linear", device, BF16, seed=i) for i in range(3)]
    eager = [copy.deepcopy(layer) for layer in layers]
    long, short = DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=2)
    for layer in (*layers, *eager):
        step(layer, values(16, WIDTH, device=device, dtype=BF16, seed=5), long)

    def run(layer: Any, x: torch.Tensor, rule: Any) -> torch.Tensor:
        with te.autocast(recipe=rule):
            return layer(x)

    program = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        layers[0].fp8_state.amax_history_fwd[2:].zero_()
    for i in range(3):
        x = values(16, WIDTH, device=device, dtype=BF16, seed=i)
        assert torch.equal(program(layers[0], x, short), run(eager[0], x, short))
        assert torch.equal(layers[0].fp8_state.scale_fwd, eager[0].fp8_state.scale_fwd)
    with pytest.raises(Exception, match="prepare_state"):
        program(layers[1], x, DelayedScaling(amax_history_len=8))


@on_devices
def test_custom_recipes_share(device: str) -> None:
    """Each module is asked for its own rules; those that get the same ones share."""

    def same(role: Any) -> Any:
        return Float8CurrentScalingQuantizer(torch.float8_e4m3fn)

    asked: list[str] = []

    def rule(role: Any) -> Any:
        asked.append(role.name)
        return same(role)

    layers = [make("LayerNormMLP", device, BF16, seed=i) for i in range(COUNT)]
    eager = [copy.deepcopy(layer) for layer in layers]
    counter = counting()
    compiled(layers, counter)
    train(layers, eager, CustomRecipe(qfactory=rule), device)
    assert counter.frame_count == 1
    assert {layer.name for layer in layers} <= {name.split(".")[0] for name in asked}


@on_devices
@covering(recipe=recipes.KINDS, kind=["Linear", "LayerNormMLP", "LayerNormLinear"])
def test_layers_that_hold_their_weights_quantized(recipe: str, kind: str, device: str) -> None:
    """One program, in which nothing but the layer's two operators is: they take the quantized bytes as they are."""
    rule = recipes.RECIPES["nvfp4 nearest" if recipe == "nvfp4" else recipe]
    with te.quantized_model_init(recipe=rule):
        torch.manual_seed(0)
        layers = [MODULES[kind](params_dtype=BF16, device=device) for _ in range(COUNT)]
    eager = [copy.deepcopy(layer) for layer in layers]
    ours: list[str] = []

    def look(graph: Any, inputs: Any) -> Any:
        ours.extend(str(node.target) for node in graph.graph.nodes if "te_runtime" in str(node.target))
        return make_boxed_func(graph.forward)

    counter = CompileCounterWithBackend(aot_autograd(fw_compiler=look, bw_compiler=look))
    compiled(layers, counter)
    train(layers, eager, rule, device, steps=2)
    assert counter.frame_count == 1
    assert ours == ["te_runtime.forward.default", "te_runtime.backward.default"]


@on_devices
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.full)])
def test_a_compiled_optimizer_quantizes_each_weight_by_its_own_state(recipe: str, backend: str, device: str) -> None:
    """One step of SGD over the weights of two layers, whose scales differ; what it saw goes to each one's history."""
    rule = recipes.RECIPES[recipe]
    with te.quantized_model_init(recipe=rule):
        torch.manual_seed(0)
        layers = [MODULES[kind](params_dtype=BF16, device=device) for kind in ("Linear", "LayerNormMLP")]
    eager = [copy.deepcopy(layer) for layer in layers]
    held = [
        [p for layer in side for p in layer.parameters() if isinstance(p, QuantizedTorch)] for side in (layers, eager)
    ]
    assert len(held[0]) == 3
    train(layers, eager, rule, device, steps=1)  # from here on scales follow maxima
    for side in held:
        for number, weight in enumerate(side):
            if recipe == "delayed":
                weight._quantizer.scale.mul_(2.0**-number)
    counter = CompileCounterWithBackend(backend)
    optimizers = [torch.optim.SGD(side, lr=0.5) for side in held]
    steps = [torch.compile(optimizers[0].step, backend=counter), optimizers[1].step]
    for i in range(3):
        for side, run in zip(held, steps, strict=True):
            for number, weight in enumerate(side):
                weight.grad = values(*weight.shape, device=device, dtype=BF16, seed=i) * (1 + number)
            run()
        for one, other in zip(*held, strict=True):
            assert torch.equal(one.dequantize(), other.dequantize()) and torch.equal(one._scale_inv, other._scale_inv)
        for layer, other in zip(layers, eager, strict=True):
            assert not differences(fp8_state(layer), fp8_state(other))
            if recipe == "delayed":
                layer.fp8_state.amax_history_fwd.zero_(), other.fp8_state.amax_history_fwd.zero_()
    assert counter.frame_count == 1
    train(layers, eager, rule, device, steps=1)


@pytest.mark.more
@pytest.mark.parametrize(
    "recipe", ["delayed", *(pytest.param(k, marks=pytest.mark.full) for k in recipes.KINDS if k != "delayed")]
)
def test_held_weights_of_attention_and_experts(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The projections of a TransformerLayer and the weights of groups are read as they are, too."""
    rule = recipes.RECIPES["nvfp4 nearest" if recipe == "nvfp4" else recipe]
    options: Any = {"params_dtype": BF16, "device": "cpu"}
    with te.quantized_model_init(recipe=rule):
        torch.manual_seed(0)
        layer = te.TransformerLayer(
            64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, **options
        )
        experts = te.GroupedLinear(2, 64, 64, **options)
    seen: list[str] = []
    for storage in {type(p) for p in (*layer.parameters(), *experts.parameters()) if isinstance(p, QuantizedTorch)}:
        real = storage._dense_values

        def noted(self: Any, *args: Any, real: Any = real) -> Any:
            seen.append(type(self).__name__)
            return real(self, *args)

        monkeypatch.setattr(storage, "_dense_values", noted)
    eager = [copy.deepcopy(module) for module in (layer, experts)]
    compiled([layer, experts], counting())
    for modules in ([layer, experts], eager):
        for i in range(3):
            x = values(32, 64, dtype=BF16)
            with region(rule):
                y = modules[1](modules[0](x.view(32, 1, 64)).view(32, 64), [16, 16])
            y.sum().backward()
            if i == 0:
                seen.clear()  # torch 2.11 prints tensors, with their values, as it compiles
        if modules[0] is layer:
            assert not seen
            wanted = y.detach()
    assert torch.equal(wanted, y)
    assert experts.weight0.detach().sum().isfinite() and seen  # what has no way of its own does


# ---------------------------------------------------------------------------- what other modules see of it


def test_modules_that_did_not_run_have_no_entries() -> None:
    """A state made for a module that might run the same program shows nowhere until it does."""
    layers = [make("Linear", dtype=BF16, seed=i) for i in range(3)]
    layers[0].compile(fullgraph=True, backend="aot_eager")
    step(layers[0], values(16, WIDTH, dtype=BF16), "delayed")
    other = layers[1]
    assert not fp8_entries(other) and fp8_entries(layers[0]) == 4
    assert not other.fp8_initialized and other.get_fp8_meta_tensors() is None and "fp8_state" not in repr(other)
    other.load_state_dict(copy.deepcopy(other.state_dict()))
    assert not fp8_entries(other)
    other.load_state_dict(layers[0].state_dict())
    assert fp8_entries(other) == 4 and not differences(fp8_state(other), fp8_state(layers[0]))
    fresh = make("Linear", dtype=BF16, seed=2)
    step(layers[2], values(16, WIDTH, dtype=BF16), "delayed"), step(fresh, values(16, WIDTH, dtype=BF16), "delayed")
    assert fp8_entries(layers[2]) == 4 and not differences(fp8_state(layers[2]), fp8_state(fresh))


def fp8_entries(module: torch.nn.Module) -> int:
    return sum("fp8_state" in name for name in module.state_dict())


def test_another_models_history_is_left_alone() -> None:
    """A copy that runs eagerly with a longer history keeps it while the compiled one is traced with a shorter one."""
    layer = make("Linear", dtype=BF16)
    other, eager = copy.deepcopy(layer), copy.deepcopy(layer)
    x = values(16, WIDTH, dtype=BF16)
    step(other, x, DelayedScaling(amax_history_len=6))
    before = fp8_state(other)
    layer.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        step(layer, x, "delayed"), step(eager, x, "delayed")
    assert not differences(fp8_state(layer), fp8_state(eager)) and not differences(fp8_state(other), before)


@on_devices
def test_copies_of_compiled_modules(device: str) -> None:
    """A copy goes its own way, eager or compiled, and takes the program of the one that it is a copy of."""
    eager, counter = make("LayerNormMLP", device, BF16), counting()
    module = copy.deepcopy(eager)
    module.compile(fullgraph=True, backend=counter)
    train([module], [eager], "delayed", device, steps=1)
    again, other = copy.deepcopy(module), copy.deepcopy(eager)
    train([again], [other], "delayed", device, steps=2)  # it runs eagerly, and leaves the other alone
    assert not differences(fp8_state(module), fp8_state(eager))
    again.compile(fullgraph=True, backend=counter)
    train([again, module], [other, eager], "delayed", device, steps=2)
    assert counter.frame_count == 1


def test_deep_copies_and_moved_memory() -> None:
    """A state is found by its tensors wherever they went."""
    layer = make("Linear", dtype=BF16)
    eager = copy.deepcopy(layer)
    layer.compile(fullgraph=True, backend="aot_eager")
    x = values(16, WIDTH, dtype=BF16)
    step(layer, x, "delayed"), step(eager, x, "delayed")
    layer.fp8_state.__getstate__()  # as torch's pickler asks before it moves the memory
    for buffer in layer.fp8_state.buffers():
        buffer.share_memory_()
    again = copy.deepcopy(layer)
    for i in range(2):
        for module in (layer, again, eager):
            step(module, (i + 2) * x, "delayed")
    assert not differences(fp8_state(layer), fp8_state(eager)) and not differences(fp8_state(again), fp8_state(eager))
