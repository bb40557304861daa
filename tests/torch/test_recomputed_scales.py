"""Which scales and which precision a checkpoint runs a forward again with: those of that forward's own first run,
whatever ran in between. A checkpointed program equals the plain one bit for bit; what is dropped leaves nothing."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_torch.reruns import FirstRun
from te_torch.training.checkpoint import activation_recompute_forward, get_activation_recompute_contexts
from tests.covering import covering
from tests.world import differences, fp8_state, values

DELAYED, OTHER = DelayedScaling(amax_history_len=1), Float8CurrentScaling()
WIDTH = 32
Run = Callable[..., Any]


class ByHand(torch.autograd.Function):
    """A checkpoint as trainers write their own."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.x = module, x
        with activation_recompute_forward(activation_recompute=True, recompute_phase=False):
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad(), te.autocast(recipe=DELAYED):
            with activation_recompute_forward(activation_recompute=True, recompute_phase=True):
                y = ctx.module(x)
        y.backward(grad)
        return None, x.grad


def with_contexts(module: Any, x: torch.Tensor) -> Any:
    contexts = get_activation_recompute_contexts
    return torch_checkpoint(module, x, use_reentrant=False, context_fn=contexts)


CHECKPOINTS: dict[str, Run] = {
    "ours, reentrant": partial(te.checkpoint, use_reentrant=True),
    "ours": partial(te.checkpoint, use_reentrant=False),
    "torch, reentrant": partial(torch_checkpoint, use_reentrant=True),
    "torch": partial(torch_checkpoint, use_reentrant=False),
}
OTHERS: dict[str, Run] = {"by hand": ByHand.apply, "contexts": with_contexts}
kinds = pytest.mark.parametrize("kind", CHECKPOINTS)


def plainly(module: Run, x: torch.Tensor) -> Any:
    return module(x)


def model(seed: int = 0) -> te.Linear:
    torch.manual_seed(seed)
    return te.Linear(WIDTH, WIDTH, device="cpu")


def batch(number: int) -> torch.Tensor:
    """Of a magnitude of its own: scales of another batch are wrong for it."""
    return (values(16, WIDTH, seed=number) * 3.0 ** (number * (-1) ** number)).requires_grad_()


def low(run: Run, module: Any, x: torch.Tensor, recipe: Any = DELAYED) -> torch.Tensor:
    with te.autocast(recipe=recipe):
        return run(module, x)


def check(program: Callable[[Any, Run], list[torch.Tensor]], run: Run, made: Callable[[], Any] = model) -> None:
    """The program with this checkpoint, against itself without one."""
    module = made()
    results = []
    for each, how in ((module, run), (copy.deepcopy(module), plainly)):
        inputs = program(each, how)
        found = {f"dx {i}": x.grad for i, x in enumerate(inputs)} | fp8_state(each)
        results.append(found | {name: p.grad for name, p in each.named_parameters()})
    assert not differences(*results)


# ------------------------------------------------------------------------------- what may come in between


def two_in_flight(order: int, module: Any, run: Run) -> list[torch.Tensor]:
    """Two microbatches, each in its own region, after one that has set scales; then both backward."""
    low(run, module, batch(1)).sum().backward()
    xs = [batch(2), batch(3)]
    ys = [low(run, module, x) for x in xs]
    for y in ys[::order]:
        y.sum().backward()
    return xs


def three_in_one(module: Any, run: Run) -> list[torch.Tensor]:
    """One backward of three forwards, each in its own region."""
    xs = [batch(i) for i in (1, 2, 3)]
    sum(low(run, module, x).sum() for x in xs).backward()
    return xs


def without_gradients(module: Any, run: Run) -> list[torch.Tensor]:
    """A pass under no_grad that is not checkpointed in FP8, and a step whose loss is dropped."""
    low(run, module, batch(1)).sum().backward()
    x = batch(2)
    y = low(run, module, x)
    with torch.no_grad():
        low(run, module, batch(4))
    low(run, module, batch(3))
    y.sum().backward()
    return [x]


