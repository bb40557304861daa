"""A GPU that is not there, under torch's CPU tensors: te_torch's modules run as on CUDA, and nothing is computed.

What is left of a step is Python: how many calls, launches and allocations it takes can be counted on any machine
(`counted`), and its time be compared with that of another form of it.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import te_torch.runtime as torch_runtime
from te_core import libraries
from te_core.backends.cuda import backend, executor, gemm_tune
from te_core.backends.cuda import cublaslt as lt_
from te_core.kernels import loader
from te_core.plan_cache import PlanCache
from te_core.runtime import Runtime
from te_core.tape import taped
from te_torch import function
from tests.core import fake_cudnn
from tests.core.test_cuda_launches import ATTRIBUTES

LAUNCHES: list[str] = []


class Driver:
    """CuPy's binding: a launch does nothing."""

    def launchKernel(self, *arguments: Any) -> None:  # noqa: N802
        pass

    def funcGetAttribute(self, number: int, function: int) -> int:  # noqa: N802
        return 64 if number == 4 else 0

    def funcSetAttribute(self, function: int, number: int, value: int) -> None:  # noqa: N802
        pass


class _Lt:
    """cuBLASLt: descriptors are numbers, products do nothing."""

    def __init__(self) -> None:
        self._next = 1

    def _number(self, *arguments: Any) -> int:
        self._next += 1
        return self._next

    create = matmul_desc_create = matrix_layout_create = _number

    def _nothing(self, *arguments: Any) -> None:
        pass

    matmul = matmul_desc_set_attribute = matrix_layout_destroy = matmul_desc_destroy = _nothing

    def get_version(self) -> int:
        return 130100


class _Allocator(torch_runtime.TorchAllocator):
    alignment = 16


@contextmanager
def null_device(folder: Any) -> Iterator[Runtime]:
    """Within it te_torch takes CPU tensors for those of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        rt, _ = fake_cudnn.runtime(patch, folder, stream=0)
        driver, lt = libraries.driver(), _Lt()
        driver.attribute = lambda index, name: ATTRIBUTES[name]
        driver.is_capturing = lambda stream: False
        driver.fill = lambda *arguments: None
        patch.setattr(libraries, "driver_version", lambda: (13, 0))
        numbers = iter(range(1, 1 << 20))
        kernels: dict[Any, loader.Kernel] = {}

        def get(rt: Runtime, name: str, *, entry: str | None = None, args: str, **constants: Any) -> loader.Kernel:
            key = (name, entry, args, *sorted(constants.items()))
            if key not in kernels:
                kernels[key] = loader.Kernel(entry or name, next(numbers), args, Driver())
            return kernels[key]

        patch.setattr(loader, "get", get)
        patch.setattr(lt_, "bindings", lambda: lt)
        patch.setattr(lt_, "set_value", lambda *arguments: None)
        algorithm = ctypes.create_string_buffer(64)
        patch.setattr(gemm_tune, "choose", lambda *arguments: gemm_tune.Choice(algorithm, 1 << 20, "nobody"))
        device = rt.device
        on_gpu = Runtime(device, 0, _Allocator(torch.device("cpu"), device), backend)
        on_gpu.plans = PlanCache()
        patch.setattr(torch_runtime, "_cpu", on_gpu)
        patch.setattr(torch_runtime, "CPU", device)
        patch.setattr(function, "_check_devices", lambda device, inputs: None)
        executor._executors.pop(device.index, None)
        on_gpu._threads = backend.executors(on_gpu)
        taped.forget()
        yield on_gpu
        taped.forget()


def counted(step: Callable[[], Any]) -> Counter[str]:
    """What a step does: Python calls ("python"), calls of C functions ("c")."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            found["python"] += 1
        elif event == "c_call":
            found["c"] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found
