"""`make check`: every check that needs no test data, each with its time; fails if one of them does.

python tools/check.py            all
python tools/check.py lint tails only these
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CHECKS = {
    "format": ["-m", "ruff", "format", "--check", "--quiet", "."],
    "lint": ["-m", "ruff", "check", "--quiet", "--output-format=concise", "."],
    "types": ["-m", "mypy"],
    "floors": ["-m", "pytest", "-q", "tests/core/test_import_floors.py"],
    "house": ["tools/house.py"],
    "tails": ["tools/tail_guards.py"],
    "docs": ["tools/docs.py", "--check", "--no-examples"],
    "kernels": ["tools/compile_kernels.py"],
}


def main() -> int:
    """Run the named checks; 0 if all pass."""
    wanted = sys.argv[1:] or list(CHECKS)
    if unknown := [name for name in wanted if name not in CHECKS]:
        sys.exit(f"check: got {' '.join(unknown)}. Allowed: {' '.join(CHECKS)}")
    failed = []
    for name in wanted:
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        bad = subprocess.run([sys.executable, *CHECKS[name]], cwd=ROOT).returncode
        print(f"== {name}: {'FAILED' if bad else 'ok'} ({time.perf_counter() - start:.1f} s)\n", flush=True)
        failed += [name] * bool(bad)
    print(f"check: {len(wanted) - len(failed)} of {len(wanted)} ok" + f", failed: {' '.join(failed)}" * bool(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