def loaded(module: Any, run: Run) -> list[torch.Tensor]:
    """Scales are loaded between forward and backward."""
    low(run, module, batch(1)).sum().backward()
    x = batch(2)
    y = low(run, module, x)
    with torch.no_grad():
        module.fp8_state.scale_fwd.mul_(64)
    y.sum().backward()
    return [x]


def called_twice(module: Any, run: Run) -> list[torch.Tensor]:
    """Regions inside of the function, each of which updates the scales at its end."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=DELAYED):
            y = module(x)
        with te.autocast(recipe=DELAYED):
            return module(7 * y)

    xs = [batch(1), batch(2)]
    sum(run(function, x).sum() for x in xs).backward()
    return xs


def partly_without(module: Any, run: Run) -> list[torch.Tensor]:
    """Calls under no_grad inside of the function, before and after the others."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = module(x)
        y = module(x + shift)
        with torch.no_grad():
            shift = module(y)
        return module(y) * shift

    xs = [batch(1), batch(2)]
    ys = [low(run, function, x) for x in xs]
    for y in ys:
        y.sum().backward()
    return xs


def twice(module: Any, run: Run) -> list[torch.Tensor]:
    """Two backward passes of one forward."""
    xs = [batch(1), batch(2)]
    ys = [low(run, module, x) for x in xs]
    for y in ys:
        y.sum().backward(retain_graph=True)
        y.sum().backward()
    return xs


def mixed(module: Any, run: Run) -> list[torch.Tensor]:
    """Forwards in three precisions that await their backward at once."""
    xs = [batch(i) for i in (1, 2, 3)]
    ys = [low(run, module, xs[0]), run(module, xs[1]), low(run, module, xs[2], OTHER)]
    for y in (ys[1], ys[0], ys[2]):
        y.sum().backward()
    return xs


def dropped(module: Any, run: Run) -> list[torch.Tensor]:
    low(run, module, batch(1), OTHER)
    x = batch(2)
    low(run, module, x).sum().backward()
    return [x]


def caught(module: Any, run: Run) -> list[torch.Tensor]:
    def fails(x: torch.Tensor) -> torch.Tensor:
        module(x)
        raise KeyError("caught")

    with pytest.raises(KeyError):
        low(run, fails, batch(1), OTHER)
    x = batch(2)
    low(run, module, x).sum().backward()
    return [x]


def under_no_grad(module: Any, run: Run) -> list[torch.Tensor]:
    x = batch(2)
    y = low(run, module, x)
    with torch.no_grad():
        run(module, batch(1))
    y.sum().backward()
    return [x]


def backward_fails(module: Any, run: Run) -> list[torch.Tensor]:
    y = run(module, batch(1))
    y.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    x = batch(2)
    low(run, module, x).sum().backward()
    return [x]


PROGRAMS: dict[str, Any] = {
    "in order": partial(two_in_flight, 1),
    "in reverse": partial(two_in_flight, -1),
    **{f.__name__: f for f in (three_in_one, without_gradients, loaded, called_twice, partly_without, twice)},
    **{f.__name__: f for f in (mixed, dropped, caught, under_no_grad, backward_fails)},
}


@pytest.mark.parametrize("program", PROGRAMS)
@kinds
def test_the_scales_are_those_of_the_first_run(kind: str, program: str) -> None:
    if program == "called_twice" and "reentrant" in kind:
        return  # a region that ends without gradients updates nothing: its scales come later than the plain one's
    check(PROGRAMS[program], CHECKPOINTS[kind])


@pytest.mark.parametrize("program", ["in order", "in reverse", "without_gradients"])
@pytest.mark.parametrize("kind", OTHERS)
def test_checkpoints_of_ones_own(kind: str, program: str) -> None:
    check(PROGRAMS[program], OTHERS[kind])


