"""What every test shares: threads that fit the machine, one `rt` per backend, and the suite's own options."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _gpus() -> int:
    """How many this machine has, found without opening one."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


# Before numpy or torch is imported: test processes share the cores, and each BLAS pool would take them all. They have
# the environment of the process that started them, so what that one has set for itself counts for nothing here.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
_SHARE = str(max(1, (os.cpu_count() or 1) // max(1, _WORKERS)))
_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
_OF_STARTER = os.environ.get("TE_TESTS_POOLS", "").split() if _WORKERS else []
_OURS = [pool for pool in _POOLS if pool not in os.environ or pool in _OF_STARTER]
os.environ.update(dict.fromkeys(_OURS, _SHARE))
os.environ["TE_TESTS_POOLS"] = " ".join(_OURS)
# They share the GPUs, too: each finds all of them, and begins with another one. JAX would take three quarters of one.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# JAX's threads talk to a GPU at any time, which breaks what another test captures: tests of JAX on a GPU run in a
# process of their own (tests/core/test_jax_process.py).
os.environ["JAX_PLATFORMS"] = os.environ.get("TE_TESTS_JAX", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
# torch collects garbage before it captures: a graph of an earlier test, let go inside of a capture, would break it.
os.environ.setdefault("TORCH_CUDAGRAPH_GC", "1")
if not _WORKERS and "CUDA_VISIBLE_DEVICES" not in os.environ and "TE_TESTS_GPUS" not in os.environ:
    os.environ["TE_TESTS_GPUS"] = str(_gpus())
elif _WORKERS and (_GPUS := int(os.environ.get("TE_TESTS_GPUS", "0"))) > 1:
    _FIRST = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((_FIRST + i) % _GPUS) for i in range(_GPUS))
    os.environ["TE_TESTS_GPUS"] = "1"  # for a suite that a test starts
# Every test of a layer runs its tape (te_core/tape).
os.environ.setdefault("TE_CORE_TAPES", "first")
# NumPy's BLAS threads poll after a product, in the way of torch's (te_core/backends/cpu/gemm.py has the figures).
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# The same examples every time: a suite that finds a fault must find it again.
settings.register_profile(
    "te", derandomize=True, deadline=None, max_examples=25, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("te")

# How the ids of cases name devices.
_CPU_IDS, _CUDA_IDS = {"cpu", "2 ranks", "4 ranks"}, {"cuda", "2 GPUs"}

# A skip whose reason says one of these is a skip for want of CUDA.
_CUDA_SKIP = re.compile(r"cuda|gpu|cupy|cublas|cudnn|nvrtc|nvmath|nccl|nvidia|\bdriver\b", re.IGNORECASE)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("te-runtime")
    group.addoption(
        "--require-cuda",
        action="store_true",
        help="of a test with cases for both, run those on CUDA and not those on the CPU; a skip for want of CUDA fails",
    )
    group.addoption("--full", action="store_true", help="also run the complete matrices (marked `full`)")
    group.addoption("--more", action="store_true", help="also run what is heavy (marked `more`; `make test-more`)")
    group.addoption("--shard", type=_shard, metavar="I/N", help="run the I-th of N parts of the suite")
    group.addoption("--also", metavar="FILE", help="beside the shard, the files, tests and cases that its lines name")


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--shard: got {text!r}. Allowed: I/N with 1 <= I <= N, for example 2/4")
    return int(found[1]), int(found[2])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rt" in metafunc.fixturenames and not any(
        "rt" in _argnames(mark) for mark in metafunc.definition.iter_markers("parametrize")
    ):
        from tests.backends import runtimes

        metafunc.parametrize("rt", runtimes())


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Any:
    """No case is generated for a device that is not here."""
    found = yield
    if not isinstance(found, list):
        return found
    cases = [item for item in found if all(mark.args[0] for mark in item.iter_markers("needs_device"))]
    if collector.config.getoption("--require-cuda") and any(_names_device(item, _CUDA_IDS) for item in cases):
        cases = [item for item in cases if _names_device(item, _CUDA_IDS) or not _names_device(item, _CPU_IDS)]
    return cases


def _names_device(item: pytest.Function, ids: set[str]) -> bool:
    """Whether one of a case's parameters is one of these devices, by the ids that tests give devices."""
    return hasattr(item, "callspec") and not ids.isdisjoint(item.callspec.id.split("-"))


def _argnames(mark: pytest.Mark) -> list[str]:
    names = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [
        mark for mark in ("full", "more") if not config.getoption(f"--{mark}") and mark not in config.getoption("-m")
    ]
    part, parts = config.getoption("--shard") or (1, 1)
    also = set(Path(config.getoption("--also")).read_text().splitlines()) if config.getoption("--also") else set()
    # By name and not by position, so that a test's shard does not depend on which others exist.
    keep = [
        item
        for item in items
        if (zlib.crc32(item.nodeid.encode()) % parts == part - 1 or not also.isdisjoint(_names(item)))
        and not any(item.get_closest_marker(mark) for mark in left_out)
    ]
    if len(keep) < len(items):
        kept = set(keep)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = keep
    _begin_with_long_ones(items)


def _names(item: pytest.Item) -> set[str]:
    """How `--also` may name a case: by its file, its test, or itself."""
    file = item.nodeid.partition("::")[0]
    return {file, f"{file}::{getattr(item, 'originalname', '')}", item.nodeid}


def _begin_with_long_ones(items: list[pytest.Item]) -> None:
    """Long tests stand first in what test processes begin with: else one process ends long after the others."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    places = sorted(i % count * len(items) // count + i // count for i in range(len(long)))
    for place, item in zip(places, long, strict=True):
        others.insert(place, item)
    items[:] = others


def pytest_collection_finish() -> None:
    """What collecting has made stays to the end: tests, which collect garbage often, need not look through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _memory_goes_back() -> Iterator[None]:
    """Test processes share a GPU: memory that a file's tests no longer use is not kept for the next file.

    What is left after a file (libraries, compiled programs) stays to the end. The garbage collector does not look
    through it again, which saves a tenth of the time of tests/torch.
    """
    yield
    gc.collect()
    gc.freeze()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _no_hooks_stay() -> Iterator[None]:
    """What torch does with saved tensors is a setting of the thread: the next test would be computed otherwise."""
    yield
    torch = sys.modules.get("torch")
    hooks = torch and torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks:  # the next test shall not fail for this one's reason
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert not hooks, "hooks for saved tensors are left: of a context that was not closed, or of a kept traceback"


@pytest.fixture(autouse=True)
def _recordings_go_well() -> Iterator[None]:
    from tests import tally
    from tests.recordings import going_well

    before = tally.counts()
    with going_well():
        yield
    tally.note(before)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    from tests import tally

    tally.finished(session.config)


class _Processes:
    """What xdist tells its controller."""

    @staticmethod
    def pytest_testnodedown(node: Any) -> None:
        from tests import tally

        tally.add(node)


def pytest_report_header(config: pytest.Config) -> str:
    from tests.backends import cuda_devices

    found = cuda_devices()
    return f"devices: the CPU, {found} for CUDA" if found else "devices: the CPU (cases for CUDA are left out)"


def pytest_configure(config: pytest.Config) -> None:
    from tests.backends import cuda_devices

    if config.getoption("--require-cuda") and not cuda_devices():
        raise pytest.UsageError("--require-cuda: this machine has no CUDA device")
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_Processes())


@pytest.fixture
def interpreted() -> Iterator[None]:
    """For tests that watch what a layer calls: a replay calls none of it."""
    from tests.recordings import tapes

    with tapes("never"):
        yield


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    where = report.longrepr
    return str(where[2] if isinstance(where, tuple) else where).removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each reason to skip, not one for each place that skips."""
    reasons = Counter(map(_skip_reason, terminalreporter.stats.get("skipped", [])))
    if reasons:
        terminalreporter.section("skipped, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"SKIPPED [{count}] {reason}")
    from tests import tally

    if tally.told():
        terminalreporter.line(tally.told())


def _missing_cuda(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Why this report is a skip that `--require-cuda` forbids, else None."""
    if not (config.getoption("--require-cuda") and report.skipped) or hasattr(report, "wasxfail"):
        return None
    from tests.backends import HARDWARE

    reason = _skip_reason(report)
    return None if reason.startswith(HARDWARE) or not _CUDA_SKIP.search(reason) else reason


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if reason := _missing_cuda(item.config, report):
        report.outcome, report.longrepr = "failed", f"--require-cuda, but this test was skipped: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if reason := _missing_cuda(collector.config, report):
        report.outcome, report.longrepr = "failed", f"--require-cuda, but this file was skipped: {reason}"
    return report
