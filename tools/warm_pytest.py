"""Runs of pytest that do not import torch, NumPy and pytest anew: a process that has imported them forks for each run.

What a run itself imports (the tree's packages and tests) is fresh. `Warm` is used by one thread at a time.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

#: What every test imports, and no tree contains. A missing one is left out.
IMPORTED = ("numpy", "ml_dtypes", "torch", "torch.distributed", "torch._dynamo", "pytest", "hypothesis")
PASSED, FAILED, NONE_RAN = 0, 1, 5  # pytest's exit codes


class Warm:
    """The process that forks, seen from the one that asks."""

    def __init__(self, threads: int) -> None:
        pools = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        env = {**os.environ, **pools, "TE_TESTS_GPUS": os.environ.get("TE_TESTS_GPUS", "1")}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def run(self, tree: Path, arguments: list[str], timeout: float) -> tuple[int, str]:
        """pytest's exit code (negative: the signal that ended it) and what it printed, run in `tree`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r", suffix=".log", errors="replace") as log:
            order = {"tree": str(tree), "arguments": arguments, "log": log.name, "timeout": timeout}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline()), log.read()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def first_failure(output: str) -> str:
    """The first test that pytest says has failed; else the end of its output."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+::\S.*?)(?: - .*)?$", output, re.MULTILINE)
    return found[1] if found else "\n".join(output.splitlines()[-5:])


def _serve() -> None:
    """Fork for each order on the standard input; answer with the exit code."""
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            _run(order["tree"], order["arguments"], order["log"])
        answers.write(f"{_end_of(child, order['timeout'])}\n")


def _end_of(child: int, timeout: float) -> int:
    """The exit code of a forked run. One that hangs is killed, with the processes that it started, and has failed."""

    def expired(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except TimeoutError:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        code = FAILED
    signal.setitimer(signal.ITIMER_REAL, 0)
    return code


def _run(tree: str, arguments: list[str], log: str) -> None:
    """In the forked process: run pytest in the tree, and end."""
    os.setpgid(0, 0)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(handle, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(tree)
    paths = [tree, os.path.join(tree, "bindings", "jax")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    code = 4
    try:
        import pytest

        code = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
