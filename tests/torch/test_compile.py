"""torch.compile of every module and of a model: bit-equal with eager, FP8 state included, without compiling often."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import te_torch as te
from te_core.recipe import DelayedScaling
from tests.backends import on_devices
from tests.covering import covering
from tests.world import NO_REGION, RECIPES, WIDTH, differences, fp8_state, make, on, region, step, values

BF16 = torch.bfloat16
full, more = pytest.mark.full, pytest.mark.more


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def batch(device: str, rows: int = 24, seed: int = 1) -> torch.Tensor:
    return values(2, rows, WIDTH, device=device, dtype=BF16, seed=seed)


def check_steps(eager: Any, compiled: Any, owner: Any, recipe: Any, inputs: list[torch.Tensor]) -> None:
    for i, x in enumerate(inputs):
        wanted, got = step(eager, x, recipe), step(compiled, x, recipe, owner=owner)
        on(str(x.device.type), *got.values())
        assert not differences(got, wanted), f"step {i}"
        assert not differences(fp8_state(owner), fp8_state(eager)), f"step {i}"


@on_devices
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=full)])
def test_region_inside(recipe: str, device: str) -> None:
    """The region within the compiled function; nested ones and a layer in high precision as well."""
    last = te.Linear(64, WIDTH, params_dtype=BF16, device=device)
    eager = torch.nn.ModuleList([make("LayerNormLinear", device, BF16), last])
    owner = copy.deepcopy(eager)

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPES[recipe]):
            x = module[1](module[0](x))
            with te.autocast(enabled=False):
                x = module[1](module[0](x))
            with te.autocast(recipe=RECIPES["current"]):
                return module[0](x)

    compiled = torch.compile(lambda t: run(owner, t), fullgraph=True, backend="aot_eager")
    x = batch(device)
    for i in range(3):
        wanted = step(lambda t: run(eager, t), x * (i + 1), NO_REGION, owner=eager)
        got = step(compiled, x * (i + 1), NO_REGION, owner=owner)
        assert not differences(got, wanted)
        assert not differences(fp8_state(owner), fp8_state(eager))
    assert te.autocast(recipe=RECIPES[recipe]).recipe is RECIPES[recipe]


def test_older_names_inside() -> None:
    """What warns does not break the graph: the region's older name, and older arguments of functions."""
    module, x = make("Linear"), values(16, 48)
    again = copy.deepcopy(module)
    routing = torch.tensor([[0, 1]] * 16)

    def run(t: torch.Tensor, owner: Any) -> torch.Tensor:
        with te.fp8_autocast(enabled=True):
            y = owner(t)
        rows, order = te.moe_permute(y, routing, num_out_tokens=32, map_type="index")
        return te.moe_unpermute(rows, order, probs=torch.ones(16, 2).bfloat16(), map_type="index")

    with pytest.warns(DeprecationWarning, match="fp8_autocast is deprecated") as said:
        wanted = run(x, module)
    assert {Path(w.filename).name for w in said if "is deprecated" in str(w.message)} == {Path(__file__).name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x, again), wanted)


@pytest.mark.timeout(900)  # a C++ compiler among many processes
@on_devices
@pytest.mark.parametrize(
    ("backend", "recipe", "kind"),
    [
        ("aot_eager", "plain", "LayerNormMLP"),
        ("aot_eager", "delayed", "LayerNormLinear"),
        # Without a recipe the output and what is saved of it are the same memory.
        pytest.param("inductor", "plain", "LayerNormLinear", marks=more),
        *(
            pytest.param(*case, marks=full)
            for case in (
                ("aot_eager", "plain", "LayerNormLinear"),
                ("aot_eager", "delayed", "LayerNormMLP"),
                ("aot_eager", "current", "LayerNormLinear"),
                ("aot_eager", "current", "LayerNormMLP"),
                ("inductor", "plain", "LayerNormMLP"),
            )
        ),
    ],
)
def test_returned_norm_is_not_overwritten(kind: str, recipe: str, backend: str, device: str) -> None:
    """The norm's output is saved for backward and used outside: neither use may spoil the other's."""
    eager = make(kind, device, return_layernorm_output=True)
    owner = copy.deepcopy(eager)

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        y, n = module(x)
        return (n * 3 + 1).sum(-1, keepdim=True) * y

    compiled = torch.compile(lambda t: run(owner, t), fullgraph=True, backend=backend)
    x = values(2, 24, WIDTH, device=device, seed=1)
    for _ in range(2):
        wanted, got = (step(f, x, recipe, owner=o) for f, o in ((lambda t: run(eager, t), eager), (compiled, owner)))
        if backend == "aot_eager":
            assert not differences(got, wanted)
        else:
            [torch.testing.assert_close(got[n], wanted[n], rtol=1e-4, atol=1e-4) for n in got]


