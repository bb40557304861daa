"""Device memory, in stream order; bytes to and from the host; streams beside a runtime's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from te_core import libraries
from te_core.driver import Driver
from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.runtime import Runtime
from te_core.symbols import STREAM, patches
from te_core.tensor import Device, Tensor


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

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # the interpreter has taken the bindings apart; memory goes with the process
            self._driver.free(self._index, self.ptr, self.stream, self._others)


class PoolAllocator:
    """Memory from a pool of the driver, allocated and freed in stream order (no synchronisation)."""

    alignment = 256  # of all that the driver allocates

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

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Free the tensor's memory only after the work that is on `stream` when its last tensor goes."""
        owner = tensor.memory
        if isinstance(owner, _Block) and stream != owner.stream:
            owner.record_stream(stream)

    def beside(self, stream: int) -> PoolAllocator:
        """Itself: memory is allocated on the stream that asks."""
        return self


default_allocator = PoolAllocator


def _streams(device: Device) -> dict[tuple[int, str], int]:
    """By the stream beside which it is, and name: streams that runtimes asked for. They are kept, as executors are."""
    return {}


def stream(rt: Runtime, name: str) -> int:
    """The stream of this name beside a runtime's own; it waits for no other by itself."""
    if name.startswith("0x"):
        return int(name, 16)
    known, key = rt.device.of(_streams), (rt.stream, name)
    found = known.get(key)
    if found is None:
        driver = libraries.driver()
        with driver.at_first_use(rt.device.index):
            found = known.setdefault(key, driver.create_stream())
    return found


def order(rt: Runtime, producer: int, consumer: int) -> None:
    """Later work of `consumer` waits for the work now on `producer`."""
    libraries.driver().order_streams(rt.device.index, producer, consumer)


def zero(rt: Runtime, out: Tensor) -> None:
    """Fill a dense tensor with zero bytes."""
    if not out.size:
        return
    if rt.recorder is not None:
        rt.recorder.add(Fill(out, rt.recorder.bases))
        return
    driver = libraries.driver()
    with driver.on(rt.device.index):
        driver.fill(out.ptr, 0, out.nbytes, rt.stream)


class Fill:
    """A recorded fill with zeros."""

    __slots__ = ("address", "nbytes", "patches")

    def __init__(self, out: Tensor, bases: Sequence[int]) -> None:
        self.address, self.nbytes, self.patches = out.ptr, out.nbytes, patches((out.ptr,), bases)

    def bind(self, bound: Any, rt: Runtime) -> None:
        """See `te_core.tape.tape.Step`."""
        bound.call(self, libraries.driver().fill, (self.address, 0, self.nbytes, STREAM), self.patches)

    def __repr__(self) -> str:
        return f"fill {self.nbytes} bytes"


def copy_to_host(rt: Runtime, tensor: Tensor) -> np.ndarray[Any, Any]:
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


def copy_from_host(rt: Runtime, array: np.ndarray[Any, Any], out: Tensor) -> None:
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


def _check_place(operation: str, rt: Runtime, tensor: Tensor) -> None:
    if tensor.device is not rt.device:
        raise ArgumentError(
            operation, f"{tensor!r} on a runtime of {rt.device}", "tensors of the runtime's device", "use its runtime"
        )
