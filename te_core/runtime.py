"""`Runtime`: where things run. Device, stream, allocator, backend, workspaces, plans. One per (device, stream).

The embedding story is two constructors: `Runtime.cpu()` and `Runtime.cuda(device, stream, allocator)`. A caller
who hands in a stream and an allocator gets every kernel on that stream and every byte from that allocator;
nothing is synchronised or allocated behind its back.

A runtime may be shared by threads: plans are immutable, and what a run writes into (argument blocks, descriptor
attributes, library handles) belongs to an executor of the calling thread. On CUDA that is one for each (thread,
device), set to a stream when it runs: a library's handle made at a stream's first use would break a graph's capture.
Scratch memory belongs to (thread, runtime), and so to a stream.

**In a capture** a CUDA graph keeps the addresses that its steps were given. Run what is captured on `rt.fresh()`: eager
code then never writes to the scratch memory that a replay writes to. Keep that runtime as long as the graph, unless
its allocator keeps a capture's memory for the graph, as torch's does.
"""

from __future__ import annotations

from _thread import get_ident
from importlib import import_module
from threading import local
from typing import Any, Protocol

import numpy as np

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.plan_cache import PlanCache
from te_core.tensor import CPU, META, Device, Tensor, cuda_device, from_numpy


class Allocator(Protocol):
    """Where a runtime's memory comes from."""

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """Uninitialised dense memory, alive as long as the tensor's owner, ready for use on `stream`."""
        ...


