"""Products that overlap as they do where nobody says a method, by the table that ships: see `benchmarks.overlap`.

`captured` rows: the same step as a CUDA graph beside the eager one, in turns; `of_eager` is below 1 where the graph is
faster.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch.distributed as dist

import te_torch as te
from benchmarks import harness, overlap, parallel
from te_core.recipe import Recipe


def measure() -> list[harness.Row]:
    """All sizes and recipes; none on a machine with one GPU."""
    return overlap.of_two(cases)


def cases(kind: str) -> list[harness.Row]:
    """The rows, equal on all ranks but for traces."""
    rows: list[harness.Row] = []
    for size in overlap.SIZES[kind]:
        plain = {name: overlap.work_of(size, recipe, kind) for name, recipe in parallel.RECIPES.items()}
        with overlap.initialised(size, {}):
            rows += overlap.case(size, "default", {}, plain, kind, True)
            del plain
            if kind == "cuda":
                rows += [captured(size, name, recipe) for name, recipe in parallel.RECIPES.items()]
    return rows


def captured(size: dict[str, int], name: str, recipe: Recipe | None) -> harness.Row:
    """A step that overlaps, eagerly and as a CUDA graph."""
    tokens, hidden = size["tokens"] // dist.get_world_size(), size["hidden"]
    eager, layer = (overlap.layer_of(size, "cuda", ub_tp_comm_overlap=True) for _ in range(2))
    sample: Any = parallel.operand(tokens, hidden, "cuda").requires_grad_()
    te.make_graphed_callables(layer, (sample,), enabled=recipe is not None, recipe=recipe)
    works = [parallel.step(each, recipe, tokens, hidden, "cuda") for each in (eager, layer)]
    times = overlap.in_turns(works, "cuda")
    layer.reset()
    row = overlap.headed(size, name, "default, captured") | {
        "eager ms": statistics.median(before for before, _ in times),
        "ms": statistics.median(after for _, after in times),
        "of_eager": statistics.median(after / before for before, after in times),
    }
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["overlap_defaults", *sys.argv[1:]]))
