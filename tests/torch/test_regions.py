"""Whose precision a forward has: threads, regions that end out of order, checkpoints that run it again, hooks."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_torch import updates
from te_torch.autocast import active
from tests.backends import devices
from tests.covering import covering
from tests.module_steps import differences, fp8_state, values

on_devices = pytest.mark.parametrize("device", devices())
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


@pytest.mark.parametrize("enabled", [CURRENT, None, 1, "yes", torch.tensor(True)])
def test_enabled_is_a_bool(enabled: Any) -> None:
    """A recipe in its place would otherwise be taken for "on", and the default recipe computed."""
    with pytest.raises(ArgumentError, match="enabled=.*recipe="):
        te.autocast(enabled)


@pytest.mark.parametrize("group", ["world", 0, [0, 1], CURRENT])
def test_a_group_that_is_none(group: Any) -> None:
    """Outside of a distributed job, where nobody would ask it anything, too."""
    with pytest.raises(ArgumentError, match="amax_reduction_group=.*a process group"):
        te.autocast(recipe=CURRENT, amax_reduction_group=group)


@pytest.mark.parametrize(
    ("make_region", "given", "wanted"),
    [
        (te.autocast, "fp8_recipe", "recipe="),
        (te.autocast, "fp8_group", "amax_reduction_group="),
        (te.fp8_autocast, "recipe", "fp8_recipe="),
        (te.fp8_autocast, "amax_reduction_group", "fp8_group="),
        (te.autocast, "recipes", "correct the name"),
    ],
)
def test_the_other_functions_names(make_region: Any, given: str, wanted: str) -> None:
    with pytest.raises(TypeError, match=f"{given}=.*{wanted}"):
        make_region(**{given: CURRENT})


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
MODULES: dict[str, Callable[[str], Any]] = {
    "Linear": linear,
    "LayerNormMLP": lambda device: te.LayerNormMLP(WIDTH, 96, params_dtype=BF16, device=device),
    "TransformerLayer": lambda device: te.TransformerLayer(
        WIDTH, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, device=device
    ),
}


def gradients(module: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {"dx": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    for p in module.parameters():
        p.grad = None
    return found


def check_step(kind: str, module: Any, twin: Any, recipe: Any, between: Callable[[Any], Any], number: int) -> None:
    """A checkpointed step of `module`, with something in between, against a plain step of its twin."""
    device = str(next(module.parameters()).device.type)
    results = []
    for each, run in ((module, CHECKPOINTS[kind]), (twin, lambda m, x: m(x))):
        x = (number * batch(device, number)).requires_grad_()
        with region(recipe):
            y = run(each, x)
        if each is module:
            between(each)
        y.backward(torch.ones_like(y))
        results.append({"y": y.detach(), **gradients(each, x), **fp8_state(each)})
    for name, want in results[1].items():
        got = results[0][name]
        same = torch.equal(got, want) if device == "cpu" else torch.allclose(got.float(), want.float(), 2e-2, 2e-2)
        assert same, name


def nothing(module: Any) -> None:
    pass


def elsewhere_without_grad(module: Any) -> None:
    with torch.no_grad():
        module(batch(next(module.parameters()).device.type))


def elsewhere_in_another_recipe(module: Any) -> None:
    with torch.no_grad(), te.autocast(recipe=BLOCK):
        module(batch(next(module.parameters()).device.type))


def elsewhere_with_grad(module: Any) -> None:
    module(batch(next(module.parameters()).device.type)).sum()


def elsewhere_in_evaluation(module: Any) -> None:
    module.eval()
    with torch.inference_mode():
        module(batch(next(module.parameters()).device.type))
    module.train()


BETWEEN = {
    f.__name__: f
    for f in (
        nothing,
        elsewhere_without_grad,
        elsewhere_in_another_recipe,
        elsewhere_with_grad,
        elsewhere_in_evaluation,
    )
}


# A whole layer is tried with the two that matter most.
WITHIN = [
    (name, between)
    for name in MODULES
    for between in BETWEEN
    if name == "Linear" or between in ("nothing", "elsewhere_in_another_recipe")
]


# In this order a linear in FP8 meets torch's checkpoints with another recipe in between.
@on_devices
@covering(turns=2, within=[f"{name}-{between}" for name, between in WITHIN], recipe=RECIPES, kind=reversed(CHECKPOINTS))
def test_the_precision_belongs_to_the_call(within: str, recipe: str, kind: str, device: str) -> None:
    """Whatever other forwards come between a checkpointed forward and its backward."""
    name, between = within.split("-")
    module = MODULES[name](device)
    twin = copy.deepcopy(module)
    for number in (1, 3):
        check_step(kind, module, twin, RECIPES[recipe], BETWEEN[between], number)


@on_devices
@checkpoints
def test_two_calls_in_different_precisions(kind: str, device: str) -> None:
    module = linear(device)
    twin = copy.deepcopy(module)

    def two(run: Callable[..., Any], each: Any) -> dict[str, torch.Tensor]:
        x = batch(device).requires_grad_()
        with region(CURRENT):
            a = run(each, x)
        b = run(each, x)
        (a.sum() + 3 * b.sum()).backward()
        return gradients(each, x)

    assert not differences(two(CHECKPOINTS[kind], module), two(lambda m, x: m(x), twin))


@on_devices
@covering(turns=2, inside=["region outside", "region inside"], outer=CHECKPOINTS, kind=CHECKPOINTS)
def test_nested(kind: str, outer: str, inside: str, device: str) -> None:
    model = torch.nn.ModuleList([linear(device, 1), linear(device, 2)])
    twin = copy.deepcopy(model)

    def both(m: Any, run: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        with region(CURRENT) if inside == "region inside" else nullcontext():
            return run(m[1], run(m[0], x))

    def plainly(f: Any, x: torch.Tensor) -> torch.Tensor:
        return f(x)

    results = []
    for m, run, around in ((model, CHECKPOINTS[kind], CHECKPOINTS[outer]), (twin, plainly, plainly)):
        x = batch(device).requires_grad_()
        with nullcontext() if inside == "region inside" else region(CURRENT):
            y = around(partial(both, m, run), x)
        if m is model:
            elsewhere_in_another_recipe(m[0])
        y.sum().backward()
        results.append({"y": y.detach(), **gradients(m, x)})
    assert not differences(*results)


@on_devices
@checkpoints
def test_backward_twice(kind: str, device: str) -> None:
    module = linear(device)
    x = batch(device).requires_grad_()
    with region(CURRENT):
        y = CHECKPOINTS[kind](module, x)
    y.sum().backward(retain_graph=True)
    once = gradients(module, x)
    x.grad = None
    elsewhere_without_grad(module)
    y.sum().backward()
    assert not differences(gradients(module, x), once)


@on_devices
@checkpoints
def test_sloppy_evaluation_is_forgiven(kind: str, device: str) -> None:
    """Evaluated in another precision with gradients on and through the checkpoint."""
    module = linear(device)
    twin = copy.deepcopy(module)
    for number in (1, 2):
        check_step(kind, module, twin, CURRENT, nothing, number)
        module.eval()
        CHECKPOINTS[kind](module, batch(device).requires_grad_())
        module.train()


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


@on_devices
@checkpoints
def test_a_hook_in_a_checkpointed_model(kind: str, device: str) -> None:
    """The module that the hook calls has a forward that is still to be run again: the two are told apart."""
    module = linear(device)
    twin = copy.deepcopy(module)
    seen = []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        module(batch(device))
        seen.append(family(module))
        return grad

    results = []
    for each, run in ((module, CHECKPOINTS[kind]), (twin, lambda m, x: m(x))):
        x = batch(device).requires_grad_()
        with region(CURRENT):
            y = run(each, x)
        if each is module:
            y.register_hook(hook)
        y.sum().backward()
        results.append(gradients(each, x))
    assert seen == [{"bfloat16"}] and not differences(*results)


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


def test_the_older_order_of_checkpoint() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(DeprecationWarning, match="by name"):
        te.checkpoint(torch.sin, False, te.CudaRNGStatesTracker, None, x)
    with pytest.raises(ArgumentError, match="callable"):
        te.checkpoint(x, torch.sin)
    te.checkpoint(torch.sin, x, tp_group=None).sum().backward()
    assert torch.equal(x.grad, torch.cos(x.detach()))


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
