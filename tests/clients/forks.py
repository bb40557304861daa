"""Fresh processes that do not import torch anew: one that has imported it, and nothing of ours, forks for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

#: Reads orders, one a line, and answers each with the exit code of a fork.
_SERVE = """
import json, os, runpy, signal, sys
import torch, torch._dynamo, torch.distributed.tensor

for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        out = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(out, 1), os.dup2(out, 2)
        code = 1
        signal.alarm(280)  # ends what hangs
        try:
            os.environ.clear()
            os.environ.update(order["env"])
            os.chdir("/")
            sys.path[:0] = order["path"]
            sys.argv = order["arguments"]
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """The process that forks, seen from the one that asks."""

    def __init__(self) -> None:
        # To look for GPUs through CUDA would open it, and no fork could use it then.
        env = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd="/"
        )

    def run(self, arguments: Sequence[str], path: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
        """A program and its arguments: its exit code (negative: a signal) and what it printed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r", suffix=".log", errors="replace") as log:
            order = {"arguments": list(arguments), "path": list(path), "env": dict(env), "log": log.name}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline()), log.read()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
