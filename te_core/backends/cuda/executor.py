"""What a run of the CUDA backend writes into, one for each thread and device."""

from __future__ import annotations

import itertools
from threading import local
from typing import Any

from te_core import libraries
from te_core.kernels.loader import Arguments
from te_core.runtime import Runtime
from te_core.tensor import Device

_numbers = itertools.count(1)


class Executor:
    """What one thread's runs on one device write into: an argument block, descriptors, library handles.

    It is never destroyed: captured graphs may hold memory of its handles. A thread that ends leaves it to the next.
    """

    __slots__ = ("_index", "arguments", "attention", "context", "driver", "gemms", "number")

    def __init__(self, index: int) -> None:
        self._index = index
        self.number = next(_numbers)  # tapes know it by this (te_core/tape/bound.py)
        self.driver = libraries.driver()
        self.context = 0
        self.arguments = Arguments()
        self.gemms: Any = None  # made by gemm.py at the first matrix product
        self.attention: Any = None  # made by cudnn.py at the first attention

    def attach(self) -> Executor:
        """Prepare the calling thread for the device."""
        self.context = self.driver.attach(self._index)  # 0: this thread is on the only device for good
        return self


class _Executors:
    """Those of one device: where threads keep theirs, and what threads that ended have left."""

    __slots__ = ("left", "threads")

    def __init__(self, device: Device) -> None:
        self.left: list[Executor] = []
        self.threads = local()


class _Lease:
    """A thread's hold on its executor."""

    __slots__ = ("_executor", "_left")

    def __init__(self, executor: Executor, left: list[Executor]) -> None:
        self._executor, self._left = executor, left

    def __del__(self) -> None:
        self._left.append(self._executor)


def executors(rt: Runtime) -> local:
    """One place for all runtimes of a device."""
    return rt.device.of(_Executors).threads


def executor(rt: Runtime) -> Executor:
    """One that a thread has left, or a new one."""
    of_device = rt.device.of(_Executors)
    try:
        found = of_device.left.pop()
    except IndexError:
        found = Executor(rt.device.index)
    of_device.threads.lease = _Lease(found, of_device.left)
    return found.attach()