@pytest.mark.filterwarnings("ignore:None of the inputs")
@covering(turns=2, program=["in order", "in reverse"], outer=CHECKPOINTS, kind=CHECKPOINTS)
def test_nested(kind: str, outer: str, program: str) -> None:
    """A checkpoint in a checkpoint, and the same module beside the inner one."""

    def run(module: Any, x: torch.Tensor) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            return module[0](module[1](CHECKPOINTS[kind](lambda t: module[1](module[0](t)), module[0](x))))

        return CHECKPOINTS[outer](function, x)

    def without(module: Any, x: torch.Tensor) -> Any:
        a, b = module
        return a(b(b(a(a(x)))))

    made = torch.nn.ModuleList([model(1), model(2)])
    (got, weights), (want, others) = [
        (
            {f"dx {i}": x.grad for i, x in enumerate(PROGRAMS[program](each, how))} | fp8_state(each),
            [p.grad for p in each.parameters()],
        )
        for each, how in ((made, run), (copy.deepcopy(made), without))
    ]
    assert not differences(got, want)
    for a, b in zip(weights, others, strict=True):  # a reentrant one adds its calls' gradients in another order
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


@kinds
def test_counted_casts(kind: str) -> None:
    """With check_finite a module hands counters to its layer in the place of its state."""

    def program(module: Any, run: Run) -> list[torch.Tensor]:
        xs = [batch(1), batch(2)]
        ys = []
        for x in xs:
            with te.autocast(recipe=DELAYED, check_finite=True):
                ys.append(run(module, x))
        for y in ys:
            y.sum().backward()
        return xs

    check(program, CHECKPOINTS[kind])


def test_a_selective_checkpoint_sees_no_copies() -> None:
    """It keeps results by the number of an operator, which has to be the same in both runs."""

    def run(function: Any, x: torch.Tensor) -> Any:
        policy = lambda ctx, op, *args, **kw: (  # noqa: E731
            CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.clone.default else CheckpointPolicy.PREFER_RECOMPUTE
        )
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return te.checkpoint(lambda t: function(t.clone()).clone() * t, x, use_reentrant=False, context_fn=contexts)

    def program(module: Any, run: Run) -> list[torch.Tensor]:
        xs = [batch(1), batch(2)]
        ys = [low(run, module, x) for x in xs]
        for y in ys:
            y.sum().backward()
        return xs

    module = model()
    results = []
    for each, how in ((module, run), (copy.deepcopy(module), lambda m, x: m(x) * x)):
        xs = program(each, how)
        results.append({f"dx {i}": x.grad for i, x in enumerate(xs)} | {"dw": each.weight.grad} | fp8_state(each))
    assert not differences(*results)


@kinds
@pytest.mark.parametrize("program", [dropped, caught, under_no_grad])
def test_nothing_stays(kind: str, program: Any) -> None:
    """What first runs left goes with the graph, at once."""
    gc.collect()
    gc.disable()
    try:
        module = model()
        alive = weakref.ref(module)
        for _ in range(3):
            program(module, CHECKPOINTS[kind])
        assert not any(isinstance(o, FirstRun) for o in gc.get_objects())
        del module
        assert alive() is None
    finally:
        gc.enable()


def test_a_plain_forward_beside_an_inner_checkpoint() -> None:
    """te.checkpoint runs both again; the inner one's own run is still to come then."""

    def run(module: Any, x: torch.Tensor) -> Any:
        inner = partial(torch_checkpoint, use_reentrant=False)
        return te.checkpoint(lambda t: module(inner(module, module(t))), x, use_reentrant=False)

    module = model()
    results = []
    for each, how in ((module, run), (copy.deepcopy(module), lambda m, x: m(m(m(x))))):
        xs = PROGRAMS["in order"](each, how)
        results.append({f"dx {i}": x.grad for i, x in enumerate(xs)} | {"dw": each.weight.grad} | fp8_state(each))
    assert not differences(*results)


