"""In which order callables run: forwards and then backwards in reverse, or as a pipeline's `_order` says.

Chunks are numbered from 1. An order lists, for one rank of a pipeline, c for the forward of chunk c, -c for its
backward, and c - 0.5 (or -c - 0.5) for weight gradients that were put off. A chunk is a number of layers; each of its
microbatches has its own callable of each layer, numbered chunk by chunk, microbatch by microbatch, layer by layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from te_torch.training.graphs.device import unsupported, wrong

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weight gradients"


@dataclass(frozen=True)
class Schedule:
    """Which module each callable is of, and the steps of one pass over all: (what, which callable)."""

    modules: tuple[int, ...]
    steps: tuple[tuple[str, int], ...]
    apart: bool = False  # weight gradients are steps of their own


def in_turn(count: int) -> Schedule:
    """All forwards, then all backwards in reverse."""
    forwards = [(FORWARD, i) for i in range(count)]
    return Schedule(tuple(range(count)), (*forwards, *[(BACKWARD, i) for i in reversed(range(count))]))


def of_pipeline(order: Any, layers_of: Any, modules: int, samples: int) -> Schedule:
    """The schedule of a pipeline's order over so many modules, which got so many sample_args."""
    plain, apart = _split(order)
    chunks = max(plain)
    layers = _layers(layers_of, chunks, modules)
    microbatches, rest = divmod(len(plain), 2 * chunks)
    found = Counter(plain)
    if rest or any(found[c] != microbatches or found[-c] != microbatches for c in range(1, chunks + 1)):
        _refuse(plain, f"{len(plain)} forwards and backwards of {chunks} chunks")
    if samples != modules * microbatches:
        raise wrong(
            f"{samples} sample_args for {modules} layers and {microbatches} microbatches",
            f"{modules * microbatches}: one for each layer of each microbatch, chunk by chunk",
            "pass as many, or correct _order",
        )
    if apart:
        late = Counter(abs(math.ceil(e)) for e in apart)
        odd = [c for c in late if c > chunks or late[c] != microbatches]
        if odd or max(layers) > 1:
            raise unsupported(
                f"_order with delayed weight gradients {sorted(apart)} of chunks of {layers} layers",
                f"chunks of one layer, and {microbatches} such entries for a chunk that has any",
                "correct _order, or leave these entries out: each backward is then followed by its weight gradients",
            )
    firsts = [sum(layers[:c]) for c in range(chunks)]
    steps: list[tuple[str, int]] = []
    done: Counter[tuple[str, int]] = Counter()
    for entry in order:
        what = WEIGHTS if entry != math.floor(entry) else FORWARD if entry > 0 else BACKWARD
        chunk = abs(math.ceil(entry) if what == WEIGHTS else int(entry)) - 1
        microbatch = done[what, chunk]
        done[what, chunk] += 1
        before = {BACKWARD: FORWARD, WEIGHTS: BACKWARD}.get(what)
        if before is not None and microbatch >= done[before, chunk]:
            _refuse(order, f"the {what} of chunk {chunk + 1} before its {before}")
        begin = firsts[chunk] * microbatches + microbatch * layers[chunk]
        turn = range(begin, begin + layers[chunk])
        steps += [(what, i) for i in (turn if what == FORWARD else reversed(turn))]
    owners = [firsts[c] + i for c in range(chunks) for _ in range(microbatches) for i in range(layers[c])]
    return Schedule(tuple(owners), tuple(steps), bool(apart))


def _refuse(order: Any, what: str) -> None:
    raise wrong(
        f"_order={order!r}: {what}",
        "for each chunk (from 1) as many forwards c as backwards -c, each behind its forward, and as many for all",
        "correct _order",
    )


def _split(order: Any) -> tuple[list[int], list[float]]:
    """The whole entries, and the fractional ones."""
    known = isinstance(order, Sequence) and not isinstance(order, str) and len(order) > 0
    if not known or not all(isinstance(e, int | float) and not isinstance(e, bool) for e in order):
        _refuse(order, "not a list of chunk numbers")
    plain = [int(e) for e in order if e == math.floor(e)]
    apart = [float(e) for e in order if e != math.floor(e)]
    if 0 in plain or any(e % 1 != 0.5 or math.ceil(e) == 0 for e in apart):
        _refuse(order, "an entry that names no chunk")
    if not plain or max(plain) < 1 or max(map(abs, plain)) > max(plain):
        _refuse(order, "a backward without a forward")
    return plain, apart


def _layers(given: Any, chunks: int, modules: int) -> list[int]:
    """The number of layers of each chunk."""
    if given is None:
        count, rest = divmod(modules, chunks)
        layers = [count] * chunks if not rest else []
    else:
        layers = [given] * chunks if isinstance(given, int) else list(given)
    if len(layers) != chunks or sum(layers) != modules or min(layers, default=0) < 1:
        raise wrong(
            f"_num_layers_per_chunk={given!r} with {modules} modules in {chunks} chunks",
            "a number, or one for each chunk, that add up to the modules",
            "correct it, or leave it out where chunks are equal",
        )
    return layers
