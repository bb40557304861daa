"""The newest results as Markdown: what `make docs` puts into docs/benchmarks.md.

    python -m benchmarks.report gemm        the table of one benchmark, and its picture in docs/benchmarks/
    python -m benchmarks.report beside      two trees, before and after a change, of all that was run of them
    python -m benchmarks.report dates       all records, by day

The same results give the same bytes. Results of a CPU are left out, as most of them only show that a benchmark runs;
those that mean something are taken where there are none of a GPU.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.beside import FIGURES
from benchmarks.catalogue import BENCHMARKS
from benchmarks.pictures import draw_record

PICTURES = harness.ROOT / "docs" / "benchmarks"


def by_age(name: str, folder: Path = harness.RESULTS) -> list[Path]:
    """The results of a benchmark on a GPU, the latest last; a CPU's, where they are shown, before them."""
    named = re.compile(rf"\d{{4}}-\d\d-\d\d-(cpu|.+)-{name}(-\d+)?\.json")
    found = []
    for path in folder.glob("*.json"):
        match = named.fullmatch(path.name)
        if match and (match[1] != "cpu" or (name in BENCHMARKS and BENCHMARKS[name].shows_cpu)):
            found.append((match[1] != "cpu", harness.read(path)["time"], path.name, path))
    return [path for *_, path in sorted(found)]


def markdown(rows: list[harness.Row], columns: tuple[str, ...]) -> str:
    """Rows as a table of Markdown."""
    kept = [c for c in (columns or harness.columns_of(rows)) if any(harness.cell(row.get(c)) for row in rows)]
    lines = [f"| {' | '.join(kept)} |", "|" + "---|" * len(kept)]
    lines += [f"| {' | '.join(harness.cell(row.get(c)) for c in kept)} |" for row in rows]
    return "\n".join(lines)


def introduction(record: dict[str, Any], paths: list[Path]) -> str:
    """Where and when it was measured, and the files of all figures."""
    about = ", ".join(f"{key} {value}" for key, value in record["about"].items() if key != "device")
    files = ", ".join(f"[{path.name}](../{path.relative_to(harness.ROOT).as_posix()})" for path in paths)
    return f"{record['about']['device']}, {record['time'][:10]}: {about}. All figures: {files}."


def changes(paths: list[Path]) -> str:
    """The records of `benchmarks.beside` that set out from the same tree as the latest: a row for each case.

    A figure that was taken again, of a later tree, is the later one.
    """
    records = {path: harness.read(path) for path in paths}
    if not records:
        return "Not measured yet: `python -m benchmarks.beside TREE modules` on a machine with a GPU."
    last = records[paths[-1]]
    before = [str(records[path]["about"].get("commit")).split("..")[0] for path in paths]
    same = [path for path, tree in zip(paths, before, strict=True) if tree == before[-1]]
    rows: dict[str, harness.Row] = {}
    for row in (row for path in same for row in records[path]["rows"]):
        shown = f"{harness.cell(row['before'])} -> {harness.cell(row['now'])} ({row['ratio']:.2f})"
        rows.setdefault(row["case"], {"case": row["case"].replace(" | ", ", ")})[row["figure"]] = shown
    return "\n\n".join([introduction(last, same), markdown(list(rows.values()), ("case", *FIGURES))])


def section(name: str) -> str:
    """What is known of one benchmark."""
    paths = by_age(name)
    if not paths:
        return f"Not measured yet: `python -m benchmarks.run {name}` on a machine with a GPU."
    record = harness.read(paths[-1])
    lines = [introduction(record, paths[-1:]), "", markdown(record["rows"], BENCHMARKS[name].columns)]
    picture = PICTURES / f"{name}.svg"
    if draw_record(record, picture):
        lines += ["", f"![{name}]({picture.relative_to(PICTURES.parent).as_posix()})"]
    return "\n".join(lines)


def dates(folder: Path = harness.RESULTS) -> str:
    """A row for each day, the newest first, with links to its records."""
    days: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.json")):
        day, name = path.stem[:10], path.stem[11:]
        days.setdefault(day, []).append(f"[{name}](../{path.relative_to(harness.ROOT).as_posix()})")
    rows = [f"| {day} | {', '.join(days[day])} |" for day in sorted(days, reverse=True)]
    return "\n".join(["| day | records |", "|---|---|", *rows])


def main() -> int:
    """Print the sections of the named benchmarks."""
    others = {"beside": lambda: changes(by_age("beside")), "dates": dates}
    unknown = set(sys.argv[1:]) - {*BENCHMARKS, *others}
    if unknown or len(sys.argv) < 2:
        sys.exit(f"report: name some of {', '.join([*BENCHMARKS, *others])}")
    print("\n\n".join(others[name]() if name in others else section(name) for name in sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
