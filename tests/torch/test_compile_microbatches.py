"""`is_first_microbatch` in compiled code: a weight is quantized once a step, and everything is as in eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_torch import weight_copies
from tests import recipes
from tests.backends import on_devices
from tests.covering import covering
from tests.world import WIDTH, differences, fp8_state, gradient_for, make, randomise, region, values

BF16 = torch.bfloat16
MODULES: dict[str, Any] = {
    "Linear": lambda device, **kw: make("Linear", device, BF16, **kw),
    "Linear in parts": lambda device: make("Linear", device, BF16, parameters_split=("a", "b")),
    "LayerNormLinear": lambda device: make("LayerNormLinear", device, BF16),
    "LayerNormMLP": lambda device, **kw: make("LayerNormMLP", device, BF16, **kw),
    "LayerNormMLP again": lambda device: make("LayerNormMLP", device, BF16, checkpoint=True),
    "GroupedLinear": lambda device: grouped(device),
}


def grouped(device: str) -> Any:
    torch.manual_seed(0)
    module = te.GroupedLinear(3, WIDTH, 64, params_dtype=BF16, device=device)
    randomise(module)
    return module


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every weight that compiled code quantizes as it runs."""
    seen: list[Any] = []
    real = weight_copies.quantized

    def noted(rt: Any, weight: Any, product: Any) -> Any:
        if rt.device.kind != "meta":
            seen.append(weight.shape)
        return real(rt, weight, product)

    monkeypatch.setattr(weight_copies, "quantized", noted)
    return seen


def rule_of(name: str) -> Any:
    return recipes.RECIPES["nvfp4 nearest" if name == "nvfp4" else name]  # a compiler draws other numbers


def run(module: Any, x: torch.Tensor, first: bool | None) -> torch.Tensor:
    splits = ([16, 0, 16],) if isinstance(module, te.GroupedLinear) else ()
    return module(x, *splits, is_first_microbatch=first)


def micro(module: Any, recipe: Any, seed: int, first: bool | None, device: str) -> dict[str, torch.Tensor]:
    """One microbatch: its results and all that has gathered in the gradients."""
    x = values(32, WIDTH, device=device, dtype=BF16, seed=seed).requires_grad_()
    with region(recipe):
        y = run(module, x, first)
    y.backward(gradient_for(y))
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}  # type: ignore[dict-item]


def both(eager: Any, module: Any, *args: Any) -> None:
    assert not differences(micro(module, *args), micro(eager, *args)), args
    assert not differences(fp8_state(module), fp8_state(eager)), args


def update(*modules: Any) -> None:
    for module in modules:
        for p in module.parameters():
            with torch.no_grad():
                p.sub_(0.1 * p.grad)
            p.grad = None


def pair(kind: str, device: str, **options: Any) -> tuple[Any, Any, Any]:
    eager = MODULES[kind](device, **options)
    module, counter = copy.deepcopy(eager), CompileCounterWithBackend("aot_eager")
    module.compile(fullgraph=True, backend=counter)
    return eager, module, counter


ONCE = [("Linear", "mxfp8"), ("Linear in parts", "delayed")]
ONCE_IN_FULL = [
    ("LayerNormLinear", "current"),
    ("LayerNormMLP", "block"),
    ("LayerNormMLP again", "nvfp4"),
    ("LayerNormMLP again", "delayed"),
    ("GroupedLinear", "mxfp8"),
]


@on_devices
@pytest.mark.parametrize(
    ("kind", "recipe"), [*ONCE, *(pytest.param(*case, marks=pytest.mark.full) for case in ONCE_IN_FULL)]
)
def test_once_a_step(kind: str, recipe: str, device: str, quantized: list[Any]) -> None:
    """Two steps of three microbatches: two programs, one quantization of each weight in a step, no bit differs."""
    eager, module, counter = pair(kind, device)
    weights = len(module._weight_names()) if kind != "Linear in parts" else 1
    for i in range(2):
        for j in range(3):
            both(eager, module, rule_of(recipe), 3 * i + j, j == 0, device)
        assert len(quantized) == (i + 1) * weights
        update(eager, module)
    assert counter.frame_count == 2


@on_devices
def test_as_much_memory_as_in_eager_mode(device: str) -> None:
    eager, module, _ = pair("LayerNormMLP", device)
    for first in (True, False):
        both(eager, module, rule_of("current"), 0, first, device)
    cached = [entry.value for entry in eager._weight_cache.values()]
    theirs = sum(t.nbytes for q in cached for t in (q.rowwise, q.columnwise))
    mine = sum(t.nbytes for t in module._copies.tensors)
    assert theirs <= mine <= theirs + 16 * len(cached)  # scales


@on_devices
@covering(kind=["Linear", "GroupedLinear"], recipe=["delayed", "mxfp8"])
def test_weights_that_changed_are_quantized_again(kind: str, recipe: str, device: str, quantized: list[Any]) -> None:
    """Steps without a first microbatch, as in eager mode: no copy of old values is ever read."""
    eager, module, _ = pair(kind, device)
    weights = 3 if kind == "GroupedLinear" else 1
    for i in range(3):
        for j in range(2):
            both(eager, module, rule_of(recipe), 2 * i + j, False, device)
            assert len(quantized) == (i + 1) * weights
        update(eager, module)


@on_devices
def test_a_weight_that_was_away_is_not_quantized_again(device: str, quantized: list[Any]) -> None:
    """Its memory lies elsewhere when it has been brought back, as by offloading; its contents are what they were."""
    eager, module, _ = pair("Linear", device)
    both(eager, module, rule_of("delayed"), 0, True, device)
    for m in (eager, module):
        storage, before = m.weight.untyped_storage(), m.weight.data_ptr()
        storage.resize_(2 * storage.nbytes())  # both blocks are there while one is copied to the other
        assert m.weight.data_ptr() != before
    both(eager, module, rule_of("delayed"), 1, False, device)
    assert len(quantized) == 1


