"""Products over two ranks that overlap with their communication against the same ones without, in turns in one process.

The layer of `parallel` and smaller ones, tensor and sequence parallel, forward and backward, in bf16 and two FP8
recipes; each method of forward's sums, with bulk flags or with a ring for the sum of dgrad. `plain ms` and `ms`: a step
of the slower rank, medians of rounds in which both are measured one after the other. `of_plain`: the median of the
rounds' ratios, below 1 where overlap is faster.

`shown ms`, from a trace of rank 0: the time of a step in which a transfer runs (a kernel of NCCL, a copy between GPUs)
and no kernel that computes. NCCL's kernels wait for the other rank, so a rank that is ahead counts its waiting.

On a CPU: the same over gloo at a small size, to show that it works.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

import te_torch as te
from benchmarks import harness, parallel
from te_core.recipe import Recipe

RINGS = {f"{name}_fprop": {"method": "ring_exchange"} for name in ("proj", "fc2")}
OF_DGRAD = {"ub_overlap_rs_dgrad": True, "ub_bulk_dgrad": False, "ub_bulk_wgrad": False}
#: How it overlaps: what `ub_cfgs` says, and the flags beside `ub_tp_comm_overlap`.
METHODS: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "ring": (RINGS, {}),
    "ring, and of dgrad": (RINGS, OF_DGRAD),
    "pipeline": ({}, {}),
}
_OF_4096 = {"hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "tokens": 4096}
SIZES: dict[str, list[dict[str, int]]] = {
    "cuda": [parallel.SIZES["cuda"], parallel.SIZES["cuda"] | {"tokens": 2048}, _OF_4096],
    "cpu": [parallel.SIZES["cpu"]],
}


def measure() -> list[harness.Row]:
    """All sizes, recipes and methods; none on a machine with one GPU."""
    kind = harness.device().type
    if kind == "cuda" and harness.gpus() < parallel.WORLD:
        print(f"overlap: skipped, it needs {parallel.WORLD} GPUs and there is one")
        return []
    return parallel.spawned(kind, cases)


def cases(kind: str) -> list[harness.Row]:
    """The rows, equal on all ranks but for traces."""
    return [
        row
        for size in SIZES[kind]
        for name, recipe in parallel.RECIPES.items()
        for row in case(size, name, recipe, kind)
    ]


def case(size: dict[str, int], name: str, recipe: Recipe | None, kind: str) -> list[harness.Row]:
    """The rows of a layer in a recipe: one for each method."""
    plain = work_of(size, recipe, kind)
    rows = []
    for method, (cfgs, flags) in METHODS.items():
        mode = te.UserBufferQuantizationMode.NONE if recipe is None else te.UserBufferQuantizationMode.FP8
        te.initialize_ub([size["tokens"], size["hidden"]], parallel.WORLD, quantization_modes=[mode], ub_cfgs=cfgs)
        overlapped = work_of(size, recipe, kind, ub_tp_comm_overlap=True, **flags)
        times = in_turns((plain, overlapped), kind)
        row: harness.Row = {
            "case": f"{size['tokens']} tokens, hidden {size['hidden']}, tp {parallel.WORLD}",
            "recipe": name,
            "method": method,
            "plain ms": statistics.median(before for before, _ in times),
            "ms": statistics.median(after for _, after in times),
            "of_plain": statistics.median(after / before for before, after in times),
        }
        if kind == "cuda":
            row |= {"plain shown ms": parallel.shown(parallel.trace(plain))}
            row |= {"shown ms": parallel.shown(parallel.trace(overlapped))}
        rows.append(row)
        del overlapped
        te.destroy_ub()
        harness.free()
    return rows


def work_of(size: dict[str, int], recipe: Recipe | None, kind: str, **flags: bool) -> harness.Work:
    """A step of a rank's part of the layer."""
    group = dist.group.WORLD
    layer = parallel.build(size, kind, set_parallel_mode=True, sequence_parallel=True, tp_group=group, **flags)
    return parallel.step(layer, recipe, size["tokens"] // parallel.WORLD, size["hidden"], kind)


def in_turns(works: Sequence[harness.Work], kind: str) -> list[list[float]]:
    """Milliseconds of each in each round, of the slower rank."""
    rounds = parallel.ROUNDS if kind == "cuda" else 1
    return [[parallel.slowest(parallel.timed(work, kind, rounds=1), kind) for work in works] for _ in range(rounds)]


def main(arguments: Sequence[str]) -> int:
    """As the other benchmarks run."""
    from benchmarks.run import main as run

    return run(["overlap", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
