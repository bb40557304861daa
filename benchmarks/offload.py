"""Offloading to the host: what it costs a step, what it saves, and how much of the copies runs beside kernels.

Eight layers of a Llama's shape (hidden 4096, ffn 14336, 32 heads, 8 groups, RMSNorm, swiglu), 8192 tokens, forward and
backward, without offloading and with it, in turns in one process. A case is judged where its copies fit behind
compute, that is where what leaves, at COPY_RATE, takes less time than the forward of the layers behind which it leaves:
then a step must take at most 10 % longer. `overlap` is read from a trace of torch's profiler: the share of the time of
copies during which a kernel runs.

What is saved shows in `held MiB`: what the GPU holds more at the end of forward than between steps, without offloading
and with it; `held less` is the difference. Peaks of a whole step show it only where they lie there, too: where much is
computed again they lie in backward, at the gradients of all layers, which offloading does not change.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import te_torch as te
from benchmarks import harness
from te_core.recipe import DelayedScaling, Recipe

LAYERS = 8
COPY_RATE = 45e9  # bytes a second between the host's pinned memory and a GPU, over PCIe 5 x16
ALLOWED = 1.10  # of the step without offloading
LEAST = 1 << 20  # bytes of a copy that counts as one of ours

Interval = tuple[float, float]


@dataclass(frozen=True)
class Case:
    """What is computed, and what leaves."""

    name: str
    away: int  # layers
    recipe: Recipe | None = None
    again: str = ""  # what is computed again in backward: "mlp", "layer"
    weights: bool = False
    double: bool = False

    @property
    def shown(self) -> str:
        """Of the recipe."""
        return "bf16" if self.recipe is None else "delayed"


CASES = (
    Case("1 of 8 layers", 1),
    Case("1 of 8 layers", 1, DelayedScaling()),
    Case("2 of 8 layers", 2),
    Case("1 of 8 layers, weights too", 1, weights=True),
    Case("4 of 8 layers, MLP computed again", 4, again="mlp"),
    Case("5 of 8 layers, MLP computed again, double buffering", 5, again="mlp", double=True),
    Case("4 of 8 layers, MLP computed again", 4, DelayedScaling(), again="mlp"),
    Case("6 of 8 layers, layers computed again", 6, again="layer"),
)
SIZES: dict[str, dict[str, int]] = {
    "cuda": {"hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "tokens": 8192},
    "cpu": {"hidden": 64, "ffn": 128, "heads": 4, "groups": 2, "tokens": 32},
}


def build(size: dict[str, int], again: str) -> torch.nn.ModuleList:
    """The layers."""
    made = torch.nn.ModuleList()
    for _ in range(LAYERS):
        layer = te.TransformerLayer(
            size["hidden"], size["ffn"], size["heads"], num_gqa_groups=size["groups"], normalization="RMSNorm",
            activation="swiglu", bias=False, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16,
            device=harness.device(),
        )  # fmt: skip
        layer.layernorm_mlp.checkpoint = again == "mlp"
        made.append(layer)
    return made


def step(model: Any, made: Any, case: Case, x: torch.Tensor, held: list[int] | None = None) -> Callable[[], None]:
    """One forward and backward as a work; `held` gets the bytes that the GPU holds where forward ends."""
    context, sync = made
    call = te.checkpoint if case.again == "layer" else (lambda layer, y: layer(y))

    def work() -> None:
        y = x
        with te.autocast(enabled=case.recipe is not None, recipe=case.recipe):
            for layer in model:
                with context:
                    y = call(layer, y)
                y = sync(y)
        if held is not None:
            held.append(torch.cuda.memory_allocated())
        y.sum().backward()
        for p in model.parameters():
            p.grad = None
        x.grad = None

    return work


def held_mib(model: Any, made: Any, case: Case, x: torch.Tensor) -> float:
    """MiB that the end of forward holds above what is held between steps; nan on a CPU."""
    if not harness.gpu():
        return float("nan")
    held: list[int] = []
    work = step(model, made, case, x, held)
    work()
    torch.cuda.synchronize()
    resting = torch.cuda.memory_allocated()
    work()
    return (held[-1] - resting) / 2**20


def forward_us(model: Any, case: Case, x: torch.Tensor) -> float:
    """Of one layer, with what backward needs."""

    def work() -> None:
        with te.autocast(enabled=case.recipe is not None, recipe=case.recipe):
            model[0](x)

    return harness.gpu_us(work)[0]


def measure_case(case: Case) -> harness.Row:
    """One row."""
    size = SIZES[harness.device().type]
    model = build(size, case.again)
    x = torch.randn(size["tokens"], 1, size["hidden"], device=harness.device(), dtype=torch.bfloat16).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = te.get_cpu_offload_context(
            True, case.away, LAYERS, offload_weights=case.weights, double_buffering=case.double
        )
    none = (nullcontext(), lambda y: y)
    plain, away = step(model, none, case, x), step(model, made, case, x)
    plain_us, away_us = harness.gpu_us(plain, away)
    peaks = [harness.peak_mib(work) for work in (plain, away)]
    held = [held_mib(model, each, case, x) for each in (none, made)]
    nbytes = sum(layer.offloaded_bytes for layer in made[0].current.layers)
    behind = forward_us(model, case, x) * (LAYERS - 1)
    fits = nbytes / COPY_RATE * 1e6 <= behind
    row: harness.Row = {
        "case": case.name,
        "recipe": case.shown,
        "ms": plain_us / 1e3,
        "offloaded ms": away_us / 1e3,
        "of_plain": away_us / plain_us,
        "MiB away": nbytes / 2**20,
        "held MiB": held[0],
        "offloaded held MiB": held[1],
        "held less": held[0] - held[1],
        "peak MiB": peaks[0],
        "offloaded peak MiB": peaks[1],
        "copy ms": nbytes / COPY_RATE * 1e3,
        "behind ms": behind / 1e3,
    }
    if harness.gpu():
        row["overlap"] = profiled(away)
    if fits:
        row |= {"target": ALLOWED, "ok": row["of_plain"] <= ALLOWED}
    return row


def measure(cases: Sequence[Case] = CASES) -> list[harness.Row]:
    """All cases."""
    rows = []
    for case in cases:
        rows.append(measure_case(case))
        harness.free()
    return rows


# ------------------------------------------------------------------------------------------- the profiler's trace


def profiled(work: Callable[[], None]) -> float:
    """The overlap of one run of the work."""
    work()
    return overlap(harness.trace(work))


def overlap(events: Iterable[dict[str, Any]]) -> float:
    """The share of the time of large copies between host and device during which a kernel runs; nan without copies."""
    copies: list[Interval] = []
    kernels: list[Interval] = []
    for event in events:
        span = (float(event.get("ts", 0)), float(event.get("ts", 0)) + float(event.get("dur", 0)))
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy" and any(way in event["name"] for way in ("DtoH", "HtoD")):
            if event.get("args", {}).get("bytes", LEAST) >= LEAST:
                copies.append(span)
    return share(copies, kernels)


def share(spans: Iterable[Interval], others: Iterable[Interval]) -> float:
    """The share of the time of some intervals that others cover; nan where there are none."""
    spans, others = union(spans), union(others)
    total = sum(stop - start for start, stop in spans)
    covered, first = 0.0, 0
    for start, stop in spans:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at = first
        while at < len(others) and others[at][0] < stop:
            covered += min(stop, others[at][1]) - max(start, others[at][0])
            at += 1
    return covered / total if total else float("nan")


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not touch, in order."""
    joined: list[Interval] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["offload", *sys.argv[1:]]))
