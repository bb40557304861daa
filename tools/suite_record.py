"""Records of the suite on a GPU, beside the benchmarks' results: which commit ran, on what, and what came of it.

    python tools/suite_record.py write build/gpu/tests.xml --shard 1/2 --out build/gpu     what `make gpu` does
    python tools/suite_record.py newest          the newest records as Markdown, for docs/guides/20-verification.md
    python tools/suite_record.py check           whether the tree at hand is the one that they are of

`sources` is a digest of the library's and the tests' files: it holds where git cannot tell what ran.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402
from tests import tally  # noqa: E402

#: Records of runs that do not stand for the suite, by their names: how docs/guides/20-verification.md shows them.
BESIDE = {
    "interpreted": "With no call replayed (`make gpu-interpreted`",
    "ranks": "The tests of ranks, two of which share a GPU (NCCL; `make gpu-ranks`",
}
RUN = ("te_core", "te_torch", "bindings", "tests")
Record = tuple[Path, dict[str, Any]]
_SOURCES = {".py", ".cu", ".cuh", ".toml", ".json", ".txt"}


def sources(root: Path = ROOT) -> str:
    """A digest of what the suite runs: names and contents."""
    digest = hashlib.sha256()
    for path in sorted(p for top in RUN for p in (root / top).rglob("*") if p.suffix in _SOURCES and p.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def outcome(xml: Path) -> dict[str, Any]:
    """What pytest's report says: numbers, names of what failed, and skips by their reasons."""
    passed, seconds = 0, 0.0
    failed: list[str] = []
    skipped: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for told in ET.parse(xml).iter("property"):
        if told.get("name") == tally.NAME:
            calls.update(json.loads(told.get("value", "{}")))
    for suite in ET.parse(xml).iter("testsuite"):
        seconds += float(suite.get("time", 0))
        for case in suite.iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(name)
            elif skip is not None:
                skipped[_reason(skip)] += 1
            else:
                passed += 1
    return {
        "passed": passed,
        "failed": len(failed),
        "failed tests": failed,
        "skipped": sum(skipped.values()),
        "skipped by reason": dict(skipped.most_common()),
        "test seconds": round(seconds, 1),
        "calls of layers": dict(calls.most_common()),
    }


def _reason(skip: ET.Element) -> str:
    kind = "" if skip.get("type") == "pytest.skip" else "expected to fail: "
    return kind + (skip.get("message") or "no reason").removeprefix("Skipped: ")


def write(xml: Path, shard: str, out: Path, commit: str, arguments: str = "") -> Path:
    """The record of one run, as a new file."""
    content = {"shard": shard, "arguments": arguments, "sources": sources(), "gpus": harness.gpus(), **outcome(xml)}
    # What the tests ran with, which is not what this process would.
    tapes = os.environ.get("TE_CORE_TAPES", "first")
    content["about"] = {**harness.about(commit), "tapes": tapes}
    shared = os.environ.get("TE_TESTS_RANKS_SHARE") == "1"
    name = "interpreted" if tapes == "never" else "ranks" if shared else "suite"
    return harness.write_record(name, content, out, commit)


def newest(folder: Path = harness.RESULTS, name: str = "suite") -> list[Record]:
    """The records of the sources that ran last on a GPU: of each shard and number of GPUs the last one."""
    named = re.compile(rf"\d{{4}}-\d\d-\d\d-(?!cpu-).+-{name}(-\d+)?\.json")
    found = [(path, json.loads(path.read_text())) for path in folder.glob("*.json") if named.fullmatch(path.name)]
    found.sort(key=lambda each: (each[1]["time"], each[0].name))
    of_last = {
        (record["shard"], record.get("gpus", 1)): (path, record)
        for path, record in found
        if record["sources"] == found[-1][1]["sources"]
    }
    return [of_last[key] for key in sorted(of_last)]


