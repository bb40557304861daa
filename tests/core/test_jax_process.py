"""Tests of JAX on a GPU, in a process of their own: JAX's threads would break what other tests capture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.backends import requires_cuda

TESTS = Path(__file__).parents[1]
FILES = ("core/test_tensor_dlpack.py", "torch/test_functional_arrays.py", "jax")


@requires_cuda
def test_jax_on_a_gpu() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "--require-cuda", "-k", "(jax and cuda) or te_jax", *FILES]
    done = subprocess.run(
        command, cwd=TESTS, env={**env, "JAX_PLATFORMS": "cuda,cpu"}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout[-500:])
