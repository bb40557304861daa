"""`te_torch.debug.bisect`: what it switches is the high-precision GEMM, bit for bit; every run begins alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError
from te_torch.debug import bisect, bisection
from te_torch.debug.bisection import GEMMS, _Search, _Steps
from te_torch.debug.snapshot import Snapshot
from tests import recipes
from tests.backends import on_devices
from tests.covering import covering
from tests.torch import planted
from tests.torch.test_inspectors import MODULES, differences, make, stepped


@on_devices
@covering(kind=[k for k in MODULES if "recomputed" not in k], recipe=["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_all_in_high_precision_is_the_module_outside_of_a_region(kind: str, recipe: str, device: str) -> None:
    """Outputs and gradients; sums of a bias's gradient go another way, in another order."""
    module, plain = make(kind, device), make(kind, device)
    want = stepped(plain, recipes.region(None), device)
    with _Steps(lambda m: 0.0, module, "loss", ()) as steps:
        steps.run([(name, gemm) for name in steps.names for gemm in GEMMS])
        found = stepped(module, recipes.region(recipe), device)
    assert module.inspector is None
    for name in differences(found, want):
        assert name.endswith("bias"), name
        torch.testing.assert_close(found[name], want[name], rtol=2e-2, atol=1e-2)


@on_devices
@pytest.mark.parametrize("gemm", GEMMS)
def test_one_gemm(gemm: str, device: str) -> None:
    """The others read what they read without it."""
    module, low, plain = (make("Linear, no bias", device) for _ in range(3))
    want = {True: stepped(plain, recipes.region(None), device), False: stepped(low, recipes.region("current"), device)}
    with _Steps(lambda m: 0.0, module, "loss", ()) as steps:
        steps.run([(steps.names[0], gemm)])
        found = stepped(module, recipes.region("current"), device)
    of = {"y": "fprop", "dx": "dgrad", "weight": "wgrad"}
    assert not differences(found, {name: want[of[name] == gemm][name] for name in found})
    assert set(differences(want[True], want[False])) == set(of)


def everything(net: torch.nn.Module, optimizer: Any) -> list[Any]:
    found: list[Any] = [t.clone() for t in (*net.parameters(), *net.buffers())]
    found += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    found += [torch.get_rng_state(), [m.training for m in net.modules()], [n for n, _ in net.named_modules()]]
    states = [m.fp8_state for m in net.modules() if getattr(m, "fp8_state", None) is not None]
    found += [[(s.due, s.precision, s.in_use) for s in states]]
    found += [t.clone() for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return found


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_every_run_begins_alike_and_all_is_put_back(recipe: str, ran: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that draw, and train, with an optimizer."""
    monkeypatch.setattr(bisection, "MOST_RUNS", 6)
    net = planted.model()
    one = planted.step_of(recipe)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    if ran:
        one(net), optimizer.step()
        one(net)  # gradients are there
    began: list[Any] = []

    def train(model: Any) -> Any:
        began.append(everything(model, optimizer))
        model.eval()
        loss = torch.zeros(())
        for _ in range(2):
            loss = one(model) * (1 + 1e-9 * torch.rand(()))
            optimizer.step()
        model[0].up.fp8_state and model[0].up.fp8_state.scale_fwd.mul_(2)
        return loss

    before = everything(net, optimizer)
    bisect(train, net, restore=[optimizer], progress=False)
    assert len(began) > 4 and all(same(before, run) for run in began)
    assert same(before, everything(net, optimizer))


@on_devices
def test_quantized_parameters_come_back(device: str) -> None:
    with te.quantized_model_init(recipe=recipes.rule("delayed")):
        module = te.Linear(64, 64, device=device, **planted.BF16)
    kept = Snapshot(module, ())
    before = module.weight.dequantize().clone()
    with torch.no_grad():
        module.weight.copy_(torch.randn_like(before))
    assert not torch.equal(module.weight.dequantize(), before)
    kept.restore()
    assert torch.equal(module.weight.dequantize(), before)


def test_a_step_that_differs_from_run_to_run_is_refused() -> None:
    net, one = planted.model(), planted.step_of("current")
    count = iter(range(100))
    with pytest.raises(ArgumentError, match="gives another result when it is run again"):
        bisect(lambda m: one(m) and float(next(count)), net, compare="loss", progress=False)
    assert net[0].up.inspector is None


class Off:
    """Runs of a step that is bad unless all of these are in high precision."""

    compare = "loss"

    def __init__(self, bad: set[int]) -> None:
        self.bad, self.runs = bad, 0

    def run(self, high: list[tuple[str, str]]) -> tuple[float, list[Any]]:
        self.runs += 1
        return 1.0 + 0.1 * len(self.bad - {int(layer) for layer, _ in high}), []

    def off(self, found: tuple[float, list[Any]], want: tuple[float, list[Any]]) -> float:
        return abs(found[0] - want[0]) / want[0]


@pytest.mark.parametrize("bad", [{0}, {63}, {17}, {3, 4}, {0, 31, 63}, {1, 20, 21, 40, 62}, set(range(8))])
def test_the_smallest_set_is_found_by_halves(bad: set[int]) -> None:
    units = [(str(i), ("fprop",)) for i in range(64)]
    steps = Off(bad)
    search = _Search(steps, (1.0, []), 0.01, 1000, lambda line: None)  # type: ignore[arg-type]
    assert [int(layer) for layer, _ in search.smallest([], True, units)] == sorted(bad)
    assert steps.runs <= 2 + 14 * len(bad)


def test_progress_and_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    net = copy.deepcopy(planted.model())
    net[1].up.inspector = planted.overflowing()
    found = bisect(planted.step_of("current"), net)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 5 and all(line.startswith("bisect: run ") for line in lines)
    assert "1.up" in str(found) and "off without it" in str(found)
    assert found.as_dict()["culprits"][0]["layer"] == "1.up" and found.off > 0.5 > 0.2 > found.left