def _count(record: dict[str, Any]) -> str:
    """How many GPUs took part, where the record says."""
    return f"{record['gpus']} " if record.get("gpus", 1) > 1 else ""


def _link(path: Path) -> str:
    """A link from a page in docs/guides."""
    return f"[{path.name}](../../{path.resolve().relative_to(ROOT).as_posix()})"


def markdown(found: Sequence[Record], beside: Mapping[str, Sequence[Record]] | None = None) -> str:
    """The records as docs/guides/20-verification.md shows them, with other kinds (`BESIDE`) of the same sources."""
    if not found:
        return "The suite has not run on a GPU yet: `make gpu`."
    about = found[-1][1]["about"]
    lines = [
        f"The suite at commit `{about['commit']}`, {found[-1][1]['time'][:10]} (torch {about['torch']}, "
        "`--require-cuda`):",
        "",
        "| GPUs | shard | passed | failed | skipped | record |",
        "|---|---|---|---|---|---|",
    ]
    for path, record in found:
        numbers = (f"{record[key]:,}" for key in ("passed", "failed", "skipped"))
        machine = f"{_count(record)}{record['about']['device']}"
        lines.append(f"| {machine} | {record['shard']} | {' | '.join(numbers)} | {_link(path)} |")
    reasons: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    most = max(record.get("gpus", 1) for _, record in found)
    for record in (record for _, record in found if record.get("gpus", 1) == most):
        reasons.update(record["skipped by reason"])
        calls.update(record.get("calls of layers", {}))
    if reasons:
        told = "; ".join(f"{reason} ({number})" for reason, number in reasons.most_common())
        lines += ["", f"The reasons to skip, with the number of cases: {told}."]
    if calls:
        lines += ["", tally.told(calls) + "."]
    for name, records in (beside or {}).items():
        for path, record in records:
            if record["sources"] == found[-1][1]["sources"]:
                part = "" if record["shard"] == "1/1" else f", shard {record['shard']}"
                numbers = (f"{record[key]:,} {key}" for key in ("passed", "failed", "skipped"))
                lines += ["", f"{BESIDE[name]}{part}): {', '.join(numbers)}; {_link(path)}."]
    return "\n".join(lines)


def check(found: Sequence[Record]) -> str:
    """What keeps the newest records from speaking for the tree at hand; nothing if they do."""
    if not found:
        return "there is no record of a suite on a GPU"
    here, ran = sources(), found[-1][1]["sources"]
    if here != ran:
        commit = found[-1][1]["about"]["commit"]
        return f"{found[-1][0].name} is of the sources {ran}, at commit {commit}; here are {here}"
    shards = {record["shard"] for _, record in found}
    count = max(int(shard.partition("/")[2]) for shard in shards)
    if missing := [f"{i}/{count}" for i in range(1, count + 1) if f"{i}/{count}" not in shards]:
        return f"no record of shard {', '.join(missing)}"
    failed = [test for _, record in found for test in record["failed tests"]]
    return f"{len(failed)} tests failed: {', '.join(failed[:5])}" if failed else ""


def main() -> int:
    """Write, show or check records; 1 if the newest do not speak for this tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="action", required=True)
    making = kinds.add_parser("write")
    making.add_argument("xml", type=Path, help="pytest's --junitxml")
    making.add_argument("--shard", default="1/1")
    making.add_argument("--out", type=Path, default=harness.RESULTS)
    making.add_argument("--commit", default="", help="what ran, where git cannot tell")
    making.add_argument("--arguments", default="", help="what else pytest was given")
    kinds.add_parser("newest"), kinds.add_parser("check")
    given = parser.parse_args()
    if given.action == "write":
        print(f"written: {write(given.xml, given.shard, given.out, given.commit, given.arguments)}")
        return 0
    if given.action == "newest":
        print(markdown(newest(), {name: newest(name=name) for name in BESIDE}))
        return 0
    wrong = check(newest())
    print(f"suite: {wrong or 'the newest records are of this tree, and nothing failed'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
