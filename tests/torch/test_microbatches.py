"""Weights quantized once for several microbatches, and weight gradients that go elsewhere or come later."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import raw as ops
from tests.backends import on_devices
from tests.covering import covering
from tests.recipes import KINDS, RECIPES, region
from tests.reference import modules as reference
from tests.tolerances import DB, snr_db
from tests.world import GEMM_MODULES, WIDTH, differences, fp8_state, gradient_for, make, values

gemm_modules = pytest.mark.parametrize("kind", GEMM_MODULES)
# An MLP, which has slots of two GEMMs, meets delayed scaling by default.
recipes = covering(kind=GEMM_MODULES, recipe=["current", "block", "delayed", "mxfp8", "nvfp4"])
WITH_PLAIN = ["current", None, "delayed", "block", "mxfp8", "nvfp4"]
with_plain = covering(kind=GEMM_MODULES, recipe=WITH_PLAIN)

BF16 = torch.bfloat16


def weights_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The GEMM weights by name."""
    return {n: p for n, p in module.named_parameters() if p.ndim == 2}


def microbatch(seed: int, device: str, rows: int = 24) -> torch.Tensor:
    return values(rows, WIDTH, device=device, dtype=BF16, seed=seed)


def run(module: Any, x: torch.Tensor, first: bool | None, seed: int = 0) -> dict[str, torch.Tensor]:
    """y and dx of one microbatch inside the running region; parameters gather their gradients."""
    torch.manual_seed(seed)
    leaf = x.clone().requires_grad_()
    y = module(leaf, is_first_microbatch=first)
    y.backward(gradient_for(y))
    return {"y": y.detach(), "dx": leaf.grad}


