"""Compare the list of documented names with the reference it was taken from.

    python tools/documented_names.py REFERENCE/api.md            # names of the reference that no list holds; 1 if any
    python tools/documented_names.py REFERENCE/api.md --sections  # every word the reference marks as code, by section

`tests/data/documented_names.txt` lists the names by module; `tests/torch/test_compat_programs.py` asks for each of
them under the alias, or for its row in `te_torch/not_built.py`. `tests/data/not_names.txt` lists the words that the
reference marks as code, too, and that no program imports: options, values, fields of objects, names of other packages.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).parents[1] / "tests" / "data"
NAMES, WORDS = DATA / "documented_names.txt", DATA / "not_names.txt"


def marked(text: str) -> Iterator[tuple[str, str]]:
    """(section, what stands between two backticks), in the order of the reference."""
    section = "0"
    for line in text.splitlines():
        heading = re.match(r"#+ ([\d.]+)", line)
        section = heading.group(1).rstrip(".") if heading else section
        yield from ((section, span) for span in re.findall(r"`([^`]+)`", line))


def options(spans: list[str]) -> set[str]:
    """The names of the parameters of every signature."""
    inside = [call.group(1) for span in spans if (call := re.match(r"[\w.]*\((.*)\)", span))]
    return {name for one in inside for name in re.findall(r"(?:^|[,(\s*])([A-Za-z_]\w*)\s*(?=[=,:)]|$)", one)}


def documented(text: str) -> dict[str, str]:
    """Each name that may be one of a module or a class -> the section that marks it first."""
    pairs = list(marked(text))
    parameters = options([span for _, span in pairs])
    found: dict[str, str] = {}
    for section, span in pairs:
        for part in re.split(r"[,/] ?(?![^(]*\))", span):
            one = re.match(r"(?:\w+\.)*([A-Za-z_]\w*)(\(.*\))?$", part.strip())
            variable = one is None or one.group(1).startswith("NVTE") or one.group(1).isupper()
            if one is not None and not variable and one.group(1) not in parameters:
                found.setdefault(one.group(1), section)
    return found


def listed(path: Path) -> set[str]:
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    return set(re.findall(r"[A-Za-z_]\w*", "\n".join(lines)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reference", type=Path, help="the reference, a file of Markdown")
    parser.add_argument("--sections", action="store_true", help="show every word, not those alone that no list holds")
    given = parser.parse_args()
    known = set() if given.sections else listed(NAMES) | listed(WORDS)
    by_section: dict[str, list[str]] = {}
    for name, section in documented(given.reference.read_text()).items():
        if name not in known:
            by_section.setdefault(section, []).append(name)
    for section, names in by_section.items():
        print(f"{section}: {' '.join(names)}")
    missing = sum(map(len, by_section.values()))
    if missing and not given.sections:
        print(f"{missing} names: add each to {NAMES.name} (with a row in te_torch/not_built.py) or {WORDS.name}")
    return int(bool(missing) and not given.sections)


if __name__ == "__main__":
    sys.exit(main())
