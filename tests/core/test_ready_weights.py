"""Weights that a caller quantized before: what they hold is read, and what they lack is made."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import Cast, Runtime, dtypes, ops
from te_core import functional as te
from te_core.layers import linear
from te_core.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe, resolve


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()], ids=str)
def test_a_rowwise_copy_alone(recipe: Recipe) -> None:
    """Backward reads columns. Of a square weight rows would fit in their place, without a word."""
    rt, random, precision = Runtime.cpu(), np.random.default_rng(0), resolve(recipe)
    x, w, dy = (rt.tensor(random.standard_normal((64, 64)).astype(np.float32)) for _ in range(3))
    spec = linear.LinearSpec(dtypes.float32, precision, linear.Needs(True, True, False))
    assert precision.weight is not None
    found = []
    for columnwise in (True, False):
        cast = Cast(precision.weight.format, rowwise=True, columnwise=columnwise)
        _, saved = linear.forward(rt, x, w, None, spec=spec, ready=(ops.quantize(rt, w, cast),))
        found.append(rt.numpy(linear.backward(rt, dy, saved, spec=spec)[0]))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling, Float8BlockScaling])
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("function", [te.linear, te.layernorm_mlp], ids=lambda function: str(function.__name__))
def test_both_copies_for_many_calls(function: te.Function, override: str | None, recipe: type[Recipe]) -> None:
    """Each call gives what one without gives, and leaves the caller's weight as it is."""
    random, kind = np.random.default_rng(0), recipe(backward_override=override)  # type: ignore[call-arg]
    x, *weights = (random.standard_normal((64, 64)).astype(np.float32) for _ in range(3))
    given = {"x": x, **dict(zip(function.layer.products, weights, strict=False))}
    if function is te.layernorm_mlp:
        given |= {"layer_norm_weight": x[0], "layer_norm_bias": x[1]}
    ready = {name: te.quantize(given[name], kind) for name in function.layer.products}
    y, back = function(**given, recipe=kind)
    wanted = {"y": y, **back(x)}
    itself = {} if override == "high_precision" else ready  # which has no values in high precision
    for more in ({}, itself, {}):
        y, back = function(**{**given, **more}, recipe=kind, quantized=None if more else ready)
        found = {"y": y, **back(x)}
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name], name)
