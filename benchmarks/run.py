"""Runs benchmarks by name, one after another: a table each, a JSON file each, and a picture beside it.

python -m benchmarks.run gemm norms quantize modules attention attention_kernels training --out benchmarks/results
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.catalogue import BENCHMARKS
from benchmarks.pictures import draw_record


def run(name: str, folder: Path, commit: str) -> bool:
    """One benchmark; False if a figure missed its target (a measurement, not a failure)."""
    spec = BENCHMARKS[name]
    if not harness.gpu() and not spec.on_cpu:
        print(f"{name}: skipped, it measures a GPU and there is none", flush=True)
        return True
    if not harness.gpu():
        reduced = "" if spec.shows_cpu else "a reduced run on "
        print(f"{name}: no CUDA device; {reduced}the reference backend, whose times mean nothing", flush=True)
    start = time.perf_counter()
    module = importlib.import_module(f"benchmarks.{name}")
    rows: list[harness.Row] = [row for function in spec.functions for row in getattr(module, function)()]
    harness.free()
    path = harness.write(name, rows, folder, time.perf_counter() - start, commit)
    drawn = draw_record(harness.read(path), path.with_suffix(".png"))
    print(f"\n{name} on {harness.device_name()}, {time.perf_counter() - start:.0f} s\n")
    print(harness.table(rows, spec.columns))
    missed = [harness.label(row) for row in rows if row.get("ok") is False]
    if missed:
        print(f"\n{len(missed)} of {sum('ok' in row for row in rows)} targets missed: {'; '.join(missed)}")
    print(f"\nwritten: {path}{' and .png' if drawn else ' (no picture)'}\n", flush=True)
    return not missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was named; 1 if a benchmark broke. Missed targets are printed but are no failure, unless --strict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all if none is given")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the results (benchmarks/results)")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot tell")
    parser.add_argument("--strict", action="store_true", help="a missed target fails")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - set(BENCHMARKS)):
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    failed = False
    for name in given.names or BENCHMARKS:
        try:
            failed |= not run(name, given.out, given.commit) and given.strict
        except Exception:  # the others still run; this one is reported and fails the program
            traceback.print_exc()
            print(f"{name}: FAILED", flush=True)
            failed = True
        harness.free()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
