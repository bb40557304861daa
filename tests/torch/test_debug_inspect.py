"""`te_torch.debug.inspect`: its figures are those of the formulas, what runs is not changed, and all is put back."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import te_torch as te
from te_core import dtypes
from te_core.errors import UnsupportedError
from te_core.layers.inspector import POINTS
from te_core.ops.quantize import dense_columns
from te_core.quantized import QuantizedTensor
from te_torch.debug import inspect
from te_torch.debug.page import page
from te_torch.runtime import to_torch
from tests import recipes
from tests.backends import on_devices, requires_cuda
from tests.covering import covering
from tests.torch import planted
from tests.torch.test_inspectors import MODULES, SPLITS, differences, make, stepped

COLUMNS = {("dgrad", "weight"), ("wgrad", "activation"), ("wgrad", "gradient")}


class Sees:
    """Keeps values, and what they were quantized to, dequantized."""

    def __init__(self) -> None:
        self.request = POINTS
        self.seen: dict[tuple[str, str], list[Any]] = {}

    def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> None:
        x = to_torch(value).detach().float().cpu().numpy().reshape(-1, value.shape[-1]).astype(np.float64)
        q = scale = None
        if isinstance(out, QuantizedTensor):
            dense = dense_columns(rt, out, dtypes.float32, (gemm, tensor) in COLUMNS)
            q = to_torch(dense).float().cpu().numpy().astype(np.float64)
            scale = to_torch(out.scale_inv).float().cpu().numpy().max() if out.format.scaling == "tensor" else None
        self.seen.setdefault((gemm, tensor), []).append((x, q, scale, out and out.dtype.max))


@on_devices
@covering(kind=["Linear", "LayerNormMLP"], recipe=[None, "delayed", "current", "block", "mxfp8"])
def test_figures_are_those_of_the_formulas(kind: str, recipe: str | None, device: str) -> None:
    """Over microbatches together."""
    module = make(kind, device)
    module.inspector = own = [Sees() for _ in range(module.gemms)]
    with inspect(module) as seen:
        for seed in (1, 2):
            stepped(module, recipes.region(recipe), device, seed)
    report = seen.report()
    assert report.steps == [0]
    points = set()
    for s in report.series:
        number = 1 if s.layer.endswith("fc2") else 0
        for gemm in s.gemms:
            points.add((number, gemm, s.tensor))
            shown = own[number].seen[gemm, s.tensor]
            shown = shown[:1] if s.tensor == "weight" else shown
            x = np.concatenate([x for x, *_ in shown])
            assert s.amax[0] == np.abs(x).max() and s.count[0] == x.size and s.nonfinite[0] == 0
            low = [q for _, q, *_ in shown if q is not None]
            assert (s.kind is None) == (not low)
            if not low:
                assert np.isnan([s.snr[0], s.underflow[0], s.overflow[0]]).all()
                continue
            q = np.concatenate(low)
            noise = np.square(x - q).sum()
            np.testing.assert_allclose(s.snr[0], 10 * np.log10(np.square(x).sum() / noise), rtol=1e-4)
            gone = 100 * ((x != 0) & (q == 0)).mean()
            np.testing.assert_allclose(s.underflow[0], gone, rtol=1e-6, atol=1e-9)
            if recipe in ("delayed", "current"):
                over = sum(
                    (np.abs(x).astype(np.float32) > np.float32(largest) * scale).sum() for x, _, scale, largest in shown
                )
                np.testing.assert_allclose(s.overflow[0], 100 * over / x.size, atol=1e-9)
                np.testing.assert_allclose(s.scale[0], min(1 / scale for *_, scale, _ in shown), rtol=1e-6)
    assert points == {(i, *p) for i in range(module.gemms) for p in own[0].seen}


@on_devices
@covering(kind=MODULES, recipe=[None, "delayed", "current", "block", "mxfp8", "nvfp4"])
def test_nothing_changes(kind: str, recipe: str | None, device: str) -> None:
    plain = make(kind, device)
    looked = copy.deepcopy(plain)
    for i in range(2):
        torch.manual_seed(i)
        want = stepped(plain, recipes.region(recipe), device, i)
        torch.manual_seed(i)
        with inspect(looked) as seen:
            found = stepped(looked, recipes.region(recipe), device, i)
        assert not differences(found, want)
        products = len([n for n in SPLITS if n]) if kind == "GroupedLinear" else plain.gemms
        assert len(seen.report().layers()) == products
    states = [m.fp8_state for m in (plain, looked)]
    if recipe == "delayed":
        assert all(torch.equal(a, b) for a, b in zip(states[0].buffers(), states[1].buffers(), strict=True))


def checkpointed(how: str, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    if how == "none":
        return module(x)
    function = te.checkpoint if how.startswith("te") else torch.utils.checkpoint.checkpoint
    return function(module, x, use_reentrant=how.endswith("reentrant"))


@pytest.mark.parametrize("how", ["te reentrant", "te hooks", "torch reentrant", "torch hooks"])
def test_what_a_checkpoint_runs_again_counts_once(how: str) -> None:
    found = {}
    for way in ("none", how):
        net = planted.model()
        x = torch.randn(8, planted.WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        with inspect(net) as seen:
            with recipes.region("block"):
                y = checkpointed(way, net, x)
            y.float().square().mean().backward()
        found[way] = {(s.name, s.count[0], s.amax[0], s.snr[0]) for s in seen.report().series}
    assert {name for name, *_ in found[how]} == {name for name, *_ in found["none"]}
    # NaN is not equal to itself: of outputs there is no SNR.
    assert {(n, c, a) for n, c, a, _ in found[how]} == {(n, c, a) for n, c, a, _ in found["none"]}


def test_everything_is_put_back() -> None:
    net, step = planted.model(), planted.step_of("current")
    own = planted.overflowing()
    net[1].up.inspector = own
    step(net)
    calls = {m: dict(m._calls) for m in net.modules() if hasattr(m, "_calls")}
    with pytest.raises(KeyError), inspect(net) as seen:
        step(net)
        assert net[1].up.inspector is not own
        assert copy.deepcopy(net)[1].up.inspector is not seen and copy.deepcopy(net)[0].up.inspector is None
        pickle.loads(pickle.dumps(net[0].up))
        raise KeyError("ends it")
    assert net[1].up.inspector is own and net[0].up.inspector is None
    assert {m: dict(m._calls) for m in calls} == calls
    assert seen.report().worst is not None and seen.report().worst.layer == "1.up", "its own inspector goes on acting"
    with pytest.raises(RuntimeError, match=r"step\(\) belongs inside"):
        seen.step()


def test_nested_and_two_models_and_left_in_any_order() -> None:
    net, other, step = planted.model(), planted.model(), planted.step_of("current")
    a, b, c = inspect(net), inspect(net, layers="up"), inspect(other)
    a.__enter__(), b.__enter__(), c.__enter__()
    step(net)
    a.__exit__(None, None, None)
    step(net), step(other), b.step()
    b.__exit__(None, None, None), c.__exit__(None, None, None)
    assert all(m.inspector is None for m in (*net.modules(), *other.modules()) if hasattr(m, "inspector"))
    counts = [{s.name: s.count.sum() for s in seen.report().series} for seen in (a, b, c)]
    assert set(counts[1]) == {name for name in counts[0] if ".up " in name} and set(counts[0]) == set(counts[2])
    for name, count in counts[1].items():
        assert count == counts[0][name] * (1 if " weight " in name else 2)
    assert counts[0] == counts[2]


def test_steps_that_nobody_looks_at_run_as_without() -> None:
    net, step = planted.model(), planted.step_of("current")
    looked = []
    with inspect(net, freq=3, start_step=2, end_step=9) as seen:
        for _ in range(12):
            looked.append(net[0].up.inspector is not None)
            step(net)
            seen.step()
    assert [i for i, was in enumerate(looked) if was] == seen.report().steps == [3, 6, 9]
    assert all(len(s.snr) == 3 for s in seen.report().series)


def test_selection() -> None:
    net, step = planted.model(), planted.step_of("current")
    with inspect(net, [r"^0\.", "2.down"], gemms=["fprop"], tensors=["activation", "output"]) as seen:
        step(net)
    names = {(s.layer, s.tensor, s.gemm) for s in seen.report().series}
    layers = ("0.up", "0.down", "2.down")
    assert names == {(layer, t, "fprop") for layer in layers for t in ("activation", "output")}
    with inspect(net, lambda name: name == "1.up", gemms="wgrad") as seen:
        step(net)
    assert {(s.layer, s.tensor) for s in seen.report().series} == {
        ("1.up", t) for t in ("activation", "gradient", "wgrad")
    }


def test_models_that_it_has_nothing_to_say_of() -> None:
    with inspect(planted.model()) as seen:
        pass
    assert str(seen).startswith("nothing was seen") and "not seen: 0.up, 0.down" in str(seen)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_evaluation(grad: Any) -> None:
    net = planted.model().eval()
    with inspect(net) as seen, grad(), recipes.region("current"):
        net(torch.randn(8, planted.WIDTH).bfloat16())
    assert {s.tensor for s in seen.report().series} == {"activation", "weight", "output"}


def test_what_is_no_number_stands_first() -> None:
    net, step = planted.model(), planted.step_of("current")
    with torch.no_grad():
        net[1].up.weight[3, 3] = float("nan")
    with inspect(net) as seen:
        step(net)
    first = seen.report().series[0]
    assert (first.layer, first.tensor) == ("1.up", "weight") and "NaN or infinite" in first.why()


def test_compiled_models_are_refused() -> None:
    net = planted.model()
    run = torch.compile(lambda x: net(x), backend="eager")
    x = torch.randn(8, planted.WIDTH).bfloat16()
    run(x)
    with inspect(net), pytest.raises(Exception, match="inspect.*: got a compiled model"):
        run(x)
    torch.compiler.reset()
    assert run(x).shape == x.shape


def test_files(tmp_path: Any) -> None:
    net, step = planted.model(), planted.step_of("current")
    with inspect(net) as seen:
        for _ in range(3):
            step(net)
            seen.step()
    whole = json.loads(seen.to_json(tmp_path / "a" / "seen.json").read_text())
    assert whole["steps"] == [0, 1, 2] and len(whole["series"]) == len(seen.report().series) == 6 * 6
    assert seen.to_html(tmp_path / "seen.html", "<a title>").read_text().count("&lt;a title&gt;") == 2
    pytest.importorskip("matplotlib")
    with inspect(net, "0.up", gemms=["fprop"]) as seen:  # few curves: drawing one takes some 10 ms
        step(net)
    made = [path.read_bytes() for path in seen.to_png(tmp_path / "png")]
    assert made == [path.read_bytes() for path in seen.to_png(tmp_path / "png")] and all(m[1:4] == b"PNG" for m in made)


def test_an_inspection_that_has_ended_holds_no_model() -> None:
    net = planted.model()
    with inspect(net) as seen:
        planted.step_of("current")(net)
    assert str(seen)
    assert not any(type(o).__name__ == "Watch" for o in gc.get_referents(net[0].up))


@requires_cuda
def test_nothing_waits_for_the_device() -> None:
    net, step = planted.model("cuda"), planted.step_of("delayed", "cuda")
    with inspect(net) as seen:
        step(net)  # what is made once
        seen.step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                step(net)
                seen.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(seen.report().steps) == 3


@requires_cuda
def test_captures_are_refused() -> None:
    net = planted.model("cuda")
    x = torch.randn(8, planted.WIDTH, device="cuda").bfloat16()
    with torch.no_grad(), recipes.region("current"):
        net(x)
        with inspect(net), pytest.raises(UnsupportedError, match="a CUDA graph that is being captured"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                net(x)


def test_steps_in_which_nobody_could_look() -> None:
    """As where a program that was made before runs: the report says so, and the page."""
    net, step = planted.model(blocks=1), planted.step_of("current")
    with inspect(net) as seen:
        for _ in range(3):
            seen.step()
    said = "nothing was seen: no layer of te_torch ran eagerly in a step that was looked at (what a replayed CUDA graph"
    assert str(seen).startswith(said) and str(seen).count("\n") == 1
    assert said in page(seen.report(), "x")
    with inspect(net) as seen:
        seen.step()
        step(net)
        seen.step()
    assert seen.report().verdict().startswith("1 step of 2 layers (in 1 more no layer ran eagerly: what a replayed")
    assert seen.report().steps == [1]
    with inspect(net) as seen:
        step(net)
    assert "eagerly" not in str(seen)


@requires_cuda
def test_graphs_that_were_captured_before_are_not_seen() -> None:
    layer, x = te.Linear(32, 32, device="cuda"), torch.randn(16, 32, device="cuda", requires_grad=True)
    graphed = te.make_graphed_callables(layer, (x,))
    with inspect(torch.nn.Sequential(layer)) as seen:
        for _ in range(2):
            graphed(x).sum().backward()
            seen.step()
    assert str(seen).startswith("nothing was seen") and "a replayed CUDA graph" in str(seen)
