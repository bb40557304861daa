"""The rules of delayed scaling that a user may supply: what they are given, what they return, what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling
from tests.backends import devices
from tests.module_steps import fp8_state, gradient_for, make, values

on_devices = pytest.mark.parametrize("device", devices())


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
