"""Compile every kernel for every architecture with NVRTC. Needs no GPU; keeps nothing.

A line `// compile-check: NAME=VALUE NAME2=VALUE2` in a .cu file names one set of constants to compile it
with; a file without such a line is compiled once, with no constants. A line `// architecture: sm_90a` names the
only architecture of a file, which is compiled for that one in any case.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's own folder is on the path, the project is not

from te_core.kernels import compiler  # noqa: E402

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

Job = tuple[str, dict[str, compiler.Constant], str]  # file, constants, architecture
Outcome = tuple[float, int, str]  # seconds, bytes of the cubin, the compiler's complaint (empty if it compiled)


def build(job: Job) -> Outcome:
    """One build, in a process of the pool."""
    name, constants, arch = job
    start, size, error = time.perf_counter(), 0, ""
    try:
        size = len(compiler.compile_source(name, constants, arch))
    except Exception as failed:  # whatever went wrong belongs beside the file's name; the other files go on
        error = f"{type(failed).__name__}: {failed}"
    return time.perf_counter() - start, size, error


def report(name: str, results: Sequence[tuple[Job, Outcome]]) -> bool:
    """One line for a file, and what failed; True if all of it compiled."""
    failed = [(job, error) for job, (_, _, error) in results if error]
    seconds, largest = sum(r[0] for _, r in results), max(r[1] for _, r in results)
    verdict = f"{len(failed)} FAILED" if failed else "ok"
    print(f"{name + '.cu':<28} {len(results):>4} builds {seconds:7.2f} s {largest / 1024:8.1f} KiB  {verdict}")
    shown: set[str] = set()
    for (_, constants, arch), error in failed:
        print(f"  {arch} {' '.join(f'{k}={v}' for k, v in constants.items())}")
        core = error.replace(arch, "")
        if core not in shown and len(shown) < 2:  # builds of one file mostly fail for one reason: print it once
            print("    " + error.replace("\n", "\n    "))
        shown.add(core)
    sys.stdout.flush()
    return not failed


def main() -> int:
    """Compile all; 0 if everything compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="kernel files without .cu (default: all)")
    parser.add_argument("--arch", action="append", help=f"default: {' '.join(ARCHS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    given = parser.parse_args()
    names = given.names or sorted(path.stem for path in (ROOT / "te_core" / "kernels").glob("*.cu"))
    only = {name: compiler.only_architecture(name) for name in names}
    jobs: list[Job] = [
        (name, constants, arch)
        for name in names
        for constants in compiler.compile_checks(name)
        for arch in ([only[name]] if only[name] else given.arch or ARCHS)
    ]
    start, good = time.perf_counter(), True
    waiting = {name: sum(job[0] == name for job in jobs) for name in names}
    results: dict[str, list[tuple[Job, Outcome]]] = {name: [] for name in names}
    with ProcessPoolExecutor(given.jobs) as pool:
        futures: dict[Future[Outcome], Job] = {pool.submit(build, job): job for job in jobs}
        for future in as_completed(futures):
            job = futures[future]
            results[job[0]].append((job, future.result()))
            if len(results[job[0]]) == waiting[job[0]]:
                good &= report(job[0], results[job[0]])
    print(f"{len(names)} files, {len(jobs)} builds in {time.perf_counter() - start:.1f} s")
    return not good


if __name__ == "__main__":
    sys.exit(main())
