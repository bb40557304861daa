"""Tensor and sequence parallelism: ranks with parts of a layer train as one process with the whole layer does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.covering import covering
from tests.parallel.ranks import Ranks
from tests.parallel.steps import same
from tests.parallel.tensor_steps import alone, cut_ends, cut_of, joined, part, trained
from tests.recipes import KINDS
from tests.tolerances import snr_db

#: dB that results agree to. Sums of bf16 parts, and FP8 scales of parts (an output gradient's columns, an input's).
AGREES = {None: 35.0, "delayed": 20.0, "current": 18.0, "block": 20.0, "mxfp8": 20.0, "nvfp4": 8.0}
ALIGNED, ODD = 128, 20  # rows of a sequence: parts of whole blocks, and parts of none

whole = cache(alone)


def compare(ranks: Ranks, kind: str, recipe: str | None, sequence: bool, rows: int = ALIGNED) -> None:
    """Run on the ranks and in one process, and compare all that can be."""
    found = ranks.run(trained, kind, recipe, sequence, rows)
    wanted, least = whole(kind, recipe, rows, ranks.device), AGREES[recipe]
    if recipe is not None and kind.endswith(("attention", "layer")):  # errors of several products add up
        least = max(least - 5, 8.0)
    vector = least if recipe is None else 4.0 if recipe == "nvfp4" else max(least - 8, 8.0)

    def agree(made: torch.Tensor, one: torch.Tensor, what: str) -> None:
        found = snr_db(made, one)
        assert made.shape == one.shape and found > (least if one.ndim > 1 else vector), f"{what}: {found:.1f} dB"

    def alike(parts: list[torch.Tensor], what: str) -> None:
        assert all(same(p, parts[0]) for p in parts), f"{what} differs from rank to rank"

    for name, end in zip(("dx", "y"), cut_ends(kind, sequence), strict=True):
        for step, one in enumerate(wanted[name]):
            parts = [f[name][step] for f in found]
            if end is None:
                alike(parts, name)
            agree(parts[0] if end is None else torch.cat(parts, end), one, f"{name} of step {step}")
    for name in wanted["weights"]:
        cut = cut_of(kind, name)
        if name.endswith("key_bias"):  # softmax does not change with it: its gradient is rounding
            continue
        for step, grads in enumerate(wanted["grads"]):
            agree(joined([f["grads"][step][name] for f in found], cut), grads[name], f"{name}'s gradient, {step}")
        parts = [f["weights"][name] for f in found]
        if cut is None:
            alike(parts, name)
        agree(joined(parts, cut), wanted["weights"][name], name)


@pytest.mark.four_ranks(recipe="delayed")
@pytest.mark.four_ranks(recipe="current")
@covering(recipe=[None, *KINDS], case=["column", "column sequence", "row", "row sequence"])
def test_a_linear(ranks: Ranks, case: str, recipe: str | None) -> None:
    kind, _, sequence = case.partition(" ")
    compare(ranks, kind, recipe, bool(sequence))


@covering(kind=["column", "row"], recipe=KINDS)
def test_parts_of_no_whole_blocks(ranks: Ranks, kind: str, recipe: str) -> None:
    compare(ranks, kind, recipe, True, ODD)


@pytest.mark.four_ranks(recipe="block", kind="layer")
@covering(recipe=[None, *KINDS], kind=["norm column", "mlp", "gated", "layer"], sequence=[False, True])
def test_layers(ranks: Ranks, kind: str, sequence: bool, recipe: str | None) -> None:
    compare(ranks, kind, recipe, sequence)


@covering(kind=["mlp again", "attention", "turned attention", "gated layer"], recipe=[None, "current", "block"])
def test_more_layers(ranks: Ranks, kind: str, recipe: str | None) -> None:
    compare(ranks, kind, recipe, True)


def test_joined_parts() -> None:
    """The helper of these tests puts together what it cuts."""
    t: Any = torch.arange(24.0).view(8, 3)
    for cut in ((0, 1), (0, 2), None):
        assert torch.equal(joined([part(t, cut, rank, 2) for rank in range(2)], cut), t)
