"""What a step takes on many GPUs, as a stated model of few measured figures: `python -m benchmarks.predict`.

The model, for a decoder of L equal layers with P weights each, sharded by FSDP2 over N GPUs:

- products take 6 P tokens operations a layer (8 where layers are computed again), at the measured rate of one GPU's
  whole layer (not of a GEMM alone: norms and attention are in it);
- a layer's weights are all-gathered twice a step (forward and backward) at b bytes an element, its gradients
  reduce-scattered once at 2 bytes; a collective of S bytes in all takes S (n-1)/n / bandwidth + (n-1) latency, where n
  is the number of its ranks (a ring), and the bandwidth that of the slowest link: within a node, or between nodes;
- with a mesh of nodes x GPUs (HSDP) gathers stay in the node, and gradients are all-reduced between nodes besides;
- communication of one layer runs beside the products of its neighbour, so a pass takes the longer of both, layer by
  layer, plus what nothing hides: the first gather and the last reduction;
- the optimizer reads and writes 16 bytes a weight of the shard at the memory's rate.

Not in it: stragglers, embeddings and the loss, congestion, and what a host takes that is slower than its GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

GIGA = 1e9


@dataclass(frozen=True)
class Machine:
    """Measured, or of a data sheet: of one GPU and its links, in bytes and operations a second."""

    rate: float  # of a layer's products, operations a second
    inside: float = 350 * GIGA  # of a collective within a node (NVLink), bytes a second and GPU
    between: float = 40 * GIGA  # between nodes, bytes a second and GPU (400 Gbit/s, 80 % of it)
    latency: float = 8e-6  # of a ring's step, seconds
    memory: float = 4e12  # of HBM, bytes a second
    node: int = 8  # GPUs


@dataclass(frozen=True)
class Model:
    """A decoder."""

    name: str
    layers: int
    weights: float  # of a layer


MODELS = (Model("8B", 32, 218e6), Model("70B", 80, 856e6))


def collective(nbytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Seconds of a ring over `nbytes` in all."""
    return 0.0 if ranks == 1 else nbytes * (ranks - 1) / ranks / bandwidth + (ranks - 1) * latency


def step(
    model: Model, machine: Machine, gpus: int, tokens: int, weight_bytes: float, *, hybrid: bool, again: bool = False
) -> dict[str, float]:
    """Seconds of a step with `tokens` a GPU: whole, its products alone, and what communication adds."""
    shards = min(gpus, machine.node) if hybrid else gpus
    width = machine.inside if shards <= machine.node else machine.between
    forward = 2 * model.weights * tokens / machine.rate
    backward = (3 if again else 2) * forward
    gather = collective(weight_bytes * model.weights, shards, width, machine.latency)
    reduce = collective(2 * model.weights, shards, width, machine.latency)
    if hybrid and gpus > shards:
        part = 2 * model.weights / shards
        reduce += 2 * collective(part, gpus // shards, machine.between, machine.latency)
    layers = max(forward, gather) + max(backward, gather + reduce)
    products = model.layers * (forward + backward)
    update = 16 * model.weights * model.layers / shards / machine.memory
    whole = model.layers * layers + gather + reduce + update
    return {"whole": whole, "products": products, "added": whole - products - update, "update": update}


def rows(machines: dict[str, Machine], tokens: int, sizes: Sequence[int] = (64, 1024)) -> Iterator[dict[str, object]]:
    """By model, number of GPUs, form and mesh; `machines` by form ("bf16", "fp8", "fp8 weights too")."""
    for model in MODELS:
        for gpus in sizes:
            for hybrid in (False, True):
                base = 0.0
                for form, machine in machines.items():
                    nbytes = 1.0 if form.endswith("too") else 2.0
                    found = step(model, machine, gpus, tokens, nbytes, hybrid=hybrid)
                    base = base or found["whole"]
                    yield {
                        "model": model.name,
                        "GPUs": gpus,
                        "mesh": f"{gpus // machine.node} x {machine.node}" if hybrid else str(gpus),
                        "form": form,
                        "step s": round(found["whole"], 3),
                        "communication shows": f"{found['added'] / found['whole']:.0%}",
                        "of bf16": round(found["whole"] / base, 2),
                    }


def table(found: Sequence[dict[str, object]]) -> str:
    """In Markdown."""
    names = list(found[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(str(row[n]) for n in names) + " |" for row in found])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table for these figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bf16", type=float, default=500, help="TFLOP/s of a layer in bf16 on one GPU")
    parser.add_argument("--fp8", type=float, default=700, help="the same in an FP8 recipe")
    parser.add_argument("--inside", type=float, default=350, help="GB/s of a collective within a node, a GPU")
    parser.add_argument("--between", type=float, default=40, help="GB/s between nodes, a GPU")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens a GPU and step")
    given = parser.parse_args(arguments)
    links = {"inside": given.inside * GIGA, "between": given.between * GIGA}
    machines = {"bf16": Machine(given.bf16 * 1e12, **links), "fp8": Machine(given.fp8 * 1e12, **links)}
    machines["fp8, weights too"] = machines["fp8"]
    print(table(list(rows(machines, given.tokens))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
