"""What becomes of NaN and infinity in each recipe, and `check_finite`, which counts what casts meet of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import UnsupportedError
from te_core.recipe import DelayedScaling
from tests import recipes
from tests import world as module_steps
from tests.backends import on_devices, requires_cuda
from tests.covering import covering
from tests.world import differences

BF16 = torch.bfloat16
NAN, INF = float("nan"), float("inf")

#: What the products show of one such value in an operand: what docs/precision.md says.
SHOWN = {
    ("delayed", NAN): "NaN",
    ("delayed", INF): "finite",
    ("current", NAN): "NaN",
    ("current", INF): "finite",
    ("block", NAN): "NaN",
    ("block", INF): "finite",
    ("mxfp8", NAN): "NaN",
    ("mxfp8", INF): "inf",
    ("nvfp4", NAN): "finite",
    ("nvfp4", INF): "NaN",
}


def kind(t: torch.Tensor) -> str:
    return "NaN" if t.isnan().any() else "inf" if t.isinf().any() else "finite"


def linear(device: str) -> te.Linear:
    torch.manual_seed(0)
    module = te.Linear(64, 64, bias=False, params_dtype=BF16, device=device)
    with torch.no_grad():  # zero times infinity would be NaN
        module.weight.copy_(torch.where(module.weight.abs() < 1e-3, 1e-3, module.weight))
    return module


def step(module: Any, x: torch.Tensor, dy: torch.Tensor, recipe: str | None, **options: Any) -> dict[str, torch.Tensor]:
    return module_steps.step(module, x, recipes.region(recipe, **options), dy=dy)


@on_devices
@covering(turns=2, where=["activation", "weight", "gradient"], recipe=recipes.KINDS, value=[NAN, INF])
def test_what_becomes_of_it(where: str, recipe: str, value: float, device: str) -> None:
    """As documented, and counted in any case: once a cast."""
    module = linear(device)
    x, dy = (torch.where(t.abs() < 0.05, 0.05, t).to(BF16) for t in torch.randn(2, 32, 64, device=device))
    with torch.no_grad():
        {"activation": x, "weight": module.weight, "gradient": dy}[where][3, 5] = value
    for _ in range(2):
        got = step(module, x, dy, recipe, check_finite=True)
    reach = {"activation": ("y", "weight"), "weight": ("y", "dx"), "gradient": ("dx", "weight")}[where]
    assert {kind(got[name]) for name in reach} == {SHOWN[recipe, value]}
    (row,) = te.nonfinite_report(module).rows
    assert row.tensor == where and (row.nans, row.infinities) == ((2, 0) if value is NAN else (0, 2))


MODULES: dict[str, Any] = {
    "LayerNormLinear": lambda d: te.LayerNormLinear(64, 96, params_dtype=BF16, device=d),
    "LayerNormMLP": lambda d: te.LayerNormMLP(64, 96, activation="swiglu", params_dtype=BF16, device=d),
    "LayerNormMLP, recomputed": lambda d: te.LayerNormMLP(64, 96, checkpoint=True, params_dtype=BF16, device=d),
    "TransformerLayer": lambda d: te.TransformerLayer(
        64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, device=d
    ),
}


@on_devices
@covering(turns=2, name=MODULES, recipe=recipes.KINDS[:4])
def test_counting_changes_no_bit(name: str, recipe: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fused is not while it is counted, and equal bit for bit; state and counts are right afterwards."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # attention's gradients are to be compared
    module = MODULES[name](device)
    twin = copy.deepcopy(module)
    for number in (1, 2):
        x, dy = (number * torch.randn(32, 1, 64, device=device).to(BF16) for _ in range(2))
        dy = torch.randn(32, 1, 96, device=device).to(BF16) if name == "LayerNormLinear" else dy
        assert not differences(step(module, x, dy, recipe, check_finite=True), step(twin, x, dy, recipe))
    assert not differences(dict(module.named_buffers()), dict(twin.named_buffers()))
    report = te.nonfinite_report(module)
    assert report.total == 0 and report.counted and "no NaN" in str(report)
    step(module, torch.full_like(x, NAN), torch.full_like(dy, NAN), recipe, check_finite=True)
    tensors = {row.tensor for row in te.nonfinite_report(module, reset=True).rows}
    assert {"activation", "gradient"} <= tensors and te.nonfinite_report(module).total == 0


@on_devices
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_counts_once(reentrant: bool, device: str) -> None:
    module = linear(device)
    x = torch.randn(32, 64, device=device).to(BF16)
    x[0, 0] = NAN
    x.requires_grad_()
    with recipes.region("current", check_finite=True):
        y = te.checkpoint(module, x, use_reentrant=reentrant)
    y.backward(torch.full_like(y, INF))
    rows = {row.tensor: (row.nans, row.infinities) for row in te.nonfinite_report(module).rows}
    assert rows == {"activation": (1, 0), "gradient": (0, 32 * 64)}


@on_devices
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_groups(recipe: str, device: str) -> None:
    module = te.GroupedLinear(3, 64, 64, params_dtype=BF16, device=device)
    x = torch.randn(40, 64, device=device).to(BF16)
    x[20, :3] = NAN  # of the second group
    with recipes.region(recipe, check_finite=True):
        module(x, [16, 8, 16])
    (row,) = te.nonfinite_report(module).rows
    assert (row.gemm, row.tensor, row.nans) == ("weight1", "activation", 3)


@on_devices
def test_attention(device: str) -> None:
    """What attention itself casts; the probabilities, inside of cuDNN's kernel, are not counted."""
    module = te.DotProductAttention(2, 128, attention_dropout=0.0)
    q = torch.randn(128, 1, 2, 128, device=device).to(BF16)
    q[0, 0, 0, 0] = INF
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True), check_finite=True):
        module(q, q.clamp(-3, 3), q.clamp(-3, 3))
    rows = te.nonfinite_report(module).rows
    assert ("qkv", "activation", 1) in {(row.gemm, row.tensor, row.infinities) for row in rows}


