"""What 1, 2 and 4 GPUs of one host give: tensor, context and data parallelism, beside what the model says.

- `tensor parallel`: the layer of `parallel`, sequence parallel, plain and with overlap by the fastest method measured.
- `context parallel`: a layer of Llama 8B, causal, over one sequence of 65,536 tokens; `mode` is the exchange.
- `FSDP2`: the eight layers of `sharded`, 8,192 tokens a rank; in FP8 weights are held quantized.

A step is forward and backward, of FSDP2 also the optimizer; `ms` is that of the slowest rank, `speed-up` that of tokens
a second. `communication ms` and `hidden` are those of `parallel`, copies between GPUs included.

`predicted ms` is the model of `benchmarks.predict` with what this run measured on one and two GPUs: two ranks of tensor
parallelism enter it, and come out as they are. It has no context parallelism; predicted of that is the time of one GPU
divided by the ranks. `of_predicted` is the measured time over it.

Each number of ranks has processes of its own. Where a row fails they begin anew with the next one, and the row says
why. What `SECONDS` do not suffice for is left out, and the last ranks first: four begin. On a CPU: tiny sizes by gloo.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist

from benchmarks import harness, overlap, parallel, predict, sharded

RANKS = (4, 1, 2)
SECONDS = 260  # from the beginning; after that no row begins
LIMIT = 200  # of one number of ranks, whatever hangs
TENSOR, CONTEXT, SHARDED = "tensor parallel", "context parallel", "FSDP2"
RECIPES = ("bf16", "delayed", "block")  # of `sharded.RECIPES`
MODES = {TENSOR: ("", "overlap"), CONTEXT: ("p2p", "a2a"), SHARDED: ("",)}
#: The layer of context parallelism.
LONG: dict[str, dict[str, int]] = {
    "cuda": {"hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "tokens": 65536},
    "cpu": parallel.SIZES["cpu"],
}


@dataclass(frozen=True)
class Case:
    """A row: what is spread, and how."""

    case: str
    recipe: str
    mode: str
    ranks: int


def cases_of(ranks: int) -> list[Case]:
    """On one GPU the modes are one."""
    kinds = [(case, mode) for case, modes in MODES.items() for mode in (modes if ranks > 1 else ("",))]
    return [Case(case, recipe, mode, ranks) for recipe in RECIPES for case, mode in kinds]


def measure(ranks: Sequence[int] = RANKS, seconds: float = SECONDS) -> list[harness.Row]:
    """All rows, by what they are about; a machine with fewer GPUs leaves out the larger numbers of ranks."""
    kind, begin = harness.device().type, time.time()
    rows: list[harness.Row] = []
    for number in ranks:
        left = cases_of(number)
        if kind == "cuda" and harness.gpus() < number:
            rows.append({"case": f"{number} ranks", "failed": f"left out: {harness.gpus()} GPUs are here"})
            continue
        while left:
            found: list[harness.Row] = []
            why = "its ranks ended without a row"
            try:
                found.extend(parallel.spawned(kind, partial(rows_of, left, begin, seconds), number, LIMIT))
            except Exception as error:
                why = str(error).strip()
            rows += found
            if len(found) < len(left):
                rows.append(asdict(left[len(found)]) | {"failed": why.splitlines()[-1][:100], "trace": why})
                print(f"{harness.label(rows[-1])}: FAILED\n{why}", flush=True)
            left = left[len(found) + 1 :]
    order = {case: at for at, case in enumerate(MODES)}
    rows.sort(key=lambda row: (order.get(row["case"], len(order)), row.get("recipe", ""), row.get("ranks", 0)))
    return with_predictions(rows, kind)


def rows_of(cases: Sequence[Case], begin: float, seconds: float, kind: str) -> Iterator[harness.Row]:
    """The rows of these cases, on every rank."""
    for case in cases:
        row: harness.Row = asdict(case)
        if sharded.over(begin, seconds, torch.device(kind)):
            yield row | {"failed": f"left out: {seconds} s are over"}
            continue
        with ExitStack() as stack:
            work, more = prepared(case, kind, stack)
            row["ms"] = parallel.slowest(parallel.timed(work, kind, 3, 2), kind)
            row |= more | (parallel.traced(work) if kind == "cuda" and case.ranks > 1 else {})
            del work
        harness.free()
        if dist.get_rank() == 0:
            print(f"{time.time() - begin:6.1f} s  {harness.label(row)}: {row['ms']:.2f} ms", flush=True)
        yield row


def prepared(case: Case, kind: str, stack: ExitStack) -> tuple[harness.Work, harness.Row]:
    """A rank's step, and what else is known of it."""
    recipe, group = sharded.RECIPES[case.recipe], dist.group.WORLD
    if case.case == SHARDED:
        held = sharded.Case(sharded.LARGE, case.recipe, case.recipe != "bf16")
        built = sharded.build(held, torch.device(kind))
        return built.work, {"gathered MiB": built.sent / 2**20}
    size = (parallel.SIZES if case.case == TENSOR else LONG)[kind]
    if case.ranks == 1 or case.case == CONTEXT:
        layer = parallel.build(size, kind)
        if case.ranks > 1:
            layer.set_context_parallel_group(group, cp_comm_type=case.mode)
        return parallel.step(layer, recipe, size["tokens"] // case.ranks, size["hidden"], kind), {}
    if case.mode:
        stack.enter_context(overlap.initialised(size, {}))
    return overlap.work_of(size, recipe, kind, **({"ub_tp_comm_overlap": True} if case.mode else {})), {}


# ------------------------------------------------------------------------------------------ what the model says


def with_predictions(rows: list[harness.Row], kind: str) -> list[harness.Row]:
    """The same with speed-ups and predictions, where what they need was measured."""
    by = {Case(*(row[key] for key in Case.__annotations__)): row for row in rows if "ms" in row}
    for case, row in by.items():
        one = by.get(Case(case.case, case.recipe, "", 1))
        if one is not None:
            row["speed-up"] = one["ms"] / row["ms"] * (case.ranks if case.case == SHARDED else 1)
        expected = predicted(case, by) if kind == "cuda" else None
        if expected is not None:
            row |= {"predicted ms": expected * 1e3, "of_predicted": row["ms"] / (expected * 1e3)}
    return rows


def predicted(case: Case, by: dict[Case, harness.Row]) -> float | None:
    """Seconds; None without what was measured on one GPU and on two."""
    one = by.get(Case(case.case, case.recipe, "", 1))
    two = by.get(Case(case.case, case.recipe, case.mode, 2))
    if case.case == CONTEXT:
        return None if one is None else one["ms"] / 1e3 / case.ranks
    if case.case == SHARDED:
        link = by.get(Case(TENSOR, "bf16", "", 2))
        return None if two is None or link is None else sharded_step(case.ranks, two, link)
    if one is None or (two is None and case.ranks > 1):
        return None
    if two is None:
        return float(one["ms"]) / 1e3
    shows = two["communication ms"] * (1 - two["hidden"])
    layer = predict.Layer(one["ms"] / 1e3, (two["ms"] - shows) / 1e3, shows / 1e3)
    return sum(layer.over(case.ranks))


def sharded_step(ranks: int, two: harness.Row, link: harness.Row) -> float | None:
    """Of the layers of `sharded`, from their step on two ranks; `link`: a row in which bf16 travels between two."""
    layers, hidden, ffn, heads, groups, _ = sharded.SIZES["cuda"][sharded.LARGE]
    shape = predict.Shape("8B", layers, hidden, ffn, heads, groups)
    inside = predict.sent(parallel.SIZES["cuda"], False) / (link["communication ms"] / 1e3)
    machine = predict.Machine(inside, between=inside)  # one node: nothing goes between
    nbytes = predict.gathered_of_a_weight(two["gathered MiB"] * 2**20, 2, shape, layers)
    products = predict.products_of(two["ms"] / 1e3, nbytes, shape, layers, machine)
    if products is None:
        return None
    return predict.step(shape, predict.Layer(products), machine, predict.Mesh(1, ranks), nbytes)["whole"]


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["four", *sys.argv[1:]]))