@on_devices
@covering(kind=["LayerNormMLP", "LayerNorm"], recipe=["delayed", "plain"])
def test_non_contiguous_input(kind: str, recipe: str, device: str) -> None:
    eager = make(kind, device, BF16)
    owner = copy.deepcopy(eager)
    x = values(WIDTH, 24, 2, device=device, dtype=BF16, seed=1).permute(2, 1, 0)
    assert not x.is_contiguous()
    compiled = torch.compile(owner, fullgraph=True, backend="aot_eager")
    check_steps(eager, compiled, owner, recipe, [x, 2 * x])


@on_devices
@covering(marked=[False, True], recipe=["delayed", "plain"])
def test_dynamic_batch(marked: bool, recipe: str, device: str) -> None:
    """Many sizes, odd ones in FP8 too, with few compiles: at most one for each way that the memory is laid out."""
    eager = make("LayerNormMLP", device, BF16)
    owner = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(owner, fullgraph=True, backend=counter)

    def call(t: torch.Tensor) -> torch.Tensor:
        if marked:
            torch._dynamo.mark_dynamic(t, 1)
        return compiled(t)

    check_steps(eager, call, owner, recipe, [batch(device, rows) for rows in (26, 40, 7, 33)])
    settled = counter.frame_count
    assert settled <= 2 + (not marked) + 2 * (recipe != "plain")
    check_steps(eager, call, owner, recipe, [batch(device, rows) for rows in (9, 35, 56, 34, 48, 31)])
    assert counter.frame_count == settled


@on_devices
def test_compiles_of_recipes_and_modes(device: str) -> None:
    """One for each precision and grad mode, however often they take turns; a changed scale is no reason for another."""
    eager = make("LayerNormMLP", device, BF16)
    owner = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(owner, fullgraph=True, backend=counter)
    x = batch(device)
    for i in range(2):
        for recipe in ("plain", "delayed", "current", DelayedScaling(amax_history_len=4)):
            check_steps(eager, compiled, owner, recipe, [x * (i + 1)])
        with torch.no_grad(), region("current"):
            assert torch.equal(compiled(x), eager(x))
    assert counter.frame_count == 4


@on_devices
def test_many_calls_in_a_region_compile_once(device: str) -> None:
    """A compiled module leaves its trace in the region without guarding on what ran there before."""
    eager, counter = make("Linear", device, BF16), CompileCounterWithBackend("aot_eager")
    owner = copy.deepcopy(eager)
    compiled, x = torch.compile(owner, fullgraph=True, backend=counter), batch(device)
    for number in range(3):
        for module in (eager, compiled):
            with region("delayed"), torch.set_grad_enabled(number != 1):
                for i in range(4):
                    module(x * (i + 1 + number))
        with region("delayed"):
            assert torch.equal(eager(x), compiled(x))
    assert counter.frame_count <= 2  # with and without gradients
    assert not differences(fp8_state(owner), fp8_state(eager))


@on_devices
def test_no_update_without_grad_mode(device: str) -> None:
    """A region inside a compiled function follows the rule of eager code: no grad mode, no new scales."""
    eager = make("Linear", device)
    owner = copy.deepcopy(eager)

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPES["delayed"]):
            return module(x)

    compiled = torch.compile(lambda t: run(owner, t), fullgraph=True, backend="aot_eager")
    x = values(16, WIDTH, device=device)
    with torch.no_grad():
        assert torch.equal(compiled(x), run(eager, x))
    assert not differences(fp8_state(owner), fp8_state(eager))
    assert owner.fp8_state.scale_fwd[0] == 1 and owner.fp8_state.amax_history_fwd[0, 0] == x.abs().max()


