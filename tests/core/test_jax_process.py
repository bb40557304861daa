"""Tests of JAX on a GPU, in processes of their own: JAX's threads would break what other tests capture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends import requires_cuda

TESTS = Path(__file__).parents[1]
FILES = ["core/test_tensor_dlpack.py", "torch/test_functional_arrays.py"]
BY_C = "jax/test_te_jax_by_c.py"
FILES += sorted(str(p.relative_to(TESTS)) for p in (TESTS / "jax").glob("test_te_jax*.py") if p.name not in BY_C)
#: XLA tries out no kernels of its own.
QUICK = "--xla_gpu_autotune_level=0"
#: Whether it records te_jax's calls in command buffers.
APART = "--xla_gpu_enable_command_buffer=-CUSTOM_CALL"
CAPTURED = "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"


@requires_cuda
@pytest.mark.long
@pytest.mark.parametrize(
    "file, flags", [*((file, "") for file in FILES), (BY_C, APART), (BY_C, CAPTURED)],
    ids=[*FILES, "by_c apart", "by_c captured"],
)  # fmt: skip
def test_jax_on_a_gpu(file: str, flags: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"TE_TESTS_JAX": "cuda,cpu", "XLA_FLAGS": f"{env.get('XLA_FLAGS', '')} {QUICK} {flags}"}
    command = [sys.executable, "-m", "pytest", "-q", "--require-cuda", "-o", "faulthandler_timeout=100"]
    command += ["-k", "(jax and cuda) or te_jax", file]
    try:  # a process that hangs says where
        done = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True, timeout=280)
    except subprocess.TimeoutExpired as error:
        told = b"\n".join((error.stdout or b"", error.stderr or b""))
        pytest.fail(told[-6000:].decode(errors="replace"))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "leaked" not in done.stderr, done.stderr[:2000]  # cuDNN's frontend prints what lives when Python ends
    print(done.stdout[-500:])
