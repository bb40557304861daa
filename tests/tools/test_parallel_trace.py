"""What the benchmark of parallel layers reads from a trace, and that it runs without a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import overlap, overlap_defaults, parallel


def kernel(start: float, dur: float, name: str = "nvjet_sm90") -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "ts": start, "dur": dur, "name": name}


def test_communication_that_is_hidden() -> None:
    sends = [kernel(0, 2000, "ncclDevKernel_AllGather_RING_LL(x)"), kernel(5000, 1000, "ncclDevKernel_ReduceScatter")]
    works = [kernel(1000, 3000), kernel(5500, 2000)]
    spent, hidden = parallel.communication([*sends, *works, {"cat": "cpu_op", "ts": 0, "dur": 9, "name": "nccl"}])
    assert spent == 3.0 and hidden == pytest.approx((1000 + 500) / 3000)
    assert math.isnan(parallel.communication(works)[1])


def test_communication_that_shows() -> None:
    """Copies between GPUs travel, too; those of a GPU or to the host do not, and two transfers at a time count once."""
    copies = [
        {**kernel(0, 4000, name), "cat": "gpu_memcpy"}
        for name in (
            "Memcpy PtoP (Device -> Device)",
            "Memcpy DtoD (Device -> Device)",
            "Memcpy HtoD (Pinned -> Device)",
        )
    ]
    sends = [kernel(1000, 2000, "ncclDevKernel_SendRecv(x)"), kernel(6000, 1000, "ncclDevKernel_ReduceScatter")]
    works = [kernel(500, 1000), kernel(3500, 3000)]
    assert parallel.shown([*copies, *sends, *works]) == pytest.approx((4000 - 1000 - 500 + 500) / 1e3)
    assert parallel.shown(works) == 0.0 and parallel.shown(sends) == 3.0
    assert parallel.idle([*copies, *sends, *works]) == 2.0 and parallel.idle(sends) == 0.0


@pytest.mark.more
def test_overlap_is_measured_without_a_gpu() -> None:
    rows = [*parallel.spawned("cpu", overlap.cases), *parallel.spawned("cpu", overlap_defaults.cases)]
    assert {(row["recipe"], row["method"]) for row in rows} == {
        (r, m)
        for m in (*overlap.METHODS, "default")
        for r in (parallel.RECIPES if m in (overlap.ALL, "default") else overlap.RECIPES_ALONE)
    }
    assert all(row["ms"] > 0 and row["plain ms"] > 0 for row in rows)


@pytest.mark.more
def test_the_benchmark_runs_without_a_gpu() -> None:
    """Two processes over gloo; FP8 hands over less than bf16."""
    rows = {row["recipe"]: row for row in parallel.spawned("cpu")}
    assert set(rows) == set(parallel.RECIPES) and all(row["ms"] > 0 and row["one ms"] > 0 for row in rows.values())
    assert rows["delayed"]["MiB a step"] < 0.8 * rows["bf16"]["MiB a step"]
