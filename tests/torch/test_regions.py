"""Whose precision a forward has: threads, regions that end out of order, checkpoints that run it again, hooks."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import te_torch as te
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_torch import updates
from te_torch.autocast import active
from tests.backends import on_devices
from tests.covering import covering
from tests.world import differences, fp8_state, values

BF16 = torch.bfloat16
CURRENT, BLOCK, DELAYED = Float8CurrentScaling(), Float8BlockScaling(), DelayedScaling(amax_history_len=4)
RECIPES = {"none": None, "delayed": DELAYED, "current": CURRENT}
WIDTH = 64


def region(recipe: Any) -> te.autocast:
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def batch(device: str, seed: int = 1) -> torch.Tensor:
    return values(32, 1, WIDTH, device=device, dtype=BF16, seed=seed)


def linear(device: str, seed: int = 0) -> te.Linear:
    torch.manual_seed(seed)
    return te.Linear(WIDTH, WIDTH, params_dtype=BF16, device=device, init_method=torch.nn.init.normal_)


def family(module: Any) -> set[str]:
    """What the last forward's products read: {"bfloat16"}, or formats."""
    return {row["a"] for row in te.precision_report(module).as_dict()["gemms"] if row["gemm"] == "fprop"}


# ----------------------------------------------------------------------------------------------- arguments


def test_a_recipe_of_another_kind_is_told() -> None:
    """Once, as documented; a recipe of the same kind, or of a class below it, is no news."""

    class Mine(DelayedScaling):
        pass

    module, x = te.Linear(WIDTH, WIDTH, device="cpu"), values(16, WIDTH)
    told = []
    for recipe in (DELAYED, Mine(amax_history_len=4), DelayedScaling(amax_history_len=4, margin=1), CURRENT, CURRENT):
        with warnings.catch_warnings(record=True) as seen, te.autocast(recipe=recipe):
            warnings.simplefilter("always")
            module(x)
        told.append([str(w.message) for w in seen if "Recipe type changed from" in str(w.message)])
    assert [len(each) for each in told] == [0, 0, 0, 1, 0]
    assert "from DelayedScaling to Float8CurrentScaling in Linear" in told[3][0]


@on_devices
def test_a_module_that_follows_two_rules_in_a_region_is_updated_once(device: str) -> None:
    """Its state keeps the scales from before, with which a forward that is run again quantizes."""
    module = linear(device)
    with region(DELAYED):
        module(batch(device))
    before = module.fp8_state.scale_fwd.clone()
    with region(DELAYED):
        module(batch(device, 2) * 3)
        with region(DelayedScaling(amax_history_len=4, margin=1)):
            module(batch(device, 3))
    assert torch.equal(module.fp8_state.used_fwd, before) and not torch.equal(module.fp8_state.scale_fwd, before)


# ------------------------------------------------------------------------------------------------- threads


@on_devices
def test_new_threads_begin_outside(device: str) -> None:
    """Also where an earlier thread of the same number ended inside a region."""
    module, x = linear(device), batch(device)
    seen: list[set[str]] = []

    def leaks() -> None:
        te.autocast(recipe=CURRENT).__enter__()

    def looks() -> None:
        with torch.no_grad():
            module(x)
        seen.append(family(module))

    for work in (leaks, looks) * 10:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [{"bfloat16"}] * 10 and active.region is None


def test_quantized_model_init_belongs_to_its_thread() -> None:
    held: list[Any] = []
    with te.quantized_model_init(recipe=CURRENT):
        thread = threading.Thread(target=lambda: held.append(te.Linear(32, 32)))
        thread.start()
        thread.join()
        inside = te.Linear(32, 32)
    assert not held[0].primary_weights_in_fp8 and inside.primary_weights_in_fp8


