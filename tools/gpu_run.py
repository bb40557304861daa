"""`make gpu`: the suite or one shard of it, then named benchmarks. Offline, with the interpreter at hand.

Everything lands in one folder: log.txt (all output), tests.xml, the suite's record (`...-suite.json`, to be committed
in benchmarks/results), what the benchmarks write, and summary.json. A benchmark is run as
`python -m benchmarks.run NAME --out FOLDER`. Arguments after `--` go to pytest.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent


class Steps:
    """Runs commands one after another, each line to the screen and to the log; keeps what became of them."""

    def __init__(self, log: IO[str], env: dict[str, str], limit: float) -> None:
        self.log, self.env = log, env
        self.end = time.monotonic() + limit if limit else None
        self.done: list[dict[str, object]] = []

    def run(self, name: str, command: list[str], fine: tuple[int, ...] = (0,)) -> bool:
        """One step; True if it ended well. A step that the time limit ends has failed."""
        start = time.monotonic()
        left = max(1, self.end - start) if self.end else None
        self.say(f"== {name}: {' '.join(command)}")
        process = subprocess.Popen(
            command, cwd=ROOT, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=1
        )
        # First asked politely, so that pytest ends its workers and writes its report.
        timers = (
            []
            if left is None
            else [threading.Timer(left, process.send_signal, [signal.SIGINT]), threading.Timer(left + 20, process.kill)]
        )
        for timer in timers:
            timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            self.say(line.rstrip("\n"))
        code = process.wait()
        for timer in timers:
            timer.cancel()
        seconds = time.monotonic() - start
        self.done.append({"step": name, "code": code, "seconds": round(seconds, 1), "ok": code in fine})
        self.say(f"== {name}: {'ok' if code in fine else f'FAILED ({code})'} in {seconds:.0f} s\n")
        return code in fine

    def say(self, line: str) -> None:
        """To the screen and to the log."""
        print(line, flush=True)
        self.log.write(line + "\n")
        self.log.flush()


def environment(wheels: Path, site: Path) -> dict[str, str]:
    """The environment of the steps: this tree and the carried wheels before what the interpreter has."""
    paths = [str(ROOT), str(ROOT / "bindings" / "jax")]
    found = sorted(str(wheel) for wheel in wheels.glob("*.whl")) if wheels.is_dir() else []
    if found:
        install = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        install += ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
        subprocess.run(install + found, check=True)
        paths.insert(0, str(site))
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths + inherited), "PYTHONUNBUFFERED": "1"}


def pytest_command(given: argparse.Namespace, out: Path) -> list[str]:
    """The suite's command line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={out / 'tests.xml'}"]
    command += [f"--shard={given.shard}"] + ["--require-cuda"] * given.require_cuda
    if given.jobs > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(given.jobs), "--dist", "worksteal"]
    return command + given.pytest


def record_command(given: argparse.Namespace, out: Path) -> list[str]:
    """What keeps the suite's result."""
    command = [sys.executable, "tools/suite_record.py", "write", str(out / "tests.xml"), "--out", str(out)]
    command += ["--shard", given.shard, "--commit", given.commit]
    return [*command, f"--arguments={shlex.join(['--require-cuda'] * given.require_cuda + given.pytest)}"]


def pack(out: Path) -> None:
    """Replace the folder's files, but for the summary, by one archive: some ways home take few files."""
    inside = [path for path in sorted(out.rglob("*")) if path.is_file()]
    with tarfile.open(out / "results.tar.gz", "w:gz") as archive:
        for path in inside:
            archive.add(path, path.relative_to(out).as_posix())
    for path in inside:
        if path.name != "summary.json":
            path.unlink()


def main() -> int:
    """Run what was asked for; 0 if every step ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl", help="folder of wheels to put on the path")
    parser.add_argument("--shard", default="1/1", help="I/N: which part of the suite; none: no tests")
    parser.add_argument("--bench", default="", help="names of benchmarks, separated by blanks")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the results")
    parser.add_argument("--commit", default="", help="what runs, for the records, where git cannot tell")
    parser.add_argument("--limit", type=float, default=0, help="seconds for all of it; 0: no limit")
    parser.add_argument("--jobs", type=int, default=min(32, os.cpu_count() or 1), help="test processes")
    parser.add_argument("--require-cuda", action="store_true", help="a test skipped for want of CUDA fails")
    parser.add_argument("--mutants", action="store_true", help="also apply the faults that need CUDA")
    parser.add_argument("--pack", action="store_true", help="leave one archive and summary.json")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest")
    given = parser.parse_args()
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as site, (out / "log.txt").open("w") as log:
        steps = Steps(log, environment(given.wheels, Path(site)), given.limit)
        if given.require_cuda:
            steps.run("doctor", [sys.executable, "-m", "te_core.doctor"])
        if given.shard != "none":
            steps.run("tests", pytest_command(given, out), fine=(0, 5))  # 5: a shard may be empty
            if (out / "tests.xml").is_file():  # pytest writes none where it could not begin
                steps.run("record", record_command(given, out))
        if given.mutants:
            table = str(out / "mutants.md")
            jobs = ["--jobs", str(given.jobs)]
            steps.run("mutants", [sys.executable, "tools/mutants.py", "--cuda", "--table", table, *jobs])
        for name in given.bench.split():
            command = [sys.executable, "-m", "benchmarks.run", name, "--out", str(out), "--commit", given.commit]
            steps.run(f"bench {name}", command)
    good = all(step["ok"] for step in steps.done)
    (out / "summary.json").write_text(json.dumps({"ok": good, "steps": steps.done}, indent=1) + "\n")
    if given.pack:
        pack(out)
    print(f"gpu: {'ok' if good else 'FAILED'}; results in {out}")
    return not good


if __name__ == "__main__":
    sys.exit(main())
