"""Offloading on a GPU: memory, results, bytes, streams, and captures."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

import te_torch as te
from tests import recipes
from tests.backends import requires_cuda
from tests.world import gradient_for
from tests.world import values as normal

pytestmark = requires_cuda

HIDDEN, TOKENS, LAYERS, AWAY = 1024, 2048, 6, 3
NONE = (contextlib.nullcontext(), lambda y: y)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward adds in one order, so that steps can be compared bit for bit."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def stack(count: int = LAYERS) -> torch.nn.ModuleList:
    torch.manual_seed(3)
    return torch.nn.ModuleList(
        te.TransformerLayer(
            HIDDEN, 2 * HIDDEN, 8, num_gqa_groups=4, params_dtype=torch.bfloat16, device="cuda", hidden_dropout=0.0,
            attention_dropout=0.0, normalization="RMSNorm", activation="swiglu", bias=False,
        )
        for _ in range(count)
    )  # fmt: skip


def data(seed: int = 1) -> torch.Tensor:
    return normal(TOKENS, 1, HIDDEN, seed=seed, device="cuda", dtype=torch.bfloat16)


def forward(model: Any, made: Any, recipe: str | None, x: torch.Tensor) -> torch.Tensor:
    context, sync = made[:2]
    with recipes.region(recipe):
        for layer in model:
            with context:
                x = layer(x)
            x = sync(x)
    return x


def step(model: Any, made: Any, recipe: str | None, seed: int = 1) -> dict[str, torch.Tensor]:
    leaf = data(seed).requires_grad_()
    y = forward(model, made, recipe, leaf)
    y.backward(gradient_for(y, seed=seed))
    assert leaf.grad is not None
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"y": y.detach(), "dx": leaf.grad, **grads}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def test_device_runs_ahead_of_slow_copies() -> None:
    """Copies that come late: whoever does not wait for them reads what was not there yet."""
    plain, other = stack(), stack()
    made = te.get_cpu_offload_context(True, AWAY, LAYERS, offload_weights=True)
    expected = step(plain, NONE, "current")
    step(other, made, "current")
    side = next(s for s in made[0].rules._sides.values() if s is not None)
    copy = side.copy

    def late(pairs: Any) -> Any:
        with torch.cuda.stream(side.stream):
            torch.cuda._sleep(20_000_000)
        return copy(pairs)

    side.copy = late
    torch.cuda.synchronize()
    assert_equal(step(other, made, "current"), expected)


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize("weights", [False, True])
def test_memory_is_less_by_what_was_offloaded(recipe: str | None, weights: bool) -> None:
    """At the end of forward, and at the peak of a step."""
    model = stack()
    made = te.get_cpu_offload_context(True, AWAY, LAYERS, offload_weights=weights)
    for each in (NONE, made):
        step(model, each, recipe)  # scales, plans, pinned memory
    held, peak = [], []
    for each in (NONE, made):
        settle()
        leaf = data().requires_grad_()
        before = torch.cuda.memory_allocated()
        y = forward(model, each, recipe, leaf)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        y.sum().backward()
        peak.append(torch.cuda.max_memory_allocated() - before)
        model.zero_grad()
        del y, leaf
    away = sum(layer.offloaded_bytes for layer in made[0].current.layers)
    assert away > AWAY * 4 * TOKENS * HIDDEN
    # What the last layer away handed on is also an input of the first one that stays.
    assert away - 2 * TOKENS * HIDDEN - 2**20 <= held[0] - held[1] <= away + 2**20
    assert peak[0] - peak[1] > 0.5 * away


def test_by_hand_on_a_stream_of_the_callers() -> None:
    plain, other = stack(4), stack(4)
    stream = torch.cuda.Stream()
    context, sync, controller = te.get_cpu_offload_context(
        True, model_layers=4, manual_synchronization=True, offload_stream=stream
    )
    leaf = data().requires_grad_()
    y = forward(other, (context, sync), "current", leaf)
    for i in (0, 1):
        controller.start_offload_layer(i)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for i in (0, 1):
        controller.release_activation_forward_gpu_memory(i)
    assert before - torch.cuda.memory_allocated() > 2 * 4 * TOKENS * HIDDEN
    for i in (1, 0):
        controller.start_reload_layer(i)
    y.backward(gradient_for(y, seed=1))
    expected = step(plain, NONE, "current")
    assert torch.equal(leaf.grad, expected["dx"])
    assert all(torch.equal(p.grad, expected[name]) for name, p in other.named_parameters())


def test_pinned_memory_is_used_again() -> None:
    """A second step pins nothing."""
    model = stack(4)
    made = te.get_cpu_offload_context(True, 2, 4, retain_pinned_cpu_buffers=True)
    step(model, made, None)
    buffers = {id(b) for kept in made[0].rules.hosts._kept.values() for b, _ in kept}
    for seed in (2, 3):
        step(model, made, None, seed)
    assert {id(b) for kept in made[0].rules.hosts._kept.values() for b, _ in kept} == buffers
    assert all(b.is_pinned() for kept in made[0].rules.hosts._kept.values() for b, _ in kept)


def test_copies_run_on_their_own_stream() -> None:
    model = stack(4)
    made = te.get_cpu_offload_context(True, 2, 4)
    step(model, made, None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(model, made, None)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events()]
    assert any("DtoH" in name and "Pinned" in name for name in names)
    assert any("HtoD" in name and "Pinned" in name for name in names)


@pytest.mark.parametrize("recipe", [None, "current"])
def test_capture(recipe: str | None) -> None:
    """With buffers that are kept a forward and backward can be captured; a replay moves what it computes."""
    plain, other = stack(4), stack(4)
    made = te.get_cpu_offload_context(True, 2, 4, retain_pinned_cpu_buffers=True)
    x, dy = data().requires_grad_(), gradient_for(data(), seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            x.grad = None
            other.zero_grad()
            forward(other, made, recipe, x).backward(dy)
    torch.cuda.current_stream().wait_stream(stream)
    x.grad = None
    other.zero_grad()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = forward(other, made, recipe, x)
        y.backward(dy)
    for seed in (4, 5):
        with torch.no_grad():
            x.copy_(data(seed))
            dy.copy_(gradient_for(dy, seed=seed))
        graph.replay()
        expected = step(plain, NONE, recipe, seed)
        assert torch.equal(y, expected["y"])
        assert torch.equal(x.grad, expected["dx"])
        assert all(torch.equal(p.grad, expected[name]) for name, p in other.named_parameters())


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_weights_are_read_while_they_are_away(recipe: str | None) -> None:
    """Files, copies, addresses and products: whoever reads one has it back, and gradients are as ever."""
    plain, other = stack(), stack()
    made = te.get_cpu_offload_context(True, AWAY, LAYERS, offload_weights=True)
    for model, each in ((plain, NONE), (other, made)):
        step(model, each, recipe)
    expected = step(plain, NONE, recipe, seed=2)
    twin = {name: p.detach().clone() for name, p in plain.named_parameters()}
    leaf = data(2).requires_grad_()
    y = forward(other, made, recipe, leaf)
    weight = other[0].layernorm_mlp.fc1_weight
    with torch._C.DisableTorchFunctionSubclass():
        assert not weight.untyped_storage().nbytes()
    ones = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(weight.detach() @ ones, twin["0.layernorm_mlp.fc1_weight"] @ ones)
    assert torch.equal(other[1].layernorm_mlp.fc2_weight.cpu(), twin["1.layernorm_mlp.fc2_weight"].cpu())
    assert other[0].self_attention.layernorm_qkv.key_weight.data_ptr()
    saved = {name: t for name, t in other.state_dict().items() if name in twin}
    assert saved.keys() == twin.keys() and not [n for n, t in saved.items() if not torch.equal(t, twin[n])]
    y.backward(gradient_for(y, seed=2))
    found = {"y": y.detach(), "dx": leaf.grad, **{name: p.grad for name, p in other.named_parameters()}}
    assert_equal(found, expected)


def test_reads_in_a_capture_are_refused() -> None:
    model = stack()
    made = te.get_cpu_offload_context(True, AWAY, LAYERS, offload_weights=True)
    step(model, made, None)
    y = forward(model, made, None, data().requires_grad_())
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="a read of a weight that is away"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model[0].layernorm_mlp.fc1_weight + 1
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
