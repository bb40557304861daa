"""The overlap of copies and kernels, of traces whose answer can be counted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import offload


def event(cat: str, start: float, dur: float, name: str = "k", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "ts": start, "dur": dur, "name": name, "args": args}


def copy(start: float, dur: float, way: str = "DtoH", nbytes: int = 64 << 20) -> dict[str, Any]:
    return event("gpu_memcpy", start, dur, f"Memcpy {way} (Device -> Pinned)", bytes=nbytes)


KERNELS = [event("kernel", 10, 10), event("kernel", 15, 10), event("kernel", 40, 10)]  # 10 to 25, 40 to 50


@pytest.mark.parametrize(
    ("copies", "share"),
    [
        ([copy(12, 10)], 1.0),
        ([copy(0, 10)], 0.0),
        ([copy(20, 10)], 0.5),
        ([copy(20, 40, "HtoD")], (5 + 10) / 40),
        ([copy(0, 20), copy(0, 20)], 0.5),  # two at once count once
        ([copy(12, 10), copy(60, 30)], 0.25),
        ([copy(12, 10), copy(60, 30, nbytes=4096), copy(60, 30, "DtoD")], 1.0),  # these are not ours
    ],
)
def test_overlap(copies: list[dict[str, Any]], share: float) -> None:
    others = [event("cpu_op", 0, 100), {"ph": "M", "name": "process_name"}]
    for events in (KERNELS + copies + others, others + copies[::-1] + KERNELS[::-1]):
        assert offload.overlap(events) == pytest.approx(share)


def test_trace_without_copies() -> None:
    assert math.isnan(offload.overlap(KERNELS))


def test_benchmark_runs_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are right; on a CPU nothing is offloaded."""
    monkeypatch.setattr(offload.harness, "gpu", lambda: False)
    row = offload.measure_case(offload.Case("1 of 8 layers", 1, again="mlp"))
    assert row["MiB away"] == 0
