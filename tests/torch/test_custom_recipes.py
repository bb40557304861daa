"""Rules that a user supplies: algorithms of delayed scaling, and factories of quantizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
import te_torch.tensors as T
from te_core import recipe as R
from te_core.errors import ArgumentError
from te_core.precision import Operand
from te_core.recipe import DelayedScaling
from te_torch.custom_recipes import quantizer_factories as plain
from te_torch.custom_recipes import quantizer_factory_zoo as zoo
from tests.backends import on_devices
from tests.world import fp8_state, gradient_for, make, values


def linear(device: str) -> te.Linear:
    return make("Linear", device)


def batch(device: str) -> torch.Tensor:
    return values(16, 48, device=device, seed=1)


@on_devices
def test_custom_algorithms(device: str) -> None:
    """They get the documented arguments, once per update and direction, and what they return is what happens."""
    seen: list[tuple[Any, ...]] = []

    def amax_of(history: torch.Tensor) -> torch.Tensor:
        seen.append(("amax", history.clone()))
        return 2 * history.amax(dim=0)

    def scale_of(amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, given: Any) -> torch.Tensor:
        seen.append(("scale", amax.clone(), scale.clone(), fp8_max, given))
        return torch.where(amax > 0, fp8_max / (4 * amax), scale)

    rule = DelayedScaling(margin=1, amax_history_len=3, amax_compute_algo=amax_of, scaling_factor_compute_algo=scale_of)
    module, x = linear(device), batch(device)
    w = module.weight.detach().abs().max().item()
    for i in (1.0, 2.0, 3.0):
        before = fp8_state(module)
        seen.clear()
        with te.autocast(recipe=rule):
            y = module(i * x)
        y.backward(gradient_for(y))
        assert [s[0] for s in seen] == ["amax", "scale"] * 2
        (_, history), (_, amax, scale, fp8_max, given) = seen[:2]
        assert history.shape == (3, 3) and history[0, :2].tolist() == [(i * x).abs().max().item(), w]
        assert torch.equal(amax, 2 * history.amax(0)) and fp8_max == 448.0 and seen[3][3] == 57344.0
        assert given == rule and isinstance(given, DelayedScaling), "the recipe itself, as documented"
        assert torch.equal(scale, before.get("fp8_state.scale_fwd", torch.ones(3, device=device)))
        state = module.fp8_state
        assert state.scale_fwd[0] == 448 / (8 * history[:, 0].max()) and state.scale_fwd[2] == 1
        expected = torch.roll(history, -1, 0)
        expected[0] = 0
        assert torch.equal(state.amax_history_fwd, expected)


@on_devices
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_one_custom_algorithm_leaves_the_other_as_documented(algo: str, device: str) -> None:
    module, other, x = linear(device), linear(device), batch(device)
    custom = DelayedScaling(
        1, amax_history_len=4, amax_compute_algo=algo, scaling_factor_compute_algo=lambda amax, s, top, r: top / amax
    )
    for i in (4.0, 1.0, 2.0):
        with te.autocast(recipe=custom):
            module(i * x)
        assert module.fp8_state.scale_fwd[0] == 448 / ((4 if algo == "max" else i) * x.abs().max())
        pick = DelayedScaling(1, amax_history_len=4, amax_compute_algo=lambda h: h[0].clone())
        with te.autocast(recipe=pick):
            other(i * x)
        assert other.fp8_state.scale_fwd[0] == 448 / (2 * i * x.abs().max())


@on_devices
def test_a_custom_algorithm_may_return_a_view_of_the_history(device: str) -> None:
    """The row that it returns is cleared only after the scale was made of it."""
    module, x = linear(device), batch(device)
    rule = DelayedScaling(amax_history_len=4, amax_compute_algo=lambda history: history[0])
    for i in (4.0, 1.0, 2.0):
        with te.autocast(recipe=rule):
            module(i * x)
        assert module.fp8_state.scale_fwd[0] == 448 / (i * x.abs().max())
        assert module.fp8_state.amax_history_fwd[0].count_nonzero() == 0


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"amax_compute_algo": lambda history: history}, r"a tensor of shape \(4, 3\)"),
        ({"amax_compute_algo": lambda history: history.amax(1)}, r"a tensor of shape \(4,\)"),
        ({"amax_compute_algo": lambda history: history[0].tolist()}, r"\[3"),
        ({"scaling_factor_compute_algo": lambda amax, scale, top, rule: scale[:2]}, r"a tensor of shape \(2,\)"),
        ({"scaling_factor_compute_algo": lambda amax, scale, top, rule: None}, "None"),
    ],
)
def test_what_a_custom_algorithm_must_not_return(made: dict[str, Any], said: str) -> None:
    """An error that names the rule and its result; no history has moved, and no scale has changed."""
    module, x = linear("cpu"), batch("cpu")
    (name,) = made
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        module(x)
    before = fp8_state(module)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"{name}, which returned.*{said}.*a tensor of shape .3,.") as error:
            with te.autocast(recipe=DelayedScaling(amax_history_len=4, **made)):
                module(x)
        assert error.value.operation.startswith("DelayedScaling")
    after = fp8_state(module)
    assert torch.equal(after["fp8_state.scale_fwd"], before["fp8_state.scale_fwd"])
    assert torch.equal(after["fp8_state.amax_history_fwd"][1:], before["fp8_state.amax_history_fwd"][1:])


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
