"""Steps as CUDA graphs beside the same steps eagerly, in turns in one process.

A layer's forward and backward by `make_graphed_callables`, at a size where the host is the bottleneck and at one where
it is close to it; and a whole step of six layers with the optimizer, captured by torch's own recipe. `wall us` is what
a step takes when steps follow one another, `events us` the same between two events, `gpu us` what the GPU needs where
the host is hidden, as in the other benchmarks (not for the eager whole step, whose host takes longer than that hides).
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import time
from functools import partial

import torch

import te_torch as te
from benchmarks import attention, harness
from benchmarks.modules import RECIPES, Case, works
from te_core.recipe import Recipe
from tests import generators

STEPS, ROUNDS = 40, 9  # of each work in turn
LAYERS = 6

# fmt: off
CASES = [
    Case("TransformerLayer tiny 256, 128x2", partial(attention.layer, 256, 1024, 4), (128, 2, 256)),
    Case("TransformerLayer medium 1024, 1024x8", partial(attention.layer, 1024, 4096, 16), (1024, 8, 1024)),
]
WHOLE = Case(f"step of {LAYERS} layers with AdamW 1024, 1024x2", CASES[1].make, (1024, 2, 1024))
# fmt: on


def step_us(*all_works: harness.Work) -> list[tuple[float, float]]:
    """(wall clock, events) in microseconds of a step of each work, in turns, where steps follow one another."""
    for work in all_works:
        for _ in range(5):
            work()
    wall: list[list[float]] = [[] for _ in all_works]
    events: list[list[float]] = [[] for _ in all_works]
    for _ in range(ROUNDS):
        for i, work in enumerate(all_works):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start = time.perf_counter()
            begin.record()
            for _ in range(STEPS):
                work()
            end.record()
            torch.cuda.synchronize()
            wall[i].append((time.perf_counter() - start) / STEPS * 1e6)
            events[i].append(begin.elapsed_time(end) / STEPS * 1e3)
    return [(statistics.median(w), statistics.median(e)) for w, e in zip(wall, events, strict=True)]


def row(name: str, recipe: str, eager: harness.Work, graphed: harness.Work) -> harness.Row:
    """Both works of a case."""
    (eager_wall, eager_events), (wall, events) = step_us(eager, graphed)
    eager_gpu, gpu = harness.gpu_us(eager, graphed)
    return {
        "case": name,
        "recipe": recipe,
        "eager wall us": eager_wall,
        "wall us": wall,
        "eager events us": eager_events,
        "events us": events,
        "eager gpu us": eager_gpu,
        "gpu us": gpu,
        "of_eager": wall / eager_wall,
    }


def inputs(case: Case) -> torch.Tensor:
    """Activations of the case's shape."""
    rows = case.shape[0] * case.shape[1]
    return harness.matrix(generators.activations, rows, case.shape[2]).view(*case.shape).requires_grad_()


def layer_row(case: Case, recipe: str) -> harness.Row:
    """Forward and backward of one layer."""
    torch.manual_seed(0)
    module, rule = case.make(), RECIPES[recipe]
    other, x = copy.deepcopy(module), inputs(case)
    sample = (x.detach().clone().requires_grad_(),)
    te.make_graphed_callables(other, sample, enabled=rule is not None, recipe=rule)
    _, eager = works(module, x, rule)
    _, graphed = works(other, x, rule)
    found = row(case.name, recipe, eager, graphed)
    other.reset()  # type: ignore[operator]
    return found


def whole_step(case: Case, rule: Recipe | None) -> harness.Work:
    """Forward, backward and optimizer of several layers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[case.make() for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=True)
    x = inputs(case)
    dy = torch.ones_like(x)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        x.grad = None
        with te.autocast(enabled=rule is not None, recipe=rule):
            y = model(x)
        y.backward(dy)
        optimizer.step()

    return step


def captured(step: harness.Work, mode: str = "global") -> harness.Work:
    """The step as one graph, by torch's recipe. `mode`: which calls of other threads break the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        step()
    return graph.replay


def measure() -> list[harness.Row]:
    """All cases in all recipes."""
    rows = []
    for recipe in ("bf16", "delayed", "current", "block"):
        for case in CASES:
            rows.append(layer_row(case, recipe))
            harness.free()
        rule = RECIPES[recipe]
        whole = row(WHOLE.name, recipe, whole_step(WHOLE, rule), captured(whole_step(WHOLE, rule)))
        del whole["eager gpu us"]
        rows.append(whole)
        harness.free()
    return rows


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["graphs", *sys.argv[1:]]))
