"""What whole layers of `te_core.functional` promise beside their values.

tests/torch/test_functional_whole.py compares them with the modules of te_torch, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from te_core import functional as te
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.functional_cases import WHOLE, right

#: How the pairs of numbers of the parts that draw differ.
APART = [(n & 1) << 62 | (n & 2) << 60 | (n & 4) << 58 for n in range(6)]


def bits(array: Any) -> Any:
    """An array's bytes, so that NaNs compare, too."""
    return array.dtype, array.shape, array.tobytes()


def plain(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, options) of a call without dropout."""
    case = right(3, name, "plain")
    return case.arrays, {n: o for n, o in case.options.items() if "dropout" not in n and n != "seed"}


@pytest.mark.parametrize("name", WHOLE)
def test_each_gradient_comes_alone(name: str) -> None:
    arrays, options = plain(name)
    function = getattr(te, name)
    y, back = function(**arrays, **options)
    wanted, second = back(np.ones_like(y), keep=True), back(np.ones_like(y))
    assert {n: bits(t) for n, t in wanted.items()} == {n: bits(t) for n, t in second.items()}
    for one in wanted:
        _, back = function(**arrays, **options, needs=one)
        found = back(np.ones_like(y))
        assert found.keys() == {one} and bits(found[one]) == bits(wanted[one]), one


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), Float8CurrentScaling()])
def test_weights_quantized_before_and_buffers(name: str, recipe: Any) -> None:
    """They stand in the order of the products, each its own."""
    arrays, options = plain(name)
    function = getattr(te, name)
    scaling = te.Scaling(recipe, function, like=arrays["x"])
    options |= {"recipe": recipe, "scaling": scaling}
    if scaling.arrays():
        scaling.scale_fwd[:] = 2.0 ** np.arange(scaling.scale_fwd.size)
    y, back = function(**arrays, **options)
    wanted = back(np.ones_like(y))
    products = function.layer.products
    q = {n: te.quantize(arrays[n], recipe, scaling=scaling, name=n) for n in products}
    again, back = function(**arrays, **options, quantized=q)
    into = {n: np.zeros(arrays[n].shape, np.float32) for n in products}
    found = back(np.ones_like(y), into=into, accumulate=True)
    assert bits(again) == bits(y)
    for n in products:
        assert found[n] is into[n]
        np.testing.assert_allclose(into[n], wanted[n].astype(np.float32), rtol=0.01, atol=0.01)
    inside, _ = function(**{**arrays, **q}, **options, needs=())
    assert bits(inside) == bits(y)


def test_seeds_on_a_device() -> None:
    """A pair for each part that draws; one pair for all would drop the same elements everywhere."""
    arrays, options = plain("transformer_layer")
    options |= {"hidden_dropout": 0.5, "attention_dropout": 0.5}
    wanted, _ = te.transformer_layer(**arrays, **options, seed=(7, 1))
    pairs = np.array([(7 ^ apart, 1) for apart in APART], np.int64)
    found, _ = te.transformer_layer(**arrays, **options, seed=pairs)
    assert bits(found) == bits(wanted)
    with pytest.raises(ArgumentError, match=r"seed = .*\[6, 2\]"):
        te.transformer_layer(**arrays, **options, seed=pairs[0])
