"""`te_torch.checkpoint`: a checkpointed step equals a plain one bit for bit, in results, gradients, FP8 state and
random numbers; and what it takes and refuses. (Which precision is computed again: test_regions.py.)"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import te_torch as te
from te_core.recipe import DelayedScaling
from te_torch import CudaRNGStatesTracker, draws
from te_torch.training.checkpoint import (
    has_te_modules,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
    use_reentrant_activation_recompute,
)
from tests import recipes
from tests.backends import on_devices, requires_cuda
from tests.covering import covering

forms = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
WIDTH, TOKENS, BATCH = 64, 32, 2
OPTIONS: dict[str, Any] = {"attention_dropout": 0.2, "hidden_dropout": 0.2, "drop_path_rate": 0.1}


class Mixed(torch.nn.Module):
    """torch's modules and ours, one inside the other, with random numbers of both."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH, device=device), torch.nn.Dropout(0.3), torch.nn.GELU()
        )
        self.layer = te.TransformerLayer(WIDTH, 2 * WIDTH, 4, device=device, **OPTIONS)

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, other: torch.Tensor | None = None) -> tuple[Any, ...]:
        y = self.inner(x) * scale
        if other is not None:
            y = y + other
        return self.layer(y), y.sum(), "name", None


def batch(device: str, seed: int = 1) -> torch.Tensor:
    return torch.randn(TOKENS, BATCH, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


@on_devices
@forms
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_what_is_kept(recipe: str | None, reentrant: bool, device: str) -> None:
    """The input, and a byte or two for each of the small numbers of a generator: nothing of what is computed."""
    layer = te.TransformerLayer(WIDTH, 2 * WIDTH, 4, device=device)
    x = batch(device).requires_grad_()
    run = partial(te.checkpoint, use_reentrant=reentrant)
    with te.measure_saved(layer) as saved, recipes.region(recipe):
        y = run(layer, x)
    kept = te.memory_report(layer, saved).totals["saved"]
    with te.measure_saved(layer) as saved, recipes.region(recipe):
        z = layer(x)
    assert kept == x.nbytes and te.memory_report(layer, saved).totals["saved"] > 5 * kept
    del y, z


# ----------------------------------------------------------------------------------------- random numbers


def tracker_of(device: str, seed: int = 7) -> CudaRNGStatesTracker:
    tracker = CudaRNGStatesTracker(device=device)
    tracker.add("model-parallel-rng", seed)
    return tracker


class Foreign:
    """A tracker of another library: the protocol, over bytes of the CPU's generator."""

    def __init__(self, device: str) -> None:
        self.states: dict[str, Any] = {"model-parallel-rng": torch.Generator().manual_seed(7).get_state()}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = torch.get_rng_state()
            torch.set_rng_state(before)


def drops(tracker: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Draws from torch, from the tracker, and from torch inside of a fork around a fork."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(x.sin(), 0.5)
        with tracker.fork():
            y = y + torch.nn.functional.dropout(x.cos(), 0.5)
            with tracker.fork():
                y = y * torch.rand_like(y)
            y = y + torch.empty_like(y).uniform_()
        return torch.nn.functional.dropout(y.exp(), 0.5)

    return function


def gradient(run: Callable[..., torch.Tensor], tracker: Any, around: bool = False) -> list[torch.Tensor]:
    """Of two calls, computed again in the other order; then what the streams give next."""
    device = tracker._place().type if isinstance(tracker, CudaRNGStatesTracker) else "cpu"
    torch.manual_seed(1)
    xs = [batch(device, i).requires_grad_() for i in (1, 2)]
    if around:
        with tracker.fork():
            ys = [run(drops(tracker), x) for x in xs]
    else:
        ys = [run(drops(tracker), x) for x in xs]
    for y in reversed(ys):  # the first call's numbers come last: generators do not end by themselves where they were
        y.sum().backward()
    with tracker.fork():
        left = torch.rand(3, device=device)
    return [*ys, *[x.grad for x in xs], left, torch.rand(3, device=device)]


@on_devices
@forms
@pytest.mark.parametrize("around", [False, True], ids=["", "in a fork"])
@pytest.mark.parametrize("told", [False, True], ids=["untold", "told"])
def test_trackers_draw_the_same_again(told: bool, around: bool, reentrant: bool, device: str) -> None:
    """Our trackers do so told or not, also where the first run was inside a fork and the backward is not."""
    tracker, twin = tracker_of(device), tracker_of(device)
    more = {"get_rng_state_tracker": lambda: tracker} if told else {}
    got = gradient(partial(te.checkpoint, use_reentrant=reentrant, **more), tracker, around)
    want = gradient(lambda f, x: f(x), twin, around)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@forms
def test_a_tracker_of_another_library(reentrant: bool) -> None:
    tracker, twin = Foreign("cpu"), Foreign("cpu")
    run = partial(te.checkpoint, use_reentrant=reentrant, get_rng_state_tracker=lambda: tracker)
    got, want = gradient(run, tracker), gradient(lambda f, x: f(x), twin)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@forms
def test_two_backward_passes(reentrant: bool) -> None:
    """What is kept of the generators serves as many passes as there are."""
    tracker = tracker_of("cpu")
    x = batch("cpu").requires_grad_()
    y = te.checkpoint(drops(tracker), x, use_reentrant=reentrant)
    y.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.sum().backward()
    assert torch.equal(first, x.grad)


@forms
def test_preserve_rng_state(reentrant: bool) -> None:
    """Without it nothing is set back: what runs again goes on along the streams."""
    torch.manual_seed(1)
    seen: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.rand(4))
        return x * x

    x = batch("cpu").requires_grad_()
    te.checkpoint(function, x, preserve_rng_state=False, use_reentrant=reentrant).sum().backward()
    generator = torch.Generator().manual_seed(1)
    assert all(torch.equal(t, torch.rand(4, generator=generator)) for t in seen) and len(seen) == 2


@forms
@pytest.mark.parametrize("passes", [1, 2])
def test_what_a_capture_keeps(passes: int, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a capture no generator can be set: what was drawn is kept, operators that write in place included."""
    monkeypatch.setattr(draws, "capturing", lambda: True)
    monkeypatch.setattr("te_torch.training.checkpoint.capturing", lambda: True)
    tracker, twin = tracker_of("cpu"), tracker_of("cpu")

    def function(tracker: Any, x: torch.Tensor, model: Any) -> torch.Tensor:
        y = drops(tracker)(x)
        y = y + torch.rand(y.shape, out=torch.empty_like(y)) + torch.randn_like(y).bernoulli_(0.5).mul_(2)
        return model(y)[0]

    model = Mixed("cpu")
    results = []
    for each, t, run in (
        (model, tracker, partial(te.checkpoint, use_reentrant=reentrant)),
        (copy.deepcopy(model), twin, lambda f, *args: f(*args)),
    ):
        torch.manual_seed(1)
        x = batch("cpu").requires_grad_()
        y = run(partial(function, t), x, each)
        for i in range(passes):
            y.sum().backward(retain_graph=i + 1 < passes)
        results.append([y, x.grad, torch.rand(3), *[p.grad for p in each.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_draws_that_differ_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "capturing", lambda: True)
    ran: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x * (torch.rand(4) if len(ran) == 1 else torch.randn(4))

    x = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="draws by aten.randn.default, and drew by aten.rand.default"):
        te.checkpoint(function, x).sum().backward()


# ---------------------------------------------------------------------------------------- arguments and forms


@forms
def test_contexts_of_the_user(reentrant: bool) -> None:
    """The first is around the first run, the second around each that follows, in both forms."""
    entered: list[str] = []

    @contextmanager
    def context(name: str) -> Iterator[None]:
        entered.append(f"{name}, {'again' if in_fp8_activation_recompute_phase() else 'first'}")
        yield

    module = te.Linear(WIDTH, WIDTH, device="cpu")
    x = batch("cpu").requires_grad_()
    y = te.checkpoint(module, x, use_reentrant=reentrant, context_fn=lambda: (context("one"), context("two")))
    assert entered == ["one, first"]
    y.sum().backward()
    assert entered == ["one, first", "two, again"] and x.grad is not None


def test_modules_without_ours_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all its options and errors; what may contain one of ours does not."""
    seen: list[Any] = []
    monkeypatch.setattr(
        "te_torch.training.checkpoint.torch_checkpoint",
        lambda function, *args, **kw: (seen.append((function, kw)), torch_checkpoint(function, *args, **kw))[1],
    )
    plain = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.5))
    ours = torch.nn.Sequential(torch.nn.Identity(), te.LayerNorm(WIDTH, device="cpu"))
    assert not has_te_modules(plain) and has_te_modules(ours) and has_te_modules(ours.forward)
    assert has_te_modules(plain.forward) and has_te_modules(torch.sin) and has_te_modules(te.Linear(8, 8, device="cpu"))
    x = batch("cpu").requires_grad_()
    te.checkpoint(plain, x).sum().backward()
    te.checkpoint(plain, x, use_reentrant=False, determinism_check="none", debug=False).sum().backward()
    assert [function for function, _ in seen] == [plain, plain] and seen[1][1]["determinism_check"] == "none"
    with pytest.raises(ValueError, match="determinism_check"):
        te.checkpoint(plain, x, use_reentrant=False, determinism_check="no such").sum().backward()
    te.checkpoint(ours, x).sum().backward()
    assert seen[-1][0] is not ours


