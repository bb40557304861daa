"""Layers whose calls are replayed from tapes (te_core/tape), beside the same layers interpreted, in one process.

Host times of tiny modules as multiples of `torch.nn.Linear`: interpreted, replayed and the yardstick in turns. What a
region costs for the modules that ran in it. The wall time of a step of six layers. GPU time and peak memory of a
Llama's layer. How many calls were replayed, and why the others were not. Whether results are the same, bit for bit.

What matters most comes first, and what does not fit into `SECONDS` is left out and said to be.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

import te_torch as te
from benchmarks import attention, harness, modules
from benchmarks.modules import RECIPES, Case, build, works
from te_core.tape import taped
from te_torch.autocast import active
from tests import generators

SECONDS = 85
CALLS = 450  # of each work whose host time is taken
INTERPRETED, REPLAYED = "never", "first"
FP8 = ("delayed", "current", "block")
LAYERS, STEPS, ROUNDS = 6, 10, 7  # of the step: layers; steps in a row, and how often
SHARE = 0.95  # of calls that should be replayed
REGION_US, STEP_US, PEAK_MIB = 25, 5500, 1800


def limits(bf16: tuple[float, float] | None, fp8: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """Forward, forward + backward in nn.Linears, by recipe."""
    return ({} if bf16 is None else {"bf16": bf16}) | dict.fromkeys(FP8, fp8)


def tiny(name: str, cases: Sequence[Case], host: dict[str, tuple[float, float]]) -> Case:
    """One of another benchmark's cases, with what it may cost replayed."""
    return replace(next(case for case in cases if case.name.startswith(name)), host=host)


HOST = [
    tiny("TransformerLayer", attention.TINY, limits(None, (12, 5.5))),
    tiny("Linear", modules.TINY, limits((1.4, 1.4), (2.5, 2.0))),
    tiny("LayerNormMLP", modules.TINY, limits(None, (5, 3))),
]
ATTENTION = (2.5, 1.8)
GPU = attention.LARGE[0]
STEP = (512, 1024)  # rows and width of the step of several layers
REGIONS = (1, 24)  # layers


def settings(*each: str | None) -> Callable[[int], None]:
    """For `harness.host_us`: the setting of each of its works."""
    return lambda number: taped.set_when(each[number])


@contextmanager
def restored() -> Iterator[None]:
    """Leave the setting as it was, and no tapes."""
    before = taped.when()
    try:
        yield
    finally:
        taped.set_when(before)
        taped.forget()


# ------------------------------------------------------------------------------------------------ host times


def host_row(name: str, recipe: str, made: tuple[harness.Work, harness.Work], limit: Any) -> harness.Row:
    """Host times of a module's works: interpreted, replayed, and nn.Linear's, in turns."""
    linear = torch.nn.Linear(256, 256, device=harness.device(), dtype=torch.bfloat16)
    x = harness.matrix(generators.activations, 128, 256).requires_grad_()
    row: harness.Row = {"case": f"host: {name}", "recipe": recipe}
    turn = settings(INTERPRETED, REPLAYED, None)
    for work, plain, what in zip(made, works(linear, x, None), ("fwd", "fwd+bwd"), strict=True):
        before, now, yardstick = harness.host_us(work, work, plain, calls=CALLS, turn=turn)
        multiple = "of_linear fwd" if what == "fwd" else "of_linear"
        row |= {f"interpreted {what} us": before, f"{what} us": now, f"nn.Linear {what} us": yardstick}
        row |= {f"interpreted {multiple}": before / yardstick, multiple: now / yardstick}
    row["of_interpreted"] = row["fwd+bwd us"] / row["interpreted fwd+bwd us"]
    if limit and harness.gpu():
        row["target"] = f"{limit[0]}, {limit[1]}"
        row["ok"] = row["of_linear fwd"] <= limit[0] and row["of_linear"] <= limit[1]
    return row


def case_row(case: Case, recipe: str) -> harness.Row:
    """Host times of a module in a recipe."""
    return host_row(case.name, recipe, build(case, recipe), (case.host or {}).get(recipe))


