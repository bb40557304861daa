"""How errors, warnings, reports and `print(model)` name a module: by its path in the model that runs, and its sizes."""

from __future__ import annotations

import contextlib
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_core import errors
from te_core.errors import ArgumentError
from te_core.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from te_torch.module_names import path_of


class Block(torch.nn.Module):
    def __init__(self, width: int = 32, **options: Any) -> None:
        super().__init__()
        self.mlp = te.LayerNormMLP(width, 64, device="cpu", **options)
        self.proj = te.Linear(width, width, device="cpu", **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.mlp(x))


class Model(torch.nn.Module):
    """Three blocks, of which the second one's projection is `make`'s."""

    def __init__(self, make: Callable[[], torch.nn.Module] | None = None) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        if make is not None:
            self.blocks[1].proj = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def narrow() -> torch.nn.Module:
    return te.Linear(16, 32, device="cpu")


X = torch.randn(16, 32)
PATH = "blocks.1.proj"


def message(model: torch.nn.Module, call: Callable[[torch.nn.Module], Any] = lambda m: m(X)) -> str:
    try:  # and not `pytest.raises`, which keeps the frames: torch's checkpoint ends its hooks when they go
        call(model)
    except ArgumentError as error:
        return str(error)
    pytest.fail("nothing was raised")


# ------------------------------------------------------------------------------------------- the path in an error


def test_an_error_says_where_in_the_model() -> None:
    """Which of many layers an error is about stands behind the operation; its parts are as they were."""
    with pytest.raises(ArgumentError, match=rf"^Linear\.forward in {PATH}: got an input of shape \(16, 32\)\.") as e:
        Model(narrow)(X)
    assert (e.value.operation, e.value.where) == ("Linear.forward", PATH)
    again = pickle.loads(pickle.dumps(e.value))
    assert str(again) == str(e.value) and again.where == PATH and type(again) is ArgumentError
    # Called by itself the module has no path, and nothing is added.
    assert message(narrow()).startswith("Linear.forward: got")
    assert ArgumentError("op", "this", "that", "do").where == "", "raised where no module runs"


ROOTS: dict[str, tuple[Callable[[torch.nn.Module], Any], str]] = {
    "called": (lambda m: m(X), PATH),
    "wrapped": (lambda m: torch.nn.Sequential(m)(X), f"0.{PATH}"),
    "functional": (lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (X,)), PATH),
    "compiled": (lambda m: torch.compile(m, backend="eager")(X), PATH),
    "checkpointed": (lambda m: checkpoint(m, X, use_reentrant=False), PATH),
    "given to a function that calls a part": (lambda m: m.blocks[1](X), PATH),
    "taken apart": (lambda m: (lambda x, block: block(x))(X, m.blocks[1]), PATH),
}


@pytest.mark.parametrize("how", ROOTS)
def test_the_outermost_module_that_runs_is_the_root(how: str) -> None:
    call, path = ROOTS[how]
    assert f"Linear.forward in {path}: got" in message(Model(narrow), call)


def test_a_module_that_calls_a_part_of_itself_is_the_root() -> None:
    """Trainers call parts of a model from a method of the whole: no module's forward has to be around."""

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(narrow)

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            return self.model.blocks[1].proj(x)

    assert f"in model.{PATH}:" in message(Whole(), lambda m: m.training_step(X))


def test_each_thread_sees_its_own_modules() -> None:
    """A model that runs in another thread at the same time is not asked."""
    inside, found = threading.Event(), threading.Event()

    class Waits(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert found.wait(30)
            return self.inner(x)

    model = Model(narrow)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(message(Waits(model))))
    thread.start()
    assert inside.wait(30)
    said.append(message(model))
    found.set()
    thread.join()
    assert f"in {PATH}:" in said[0] and f"in inner.{PATH}:" in said[1]


def test_errors_of_the_core_are_located_too() -> None:
    """A product that is refused names the layer whose product it is."""
    model = Model(lambda: te.DotProductAttention(2, 16))
    model.blocks[1].proj.forward = lambda x: te.DotProductAttention.forward(model.blocks[1].proj, x, x, x)
    assert f"in {PATH}: got" in message(model)


def test_a_model_under_construction_has_no_names_yet() -> None:
    """Errors of a constructor meet half-built modules on the stack, one of which has no parts yet."""

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            made = te.Linear(0, 4, device="cpu")
            super().__init__()
            self.made = made

    with pytest.raises(ArgumentError, match=r"^Linear: got in_features=0\."):
        Half()


def test_looking_up_the_stack_keeps_nothing_alive() -> None:
    """The variables of the functions that are running go when they would have gone."""

    def loop(model: torch.nn.Module) -> None:
        big = torch.ones(8)
        watch = weakref.ref(big)
        with contextlib.suppress(ArgumentError):
            model(X)
        del big
        assert watch() is None

    def asks(model: torch.nn.Module) -> None:
        mine = locals()
        with contextlib.suppress(ArgumentError):
            model(X)
        assert mine["model"] is model, "a caller's own view of its variables is left alone"

    loop(Model(narrow))
    asks(Model(narrow))


def test_nothing_is_looked_for_until_an_error_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(errors, "_locate", lambda: asked.append(1) or "")
    model = Model()
    with te.autocast(recipe=DelayedScaling()):
        model(X).sum().backward()
    assert not asked
    message(Model(narrow))
    assert asked


# ------------------------------------------------------------------------------- messages that name their module


def quantized(recipe: Any) -> torch.nn.Module:
    with te.quantized_model_init(recipe=recipe):
        return te.Linear(32, 32, device="cpu")