@forms
def test_tensors_by_keyword(reentrant: bool) -> None:
    """They are kept and differentiated like the others, be they results of something before."""
    a, b = (batch("cpu", i).requires_grad_() for i in (1, 2))
    middle = b.exp()
    y = te.checkpoint(lambda x, *, k, factor: (x * k).sin() * factor, a, k=middle, factor=3.0, use_reentrant=reentrant)
    (y.sum() + middle.sum()).backward()
    grads = torch.autograd.grad(((a * b.exp()).sin() * 3.0).sum() + b.exp().sum(), (a, b))
    assert torch.allclose(a.grad, grads[0]) and torch.allclose(b.grad, grads[1])


def test_ranks(tmp_path: Any) -> None:
    """With one rank nothing is to be spread (several: tests/parallel/test_collectives.py)."""
    x = torch.ones(3, requires_grad=True)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        for given in (None, group):
            te.checkpoint(torch.sin, x, distribute_saved_activations=True, tp_group=given).sum().backward()
        with pytest.warns(DeprecationWarning, match="by name"):
            te.checkpoint(torch.sin, True, lambda: CudaRNGStatesTracker(device="cpu"), group, x).sum().backward()
        assert torch.allclose(x.grad, 3 * torch.cos(x.detach()))
        te.checkpoint(torch.sin, x, tp_group=group).sum().backward()
    finally:
        torch.distributed.destroy_process_group()


