"""Apply named faults to a copy of the tree, one at a time, and see that the tests notice each.

tests/mutants.toml lists the faults; build/mutants.md gets the table. A fault whose tests still pass has
survived: the run fails. So does one that cannot be judged: its text is not there exactly once, the test that notices
it fails without it, too, none of its tests runs on this machine, or they cannot even be collected with it. A crash or
a hang counts as noticed.

The list has what no operator makes. `--sample N` draws N faults by operators (tools/mutations.py) in functions that
tests enter, as `make quick-map` has recorded them, and asks the nearest cases of each. What lives is printed: either a
test is missing, or the change means the same.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import itertools
import json
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import touched  # noqa: E402
from tools.mutations import Change, changes  # noqa: E402
from tools.mutations_c import c_changes  # noqa: E402
from tools.warm_pytest import FAILED, NONE_RAN, PASSED, Warm, first_failure  # noqa: E402

LIST = ROOT / "tests" / "mutants.toml"
TABLE = ROOT / "build" / "mutants.md"
SKIP = shutil.ignore_patterns(
    ".git", ".venv", ".whl", "build", "results", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
WIDTH = 120  # of the list
NEAREST = 6  # cases that a fault of a sample is shown to
TIMEOUT = 600  # seconds for one fault's tests; one that hangs them has been noticed


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` becomes `new` in `file`, and one of `tests` (pytest arguments) has to fail."""

    name: str
    breaks: str  # "" where the name says it
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
    found = [
        Mutant(name, breaks[0] if breaks else "", file, old, new, *asked(tests))
        for file, groups in tomllib.loads(path.read_text()).items()
        for tests, faults in groups.items()
        for name, (*breaks, old, new) in faults.items()
    ]
    names = [m.name for m in found]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        sys.exit(f"mutants: these names are given twice: {', '.join(twice)}")
    return found


def asked(tests: str) -> tuple[tuple[str, ...], bool]:
    """The tests of a table, and whether they are asked on CUDA."""
    words = shlex.split(tests)
    return tuple(word for word in words if word != "--require-cuda"), "--require-cuda" in words


def written(mutants: list[Mutant], head: str) -> str:
    """The list by files and tests, below its first lines."""
    tables: dict[str, dict[str, list[Mutant]]] = {}
    for m in mutants:
        tests = shlex.join(m.tests) + " --require-cuda" * m.cuda
        tables.setdefault(m.file, {}).setdefault(tests, []).append(m)
    lines = [head]
    for file in sorted(tables):
        for tests, faults in tables[file].items():
            lines += [f"\n[{_quoted(file)}.{_quoted(tests)}]\n", *map(_entry, faults)]
    return "".join(lines)


def renewed() -> str:
    """The list as it should stand there."""
    return written(load(), LIST.read_text().partition("\n[")[0])


def _entry(m: Mutant) -> str:
    """One fault: its texts follow one another on a line as long as there is room."""
    text = f"{m.name if re.fullmatch(r'[A-Za-z0-9_-]+', m.name) else _quoted(m.name)} = ["
    parts = [_quoted(part) for part in ((m.breaks, m.old, m.new) if m.breaks else (m.old, m.new))]
    for i, part in enumerate(parts):
        begin, end = text.rpartition("\n")[2], ", " if i + 1 < len(parts) else "]\n"
        if begin.strip() and i and len(begin) + len(part.partition("\n")[0]) + len(end.strip()) > WIDTH:
            text = f"{text.rstrip()}\n  "
        text += part + end
    return text


def _quoted(text: str) -> str:
    """A text as TOML has it: on one line where it fits."""
    escaped = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    if "\n" not in text:
        return f"'{text}'" if "'" not in text and len(text) + 2 < len(escaped) else escaped
    long = len(escaped) > WIDTH - 4 and "'''" not in text and not text.endswith("'")
    return f"'''\n{text}'''" if long else escaped


def sample(count: int, seed: int, within: list[str], cuda: bool = False) -> list[Mutant]:
    """Faults by operators, in these files and folders: of a line of a function that recorded cases enter, by one of the
    operators that change it, one of its changes. With `cuda` of kernels, which cases of the module of their name enter.
    """
    known = touched.recorded()
    if not known:
        sys.exit("mutants: no case is recorded; run `make quick-map`, which takes 1.6 times as long as `make test`")
    drawn: dict[tuple[str, str], Mutant] = {}
    chance, places = random.Random(seed), (_kernels if cuda else _places)(known, within)
    chance.shuffle(places)
    for file, line, cases in places:
        if len(drawn) == count:
            break
        text = (ROOT / file).read_text()
        made: dict[str, list[Change]] = {}
        for change in (c_changes if cuda else changes)(text, {line}):
            made.setdefault(change.operator, []).append(change)
        if not made:
            continue
        change = chance.choice(made[chance.choice(sorted(made))])
        was = " ".join(text[change.begin : change.end].split())
        breaks = f"{was} -> {change.text or 'nothing'}".replace("|", "\\|")
        name = f"{file}:{line}: {change.operator}"
        drawn[file, name] = Mutant(name, breaks, file, text, change.applied(text), cases, cuda)
    return list(drawn.values())


