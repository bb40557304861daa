"""`te_torch.memory_report`: bytes by layer and kind, against sums done by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import te_torch as te
import te_torch.tensors as T
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_torch.listing import table
from te_torch.tools.memory_report import OUTSIDE, measure_saved, memory_report
from tests.backends import on_devices
from tests.world import values


def totals(report: Any) -> dict[str, int]:
    return {kind: size for kind, size in report.totals.items() if size}


@on_devices
def test_parameters_and_gradients(device: str) -> None:
    model = nn.ModuleDict({"a": te.Linear(32, 16, device=device), "b": te.Linear(16, 8, bias=False, device=device)})
    model["b"].bfloat16()
    assert memory_report(model).as_dict()["layers"] == {
        "a": {"parameters": 4 * (32 * 16 + 16)},
        "b": {"parameters": 2 * 16 * 8},
    }
    model["a"](values(4, 32, device=device)).sum().backward()
    model["b"].weight.main_grad = torch.zeros(8, 16, device=device)
    report = memory_report(model)
    assert report.layers["a"] == {"parameters": 2112, "gradients": 2112}
    assert report.layers["b"] == {"parameters": 256, "main_grad": 512}
    assert totals(report) == {"parameters": 2368, "gradients": 2112, "main_grad": 512} and report.total == 4992


def test_shared_memory_is_counted_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    model["b"].weight = model["a"].weight
    model["a"].weight.grad = torch.zeros(8, 8)
    model["a"].weight.main_grad = model["a"].weight.grad
    model["b"].register_buffer("flat", torch.zeros(3))
    assert memory_report(model).layers == {"a": {"parameters": 256, "gradients": 256}, "b": {"buffers": 12}}
    assert memory_report(model.to("meta")).total == 0


@on_devices
def test_fp8_state(device: str) -> None:
    """Of a module with one product: 3 forward and 2 backward slots, each a scale, the one before, and a history."""
    model = nn.ModuleDict({"mlp": te.Linear(32, 16, bias=False, device=device)})
    with te.autocast(recipe=DelayedScaling(amax_history_len=6)):
        model["mlp"](values(16, 32, device=device))
    report = memory_report(model)
    slots = sum(t.numel() for t in (model["mlp"].fp8_state.scale_fwd, model["mlp"].fp8_state.scale_bwd))
    assert report.layers == {"mlp": {"parameters": 2048, "fp8_state": 4 * slots * (2 + 6)}}


E4M3 = T.DType.kFloat8E4M3
TENSOR = T.Float8CurrentScalingQuantizer(E4M3)
#: Per copy of [32, 48]: data bytes, scale bytes; by hand from te_core.quantized's table of layouts.
FORMATS: dict[str, tuple[Any, tuple[int, int], tuple[int, int], int]] = {
    "tensor": (TENSOR, (32 * 48, 0), (48 * 32, 0), 4),  # one scale for both copies
    "block": (
        T.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
        (32 * 48, 32 * 4),
        (48 * 32, 48 * 4),
        0,
    ),
    "tiled": (T.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True), (32 * 48, 4 * 4), (48 * 32, 4 * 4), 0),
    "mxfp8": (T.MXFP8Quantizer(E4M3), (32 * 64, 128 * 4), (32 * 64, 4 * 128), 0),
    "nvfp4": (T.NVFP4Quantizer(), (32 * 24, 128 * 4 + 4), (48 * 16, 128 * 4 + 4), 0),
}


def held(quantizer: Any, device: str = "cpu", columnwise: bool = True) -> nn.Module:
    """A module with a quantized parameter."""
    model, quantizer = nn.Module(), quantizer.copy()
    quantizer.set_usage(columnwise=columnwise)
    weight = quantizer(values(32, 48, device=device, dtype=torch.bfloat16))
    model.register_parameter("weight", nn.Parameter(weight, False))
    return model


@on_devices
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columnwise", [True, False])
def test_quantized_parameters(name: str, columnwise: bool, device: str) -> None:
    quantizer, row, column, common = FORMATS[name]
    expected = {"rowwise": row[0], "scales": row[1] + common}
    if columnwise:
        expected["columnwise"] = column[0]
        expected["scales"] += column[1]
    assert memory_report(held(quantizer, device, columnwise)).layers == {"": expected}


def test_copies_of_two_kinds() -> None:
    """A rowwise copy alone, and high precision for backward; neither is a saved activation."""
    model = held(T.HybridQuantizer(rowwise_quantizer=TENSOR.copy(), columnwise_quantizer=T.IdentityQuantizer()))
    assert memory_report(model).layers == {"": {"rowwise": 32 * 48, "scales": 4, "parameters": 2 * 32 * 48}}
    with measure_saved(model) as saved:
        values(32, 48, seed=1).requires_grad_() * model.weight
    assert saved.total == 0


def test_cached_weights() -> None:
    model = nn.ModuleDict({"l": nn.Linear(48, 32, bias=False)})
    model["l"]._weight_cache = {"weight": held(TENSOR).weight}
    assert memory_report(model).layers == {"l": {"parameters": 4 * 32 * 48, "cached_weights": 2 * 32 * 48 + 4}}


# ------------------------------------------------------------------------------------ saved activations


class Net(nn.Module):
    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = te.Linear(64, 96, bias=False, device=device, params_dtype=dtype)
        self.act = nn.Sigmoid()
        self.second = te.Linear(96, 32, bias=False, device=device, params_dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x))).exp()


@on_devices
def test_saved_by_layer(device: str) -> None:
    """first keeps x; sigmoid its result, which second keeps too; exp its own, in no inner module; square outside."""
    model, x = Net(device), values(16, 64, device=device)
    with measure_saved(model) as saved:
        loss = model(x).square().sum()
    m = 4 * 16
    # square saves what exp has saved before it.
    assert saved.by_layer == {"first": m * 64, "act": m * 96, "": m * 32}
    report = memory_report(model, saved)
    assert report.layers["first"] == {"parameters": 4 * 64 * 96, "saved": m * 64}
    assert report.totals["saved"] == saved.total == m * 192 and report.as_dict()["measured"]
    loss.backward()
    assert model.second.weight.grad is not None


@on_devices
def test_saved_in_fp8(device: str) -> None:
    """Of each operand that backward reads the copy is kept: a byte an element, and no activation in 32 bits."""
    model, x = Net(device), values(16, 64, device=device)
    with measure_saved(model) as plain:
        model(x)
    with measure_saved(model) as narrow, te.autocast(recipe=Float8CurrentScaling()):
        y = model(x)
    elements = 16 * 64 + 64 * 96  # x for wgrad; x needs no gradient, so the weight may be left out
    assert 16 * 64 <= narrow.by_layer["first"] <= 2 * (elements + 64)
    assert narrow.by_layer["act"] == plain.by_layer["act"]
    y.sum().backward()


def test_outside_and_again() -> None:
    """Operations outside of every module; a second measurement starts from nothing."""
    model, x = nn.Linear(8, 4, bias=False), values(2, 8)
    saved = measure_saved(model)
    for _ in range(2):
        with saved:
            model(x).exp().sum()
        assert saved.by_layer == {"": 4 * 2 * 8, OUTSIDE: 4 * 2 * 4}
    with saved, pytest.raises(RuntimeError, match="already active"):
        saved.__enter__()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_storages_and_not_views_are_counted() -> None:
    """A view keeps its whole storage; a storage that was freed does not hide the one that takes its place."""
    model = nn.Identity()
    with measure_saved(model) as saved:
        base = values(8, 8).requires_grad_()
        kept = (base * 2)[:2].exp() + (base * 2)[:2].sigmoid()
    assert saved.total == 2 * 4 * 16, "exp and sigmoid keep their results"
    large = values(512, 512).requires_grad_()
    with measure_saved(model) as saved:
        for _ in range(10):
            large.clone().square().sum().backward()  # each clone is gone before the next, which may get its address
    assert saved.total == 10 * large.nbytes
    with measure_saved(model) as saved:
        base.clone()[:2].square().sum()
    assert saved.total == 4 * 64
    del kept


def test_recomputation_and_errors() -> None:
    model, x = nn.ModuleDict({"l": nn.Linear(8, 8), "s": nn.Sigmoid()}), values(4, 8).requires_grad_()
    with measure_saved(model) as saved:
        y = torch.utils.checkpoint.checkpoint(lambda t: model["s"](model["l"](t)), x, use_reentrant=True)
        before = dict(saved.by_layer)
        y.sum().backward()
    assert saved.by_layer == before == {OUTSIDE: 4 * 4 * 8}, "the checkpoint's input alone"
    with measure_saved(model) as saved:
        with pytest.raises(RuntimeError):
            model["l"](values(4, 9))
        x.exp()
    assert saved.by_layer[OUTSIDE] == 4 * 4 * 8, "a forward that failed is over"
    with pytest.raises(ArgumentError, match="another model"):
        memory_report(nn.Linear(1, 1), saved)


def test_printed() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(1000, 1000, bias=False), "small": nn.Linear(2, 2, bias=False)})
    text = str(memory_report(model)).splitlines()
    assert text == [
        "bytes  parameters      total",
        "-----  ----------  ---------",
        "wide    4,000,000  4,000,000",
        "small          16         16",
        "total   4,000,016  4,000,016",
        "saved for backward: not measured (te_torch.measure_saved)",
    ]
    with measure_saved(model) as saved, torch.no_grad():
        model["small"](values(1, 2))
    assert str(memory_report(model, saved)).splitlines()[5:] == [
        "saved for backward: nothing: no forward that needs a gradient ran"
    ]
    with measure_saved(model) as saved:
        model["small"](values(1, 2))
    assert "saved for backward: " not in str(memory_report(model, saved))
    assert table(["a", "bb"], [("ccc", "")]) == "a    bb\n---  --\nccc"


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("fused", [False, True])
def test_an_mlp_lets_go_of_what_it_has_read(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between its GEMMs is gone before its backward ends, with `main_grad` too; with the graph it is kept."""
    from torch.multiprocessing.reductions import StorageWeakRef

    from te_core.layers import mlp

    module = te.LayerNormMLP(16, 32, fuse_wgrad_accumulation=fused, device="cpu")
    for weight in (module.fc1_weight, module.fc2_weight):
        weight.main_grad = torch.zeros_like(weight)
    between: list[Any] = []
    gone: list[bool] = []
    plain = mlp.norm_gradients  # what its backward does last but for fc1's dw

    def watch(*args: Any) -> Any:
        gone.append(between[-1].expired())
        return plain(*args)

    monkeypatch.setattr(mlp, "norm_gradients", watch)
    for keep in (False, True):
        y = module(torch.randn(8, 16, requires_grad=True))
        h = next(t for t in y.grad_fn.saved_tensors if t is not None and t.shape == (8, 32))
        between.append(StorageWeakRef(h.untyped_storage()))
        del h
        y.sum().backward(retain_graph=keep)
    assert gone == [True, False]