@on_devices
@pytest.mark.parametrize("inside", [False, True])
def test_custom_algorithms(inside: bool, device: str) -> None:
    def scale_of(amax: torch.Tensor, scale: torch.Tensor, top: float, recipe: DelayedScaling) -> torch.Tensor:
        return torch.where(amax > 0, top / (amax * recipe.amax_history_len), scale)

    recipe = DelayedScaling(
        amax_history_len=3, amax_compute_algo=lambda history: 2 * history.amax(0), scaling_factor_compute_algo=scale_of
    )
    eager = make("Linear", device)
    owner = copy.deepcopy(eager)

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        if not inside:
            return module(x)
        with te.autocast(recipe=recipe):
            return module(x)

    compiled = torch.compile(lambda t: run(owner, t), fullgraph=True, backend="aot_eager")
    for i in range(3):
        x = values(16, WIDTH, device=device, seed=i) * (i + 1)
        rule = NO_REGION if inside else recipe
        wanted, got = step(lambda t: run(eager, t), x, rule, owner=eager), step(compiled, x, rule, owner=owner)
        assert not differences(got, wanted)
        assert not differences(fp8_state(owner), fp8_state(eager))
    assert owner.fp8_state.scale_fwd[0] == 448 / (6 * owner.fp8_state.amax_history_fwd[:, 0].max())


@on_devices
def test_frozen_parts_under_the_compiler(device: str) -> None:
    eager = make("LayerNormMLP", device, BF16)
    for name, p in eager.named_parameters():
        p.requires_grad_(name == "fc2_weight")
    owner = copy.deepcopy(eager)
    compiled = torch.compile(owner, fullgraph=True, backend=CompileCounter())
    x = batch(device)
    for _ in range(2):
        grads = []
        for module, holder in ((eager, eager), (compiled, owner)):
            holder.zero_grad()
            with region("delayed"):
                module(x).square().sum().backward()
            grads.append({n: p.grad.clone() for n, p in holder.named_parameters() if p.grad is not None})
        assert list(grads[0]) == ["fc2_weight"] and not differences(*grads)


ATTRIBUTES: dict[str, tuple[str, Any]] = {
    "LayerNorm": ("eps", 0.5),
    "RMSNorm": ("zero_centered_gamma", True),
    "LayerNormLinear": ("eps", 0.5),
    "LayerNormMLP": ("activation", "relu"),
}


@on_devices
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("RMSNorm", None),
        ("LayerNormLinear", None),
        ("LayerNormMLP", "delayed"),
        *(
            pytest.param(*case, marks=full)
            for case in (("LayerNorm", None), ("LayerNormLinear", "delayed"), ("LayerNormMLP", None))
        ),
    ],
)
def test_an_attribute_set_between_calls(kind: str, recipe: str | None, device: str) -> None:
    eager = make(kind, device, BF16)
    owner = copy.deepcopy(eager)
    compiled = torch.compile(owner, fullgraph=True, backend="aot_eager")
    x = batch(device)
    check_steps(eager, compiled, owner, recipe, [x])
    before = owner(x)
    for module in (eager, owner):
        setattr(module, *ATTRIBUTES[kind])
    check_steps(eager, compiled, owner, recipe, [x, 3 * x])
    assert not torch.equal(owner(x), before)


class Counting(te.Linear):
    """A user's own, which keeps something of its last forward."""

    seen, last = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x)
        self.seen = x.shape[0]
        self.last = x
        return y


@on_devices
def test_a_users_module_that_sets_attributes(device: str) -> None:
    eager = Counting(WIDTH, 64, params_dtype=BF16, device=device)
    owner = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(owner, fullgraph=True, backend=counter)
    x = batch(device)
    check_steps(eager, compiled, owner, "delayed", [x, 3 * x])
    assert counter.frame_count == 1 and owner.seen == eager.seen == x.shape[0]
    assert torch.equal(owner.last, eager.last)
