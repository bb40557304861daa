"""Products that overlap as they do where nobody says a method, by the table that ships: see `benchmarks.overlap`."""

from __future__ import annotations

import sys

from benchmarks import harness, overlap, parallel


def measure() -> list[harness.Row]:
    """All sizes and recipes; none on a machine with fewer GPUs than ranks."""
    return overlap.of_ranks(cases)


def cases(kind: str) -> list[harness.Row]:
    """The rows, equal on all ranks but for traces."""
    rows: list[harness.Row] = []
    for size in overlap.SIZES[kind]:
        plain = {name: overlap.work_of(size, recipe, kind) for name, recipe in parallel.RECIPES.items()}
        with overlap.initialised(size, {}):
            rows += overlap.case(size, "default", {}, plain, kind, True)
    return rows


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["overlap_defaults", *sys.argv[1:]]))