def test_recipe_mismatch() -> None:
    model = Model(lambda: quantized(Float8CurrentScaling()))
    with (
        pytest.raises(RuntimeError, match=rf"Recipe mismatch for {PATH}\.weight: "),
        te.autocast(recipe=MXFP8BlockScaling()),
    ):
        model(X)
    model.blocks[2].proj = quantized(Float8CurrentScaling())
    with pytest.warns(UserWarning, match=rf"^{PATH}: weight is held quantized and used outside autocast") as seen:
        model(X)
        model.eval()(X.requires_grad_(False))
    assert len(seen) == 1 and seen[0].filename == __file__, "once a model, at the line that calls it"
    with pytest.warns(UserWarning, match="^Linear: weight is held quantized"):
        model.blocks[1].proj(X)  # another model


def test_parameters_of_another_dtype() -> None:
    model = Model(lambda: te.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu"))
    with pytest.raises(TypeError, match=rf"^Linear in {PATH}: Data types for parameters must match"):
        model(X)


def test_a_custom_recipe() -> None:
    """Requests of one module that differ, be they of two GEMMs or of one GEMM's operands."""

    def factory(role: Any) -> Any:
        return te.DelayedScalingRequest(amax_history_len=8 if role.tensor_type == wanted else 16)

    wanted = "none"
    model = Model()
    with te.autocast(recipe=CustomRecipe(qfactory=factory)):
        model(X)
    wanted = "weight"
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Identity(), Block()])})
    model.forward = lambda x: model["blocks"][1].proj(x)
    with (
        pytest.raises(ValueError, match=rf"^{PATH}: all DelayedScalingRequests"),
        te.autocast(recipe=CustomRecipe(qfactory=factory)),
    ):
        model(X)


def test_without_a_model_around_it() -> None:
    """The name that the user gave, else the class: a running number says nothing."""
    given, unnamed = te.Linear(32, 32, name="head", device="cpu"), te.Linear(32, 32, device="cpu")
    with pytest.raises(ValueError, match=r"^head: 3 quantizers in this direction, not 2"):
        given.get_quantizer_roles(fwd=True, num_quantizers=2)
    with pytest.raises(ValueError, match=r"^Linear: 3 quantizers"):
        unnamed.get_quantizer_roles(fwd=True, num_quantizers=2)
    assert path_of(given) == ""


def test_no_message_says_a_running_number() -> None:
    layer = te.TransformerLayer(32, 64, 2, fuse_qkv_params=True, device="cpu", params_dtype=torch.bfloat16)
    model = torch.nn.ModuleDict({"layer": layer})
    with pytest.raises(TypeError) as error:
        layer(torch.randn(4, 2, 32))
    assert "Layer_" not in str(error.value) and "self_attention.layernorm_qkv" in str(error.value)
    assert "Layer_" not in str(te.precision_report(model)) + str(te.precision_report(layer.layernorm_mlp))


# ------------------------------------------------------------------------------------------------- print(model)

PRINTED = {
    "Linear(in_features=32, out_features=48, bias=True)": lambda: te.Linear(32, 48, device="cpu"),
    "Linear(in_features=32, out_features=48, bias=False, parameters_split={'a': 16, 'b': 32})": lambda: te.Linear(
        32, 48, bias=False, parameters_split={"a": 16, "b_": 32}, device="cpu"
    ),
    "Linear(in_features=32, out_features=48, bias=True, weight=Float8Tensor)": lambda: _quantized_linear(),
    "LayerNormLinear(in_features=32, out_features=48, bias=True, normalization='RMSNorm', eps=1e-05)": (
        lambda: te.LayerNormLinear(32, 48, normalization="RMSNorm", device="cpu")
    ),
    "LayerNormMLP(hidden_size=32, ffn_hidden_size=64, bias=True, activation='swiglu', normalization='LayerNorm', "
    "eps=0.1, zero_centered_gamma=True)": lambda: te.LayerNormMLP(
        32, 64, eps=0.1, activation="swiglu", zero_centered_gamma=True, device="cpu"
    ),
    "GroupedLinear(num_gemms=3, in_features=32, out_features=48, bias=False)": lambda: te.GroupedLinear(
        3, 32, 48, bias=False, device="cpu"
    ),
    "RMSNorm((32,), eps=1e-05, zero_centered_gamma=False)": lambda: te.RMSNorm(32, device="cpu"),
}


def _quantized_linear() -> torch.nn.Module:
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        return te.Linear(32, 48, device="cpu")


@pytest.mark.parametrize("text", PRINTED)
def test_a_printed_module_shows_its_sizes(text: str) -> None:
    assert repr(PRINTED[text]()) == text


def test_a_printed_layer_shows_its_sizes() -> None:
    layer = te.TransformerLayer(64, 128, 4, num_gqa_groups=2, layer_number=3, device="cpu")
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        layer(torch.randn(4, 2, 64))
    lines = [line.strip() for line in repr(layer).splitlines()]
    for line in (
        "hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, layer_type='encoder', layer_number=3",
        "hidden_size=64, num_attention_heads=4, num_gqa_groups=2, kv_channels=16, attention_type='self', "
        "layer_number=3",
        "(fp8_state): ScalingState(gemms=1, amax_history_len=4)",
        "in_features=64, out_features=128, bias=True, parameters_split={'query': 64, 'key': 32, 'value': 32}, "
        "normalization='LayerNorm', eps=1e-05",
    ):
        assert line in lines, repr(layer)


def test_a_wrong_inspector_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.blocks[2].mlp.inspector = object()
    with pytest.raises(ArgumentError, match=r"^LayerNormMLP\.inspector in blocks\.2\.mlp: got <object .* without `req"):
        model(X)
