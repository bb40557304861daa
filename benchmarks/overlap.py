"""Products over two ranks that overlap with their communication against the same ones without, in turns in one process.

The layer of `parallel` and smaller ones, tensor and sequence parallel, forward and backward, in bf16 and two FP8
recipes. `plain ms` and `ms`: a step of the slower rank, medians of rounds in which both are measured one after the
other. `of_plain`: the median of the rounds' ratios, below 1 where overlap is faster. At the first size each method is
measured alone, too.

From a trace of rank 0: `shown ms` is the time of a step in which a transfer runs (a kernel of NCCL, a copy between
GPUs) and no kernel that computes, `idle ms` all time in which no such kernel runs. NCCL's kernels wait for the other
rank, so a rank that is ahead counts its waiting as shown; a stream that waits for peer memory runs nothing, which is
idle.

`product` rows: a product of the layer in bf16, whole and in two halves, a part's copy from the other GPU, and the
halves with the copy beside the first.

On a CPU: the same over gloo at a small size, to show that it works.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from benchmarks import harness, parallel
from te_core.layers.communicator import OPERAND
from te_core.recipe import Recipe
from te_torch.parallel.peers import peers_of
from te_torch.runtime import runtime_for, to_core

FLAGS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")


def _alone(*flags: str) -> dict[str, bool]:
    return {flag: flag in flags for flag in FLAGS}


def _sums(method: str) -> dict[str, Any]:
    return {f"{name}_fprop": {"method": method} for name in ("proj", "fc2")}


#: How it overlaps: what `ub_cfgs` says, and the flags beside `ub_tp_comm_overlap`.
METHODS: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "default": ({}, {}),
    "rings, bulk": (_sums("ring_exchange"), {}),
    "rings": (_sums("ring_exchange"), _alone("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad")),
}
ALONE: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "gathers by ring_exchange": ({}, _alone("ub_overlap_ag")),
    "sums by ring_exchange": (_sums("ring_exchange"), _alone("ub_overlap_rs")),
    "sums by pipeline": (_sums("pipeline"), _alone("ub_overlap_rs")),
    "dgrad's sums by ring_exchange": ({}, _alone("ub_overlap_rs_dgrad")),
    "bulk": ({}, _alone("ub_bulk_dgrad", "ub_bulk_wgrad")),
}
_OF_4096 = {"hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "tokens": 4096}
SIZES: dict[str, list[dict[str, int]]] = {
    "cuda": [parallel.SIZES["cuda"], parallel.SIZES["cuda"] | {"tokens": 2048}, _OF_4096],
    "cpu": [parallel.SIZES["cpu"]],
}
STEPS, ROUNDS = 3, 7  # of each in a round


def measure() -> list[harness.Row]:
    """All sizes, recipes and methods; none on a machine with one GPU."""
    kind = harness.device().type
    if kind == "cuda" and harness.gpus() < parallel.WORLD:
        print(f"overlap: skipped, it needs {parallel.WORLD} GPUs and there is one")
        return []
    return parallel.spawned(kind, cases)


def cases(kind: str) -> list[harness.Row]:
    """The rows, equal on all ranks but for traces."""
    rows = products(SIZES[kind][0]) if kind == "cuda" else []
    for size in SIZES[kind]:
        methods = METHODS | (ALONE if size is SIZES[kind][0] else {})
        for name, recipe in parallel.RECIPES.items():
            rows += case(size, name, recipe, kind, methods)
    return rows


def case(
    size: dict[str, int],
    name: str,
    recipe: Recipe | None,
    kind: str,
    methods: dict[str, tuple[dict[str, Any], dict[str, bool]]],
) -> list[harness.Row]:
    """The rows of a layer in a recipe: one for each method."""
    plain = work_of(size, recipe, kind)
    traced = seen("plain ", plain) if kind == "cuda" else {}
    rows = []
    for method, (cfgs, flags) in methods.items():
        mode = te.UserBufferQuantizationMode.NONE if recipe is None else te.UserBufferQuantizationMode.FP8
        te.initialize_ub([size["tokens"], size["hidden"]], parallel.WORLD, quantization_modes=[mode], ub_cfgs=cfgs)
        overlapped = work_of(size, recipe, kind, ub_tp_comm_overlap=True, **flags)
        times = in_turns((plain, overlapped), kind)
        rows.append({
            "case": f"{size['tokens']} tokens, hidden {size['hidden']}, tp {parallel.WORLD}",
            "recipe": name,
            "method": method,
            "plain ms": statistics.median(before for before, _ in times),
            "ms": statistics.median(after for _, after in times),
            "of_plain": statistics.median(after / before for before, after in times),
            **traced,
            **(seen("", overlapped) if kind == "cuda" else {}),
        })  # fmt: skip
        del overlapped
        te.destroy_ub()
        harness.free()
    return rows


def seen(prefix: str, work: harness.Work) -> harness.Row:
    """What a trace of a step says."""
    events = parallel.trace(work)
    return {f"{prefix}shown ms": parallel.shown(events), f"{prefix}idle ms": parallel.idle(events)}


def work_of(size: dict[str, int], recipe: Recipe | None, kind: str, **flags: bool) -> harness.Work:
    """A step of a rank's part of the layer."""
    group = dist.group.WORLD
    layer = parallel.build(size, kind, set_parallel_mode=True, sequence_parallel=True, tp_group=group, **flags)
    return parallel.step(layer, recipe, size["tokens"] // parallel.WORLD, size["hidden"], kind)


def in_turns(works: Sequence[harness.Work], kind: str) -> list[list[float]]:
    """Milliseconds of each in each round, of the slower rank."""
    warm, rounds, steps = (3, ROUNDS, STEPS) if kind == "cuda" else (1, 1, 1)
    for work in works:
        parallel.timed(work, kind, 1, warm, warm)
    return [[parallel.slowest(parallel.timed(work, kind, 1, steps, 0), kind) for work in works] for _ in range(rounds)]


def products(size: dict[str, int]) -> list[harness.Row]:
    """A row for each product of forward, of one rank."""
    hidden, ffn, tokens = size["hidden"], size["ffn"], size["tokens"]
    wide = hidden + 2 * size["groups"] * hidden // size["heads"]
    of = {"qkv": (hidden, wide // 2), "proj": (hidden // 2, hidden), "fc1": (hidden, ffn), "fc2": (ffn // 2, hidden)}
    return [product(name, tokens, *sides) for name, sides in of.items()]


def product(name: str, m: int, k: int, n: int) -> harness.Row:
    """One of them."""
    a, b, out = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n), (m, n)))
    part = torch.empty(m // 2 * min(k, n), device="cuda", dtype=torch.bfloat16)
    rt, half = runtime_for(part), m // 2
    peers = peers_of(dist.group.WORLD, rt)
    row: harness.Row = {"case": f"product {name}", "recipe": "bf16", "M, K, N": f"{m}, {k}, {n}"}
    if peers is None:
        return row

    def whole() -> None:
        torch.mm(a, b, out=out)

    def copy() -> Any:
        room = peers.room(rt, OPERAND, part.nbytes)
        for to in peers.others:
            room.announce(rt, to)
            room.await_(rt, to)
        coming = room.pull(rt, peers.others[0], 0, to_core(part))
        room.leave(rt)
        return coming

    def halves(beside: bool) -> None:
        coming = copy() if beside else None
        torch.mm(a[:half], b, out=out[:half])
        if coming is not None:
            coming.wait()
        torch.mm(a[half:], b, out=out[half:])

    works = {
        "whole ms": whole,
        "halves ms": lambda: halves(False),
        "copy ms": lambda: copy().wait(),
        "halves and copy ms": lambda: halves(True),
    }
    return row | {what: parallel.slowest(parallel.queued(work, 20), "cuda") / 1e3 for what, work in works.items()}


def main(arguments: Sequence[str]) -> int:
    """As the other benchmarks run."""
    from benchmarks.run import main as run

    return run(["overlap", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
