"""What the benchmark of parallel layers reads from a trace, and that it runs without a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import parallel


def kernel(start: float, dur: float, name: str = "nvjet_sm90") -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "ts": start, "dur": dur, "name": name}


def test_communication_that_is_hidden() -> None:
    sends = [kernel(0, 2000, "ncclDevKernel_AllGather_RING_LL(x)"), kernel(5000, 1000, "ncclDevKernel_ReduceScatter")]
    works = [kernel(1000, 3000), kernel(5500, 2000)]
    spent, hidden = parallel.communication([*sends, *works, {"cat": "cpu_op", "ts": 0, "dur": 9, "name": "nccl"}])
    assert spent == 3.0 and hidden == pytest.approx((1000 + 500) / 3000)
    assert math.isnan(parallel.communication(works)[1])


@pytest.mark.more
def test_the_benchmark_runs_without_a_gpu() -> None:
    """Two processes over gloo; FP8 hands over less than bf16."""
    rows = {row["recipe"]: row for row in parallel.spawned("cpu")}
    assert set(rows) == set(parallel.RECIPES) and all(row["ms"] > 0 and row["one ms"] > 0 for row in rows.values())
    assert rows["delayed"]["MiB a step"] < 0.8 * rows["bf16"]["MiB a step"]
