"""The newest results as Markdown: what `make docs` puts into docs/benchmarks.md.

    python -m benchmarks.report gemm        the table of one benchmark, and its picture in docs/benchmarks/

The same results give the same bytes. Results of a CPU are left out: they only show that a benchmark runs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks import harness
from benchmarks.catalogue import BENCHMARKS
from benchmarks.pictures import draw_record

PICTURES = harness.ROOT / "docs" / "benchmarks"


def newest(name: str, folder: Path = harness.RESULTS) -> Path | None:
    """The latest result of a benchmark on a GPU."""
    named = re.compile(rf"\d{{4}}-\d\d-\d\d-(?!cpu-).+-{name}(-\d+)?\.json")
    found = [path for path in folder.glob("*.json") if named.fullmatch(path.name)]
    return max(found, key=lambda path: (harness.read(path)["time"], path.name), default=None)


def markdown(rows: list[harness.Row], columns: tuple[str, ...]) -> str:
    """Rows as a table of Markdown."""
    kept = [c for c in (columns or harness.columns_of(rows)) if any(harness.cell(row.get(c)) for row in rows)]
    lines = [f"| {' | '.join(kept)} |", "|" + "---|" * len(kept)]
    lines += [f"| {' | '.join(harness.cell(row.get(c)) for c in kept)} |" for row in rows]
    return "\n".join(lines)


def section(name: str) -> str:
    """What is known of one benchmark."""
    path = newest(name)
    if path is None:
        return f"Not measured yet: `python -m benchmarks.run {name}` on a machine with a GPU."
    record = harness.read(path)
    about = ", ".join(f"{key} {value}" for key, value in record["about"].items() if key != "device")
    lines = [
        f"{record['about']['device']}, {record['time'][:10]}: {about}. All figures: "
        f"[{path.name}](../{path.relative_to(harness.ROOT).as_posix()}).",
        "",
        markdown(record["rows"], BENCHMARKS[name].columns),
    ]
    picture = PICTURES / f"{name}.svg"
    if draw_record(record, picture):
        lines += ["", f"![{name}]({picture.relative_to(PICTURES.parent).as_posix()})"]
    return "\n".join(lines)


def main() -> int:
    """Print the sections of the named benchmarks."""
    unknown = set(sys.argv[1:]) - set(BENCHMARKS)
    if unknown or len(sys.argv) < 2:
        sys.exit(f"report: name some of {', '.join(BENCHMARKS)}")
    print("\n\n".join(section(name) for name in sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
