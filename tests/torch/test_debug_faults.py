"""Planted faults are found: whichever layer and recipe, the report ranks it first, and `bisect` names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_torch.debug import bisect, inspect
from tests.backends import on_devices
from tests.covering import covering
from tests.torch import planted

PLACES = ("0.up", "1.down", "2.up")
RECIPES = ("delayed", "current", "block")


def planted_in(place: str, recipe: str, device: str, fault: Any) -> tuple[torch.nn.Module, Any]:
    """A model that has found its scales, with a fault in one layer, and its step."""
    net, step = planted.model(device), planted.step_of(recipe, device)
    step(net)
    net.zero_grad()
    net.get_submodule(place).inspector = fault
    return net, step


@on_devices
@covering(turns=2, fault=planted.FAULTS, recipe=RECIPES, place=PLACES)
def test_a_fault_is_first_in_the_report_and_named(place: str, recipe: str, fault: str, device: str) -> None:
    net, step = planted_in(place, recipe, device, planted.FAULTS[fault]())
    with inspect(net) as seen:
        for _ in range(3):
            step(net)
            seen.step()
    worst = seen.report().worst
    assert worst is not None and worst.layer == place
    assert worst.tensor == ("gradient" if fault == "underflow" else "activation")
    assert ("became zero" if fault == "underflow" else "beyond what its scale can hold") in worst.why()
    others = [s.trouble() for s in seen.report().series if (s.layer, s.tensor) != (worst.layer, worst.tensor)]
    assert worst.trouble() > 10 > 2 > max(others)
    net.zero_grad()
    found = bisect(step, net, progress=False)
    assert found.verdict == "found" and found.layers == [place], str(found)
    gemms = {gemm for culprit in found.culprits for gemm in culprit.gemms}
    assert gemms == ({"dgrad", "wgrad"} if fault == "underflow" else {"fprop", "wgrad"}), str(found)


@on_devices
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("times", [64.0, 2.0**-30], ids=["too large", "too small"])
def test_a_scale_of_delayed_scaling(place: str, times: float, device: str) -> None:
    """In the state itself: no update comes to it, whatever the maxima are."""
    net, step = planted_in(place, "delayed", device, None)
    state = net.get_submodule(place).fp8_state
    wrong = state.scale_fwd * times if times > 1 else state.scale_bwd * times
    with inspect(net) as seen:
        for _ in range(4):
            for parameter in net.parameters():
                parameter.data *= 1.05
            (state.scale_fwd if times > 1 else state.scale_bwd).copy_(wrong)
            step(net)
            seen.step()
    worst = seen.report().worst
    assert worst is not None and worst.layer == place
    assert ("beyond what its scale can hold" if times > 1 else "became zero") in worst.why()


def test_a_scale_that_stands_still_is_said() -> None:
    module = te.Linear(64, 64, device="cpu", **planted.BF16)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    region = {"recipe": planted.recipes.rule("delayed")}
    with te.autocast(**region):
        module(x)
    frozen = module.fp8_state.scale_fwd.clone()
    with inspect(module) as seen:
        for i in range(5):
            module.fp8_state.scale_fwd.copy_(frozen)
            with te.autocast(**region):
                module(x * 3.0**i)
            seen.step()
    worst = seen.report().worst
    assert worst is not None and worst.tensor == "activation"
    assert "stood still while amax moved by 8" in worst.why()


@on_devices
def test_faults_in_two_layers(device: str) -> None:
    net, step = planted_in("0.up", "current", device, planted.overflowing())
    net[2].down.inspector = planted.underflowing()
    found = bisect(step, net, level="layer", progress=False)
    assert found.verdict == "found" and found.layers == ["0.up", "2.down"], str(found)


def test_a_fault_of_fprop_alone_and_of_the_loss() -> None:
    net, step = planted_in("1.down", "current", "cpu", planted.overflowing())
    net[1].down.inspector.request = frozenset((("fprop", "activation"),))
    found = bisect(step, net, compare="loss", progress=False)
    assert [(c.layer, c.gemms) for c in found.culprits] == [("1.down", ("fprop",))] and found.compared == "loss"


def test_healthy_models() -> None:
    net, step = planted_in("0.up", "current", "cpu", None)
    assert bisect(step, net, tolerance=0.5, progress=False).verdict == "nothing"
    found = bisect(step, net, progress=False)
    assert found.verdict == "everything" and not found.culprits
    assert "no layer is at fault" in str(found)
    with inspect(net) as seen:
        step(net)
    assert seen.report().worst is None and "keeps what its format can hold" in str(seen)


def test_nothing_where_nothing_is_quantized() -> None:
    found = bisect(planted.step_of(None), planted.model(), progress=False)
    assert found.verdict == "nothing" and found.off == 0


def test_an_outlier_that_is_all_the_energy() -> None:
    """One element keeps the SNR where it is, and takes all others to zero."""
    module = te.Linear(64, 64, device="cpu", **planted.BF16)
    x = torch.randn(32, 64).bfloat16()
    x[3, 3] = 1e7
    with inspect(module) as seen, planted.recipes.region("current"):
        module(x)
    worst = seen.report().worst
    assert worst is not None and worst.tensor == "activation" and worst.snr[0] > 30
    assert "its values spread too wide" in worst.why()


def test_a_fault_outside_of_the_chosen_layers() -> None:
    net, step = planted_in("0.up", "current", "cpu", planted.overflowing())
    found = bisect(step, net, layers=r"^[12]\.", progress=False)
    assert found.verdict == "elsewhere" and "not among these" in str(found)