def attention_row() -> harness.Row:
    """Host times of attention alone."""
    return host_row("DPA tiny", "bf16", attention.attention_works(2, 128, 4, 4, 64, "ours"), ATTENTION)


# ------------------------------------------------------------------------------------------------ regions


def region_row(layers: int) -> harness.Row:
    """Entry, exit and update of a region in which the modules of these layers ran."""
    taped.set_when(REPLAYED)  # by default its one forward would be met and not recorded
    recipe = RECIPES["delayed"]
    model = torch.nn.Sequential(*[attention.layer(256, 1024, 4, device=harness.device()) for _ in range(layers)])
    x = harness.matrix(generators.activations, 256, 256).view(128, 2, 256)
    with te.autocast(recipe=recipe), torch.no_grad():
        model(x)
    states: list[Any] = [m.fp8_state for m in model.modules() if getattr(m, "fp8_state", None) is not None]
    ran: dict[int, None] = dict.fromkeys(state.token for state in states)

    def region() -> None:
        with te.autocast(recipe=recipe):
            active.region.ran.states.update(ran)  # type: ignore[union-attr]  # as if they had run

    (us,) = harness.host_us(region, calls=CALLS)
    row: harness.Row = {"case": f"a region around {layers} layers", "recipe": "delayed", "us": us}
    row |= {"modules": len(states), "us a module": us / len(states)}
    return row | {"target": REGION_US, "ok": us <= REGION_US} if layers == 1 and harness.gpu() else row


# ------------------------------------------------------------------------------------------------ steps, GPU time


