"""Products over ranks that overlap with their communication against the same ones without, in turns in one process.

The layer of `parallel` and smaller ones, tensor and sequence parallel, forward and backward, in bf16 and two FP8
recipes. `plain ms` and `ms`: a step of the slower rank, medians of rounds in which both are measured one after the
other. `of_plain`: the median of the rounds' ratios, below 1 where overlap is faster. At the first size each
method is measured alone, too; which one is taken where nobody says one follows from these figures (`overlap_defaults`).

From a trace of rank 0, at the first size: `shown ms` is the time of a step in which a transfer runs (a kernel of NCCL,
a copy between GPUs) and no kernel that computes, `idle ms` all time in which no such kernel runs. NCCL's kernels wait
for the other rank, so a rank that is ahead counts its waiting as shown; a stream that waits for peer memory runs
nothing, which is idle.

`product` rows: a product of the layer in bf16, whole and in two halves, a part's copy from the other GPU, and the
halves with the copy beside the first.

    python -m benchmarks.run overlap
    OVERLAP_RANKS=4 python -m benchmarks.run overlap    over four GPUs, without the `product` rows

On a CPU: the same over gloo at a small size, to show that it works.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import te_torch as te
from benchmarks import harness, parallel
from te_core.layers.communicator import OPERAND
from te_core.recipe import Recipe
from te_torch.parallel.peers import peers_of
from te_torch.runtime import runtime_for, to_core

FLAGS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
RING, PIPELINE, BULK = "ring_exchange", "pipeline", "bulk"


class Method(NamedTuple):
    """How a layer overlaps: which of the flags are on, the method of forward's sums and that of dgrad's."""

    flags: tuple[str, ...]
    sums: str = RING
    dgrad: str = RING


METHODS = {
    "rings": Method(("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad")),
    "gathers by ring_exchange": Method(("ub_overlap_ag",)),
    "sums by ring_exchange": Method(("ub_overlap_rs",)),
    "dgrad's sums by ring_exchange": Method(("ub_overlap_rs_dgrad",)),
    "rings, bulk": Method(("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", "ub_bulk_wgrad"), dgrad=BULK),
    "bulk": Method(("ub_bulk_dgrad", "ub_bulk_wgrad"), dgrad=BULK),
    "sums by pipeline": Method(("ub_overlap_rs",), sums=PIPELINE),
}
_OF_4096 = {"hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "tokens": 4096}
SIZES: dict[str, list[dict[str, int]]] = {
    "cuda": [parallel.SIZES["cuda"], parallel.SIZES["cuda"] | {"tokens": 2048}, _OF_4096],
    "cpu": [parallel.SIZES["cpu"]],
}
RANKS = int(os.environ.get("OVERLAP_RANKS", parallel.WORLD))
STEPS, ROUNDS = 3, 4  # of each in a round; at least so many rounds,
LONG = 1000  # and as many as take these milliseconds
ALL = "rings"  # the method that is measured at all sizes, in all recipes, with traces; others alone, at the first size
RECIPES_ALONE = ("bf16", "delayed")


def measure() -> list[harness.Row]:
    """All sizes, methods and recipes; none on a machine with fewer GPUs than ranks."""
    return of_ranks(cases)


def of_ranks(found: Callable[[str], list[harness.Row]]) -> list[harness.Row]:
    """The rows that the ranks find."""
    kind = harness.device().type
    if kind == "cuda" and harness.gpus() < RANKS:
        print(f"overlap: skipped, it needs {RANKS} GPUs, and here are {harness.gpus()}")
        return []
    return list(parallel.spawned(kind, found, RANKS))


def cases(kind: str) -> list[harness.Row]:
    """The rows, equal on all ranks but for traces. Memory is mapped once for all methods of one configuration."""
    rows = products(SIZES[kind][0]) if kind == "cuda" and RANKS == parallel.WORLD else []
    for size in SIZES[kind]:
        methods = METHODS if size is SIZES[kind][0] else {ALL: METHODS[ALL]}
        plain = {name: work_of(size, recipe, kind) for name, recipe in parallel.RECIPES.items()}
        for configuration in dict.fromkeys(method[1:] for method in methods.values()):
            alike = {name: method for name, method in methods.items() if method[1:] == configuration}
            with initialised(size, said(*configuration)):
                for name, method in alike.items():
                    flags = {flag: flag in method.flags for flag in FLAGS}
                    recipes = plain if name == ALL else {name: plain[name] for name in RECIPES_ALONE}
                    rows += case(size, name, flags, recipes, kind, name == ALL and methods is METHODS)
        del plain
    return rows


@contextmanager
def initialised(size: dict[str, int], cfgs: dict[str, Any]) -> Iterator[None]:
    """Between `initialize_ub` and `destroy_ub`, for both modes."""
    modes = [te.UserBufferQuantizationMode.NONE, te.UserBufferQuantizationMode.FP8]
    te.initialize_ub([size["tokens"], size["hidden"]], dist.get_world_size(), quantization_modes=modes, ub_cfgs=cfgs)
    yield
    te.destroy_ub()
    harness.free()


def said(sums: str, dgrad: str) -> dict[str, Any]:
    """A method for each GEMM, by name: where there is none, the fastest that was measured is taken."""
    column, row = ("qkv", "fc1"), ("proj", "fc2")
    found = {f"{name}_fprop": RING for name in column} | {f"{name}_dgrad": RING for name in row}
    found |= {f"{name}_fprop": sums for name in row} | {f"{name}_dgrad": dgrad for name in column}
    found |= {f"{name}_wgrad": BULK for name in column if dgrad == BULK}
    return {name: {"method": method} for name, method in found.items()}


def case(
    size: dict[str, int],
    method: str,
    flags: dict[str, bool],
    plain: Mapping[str, harness.Work],
    kind: str,
    traced: bool,
) -> list[harness.Row]:
    """The rows of a method: one for each recipe of these plain layers."""
    rows: list[harness.Row] = []
    for name, before in plain.items():
        overlapped = work_of(size, parallel.RECIPES[name], kind, ub_tp_comm_overlap=True, **flags)
        times = in_turns((before, overlapped), kind)
        row = headed(size, name, method) | {
            "carrier": carrier(kind),
            "plain ms": statistics.median(plainly for plainly, _ in times),
            "ms": statistics.median(after for _, after in times),
            "of_plain": statistics.median(after / plainly for plainly, after in times),
        }
        if traced and kind == "cuda":
            row |= seen("plain ", before) | seen("", overlapped)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
        rows.append(row)
        del overlapped
    return rows


def headed(size: dict[str, int], recipe: str, method: str) -> harness.Row:
    """How each row begins."""
    case = f"{size['tokens']} tokens, hidden {size['hidden']}, tp {RANKS}"
    return {"case": case, "recipe": recipe, "method": method}


def carrier(kind: str) -> str:
    """By what parts travel."""
    found = peers_of(dist.group.WORLD, runtime_for(torch.empty(0, device=kind)))
    return "nccl" if found is None else "peer memory"


def seen(prefix: str, work: harness.Work) -> harness.Row:
    """What a trace of a step says."""
    events = parallel.trace(work)
    return {f"{prefix}shown ms": parallel.shown(events), f"{prefix}idle ms": parallel.idle(events)}


def work_of(size: dict[str, int], recipe: Recipe | None, kind: str, **flags: bool) -> harness.Work:
    """A step of a rank's part of the layer."""
    layer = layer_of(size, kind, **flags)
    return parallel.step(layer, recipe, size["tokens"] // dist.get_world_size(), size["hidden"], kind)


def layer_of(size: dict[str, int], kind: str, **flags: bool) -> Any:
    """A rank's part of the layer."""
    group = dist.group.WORLD
    return parallel.build(size, kind, set_parallel_mode=True, sequence_parallel=True, tp_group=group, **flags)


def in_turns(works: Sequence[harness.Work], kind: str) -> list[list[float]]:
    """Milliseconds of each in each round, of the slower rank."""
    warm, steps = (2, STEPS) if kind == "cuda" else (1, 1)
    once = sum(parallel.slowest(parallel.timed(work, kind, 1, warm, warm), kind) for work in works)
    rounds = max(ROUNDS, int(LONG / (steps * once))) if kind == "cuda" else 1
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
