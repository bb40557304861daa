"""Tensor and sequence parallelism: ranks with parts of a layer train as one process with the whole layer does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.parallel.ranks import Ranks
from tests.parallel.tensor_steps import STEPS, alone, cut_ends, cut_of, joined, spread
from tests.recipes import KINDS
from tests.tolerances import snr_db

#: dB that results agree to. Sums of bf16 parts, and FP8 scales of parts (an output gradient's columns, an input's).
AGREES = {None: 38.0, "delayed": 20.0, "current": 20.0, "block": 20.0, "mxfp8": 20.0, "nvfp4": 6.0}
ALIGNED, ODD = 128, 20  # rows of a sequence: parts of whole blocks, and parts of none


@cache
def whole(kind: str, recipe: str | None, rows: int, device: str) -> dict[str, Any]:
    return alone(kind, recipe, rows, device)


def compare(ranks: Ranks, kind: str, recipe: str | None, sequence: bool, rows: int, **options: Any) -> list[Any]:
    """Run on the ranks and in one process, and compare all that can be."""
    found = ranks.run(spread, kind, recipe, sequence, rows, options)
    wanted, least = whole(kind, recipe, rows, ranks.device), AGREES[recipe]
    ends = cut_ends(kind, sequence)

    def agree(parts: list[torch.Tensor], dim: int | None, one: torch.Tensor, what: str) -> None:
        made = parts[0] if dim is None else torch.cat(parts, dim)
        if dim is None:
            assert all(torch.equal(p, parts[0]) for p in parts), f"{what} differs from rank to rank"
        assert made.shape == one.shape, what
        assert snr_db(made, one) > least, f"{what}: {snr_db(made, one):.1f} dB"

    for step in range(STEPS):
        agree([f["y"][step] for f in found], ends[1], wanted["y"][step], f"y of step {step}")
        agree([f["dx"][step] for f in found], ends[0], wanted["dx"][step], f"dx of step {step}")
        for name, one in wanted["grads"][step].items():
            made = joined([f["grads"][step][name] for f in found], cut_of(kind, name))
            assert snr_db(made, one) > least, f"gradient of {name}, step {step}: {snr_db(made, one):.1f} dB"
    for name, one in wanted["weights"].items():
        cut = cut_of(kind, name)
        parts = [f["weights"][name] for f in found]
        if cut is None:
            assert all(torch.equal(p, parts[0]) for p in parts), f"{name} differs from rank to rank"
        assert snr_db(joined(parts, cut), one) > least
    return found


@pytest.mark.parametrize("recipe", [None, *KINDS])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequences", "sequence parallel"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_linear(ranks: Ranks, kind: str, sequence: bool, recipe: str | None) -> None:
    compare(ranks, kind, recipe, sequence, ALIGNED)


@pytest.mark.parametrize("recipe", KINDS)
@pytest.mark.parametrize("kind", ["column", "row"])
def test_parts_of_no_whole_blocks(ranks: Ranks, kind: str, recipe: str) -> None:
    compare(ranks, kind, recipe, True, ODD)
