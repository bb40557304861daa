"""The CUDA backend: cuBLASLt, and kernels of our own. One file per operation, named as in `te_core.ops`.

An operation's file is imported when the operation is first used; this file holds what all of them stand on.
"""

from __future__ import annotations

from importlib import import_module
from threading import local
from typing import Any

import numpy as np

from te_core import libraries
from te_core.driver import Driver
from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.kernels.loader import Arguments
from te_core.runtime import Runtime
from te_core.tensor import Device, Tensor

#: Where the operations are: `rt.backend.<name>` is a function of one of these sibling files.
FILES = (
    "gemm", "norm", "quantize", "quantize_block", "quantize_grouped", "quantize_mxfp8", "quantize_nvfp4", "activation",
    "elementwise", "matrix", "attention", "attention_fp8", "scale_pairs", "rope", "softmax", "l2_norm", "kv_cache",
)  # fmt: skip


class Executor:
    """What one thread's runs on one device write into: an argument block, descriptors, library handles.

    It is never destroyed: captured graphs may hold memory of its handles. A thread that ends leaves it to the next.
    """

    __slots__ = ("_index", "arguments", "attention", "context", "driver", "gemms")

    def __init__(self, index: int) -> None:
        self._index = index
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

    def __init__(self) -> None:
        self.left: list[Executor] = []
        self.threads = local()


class _Lease:
    """A thread's hold on its executor."""

    __slots__ = ("_executor", "_left")

    def __init__(self, executor: Executor, left: list[Executor]) -> None:
        self._executor, self._left = executor, left

    def __del__(self) -> None:
        self._left.append(self._executor)


class _Block:
    """Device memory of the driver's pool; returns to it in stream order when the last tensor over it is gone."""

    __slots__ = ("_driver", "_index", "_others", "ptr", "stream")

    def __init__(self, driver: Driver, index: int, ptr: int, stream: int) -> None:
        self._driver, self._index, self.ptr, self.stream = driver, index, ptr, stream
        self._others: tuple[int, ...] = ()

    def record_stream(self, stream: int) -> None:
        """Note that another stream uses the memory: it is freed only after that stream's work."""
        if stream not in self._others:
            self._others = (*self._others, stream)

    def __del__(self) -> None:
        for other in self._others:
            self._driver.order_streams(self._index, other, self.stream)
        self._driver.free(self._index, self.ptr, self.stream)


class PoolAllocator:
    """Memory from a pool of the driver, allocated and freed in stream order (no synchronisation)."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._driver = libraries.driver()
        self._driver.primary_context(device.index)

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """Uninitialised dense memory for use on `stream`."""
        count = 1
        for n in shape:
            count *= n
        index = self._device.index
        ptr = self._driver.allocate(index, dtype.nbytes(count), stream)
        return Tensor(ptr, tuple(shape), dtype, self._device, _Block(self._driver, index, ptr, stream))


class CudaBackend:
    """Finds each operation in its file, and moves bytes."""

    name = "cuda"

    def __init__(self) -> None:
        self._executors: dict[int, _Executors] = {}

    def executors(self, rt: Runtime) -> local:
        """One place for all runtimes of a device."""
        return self._executors.setdefault(rt.device.index, _Executors()).threads

    def executor(self, rt: Runtime) -> Executor:
        """One that a thread has left, or a new one."""
        index = rt.device.index
        of_device = self._executors[index]
        try:
            found = of_device.left.pop()
        except IndexError:
            found = Executor(index)
        of_device.threads.lease = _Lease(found, of_device.left)
        return found.attach()

    def default_allocator(self, device: Device) -> PoolAllocator:
        """The driver's memory pool."""
        return PoolAllocator(device)

    def zero(self, rt: Runtime, out: Tensor) -> None:
        """Fill a dense tensor with zero bytes."""
        if out.size:
            driver = libraries.driver()
            with driver.on(rt.device.index):
                driver.fill(out.ptr, 0, out.nbytes, rt.stream)

    def copy_to_host(self, rt: Runtime, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The values as a NumPy array; waits for the runtime's stream."""
        _check_place("copy_to_host", rt, tensor)
        strides = tensor.row_major_strides()
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) if tensor.size else 0
        host = np.empty(extent, tensor.dtype.numpy)
        driver = libraries.driver()
        with driver.on(rt.device.index):
            if extent:
                driver.copy_to_host(host.ctypes.data, tensor.ptr, host.nbytes, rt.stream)
            driver.synchronize(rt.stream)
        if tensor.is_contiguous:
            return host.reshape(tensor.shape)
        width = host.itemsize
        view = np.ndarray(tensor.shape, host.dtype, host, strides=tuple(s * width for s in strides))
        return np.ascontiguousarray(view)

    def copy_from_host(self, rt: Runtime, array: np.ndarray[Any, Any], out: Tensor) -> None:
        """Fill a dense tensor from a dense NumPy array of its dtype; the array may be changed afterwards."""
        _check_place("copy_from_host", rt, out)
        if not out.is_contiguous or not array.flags.c_contiguous or array.nbytes != out.nbytes:
            raise ArgumentError(
                "copy_from_host",
                f"{array.shape} of {array.dtype} into {out!r}",
                "dense memory of equal size",
                "copy to a dense tensor of the array's shape and dtype",
            )
        if out.size:
            driver = libraries.driver()
            with driver.on(rt.device.index):
                driver.copy_to_device(out.ptr, array.ctypes.data, array.nbytes, rt.stream)

    def __getattr__(self, operation: str) -> Any:
        if not operation.startswith("_"):
            for file in FILES:
                module = _import(file)
                if hasattr(module, operation):
                    function = getattr(module, operation)
                    setattr(self, operation, function)  # the next look-up does not come here
                    return function
        raise AttributeError(f"the CUDA backend has no operation {operation!r} in {', '.join(FILES)}")


def _import(file: str) -> Any:
    name = f"{__name__}.{file}"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def _check_place(operation: str, rt: Runtime, tensor: Tensor) -> None:
    if tensor.device is not rt.device:
        raise ArgumentError(
            operation, f"{tensor!r} on a runtime of {rt.device}", "tensors of the runtime's device", "use its runtime"
        )


BACKEND = CudaBackend()
