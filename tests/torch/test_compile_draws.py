"""Draws from an RNG tracker under torch.compile: part of the graph, the numbers of eager code, drawn once each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import te_torch as te
from te_core.errors import UnsupportedError
from te_core.recipe import DelayedScaling
from te_torch import CudaRNGStatesTracker
from tests.backends import on_devices
from tests.covering import covering
from tests.world import differences, fp8_state

NAME = "model-parallel-rng"
ALL = {"attention_dropout": 0.3, "hidden_dropout": 0.3, "drop_path_rate": 0.2, "sequence_parallel": True}
CASES: dict[str, dict[str, Any]] = {
    "attention": {"attention_dropout": 0.3, "hidden_dropout": 0.0},
    "hidden": {**ALL, "attention_dropout": 0.0},
    "all": ALL,  # with sequence_parallel attention draws from torch's own generator
}
RECIPES = {"high": None, "delayed": DelayedScaling(amax_history_len=2)}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def tracker_of(device: str) -> CudaRNGStatesTracker:
    made = CudaRNGStatesTracker(device=device)
    made.add(NAME, 7)
    return made


def layer(tracker: Any, device: str, **options: Any) -> te.TransformerLayer:
    torch.manual_seed(0)
    return te.TransformerLayer(
        32, 64, 2, layer_number=1, device=device, get_rng_state_tracker=lambda: tracker, **options
    )


def steps(run: Callable[..., Any], layers: list[Any], recipe: Any, device: str) -> list[dict[str, Any]]:
    """Three steps of all layers: results, gradients and FP8 states."""
    found: list[dict[str, Any]] = []
    for i in range(3):
        for number, module in enumerate(layers):
            torch.manual_seed(i)
            x = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(9 * i + number)).to(device)
            x.requires_grad_()
            with te.autocast(enabled=recipe is not None, recipe=recipe, emulate=True):
                y = run(module, x)
            y.backward(y.detach() + 0.5)
            found.append({"y": y.detach(), "dx": x.grad} | {k: p.grad for k, p in module.named_parameters()})
            found[-1] |= {f"fp8 {k}": v.clone() for k, v in fp8_state(module).items()}
            module.zero_grad()
    return found


def plainly(module: Any, x: torch.Tensor) -> Any:
    return module(x)


def in_checkpoint(module: Any, x: torch.Tensor) -> Any:
    return te.checkpoint(module, x)


@covering(case=CASES, recipe=RECIPES, run=[plainly, in_checkpoint])
@on_devices
def test_draws_are_part_of_the_graph(case: str, recipe: str, run: Any, device: str) -> None:
    """Two layers share a program, whose draws are those of eager code, and each goes on along the tracker's stream."""
    tracker = tracker_of(device)
    eager = [layer(tracker, device, **CASES[case]) for _ in range(2)]
    compiled = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    program = torch.compile(run, fullgraph=True, backend=counter)
    start = tracker._mark()
    expected = steps(run, eager, RECIPES[recipe], device)
    end = tracker.get_states()[NAME]
    end = (end if isinstance(end, torch.Tensor) else end.get_state()).clone()
    start()
    got = steps(program, compiled, RECIPES[recipe], device)
    after = tracker.get_states()[NAME]
    assert torch.equal(end, after if isinstance(after, torch.Tensor) else after.get_state())
    assert counter.frame_count == 1
    # On CUDA a compiler's draw from torch's own generator is another one than eager code's.
    if device == "cpu" or case != "all":
        assert not any(differences(a, b) for a, b in zip(got, expected, strict=True))
    assert differences(expected[0], expected[2])


def test_a_checkpoint_of_torch_keeps_what_was_drawn() -> None:
    """As te_torch.checkpoint does: one draw for both runs."""
    tracker = tracker_of("cpu")
    eager = layer(tracker, "cpu", **ALL)
    other = copy.deepcopy(eager)
    start = tracker._mark()
    expected = steps(plainly, [eager], None, "cpu")
    start()

    def run(module: Any, x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)

    got = steps(torch.compile(run, fullgraph=True, backend="aot_eager"), [other], None, "cpu")
    assert not any(differences(a, b) for a, b in zip(got, expected, strict=True))


def test_trackers_of_their_own() -> None:
    """Modules with other trackers share a program, and each draws from its own."""
    trackers = [tracker_of("cpu"), CudaRNGStatesTracker(device="cpu")]
    trackers[1].add(NAME, 8)
    modules = [
        te.DotProductAttention(2, 16, attention_dropout=0.5, get_rng_state_tracker=get, attn_mask_type="no_mask")
        for get in (lambda: trackers[0], lambda: trackers[1])
    ]
    qkv = [torch.randn(8, 2, 2, 16) for _ in range(3)]
    starts = [tracker._mark() for tracker in trackers]
    expected = [module(*qkv) for module in modules]
    assert not torch.equal(*expected)
    for start in starts:
        start()
    counter = CompileCounterWithBackend("aot_eager")
    for module, y in zip(modules, expected, strict=True):
        module.compile(fullgraph=True, backend=counter)
        assert torch.equal(module(*qkv), y)
    assert counter.frame_count == 1


def test_export_says_that_a_tracker_stays_here() -> None:
    tracker = tracker_of("cpu")
    module = layer(tracker, "cpu", **ALL)
    with pytest.raises(Exception, match="draws from an RNG tracker") as caught:
        torch.export.export(module, (torch.randn(8, 4, 32),))
    assert isinstance(caught.value, UnsupportedError) or "UnsupportedError" in str(caught.value)
