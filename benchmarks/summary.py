"""Three tables of docs/guides/18-performance.md, of the newest results: what other libraries take for the same work.

    python -m benchmarks.summary time        on the GPU, a forward and a backward
    python -m benchmarks.summary host        of the host, at sizes where the GPU never waits
    python -m benchmarks.summary memory      at the peak

A work that no record has a rival for is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks import harness
from benchmarks.report import by_age, markdown

PEER = "Transformer Engine 2.20"
PARTS = "torch's loss and AdamW"
LAYERS = ("TransformerLayer", "LayerNormMLP", "GroupedLinear", "DPA")


class Beside(NamedTuple):
    """One work, and what it takes here and elsewhere."""

    work: str
    recipe: str
    ours: float
    other: str
    theirs: float


def newest(name: str) -> tuple[str, list[harness.Row]]:
    """Where and when a benchmark ran last on a GPU, and its rows."""
    path = by_age(name)[-1]
    record = harness.read(path)
    return f"{record['about']['device']}, {record['time'][:10]}", record["rows"]


def of_peer(rows: Sequence[harness.Row], figure: str, scale: float) -> Iterator[Beside]:
    """The rows that the peer has the figure of."""
    for row in rows:
        theirs = row.get(f"peer {figure}")
        if theirs and str(row["case"]).startswith(LAYERS):
            yield Beside(row["case"], row["recipe"], row[figure] / scale, PEER, theirs / scale)


def of_torch(rows: Sequence[harness.Row], figure: str, scale: float, pairs: dict[str, str]) -> Iterator[Beside]:
    """Rows of ours beside rows of torch's, by the names of their cases, where both have the same shape."""
    for row in (row for row in rows if row["case"] in pairs):
        theirs = pairs[row["case"]]
        for other in (r for r in rows if r["case"] == theirs and r.get("shape") == row.get("shape")):
            work = f"{NAMES.get(row['case'], row['case'])} {harness.cell(row.get('shape'))}".strip()
            yield Beside(work, "bf16", row[figure] / scale, theirs, other[figure] / scale)


LOSSES = {"linear_cross_entropy": "torch, loss in float32"}
NAMES = {"moments bf16": "FusedAdam, 1.1 billion parameters, moments bf16"}
OPTIMIZERS = {"moments bf16": "torch's fused AdamW, moments bf16"}


def of_parts(figure: str, scale: float) -> Iterator[tuple[str, list[Beside]]]:
    """A whole step of a Llama with our loss and optimizer, beside the same layers with torch's."""
    where, rows = newest("end_to_end")
    theirs = {row["recipe"]: row for row in rows if row.get("parts") == "torch's"}
    ours = [row for row in rows if row.get("parts") == "loss, optimizer" and row["recipe"] in theirs]
    name = "a step of a Llama, 1.1 billion parameters"
    pairs = [(row, theirs[row["recipe"]]) for row in ours]
    yield where, [Beside(name, a["recipe"], a[figure] / scale, PARTS, b[figure] / scale) for a, b in pairs]


def of_rivals(figure: str, scale: float) -> Iterator[tuple[str, list[Beside]]]:
    """A layer beside torch's own, compiled and with torchao's FP8: bf16 beside bf16, FP8 beside each of them."""
    if not by_age("rivals"):
        return
    where, rows = newest("rivals")
    ours = [row for row in rows if row["case"] == "te-runtime"]
    others = [row for row in rows if row["case"] != "te-runtime"]
    yield (
        where,
        [
            Beside(
                "TransformerLayer of `te bench`",
                row["recipe"],
                row[figure] / scale,
                other["case"],
                other[figure] / scale,
            )
            for row in ours
            for other in others
            if (row["recipe"] == "bf16") <= (other["recipe"] == "bf16")
        ],
    )


def times() -> Iterator[tuple[str, list[Beside]]]:
    """Milliseconds, by where and when they were measured."""
    for name in ("attention", "modules"):
        where, rows = newest(name)
        yield where, list(of_peer(rows, "fwd+bwd us", 1e3))
    yield from of_rivals("fwd+bwd us", 1e3)
    yield from of_parts("ms", 1)
    where, rows = newest("loss")
    yield where, list(of_torch(rows, "us", 1e3, LOSSES))
    where, rows = newest("optimizer")
    yield where, list(of_torch(rows, "ms", 1, OPTIMIZERS))


def peaks() -> Iterator[tuple[str, list[Beside]]]:
    """MiB at the peak of a forward and backward, above what is held between steps."""
    where, rows = newest("replay")
    _, before = newest("attention")
    peer = {(row["case"], row["recipe"]): row.get("peer peak MiB") for row in before}
    layers = [row | {"peer peak MiB": peer[key]} for row in rows if (key := (row["case"], row.get("recipe"))) in peer]
    yield where, list(of_peer(layers, "peak MiB", 1))
    where, rows = newest("modules")
    yield where, list(of_peer(rows, "peak MiB", 1))
    yield from of_rivals("peak MiB", 1)
    yield from of_parts("peak GiB", 2**-10)
    where, rows = newest("loss")
    yield where, list(of_torch(rows, "peak MiB", 1, LOSSES))


def table(found: Iterator[tuple[str, list[Beside]]], unit: str) -> str:
    """A row for each work; `of theirs` below 1: this package takes less."""
    rows = [
        {
            "work": each.work,
            "recipe": each.recipe,
            f"te-runtime, {unit}": f"{each.ours:,.2f}" if each.ours < 100 else f"{each.ours:,.0f}",
            "beside": each.other,
            f"theirs, {unit}": f"{each.theirs:,.2f}" if each.theirs < 100 else f"{each.theirs:,.0f}",
            "of theirs": f"{each.ours / each.theirs:.2f}",
            "where": where,
        }
        for where, group in found
        for each in group
    ]
    return markdown(rows, ())


def hosts() -> str:
    """Host time of small modules, a row for each module and recipe."""
    where, rows = newest("replay")
    kept = [
        {
            "work": row["case"].removeprefix("host: "),
            "recipe": row["recipe"],
            "forward, us": row["fwd us"],
            "and backward, us": row["fwd+bwd us"],
            "forward, of nn.Linear's": f"{row['of_linear fwd']:.1f}",
            "and backward, of nn.Linear's": f"{row['of_linear']:.1f}",
        }
        for row in rows
        if str(row["case"]).startswith("host: ")
    ]
    return f"{where}:\n\n{markdown(kept, ())}"


def main() -> int:
    """Print one table."""
    made = {"time": lambda: table(times(), "ms"), "host": hosts, "memory": lambda: table(peaks(), "MiB")}
    if len(sys.argv) != 2 or sys.argv[1] not in made:
        sys.exit(f"summary: name one of {', '.join(made)}")
    print(made[sys.argv[1]]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
