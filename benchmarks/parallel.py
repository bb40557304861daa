"""A TransformerLayer over two ranks, tensor and sequence parallel: how much faster, and what communication costs.

Hidden 8192, ffn 28672, 64 heads in 8 groups, RMSNorm, swiglu, 8192 tokens, forward and backward, in bf16 and two FP8
recipes. Two processes over NCCL, each with a GPU of its own. `one ms`: the whole layer on one GPU, measured in the same
processes before (the slower one). `ms`: a step of the two together, of the slower one.

`communication ms` is the time in which a kernel of NCCL runs in one step, `hidden` the share of it in which a kernel of
another kind runs beside it, both from a trace of torch's profiler on rank 0. NCCL's kernels wait for the other rank, so
a rank that is ahead counts its waiting. `MiB a step`: what a rank hands to its collectives.

`sum of .. KiB`: an all-reduce in bf16 by NCCL and through symmetric memory (`symmetric_ar_type`), copies into and out
of it included, many queued behind one another.

On a CPU: the same over gloo at a small size, to show that it works.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from benchmarks import harness
from benchmarks.offload import Interval, share, union
from examples.ranks import leave
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from te_torch.parallel import communicator
from te_torch.parallel.symmetric import symmetric_sum

WORLD = 2  # ranks, unless another number is asked for
ROWS = "rows"  # the file's name in which ranks leave them, one a line
RECIPES: dict[str, Recipe | None] = {"bf16": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling()}
SIZES: dict[str, dict[str, int]] = {
    "cuda": {"hidden": 8192, "ffn": 28672, "heads": 64, "groups": 8, "tokens": 8192},
    "cpu": {"hidden": 64, "ffn": 128, "heads": 4, "groups": 4, "tokens": 64},
}
ROUNDS, STEPS = 7, 4  # rounds whose median counts, and steps in each
SUMS = (8, 64, 512, 4096, 32768)  # KiB
NCCL = "nccl"  # the names of its kernels begin so, in whatever case


def measure() -> list[harness.Row]:
    """All recipes; none on a machine with one GPU."""
    kind = harness.device().type
    if kind == "cuda" and harness.gpus() < WORLD:
        print(f"parallel: skipped, it needs {WORLD} GPUs and there is one")
        return []
    return list(spawned(kind))


def cases(kind: str) -> list[harness.Row]:
    """The rows of all recipes, and on GPUs of sums."""
    rows = [case(name, recipe, kind) for name, recipe in RECIPES.items()]
    return rows + ([summed(kib) for kib in SUMS] if kind == "cuda" else [])


def spawned(
    kind: str, found: Callable[[str], Iterable[harness.Row]] = cases, world: int = WORLD, seconds: float = 3600
) -> Iterator[harness.Row]:
    """The rows that a function gives on rank 0 of processes that meet in a file; all of them call it.

    Where a rank fails, or the time is over, all are ended: the rows that were there come before the error.
    """
    failed: Exception | None = None
    with tempfile.TemporaryDirectory() as folder:
        ranks: Any = torch.multiprocessing.spawn(_rank, (kind, folder, found, world), nprocs=world, join=False)
        end = time.monotonic() + seconds
        try:
            while not ranks.join(timeout=1):
                if time.monotonic() > end:
                    raise TimeoutError(f"{world} ranks did not end within {seconds:.0f} s")
        except Exception as error:  # of whatever kind a rank has raised
            failed = error
            for process in ranks.processes:
                process.kill()
                process.join()
        written = Path(folder, ROWS)
        rows = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    yield from rows
    if failed is not None:
        raise failed


def _rank(number: int, kind: str, folder: str, found: Callable[[str], Iterable[harness.Row]], world: int) -> None:
    """One process: rank 0 writes each row when it has it."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if kind == "cuda":
        torch.cuda.set_device(number)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", world)
    given: dict[str, Any] = {"store": store, "rank": number, "world_size": world, "timeout": timedelta(seconds=120)}
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", **given)
    for row in found(kind):
        if number == 0:
            with Path(folder, ROWS).open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    leave()


