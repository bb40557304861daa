"""The suite's own options, tried on a small suite in a process of its own."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import _shard

ROOT = Path(__file__).resolve().parents[2]

SUITE = """
import pytest
from hypothesis import settings
from tests.backends import HARDWARE, devices, requires_capability, requires_cuda, requires_gpus, runtimes

@pytest.mark.parametrize("n", range(20))
def test_many(n): pass

@pytest.mark.full
def test_matrix(): pass

@pytest.mark.more
def test_heavy(): pass

def test_backend(rt): assert rt.device

@pytest.mark.parametrize("rt", runtimes())
def test_named_backend(rt): assert rt.device

@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("n", [1, 2])
def test_device(n, device): pass

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=requires_cuda)])
def test_marked_case(device): pass

@requires_gpus(1)
def test_gpu(): pass

@requires_gpus(9)
def test_nine_gpus(): pass

@requires_capability(99)
def test_newer_chip(): pass

def test_skips_for_cuda(): pytest.skip("CuPy is not installed")

def test_skips_for_hardware(): pytest.skip(HARDWARE + "needs 99 GPUs")

def test_skips_for_windows(): pytest.skip("needs Windows")

def test_threads_and_examples():
    import os
    share = max(1, os.cpu_count() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    assert os.environ["OMP_NUM_THREADS"] == os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == str(share)
    assert settings().derandomize and settings().deadline is None
"""


#: Of the small suite, which runs on the CPU: as many GPUs as it is told.
PRETENDED = """
cuda_devices = lambda: int(os.environ.get("PRETENDED_GPUS", "0"))
capability = lambda: (9, 0) if cuda_devices() else (0, 0)
cuda_runtime = Runtime.cpu
requires_cuda = needs_device(cuda_devices() > 0, "CUDA")
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "tests").mkdir()
    for name in ("__init__.py", "conftest.py", "backends.py", "recordings.py", "tally.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    with (folder / "tests" / "backends.py").open("a") as backends:
        backends.write(PRETENDED)
    (folder / "tests" / "test_small.py").write_text(SUITE)
    (folder / "tests" / "test_gone.py").write_text('import pytest\npytest.importorskip("cupy_not_there")\n')
    return folder


@cache
def run(suite: Path, *options: str, gpus: int = 0) -> tuple[dict[str, str], str]:
    """The outcome of each test by name, and the whole output."""
    ours = ("PYTEST_", "TE_TESTS_", "OMP_", "OPENBLAS_", "MKL_", "TORCHINDUCTOR_COMPILE_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env["PRETENDED_GPUS"] = str(gpus)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    alone = [] if "-n" in options else ["-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *alone, *options]
    done = subprocess.run(command, cwd=suite, env=env, capture_output=True, text=True)
    shown = done.stdout + done.stderr
    found = re.findall(r"^tests/test_small\.py::(\S+) (PASSED|FAILED|SKIPPED|ERROR)", shown, re.MULTILINE)
    return dict(found), shown


def test_shards_part_the_suite(suite: Path) -> None:
    whole = set(run(suite)[0]) | {"test_matrix", "test_heavy"}
    parts = [set(run(suite, "--full", "--more", f"--shard={i}/2")[0]) for i in (1, 2)]
    assert parts[0] | parts[1] == whole and not parts[0] & parts[1] and all(parts)
    for wrong in ("0/3", "4/3", "half"):
        with pytest.raises(pytest.UsageError, match="1 <= I <= N"):
            _shard(wrong)


def test_full_matrices_and_heavy_tests_run_on_request(suite: Path) -> None:
    assert not {"test_matrix", "test_heavy"} & set(run(suite)[0])
    assert set(run(suite, "-m", "full")[0]) == {"test_matrix"}
    assert set(run(suite, "-m", "more")[0]) == {"test_heavy"}


def test_the_cpu_always_runs(suite: Path) -> None:
    outcomes = run(suite)[0]
    for name in ("test_backend", "test_named_backend"):
        assert outcomes[f"{name}[cpu]"] == "PASSED"
    assert outcomes["test_threads_and_examples"] == "PASSED"


OF_DEVICES = ("test_backend", "test_named_backend", "test_device", "test_marked", "test_gpu", "test_nine", "test_newer")


def test_no_case_is_generated_for_a_device_that_is_not_here(suite: Path) -> None:
    def cases(*options: str, gpus: int) -> set[str]:
        return {name for name in run(suite, *options, gpus=gpus)[0] if name.startswith(OF_DEVICES)}

    both = ("test_backend[{}]", "test_named_backend[{}]", "test_marked_case[{}]", "test_device[1-{}]", "test_device[2-{}]")
    on_cpu, on_cuda = ({case.format(device) for case in both} for device in ("cpu", "cuda"))
    assert cases(gpus=0) == on_cpu and cases(gpus=1) == {*on_cpu, *on_cuda, "test_gpu"}
    assert cases("--require-cuda", "--continue-on-collection-errors", gpus=1) == {*on_cuda, "test_gpu"}


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is not to be shared")
def test_processes_share_the_cores(suite: Path) -> None:
    """What starts them takes all for itself, and hands its environment to them."""
    shown = run(suite, "-n", "2", "-k", "test_threads_and_examples")[1]
    assert "1 passed" in shown, shown


def test_processes_share_the_gpus(tmp_path: Path) -> None:
    """Each sees all of them, and begins with another one; who chose some already keeps them."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU 0: a\\nGPU 1: b\\nGPU 2: c\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    bare = {name: os.environ[name] for name in ("HOME", "PYTHONPATH") if name in os.environ}
    bare["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    def found(**env: str) -> list[str | None]:
        show = "import json, os, tests.conftest; names = ('CUDA_VISIBLE_DEVICES', 'TE_TESTS_GPUS')"
        command = [sys.executable, "-c", f"{show}; print(json.dumps([os.environ.get(n) for n in names]))"]
        return json.loads(subprocess.run(command, cwd=ROOT, env={**bare, **env}, capture_output=True).stdout)

    assert found() == [None, "3"] and found(CUDA_VISIBLE_DEVICES="1") == ["1", None]
    worker = {"PYTEST_XDIST_WORKER_COUNT": "6", "PYTEST_XDIST_WORKER": "gw4"}
    assert found(TE_TESTS_GPUS="3", **worker) == ["1,2,0", "1"]
    assert found(CUDA_VISIBLE_DEVICES="1", **worker) == ["1", None]


def test_required_cuda_turns_its_skips_into_failures(suite: Path) -> None:
    outcomes, shown = run(suite)
    assert outcomes["test_skips_for_cuda"] == "SKIPPED"
    outcomes, shown = run(suite, "--require-cuda", "--continue-on-collection-errors", gpus=1)
    assert outcomes["test_skips_for_cuda"] == "FAILED"
    assert outcomes["test_skips_for_hardware"] == outcomes["test_skips_for_windows"] == "SKIPPED"
    assert "this test was skipped: CuPy is not installed" in shown
    assert "--require-cuda: this machine has no CUDA device" in run(suite, "--require-cuda")[1]
    assert "this file was skipped: could not import 'cupy_not_there'" in shown


def test_skips_are_told_by_reason(suite: Path) -> None:
    shown = run(suite)[1]
    told = [line for line in shown.splitlines() if line.startswith("SKIPPED [")]
    assert len(told) == len({line.partition("] ")[2] for line in told}), "a reason has one line"
    assert "SKIPPED [1] needs Windows" in told and "SKIPPED [1] CuPy is not installed" in told
    assert not any(".py:" in line for line in told)


def source_of(source: str, test: ast.FunctionDef) -> str:
    """A test with its parameters."""
    lines = source.splitlines()
    return "\n".join(lines[min([test.lineno, *(mark.lineno for mark in test.decorator_list)]) - 1 : test.end_lineno])


def test_what_runs_again_without_replays() -> None:
    """Its words pick each test of graphs, checkpointing, offload and compile, and the suite heeds its variable."""
    text = (ROOT / "Makefile").read_text()
    (listed,) = re.findall(r"^INTERPRETED := ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    *folders, option, expression = shlex.split(listed.replace("\\\n", " "))
    words = " ".join(expression.split()).split(" or ")
    assert option == "-k" and len(words) == len(set(words)) and all(re.fullmatch(r"\w+", word) for word in words)
    uses = r"(torch\.compile|\bmake_graphed_callables|CUDAGraph|\bcheckpoint)\(|saved_tensors_hooks|save_on_cpu|offload"
    named: list[str] = []
    for path in sorted(path for folder in folders for path in (ROOT / folder).glob("test_*.py")):
        if path.stem in ("test_shortcuts", "test_tapes_calls"):  # of replays themselves: each says what it wants
            continue
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                assert any(word in name for word in words) or not re.search(uses, source_of(source, node)), name
                named.append(name)
    assert len(named) > 1000 and not [word for word in words if not any(word in name for name in named)]
    assert "TE_CORE_TAPES=never $(PY) -m pytest" in text and "\ngpu-interpreted: export TE_CORE_TAPES = never\n" in text
    code = "import tests.conftest; from te_core.tape import taped; print(taped.when())"
    for given, wanted in (("never", "never"), (None, "first")):
        env = {name: value for name, value in os.environ.items() if name != "TE_CORE_TAPES"}
        env |= {} if given is None else {"TE_CORE_TAPES": given}
        ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, text=True, capture_output=True)
        assert ran.stdout.strip() == wanted, ran.stderr
