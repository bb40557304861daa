"""What a step takes on 64 and 1,024 GPUs, as a stated model of measured figures: `python -m benchmarks.predict`.

Nothing of this was run on so many GPUs. What enters is *measured*, read from the newest records of `parallel` and
`sharded`, or *assumed*, with its source; the first table that is printed says of each figure which of the two it is.
The model, for a decoder of L equal layers of P weights each, on `replicate` x `shard` x `tp` GPUs (HSDP over tensor
parallelism; one of them may be 1), each rank of a node's GPUs being the neighbour of the next:

- A layer takes what it took when it was measured, for the tokens of one GPU times tp; a third of it is forward. Of a
  layer over tp ranks the products take 1/tp, as between one rank and two; what shows of its communication is what
  showed on two, by the bytes that a ring sends, (tp-1)/tp of all. The 70B layer is that of the record `parallel`.
  The 8B layer's time is the step of the record `sharded`, less what this model says of the optimizer, the first gather
  and the last reduction on two ranks: given two ranks it predicts the measured step.
- A layer's weights are all-gathered twice a step, its gradients reduce-scattered once, and with `replicate` all-reduced
  besides. A collective of S bytes over n ranks in k nodes takes S (n-1)/n / bandwidth, and a latency for each of its
  n-1 steps (an all-reduce: twice both), of which k-1 lead from node to node. Bandwidth is that within a node; over
  nodes a ring shares the network adapters of the ranks that it has in a node, and the slower of both counts.
- Communication of a layer runs beside its neighbour's products: a pass takes the longer of both, layer by layer, plus
  what nothing hides, the first gather and the last reduction.
- The optimizer moves so many bytes of memory for each weight of its shard.

No pipeline is in it, thus no bubble. Not in it either: embeddings and the loss, stragglers, congestion, products that
run slower beside communication than they did on two ranks, tensor parallelism and FSDP in each other's way on NVLink,
hosts slower than their GPUs, and whether it all fits into memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness, parallel, sharded
from benchmarks.report import by_age

GIGA = 1e9
MODELLED = "-h200-"  # whose figures the model is made of: in a record's name
GATHERS = 2  # of a layer's weights in a step: for forward, and for backward
GRADIENT = 2  # bytes of an element: FSDP2 reduces in the parameters' dtype, bf16


class LackingError(ValueError):
    """A record has not what the model reads from it."""


@dataclass(frozen=True)
class Figure:
    """One that enters."""

    name: str
    value: float
    unit: str
    kind: str  # "measured", "assumed", or "of both"
    source: str


@dataclass(frozen=True)
class Machine:
    """Of one GPU and its links: bytes and seconds."""

    inside: float  # bytes a second and GPU of a collective within a node
    between: float  # the same of a GPU's network adapter
    inside_step: float = 3.4e-6  # latency of a ring's step
    between_step: float = 14e-6
    memory: float = 4.0e12  # bytes a second
    update: float = 40  # bytes that the optimizer moves for each weight
    node: int = 8  # GPUs


@dataclass(frozen=True)
class Shape:
    """A decoder's layers."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int

    @property
    def weights(self) -> int:
        """Of a layer: query, key, value and projection, a gated MLP."""
        return self.hidden**2 * 2 + 2 * self.hidden**2 * self.groups // self.heads + 3 * self.hidden * self.ffn


@dataclass(frozen=True)
class Layer:
    """Seconds of a layer's forward and backward, for the tokens that were measured."""

    products: float  # on one GPU
    halves: float = 0.0  # of tp 2: what each rank takes without the communication that shows
    shows: float = 0.0  # that communication

    def over(self, tp: int) -> tuple[float, float]:
        """(products, communication that shows) over so many ranks."""
        if tp == 1:
            return self.products, 0.0
        return self.halves * 2 / tp, self.shows * ((tp - 1) / tp) / (1 / 2)


@dataclass(frozen=True)
class Mesh:
    """Ranks: copies of the model, shards of each, parts of each layer."""

    replicate: int
    shard: int
    tp: int = 1

    def __str__(self) -> str:
        named = (("replicate", self.replicate), ("shard", self.shard), ("tp", self.tp))
        return ", ".join(f"{name} {n}" for name, n in named if n > 1)


# ------------------------------------------------------------------------------------------------ the model


