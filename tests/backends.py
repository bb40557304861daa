"""On which backends a test runs, and what it needs beyond the CPU (`from tests.backends import ...`).

A test that takes an argument `rt` runs once per backend (tests/conftest.py); to name the backends oneself:
`@pytest.mark.parametrize("rt", runtimes())`. The ids are `cpu` and `cuda`.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec

import pytest

from te_core.runtime import Runtime

# `pytest --require-cuda` lets those skips pass whose reason begins with this: what no software could mend.
HARDWARE = "hardware: "


@cache
def cuda_devices() -> int:
    """The number of CUDA devices, asked of the driver and not of the code under test."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


@cache
def capability() -> tuple[int, int]:
    """The compute capability of the first device; (0, 0) where there is none."""
    if not cuda_devices():
        return (0, 0)
    driver = ctypes.CDLL("libcuda.so.1")
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, 0)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0)
    return major.value, minor.value


@cache
def cuda_runtime() -> Runtime:
    """The CUDA runtime under test: torch's stream and allocator where torch is, our own elsewhere."""
    if find_spec("torch") is None:
        return Runtime.cuda()
    import torch

    from te_torch.runtime import runtime_for

    return runtime_for(torch.empty(0, device="cuda"))


def needs_device(is_here: bool, what: str) -> pytest.MarkDecorator:
    """For a test, or one of its cases, of a device: tests/conftest.py generates no case whose device is not here."""
    return pytest.mark.needs_device(is_here, what)


#: For a test of CUDA alone.
requires_cuda = needs_device(cuda_devices() > 0, "CUDA")


#: For what is heavy without a GPU: `make test-more` runs it there, and the suite where there is one.
more_without_gpu = pytest.mark.skipif(False, reason="") if cuda_devices() else pytest.mark.more


def jax_on_gpu() -> bool:
    """Whether this is the process whose tests use JAX on a GPU (tests/core/test_jax_process.py)."""
    return cuda_devices() > 0 and os.environ.get("JAX_PLATFORMS") != "cpu"


#: For a test of JAX on a GPU.
requires_jax_cuda = needs_device(jax_on_gpu(), "JAX on a GPU")


def requires_gpus(count: int, ranks: bool = False) -> pytest.MarkDecorator:
    """For a test over several devices; of `ranks`, which may share one where they are asked to (`make gpu-ranks`)."""
    if ranks and os.environ.get("TE_TESTS_RANKS_SHARE") == "1":
        count = 1
    return needs_device(cuda_devices() >= count, f"{count} GPUs")


def requires_capability(major: int, minor: int = 0) -> pytest.MarkDecorator:
    """For a test of something only newer devices can do."""
    return needs_device(capability() >= (major, minor), f"sm_{major}{minor}")


def runtimes() -> list[object]:
    """Parameters for `rt`: the CPU always, CUDA where there is a device."""
    cuda = [pytest.param(cuda_runtime(), id="cuda")] if cuda_devices() else []
    return [pytest.param(Runtime.cpu(), id="cpu"), *cuda]


def devices() -> list[str]:
    """The same for tests of modules: a parameter `device`, named as torch names it."""
    return ["cpu", "cuda"] if cuda_devices() else ["cpu"]


#: For a test of modules on every device that is here.
on_devices = pytest.mark.parametrize("device", devices())