@on_devices
def test_what_a_first_microbatch_may_be(device: str) -> None:
    """Without gradients, in another recipe, or left out: what was kept is read only where it fits."""
    eager, module, counter = pair("Linear", device)
    x = values(32, WIDTH, device=device, dtype=BF16)
    for _ in range(2):
        with torch.no_grad(), region(rule_of("current")):
            assert torch.equal(run(module, x, True), run(eager, x, True))
        both(eager, module, rule_of("current"), 1, False, device)  # needs the other orientation, too
        with torch.no_grad(), region(rule_of("current")):
            assert torch.equal(run(module, x, False), run(eager, x, False))
        both(eager, module, rule_of("block"), 2, False, device)
        both(eager, module, rule_of("current"), 3, None, device)
        both(eager, module, None, 4, False, device)
        update(eager, module)
    settled = counter.frame_count
    both(eager, module, rule_of("block"), 5, True, device)
    both(eager, module, rule_of("block"), 6, False, device)
    assert counter.frame_count <= settled + 2


@on_devices
def test_layers_share_both_programs(device: str) -> None:
    """Also where another layer's first microbatch comes between."""
    counter = CompileCounterWithBackend("aot_eager")
    layers = [make("Linear", device, BF16, seed=i) for i in range(10)]
    eager = [copy.deepcopy(layer) for layer in layers]
    for layer in layers:
        layer.compile(fullgraph=True, backend=counter)
    for i in range(2):
        for j in range(2):
            for number, (layer, other) in enumerate(zip(layers, eager, strict=True)):
                both(other, layer, rule_of("delayed"), 40 * i + 10 * j + number, j == 0, device)
        update(*layers, *eager)
    assert counter.frame_count == 2


@on_devices
def test_layers_of_other_shapes(device: str) -> None:
    """A size that differs is no symbol of the later microbatches' program."""
    sizes = (64, 80)
    layers = [te.Linear(WIDTH, n, params_dtype=BF16, device=device) for n in sizes]
    eager = [copy.deepcopy(layer) for layer in layers]
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for i in range(2):
        for first in (True, False):
            for layer, other in zip(layers, eager, strict=True):
                both(other, layer, rule_of("mxfp8"), i, first, device)
        update(*layers, *eager)


@on_devices
def test_converted_by_autocast(device: str) -> None:
    """Weights in float32 under torch.autocast: the copies are the parameters', not the conversion's."""
    eager = make("Linear", device)
    module, counter = copy.deepcopy(eager), CompileCounterWithBackend("aot_eager")
    module.compile(fullgraph=True, backend=counter)
    for i in range(2):
        for first in (True, False, False):
            with torch.autocast(device, dtype=BF16):
                x = values(32, WIDTH, device=device, seed=i)
                with region("delayed"):
                    mine, theirs = run(module, x, first), run(eager, x, first)
            assert torch.equal(mine, theirs)
            mine.sum().backward(), theirs.sum().backward()
        assert torch.equal(module.weight.grad, eager.weight.grad)
        update(eager, module)
    assert counter.frame_count == 2


@on_devices
def test_copies_and_moved_modules_begin_without(device: str) -> None:
    eager, module, _ = pair("Linear", device)
    for first in (True, False):
        both(eager, module, rule_of("current"), 0, first, device)
    again = copy.deepcopy(module)
    assert module._copies.tensors and not again._copies.tensors and not module.__getstate__()["_copies"].tensors
    again.compile(fullgraph=True, backend="aot_eager")
    eager.zero_grad()
    with torch.no_grad():
        again.weight.mul_(2), eager.weight.mul_(2)
    both(eager, again, rule_of("current"), 1, False, device)
    module.float()
    assert not module._copies.tensors


@on_devices
@pytest.mark.parametrize("ours", [False, True])
def test_inside_a_checkpoint(ours: bool, device: str) -> None:
    """What a checkpoint in the graph runs can keep nothing: it quantizes as if it were told nothing."""
    module = make("LayerNormLinear", device, BF16)
    eager = copy.deepcopy(module)

    def run_again(owner: Any, x: torch.Tensor, first: bool) -> torch.Tensor:
        if ours:
            return te.checkpoint(owner, x, is_first_microbatch=first)
        return checkpoint(owner, x, first, use_reentrant=False)

    compiled = torch.compile(lambda x, first: run_again(module, x, first), fullgraph=True, backend="aot_eager")
    for first in (True, False):
        for owner, call in ((module, compiled), (eager, lambda x, first: eager(x, first))):
            with region("current"):
                y = call(values(32, WIDTH, device=device, dtype=BF16), first)
            y.backward(gradient_for(y))
            owner.y = y.detach()
        assert torch.equal(module.y, eager.y)
        for a, b in zip(module.parameters(), eager.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


@on_devices
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("mxfp8", marks=pytest.mark.full)])
def test_weights_that_are_held_quantized_need_no_copies(recipe: str, device: str, quantized: list[Any]) -> None:
    with te.quantized_model_init(recipe=rule_of(recipe)):
        eager = te.Linear(WIDTH, 80, params_dtype=BF16, device=device)
    module = copy.deepcopy(eager)
    module.compile(fullgraph=True, backend="aot_eager")
    for first in (True, False):
        both(eager, module, rule_of(recipe), 0, first, device)
    assert not quantized and not module._copies.tensors
