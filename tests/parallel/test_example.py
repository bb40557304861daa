"""The example of a sharded Llama under torchrun: it learns, and goes on from a checkpoint on fewer ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.ranks import LOOPBACK

ROOT = Path(__file__).resolve().parents[2]


def run(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if LOOPBACK:
        env["GLOO_SOCKET_IFNAME"] = LOOPBACK[0]
    program = [*command, "examples/train_llama.py", *arguments]
    return subprocess.run(program, cwd=ROOT, env=env, text=True, capture_output=True, timeout=240, check=False)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]


def test_two_ranks_then_one(tmp_path: Path) -> None:
    first = losses(run(2, "--quantized", "--steps", "4", "--save", str(tmp_path)))
    assert len(first) == 4 and first[-1] < 0.8 * first[0]
    again = losses(run(1, "--quantized", "--steps", "1", "--load", str(tmp_path)))
    assert again[0] < 0.9 * first[0]


@pytest.mark.more
def test_a_mesh_of_two_dimensions() -> None:
    found = losses(run(4, "--recipe", "delayed", "--replicas", "2", "--steps", "3"))
    assert found[-1] < found[0]


def test_mistakes() -> None:
    done = run(1, "--tp", "2")
    assert done.returncode and "1 ranks are no 2 (--tp) x 1 (--replicas) x shards" in done.stderr