_Places = list[tuple[str, int, tuple[str, ...]]]


def _nearest(cases: list[touched.Case]) -> tuple[str, ...]:
    return tuple(case for _, _, case in sorted(cases)[:NEAREST])


def _places(known: dict[str, list[touched.Case]], within: list[str]) -> _Places:
    """The lines in these files and folders that recorded cases enter, each with the nearest of these cases."""
    found = []
    for file in sorted({name.partition(":")[0] for name in known}):
        if file.startswith(tuple(within)) and (ROOT / file).is_file():
            of_line = touched.names_of_lines(str(ROOT / file))
            cases = {name: known.get(f"{file}:{name}") for name in {*of_line.values()}}
            found += [(file, line, _nearest(cases[name])) for line, name in sorted(of_line.items()) if cases[name]]
    return found


def _kernels(known: dict[str, list[touched.Case]], within: list[str]) -> _Places:
    """The same of kernels."""
    found = []
    for kernel in sorted((ROOT / "te_core" / "kernels").glob("*.cu")):
        file, module = str(kernel.relative_to(ROOT)), f"te_core/backends/cuda/{kernel.stem}.py:"
        cases = [case for name in known if name.startswith(module) for case in known[name]]
        if cases and file.startswith(tuple(within)):
            found += [(file, line + 1, _nearest(cases)) for line in range(kernel.read_text().count("\n"))]
    return found


def run_tests(warm: Warm, tree: Path, tests: tuple[str, ...], cuda: bool) -> tuple[int, str]:
    """pytest's exit code and the first test that failed (or the end of the output)."""
    options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code, output = warm.run(tree, [*options, *tests, *["--require-cuda"] * cuda], TIMEOUT)
    if code == PASSED and not re.search(r"\b\d+ passed", output):
        reasons = re.findall(r"^SKIPPED \[\d+\] (.*)$", output, re.MULTILINE)
        return NONE_RAN, ", ".join(reasons) or "all are skipped"
    return code, first_failure(output)


_stamps = itertools.count(1_000_000_000)


def write(path: Path, text: str) -> None:
    """Write a source whose time no earlier version has had, so that Python takes no cached bytecode for it."""
    path.write_text(text)
    stamp = next(_stamps)
    os.utime(path, (stamp, stamp))


def judge(mutant: Mutant, tree: Path, warm: Warm) -> Verdict:
    """Apply one fault to a tree, run its tests, take it back."""
    path = tree / mutant.file
    text = path.read_text() if path.is_file() else ""
    if text.count(mutant.old) != 1:
        return Verdict("error", f"its old text stands {text.count(mutant.old)} times in {mutant.file}, not once")
    write(path, text.replace(mutant.old, mutant.new))
    try:
        code, detail = run_tests(warm, tree, mutant.tests, mutant.cuda)
    finally:
        write(path, text)
    if code == PASSED:
        return Verdict("survived", "")
    if code == FAILED:
        return Verdict("caught", detail)
    if code < 0:
        return Verdict("caught", f"a crash, signal {-code}")
    if code == NONE_RAN:
        return Verdict("error", f"none of its tests runs here: {detail}")
    return Verdict("error", f"pytest ended with {code}: {detail}")