def step_of_layers(rows: int, hidden: int, recipe: str) -> harness.Work:
    """Forward, backward and SGD of several layers."""
    torch.manual_seed(0)
    options = {"device": harness.device()}
    model = torch.nn.Sequential(*[attention.layer(hidden, 4 * hidden, hidden // 64, **options) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    x = harness.matrix(generators.activations, 2 * rows, hidden).view(rows, 2, hidden)
    dy = torch.ones_like(x)

    def step() -> None:
        with te.autocast(recipe=RECIPES[recipe]):
            y = model(x)
        y.backward(dy)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def step_row(rows: int, hidden: int) -> harness.Row:
    """Wall time of a step of several layers, in turns."""
    step = step_of_layers(rows, hidden, "delayed")
    times: dict[str, list[float]] = {INTERPRETED: [], REPLAYED: []}
    for _ in range(ROUNDS):
        for setting, found in times.items():
            taped.set_when(setting)
            found.append(harness.row_us(step, STEPS))
    before, now = map(statistics.median, times.values())
    row: harness.Row = {"case": f"step of {LAYERS} layers {hidden}, {rows}x2, SGD (wall)", "recipe": "delayed"}
    row |= {"interpreted fwd+bwd us": before, "fwd+bwd us": now, "of_interpreted": now / before}
    return row | {"target": f"{STEP_US} us", "ok": now <= STEP_US} if harness.gpu() else row


def gpu_row(recipe: str) -> harness.Row:
    """GPU time and peak memory of a Llama's layer: no more than interpreted, within what measurements differ by."""
    _, both = build(GPU, recipe)

    def under(setting: str) -> harness.Work:
        def work() -> None:
            taped.set_when(setting)
            both()

        return work

    row: harness.Row = {"case": GPU.name, "recipe": recipe}
    interpreted, replayed = under(INTERPRETED), under(REPLAYED)
    before, now = harness.gpu_us(interpreted, replayed)
    row |= {"interpreted fwd+bwd us": before, "fwd+bwd us": now, "of_interpreted": now / before}
    row |= {"interpreted peak MiB": harness.peak_mib(interpreted), "peak MiB": harness.peak_mib(replayed)}
    most = PEAK_MIB if recipe == "delayed" else row["interpreted peak MiB"]
    row["target"] = f"1.01 of interpreted, {most:.0f} MiB"
    row["ok"] = now <= 1.01 * before and row["peak MiB"] <= most
    return row


# ------------------------------------------------------------------------------------------------ the same bits


def results(case: Case, recipe: str, setting: str) -> list[torch.Tensor]:
    """Outputs, gradients and scales of three steps from the same beginning."""
    taped.set_when(setting)
    torch.manual_seed(0)
    module = case.make()
    *lead, width = case.shape
    found = []
    for step in range(3):
        x = harness.matrix(generators.activations, prod(lead), width, step).view(*case.shape).requires_grad_()
        with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            y = module(x)
        y.backward(harness.matrix(generators.gradients, prod(lead), y.shape[-1], step).view(*y.shape))
        found += [y.detach(), x.grad, *[p.grad for p in module.parameters()], *[b.clone() for b in module.buffers()]]
        module.zero_grad(set_to_none=True)
    return found


def bits_row(case: Case, recipe: str) -> harness.Row:
    """Whether both ways give the same bits. `reproducible`: whether one of them does, run twice."""
    name = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        first, again, replayed = (results(case, recipe, s) for s in (INTERPRETED, INTERPRETED, REPLAYED))
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    equal, reproducible = (same_bits(first, other) for other in (replayed, again))
    row: harness.Row = {"case": f"same bits: {case.name}", "recipe": recipe, "equal": equal}
    return row | {"reproducible": reproducible, "ok": equal}


def same_bits(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> bool:
    """Whether they are equal as bytes (NaNs too)."""
    pairs = (
        (a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(these, those, strict=True)
    )
    return all(torch.equal(a, b) for a, b in pairs)


# ------------------------------------------------------------------------------------------------ all of it


def tally() -> Counter[str]:
    """Calls of layers until now: replayed (""), and the others by reason."""
    return Counter({"": taped.COUNTS.replayed, **taped.COUNTS.interpreted})


def share_row(before: Counter[str]) -> harness.Row:
    """How many of the calls that could be replayed since then were."""
    found = tally()
    found.subtract(before)
    total = found.total()
    share = found.pop("", 0) / total if total else 0.0
    reasons = "; ".join(f"{n} not: {why}" for why, n in found.most_common() if n)
    row: harness.Row = {"case": f"calls replayed, of {total}", "share": share, "reasons": reasons or "none was not"}
    return row | {"target": SHARE, "ok": share >= SHARE}


def jobs() -> list[tuple[str, Callable[[], harness.Row]]]:
    """What there is to measure, with its label: what matters most comes first."""
    found: list[tuple[str, Callable[[], harness.Row]]] = []
    layer, *others = HOST
    for case in (layer, *others):
        for recipe in case.host or {}:
            found.append((f"host {case.name} {recipe}", partial(case_row, case, recipe)))
    found.append(("host DPA", attention_row))
    found.append(("host TransformerLayer bf16", partial(case_row, layer, "bf16")))
    found += [(f"region {n}", partial(region_row, n)) for n in REGIONS]
    found.append(("step", partial(step_row, *STEP)))
    for case in (layer, *others):
        for recipe in modules.LINEAR_RECIPES:
            found.append((f"bits {case.name} {recipe}", partial(bits_row, case, recipe)))
    return found + [(f"GPU {GPU.name} {recipe}", partial(gpu_row, recipe)) for recipe in GPU.recipes]


def attempted(label: str, job: Callable[[], harness.Row]) -> harness.Row:
    """The job's row. Figures that took minutes are not lost because a later one cannot be had."""
    try:
        return job()
    except Exception as error:
        traceback.print_exc()
        return {"case": label, "reasons": repr(error)[:300], "ok": False}
    finally:
        harness.free()


def measure() -> list[harness.Row]:
    """All of it, with a line for each row as it is found."""
    begin = time.perf_counter()
    before = tally()
    rows: list[harness.Row] = []
    with restored():
        for label, job in jobs():
            if time.perf_counter() - begin > SECONDS:
                row: harness.Row = {"case": f"{label}: left out, {SECONDS} s are over"}
            else:
                row = attempted(label, job)
            rows.append(row)
            figures = {k: harness.cell(v) for k, v in row.items() if k not in ("case", "recipe")}
            print(f"{time.perf_counter() - begin:6.1f} s  {label}: {figures}", flush=True)
    return [*rows, share_row(before)]


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["replay", *sys.argv[1:]]))
