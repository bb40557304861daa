"""Fill the table of which method overlaps fastest from a record: `python -m benchmarks.overlap_table FILE ...`.

Of each size, recipe and carrier of a record of `overlap`: the ratio of each method to plain, from the fastest row that
contains it, so that the methods of the fastest row are chosen together. Entries of the same carrier and number of ranks
are replaced.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "te_core" / "overlap_speed.json"
_GATHER, _SUM, _DGRAD = ("gather", "ring_exchange"), ("sum", "ring_exchange"), ("dgrad", "ring_exchange")
_PIPELINE, _BULK = ("sum", "pipeline"), ("dgrad", "bulk")
#: What each method of `overlap` consists of.
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "gathers by ring_exchange": (_GATHER,),
    "sums by ring_exchange": (_SUM,),
    "sums by pipeline": (_PIPELINE,),
    "dgrad's sums by ring_exchange": (_DGRAD,),
    "bulk": (_BULK,),
    "rings, bulk": (_GATHER, _SUM, _BULK),
    "rings": (_GATHER, _SUM, _DGRAD),
    "ring": (_GATHER, _SUM, _BULK),
    "ring, and of dgrad": (_GATHER, _SUM, _DGRAD),
    "pipeline": (_GATHER, _PIPELINE, _BULK),
}


def entries(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The table's entries of a record."""
    found: dict[tuple[Any, ...], list[tuple[tuple[tuple[str, str], ...], float]]] = {}
    for row in record["rows"]:
        parts = PARTS.get(row.get("method", ""))
        if parts is not None:
            tokens, width, ranks = map(int, re.findall(r"\d+", row["case"]))
            key = row.get("carrier", "nccl"), ranks, row["recipe"], tokens, width
            found.setdefault(key, []).append((parts, row["of_plain"]))
    return [
        {
            **dict(zip(("carrier", "ranks", "recipe", "tokens", "width"), key, strict=True)),
            "device": record["about"]["device"],
            "of_plain": _ratios(rows),
        }
        for key, rows in found.items()
    ]


def _ratios(rows: list[tuple[tuple[tuple[str, str], ...], float]]) -> dict[str, dict[str, float]]:
    """By collective and method."""
    ratios: dict[str, dict[str, float]] = {}
    for collective, method in dict.fromkeys(part for parts, _ in rows for part in parts):
        fastest = min(ratio for parts, ratio in rows if (collective, method) in parts)
        ratios.setdefault(collective, {})[method] = round(fastest, 4)
    return ratios


def main(arguments: Sequence[str]) -> int:
    """Write the table."""
    table = json.loads(TABLE.read_text())
    for file in arguments:
        new = entries(json.loads(Path(file).read_text()))
        measured = {(entry["carrier"], entry["ranks"]) for entry in new}
        table["measured"] = [old for old in table["measured"] if (old["carrier"], old["ranks"]) not in measured] + new
    lines = ",\n    ".join(json.dumps(entry) for entry in table["measured"])
    TABLE.write_text(f'{{\n  "comment": {json.dumps(table["comment"])},\n  "measured": [\n    {lines}\n  ]\n}}\n')
    print(f"{len(table['measured'])} entries in {TABLE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
