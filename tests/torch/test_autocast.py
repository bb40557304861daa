"""Regions: what runs in which precision, when scales are updated and from what, and that all state is the modules'."""

from __future__ import annotations

import copy
import gc
import math
import threading
import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Format
from te_torch import state as scaling
from tests.backends import devices
from tests.module_steps import GEMM_MODULES, differences, fp8_state, gradient_for, make, on, region, step, values
from tests.reference import modules as reference
from tests.tolerances import DB, snr_db

on_devices = pytest.mark.parametrize("device", devices())
gemm_modules = pytest.mark.parametrize("kind", GEMM_MODULES)
SHORT = DelayedScaling(amax_history_len=4)


def linear(device: str, seed: int = 0) -> te.Linear:
    return make("Linear", device, seed=seed)


def batch(device: str, seed: int = 1) -> torch.Tensor:
    return values(16, 48, device=device, seed=seed)


def changed(module: torch.nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    """Which of scale_fwd, amax_history_fwd, … differ from before."""
    return {name.rpartition(".")[2] for name in differences(fp8_state(module), before)}


def quantized(module: torch.nn.Module, x: torch.Tensor) -> bool:
    """Whether the module computes in FP8 here, by its error."""
    with torch.no_grad():
        noise = snr_db(module(x), reference.forward(module, x.cpu().double(), {
            n: p.detach().cpu().double() for n, p in module.named_parameters()
        })[0])  # fmt: skip
    assert noise >= DB["fp8 linear"]
    return noise < DB["bf16"]


# ------------------------------------------------------------------------------------------- which precision


@on_devices
def test_nested_regions(device: str) -> None:
    module, x = linear(device), batch(device)
    current = Float8CurrentScaling()
    assert not quantized(module, x)
    with te.autocast(recipe=current):
        assert quantized(module, x)
        with te.autocast(enabled=False):
            assert not quantized(module, x)
            with te.autocast(recipe=current):
                assert quantized(module, x)
            assert not quantized(module, x)
        assert quantized(module, x)
    assert not quantized(module, x)
    with te.autocast(enabled=False, recipe=current):
        assert not quantized(module, x)
    assert module.fp8_state is None, "current scaling keeps no state"


@on_devices
def test_an_exception_ends_the_region(device: str) -> None:
    """The precision from before is back, and what ran is updated as ever."""
    module, x = linear(device), batch(device)
    plain = copy.deepcopy(module)
    with pytest.raises(KeyError), te.autocast(recipe=SHORT):
        with te.autocast(enabled=False):
            module(x)
        module(x)
        raise KeyError
    with te.autocast(recipe=SHORT):
        plain(x)
    assert not quantized(module, x)
    assert not differences(fp8_state(module), fp8_state(plain))


@on_devices
def test_one_instance(device: str) -> None:
    """One after the other yes, inside itself no; and the refused entry leaves the region as it was."""
    module, x = linear(device), batch(device)
    held = te.autocast(recipe=SHORT)
    for _ in range(2):
        with held:
            with pytest.raises(RuntimeError, match="already active"):
                held.__enter__()
            assert quantized(module, x)
        assert not quantized(module, x)


@on_devices
def test_default_recipe(device: str) -> None:
    assert te.get_default_recipe() == DelayedScaling()
    module, other, x = linear(device), linear(device), batch(device)
    for _ in range(2):
        with te.autocast():
            y = module(x)
        with te.autocast(recipe=DelayedScaling()):
            assert torch.equal(y, other(x))
    assert module.fp8_state.amax_history_fwd.shape == (1024, 3)


@on_devices
def test_older_name(device: str) -> None:
    module, other, x = linear(device), linear(device), batch(device)
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match="fp8_autocast") as seen, te.fp8_autocast(fp8_recipe=SHORT):
            y = module(x)
        assert seen[0].filename == __file__
        with warnings.catch_warnings(), te.autocast(recipe=SHORT):
            warnings.simplefilter("error")
            assert torch.equal(y, other(x))
    with pytest.warns(DeprecationWarning), te.fp8_autocast(enabled=False, fp8_recipe=SHORT):
        assert not quantized(module, x)
    with pytest.warns(DeprecationWarning), te.fp8_autocast(True, False, SHORT, None):
        assert quantized(module, x)


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match="calibrating"):
        te.autocast(enabled=False, calibrating=True)
    with pytest.raises(ArgumentError, match="recipe"):
        te.autocast(recipe="delayed")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- when it is updated


@on_devices
@gemm_modules
def test_forward_update_at_the_outermost_exit_only(kind: str, device: str) -> None:
    module, x = make(kind, device), batch(device)
    step(module, x, SHORT)
    before = fp8_state(module)
    with te.autocast(recipe=SHORT):
        with te.autocast(recipe=SHORT):
            module(3 * x)
        assert changed(module, before) == {"amax_history_fwd"}
        assert torch.equal(module.fp8_state.scale_fwd, before["fp8_state.scale_fwd"])
        with te.autocast(recipe=SHORT):
            pass
        assert changed(module, before) == {"amax_history_fwd"}
    assert "scale_fwd" in changed(module, before)
    once = fp8_state(module)
    with te.autocast(recipe=SHORT):
        pass  # nothing ran: nothing is rolled
    assert not changed(module, once)