@on_devices
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.full)])
def test_compiled_code_follows_its_own_thread(device: str, backend: str) -> None:
    """One thread enters and leaves regions of its own while another runs compiled code in its region."""
    torch._dynamo.reset()
    module = linear(device)
    compiled = torch.compile(module, backend=backend)
    x = batch(device)
    with torch.no_grad():
        plain = module(x)
        with te.autocast(recipe=CURRENT):
            low = module(x)
    stop, wrong = threading.Event(), [0, 0]
    first, compiling = threading.Barrier(2), threading.Lock()

    def other() -> None:
        while not stop.is_set():
            with te.autocast(recipe=BLOCK):
                pass

    def runs(recipe: Any, wanted: torch.Tensor, slot: int) -> None:
        # One after the other: while torch's tracer works it replaces module calls in every thread.
        with compiling, torch.no_grad(), region(recipe):
            wrong[slot] += not torch.equal(compiled(x), wanted)
        first.wait(120)
        for _ in range(150):
            with torch.no_grad(), region(recipe):
                wrong[slot] += not torch.equal(compiled(x), wanted)

    disturbing = threading.Thread(target=other)
    disturbing.start()
    try:
        threads = [threading.Thread(target=runs, args=a) for a in ((CURRENT, low, 0), (None, plain, 1))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        stop.set()
        disturbing.join()
    assert not torch.equal(plain, low) and wrong == [0, 0]


# ------------------------------------------------------------------------------------------- ends of regions


def test_regions_that_end_out_of_order() -> None:
    a, b, c = (te.autocast(recipe=r) for r in (CURRENT, BLOCK, DELAYED))
    for each in (a, b, c):
        each.__enter__()
    b.__exit__(None, None, None)
    assert active.region.recipe is DELAYED
    c.__exit__(None, None, None)
    assert active.region.recipe is CURRENT
    a.__exit__(None, None, None)
    assert active.region is None
    for first, second in ((a, b), (b, a)):
        a.__enter__(), b.__enter__()
        first.__exit__(None, None, None)
        assert active.region.recipe is second.recipe
        second.__exit__(None, None, None)
        assert active.region is None


def test_regions_that_overlap_leave_nothing_behind() -> None:
    """Each begins before the one before it ends: no chain of ended ones grows."""
    regions = [te.autocast(recipe=CURRENT) for _ in range(50)]
    regions[0].__enter__()
    for before, after in zip(regions[:-1], regions[1:], strict=True):
        after.__enter__()
        before.__exit__(None, None, None)
        assert active.region.outer is None
    regions[-1].__exit__(None, None, None)
    assert active.region is None


@on_devices
def test_the_last_of_overlapping_regions_updates(device: str) -> None:
    module, x = linear(device), batch(device)
    a, b = te.autocast(recipe=DELAYED), te.autocast(recipe=DELAYED)
    a.__enter__()
    module(x)
    b.__enter__()
    a.__exit__(None, None, None)
    assert (module.fp8_state.scale_fwd == 1).all()
    module(3 * x)
    b.__exit__(None, None, None)
    plain = linear(device)
    with te.autocast(recipe=DELAYED):
        plain(x), plain(3 * x)
    assert not differences(fp8_state(module), fp8_state(plain))


def test_a_suspended_generator_leaks_its_region_as_torch_does() -> None:
    def inside() -> Iterator[None]:
        with te.autocast(recipe=CURRENT), torch.autocast("cpu", BF16):
            yield

    held = inside()
    next(held)
    assert active.region is not None and torch.is_autocast_enabled("cpu")
    held.close()
    assert active.region is None and not torch.is_autocast_enabled("cpu")


# ---------------------------------------------------------------------------------------------- checkpoints


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "torch, reentrant": partial(torch_checkpoint, use_reentrant=True),
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "ours, reentrant": partial(te.checkpoint, use_reentrant=True),
    "ours": partial(te.checkpoint, use_reentrant=False),
}
checkpoints = pytest.mark.parametrize("kind", CHECKPOINTS)