class Backend(Protocol):
    """The operations of one kind of device. Argument checks and outputs are the ops floor's business."""

    name: str

    def executors(self, rt: Runtime) -> local:
        """Where threads keep their executors, as `executor`: one place for all runtimes that may share them."""
        ...

    def executor(self, rt: Runtime) -> Any:
        """An executor for the calling thread, which has none."""
        ...

    def copy_to_host(self, rt: Runtime, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The values as a NumPy array; waits for the runtime's stream."""
        ...

    def copy_from_host(self, rt: Runtime, array: np.ndarray[Any, Any], out: Tensor) -> None:
        """Fill a tensor from a NumPy array."""
        ...

    def zero(self, rt: Runtime, out: Tensor) -> None:
        """Fill a dense tensor with zero bytes."""
        ...


def _load_backend(name: str) -> Any:
    """The one upward import of this project: a backend found by name at first use."""
    return import_module(f"te_core.backends.{name}").BACKEND


class HostAllocator:
    """NumPy memory, for the CPU backend."""

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """Uninitialised host memory."""
        if dtype is dtypes.float4_e2m1:
            raise ArgumentError("empty", "float4_e2m1", "byte-sized types", "allocate packed FP4 as uint8")
        t = from_numpy(np.empty(shape, dtype.numpy))
        return Tensor(t.ptr, t.shape, dtype, CPU, t.owner)


class _ByteOwner:
    """Frees a block of a byte-level allocator when the last tensor over it is gone."""

    __slots__ = ("free", "ptr", "stream")

    def __init__(self, ptr: int, stream: int, free: Any) -> None:
        self.ptr, self.stream, self.free = ptr, stream, free

    def __del__(self) -> None:
        self.free(self.ptr, self.stream)


class ByteAllocator:
    """Wraps a byte-level pair `alloc(nbytes, stream) -> address` and `free(address, stream)` (C, custom engines)."""

    def __init__(self, device: Device, alloc: Any, free: Any) -> None:
        self._device, self._alloc, self._free = device, alloc, free

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """A block of the wrapped allocator; freed on the stream it was asked for."""
        count = 1
        for n in shape:
            count *= n
        ptr = self._alloc(max(1, dtype.nbytes(count)), stream)
        return Tensor(ptr, tuple(shape), dtype, self._device, _ByteOwner(ptr, stream, self._free))


def _settled(shape: Any, dtype: Any) -> tuple[tuple[int, ...], DType]:
    """Shape and dtype of a tensor to be, as allocators take them: a dtype by any of its names."""
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if any(not hasattr(n, "__index__") or (isinstance(n, int) and n < 0) for n in sizes):
        raise ArgumentError(
            "Runtime.empty", f"shape {shape!r}", "a tuple of integers >= 0", "pass (rows, columns), say"
        )
    return sizes, dtypes.dtype(dtype)


class Runtime:
    """A device, a stream on it, and where memory comes from."""

    __slots__ = (
        "_apart",
        "_outgrown",
        "_threads",
        "_workspaces",
        "allocator",
        "backend",
        "device",
        "joins",
        "plans",
        "stream",
    )

    _cpu: Runtime | None = None
    _plans: dict[Device, PlanCache] = {}

    def __init__(self, device: Device, stream: int, allocator: Allocator, backend: Any) -> None:
        self.device = device
        self.stream = stream
        self.allocator = allocator
        self.backend = backend
        self.plans = Runtime._plans.setdefault(device, PlanCache())
        self._threads = backend.executors(self)
        self._workspaces: dict[tuple[int, str], Tensor] = {}
        self._outgrown: list[Tensor] = []
        self._apart: Runtime | None = None
        #: Whether small results that belong together may share one block of memory.
        self.joins = True

    @classmethod
    def cpu(cls, allocator: Allocator | None = None) -> Runtime:
        """The NumPy reference backend; one shared runtime unless an allocator is given."""
        if allocator is not None:
            return cls(CPU, 0, allocator, _load_backend("cpu"))
        if cls._cpu is None:
            cls._cpu = cls(CPU, 0, HostAllocator(), _load_backend("cpu"))
        return cls._cpu

    @classmethod
    def cuda(cls, device: int = 0, stream: int = 0, allocator: Allocator | None = None) -> Runtime:
        """A CUDA device and stream (0 is the default stream); memory from `allocator` or the driver's pool."""
        backend = _load_backend("cuda")
        place = cuda_device(device)
        if allocator is None:
            allocator = backend.default_allocator(place)
        return cls(place, stream, allocator, backend)

    def fresh(self) -> Runtime:
        """The same with scratch memory of its own: for what is captured in a CUDA graph."""
        return Runtime(self.device, self.stream, self.allocator, self.backend)

    def apart(self) -> Runtime:
        """The same without blocks that results share: for operators that a compiler knows by the shapes of their
        results, which must not depend on how large they are.
        """
        found = self._apart
        if found is None:
            found = self.fresh()
            found._workspaces, found._outgrown, found.joins = self._workspaces, self._outgrown, False
            self._apart = found
        return found

    @classmethod
    def meta(cls, allocator: Allocator) -> Runtime:
        """Computes nothing: runs a layer for the shapes and dtypes of its outputs only."""
        rt = cls(META, 0, allocator, _load_backend("meta"))
        rt.plans = PlanCache(capacity=0)  # sizes may be a compiler's symbols, which make no keys
        rt.joins = False
        return rt

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Uninitialised dense memory from the allocator."""
        try:
            return self.allocator.empty(shape, dtype, self.stream)
        except Exception:
            wanted = _settled(shape, dtype)  # what is wrong, if it is these
            if wanted == (shape, dtype):
                raise
        return self.allocator.empty(*wanted, self.stream)

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Dense memory filled with zeros."""
        out = self.empty(shape, dtype)
        self.backend.zero(self, out)
        return out

    def tensor(self, array: Any, dtype: Any = None) -> Tensor:
        """A new tensor on this device holding the values of a NumPy array (or nested list)."""
        array = np.asarray(array)
        if dtype is not None:
            array = array.astype(dtypes.dtype(dtype).numpy)
        out = self.empty(array.shape, dtypes.dtype(array.dtype))
        self.backend.copy_from_host(self, np.ascontiguousarray(array), out)
        return out

    def numpy(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The values of a tensor of this device as a NumPy array of its own; waits for the stream."""
        if not isinstance(tensor, Tensor):
            raise ArgumentError(
                "Runtime.numpy",
                f"a {type(tensor).__name__}",
                "a te_core Tensor",
                "convert it by its own library; te_core.from_dlpack(x) makes a Tensor over it",
            )
        result: np.ndarray[Any, Any] = self.backend.copy_to_host(self, tensor)
        return result

    def workspace(self, name: str, nbytes: int, zeroed: bool = False) -> int:
        """The address of scratch memory that this thread's next call of the same name may overwrite.

        Work of one stream runs in order, so a block may be used again at once; but two threads that share a
        runtime interleave their launches, so each has its own. A block only ever grows, and an outgrown one stays
        alive, because a captured graph may point at it; growing by doubles keeps the waste below the block itself.
        A `zeroed` one begins as zeros, which its users leave behind.
        """
        key = (get_ident(), name)
        block = self._workspaces.get(key)
        if block is None or block.shape[0] < nbytes:
            size = max(nbytes, 1 << 16)
            if block is not None:
                self._outgrown.append(block)
                size = max(size, 2 * block.shape[0])
            block = (self.zeros if zeroed else self.empty)((size,), dtypes.uint8)
            self._workspaces[key] = block
        return block.ptr

    def executor(self) -> Any:
        """What runs of this thread write into."""
        try:
            return self._threads.executor
        except AttributeError:
            made = self._threads.executor = self.backend.executor(self)
            return made

    def __repr__(self) -> str:
        return f"Runtime({self.device}, stream {self.stream:#x}, {self.backend.name})"
