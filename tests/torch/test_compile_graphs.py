"""torch.compile(mode="reduce-overhead"): compiled code that runs as a CUDA graph calls no operator of ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import te_torch as te
from te_torch import state as scaling
from te_torch import updates
from tests import recipes
from tests.backends import requires_cuda
from tests.covering import covering
from tests.world import differences, fp8_state, make, region, step, values

BF16 = torch.bfloat16
WIDTH = 256
STEPS = 8
MODULES: dict[str, Any] = {
    "Linear": lambda: te.Linear(WIDTH, WIDTH, params_dtype=BF16, device="cuda"),
    "LayerNormMLP": lambda: te.LayerNormMLP(WIDTH, 2 * WIDTH, params_dtype=BF16, device="cuda"),
    "TransformerLayer": lambda: te.TransformerLayer(
        WIDTH, 2 * WIDTH, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, device="cuda"
    ),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@requires_cuda
@pytest.mark.timeout(900)  # a compiler of kernels
@covering(kind=MODULES, recipe=["delayed", None, "current", "block"])
def test_reduce_overhead(kind: str, recipe: str | None) -> None:
    """No reason to leave the graph out is found, and scales follow as in eager mode, steps of replays included."""
    torch.manual_seed(0)
    module = MODULES[kind]()
    eager = copy.deepcopy(module)
    counters.clear()
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    rule = recipes.rule(recipe)
    for i in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        x = values(128, 1, WIDTH, device="cuda", dtype=BF16, seed=i) * (1 + i)
        got, wanted = step(compiled, x, rule, owner=module), step(eager, x, rule)
        for name in ("y", "dx"):
            noise = (got[name].float() - wanted[name].float()).norm() / wanted[name].float().norm()
            assert noise < (0.1 if kind == "TransformerLayer" else 1e-6), (i, name, noise)
    assert counters["inductor"]["cudagraph_skips"] == 0
    with te.autocast(enabled=False):  # what begins after it knows that the last backward has ended
        pass
    mine, theirs = fp8_state(module), fp8_state(eager)
    assert bool(mine) == (recipe == "delayed")
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0.05, atol=0.05)


@requires_cuda
@pytest.mark.timeout(900)
@covering(kind=MODULES, recipe=["mxfp8", "delayed", "current"])
def test_reduce_overhead_with_microbatches(kind: str, recipe: str) -> None:
    """Weights quantized by a first microbatch's graph are read by the others' graphs, step after step."""
    torch.manual_seed(0)
    module = MODULES[kind]()
    eager = copy.deepcopy(module)
    for p in (*module.parameters(), *eager.parameters()):  # a gradient that a graph made would not live to be added to
        p.grad = torch.zeros_like(p)
    counters.clear()
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    for i in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        x = values(128, 1, WIDTH, device="cuda", dtype=BF16, seed=i)
        outputs = []
        for call in (compiled, eager):
            with region(recipes.rule(recipe)):
                y = call(x, is_first_microbatch=i % 2 == 0)
            y.float().square().sum().backward()
            outputs.append(y.detach().clone())
        got, wanted = outputs
        noise = (got.float() - wanted.float()).norm() / wanted.float().norm()
        assert noise < (0.1 if kind == "TransformerLayer" else 1e-6), (i, noise)
        if i % 2:
            with torch.no_grad():  # the same step for both, large enough that old copies would show
                for mine, other in zip(module.parameters(), eager.parameters(), strict=True):
                    other.mul_(1.5 if other.ndim == 2 else 1)
                    mine.copy_(other)
                    mine.grad.zero_(), other.grad.zero_()  # type: ignore[union-attr]
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_scales_follow_what_no_operator_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a replay: the histories are written, and nobody says so."""
    module = make("Linear", dtype=BF16)
    eager = copy.deepcopy(module)
    module.compile(fullgraph=True, backend="aot_eager")
    told = updates.ran_backward
    for i in range(5):
        if i == 1:
            mute: Any = monkeypatch.setattr
            mute(scaling.ScalingState, "ran_compiled", lambda *args: None)
            mute(updates, "ran_backward", lambda state, *w: told(state, *w) if state is eager.fp8_state else None)
        x = values(16, 48, dtype=BF16, seed=i) * (1 + i)
        assert not differences(step(module, x, "delayed"), step(eager, x, "delayed")), i
    with te.autocast(enabled=False):
        pass
    assert not differences(fp8_state(module), fp8_state(eager))