@on_devices
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize(
    ("origin", "first"),
    [
        ("1.fc2_weight", ("1", "fc2", "weight")),
        ("1.layer_norm_bias", ("1", "layer_norm_bias", "parameter")),
        ("input", ("2", "fc1", "activation")),
        ("gradient", ("0", "fc2", "gradient")),
    ],
)
def test_the_origin_comes_first(origin: str, first: tuple[str, str, str], recipe: str, device: str) -> None:
    """Of three modules that are called last to first, also when the optimizer has spread it over all weights since."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(te.LayerNormMLP(64, 96, device=device) for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, dy = torch.randn(2, 32, 64, device=device)
    for turn in range(4):
        if turn == 1:
            tensors = {"input": x, "gradient": dy, **dict(model.named_parameters())}
            with torch.no_grad():
                tensors[origin].view(-1)[5] = NAN
        with recipes.region(recipe, check_finite=True):
            y = model[0](model[1](model[2](x)))
        y.backward(dy)
        optimizer.step()
        rows = te.nonfinite_report(model).rows
        assert [row[:3] for row in rows[:1]] == [first][: turn > 0]
        kinds = ["parameter weight", "activation output", "gradient dgrad"]
        if turn == 1:
            order = [next(i for i, kind in enumerate(kinds) if row.tensor in kind) for row in rows]
            assert order == sorted(order)
            calls = [int(row.layer) for row, kind in zip(rows, order, strict=True) if kind == 1]
            assert calls == sorted(calls, reverse=True)


def test_reports() -> None:
    model = torch.nn.Sequential(linear("cpu"), linear("cpu"))
    assert "nothing was counted" in str(te.nonfinite_report(model))
    x = torch.full((4, 64), INF).to(BF16)
    with recipes.region("current", check_finite=True):
        model[0](x)
    report = te.nonfinite_report(model)
    assert report.others == ["1"] and "not counted: 1" in str(report) and report.total == 256
    assert report.as_dict()["rows"] == [
        {"layer": "0", "gemm": "weight", "tensor": "activation", "nans": 0, "infinities": 256}
    ]
    assert te.nonfinite_report(copy.deepcopy(model)).counted == []


def test_compiled_code_refuses() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear("cpu"), backend="eager")
    with pytest.raises(Exception, match="check_finite"), recipes.region("current", check_finite=True):  # torch wraps it
        compiled(torch.randn(4, 64).to(BF16))
    assert issubclass(UnsupportedError, RuntimeError)


@requires_cuda
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_nothing_waits(recipe: str) -> None:
    """The counts stay on the device until they are read, in a captured step too."""
    module = linear("cuda")
    x, dy = (torch.randn(32, 64, device="cuda").to(BF16) for _ in range(2))
    step(module, x, dy, recipe, check_finite=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(module, x, dy, recipe, check_finite=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(module, x, dy, recipe, check_finite=True)
    te.nonfinite_report(module, reset=True)
    x[0, 0] = NAN
    for _ in range(3):
        graph.replay()
    (row,) = te.nonfinite_report(module).rows
    assert (row.tensor, row.nans) == ("activation", 3)
