"""Two trees of this project beside one another, in turns: what a change costs, where machines differ more than trees.

    git worktree add ../before SHA
    python -m benchmarks.beside ../before modules host --rounds 3 --out benchmarks/results

Each round runs the benchmark in the other tree and in this one, in a process of its own each; a figure is the median
of its rounds. `ratio` is this tree over the other (times and bytes: lower is better). `--minutes` ends a benchmark's
rounds in time: one that would not be over by then is not begun, and what was measured is written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.catalogue import BENCHMARKS

#: What a row is known by, and what of it is a figure to compare: a time, or bytes.
NAMES = ("case", "recipe", "shape", "mode", "dtype")
FIGURES = ("fwd us", "fwd+bwd us", "peak MiB", "of_linear fwd", "of_linear", "us", "seconds")
Figures = dict[tuple[str, ...], dict[str, list[float]]]


def rows_of(tree: Path, name: str) -> list[dict[str, Any]]:
    """One run of a benchmark in a tree."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(tree), str(tree / "bindings" / "jax"), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "benchmarks.run", name, "--out", folder]
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
        records = list(Path(folder).glob("*.json"))
        if done.returncode or len(records) != 1:
            sys.exit(f"beside: {name} in {tree} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        found: list[dict[str, Any]] = json.loads(records[0].read_text())["rows"]
        return found


def collect(into: Figures, rows: Sequence[dict[str, Any]]) -> None:
    """Add a round's figures."""
    for row in rows:
        known = into.setdefault(tuple(str(row[name]) for name in NAMES if row.get(name)), {})
        for figure in FIGURES:
            if isinstance(row.get(figure), (int, float)):
                known.setdefault(figure, []).append(row[figure])


def compared(before: Figures, now: Figures) -> list[harness.Row]:
    """A row for each figure that both trees have."""
    rows: list[harness.Row] = []
    for case in before:
        for figure, values in before[case].items():
            if values and (others := now.get(case, {}).get(figure)):
                was, is_now = statistics.median(values), statistics.median(others)
                ratio = is_now / was if was else None
                rows.append({"case": " | ".join(case), "figure": figure, "before": was, "now": is_now, "ratio": ratio})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, keep a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other tree")
    parser.add_argument("names", nargs="+", choices=sorted(BENCHMARKS), help="benchmarks")
    parser.add_argument("--rounds", type=int, default=3, help="runs in each tree")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for each benchmark")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder of the results")
    parser.add_argument("--commit", default="", help="what is compared, where git cannot tell: BEFORE..NOW")
    given = parser.parse_args(arguments)
    if not (given.other / "benchmarks" / "run.py").is_file():
        parser.error(f"{given.other} is no tree of this project: it has no benchmarks/run.py")
    if given.rounds < 1 or not given.minutes > 0:
        parser.error(f"got --rounds {given.rounds}, --minutes {given.minutes}. Allowed: 1 or more, more than 0")
    rows: list[harness.Row] = []
    for name in given.names:
        before: Figures = {}
        now: Figures = {}
        began = time.monotonic()
        for i in range(given.rounds):
            for tree, figures in ((given.other.resolve(), before), (harness.ROOT, now)):
                print(f"{name}, round {i + 1} of {given.rounds}: {tree}", flush=True)
                collect(figures, rows_of(tree, name))
            if (time.monotonic() - began) * (i + 2) / (i + 1) > given.minutes * 60:
                print(f"{name}: ended after {i + 1} of {given.rounds} rounds, for want of time", flush=True)
                break
        rows += [{"benchmark": name, "rounds": i + 1, **row} for row in compared(before, now)]
    print(f"\n{harness.table(rows)}\n")
    path = harness.write_record("beside", {"rounds": given.rounds, "rows": rows}, given.out, given.commit)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