def one_step(module: Any, recipe: str | None, firsts: list[bool | None], device: str) -> dict[str, torch.Tensor]:
    """All microbatches of a step in one region, then the summed gradients."""
    found = {}
    with region(recipe):
        for i, first in enumerate(firsts):
            found |= {f"{n}{i}": t for n, t in run(module, microbatch(i, device), first, seed=i).items()}
    found |= {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


# -------------------------------------------------------------------------------------------- the cache


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of what is quantized from now on."""
    seen: list[int] = []
    true = ops.quantize

    def counting(rt: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(x.ptr)
        return true(rt, x, *args, **kwargs)

    monkeypatch.setattr(ops, "quantize", counting)
    return seen


@pytest.mark.usefixtures("interpreted")
@on_devices
@recipes
def test_weights_are_quantized_once(kind: str, recipe: str, quantized: list[int], device: str) -> None:
    module = make(kind, device, BF16)
    places = [w.data_ptr() for w in weights_of(module).values()]

    def times(firsts: list[bool | None]) -> list[int]:
        quantized.clear()
        one_step(module, recipe, firsts, device)
        return [quantized.count(place) for place in places]

    assert times([None, None, None]) == [3] * len(places), "no cache unless asked for"
    assert times([True, False, False]) == [1] * len(places)
    assert times([False, False]) == [0] * len(places), "the weights are as they were"
    assert times([True, True]) == [2] * len(places), "a first microbatch quantizes anew"
    assert times([None, None]) == [2] * len(places), "None takes nothing from the cache"


@on_devices
@recipes
def test_later_without_first(kind: str, recipe: str, device: str) -> None:
    """An empty cache is filled by whoever comes first."""
    wanted = one_step(make(kind, device, BF16), recipe, [None, None], device)
    assert not differences(one_step(make(kind, device, BF16), recipe, [False, False], device), wanted)


@on_devices
@recipes
def test_cache_made_without_gradients(kind: str, recipe: str, quantized: list[int], device: str) -> None:
    """What no_grad left out is added when backward will read it; the other way round nothing is quantized again."""
    wanted = one_step(make(kind, device, BF16), recipe, [None], device)
    module = make(kind, device, BF16)
    with torch.no_grad(), region(recipe):
        torch.manual_seed(0)
        y = module(microbatch(0, device), is_first_microbatch=True)
    assert torch.equal(y, wanted["y0"])
    assert not differences(one_step(module, recipe, [False], device), wanted)
    places = [w.data_ptr() for w in weights_of(module).values()]
    quantized.clear()
    with torch.no_grad(), region(recipe):
        y = module(microbatch(0, device), is_first_microbatch=False)
    assert torch.equal(y, wanted["y0"]) or recipe == "delayed"  # whose scales have moved
    assert not set(places) & set(quantized)


def in_place(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for w in weights_of(module).values():
            w.mul_(-1.5)


def each(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change of each weight of a module."""
    return lambda module: [change(w) for w in weights_of(module).values()]


def freed(w: torch.nn.Parameter) -> None:
    """The allocator likes to give the old memory to the next tensor of that size."""
    new = w.data * -1.5
    w.data = torch.empty(0, dtype=w.dtype, device=w.device)
    w.data = new.clone()


def stepped(module: torch.nn.Module, kind: Any) -> None:
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    kind(module.parameters(), lr=0.5).step()
    module.zero_grad(set_to_none=True)


def turned(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A state with other weights."""
    return {n: t * -1.5 if t.ndim == 2 and "fp8" not in n else t.clone() for n, t in module.state_dict().items()}


def moved(module: torch.nn.Module) -> None:
    there = next(module.parameters()).device
    module.to("cpu")
    in_place(module)
    module.to(there)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": in_place,
    "one element": each(lambda w: w.view(-1)[7:8].fill_(3.0)),
    "other data": each(lambda w: setattr(w, "data", w.data * -1.5)),
    "other data, freed": each(freed),
    "SGD": lambda module: stepped(module, torch.optim.SGD),
    "AdamW": lambda module: stepped(module, torch.optim.AdamW),
    "loaded": lambda module: module.load_state_dict(turned(module)),
    "assigned": lambda module: module.load_state_dict(turned(module), assign=True),
    "new parameters": lambda module: [
        setattr(module, name, torch.nn.Parameter(w * -1.5)) for name, w in weights_of(module).items()
    ],
    "converted": lambda module: in_place(module.to(torch.float32).to(BF16)),
    "moved": moved,
}


@on_devices
@covering(kind=GEMM_MODULES, change=CHANGES, recipe=["current", "block", "nvfp4 no rht"])
def test_changed_weights_are_quantized_again(kind: str, change: str, recipe: str, device: str) -> None:
    """is_first_microbatch=False after any change: the forward of a module freshly built from the same values."""
    module = make(kind, device, BF16)
    before = one_step(module, recipe, [True], device)
    with torch.no_grad():
        CHANGES[change](module)
    fresh = make(kind, device, BF16)
    fresh.load_state_dict(module.state_dict())
    wanted = one_step(fresh, recipe, [None], device)
    assert not torch.equal(wanted["y0"], before["y0"])
    assert not differences(one_step(module, recipe, [False], device), wanted)


@on_devices
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_one_changed_part_of_a_split_weight(kind: str, device: str) -> None:
    module = make(kind, device, BF16, parameters_split=("q", "k"))
    one_step(module, "current", [True], device)
    cached = module._weight_cache["weight"].value
    one_step(module, "current", [False], device)
    assert module._weight_cache["weight"].value is cached
    with torch.no_grad():
        module.k_weight.mul_(-2)
    wanted = one_step(copy.deepcopy(module), "current", [None], device)
    assert not differences(one_step(module, "current", [False], device), wanted)


@on_devices
@gemm_modules
def test_another_recipe_makes_its_own_copy(kind: str, device: str) -> None:
    module = make(kind, device, BF16)
    for recipe in [*KINDS[1:], *KINDS[1:]]:
        wanted = one_step(make(kind, device, BF16), recipe, [None], device)
        assert not differences(one_step(module, recipe, [False], device), wanted), recipe


@on_devices
@gemm_modules
def test_copies_do_not_share_the_cache(kind: str, device: str) -> None:
    """A deep copy or a pickled module begins without one."""
    module = make(kind, device, BF16)
    one_step(module, "current", [True], device)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        in_place(other)
        wanted = one_step(copy.deepcopy(other), "current", [None], device)
        assert not differences(one_step(other, "current", [False], device), wanted)
    wanted = one_step(make(kind, device, BF16), "current", [None], device)
    assert not differences(one_step(module, "current", [False], device), wanted)


@on_devices
@gemm_modules
def test_inference_tensors_are_not_cached(kind: str, device: str) -> None:
    """They count no changes, so nobody could tell when a copy is out of date."""
    with torch.inference_mode():
        module = make(kind, device, BF16)
        x = microbatch(0, device)
        with region("current"):
            before = module(x, is_first_microbatch=True)
            in_place(module)
            after, wanted = module(x, is_first_microbatch=False), module(x)
    assert torch.equal(after, wanted) and not torch.equal(before, after)


# --------------------------------------------------------------------------- gradients into main_grad

MAIN = {"fp32": torch.float32, "bf16": BF16}


def fused(kind: str, device: str, main: str = "fp32", fill: float = 0.0, **options: Any) -> Any:
    """A module whose weights gather their gradients in `main_grad`."""
    module = make(kind, device, BF16, fuse_wgrad_accumulation=True, **options)
    for w in weights_of(module).values():
        w.main_grad = torch.full_like(w, fill, dtype=MAIN[main])
    return module


def floor(recipe: str | None, kind: str) -> float:
    if recipe is None:
        return DB["bf16"]
    return DB[("nvfp4" if "nvfp4" in recipe else "fp8") + (" mlp" if kind == "LayerNormMLP" else " linear")]


@on_devices
@covering(kind=GEMM_MODULES, main=MAIN, recipe=WITH_PLAIN)
def test_microbatches_equal_one_batch(kind: str, main: str, recipe: str | None, device: str) -> None:
    """main_grad after four microbatches is the gradient of the four together; no weight has a grad."""
    module = fused(kind, device, main)
    parts = [microbatch(i, device) for i in range(4)]
    for _ in range(2):  # delayed scaling finds its scales
        with region(recipe):
            for i, x in enumerate(parts):
                run(module, x, i == 0, seed=i)
    assert all(w.grad is None for w in weights_of(module).values())
    x = torch.cat(parts)
    dy = torch.cat([gradient_for(module(x)[:24])] * 4)
    wanted = reference.results(module, x, dy)
    for name, w in weights_of(module).items():
        assert w.main_grad.dtype == MAIN[main]
        assert snr_db(w.main_grad, wanted[name]) >= floor(recipe, kind), f"{name}"


@on_devices
@covering(kind=GEMM_MODULES, main=MAIN, recipe=[None, "current", "block"])
def test_overwriting(kind: str, main: str, recipe: str | None, device: str) -> None:
    """The first microbatch, or overwrite_main_grad, takes no notice of what main_grad held; all others add."""
    module = fused(kind, device, main)
    one_step(module, recipe, [None], device)
    once = {n: w.main_grad.clone() for n, w in weights_of(module).items()}
    for first, overwrite in ((True, False), (None, True), (False, True)):
        for w in weights_of(module).values():
            w.main_grad.fill_(float("nan"))
            w.overwrite_main_grad = overwrite
        one_step(module, recipe, [first], device)
        assert not differences({n: w.main_grad for n, w in weights_of(module).items()}, once)
    for first in (None, False):
        for w in weights_of(module).values():
            w.overwrite_main_grad = False
            w.main_grad.fill_(1000.0)
        one_step(module, recipe, [first], device)
        for name, w in weights_of(module).items():
            assert snr_db(w.main_grad.double() - 1000, once[name]) >= (20 if main == "fp32" else -20), name
            assert not torch.equal(w.main_grad, once[name]) and (w.main_grad - 1000).abs().max() < 500


@on_devices
@gemm_modules
def test_stand_in_gradients(kind: str, device: str) -> None:
    """Hooks that wait for a gradient get a dummy, and know by the flag where the real one is."""
    module = fused(kind, device)
    for w in weights_of(module).values():
        w.grad_added_to_main_grad = False
        w.zero_out_wgrad = True
    one_step(module, "current", [True], device)
    main = {n: w.main_grad.clone() for n, w in weights_of(module).items()}
    with region("current"):
        run(module, microbatch(0, device), True)
    for name, w in weights_of(module).items():
        assert w.grad_added_to_main_grad is True and torch.equal(w.main_grad, main[name]) and w.main_grad.any()
        assert w.grad.shape == w.shape and w.grad.dtype == w.dtype and not w.grad.any()
        w.zero_out_wgrad, w.grad_added_to_main_grad, w.grad = False, False, None
    with region("current"):
        run(module, microbatch(0, device), True)
    assert all(w.grad_added_to_main_grad and w.grad.shape == w.shape for w in weights_of(module).values())


@on_devices
@gemm_modules
def test_get_main_grad(kind: str, device: str) -> None:
    """A function that gives the buffer goes before the attribute."""
    module, other = fused(kind, device), fused(kind, device)
    given = {}
    for name, w in weights_of(module).items():
        given[name] = torch.zeros_like(w, dtype=torch.float32)
        w.get_main_grad = lambda name=name: given[name]
    for m in (module, other):
        one_step(m, "current", [None], device)
    assert not differences(given, {n: w.main_grad for n, w in weights_of(other).items()})
    assert not any(w.main_grad.any() for w in weights_of(module).values())


@on_devices
@covering(kind=GEMM_MODULES, delay=[False, True], recipe=WITH_PLAIN)
def test_under_torch_autocast(kind: str, delay: bool, recipe: str | None, device: str) -> None:
    """fp32 weights that a bf16 product reads converted: their own main_grad gets the gradient."""
    plain = make(kind, device)
    module = make(kind, device, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    for w in weights_of(module).values():
        w.main_grad = torch.zeros_like(w)
    for m in (plain, module):
        torch.manual_seed(0)
        with torch.autocast(device, BF16), region(recipe):
            y = m(values(24, WIDTH, device=device, seed=1))
        y.backward(gradient_for(y))
    module.backward_dw()
    for name, w in weights_of(module).items():
        assert w.grad is None and snr_db(w.main_grad, plain.get_parameter(name).grad) >= DB["bf16"], name


@on_devices
@with_plain
def test_a_refused_backward_may_be_run_again(kind: str, recipe: str | None, device: str) -> None:
    """What was saved is kept until all is known to be right: who was told what is wrong mends it, and goes on."""
    wanted = fused(kind, device)
    module = copy.deepcopy(wanted)
    mains = {n: torch.zeros_like(w, dtype=MAIN["fp32"]) for n, w in weights_of(module).items()}
    for step in range(3):  # replayed, too
        found = {}
        for name, m in (("wanted", wanted), ("found", module)):
            x = microbatch(step, device).requires_grad_()
            torch.manual_seed(step)
            with region(recipe):
                y = m(x)
            if m is module:
                for w in weights_of(m).values():
                    w.main_grad = None
                with pytest.raises(ArgumentError, match="weight.main_grad"):
                    y.backward(gradient_for(y))
                for n, w in weights_of(m).items():
                    w.main_grad = mains[n]
                with pytest.raises(UnsupportedError, match="vmap"):
                    torch.autograd.grad(y, x, torch.stack([gradient_for(y)] * 2), is_grads_batched=True)
            y.backward(gradient_for(y))
            found[name] = {"y": y, "dx": x.grad} | {n: w.main_grad for n, w in weights_of(m).items()}
        assert not differences(found["found"], found["wanted"]), f"step {step}"
        assert not differences(fp8_state(module), fp8_state(wanted)), f"step {step}"


# --------------------------------------------------------------------------------- gradients later


def later(kind: str, device: str, **options: Any) -> Any:
    return make(kind, device, BF16, delay_wgrad_compute=True, **options)


@on_devices
@covering(kind=GEMM_MODULES, recipe=[*WITH_PLAIN, *(n for n in RECIPES if n not in KINDS)])
def test_delayed_equals_immediate(kind: str, recipe: str | None, device: str) -> None:
    """Weights have no gradient until backward_dw(), and then the one they would have had, bit for bit."""
    module, plain = later(kind, device), make(kind, device, BF16)
    assert module.need_backward_dw() and not plain.need_backward_dw()
    assert all(w.skip_backward_post_hook for w in weights_of(module).values())
    for _ in range(2):
        wanted = one_step(plain, recipe, [None], device)
        with region(recipe):
            got = {f"{n}0": t for n, t in run(module, microbatch(0, device), None).items()}
        assert all(w.grad is None for w in weights_of(module).values())
        module.backward_dw()
        got |= {n: p.grad for n, p in module.named_parameters()}
        module.zero_grad(set_to_none=True)
        for name in [n for n in wanted if n.endswith("bias") and "norm" not in n]:
            assert snr_db(got.pop(name), wanted.pop(name)) >= DB["bf16"], name  # summed by another kernel
        assert not differences(got, wanted)
    module.backward_dw()  # nothing waits
    assert all(w.grad is None for w in weights_of(module).values())


@on_devices
@with_plain
def test_several_backwards_wait(kind: str, recipe: str | None, device: str) -> None:
    """Each call computes the oldest; gradients add up as those of immediate backwards do."""
    module, plain = later(kind, device), make(kind, device, BF16)
    after: list[dict[str, torch.Tensor]] = []
    for m in (plain, module):
        with region(recipe):
            for i in range(3):
                run(m, microbatch(i, device), None, seed=i)
                if m is plain:
                    after.append({n: w.grad.clone() for n, w in weights_of(m).items()})
    for wanted in after:
        module.backward_dw()
        assert not differences({n: w.grad for n, w in weights_of(module).items()}, wanted)


@on_devices
@covering(kind=GEMM_MODULES, main=MAIN, recipe=["current", None, "delayed", "block", "nvfp4"])
def test_delayed_into_main_grad(kind: str, main: str, recipe: str | None, device: str) -> None:
    """With both options: the first microbatch overwrites, the others add, all of it in backward_dw()."""
    module, wanted = fused(kind, device, main, delay_wgrad_compute=True), fused(kind, device, main)
    for m in (module, wanted):
        for w in weights_of(m).values():
            w.main_grad.fill_(float("nan"))
        with region(recipe):
            for i in range(3):
                run(m, microbatch(i, device), i == 0, seed=i)
    assert all(w.main_grad.isnan().all() for w in weights_of(module).values())
    for _ in range(3):
        module.backward_dw()
    assert all(w.grad is None for w in weights_of(module).values())
    assert not differences(*({n: w.main_grad for n, w in weights_of(m).items()} for m in (module, wanted)))


@on_devices
@gemm_modules
def test_delayed_without_a_frozen_weight(kind: str, device: str) -> None:
    module = later(kind, device)
    frozen = list(weights_of(module))[0]
    module.get_parameter(frozen).requires_grad_(False)
    one_step(module, "current", [None], device)
    module.backward_dw()
    assert {n for n, w in weights_of(module).items() if w.grad is None} == {frozen}


@on_devices
@gemm_modules
def test_copies_have_nothing_waiting(kind: str, device: str) -> None:
    """What waits belongs to the module whose backward it was; a copy's own backwards work."""
    module = later(kind, device)
    with region("current"):
        run(module, microbatch(0, device), None)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other.zero_grad(set_to_none=True)
        other.backward_dw()
        assert all(w.grad is None for w in weights_of(other).values())
        with region("current"):
            run(other, microbatch(0, device), None)
        other.backward_dw()
        assert all(w.grad is not None for w in weights_of(other).values())
    module.backward_dw()
    assert not differences(*({n: w.grad for n, w in weights_of(m).items()} for m in (module, other)))
