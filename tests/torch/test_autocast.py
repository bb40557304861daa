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
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Format, QParams
from te_torch import amax_reduction, updates
from te_torch import state as scaling
from tests.backends import on_devices
from tests.covering import covering
from tests.reference import modules as reference
from tests.tolerances import DB, snr_db
from tests.world import GEMM_MODULES, differences, fp8_state, gradient_for, make, on, region, step, values

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
        noise = snr_db(
            module(x),
            reference.forward(
                module, x.cpu().double(), {n: p.detach().cpu().double() for n, p in module.named_parameters()}
            )[0],
        )
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
def test_an_exception_only_ends_the_region(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The precision from before is back; nothing is updated or reduced on the way out: other ranks would wait for it.

    What ran before is updated with the next region that it runs in.
    """
    module, x = linear(device), batch(device)
    plain, reduced = copy.deepcopy(module), []
    monkeypatch.setattr(amax_reduction, "reduce", lambda states, direction, key: reduced.append(states))
    with pytest.raises(KeyError), te.autocast(recipe=SHORT):
        with te.autocast(enabled=False):
            module(x)
        module(x)
        raise KeyError
    assert not reduced
    assert (module.fp8_state.scale_fwd == 1).all() and module.fp8_state.amax_history_fwd[0, 0] > 0
    assert not quantized(module, x)
    for each in (module, plain):
        with te.autocast(recipe=SHORT):
            each(x)
    assert len(reduced) == 2 and not differences(fp8_state(module), fp8_state(plain))


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
    assert state.amax_history_bwd[:, 0].tolist() == [0, 0, 0, (5 * dy).abs().max().item()]
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
            "same region": region(SHORT),
            "another region": te.autocast(recipe=Float8CurrentScaling()),
            "disabled region": te.autocast(enabled=False),
        }[where]
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
@covering(turns=2, fmt=[Format.HYBRID, Format.E4M3], algo=["max", "most_recent"], length=[1, 2, 5], margin=[0, 3])
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
        x[:, 1:] *= 0.5
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
@pytest.mark.parametrize("fmt", [Format.HYBRID, Format.E4M3], ids=lambda f: f.name)
@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling])
def test_formats(recipe: Any, fmt: Format, device: str) -> None:
    """It is the format that was asked for: a mantissa bit more or less shows."""
    module, x = make("Linear", device, torch.bfloat16), values(64, 48, device=device, dtype=torch.bfloat16, seed=1)
    for _ in range(3):
        got = step(module, x, recipe(fp8_format=fmt))
    on(device, *got.values())
    wanted = reference.results(module, x, gradient_for(got["y"]))
    fine, mixed = (26.5, 40), (23.6, 26.5)
    expected = {Format.E4M3: {"y": fine, "dx": fine}, Format.HYBRID: {"y": fine, "dx": mixed}}[fmt]
    noise = {name: snr_db(got[name], wanted[name]) for name in expected}
    assert all(low < noise[name] < high for name, (low, high) in expected.items()), noise


@on_devices
def test_fields_changed_between_steps(device: str) -> None:
    """The same recipe object with another margin, algorithm or history length is another rule from then on."""
    module, x = linear(device), batch(device)
    rule, top = DelayedScaling(amax_history_len=4), batch(device).abs().max()

    def run(size: float) -> list[float]:
        step(module, size * x, rule)
        state = module.fp8_state
        return [(state.scale_fwd[0] * top).item(), *(state.amax_history_fwd[:, 0] / top).tolist()]

    assert run(4.0) == pytest.approx([112, 0, 0, 0, 4])
    rule.margin = 2
    assert run(1.0) == pytest.approx([28, 0, 0, 4, 1])
    rule.amax_compute_algo = "most_recent"
    assert run(1.0) == pytest.approx([112, 0, 4, 1, 1])
    rule.amax_history_len = 6
    assert run(0.5) == pytest.approx([224, 0, 1, 1, 0, 0, 0.5])
    rule.amax_history_len, rule.margin = 2, 0
    assert run(2.0) == pytest.approx([224, 0, 2])
    rule.fp8_format = Format.E4M3
    step(module, x, rule)
    assert module.fp8_state.scale_bwd[0] <= 448


# --------------------------------------------------------------------------------------------- whose state


def model(device: str, seed: int) -> torch.nn.Sequential:
    first, last = make("LayerNormLinear", device, seed=seed), make("LayerNormMLP", device)
    layers = (first, te.Linear(64, 48, device=device), last)
    torch.manual_seed(seed)
    with torch.no_grad():
        layers[1].weight.copy_(0.2 * values(48, 64, device=device, seed=seed))
    return torch.nn.Sequential(*layers)


def train(model: torch.nn.Module, recipe: Any, steps: range, device: str) -> Any:
    """A step at a time, giving each loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for i in steps:
        x = values(32, 48, device=device, seed=i)
        with region(recipe):
            y = model(x)
        loss = (y - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@on_devices
@pytest.mark.parametrize(
    "pair",
    [(SHORT, DelayedScaling(margin=1)), (SHORT, Float8CurrentScaling()), (SHORT, copy.copy(SHORT)), (SHORT, None)],
    ids=["two delayed", "delayed and current", "equal recipes", "delayed and plain"],
)
def test_two_models_side_by_side(pair: tuple[Any, Any], device: str) -> None:
    """Their losses are, to the last bit, those they have alone."""
    alone = [list(train(model(device, s), r, range(6), device)) for s, r in enumerate(pair)]
    together = list(zip(*(train(model(device, s), r, range(6), device) for s, r in enumerate(pair)), strict=True))
    assert [list(losses) for losses in zip(*together, strict=True)] == alone
    assert alone[0] != alone[1] and alone[0][-1] < alone[0][0]


@on_devices
def test_no_state_outlives_its_module(device: str) -> None:
    gc.collect()
    before, pending = len(scaling._by_token), dict(updates._pending)
    held = model(device, 0)
    x = values(32, 48, device=device)
    step(held, x, SHORT)
    assert len(scaling._by_token) == before + 3
    with te.autocast(recipe=SHORT):
        y = held(x)
        del held, y
        gc.collect()
        assert len(scaling._by_token) == before, "a region keeps nothing alive"
    assert updates._pending == pending


@on_devices
def test_a_region_belongs_to_its_thread(device: str) -> None:
    module, x = linear(device), batch(device)
    found = []
    with te.autocast(recipe=SHORT):
        thread = threading.Thread(target=lambda: found.append(quantized(module, x)))
        thread.start()
        thread.join()
        assert quantized(module, x)
    assert found == [False]


@on_devices
def test_parameters_of_one_operand(device: str) -> None:
    """QParams assigned on a recipe reach the operand that they name, and no other."""
    module, x = linear(device), batch(device)
    powers = {}
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        rule = Float8CurrentScaling()
        setattr(rule, name, QParams(power_2_scale=True))
        powers[name] = step(module, x, rule)
    plain = step(module, x, Float8CurrentScaling())
    assert not torch.equal(powers["fp8_quant_fwd_inp"]["y"], powers["fp8_quant_fwd_weight"]["y"])
    assert set(differences(powers["fp8_quant_fwd_inp"], plain)) == {"y", "weight"}
    assert set(differences(powers["fp8_quant_fwd_weight"], plain)) == {"y", "dx"}
    assert set(differences(powers["fp8_quant_bwd_grad"], plain)) == {"dx", "weight"}
