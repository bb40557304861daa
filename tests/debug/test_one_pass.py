"""Statistics of values and of their cast: one pass over the tensor, the same figures as each alone."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

import te_torch as te
from te_torch.debug import records
from tests import recipes
from tests.backends import devices
from tests.debug.conftest import config

OPERANDS, RESULTS = ["activation", "weight", "gradient"], ["output", "dgrad", "wgrad"]
VALUES: dict[str, Any] = {"stats": ["min", "max", "mean", "std", "l1_norm", "cur_amax"], "tensors": OPERANDS + RESULTS}
CASTS: dict[str, Any] = {"stats": ["underflows%", "mse", "scale_inv_max"], "tensors": OPERANDS}
FEATURES = {"values": {"LogTensorStats": VALUES}, "casts": {"LogFp8TensorStats": CASTS}}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements each pass over a tensor has read."""
    seen: list[int] = []
    statistics = records.ops.statistics
    monkeypatch.setattr(
        records.ops, "statistics", lambda rt, x, *args, **kw: (seen.append(x.size), statistics(rt, x, *args, **kw))
    )
    return seen


def figures(debugging: Any, device: str, recipe: str, features: dict[str, Any]) -> dict[tuple[str, int], float]:
    """Of two microbatches: the second one in high precision."""
    session = debugging(config(**features))
    torch.manual_seed(0)
    layer = te.Linear(64, 96, bias=False, params_dtype=torch.bfloat16, device=device, name="layer")
    for region in (recipes.region(recipe), te.autocast(enabled=False)):
        x = torch.randn(32, 64, device=device).bfloat16().requires_grad_()
        with region:
            y = layer(x)
        y.backward(torch.randn(32, 96, device=device).bfloat16())
    session.step()
    found: dict[tuple[str, int], float] = session.statistics()
    session.api.end_debug()
    for name in ("nvdlfw_inspect", "Default Statistics"):
        logging.getLogger(name).handlers.clear()
    return found


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("recipe", recipes.KINDS[:2])
def test_one_pass(debugging: Any, passes: list[int], device: str, recipe: str) -> None:
    both = figures(debugging, device, recipe, {**FEATURES["values"], **FEATURES["casts"]})
    together = len(passes)
    alone = [figures(debugging, device, recipe, FEATURES[kind]) for kind in FEATURES]
    # Six tensors in each microbatch (a weight in the first one only), three of them with a cast in the first.
    assert together == 11
    assert len(passes) - together == 11 + 3
    want = {**alone[0], **alone[1]}
    assert both.keys() == want.keys()
    for name, value in both.items():
        assert math.isclose(value, want[name], rel_tol=1e-4, abs_tol=1e-3), name


def test_casts_of_two_recipes(debugging: Any, passes: list[int]) -> None:
    """What another recipe would make is a pass of its own; the values are in the first one."""
    casts = {"stats": ["mse", "mxfp8_mse", "mxfp8_mse_columnwise"], "tensors": ["activation"]}
    values = {"stats": ["max", "l1_norm"], "tensors": ["activation"]}
    session = debugging(config(LogTensorStats=values, LogFp8TensorStats=casts))
    layer = te.Linear(64, 96, params_dtype=torch.bfloat16, device="cpu", name="layer")
    x = torch.randn(32, 64).bfloat16()
    with recipes.region("current"):
        layer(x)
    session.step()
    assert len(passes) == 3
    found = session.statistics()
    assert found["layer_activation_max", 0] == pytest.approx(x.max().item(), abs=1e-4)
    assert found["layer_activation_l1_norm", 0] == pytest.approx(x.double().abs().sum().item(), rel=1e-5)
    assert len(found) == 5


@pytest.mark.parametrize("device", devices())
def test_a_weight_that_is_held_quantized(debugging: Any, passes: list[int], device: str) -> None:
    session = debugging(
        config(
            LogTensorStats={"stats": ["max", "std"], "tensors": ["weight"]},
            LogFp8TensorStats={"stats": ["scale_inv_max"], "tensors": ["weight"]},
        )
    )
    with te.quantized_model_init(recipe=recipes.RECIPES["current"]):
        layer = te.Linear(64, 96, params_dtype=torch.bfloat16, device=device, name="layer")
    for _ in range(2):
        with recipes.region("current"):
            layer(torch.randn(32, 64, device=device).bfloat16())
    session.step()
    assert passes == [64 * 96]
    found, held = session.statistics(), layer.weight.dequantize().double()
    assert found["layer_weight_max", 0] == pytest.approx(held.max().item(), abs=1e-4)
    assert found["layer_weight_std", 0] == pytest.approx(held.std().item(), abs=1e-4)
    assert found["layer_weight_scale_inv_max", 0] == pytest.approx(layer.weight._scale_inv.item(), abs=1e-4)


def documented_std(buffers: list[torch.Tensor]) -> float:
    """By the formula of the specification."""
    count = [b.numel() for b in buffers]
    mean = sum(b.double().sum().item() for b in buffers) / sum(count)
    terms = [n * (b.double().var() - (b.double().mean() - mean) ** 2) for n, b in zip(count, buffers, strict=True)]
    total = sum(t.item() for t in terms) / sum(count)
    return math.sqrt(total) if total >= 0 else math.nan


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("shift", [0.0, 0.3, 4.0])
def test_the_standard_deviation_over_microbatches(debugging: Any, device: str, shift: float) -> None:
    """As documented, of the one of each: neither that of all values nor a mean of them."""
    session = debugging(config(LogTensorStats={"stats": ["std", "mean", "l2_norm"], "tensors": ["activation"]}))
    layer = te.Linear(64, 96, params_dtype=torch.bfloat16, device=device, name="layer")
    torch.manual_seed(0)
    buffers = [(torch.randn(rows, 64) + shift * i).bfloat16() for i, rows in enumerate((32, 16, 48))]
    for step in range(2):  # the second one begins anew
        for x in buffers[step:]:
            layer(x.to(device))
        session.step()
        found, together = session.statistics(), torch.cat(buffers[step:]).double()
        want = documented_std(buffers[step:])
        assert found["layer_activation_std", step] == pytest.approx(want, abs=1e-4, nan_ok=True)
        assert found["layer_activation_mean", step] == pytest.approx(together.mean().item(), abs=1e-4)
        assert found["layer_activation_l2_norm", step] == pytest.approx(together.norm().item(), rel=1e-5)
