"""Programs in a process of their own, forked from one that has imported torch and te_torch: that takes seconds."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Reads a program a line, and answers with its exit status. It computes nothing: a fork has one thread.
_SERVER = """
import json, os, sys, traceback, types
import torch, te_torch

def run(order):
    for number, path in ((1, order["out"]), (2, order["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["-c", *order["arguments"]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code = 0
    try:
        exec(compile(order["code"], "<string>", "exec"), vars(main))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    child = os.fork()
    if not child:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    start = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{_SERVER}"
    server = subprocess.Popen(
        [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    atexit.register(server.kill)
    return server


def python(code: str, *arguments: str, path: str = "", fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """`python -c CODE ARGUMENTS` where `path` and the checkout are importable; `fresh`: nothing is imported before."""
    code = f"import sys\nsys.path[:0] = {[p for p in (path, str(ROOT)) if p]!r}\n{code}"
    command = [sys.executable, "-c", code, *arguments]
    if fresh:
        return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd="/")
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        order = {"code": code, "arguments": arguments, "out": str(out), "err": str(err)}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        status = server.stdout.readline()
        assert status, "the process that programs are forked from has ended"
        return subprocess.CompletedProcess(command, int(status), out.read_text(), err.read_text())
