"""FSDP2 on one GPU: what the host takes for the small layers of `sharded`, in a group that says two ranks.

torch's "fake" group copies a rank's own shard to where others' would arrive, and sends nothing: what is left of a step
is the host and the kernels, where small layers spend their time. `host ms` is the time until a step is queued, the GPU
being idle before it; `ms` that of steps one after another. In turns with bf16 weights, in one process.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks import harness, sharded
from benchmarks.sharded import FP8, RANKS, SMALL, STEPS, Built, Case, build
from examples.ranks import leave

CASES = tuple(Case(SMALL, name, held, fused) for fused in (False, True) for held in (True, False) for name in FP8)


def queued(device: torch.device, *works: Callable[[], None]) -> list[float]:
    """Milliseconds until a step of each is queued, in turns: medians."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(15 if device.type == "cuda" else 1):
        for work, one in zip(works, found, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            one.append((time.perf_counter() - begin) * 1e3)
    return [median(one) for one in found]


def in_a_process(_: int, folder: str, kind: str, cases: list[Case]) -> None:
    """All cases; the rows are written to the folder."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    plain: dict[Case, Built] = {}
    rows: list[harness.Row] = []
    for case in cases:
        base = Case(case.model, "bf16", fused=case.fused)
        if base not in plain:
            plain[base] = build(base, device)
        other = build(case, device)
        plain_ms, ms = sharded.times(device, STEPS[case.model], plain[base].work, other.work)
        plain_host, host = queued(device, plain[base].work, other.work)
        rows.append({
            "case": case.model, "recipe": case.shown, "bf16 host ms": plain_host, "host ms": host,
            "of_bf16_host": host / plain_host, "bf16 ms": plain_ms, "ms": ms, "of_bf16": ms / plain_ms,
        })  # fmt: skip
        print(harness.label(rows[-1]), flush=True)
        del other
        gc.collect()
    Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()
    leave()


def measure(cases: tuple[Case, ...] = CASES) -> list[harness.Row]:
    """All cases, in a process of their own."""
    kind = "cuda" if harness.gpu() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(in_a_process, (folder, kind, list(cases)), nprocs=1)
        rows: list[harness.Row] = json.loads(Path(folder, "rows.json").read_text())
    return rows


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["sharded_host", *sys.argv[1:]]))
