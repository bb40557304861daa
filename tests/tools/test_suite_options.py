"""The suite's own options, tried on a small suite in processes of its own."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import _begin_with_long_ones, _shard
from tests.tools.light_pytest import Light

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


#: Of the small suite, which runs on the CPU: as many GPUs as a file says.
PRETENDED = """
from pathlib import Path
cuda_devices = lambda: int(Path(__file__).with_name("gpus").read_text())
capability = lambda: (9, 0) if cuda_devices() else (0, 0)
cuda_runtime = Runtime.cpu
requires_cuda = needs_device(cuda_devices() > 0, "CUDA")
"""


class Suite:
    """The small suite, each run of which is a fork of one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tests").mkdir()
        for name in ("__init__.py", "conftest.py", "backends.py", "recordings.py", "tally.py"):
            shutil.copy(ROOT / "tests" / name, folder / "tests")
        shutil.copy(ROOT / "pyproject.toml", folder)
        with (folder / "tests" / "backends.py").open("a") as backends:
            backends.write(PRETENDED)
        (folder / "tests" / "test_small.py").write_text(SUITE)
        (folder / "tests" / "test_gone.py").write_text('import pytest\npytest.importorskip("cupy_not_there")\n')
        ours = ("PYTEST_", "TE_TESTS_", "OMP_", "OPENBLAS_", "MKL_", "TORCHINDUCTOR_COMPILE_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.light = Light(env, also=("te_core.runtime",))
        self.ran: dict[tuple[str, ...], tuple[dict[str, str], str]] = {}

    def run(self, *options: str, gpus: int = 0) -> tuple[dict[str, str], str]:
        """The outcome of each test by name, and the whole output."""
        key = (str(gpus), *options)
        if key not in self.ran:
            (self.folder / "tests" / "gpus").write_text(str(gpus))
            alone = [] if "-n" in options else ["-p", "no:xdist"]
            shown = self.light.run(self.folder, ["-v", "-p", "no:cacheprovider", *alone, *options], timeout=120)[1]
            found = re.findall(r"^tests/test_small\.py::(\S+) (PASSED|FAILED|SKIPPED|ERROR)", shown, re.MULTILINE)
            self.ran[key] = dict(found), shown
        return self.ran[key]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    made = Suite(tmp_path_factory.mktemp("suite"))
    yield made
    made.light.close()


def test_shards_part_the_suite(suite: Suite) -> None:
    whole = set(suite.run()[0]) | {"test_matrix", "test_heavy"}
    parts = [set(suite.run("--full", "--more", f"--shard={i}/2")[0]) for i in (1, 2)]
    assert parts[0] | parts[1] == whole and not parts[0] & parts[1] and all(parts)
    for wrong in ("0/3", "4/3", "half"):
        with pytest.raises(pytest.UsageError, match="1 <= I <= N"):
            _shard(wrong)


def test_beside_a_shard(suite: Suite) -> None:
    """What a file names joins it: a case, a test, a file; but no heavy test."""
    file, (few, many) = "tests/test_small.py", (set(suite.run(f"--shard={i}/2")[0]) for i in (1, 2))
    named = suite.folder / "also.txt"
    case, test = sorted(many)[0], "test_many"
    named.write_text(f"{file}::{case}\n{file}::{test}\n{file}::test_heavy\n")
    with_these = set(suite.run("--shard=1/2", f"--also={named}")[0])
    assert with_these == few | {case} | {name for name in many if name.partition("[")[0] == test} != few
    (whole := suite.folder / "whole.txt").write_text(file + "\n")
    assert set(suite.run("--shard=1/2", f"--also={whole}")[0]) == few | many


def test_full_matrices_and_heavy_tests_run_on_request(suite: Suite) -> None:
    assert not {"test_matrix", "test_heavy"} & set(suite.run()[0])
    assert set(suite.run("-m", "full")[0]) == {"test_matrix"}
    assert set(suite.run("-m", "more")[0]) == {"test_heavy"}


def test_the_cpu_always_runs(suite: Suite) -> None:
    outcomes = suite.run()[0]
    for name in ("test_backend", "test_named_backend"):
        assert outcomes[f"{name}[cpu]"] == "PASSED"
    assert outcomes["test_threads_and_examples"] == "PASSED"


OF_DEVICES = ("test_backend", "test_named_backend", "test_device", "test_marked", "test_gpu", "test_nine", "test_newer")


def test_no_case_is_generated_for_a_device_that_is_not_here(suite: Suite) -> None:
    def cases(*options: str, gpus: int) -> set[str]:
        return {name for name in suite.run(*options, gpus=gpus)[0] if name.startswith(OF_DEVICES)}

    both = (
        "test_backend[{}]",
        "test_named_backend[{}]",
        "test_marked_case[{}]",
        "test_device[1-{}]",
        "test_device[2-{}]",
    )
    on_cpu, on_cuda = ({case.format(device) for case in both} for device in ("cpu", "cuda"))
    assert cases(gpus=0) == on_cpu and cases(gpus=1) == {*on_cpu, *on_cuda, "test_gpu"}
    assert cases("--require-cuda", "--continue-on-collection-errors", gpus=1) == {*on_cuda, "test_gpu"}


POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")


def test_processes_share_the_cores() -> None:
    """What starts them takes all for itself, and hands its environment to them. What a user has set stays."""
    ours = ("PYTEST_", "TE_TESTS_", *POOLS)
    bare = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    bare["MKL_NUM_THREADS"] = "7"
    show = f"[os.environ.get(name) for name in {(*POOLS, 'TE_TESTS_POOLS')!r}]"
    ((*first, kept),) = shown_in([bare], show)
    cores = os.cpu_count() or 1
    assert first == [str(cores), str(cores), "7", str(cores)]
    workers = {"PYTEST_XDIST_WORKER_COUNT": "2", "PYTEST_XDIST_WORKER": "gw1", "TE_TESTS_POOLS": kept}
    ((*shares, _),) = shown_in([{**bare, **dict(zip(POOLS, first, strict=True)), **workers}], show)
    share = str(max(1, cores // 2))
    assert shares == [share, share, "7", share]


@pytest.mark.more
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is not to be shared")
def test_processes_of_a_suite_share_the_cores(suite: Suite) -> None:
    shown = suite.run("-n", "2", "-k", "test_threads_and_examples")[1]
    assert "1 passed" in shown, shown


def test_processes_share_the_gpus(tmp_path: Path) -> None:
    """Each sees all of them, and begins with another one; who chose some already keeps them."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU 0: a\\nGPU 1: b\\nGPU 2: c\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    bare = {name: os.environ[name] for name in ("HOME", "PYTHONPATH") if name in os.environ}
    bare["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    worker = {"PYTEST_XDIST_WORKER_COUNT": "6", "PYTEST_XDIST_WORKER": "gw4"}
    environments = [
        bare,
        {**bare, "CUDA_VISIBLE_DEVICES": "1"},
        {**bare, "TE_TESTS_GPUS": "3", **worker},
        {**bare, "CUDA_VISIBLE_DEVICES": "1", **worker},
    ]
    show = "[os.environ.get(name) for name in ('CUDA_VISIBLE_DEVICES', 'TE_TESTS_GPUS')]"
    assert shown_in(environments, show) == [[None, "3"], ["1", None], ["1,2,0", "1"], ["1", None]]


def shown_in(environments: list[dict[str, str]], value: str) -> list[list[str | None]]:
    """What a process sees that has imported the suite's options, in each of these environments."""
    code = f"""
import json, os, sys
import hypothesis, pytest
for env in json.loads(sys.stdin.read()):
    child = os.fork()
    if not child:
        os.environ.clear()
        os.environ.update(env)
        import tests.conftest
        from te_core.tape import taped
        print(json.dumps({value}), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, input=json.dumps(environments), cwd=ROOT, text=True, capture_output=True, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_required_cuda_turns_its_skips_into_failures(suite: Suite) -> None:
    outcomes, shown = suite.run()
    assert outcomes["test_skips_for_cuda"] == "SKIPPED"
    outcomes, shown = suite.run("--require-cuda", "--continue-on-collection-errors", gpus=1)
    assert outcomes["test_skips_for_cuda"] == "FAILED"
    assert outcomes["test_skips_for_hardware"] == outcomes["test_skips_for_windows"] == "SKIPPED"
    assert "this test was skipped: CuPy is not installed" in shown
    assert "--require-cuda: this machine has no CUDA device" in suite.run("--require-cuda")[1]
    assert "this file was skipped: could not import 'cupy_not_there'" in shown


def test_skips_are_told_by_reason(suite: Suite) -> None:
    shown = suite.run()[1]
    told = [line for line in shown.splitlines() if line.startswith("SKIPPED [")]
    assert len(told) == len({line.partition("] ")[2] for line in told}), "a reason has one line"
    assert "SKIPPED [1] needs Windows" in told and "SKIPPED [1] CuPy is not installed" in told
    assert not any(".py:" in line for line in told)


def source_of(lines: list[str], test: ast.FunctionDef) -> str:
    """A test with its parameters."""
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
        if path.stem in ("test_replays", "test_tapes"):  # of replays themselves: each says what it wants
            continue
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                assert any(word in name for word in words) or not re.search(uses, source_of(lines, node)), name
                named.append(name)
    assert len(named) > 1000 and not [word for word in words if not any(word in name for name in named)]
    assert "TE_CORE_TAPES=never $(PY) -m pytest" in text and "\ngpu-interpreted: export TE_CORE_TAPES = never\n" in text
    plain = {name: value for name, value in os.environ.items() if name != "TE_CORE_TAPES"}
    assert shown_in([{**plain, "TE_CORE_TAPES": "never"}, plain], "taped.when()") == ["never", "first"]


class _Item:
    def __init__(self, name: str) -> None:
        self.name = name

    def get_closest_marker(self, mark: str) -> bool:
        return mark == "long" and self.name == "long"


def test_long_tests_begin_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four test processes begin with six tests each."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "4")
    items: list[Any] = [_Item("long" if 7 <= i < 12 else "quick") for i in range(24)]
    _begin_with_long_ones(items)
    assert [i for i, item in enumerate(items) if item.name == "long"] == [0, 1, 6, 12, 18]
