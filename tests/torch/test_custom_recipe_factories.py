"""The factories of custom recipes: the rules of the built-in recipes, and mixes that say so per direction."""

from __future__ import annotations

from typing import Any

import pytest

import te_torch.tensors as T
from te_core import recipe as R
from te_core.precision import Operand
from te_torch.custom_recipes import quantizer_factories as plain
from te_torch.custom_recipes import quantizer_factory_zoo as zoo

ROLES = {kind: T.QuantizerRole("linear", kind, "fc1") for kind in ("input", "weight", "grad_output")}

BUILT_IN: dict[str, Any] = {
    "current_scaling": R.Float8CurrentScaling,
    "float8_block_scaling": R.Float8BlockScaling,
    "mxfp8": R.MXFP8BlockScaling,
    "nvfp4": R.NVFP4BlockScaling,
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_factories_follow_the_built_in_recipes(name: str) -> None:
    precision = BUILT_IN[name]().resolve()
    factory = getattr(plain, f"{name}_factory")
    wanted = {"input": precision.input, "weight": precision.weight, "grad_output": precision.grad}
    assert {kind: factory(role).operand for kind, role in ROLES.items()} == wanted
    assert factory(None).operand == precision.input


def test_high_precision_and_delayed() -> None:
    assert plain.high_precision_factory(None).operand is None
    assert plain.delayed_scaling_factory(ROLES["input"]) == T.DelayedScalingRequest()
    request, recipe = T.DelayedScalingRequest(), R.DelayedScaling()
    assert (request.fp8_format, request.margin, request.amax_history_len, request.reduce_amax) == (
        recipe.fp8_format,
        recipe.margin,
        recipe.amax_history_len,
        recipe.reduce_amax,
    )


def sides(factory: Any, kind: str) -> tuple[Any, Any]:
    """The scaling in forward and in backward of an operand."""
    rule: Operand | None = factory(ROLES[kind]).operand
    if rule is None:
        return None, None
    return rule.scaling, (rule.columnwise or rule).scaling


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("high_precision_fwd_mxfp8_bwd", "none", "mxfp8"),
        ("mxfp8_fwd_nvfp4_bwd", "mxfp8", "nvfp4"),
        ("nvfp4_1d_weight", "nvfp4", "nvfp4"),
        ("mxfp8_fwd_high_precision_bwd", "mxfp8", "none"),
        ("nvfp4_row_scaled_fwd_mxfp8_bwd", "nvfp4", "mxfp8"),
        ("nvfp4_row_scaled_fwd_high_precision_bwd", "nvfp4", "none"),
        ("nvfp4_linear_fp8_dpa", "nvfp4", "nvfp4"),
    ],
)
def test_mixes(name: str, forward: str, backward: str) -> None:
    factory = getattr(zoo, f"{name}_factory")
    assert sides(factory, "input") == sides(factory, "weight") == (forward, backward)
    gradient = None if backward == "none" else backward
    assert sides(factory, "grad_output") == (gradient, gradient)
    rule = factory(ROLES["input"]).operand
    assert rule.row_scaled is ("row_scaled" in name)
    weight = factory(ROLES["weight"]).operand
    assert weight.tiled is (forward == "nvfp4" and "1d" not in name)


def test_both_operands_of_wgrad_are_transformed_or_neither() -> None:
    for factory in (plain.nvfp4_factory, zoo.mxfp8_fwd_nvfp4_bwd_factory, zoo.nvfp4_1d_weight_factory):
        x, dy = factory(ROLES["input"]).operand, factory(ROLES["grad_output"]).operand
        assert (x.columnwise or x).transform and dy.transform and dy.stochastic


def test_attention_is_fp8_beside_nvfp4_linears() -> None:
    rule = zoo.nvfp4_linear_fp8_dpa_factory(T.QuantizerRole("dpa", "qkv")).operand
    assert rule.scaling == "current" and rule.dtype is T.DType.kFloat8E4M3.core
    assert zoo.nvfp4_linear_fp8_dpa_factory(T.QuantizerRole("dpa", "do")).operand.dtype is T.DType.kFloat8E5M2.core