def collective(nbytes: float, ranks: int, near: int, machine: Machine) -> float:
    """Seconds of a ring over `nbytes` in all, with `near` of its ranks in each node."""
    if ranks == 1:
        return 0.0
    nodes = -(-ranks // near)
    bandwidth = machine.inside if nodes == 1 else machine.between * near
    if near > 1:
        bandwidth = min(bandwidth, machine.inside)
    latency = (ranks - nodes) * machine.inside_step + (nodes - 1) * machine.between_step
    return nbytes * (ranks - 1) / ranks / bandwidth + latency


def step(
    shape: Shape,
    layer: Layer,
    machine: Machine,
    mesh: Mesh,
    weight_bytes: float,
    scale: float = 1.0,
    again: bool = False,
) -> dict[str, float]:
    """Seconds of a step: whole, what communication adds, the optimizer. `scale`: tokens of a GPU, of those measured."""
    products, shows = (part * scale * mesh.tp for part in layer.over(mesh.tp))
    forward = (products + shows) / 3
    backward = forward * (3 if again else 2)
    weights = shape.weights / mesh.tp
    near = max(1, min(mesh.shard, machine.node // mesh.tp))
    gather = collective(weight_bytes * weights, mesh.shard, near, machine)
    reduce = collective(GRADIENT * weights, mesh.shard, near, machine)
    near = max(1, machine.node // (mesh.tp * mesh.shard))
    part = GRADIENT * weights / mesh.shard
    reduce += 2 * collective(part, mesh.replicate, min(near, mesh.replicate), machine)
    update = machine.update * weights * shape.layers / mesh.shard / machine.memory
    passes = max(forward, gather) + max(backward, gather + reduce)
    whole = shape.layers * passes + gather + reduce + update
    hidden = shape.layers * products * (4 / 3 if again else 1)
    return {"whole": whole, "added": whole - hidden - update, "update": update}


# ------------------------------------------------------------------------------------------------ what was measured


class Record:
    """The newest record of a benchmark, of H200s where there is one: figures of its rows, each noted with where it is
    from.
    """

    def __init__(self, name: str, folder: Path) -> None:
        paths = by_age(name, folder)
        paths = [path for path in paths if MODELLED in path.name] or paths
        if not paths:
            raise LackingError(f"no record of {name!r} of GPUs in {folder}: python -m benchmarks.run {name}, on two")
        self.name, self.path = name, paths[-1]
        self._rows: list[harness.Row] = harness.read(self.path)["rows"]

    def figure(self, recipe: str, column: str, case: str = "") -> float:
        """That of the row of this recipe (and case)."""
        for row in self._rows:
            if row.get("recipe") == recipe and row["case"].startswith(case):
                value = row.get(column)
                if isinstance(value, (int, float)) and (value > 0 or column == "hidden"):
                    return float(value)
                raise LackingError(f"{self.path.name}: the row {recipe!r} has no {column!r} but {value!r}")
        wanted = f"{case}, {recipe}".removeprefix(", ")
        raise LackingError(f"{self.path.name} has no row {wanted!r}: measure it, or take the record out of the folder")

    def shown(self, row: str) -> str:
        """As a source."""
        return f"`{self.name}`, {row}"


def handed(size: dict[str, int], quantized: bool) -> float:
    """MiB that a rank of two hands to its collectives in a step of a layer, sequence parallel: docs/parallel.md."""
    whole = 2 * size["tokens"] * size["hidden"]  # in bf16
    gathered = whole // (4 if quantized else 2)
    return 2 * (2 * gathered + whole + whole + gathered) / 2**20


def sent(size: dict[str, int], quantized: bool) -> float:
    """Bytes that cross the link from it: of what is gathered its half, of what is reduced the other's."""
    whole = 2 * size["tokens"] * size["hidden"]
    return 2 * (3 * (whole // (4 if quantized else 2)) + 2 * whole / 2)


def large(record: Record, recipe: str, figures: list[Figure]) -> tuple[Layer, float]:
    """(the layer of `parallel` in a recipe, bytes a second between the two)."""
    size = parallel.SIZES["cuda"]
    one, both, spent = (record.figure(recipe, name) / 1e3 for name in ("one ms", "ms", "communication ms"))
    hidden, mebibytes = record.figure(recipe, "hidden"), record.figure(recipe, "MiB a step")
    expected = handed(size, recipe != "bf16")
    if abs(mebibytes / expected - 1) > 0.01:
        raise LackingError(
            f"{record.path.name}: {mebibytes} MiB a step in {recipe}, and a layer of {size} has {expected}"
        )
    shows = spent * (1 - hidden)
    figures += [
        Figure(f"a layer of 70B, {recipe}: one GPU", one * 1e3, "ms", "measured", record.shown(f"{recipe}: one ms")),
        Figure(f"a layer of 70B, {recipe}: tp 2", both * 1e3, "ms", "measured", record.shown(f"{recipe}: ms")),
        Figure("of it communication that shows", shows * 1e3, "ms", "measured",
               record.shown(f"{recipe}: communication ms x (1 - hidden)")),
    ]  # fmt: skip
    return Layer(one, both - shows, shows), sent(size, recipe != "bf16") / spent


def gathered_of_a_weight(nbytes: float, ranks: int, shape: Shape, layers: int) -> float:
    """Bytes that a gather moves for each weight, of those that a rank sends in a step."""
    return nbytes * ranks / GATHERS / (layers * shape.weights)


def products_of(measured: float, nbytes: float, shape: Shape, layers: int, machine: Machine) -> float | None:
    """Seconds of a layer's products, of a step over two shards; None if its communication shows."""
    ranks = sharded.RANKS
    gather, reduce = (collective(n * shape.weights, ranks, ranks, machine) for n in (nbytes, GRADIENT))
    update = machine.update * shape.weights * layers / ranks / machine.memory
    products = (measured - gather - reduce - update) / layers
    return None if products / 3 < gather or products * 2 / 3 < gather + reduce else products


def small(
    record: Record, shape: Shape, machine: Machine, recipe: str, column: str, figures: list[Figure]
) -> tuple[Layer, float]:
    """(the layer of `sharded`, bytes that a gather moves for each weight)."""
    layers = sharded.SIZES["cuda"][sharded.LARGE][0]
    shown, bytes_column = ("bf16" if column == "bf16 ms" else recipe), column.replace("ms", "gathered MiB")
    measured, gathered = (
        record.figure(recipe, column, sharded.LARGE) / 1e3,
        record.figure(recipe, bytes_column, sharded.LARGE) * 2**20,
    )
    nbytes = gathered_of_a_weight(gathered, sharded.RANKS, shape, layers)
    if shown == "bf16" and abs(nbytes / 2 - 1) > 0.01:
        raise LackingError(f"{record.path.name}: {nbytes:.3g} bytes gathered of a weight in bf16: not {sharded.LARGE}")
    products = products_of(measured, nbytes, shape, layers, machine)
    if products is None:
        raise LackingError(
            f"{record.path.name}: in {shown} communication shows on two ranks: no time of products in it"
        )
    figures += [
        Figure(f"{layers} layers of 8B, {shown}: a step on two GPUs", measured * 1e3, "ms", "measured",
               record.shown(f"{sharded.LARGE}, {recipe}: {column}")),
        Figure("of it a layer's products", products * 1e3, "ms", "of both",
               "without optimizer, first gather and last reduction, by the figures below"),
        Figure("a gather, of each weight", nbytes, "B", "measured", record.shown(f"the same row: {bytes_column}")),
    ]  # fmt: skip
    return Layer(products), nbytes


def assumed(machine: Machine, tokens: int) -> list[Figure]:
    """What was not measured, and where it is from."""
    facts = (
        (
            "between nodes, a GPU",
            machine.between / GIGA,
            "GB/s",
            "an adapter of 400 Gbit/s a GPU (HGX H200), 80 % of it",
        ),
        (
            "a ring's step within a node",
            machine.inside_step * 1e6,
            "us",
            "NCCL's own table (tuning.cc): NVLink, simple",
        ),
        ("a ring's step between nodes", machine.between_step * 1e6, "us", "the same: network, simple"),
        ("GPUs of a node", machine.node, "", "HGX H200"),
        ("GPU memory", machine.memory / GIGA, "GB/s", "a copy of 64 MiB takes 33.2 us (notes/cuda.md)"),
        ("the optimizer, of each weight", machine.update, "B", "counted: torch's plain AdamW with all in bf16"),
        ("a reduction, of each gradient", GRADIENT, "B", "FSDP2's default with parameters in bf16"),
        ("tokens of a GPU", tokens, "", "8192 were measured; others take time in proportion"),
    )
    return [Figure(name, value, unit, "assumed", source) for name, value, unit, source in facts]


@dataclass(frozen=True)
class Known:
    """What the predictions start from."""

    machine: Machine
    shapes: tuple[Shape, ...]
    forms: tuple[str, ...]
    layers: dict[tuple[str, str], Layer]  # by shape and form
    nbytes: dict[str, float]  # of a weight that is gathered, by form
    records: tuple[Record, ...]
    figures: tuple[Figure, ...]


def known(folder: Path, recipe: str, tokens: int, inside: float | None, between: float) -> Known:
    """All figures; `inside` and `between` in bytes a second, None as measured."""
    over, shards = Record("parallel", folder), Record("sharded", folder)
    size = parallel.SIZES["cuda"]
    _, hidden, ffn, heads, groups, _ = sharded.SIZES["cuda"][sharded.LARGE]
    shapes = (
        Shape("8B", 32, hidden, ffn, heads, groups),
        Shape("70B", 80, size["hidden"], size["ffn"], size["heads"], size["groups"]),
    )
    forms = ("bf16", recipe, f"{recipe}, weights too")
    layers: dict[tuple[str, str], Layer] = {}
    links: list[Figure] = []
    larger: list[Figure] = []
    for form in forms[:2]:
        layers["70B", form], width = large(over, form, larger)
        source = over.shown(f"{form}: MiB a step / communication ms, the best row (others wait more)")
        links.append(Figure("within a node, a GPU", width / GIGA, "GB/s", "measured", source))
    layers["70B", forms[2]] = layers["70B", forms[1]]
    same = layers["70B", forms[1]].products * 1e3
    larger.append(
        Figure(f"a layer of 70B, {forms[2]}", same, "ms", "assumed", "as with weights in bf16; tp 2 likewise")
    )
    link = max(links, key=lambda figure: figure.value)
    if inside is not None:
        link = Figure(link.name, inside / GIGA, link.unit, "assumed", "--inside")
    machine = Machine(link.value * GIGA, between)
    smaller: list[Figure] = []
    nbytes = {}
    for form, column in zip(forms, ("bf16 ms", "ms", "ms"), strict=True):
        row = recipe if form == "bf16" else form
        layers["8B", form], nbytes[form] = small(shards, shapes[0], machine, row, column, smaller)
    figures = (*smaller, *larger, link, *assumed(machine, tokens))
    return Known(machine, shapes, forms, layers, nbytes, (over, shards), figures)


# ------------------------------------------------------------------------------------------------ tables


def meshes(shape: Shape, gpus: int, node: int) -> list[Mesh]:
    """Those that are looked at; over tensor-parallel ranks the layer that was measured so."""
    nodes = gpus // node
    found = [Mesh(1, gpus), Mesh(nodes, node)]
    return found + [Mesh(nodes, node // 2, 2), Mesh(1, nodes, node)] if shape.name == "70B" else found


def rows(given: Known, scale: float, again: bool, sizes: Sequence[int] = (64, 1024)) -> Iterator[dict[str, str]]:
    """By model, number of GPUs and mesh."""
    for shape in given.shapes:
        for gpus in sizes:
            for mesh in meshes(shape, gpus, given.machine.node):
                row = {"model": shape.name, "GPUs": str(gpus), "mesh": str(mesh)}
                yield row | by_form(given, shape, mesh, scale, again)


def by_form(given: Known, shape: Shape, mesh: Mesh, scale: float, again: bool) -> dict[str, str]:
    """Seconds of a step in each form, and in brackets the share of communication that shows."""
    cells: dict[str, str] = {}
    base = 0.0
    for form in given.forms:
        layer = given.layers[shape.name, form]
        found = step(shape, layer, given.machine, mesh, given.nbytes[form], scale, again)
        cells[f"{form}, s"] = f"{found['whole']:.3f} ({found['added'] / found['whole']:.0%})"
        if base:
            cells[f"{form}, of bf16"] = f"{found['whole'] / base:.2f}"
        base = base or found["whole"]
    return cells


def table(found: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    names = list(found[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(str(row[n]) for n in names) + " |" for row in found])


def shown(figure: Figure) -> dict[str, str]:
    """As a row."""
    value = f"{figure.value:.4g} {figure.unit}".strip()
    return {"figure": figure.name, "value": value, "is": figure.kind, "from": figure.source}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what enters, and what follows from it; 1 if a record lacks a figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=("delayed", "current"), default="delayed", help="beside bf16")
    parser.add_argument("--inside", type=float, help="GB/s of a collective within a node, a GPU (as measured on two)")
    parser.add_argument("--between", type=float, default=40, help="GB/s of a GPU's network adapter (40)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens a GPU and step (8192)")
    parser.add_argument("--again", action="store_true", help="layers are computed again in backward")
    parser.add_argument("--records", type=Path, default=harness.RESULTS, help="their folder (benchmarks/results)")
    given = parser.parse_args(arguments)
    inside = None if given.inside is None else given.inside * GIGA
    try:
        found = known(given.records, given.recipe, given.tokens, inside, given.between * GIGA)
    except LackingError as lacking:
        print(f"predict: {lacking}", file=sys.stderr)
        return 1
    print("; ".join(f"`{record.name}`: {record.path.name}" for record in found.records), end="\n\n")
    print(table([shown(figure) for figure in found.figures]), end="\n\n")
    print(table(list(rows(found, given.tokens / parallel.SIZES["cuda"]["tokens"], given.again))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