def case(name: str, recipe: Recipe | None, kind: str) -> harness.Row:
    """One row, equal on all ranks but for the trace."""
    size = SIZES[kind]
    one = slowest(timed(step(build(size, kind), recipe, size["tokens"], size["hidden"], kind), kind), kind)
    harness.free()
    layer = build(size, kind, set_parallel_mode=True, sequence_parallel=True, tp_group=dist.group.WORLD)
    work = step(layer, recipe, size["tokens"] // WORLD, size["hidden"], kind)
    both = slowest(timed(work, kind), kind)
    with counted() as sizes:
        work()
    row: harness.Row = {
        "case": "TransformerLayer, tp 2, sequence parallel",
        "recipe": name,
        "ranks": WORLD,
        "one ms": one,
        "ms": both,
        "speed-up": one / both,
        "MiB a step": sum(sizes) / 2**20,
        **(traced(work) if kind == "cuda" else {}),
    }
    harness.free()
    return row


def summed(kib: int) -> harness.Row:
    """One row: microseconds of each way to sum."""
    t = torch.zeros(kib * 512, device="cuda", dtype=torch.bfloat16)
    group = dist.group.WORLD
    ways: dict[str, harness.Work] = {
        "nccl us": lambda: dist.all_reduce(t),
        "one_shot us": lambda: symmetric_sum(t, group, "one_shot"),
        "two_shot us": lambda: symmetric_sum(t, group, "two_shot"),
    }
    return {
        "case": f"sum of {kib} KiB",
        "ranks": WORLD,
        **{name: slowest(queued(way), "cuda") for name, way in ways.items()},
    }


def queued(work: harness.Work, times: int = 100) -> float:
    """Microseconds of one of many that are queued together."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(ROUNDS):
        work()
        harness.wait()
        dist.barrier()
        torch.cuda._sleep(20_000_000)  # ten milliseconds, in which the host queues what follows
        begin.record()
        for _ in range(times):
            work()
        end.record()
        harness.wait()
        found.append(begin.elapsed_time(end) / times * 1e3)
    return statistics.median(found)


def build(size: dict[str, int], kind: str, **parallel: Any) -> Any:
    """The layer, whole or this rank's part."""
    torch.manual_seed(0)
    return te.TransformerLayer(
        size["hidden"],
        size["ffn"],
        size["heads"],
        num_gqa_groups=size["groups"],
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=torch.bfloat16,
        device=kind,
        **parallel,
    )


def step(layer: Any, recipe: Recipe | None, tokens: int, hidden: int, kind: str) -> harness.Work:
    """Forward and backward."""
    x, dy = operand(tokens, hidden, kind).requires_grad_(), operand(tokens, hidden, kind)

    def work() -> None:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        y.backward(dy)
        for p in layer.parameters():
            p.grad = None
        x.grad = None

    return work


def operand(tokens: int, hidden: int, kind: str) -> torch.Tensor:
    """A rank's tokens."""
    return torch.randn(tokens, 1, hidden, device=kind, dtype=torch.bfloat16)


def timed(work: harness.Work, kind: str, rounds: int = ROUNDS, steps: int = STEPS, warm: int = 3) -> float:
    """Milliseconds of a step, in which all ranks begin together."""
    if kind != "cuda":
        rounds, steps, warm = 1, 1, 1
    for _ in range(warm):
        work()
    found = []
    for _ in range(rounds):
        harness.wait()
        dist.barrier()
        harness.wait()
        start = time.perf_counter()
        for _ in range(steps):
            work()
        harness.wait()
        found.append((time.perf_counter() - start) / steps * 1e3)
    return statistics.median(found)


def slowest(value: float, kind: str) -> float:
    """The largest of all ranks' figures."""
    t = torch.tensor([value], dtype=torch.float64, device=kind)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t.item())


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank hands to the collectives of layers inside."""
    sizes: list[int] = []
    plain = communicator.GroupCommunicator._begin

    def begin(self: Any, name: str, function: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Any:
        sizes.append(tensors[-1].nbytes)
        return plain(self, name, function, *tensors, **options)

    communicator.GroupCommunicator._begin = begin  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        communicator.GroupCommunicator._begin = plain  # type: ignore[method-assign]


def traced(work: harness.Work) -> harness.Row:
    """Of one step: the time of communication, and the share of it that is hidden."""
    spent, hidden = communication(trace(work))
    return {"communication ms": spent, "hidden": hidden}


def trace(work: harness.Work) -> list[dict[str, Any]]:
    """What a profiler has seen of the device in one step."""
    events: list[dict[str, Any]] = []
    for _ in range(2):  # a profiler's first start takes a while, another one on each rank: NCCL's kernels would wait
        work()
        harness.wait()
        dist.barrier()
        events = harness.trace(work)
    return events


def communication(events: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """(milliseconds of communication in a trace, the share of it that is hidden)."""
    travels, computes = spans(events)
    return sum(stop - start for start, stop in travels) / 1e3, share(travels, computes)


def shown(events: Iterable[dict[str, Any]]) -> float:
    """Milliseconds of a trace in which something travels and nothing is computed."""
    travels, computes = spans(events)
    total = sum(stop - start for start, stop in union(travels))
    return total * (1 - share(travels, computes)) / 1e3 if travels else 0.0


def idle(events: Iterable[dict[str, Any]]) -> float:
    """Milliseconds of a trace, from the first kernel that computes to the last, in which none does."""
    busy = union(spans(events)[1])
    return (busy[-1][1] - busy[0][0] - sum(stop - start for start, stop in busy)) / 1e3 if busy else 0.0


def spans(events: Iterable[dict[str, Any]]) -> tuple[list[Interval], list[Interval]]:
    """When something travels between GPUs, and when something is computed."""
    travels: list[Interval] = []
    computes: list[Interval] = []
    for event in events:
        kind, name = event.get("cat"), str(event.get("name", "")).lower()
        if kind not in ("kernel", "gpu_memcpy"):
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if kind == "kernel":
            (travels if NCCL in name else computes).append(span)
        elif "ptop" in name or "peer" in name:
            travels.append(span)
    return travels, computes


def main(arguments: Sequence[str]) -> int:
    """As the other benchmarks run."""
    from benchmarks.run import main as run

    return run(["parallel", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
