"""Random sequences of calls of a module and of changes between them, run twice: interpreted, and as users run them.

    python -m tests.torch.sequences 5000                    # --seed FIRST
    python -m tests.torch.sequences 5000 --wants            # those of tests/torch/sequence_wants.py
    python -m tests.torch.sequences 1 --seed 1234 --verbose

What a module keeps of its calls (recordings, plans) must not show: after each step results, gradients, scales and
histories, what hooks saw, and errors are the same in both runs, bit for bit. A sequence that differs is made as short
as it will still differ, and printed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from tests.layer_draws import backends
from tests.recordings import tapes
from tests.torch import sequence_changes, sequence_options, sequence_wants
from tests.torch.sequence_options import Sequence
from tests.torch.sequence_world import LOG, Record, World


class Difference(NamedTuple):
    """Where the two runs differ first."""

    step: int
    names: tuple[str, ...]  # of what differs
    said: str

    @property
    def kind(self) -> str:
        """What two differences of one fault have in common."""
        return "errors" if any("error" in name for name in self.names) else "values"

    def __str__(self) -> str:
        return f"step {self.step}: {self.said}"


def draw(seed: int) -> Sequence:
    """The sequence of this seed."""
    changes = {name: (c.often, c.options) for name, c in sequence_changes.CHANGES.items()}
    return sequence_options.draw(seed, changes)


# ------------------------------------------------------------------------------------------------ running


def run(sequence: Sequence, setting: str) -> tuple[list[Record], int]:
    """(what can be seen after each step, how many calls of layers were replayed)."""
    LOG.clear()
    records: list[Record] = []
    with _left_as_it_was(), tapes(setting) as ran, warnings.catch_warnings(), backends(sequence.module):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(sequence.seed)
        world = World(sequence, setting == "never")
        try:
            for name, options in sequence.steps:
                record: Record = {}
                records.append(record)
                if name == "call":
                    world.call(record, options)
                else:
                    sequence_changes.apply(world, record, name, options)
                    record |= world.state()
                if world.ended:
                    break
        finally:
            for handle in world.handles:
                handle.remove()
    return records, ran.replayed


@contextlib.contextmanager
def _left_as_it_was() -> Iterator[None]:
    try:
        yield
    finally:
        LOG.clear()
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)


def difference(sequence: Sequence) -> tuple[Difference | None, int, int]:
    """(where the runs differ, replayed calls, errors that both raised)."""
    wanted, _ = run(sequence, "never")
    got, replayed = run(sequence, sequence.when)
    errors = sum("error" in name for record in wanted for name in record)
    for step, (a, b) in enumerate(zip(wanted, got, strict=False)):
        names = tuple(name for name in {**a, **b} if a.get(name, a) != b.get(name, b))
        if names:
            return Difference(step, names, _said(names, a, b)), replayed, errors
    if len(wanted) != len(got):
        return Difference(min(len(wanted), len(got)), ("error",), "one run ended"), replayed, errors
    return None, replayed, errors


def _said(names: tuple[str, ...], a: Record, b: Record) -> str:
    errors = [f"{n}: interpreted {a.get(n, 'none')!r}, recorded {b.get(n, 'none')!r}" for n in names if "error" in n]
    others = [n for n in names if "error" not in n]
    return "; ".join([*errors, f"{len(others)} differ: {', '.join(others[:6])}"])[:1500]


# ------------------------------------------------------------------------------------------------ making it short


def shortened(sequence: Sequence, kind: str, limit: float = 60.0) -> Sequence:
    """The shortest sequence that still differs in this kind of way, as far as one change at a time finds it."""
    end = time.monotonic() + limit

    def differs(candidate: Sequence) -> bool:
        try:
            found = difference(candidate)[0]
        except Exception:  # it cannot be made so
            return False
        return found is not None and found.kind == kind

    again = True
    while again and time.monotonic() < end:
        again = False
        for candidate in _shorter(sequence):
            if time.monotonic() > end:
                break
            if differs(candidate):
                sequence, again = candidate, True
                break
    return sequence


def _shorter(s: Sequence) -> Iterator[Sequence]:
    """Sequences that say a little less."""
    for i in reversed(range(len(s.steps))):
        yield replace(s, steps=s.steps[:i] + s.steps[i + 1 :])
    for i, (name, options) in enumerate(s.steps):
        for option in options:
            less = {n: v for n, v in options.items() if n != option}
            yield replace(s, steps=(*s.steps[:i], (name, less), *s.steps[i + 1 :]))
        if options.get("times", 1) > 2:
            yield replace(s, steps=(*s.steps[:i], (name, {**options, "times": 2}), *s.steps[i + 1 :]))
    for part in ("layer", "call", "way"):
        given = getattr(s.module, part)
        for option in given:
            yield replace(s, module=replace(s.module, **{part: {n: v for n, v in given.items() if n != option}}))
    for i, (name, options) in enumerate(s.recipes):
        for option in options:
            less = {n: v for n, v in options.items() if n != option}
            yield replace(s, recipes=(*s.recipes[:i], (name, less), *s.recipes[i + 1 :]))


# ------------------------------------------------------------------------------------------------ many of them


class Tally:
    """What came of many sequences."""

    def __init__(self, limit: float = 60.0, of: Callable[[int], Sequence] = draw) -> None:
        self.of = of  # draws the sequence of a seed
        self.limit = limit  # seconds that may be spent on making one shorter
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def run(self, seed: int) -> None:
        """Draw one, and note what came of it."""
        sequence = self.of(seed)
        try:
            found, replayed, errors = difference(sequence)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            self.counts["cannot be made"] += 1
            self.counts[f"  {type(error).__name__}: {str(error)[:100]} ({at.filename.split('/')[-1]}:{at.lineno})"] += 1
            return
        self.counts["sequences"] += 1
        self.counts["steps"] += len(sequence.steps)
        self.counts["replayed calls"] += replayed
        self.counts["sequences that replay"] += bool(replayed)
        self.counts["errors in both runs"] += errors
        if found is None:
            return
        less = shortened(sequence, found.kind, self.limit)
        self.faults.append(f"{less}\n  {difference(less)[0] or f'not again; at first {found}'}\n  {less!r}")

    def __str__(self) -> str:
        return "\n".join([*self.faults, *(f"{n:7} {what}" for what, n in self.counts.items())])


def main() -> int:
    """Draw, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0, metavar="FIRST")
    parser.add_argument("--wants", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    tally, began = Tally(of=sequence_wants.draw if options.wants else draw), time.perf_counter()
    for i in range(options.count):
        if options.verbose:
            print(tally.of(options.seed + i), flush=True)
        before = len(tally.faults)
        tally.run(options.seed + i)
        if len(tally.faults) > before:
            print(tally.faults[-1], flush=True)
        if i % 200 == 199:
            gc.collect()
            print(f"{i + 1} in {time.perf_counter() - began:.0f} s, {len(tally.faults)} differ", flush=True)
    print(tally)
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
