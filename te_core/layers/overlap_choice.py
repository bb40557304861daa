"""By which method a GEMM overlaps where nobody says: the fastest one of those that were measured.

`te_core/overlap_speed.json` has steps of a layer whose GEMMs overlap, as ratios to plain ones, by what carries the
transfers, the number of ranks, the recipe and the sizes of a whole tensor; `python -m benchmarks.overlap_table` fills
it. A call goes by the entry that is nearest to it. Where that entry has no figure of a method, and all other methods
are slower than plain there, the method counts as slower, too. A call much smaller than all entries runs plain: a
product in parts takes longer than a whole one where neither fills a GPU.
"""

from __future__ import annotations

import json
from functools import cache
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from te_core.precision import Precision

MEASURED = "cuda"  # the kind of device that the entries are of: on others the defaults stand
#: How many times fewer elements than the smallest entry a call may have.
_SMALLER = 4


class Call(NamedTuple):
    """What the choice of a method depends on."""

    carrier: str  # "nccl" or "peer memory"
    ranks: int
    recipe: str
    tokens: int  # of the whole tensor that travels,
    width: int  # and its other size


def recipe_of(precision: Precision | None) -> str:
    """By which of the measured recipes a call goes."""
    if precision is None:
        return "bf16"
    rule = precision.input
    return "delayed" if rule is not None and rule.scaling == "delayed" else "current"


@cache
def measured() -> list[dict[str, Any]]:
    """The entries that ship."""
    found: dict[str, Any] = json.loads((Path(__file__).parents[1] / "overlap_speed.json").read_text())
    return list(found["measured"])


def fastest(collective: str, methods: tuple[str, ...], call: Call) -> tuple[str, str]:
    """(the method, why it is none). `collective`: "gather" of an operand, "sum" of forward, "dgrad": what overlaps
    there in a column-parallel weight. Of `methods` the first is taken where nothing was measured."""
    asked = call.carrier, call.recipe
    entries = [entry for entry in measured() if (entry["carrier"], entry["recipe"]) == asked]
    if not entries:
        return methods[0], ""
    size = call.tokens * call.width
    if size * _SMALLER < min(entry["tokens"] * entry["width"] for entry in entries):
        return "", f"{call.tokens} x {call.width} elements are too few: no call so small was measured faster in parts"

    def apart(entry: dict[str, Any]) -> float:
        names = ("ranks", "tokens", "width")
        return sum((log2(entry[name]) - log2(getattr(call, name))) ** 2 for name in names)

    for entry in sorted(entries, key=apart):
        of_plain: dict[str, dict[str, float]] = entry["of_plain"]
        found = [(ratio, name) for name, ratio in of_plain.get(collective, {}).items() if name in methods]
        ratio, method = min(found, default=(0.0, ""))
        if method and ratio < 1:
            return method, ""
        if method or all(other >= 1 for ratios in of_plain.values() for other in ratios.values()):
            at = f"{entry['tokens']} x {entry['width']} elements in {entry['recipe']} over {entry['ranks']} ranks"
            return "", f"plain was measured faster, of {at}, by {call.carrier}"
    return methods[0], ""
