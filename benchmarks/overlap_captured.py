"""A step whose products overlap, as a CUDA graph beside the same step eagerly, in turns: see `benchmarks.overlap`.

`torch.cuda.graph`: forward and backward are one graph, by torch's recipe. `make_graphed_callables`: the layer is two
graphs, and its step copies what goes in and the gradients of the weights, as an eager one does not. `of_eager` is below
1 where the graph is faster.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

import te_torch as te
from benchmarks import graphs, harness, overlap, parallel
from te_core.recipe import Recipe

CALLABLES, GRAPH = METHODS = ("make_graphed_callables", "torch.cuda.graph")


def measure() -> list[harness.Row]:
    """All sizes and recipes; none on a machine with fewer GPUs than ranks."""
    return overlap.of_ranks(cases)


def cases(kind: str) -> list[harness.Row]:
    """The rows, equal on all ranks."""
    rows: list[harness.Row] = []
    for size in overlap.SIZES[kind]:
        with overlap.initialised(size, {}):
            for name in parallel.RECIPES:
                rows += [row(size, name, method, kind) for method in METHODS]
    return rows


def row(size: dict[str, int], name: str, method: str, kind: str) -> harness.Row:
    """One size, recipe and way to capture."""
    recipe = parallel.RECIPES[name]
    eager = step(layer(size), size, recipe)
    with captured(method, size, recipe) as work:
        times = overlap.in_turns((eager, work), kind)
    del eager, work
    harness.free()
    found = overlap.headed(size, name, method) | {
        "eager ms": statistics.median(before for before, _ in times),
        "ms": statistics.median(after for _, after in times),
        "of_eager": statistics.median(after / before for before, after in times),
    }
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    return found


def layer(size: dict[str, int]) -> Any:
    """Its products overlap by the table that ships."""
    return overlap.layer_of(size, "cuda", ub_tp_comm_overlap=True)


def step(module: Any, size: dict[str, int], recipe: Recipe | None) -> harness.Work:
    """Forward and backward of this rank's tokens."""
    return parallel.step(module, recipe, size["tokens"] // dist.get_world_size(), size["hidden"], "cuda")


@contextmanager
def captured(method: str, size: dict[str, int], recipe: Recipe | None) -> Iterator[harness.Work]:
    """The same as graphs."""
    module = layer(size)
    if method == CALLABLES:
        sample: Any = parallel.operand(size["tokens"] // dist.get_world_size(), size["hidden"], "cuda")
        te.make_graphed_callables(module, (sample.requires_grad_(),), enabled=recipe is not None, recipe=recipe)
        yield step(module, size, recipe)
        module.reset()
        return
    yield graphs.captured(step(module, size, recipe), "thread_local")  # NCCL's watchdog asks for events meanwhile


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["overlap_captured", *sys.argv[1:]]))