def gradients(module: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {"dx": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    for p in module.parameters():
        p.grad = None
    return found


@on_devices
def test_forwards_in_hooks_have_the_precision_around_them(device: str) -> None:
    """In a backward pass, but run again by nobody: outside of every region in high precision, inside as it says."""
    module, other = linear(device), linear(device)
    seen = []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        module(batch(device))
        seen.append(family(module))
        with te.autocast(recipe=BLOCK):
            module(batch(device))
        seen.append(family(module))
        return grad

    x = batch(device).requires_grad_()
    with region(CURRENT):
        y = other(module(x))
    y.register_hook(hook)
    y.sum().backward()
    assert seen[0] == {"bfloat16"} and seen[1] != seen[0]
    assert not differences({"dx": x.grad}, {"dx": plain_gradient(module, other, device)})


def plain_gradient(module: Any, other: Any, device: str) -> torch.Tensor:
    x = batch(device).requires_grad_()
    with region(CURRENT):
        other(module(x)).sum().backward()
    assert x.grad is not None
    return x.grad


# --------------------------------------------------------------------------------------- te_torch.checkpoint


def test_arguments_of_checkpoint() -> None:
    """Keyword arguments and what is no tensor reach the function, in both kinds; torch's options reach torch."""
    seen = []

    def function(x: torch.Tensor, factor: float, *, shift: float = 0.0, name: str = "") -> tuple[torch.Tensor, str]:
        seen.append((factor, shift, name, active.region is not None and active.region.recompute))
        return torch.sin(x * factor) + shift * torch.rand(()), name

    for reentrant in (True, False):
        seen.clear()
        x = torch.ones(3, requires_grad=True)
        y, name = te.checkpoint(function, x, 2.0, shift=1.0, name="here", use_reentrant=reentrant)
        y.sum().backward()
        assert name == "here" and seen == [(2.0, 1.0, "here", False), (2.0, 1.0, "here", True)]
        assert torch.allclose(x.grad, 2 * torch.cos(torch.tensor(2.0)).expand(3))
    assert active.running is None and active.region is None


def test_an_error_in_a_checkpoint_leaves_no_trace() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        if active.region is not None and active.region.recompute:
            raise KeyError("again")
        return x * x

    for reentrant in (True, False):
        x = torch.ones(3, requires_grad=True)
        y = te.checkpoint(fails, x, use_reentrant=reentrant)
        with pytest.raises(KeyError):
            y.sum().backward()
        assert active.region is None and active.running is None


# ------------------------------------------------------------------------------------------ backward passes


@on_devices
def test_a_backward_pass_inside_another(device: str) -> None:
    """A hook runs another backward: the states of both passes are updated, each once."""
    first, second = linear(device), linear(device)
    plain = [copy.deepcopy(m) for m in (first, second)]
    x, y = batch(device).requires_grad_(), batch(device, 2).requires_grad_()
    with region(DELAYED):
        middle, b = second(x), second(y)
        a = first(middle)
    middle.register_hook(lambda g: (b.backward(torch.ones_like(b)), g)[1])  # when first's backward has run
    before = set(updates._pending)  # of passes that ended in an error
    a.sum().backward()
    for module in (first, second):
        assert (module.fp8_state.scale_bwd[0] != 1).all() and set(updates._pending) == before
    with region(DELAYED):
        c, d = plain[0](plain[1](x.detach())), plain[1](y.detach())
    d.sum().backward()
    c.sum().backward()
    assert torch.equal(first.fp8_state.scale_bwd, plain[0].fp8_state.scale_bwd)


# ------------------------------------------------------------------------------------------- compiled modules


@on_devices
@covering(recipe=["delayed", "current"], kind=["ours", "torch", "ours, reentrant", "torch, reentrant"])
def test_compiled_modules_in_checkpoints(recipe: str, kind: str, device: str) -> None:
    """A compiler takes its program by the region that it finds: under torch's checkpoint an error, never another
    precision without a word."""
    torch._dynamo.reset()
    module = linear(device)
    twin, compiled = copy.deepcopy(module), torch.compile(module, backend="aot_eager")
    for number in (1, 2):
        results = []
        for each, run in ((module, partial(CHECKPOINTS[kind], compiled)), (twin, twin)):
            x = (number * batch(device, number)).requires_grad_()
            with region(RECIPES[recipe]):
                y = run(x)
            if kind.startswith("torch") and each is module:
                with pytest.raises(RuntimeError, match="te_torch.checkpoint|different number of tensors"):
                    y.sum().backward()
                return
            y.backward(torch.ones_like(y))
            results.append({"y": y.detach(), **gradients(each, x), **fp8_state(each)})
        assert not differences(*results)
