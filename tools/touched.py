"""Which cases enter the functions that a change touches: for `make quick`, as `make quick-map` has recorded it.

As a plugin (`-p tools.touched`) it records for each function of the project the MOST cases that enter it and the fewest
others, into build/touched, a file for each test process. As a program it prints these cases for what differs from main
(or from the revision that it is given) in the working tree: the nearest of each function first, as many as SECONDS
allow; and the test files that have changed, which are all where nothing was recorded.

What runs in other processes (ranks, programs in C) is not seen: `make test` has the last word.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

FOLDER, MOST, SECONDS = Path("build/touched"), 24, 100.0
Case = tuple[int, float, str]  # how many functions it enters, its seconds, its name


class _Recorder:
    def __init__(self, root: Path) -> None:
        self.root, self.cases = root, defaultdict[str, list[Case]](list)
        self._keys: dict[Any, str] = {}

    def key(self, code: Any) -> str:
        """Its file and name; "" outside of the project, and of tests themselves."""
        path = Path(code.co_filename)
        if (
            not path.is_relative_to(self.root)
            or path.is_relative_to(self.root / ".venv")
            or path.name.startswith("test_")
        ):
            return ""
        return f"{path.relative_to(self.root)}:{code.co_name}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        codes: set[Any] = set()
        seen = lambda frame, event, _: codes.add(frame.f_code) if event == "call" else None  # noqa: E731
        begin = time.perf_counter()
        threading.setprofile(seen)
        sys.setprofile(seen)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self._keys |= {code: self.key(code) for code in codes - self._keys.keys()}
            found = {self._keys[code] for code in codes} - {""}
            for name in found:
                cases = self.cases[name]
                cases.append((len(found), round(time.perf_counter() - begin, 3), item.nodeid))
                if len(cases) > 2 * MOST:
                    cases[:] = sorted(cases)[:MOST]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        (self.root / FOLDER).mkdir(parents=True, exist_ok=True)
        process = getattr(session.config, "workerinput", {}).get("workerid", "main")
        if self.cases:
            (self.root / FOLDER / f"{process}.json").write_text(json.dumps(self.cases))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(config.rootpath))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def changed(base: str) -> dict[str, set[int]]:
    """The lines that differ, by file."""
    found: dict[str, set[int]] = {path: {1} for path in _git("ls-files", "-o", "--exclude-standard").splitlines()}
    path = ""
    for line in _git("diff", "--unified=0", "--no-renames", "--relative", base).splitlines():
        path = line[6:] if line.startswith("+++ b/") else path
        if span := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            found.setdefault(path, set()).update(range(int(span[1]), int(span[1]) + max(1, int(span[2] or 1))))
    return found


def names_of_lines(path: str) -> dict[int, str | None]:
    """The innermost function of each line (of tests the outermost); imports are of none."""
    named: dict[int, str | None] = {}
    for node in ast.walk(ast.parse(Path(path).read_text())):  # from the outside in
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)):
            found = dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), getattr(node, "name", None))
            named = found | named if Path(path).name.startswith("test_") else named | found
    return named


def functions(path: str, lines: set[int]) -> list[str]:
    """The innermost functions that have these lines (of tests the outermost), and "" for others, but for imports."""
    named = names_of_lines(path)
    return [name for name in dict.fromkeys(named.get(line, "") for line in sorted(lines)) if name is not None]


def recorded() -> defaultdict[str, list[Case]]:
    """The recorded cases of each function, "file:name"."""
    known: defaultdict[str, list[Case]] = defaultdict(list)
    for file in FOLDER.glob("*.json"):
        for name, cases in json.loads(file.read_text()).items():
            known[name] += map(tuple, cases)
    return known


def picked(base: str) -> list[str]:
    """Files of tests, tests, and cases."""
    known = recorded()
    for name in [*known]:
        known[name.partition(":")[0] + ":"].append(min(known[name]))
    found: dict[str, None] = {}
    of_functions = []
    for path, lines in changed(base).items():
        if not path.endswith(".py") or not Path(path).exists():
            continue
        for name in functions(path, lines):
            if Path(path).name.startswith("test_"):
                found[f"{path}::{name}" if name.startswith("test_") else path] = None
            else:
                of_functions.append(sorted(known.get(f"{path}:{name}") or known[f"{path}:"]))
    left = SECONDS
    for case in (case for nearest in zip_longest(*of_functions) for case in nearest if case is not None):
        if case[2] not in found and left > case[1]:
            left -= case[1]
            found[case[2]] = None
    return list(found)


def main(arguments: list[str]) -> int:
    """Print them."""
    heads = _git("branch", "--list", "main", "--format=%(refname)").split()
    base = arguments[0] if arguments else _git("merge-base", "HEAD", *heads or ["HEAD"]).strip()
    print(*picked(base), sep="\n")
    if not FOLDER.exists():
        print(
            "no recording: the tests that have changed, and none for what they enter (make quick-map)", file=sys.stderr
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
