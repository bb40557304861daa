"""A long training over packed sequences of ever changing lengths: whether it holds its memory.

A small model (TransformerLayer, LayerNormMLP, GroupedLinear) takes steps of AdamW for half an hour, in delayed,
current and block scaling in turns; calls are recorded as TE_CORE_TAPES says (by default when their shapes are met
again). Some sets of lengths come again, so that there are replays; the others are new each time, so that every cache
that is kept by sizes fills up and has to let go. What the process holds (Linux), what torch's allocator holds on a GPU
and how many blocks of memory Python has are read between two steps. Caches fill during the first third. From then on
memory is flat: the median of the last third is at most 3 % above that of the middle one, in each of these figures.

    ENDURANCE_SECONDS=300 python -m benchmarks.run endurance      a shorter one, as an environment variable says

On a CPU it computes with one thread. Its figures are of memory, so they mean something there, too.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import te_torch as te
from benchmarks import harness
from benchmarks.modules import RECIPES
from te_core.tape import taped

SECONDS = 1800
SAMPLES = 180  # readings, spread evenly over the time
LINES = 30  # of them so many are printed
TURN = 8  # steps of one recipe in a row
IN_TURNS = ("delayed", "current", "block")
HIDDEN, HEADS, EXPERTS = 32, 2, 3
LONGEST, MOST = 48, 5  # tokens of a sequence, sequences of a step
COMMON, HOW_OFTEN = 24, 0.7  # sets of lengths that come again, and in which share of the steps
WITHIN = 1.03
#: What is read between steps, in the order of the record's columns. All but the last are judged.
READ = ("resident MiB", "torch MiB", "reserved MiB", "Python blocks", "tapes")


class Model(torch.nn.Module):
    """A layer of attention, an MLP, and experts."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        place: Any = {"device": device, "params_dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
        self.layer = te.TransformerLayer(
            HIDDEN,
            2 * HIDDEN,
            HEADS,
            attn_input_format="thd",
            self_attn_mask_type="padding_causal",
            fuse_qkv_params=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **place,
        )
        self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", normalization="RMSNorm", **place)
        self.experts = te.GroupedLinear(EXPERTS, HIDDEN, HIDDEN, **place)

    def forward(self, x: torch.Tensor, lengths: Sequence[int], splits: Sequence[int]) -> torch.Tensor:
        """[tokens, HIDDEN], as given."""
        ends = torch.tensor([0, *lengths], device=x.device).cumsum(0).int()
        sizes: Any = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        sizes |= {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
        x = self.layer(x, **sizes)
        x = x + self.mlp(x)
        result: torch.Tensor = x + self.experts(x, list(splits))
        return result


class Lengths:
    """Sets of lengths of sequences: of a few that come again, and new ones."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._common = [self._new() for _ in range(COMMON)]

    def _new(self) -> list[int]:
        return [self._draw.randint(1, LONGEST) for _ in range(self._draw.randint(1, MOST))]

    def next(self) -> tuple[list[int], list[int]]:
        """(lengths of a step, and how many of its tokens go to each expert)."""
        lengths = self._draw.choice(self._common) if self._draw.random() < HOW_OFTEN else self._new()
        cuts = sorted(self._draw.randint(0, sum(lengths)) for _ in range(EXPERTS - 1))
        return lengths, [b - a for a, b in zip([0, *cuts], [*cuts, sum(lengths)], strict=True)]


class Training:
    """The model, its optimizer, and steps of them."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.steps, self.losses = device, 0, [0.0]
        self.model, self.lengths = Model(device), Lengths()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.dtype = next(self.model.parameters()).dtype

    def step(self) -> None:
        """One, of data that are drawn anew: to give each token back half as large."""
        recipe = RECIPES[IN_TURNS[self.steps // TURN % len(IN_TURNS)]]
        lengths, splits = self.lengths.next()
        x = torch.randn(sum(lengths), HIDDEN, device=self.device, dtype=self.dtype)
        with te.autocast(recipe=recipe):
            y = self.model(x, lengths, splits)
        loss = (y - x / 2).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses[0] = loss.item()
        self.steps += 1


def resident_mib() -> float:
    """What the process holds of the machine's memory; nan where there is no such file."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return float("nan")
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def read() -> dict[str, float]:
    """What is held now."""
    mib = [float("nan")] * 2
    if harness.gpu():
        mib = [n / 2**20 for n in (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())]
    return dict(zip(READ, (resident_mib(), *mib, sys.getallocatedblocks(), len(taped.tapes())), strict=True))


@contextmanager
def one_thread() -> Iterator[None]:
    """On a CPU: other threads would gain nothing from tensors so small."""
    before = torch.get_num_threads()
    if not harness.gpu():
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sampled(training: Any, seconds: float) -> list[harness.Row]:
    """Steps for so long, and readings between them, of which some are printed."""
    found: list[harness.Row] = []
    begin = time.perf_counter()
    while len(found) < SAMPLES:
        training.step()
        if (now := time.perf_counter() - begin) < seconds * (len(found) + 1) / SAMPLES:
            continue
        if not math.isfinite(training.losses[0]):
            raise ArithmeticError(f"the loss is {training.losses[0]} after {training.steps} steps")
        found.append({"minutes": now / 60, "steps": training.steps, **read()})
        if len(found) % max(1, SAMPLES // LINES) == 0:
            figures = ", ".join(f"{key} {harness.cell(value)}" for key, value in found[-1].items() if value == value)
            print(f"{figures}, loss {training.losses[0]:.4f}; {taped.COUNTS.share:.0%} replayed", flush=True)
    return found


def thirds(samples: Sequence[harness.Row]) -> list[harness.Row]:
    """The medians of each third, and of each figure whether it is flat."""
    size = len(samples) // 3
    parts = {"first third": samples[:size], "middle third": samples[size:-size], "last third": samples[-size:]}
    rows: list[harness.Row] = [
        {"case": name, "steps": part[-1]["steps"]} | {key: statistics.median(s[key] for s in part) for key in READ}
        for name, part in parts.items()
    ]
    judged = [key for key in READ[:-1] if rows[1][key] == rows[1][key]]
    growth = max(rows[2][key] / max(rows[1][key], 1e-9) for key in judged)
    rows[2] |= {"of_middle": growth, "target": WITHIN, "ok": growth <= WITHIN}
    return rows


def measure(seconds: float | None = None) -> list[harness.Row]:
    """The training, a row for each third; all readings are in the last one."""
    seconds = float(os.environ.get("ENDURANCE_SECONDS", SECONDS)) if seconds is None else seconds
    before = taped.Counts(taped.COUNTS.replayed, taped.COUNTS.recorded, taped.COUNTS.interpreted.copy())
    with one_thread():
        samples = sampled(Training(harness.device()), seconds)
    ran = taped.Counts(taped.COUNTS.replayed - before.replayed, 0, taped.COUNTS.interpreted - before.interpreted)
    rows = thirds(samples)
    rows[-1] |= {
        "share": ran.share,
        "reasons": "; ".join(f"{n} not: {why}" for why, n in ran.interpreted.most_common()),
    }
    rows[-1]["samples"] = {key: [sample[key] for sample in samples] for key in samples[0]}
    return rows


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["endurance", *sys.argv[1:]]))
