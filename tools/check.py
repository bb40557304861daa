"""`make check`: every check that needs no test data, each with its time; fails if one of them does.

python tools/check.py            all
python tools/check.py lint tails only these
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The long ones first: as many run at once as there are cores.
CHECKS = {
    "kernels": ["tools/compile_kernels.py"],
    "docs": ["tools/docs.py", "--check", "--no-examples"],
    "types": ["-m", "mypy"],
    "format": ["-m", "ruff", "format", "--check", "--quiet", "."],
    "lint": ["-m", "ruff", "check", "--quiet", "--output-format=concise", "."],
    "floors": ["-m", "pytest", "-q", "tests/core/test_import_floors.py"],
    "remembered": ["tools/remembered.py", "--check"],
    "house": ["tools/house.py"],
    "tails": ["tools/tail_guards.py"],
}


def check(name: str) -> bool:
    """Run one check and print what it said; whether it passed."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *CHECKS[name]], cwd=ROOT, capture_output=True, text=True)
    passed = done.returncode == 0
    said = f"{done.stdout}{done.stderr}".strip()
    verdict = f"== {name}: {'ok' if passed else 'FAILED'} ({time.perf_counter() - start:.1f} s)"
    print(f"{said}\n{verdict}\n" if said else f"{verdict}\n", flush=True)
    return passed


def main() -> int:
    """Run the named checks; 0 if all pass."""
    wanted = sys.argv[1:] or list(CHECKS)
    if unknown := [name for name in wanted if name not in CHECKS]:
        sys.exit(f"check: got {' '.join(unknown)}. Allowed: {' '.join(CHECKS)}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = dict(zip(wanted, pool.map(check, wanted), strict=True))
    failed = [name for name in wanted if not passed[name]]
    print(f"check: {len(wanted) - len(failed)} of {len(wanted)} ok" + f", failed: {' '.join(failed)}" * bool(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
