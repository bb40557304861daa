"""te_torch over a GPU that is not there: modules take torch's CPU tensors for those of a GPU, and nothing is computed.

Under the real backend lies the machine of `tests/core/fake_cuda.py`, which here counts instead of noting. What is left
of a step is Python: how many calls, allocations and launches it takes is the same on any machine (`Null.counted`), and
its time can be compared with that of another form of it.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import te_torch.runtime as torch_runtime
from te_core.backends.cuda import cublaslt
from te_core.runtime import Runtime
from te_core.tape import taped
from te_core.tensor import cuda_device
from te_torch import function
from tests.core import fake_cuda, fake_cudnn

#: What torch's allocator on the CPU keeps to.
ALIGNED = 64
#: Frames of these files, and what they call, are none of a step's: they stand for libraries.
_FAKES = {__file__, *map(str, Path(fake_cuda.__file__).parent.glob("fake_*.py"))}
_ALLOCATING = ("_empty_strided_cpu", "empty")


class Counts(NamedTuple):
    """What a step takes."""

    python: int  # calls of Python functions, torch's too
    c: int  # calls of C functions by Python
    allocations: int
    launches: int  # of kernels, products, graphs of attention; fills

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self._asdict().items())


class _Allocator(torch_runtime.TorchAllocator):
    alignment = ALIGNED
    taken = 0  # by replays: what makes their tensors is no function that a profiler is told of

    def _maker(self, take: Any, quick: Any) -> Any:
        make = super()._maker(take, quick)

        def counting() -> Any:
            self.taken += 1
            return make()

        return counting


class _Binding(fake_cuda.Binding):
    def launchKernel(self, *arguments: int) -> None:  # noqa: N802  CuPy's name
        self.machine.note("launch", None, {}, 0)


class _Lt(fake_cuda.Lt):
    def matmul(self, *arguments: int) -> None:
        self.machine.note("gemm", None, {}, 0)


class _Graph(fake_cudnn.Built):
    def _execute_with_raw_ptrs(self, *arguments: int) -> None:
        calls: Any = self.calls
        calls.machine.note("cudnn", None, {}, 0)


class Null(fake_cuda.Machine):
    """The machine; it keeps no addresses, for torch's memory is none of its own."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Any) -> None:
        super().__init__(patch, folder)
        self.launches = 0
        self.binding, self.lt = _Binding(self), _Lt(self)
        patch.setattr(cublaslt, "_bindings", self.lt)
        patch.setattr(fake_cudnn, "Built", _Graph)
        patch.setattr(taped, "ALIGNED", ALIGNED)
        device = cuda_device(0)
        self.allocator = _Allocator(torch.device("cpu"), device)
        self.rt = Runtime.cuda(0, 0, self.allocator)
        patch.setattr(torch_runtime, "_cpu", self.rt)
        patch.setattr(torch_runtime, "CPU", device)
        patch.setattr(function, "_check_devices", lambda device, inputs: None)

    def _noting(self, workspace: Any) -> Any:
        return workspace

    def note(self, kind: str, what: Any, addresses: dict[str, int], stream: int) -> None:
        """Count it."""
        self.launches += 1

    def counted(self, step: Callable[[], Any], times: int = 12) -> Counts:
        """What a step takes: the least of several, for a new address may cost a descriptor, or a plan."""
        gc.collect()  # what is let go of meanwhile would count
        gc.disable()
        try:
            found = [self._counted(step) for _ in range(times)]
        finally:
            gc.enable()
        return Counts(*map(min, zip(*found, strict=True)))

    def _counted(self, step: Callable[[], Any]) -> Counts:
        found: Counter[str] = Counter()
        launches, taken, inside = self.launches, self.allocator.taken, 0  # inside: so deep in a fake

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal inside
            if event == "call":
                inside += inside > 0 or frame.f_code.co_filename in _FAKES
                found["python"] += not inside
            elif event == "return":
                inside -= inside > 0
            elif event == "c_call" and not inside:
                found["c"] += 1
                found["allocations"] += argument.__name__ in _ALLOCATING

        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
        allocations = found["allocations"] + self.allocator.taken - taken
        return Counts(found["python"], found["c"] - 1, allocations, self.launches - launches)


@contextmanager
def null_device(folder: Any) -> Iterator[Null]:
    """Within it te_torch takes CPU tensors for those of a GPU, and backward runs in the calling thread."""
    taped.forget()
    with pytest.MonkeyPatch.context() as patch, torch.autograd.set_multithreading_enabled(False):
        yield Null(patch, folder)
    taped.forget()
