"""Apply named faults to a copy of the tree, one at a time, and see that the tests notice each.

tests/mutants.toml lists the faults; build/mutants.md gets the table. A fault whose tests still pass has
survived: the run fails. So does one that cannot be judged: its text is not there exactly once, its tests fail
without it, this machine skips them all, or they cannot even be collected with it. A crash or a hang counts as
noticed.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.toml"
TABLE = ROOT / "build" / "mutants.md"
SKIP = shutil.ignore_patterns(
    ".git", ".venv", ".whl", "build", "results", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
TIMEOUT = 600  # seconds for one fault's tests; one that hangs them has been noticed

PASSED, FAILED, NONE_RAN = 0, 1, 5  # pytest's exit codes


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` becomes `new` in `file`, and one of `tests` (pytest arguments) has to fail."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    cuda: bool = False

    @property
    def key(self) -> str:
        """Changes with the fault, so that a row of the table can be told to be out of date."""
        parts = "\0".join([self.file, self.old, self.new, *self.tests])
        return hashlib.sha256(parts.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Verdict:
    """What became of a fault: `caught` by a test, `survived`, or `error`: why it cannot be judged."""

    state: str
    detail: str


def load(path: Path = LIST) -> list[Mutant]:
    """The listed faults."""
    entries = tomllib.loads(path.read_text())["mutant"]
    found = [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    names = [m.name for m in found]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        sys.exit(f"mutants: these names are given twice: {', '.join(twice)}")
    return found


def run_tests(tree: Path, tests: tuple[str, ...], cuda: bool) -> tuple[int, str]:
    """pytest's exit code and the first test that failed (or the end of the output)."""
    # No bytecode: a fault of equal length within the same second would be hidden by a cached module.
    paths = [str(tree), str(tree / "bindings" / "jax"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    command += [*tests, *["--require-cuda"] * cuda]
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return FAILED, "the time limit"
    if done.returncode == PASSED and not re.search(r"\b\d+ passed", done.stdout):
        reasons = re.findall(r"^SKIPPED \[\d+\] (.*)$", done.stdout, re.MULTILINE)
        return NONE_RAN, ", ".join(reasons) or "all are skipped"
    found = re.search(r"^(?:FAILED|ERROR) (\S+::\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, found[1] if found else "\n".join((done.stdout + done.stderr).splitlines()[-5:])


def judge(mutant: Mutant, tree: Path) -> Verdict:
    """Apply one fault to a tree, run its tests, take it back."""
    path = tree / mutant.file
    text = path.read_text() if path.is_file() else ""
    if text.count(mutant.old) != 1:
        return Verdict("error", f"its old text stands {text.count(mutant.old)} times in {mutant.file}, not once")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        code, detail = run_tests(tree, mutant.tests, mutant.cuda)
    finally:
        path.write_text(text)
    if code == PASSED:
        return Verdict("survived", "")
    if code == FAILED:
        return Verdict("caught", detail)
    if code < 0:
        return Verdict("caught", f"a crash, signal {-code}")
    return Verdict("error", f"pytest ended with {code}: {detail}")


def judge_all(mutants: list[Mutant], jobs: int, keep: Callable[[dict[str, Verdict]], None]) -> dict[str, Verdict]:
    """Every fault, in as many copies of the tree as jobs; a selection must pass before a fault counts. `keep` is given
    what is known after each, so that a run that is cut short was not for nothing.
    """
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(jobs):
            trees.put(Path(shutil.copytree(ROOT, Path(folder) / str(i), ignore=SKIP)))

        def in_a_tree(work):  # type: ignore[no-untyped-def]
            tree = trees.get()
            try:
                return work(tree)
            finally:
                trees.put(tree)

        def one(mutant: Mutant) -> tuple[Mutant, Verdict, float]:
            start = time.perf_counter()
            code, detail = healthy[mutant.tests, mutant.cuda]
            if code != PASSED:
                why = "none of its tests runs here" if code == NONE_RAN else "its tests fail without it"
                return mutant, Verdict("error", f"{why}: {detail}"), 0.0
            return mutant, in_a_tree(lambda tree: judge(mutant, tree)), time.perf_counter() - start

        with ThreadPoolExecutor(jobs) as pool:
            selections = sorted({(m.tests, m.cuda) for m in mutants})
            results = pool.map(lambda s: in_a_tree(lambda tree: run_tests(tree, *s)), selections)
            healthy = dict(zip(selections, results, strict=True))
            for mutant, verdict, seconds in pool.map(one, mutants):
                print(f"{verdict.state:<9} {mutant.name} ({seconds:.0f} s) {verdict.detail}", flush=True)
                verdicts[mutant.name] = verdict
                keep(verdicts)
    return verdicts


HEAD = """# Faults that the tests notice

Written by `make mutants` from `tests/mutants.toml`: each fault was put into the source, the named tests were
run, and the test in the last column failed. Faults of CUDA code are judged on a GPU machine
(`tools/mutants.py --cuda`); their rows are kept from that run as long as the fault stays as it was (`key`), and say
"on CUDA only" where there was none yet.

| fault | what it breaks | in | key | caught by |
|---|---|---|---|---|
"""


def write_table(mutants: list[Mutant], verdicts: dict[str, Verdict], table: Path, old: str) -> None:
    """The table of all listed faults; rows of `old` of faults not judged now are kept if the fault is unchanged."""
    rows = []
    for m in mutants:
        start = f"| {m.name} | {m.breaks} | `{m.file}` | {m.key} | "
        kept = re.search(rf"^{re.escape(start)}(.*) \|$", old, re.MULTILINE)
        verdict = verdicts.get(m.name)
        if verdict is None:
            shown = kept[1] if kept else "on CUDA only" if m.cuda else "**not judged yet**"
        elif verdict.state == "caught":
            shown = f"`{verdict.detail}`".replace("|", "\\|")
        else:
            shown = f"**{verdict.state}**"
        rows.append(f"{start}{shown} |\n")
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(HEAD + "".join(rows))


def main() -> int:
    """Judge the chosen faults; 0 if every one was caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names or patterns such as 'gemm-*' (default: all)")
    parser.add_argument("--cuda", action="store_true", help="judge those that need CUDA, not the others")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--table", type=Path, default=TABLE, help="where the table goes")
    given = parser.parse_args()
    mutants = load()
    chosen = [
        m
        for m in mutants
        if m.cuda == given.cuda and (not given.names or any(fnmatch.fnmatch(m.name, n) for n in given.names))
    ]
    if not chosen:
        sys.exit("mutants: no fault of that name")
    start = time.perf_counter()
    before = TABLE.read_text() if TABLE.is_file() else ""
    verdicts = judge_all(
        chosen, min(given.jobs, len(chosen)), lambda found: write_table(mutants, found, given.table, before)
    )
    caught = sum(v.state == "caught" for v in verdicts.values())
    print(f"mutants: {caught} of {len(chosen)} caught in {time.perf_counter() - start:.0f} s")
    return caught != len(chosen)


if __name__ == "__main__":
    sys.exit(main())
