"""Compiled and captured steps: as without debugging where nobody looks, refused where somebody does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import UnsupportedError
from te_core.recipe import Float8CurrentScaling
from tests import recipes
from tests.backends import requires_cuda
from tests.covering import covering
from tests.debug.conftest import config

Debugging = Callable[..., Any]
LOOKS = {"stats": ["max"], "tensors": ["activation"]}


def test_a_compiled_step(debugging: Debugging) -> None:
    session = debugging(config({"layer_types": ["watched"]}, LogTensorStats={**LOOKS, "start_step": 1}))
    torch.compiler.reset()
    other, watched = (te.Linear(32, 32, device="cpu", name=name) for name in ("other", "watched"))
    step = torch.compile(lambda layer, x: layer(x).sum(), backend="aot_eager")
    x = torch.randn(16, 32)
    with recipes.region("current"):
        want = other(x).sum()

    def compiled(layer: torch.nn.Module) -> torch.Tensor:
        with recipes.region("current"):
            return step(layer, x)

    assert torch.equal(compiled(other), want) and compiled(watched).isfinite()
    session.step()
    assert torch.equal(compiled(other), want)
    with pytest.raises(Exception, match=r"torch.compile compiles.*features in eager steps"):
        compiled(watched)


@requires_cuda
def test_a_captured_step(debugging: Debugging) -> None:
    debugging(config({"layer_types": ["watched"]}, LogTensorStats=LOOKS))
    other, watched = (te.Linear(32, 32, device="cuda", name=name) for name in ("other", "watched"))
    x = torch.randn(16, 32, device="cuda")
    for layer in (other, watched):
        layer(x)
    torch.cuda.synchronize()
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = other(x)
        graph.replay()
        assert torch.equal(y, other(x))
        with pytest.raises(UnsupportedError, match="a CUDA graph captures"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            watched(x)


# ------------------------------------------------------------------------------------------ every door

WIDTH = 32
MODULES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **kw: te.Linear(WIDTH, WIDTH, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(WIDTH, WIDTH, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(WIDTH, WIDTH, **kw),
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(WIDTH, 2, attention_dropout=0.0, **kw),
}
FEATURES: dict[str, dict[str, Any]] = {
    "LogTensorStats": {**LOOKS, "tensors": ["activation", "qkv"]},
    "DisableQuantizationLayer": {},
}


RECIPE = Float8CurrentScaling()


class Region(torch.nn.Module):
    """A layer in its region."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPE):
            y: torch.Tensor = self.layer(x)
        return y


def compiled(layer: torch.nn.Module, x: torch.Tensor) -> Any:
    return torch.compile(Region(layer), backend="aot_eager")(x)


def compiled_whole(layer: torch.nn.Module, x: torch.Tensor) -> Any:
    return torch.compile(Region(layer), backend="aot_eager", fullgraph=True)(x)


def exported(layer: torch.nn.Module, x: torch.Tensor) -> Any:
    return torch.export.export(Region(layer), (x,), strict=False).module()(x)


def exported_strictly(layer: torch.nn.Module, x: torch.Tensor) -> Any:
    return torch.export.export(Region(layer), (x,), strict=True).module()(x)


def for_onnx(layer: torch.nn.Module, x: torch.Tensor) -> Any:
    """The program that torch.onnx.export writes."""
    with te.onnx_export(True):
        return torch.export.export(Region(layer), (x,), strict=False)


@covering(kind=MODULES, door=[compiled, compiled_whole, exported, exported_strictly, for_onnx], feature=FEATURES)
def test_a_program_of_a_touched_layer_is_refused(
    debugging: Debugging, kind: str, door: Callable[..., Any], feature: str
) -> None:
    """In one sentence that names the layer; that of another layer is made."""
    debugging(config({"layer_types": ["watched"]}, **{feature: FEATURES[feature]}))
    torch.compiler.reset()
    x = torch.randn(16, 2, WIDTH)
    other, watched = (MODULES[kind](device="cpu", name=name) for name in ("other", "watched"))
    assert door(other, x) is not None
    how = "a step that torch.compile compiles" if door in (compiled, compiled_whole) else "a program that is exported"
    with pytest.raises(Exception) as raised:
        door(watched, x)
    layer = r"(Linear|LayerNormLinear|LayerNormMLP) 'watched[\w.]*'"
    assert re.search(rf"precision debugging of {layer}[^:]*: got {how}\. Allowed: [^.]*\. To do: ", str(raised.value))


@requires_cuda
@pytest.mark.parametrize("kind", MODULES)
def test_graphed_callables_of_a_touched_layer_are_refused(debugging: Debugging, kind: str) -> None:
    debugging(config({"layer_types": ["watched"]}, **{"LogTensorStats": FEATURES["LogTensorStats"]}))
    x = torch.randn(16, 2, WIDTH, device="cuda", requires_grad=True)
    options: dict[str, Any] = {"enabled": True, "recipe": Float8CurrentScaling()}
    other, watched = (MODULES[kind](device="cuda", name=name) for name in ("other", "watched"))
    graphed = te.make_graphed_callables(other, (x,), **options)
    with te.autocast(recipe=Float8CurrentScaling()):
        graphed(x).sum().backward()
    with pytest.raises(UnsupportedError, match="'watched.*a CUDA graph captures"):
        te.make_graphed_callables(watched, (x,), **options)
    watched = MODULES[kind](device="cuda", name="watched")
    with pytest.raises(AssertionError, match="'watched.*keep quantized weights"):
        te.make_graphed_callables(watched, (x,), cache_quantized_params=True, **options)


def test_weights_kept_for_the_microbatches_of_a_graph(debugging: Debugging) -> None:
    """As a capture says it, which needs a GPU."""
    debugging(config({"layer_types": ["watched"]}, LogTensorStats=LOOKS))
    other, watched = (te.Linear(WIDTH, WIDTH, device="cpu", name=name) for name in ("other", "watched"))
    for layer in (other, watched):
        layer._microbatch, layer._special = True, True  # type: ignore[assignment]
    with recipes.region("current"):
        other(torch.randn(16, WIDTH))
        with pytest.raises(
            AssertionError, match="Linear 'watched': got a CUDA graph that is to keep quantized weights"
        ):
            watched(torch.randn(16, WIDTH))