@pytest.mark.filterwarnings("ignore:None of the inputs")
@kinds
def test_a_hook_inside_a_checkpoint(kind: str) -> None:
    """A forward in a hook is run again by nobody, though a reentrant checkpoint's own backward is around it."""
    module, seen = model(), []

    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            seen.append(module(batch(1)))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = module(x)
        if y.requires_grad:
            y.register_hook(hook)
        return y * 2

    expected = module(batch(1))
    low(CHECKPOINTS[kind], function, batch(2)).sum().backward()
    assert seen and all(torch.equal(y, expected) for y in seen)


# ---------------------------------------------------------------------------- a run that is no backward of it


class Later(torch.autograd.Function):
    """Keeps its inputs alone; a hook on its output runs it again, before the backward of what came behind."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
        with activation_recompute_forward(activation_recompute=True, recompute_phase=False):
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad


@pytest.mark.parametrize("drops", [False, True])
def test_a_queue_of_scales(drops: bool) -> None:
    """A rerun by a user's own hook is told neither node nor frame: the oldest first run that lives is taken."""
    module = model()
    xs = [batch(1), batch(2)]
    if drops:
        low(Later.apply, module, batch(3))
    first = [low(Later.apply, module, x) for x in xs]
    for y, x in zip(first, xs, strict=True):
        with activation_recompute_forward(activation_recompute=True, recompute_phase=True):
            again = low(plainly, module, x)
        assert torch.equal(again, y)


def test_pairs_of_contexts() -> None:
    """Each run again belongs to the first run of its own pair, in whatever order."""
    module, xs = model(), [batch(1), batch(2), batch(3)]
    pairs = [get_activation_recompute_contexts() for _ in xs]
    first = []
    for x, (context, _) in zip(xs, pairs, strict=True):
        with context:
            first.append(low(plainly, module, x).detach())
    for i in (1, 0, 2, 1):
        with torch.no_grad(), pairs[i][1]:
            assert torch.equal(low(plainly, module, xs[i]), first[i])


def test_a_run_of_which_nothing_is_known() -> None:
    """It reads the scales before the last update, and records nothing."""
    module = model()
    for i in (1, 2):
        with te.autocast(recipe=DELAYED):
            with torch.no_grad(), activation_recompute_forward(activation_recompute=True, recompute_phase=False):
                y = module(batch(i))
        before = fp8_state(module)
        phase = activation_recompute_forward(activation_recompute=True, recompute_phase=True)
        region = te.autocast(recipe=DELAYED)
        with phase if i == 1 else region, region if i == 1 else phase:
            again = module(batch(i))
        assert torch.equal(again, y) and not differences(fp8_state(module), before)


# ------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("program", ["in order", "without_gradients"])
@pytest.mark.parametrize("kind", ["ours", "ours, reentrant"])
def test_a_compiled_module(kind: str, program: str) -> None:
    torch._dynamo.reset()
    compiled: dict[Any, Any] = {}

    def run(module: Any, x: torch.Tensor) -> Any:
        function = compiled.setdefault(module, torch.compile(module, backend="aot_eager"))
        return CHECKPOINTS[kind](function, x)

    check(PROGRAMS[program], run)


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_a_checkpoint_in_a_compiled_function(kind: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda module, x: CHECKPOINTS[kind](module, x), backend="aot_eager", fullgraph=True)
    check(without_gradients, compiled)


def test_a_compiled_module_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's CUDA graph lends no memory for copies: the state's own are read, before the last update."""
    monkeypatch.setattr("te_torch.compiled_runs.capturing", lambda: True)
    torch._dynamo.reset()

    def steps(module: Any, run: Run) -> list[torch.Tensor]:
        xs = [batch(1), batch(2)]
        for x in xs:
            low(run, module, x).sum().backward()
        return xs

    compiled: dict[Any, Any] = {}
    check(steps, lambda m, x: te.checkpoint(compiled.setdefault(m, torch.compile(m, backend="aot_eager")), x))