def judge_all(mutants: list[Mutant], jobs: int, keep: Callable[[dict[str, Verdict]], None]) -> dict[str, Verdict]:
    """Every fault, in as many copies of the tree as jobs. `keep` is given what is known after each, so that a run that
    is cut short was not for nothing.
    """
    verdicts: dict[str, Verdict] = {}
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with tempfile.TemporaryDirectory() as folder:
        places: SimpleQueue[tuple[Path, Warm]] = SimpleQueue()
        for i in range(jobs):
            places.put((Path(shutil.copytree(ROOT, Path(folder) / str(i), ignore=SKIP)), Warm(threads)))

        def one(mutant: Mutant) -> tuple[Mutant, Verdict, float]:
            start = time.perf_counter()
            tree, warm = places.get()
            try:
                return mutant, judge(mutant, tree, warm), time.perf_counter() - start
            finally:
                places.put((tree, warm))

        with ThreadPoolExecutor(jobs) as pool:
            for done in as_completed([pool.submit(one, mutant) for mutant in mutants]):
                mutant, verdict, seconds = done.result()
                print(f"{verdict.state:<9} {mutant.name} ({seconds:.0f} s) {verdict.detail}", flush=True)
                verdicts[mutant.name] = verdict
                keep(verdicts)
            failing = failing_without_faults(mutants, verdicts, places, pool)
        for mutant in mutants:
            if verdicts[mutant.name].state == "caught" and _noticing(mutant, verdicts) & failing:
                verdicts[mutant.name] = Verdict("error", f"{verdicts[mutant.name].detail} fails without it, too")
                print(f"error     {mutant.name}: {verdicts[mutant.name].detail}", flush=True)
        keep(verdicts)
        for _ in range(jobs):
            places.get()[1].close()
    return verdicts


def _noticing(mutant: Mutant, verdicts: dict[str, Verdict]) -> set[str]:
    """The test that noticed a fault; where pytest named none (a crash, a hang), all files that were asked."""
    by = verdicts[mutant.name].detail
    return {by} if "::" in by else {test.partition("::")[0] for test in mutant.tests if "/" in test}


def failing_without_faults(
    mutants: list[Mutant],
    verdicts: dict[str, Verdict],
    places: SimpleQueue[tuple[Path, Warm]],
    pool: ThreadPoolExecutor,
) -> set[str]:
    """Of the tests that noticed a fault those that fail in a tree without one."""
    by_file: dict[tuple[str, bool], set[str]] = {}
    for mutant in mutants:
        if verdicts[mutant.name].state == "caught":
            for test in _noticing(mutant, verdicts):
                by_file.setdefault((test.partition("::")[0], mutant.cuda), set()).add(test)

    def failing(chosen: tuple[tuple[str, bool], set[str]]) -> set[str]:
        (file, cuda), tests = chosen
        tree, warm = places.get()
        try:
            options = ["-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "--more", "--full"]
            _, output = warm.run(tree, [*options, *["--require-cuda"] * cuda, *sorted(tests)], TIMEOUT)
        finally:
            places.put((tree, warm))
        failed = set(re.findall(r"^(?:FAILED|ERROR) (\S+::\S.*?)(?: - .*)?$", output, re.MULTILINE))
        return (failed & tests) | ({file} if failed and file in tests else set())

    return set().union(*pool.map(failing, by_file.items()))


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
        start = f"| {m.name} | {m.breaks or 'as its name says'} | `{m.file}` | {m.key} | "
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


def judge_sample(mutants: list[Mutant], jobs: int) -> int:
    """Judge these faults and print those that live. 0: a change that means the same is no fault of the tests."""
    verdicts = judge_all(mutants, min(jobs, len(mutants)), lambda found: None)
    alive = [mutant for mutant in mutants if verdicts[mutant.name].state != "caught"]
    for mutant in alive:
        print(f"{mutant.name}: {mutant.breaks}: {verdicts[mutant.name].state} {verdicts[mutant.name].detail}")
    print(f"mutants: {len(mutants) - len(alive)} of {len(mutants)} of the sample caught")
    return 0


def main() -> int:
    """Judge the chosen faults; 0 if every one was caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names or patterns such as 'gemm-*' (default: all)")
    parser.add_argument("--by", nargs="*", default=[], metavar="FILE", help="those that these files of tests notice")
    parser.add_argument("--cuda", action="store_true", help="judge those that need CUDA, not the others")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--table", type=Path, default=TABLE, help="where the table goes, a .md file")
    parser.add_argument("--sample", type=int, metavar="N", help="N faults by operators; names are files and folders")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--write", action="store_true", help="write the list anew, sorted by files and tests")
    given = parser.parse_args()
    if given.write:
        LIST.write_text(renewed())
        return 0
    if given.sample:
        drawn = sample(given.sample, given.seed, given.names or ["te_core/", "te_torch/"], given.cuda)
        return judge_sample(drawn, given.jobs)
    if given.table.suffix != ".md":
        parser.error(f"--table {given.table}: the table is written there; pass a .md file")
    mutants = load()
    chosen = [
        m
        for m in mutants
        if m.cuda == given.cuda
        and (not given.names or any(fnmatch.fnmatch(m.name, n) for n in given.names))
        and (not given.by or any(t.partition("::")[0] in given.by for t in m.tests))
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