def test_the_older_order_is_told_from_arguments() -> None:
    """A function whose first arguments look like it keeps them: a tensor stands where a group would."""
    x = torch.ones(3, requires_grad=True)

    def function(flag: bool, act: Callable[..., Any], x: torch.Tensor, factor: float) -> torch.Tensor:
        assert flag is True
        return act(x) * factor

    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        te.checkpoint(function, True, torch.sin, x, 2.0).sum().backward()
    assert torch.allclose(x.grad, 2 * torch.cos(x.detach()))


# ------------------------------------------------------------------------------ a checkpoint of one's own


def test_phases() -> None:
    module = te.Linear(WIDTH, WIDTH, device="cpu")
    seen: list[tuple[bool, bool]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((is_fp8_activation_recompute_enabled(), in_fp8_activation_recompute_phase()))
        return module(x)

    x = batch("cpu").requires_grad_()
    for reentrant in (True, False):
        for enabled in (True, False):
            seen.clear()
            with te.autocast(enabled=enabled, recipe=DelayedScaling()):
                y = te.checkpoint(function, x, use_reentrant=reentrant)
            y.sum().backward()
            assert seen == [(enabled, False), (enabled, True)]
        assert use_reentrant_activation_recompute() is reentrant
    assert not is_fp8_activation_recompute_enabled() and not in_fp8_activation_recompute_phase()


# ------------------------------------------------------------------------------------------------ in a capture


@requires_cuda
@covering(reentrant=[True, False], recipe=[None, "delayed", "current", "block", "mxfp8"])
def test_a_captured_step(recipe: str | None, reentrant: bool) -> None:
    """A whole step with a checkpoint in it, captured: every replay draws anew, and its recomputation draws the same.

    Seen by the mask of a dropout of torch's, and one of ours: where the output is zero the gradient is.
    """
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "device": "cuda"}
    model = te.TransformerLayer(256, 512, 4, attention_dropout=0.1, hidden_dropout=0.1, **options)
    drop = torch.nn.Dropout(0.5)
    leaf = torch.ones(TOKENS, BATCH, 256, device="cuda", dtype=torch.bfloat16)
    factor = torch.ones_like(leaf, requires_grad=True)
    after = torch.full_like(leaf, 64.0, requires_grad=True)  # so that nothing else is zero
    masks = torch.zeros_like(leaf)

    def function(x: torch.Tensor, f: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        kept = drop(f)
        masks.copy_(kept.detach() != 0)
        return drop(model(x * kept) + a)

    def one() -> torch.Tensor:
        factor.grad = after.grad = None
        with recipes.region(recipe):
            y = te.checkpoint(function, leaf, factor, after, use_reentrant=reentrant)
        y.backward(torch.ones_like(y))
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = one()
    seen = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(after.grad != 0, captured != 0), "the last dropout's mask, in forward and again"
        assert ((factor.grad != 0) <= (masks != 0)).all(), "the first one's"
        assert 0.4 < (captured != 0).float().mean() < 0.6
        seen.append(captured != 0)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


@requires_cuda
@forms
def test_a_captured_step_with_a_tracker(reentrant: bool) -> None:
    """Replays equal eager checkpointed steps of a twin whose tracker begins where the graph does."""
    options: dict[str, Any] = {"attention_dropout": 0.2, "hidden_dropout": 0.2, "sequence_parallel": True}
    tracker, twin = tracker_of("cuda"), tracker_of("cuda")
    made = [
        te.TransformerLayer(WIDTH, 2 * WIDTH, 4, device="cuda", get_rng_state_tracker=lambda t=t: t, **options)
        for t in (tracker, twin)
    ]
    made[1].load_state_dict(made[0].state_dict())
    leaves = [batch("cuda").requires_grad_() for _ in made]

    def one(i: int) -> torch.Tensor:
        leaves[i].grad = None
        y = te.checkpoint(made[i], leaves[i], use_reentrant=reentrant)
        y.backward(batch_gradient)
        return y

    batch_gradient = batch("cuda", 4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            one(0), one(1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    for state in tracker.get_states().values():
        graph.register_generator_state(state)
    with torch.cuda.graph(graph):
        captured = one(0)
    twin.set_states({name: state.get_state() for name, state in tracker.get_states().items()})
    for _ in range(3):
        graph.replay()
        assert torch.equal(captured, one(1))
        torch.testing.assert_close(*[leaf.grad for leaf in leaves])