@on_devices
@pytest.mark.parametrize("why", ["no_grad", "inference_mode", "graph", "outer disabled"])
def test_no_forward_update(why: str, device: str) -> None:
    """The maximum stays in row 0, for the next update to read."""
    module, x = linear(device), batch(device)
    step(module, x, SHORT)
    before = fp8_state(module)
    if why in ("no_grad", "inference_mode"):
        with getattr(torch, why)(), te.autocast(recipe=SHORT):
            module(3 * x)
    elif why == "graph":
        with te.autocast(recipe=SHORT, _graph=True):
            module(3 * x)
    else:
        with te.autocast(enabled=False), te.autocast(recipe=SHORT):
            module(3 * x)
    assert changed(module, before) == {"amax_history_fwd"}
    assert module.fp8_state.amax_history_fwd[0, 0] == 3 * x.abs().max()
    with te.autocast(recipe=SHORT):
        module(x)
    assert module.fp8_state.scale_fwd[0] == 448 / (3 * x.abs().max())


@on_devices
def test_grad_mode_at_the_exit_decides(device: str) -> None:
    module, x = linear(device), batch(device)
    with te.autocast(recipe=SHORT):
        with torch.no_grad():
            module(x)
    assert module.fp8_state.scale_fwd[0] != 1


@on_devices
@gemm_modules
def test_called_twice_takes_the_maximum_of_the_calls(kind: str, device: str) -> None:
    module, other, x = make(kind, device), make(kind, device), batch(device)
    for _ in range(2):
        with te.autocast(recipe=SHORT):
            ys = [module(x * s) for s in (0.5, 4.0, 2.0)]
        torch.autograd.backward(ys, [gradient_for(ys[0]) * s for s in (1.0, 3.0, 2.0)])
    if kind == "Linear":  # there the largest call is known: only it counts
        for _ in range(2):
            with te.autocast(recipe=SHORT):
                y = other(4 * x)
            y.backward(3 * gradient_for(y))
        assert not differences(fp8_state(module), fp8_state(other))
    assert (module.fp8_state.amax_history_fwd[1:] != 0).any(0).sum() == 2 * module.gemms
    assert ((module.fp8_state.amax_history_bwd != 0).sum(0) == 2).sum() == module.gemms, "two updates, one a pass"


@on_devices
def test_several_regions_before_one_backward(device: str) -> None:
    """Forward scales are updated at each exit, gradient scales once, from the larger gradient."""
    module, x = linear(device), batch(device)
    ys = []
    for s in (1.0, 2.0):
        with te.autocast(recipe=SHORT):
            ys.append(module(s * x))
    dy = gradient_for(ys[0])
    torch.autograd.backward(ys, [5 * dy, dy])
    state = module.fp8_state
    top = x.abs().max().item()
    assert state.amax_history_fwd[:, 0].tolist() == [0, 0, top, 2 * top]
    assert state.amax_history_bwd[:, 0].tolist() == [0, 0, 0, 5 * dy.abs().max().item()]
    assert state.scale_bwd[0] == 57344 / (5 * dy.abs().max())


@on_devices
def test_partial_backward(device: str) -> None:
    """Exactly the modules whose backward ran get their gradient state updated, once a pass."""
    modules, x = [linear(device, seed) for seed in range(3)], batch(device)
    with te.autocast(recipe=SHORT):
        ys = [m(x) for m in modules]
    before = [fp8_state(m) for m in modules]
    (ys[0].sum() + ys[2].sum()).backward()
    assert changed(modules[0], before[0]) == changed(modules[2], before[2]) == {"scale_bwd", "amax_history_bwd"}
    assert not changed(modules[1], before[1])
    done = fp8_state(modules[0])
    ys[1].sum().backward()
    assert not changed(modules[0], done) and changed(modules[1], before[1]) == {"scale_bwd", "amax_history_bwd"}
    with te.autocast(recipe=SHORT):
        y = modules[0](x)
    (y.sum()).backward(retain_graph=True)
    (2 * y.sum()).backward()  # two passes are two updates
    assert modules[0].fp8_state.amax_history_bwd[:, 0].tolist() == [0, 1, 1, 2]


@on_devices
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_over_segments_that_share_a_module(reentrant: bool, device: str) -> None:
    """Recomputation neither records nor updates anything twice: the state is the one of the plain pass."""
    module = te.Linear(48, 48, device=device)
    other, x = copy.deepcopy(module), batch(device)

    def plain(t: torch.Tensor) -> torch.Tensor:
        return module(3 * module(t))

    def segments(t: torch.Tensor) -> torch.Tensor:
        half = checkpoint(other, t, use_reentrant=reentrant)
        return checkpoint(lambda s: other(3 * s), half, use_reentrant=reentrant)

    for i in range(3):
        got, wanted = step(segments, (i + 1) * x, SHORT, owner=other), step(plain, (i + 1) * x, SHORT, owner=module)
        assert not differences(got, wanted)
        assert not differences(fp8_state(other), fp8_state(module)), f"step {i}"


