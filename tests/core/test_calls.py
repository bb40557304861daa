"""The table of layers is what the layers' functions take and give, and `call` makes one object for equal options."""

from __future__ import annotations

from importlib import import_module
from inspect import Parameter, signature, unwrap
from typing import Any

import pytest

from te_core import calls, dtypes
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers import graph, table
from te_core.layers.entries import Asked, Layer
from te_core.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling
from tests.core.test_import_floors import ROOT

#: Layers that have no entry, and why.
WITHOUT = {"te_core.layers.attention_fp8": "a recipe's attention, which functions by name do not offer yet"}
LAYERS = tuple(table.LAYERS.values())


def _function(function: Any) -> Any:
    return signature(unwrap(function)).parameters.values()


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_arguments_stand_as_the_layer_takes_them(layer: Layer) -> None:
    if layer.forward is graph.forward:  # a graph names its inputs itself
        wanted = tuple(argument.core for argument in layer.arguments)
        assert layer.spec(Asked(layer.settled("", {}), dtypes.bfloat16, frozenset("x"), None)).inputs == wanted
        return
    takes = [p for p in _function(layer.forward) if p.kind is not Parameter.KEYWORD_ONLY]
    wanted = dict.fromkeys(argument.core for argument in layer.arguments)
    assert [p.name for p in takes] == ["rt", *wanted]
    for p in takes:
        if p.default is None:
            assert all(a.optional for a in layer.arguments if a.core == p.name), p.name


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_keywords_are_those_that_the_table_speaks_of(layer: Layer) -> None:
    """A keyword that a layer gets one day has to be thought of here."""
    known = {"spec", "scales"} | ({"comm"} if layer.name == "attention" else set())  # over ranks: not offered here
    of_products = {"inspectors", "ready", "comm", "splits", "nodes"} if layer.products else set()
    forward = {p.name for p in _function(layer.forward) if p.kind is Parameter.KEYWORD_ONLY}
    backward = {p.name for p in _function(layer.backward) if p.kind is Parameter.KEYWORD_ONLY}
    assert known <= forward <= known | of_products and known <= backward
    assert ("ready" in forward) == bool(layer.products) and ("sinks" in backward) == bool(layer.products)
    assert ("release" in backward) == layer.releases
    assert backward <= known | of_products | {"sinks"} | {"release"}
    assert layer.writes == (table._WRITES if layer.products else ())


@pytest.mark.parametrize(
    "layer", [layer for layer in LAYERS if layer.forward is not graph.forward], ids=lambda layer: layer.name
)
def test_backward_takes_a_gradient_for_each_output(layer: Layer) -> None:
    takes = [p.name for p in _function(layer.backward) if p.kind is not Parameter.KEYWORD_ONLY]
    assert takes[0] == "rt" and takes[-1] == "saved"
    assert len(takes) - 2 == len(layer.outputs) + (layer.name == "attention")  # its second output has no gradient


def test_no_layer_is_forgotten() -> None:
    modules = {f"te_core.layers.{path.stem}" for path in (ROOT / "te_core/layers").glob("*.py")}
    layers = {m for m in modules if {"forward", "backward"} <= vars(import_module(m)).keys()}
    assert layers == {layer.forward.__module__ for layer in LAYERS} | WITHOUT.keys()


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_options_have_allowed_defaults(layer: Layer) -> None:
    for name, option in layer.options.items():
        assert option.allows(option.default), name
        assert not option.allows([option.default]) and not option.allows("no such value")
        assert option.implied or option.about.endswith("."), name


def test_equal_options_make_one_call() -> None:
    wanted = frozenset({"x", "weight"})
    found = calls.call("linear", {}, dtypes.bfloat16, wanted, DelayedScaling())
    assert found is calls.call("linear", {}, dtypes.bfloat16, wanted, DelayedScaling())
    assert found is not calls.call("linear", {}, dtypes.bfloat16, wanted, DelayedScaling(margin=1))
    assert found is not calls.call("linear", {}, dtypes.float16, wanted, DelayedScaling())
    assert found is not calls.call("linear", {}, dtypes.bfloat16, wanted - {"x"}, DelayedScaling())
    named = calls.call("layernorm", {"eps": 1e-5}, dtypes.float32, wanted)
    assert named is calls.call("layernorm", {}, dtypes.float32, wanted)
    assert named is not calls.call("layernorm", {"eps": 1e-6}, dtypes.float32, wanted)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("linaer", {}, dtypes.float32, frozenset()), "linaer.*layernorm_mlp"),
        (("layernorm", {"epsilon": 1}, dtypes.float32, frozenset()), "epsilon.*eps"),
        (("layernorm", {"eps": "1"}, dtypes.float32, frozenset()), "eps='1'.*number"),
        (("layernorm", {"eps": float("nan")}, dtypes.float32, frozenset()), "eps=nan"),
        (("activation", {"activation": ["gelu"]}, dtypes.float32, frozenset()), "gelu.*'relu'"),
        (("attention", {"window_size": (1, -2)}, dtypes.float32, frozenset()), "window_size=.*pair"),
        (("linear", {}, dtypes.int32, frozenset()), "int32.*bfloat16"),
        (("linear", {}, dtypes.float32, frozenset({"y"})), "needs=.*weight"),
        (("linear", {}, dtypes.float32, frozenset(), Float8CurrentScaling), "Recipe"),
    ],
)
def test_what_is_wrong_is_said(arguments: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=f"(?s){said}.*To do:"):
        calls.call(*arguments)


def test_a_recipe_of_functions_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="CustomRecipe"):
        calls.call("linear", {}, dtypes.float32, frozenset(), CustomRecipe(qfactory=lambda role: None))