@on_devices
@pytest.mark.parametrize("where", ["same region", "another region", "disabled region"])
def test_backward_inside_a_region(where: str, device: str) -> None:
    """A checkpoint recomputes what its forward did, whatever region the backward is called in."""
    module, x = linear(device), batch(device)
    other = copy.deepcopy(module)
    for i in range(3):
        wanted = step(module, (i + 1) * x, SHORT)
        leaf = ((i + 1) * x).requires_grad_()
        around = {
            "same region": region(SHORT), "another region": te.autocast(recipe=Float8CurrentScaling()),
            "disabled region": te.autocast(enabled=False),
        }[where]  # fmt: skip
        with region(SHORT):
            y = checkpoint(other, leaf, use_reentrant=False)
        with around:
            y.backward(gradient_for(y))
        got = {"y": y.detach(), "dx": leaf.grad} | {n: p.grad for n, p in other.named_parameters()}
        other.zero_grad(set_to_none=True)
        assert not differences(got, wanted)
        assert not differences(fp8_state(other), fp8_state(module))


@on_devices
def test_a_failed_backward_leaves_the_next_one_whole(device: str) -> None:
    module, x = linear(device), batch(device)
    with te.autocast(recipe=SHORT):
        y = module(x.clone().requires_grad_().sigmoid())
    leaf = x.clone().requires_grad_()
    hooked = leaf * 1
    hooked.register_hook(lambda g: (_ for _ in ()).throw(KeyError("hook")))
    with te.autocast(recipe=SHORT):
        failing = module(hooked)
    with pytest.raises(KeyError):
        failing.sum().backward()
    before = fp8_state(module)
    y.backward(2 * torch.ones_like(y))
    assert changed(module, before) == {"scale_bwd", "amax_history_bwd"}
    assert module.fp8_state.scale_bwd[0] == 57344 / 2


# -------------------------------------------------------------------------------------------- from what


def reference_update(scale: float, column: list[float], limit: float, algo: str) -> tuple[float, list[float]]:
    """api.md 2.6 for one tensor, in Python; `column` is its history, row 0 first."""
    last = column[0]
    if last == 0:
        return scale, column
    window = [last] if algo == "most_recent" else [*column[1:], last]
    amax = max(v for v in window if not math.isnan(v))
    column = [0.0, *column[2:], last] if len(column) > 1 else [0.0]
    if math.isfinite(amax) and amax > 0:
        ratio = torch.tensor(limit, dtype=torch.float32) / torch.tensor(amax, dtype=torch.float32)
        scale = min(ratio.item(), torch.finfo(torch.float32).max)
    return scale, column


@on_devices
@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("fmt", [Format.HYBRID, Format.E4M3, Format.E5M2], ids=lambda f: f.name)
def test_update_over_random_steps(fmt: Format, algo: str, length: int, margin: int, device: str) -> None:
    """30 steps of inputs and gradients of any size, zeros, infinities and 1e-38 among them: every scale and history."""
    module = linear(device)
    recipe = DelayedScaling(margin, fmt, length, algo)
    limits = {"fwd": fmt.value.max_fwd * 2.0**-margin, "bwd": fmt.value.max_bwd * 2.0**-margin}
    scales = {"x": 1.0, "w": 1.0, "dy": 1.0}
    columns = {name: [0.0] * length for name in scales}
    sizes = torch.exp(3 * values(30, 2, seed=5)).tolist()
    for i, (a, b) in enumerate(sizes):
        a = {7: 0.0, 8: 0.0, 12: math.inf, 15: 1e-38}.get(i, a)
        b = {3: 0.0, 9: math.inf, 20: 1e-38}.get(i, b)
        x, dy = (torch.full((4, n), v) for n, v in ((48, a), (64, b)))
        x[:, 1:] *= 0 if math.isinf(a) else 0.5
        with te.autocast(recipe=recipe):
            y = module(x.to(device).requires_grad_())
        y.backward(dy.to(device))
        module.zero_grad()
        state = module.fp8_state
        for name, found in {"x": x, "w": module.weight, "dy": dy}.items():
            columns[name][0] = found.abs().max().item()
            direction = "bwd" if name == "dy" else "fwd"
            scales[name], columns[name] = reference_update(scales[name], columns[name], limits[direction], algo)
            slot = {"x": 0, "w": 1, "dy": 0}[name]
            assert getattr(state, f"scale_{direction}")[slot].item() == scales[name], f"step {i}, scale of {name}"
            history = getattr(state, f"amax_history_{direction}")[:, slot].tolist()
            assert history == columns[name], f"step {i}, history of {name}"


@on_devices
@pytest.mark.parametrize("fmt", [Format.HYBRID, Format.E4M3, Format.E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling])
@gemm_modules
def test_formats(kind: str, recipe: Any = None, fmt: Any = None, device: str = "cpu") -> None:
    raise NotImplementedError
