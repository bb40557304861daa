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

import sys
from _thread import get_ident
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from te_core import dtypes, libraries
from te_core.driver import taken_off
from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.plan_cache import PlanCache
from te_core.tensor import CPU, META, Device, Tensor, cuda_device, from_numpy

if TYPE_CHECKING:
    from te_core.backend import Backend


class Allocator(Protocol):
    """Where a runtime's memory comes from."""

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """Uninitialised dense memory, alive as long as the tensor's owner, ready for use on `stream`."""
        ...

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Give the tensor's memory to nobody, once it is free, before the work that is on `stream` then is done.

        Memory that is not the allocator's is its owner's to keep.
        """
        ...

    def beside(self, stream: int) -> Allocator:
        """What gives memory for use on another stream: itself, if `empty` goes by the stream that it is told."""
        ...


def _load_backend(name: str) -> Backend:
    """The one upward import of this project: a backend found by name at first use."""
    backend: Backend = import_module(f"te_core.backends.{name}").backend
    return backend


class ByStream:
    """An allocator whose `empty` goes by the stream that it is told."""

    def beside(self, stream: int) -> Any:
        """Itself."""
        return self


class HostAllocator(ByStream):
    """NumPy memory, for the CPU backend."""

    alignment = 1  # NumPy's code reads any address

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """Uninitialised host memory."""
        if dtype is dtypes.float4_e2m1:
            raise ArgumentError("empty", "float4_e2m1", "byte-sized types", "allocate packed FP4 as uint8")
        return from_numpy(np.empty(shape, dtype.numpy))

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """The host has one stream."""


class _ByteOwner:
    """Frees a block of a byte-level allocator when the last tensor over it is gone."""

    __slots__ = ("give_back", "others", "ptr", "stream")

    def __init__(self, ptr: int, stream: int, give_back: Callable[[int, int, tuple[int, ...]], None]) -> None:
        self.ptr, self.stream, self.give_back = ptr, stream, give_back
        self.others: tuple[int, ...] = ()  # streams that use it, too

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.others and ending():
            return  # the interpreter has taken the bindings apart: nobody can say whether the others are done
        self.give_back(self.ptr, self.stream, self.others)


class ByteAllocator(ByStream):
    """Wraps a byte-level pair `alloc(nbytes, stream) -> address` and `free(address, stream)` (C, custom engines)."""

    def __init__(self, device: Device, alloc: Any, free: Any) -> None:
        self._device, self._alloc, self._free = device, alloc, free
        self._refused: list[tuple[int, int, tuple[int, ...]]] = []  # what a capture did not let go back

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """A block of the wrapped allocator; freed on the stream it was asked for."""
        if self._refused:
            for block in taken_off(self._refused):
                self._give_back(*block)
        count = 1
        for n in shape:
            count *= n
        ptr = self._alloc(max(1, dtype.nbytes(count)), stream)
        return Tensor(ptr, tuple(shape), dtype, self._device, _ByteOwner(ptr, stream, self._give_back))

    def _give_back(self, ptr: int, stream: int, others: tuple[int, ...]) -> None:
        """Free a block once the work that other streams have now is done."""
        if others:
            driver = libraries.driver()
            if not driver.captured_alike(self._device.index, stream, others):
                self._refused.append((ptr, stream, others))
                return
            for other in others:
                driver.order_streams(self._device.index, other, stream)
        self._free(ptr, stream)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Free the block on its own stream, which then waits for `stream`."""
        owner = tensor.memory
        known = isinstance(owner, _ByteOwner) and stream not in (owner.stream, *owner.others)
        if known and self._device.kind == "cuda":
            owner.others = (*owner.others, stream)


def _settled(shape: Any, dtype: Any) -> tuple[tuple[int, ...], DType]:
    """Shape and dtype of a tensor to be, as allocators take them: a dtype by any of its names."""
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if any(not hasattr(n, "__index__") or (isinstance(n, int) and n < 0) for n in sizes):
        allowed, do = "a tuple of integers >= 0", "pass (rows, columns), say"
        raise ArgumentError("Runtime.empty", f"shape {shape!r}", allowed, do)
    return sizes, dtypes.dtype(dtype)


def _plans(device: Device) -> PlanCache:
    """Those that all runtimes of a device share."""
    return PlanCache()


def _of_host(device: Device) -> Runtime:
    return Runtime(device, 0, HostAllocator(), _load_backend("cpu"))


class Runtime:
    """A device, a stream on it, and where memory comes from."""

    __slots__ = (
        "_apart",
        "_outgrown",
        "_sides",
        "_threads",
        "_workspaces",
        "alignment",
        "allocator",
        "backend",
        "device",
        "joins",
        "plans",
        "recorder",
        "stream",
    )

    def __init__(self, device: Device, stream: int, allocator: Allocator, backend: Backend) -> None:
        self.device = device
        self.stream = stream
        self.allocator = allocator
        #: What every allocation is a multiple of. (Where nobody says, what every CUDA library asks for.)
        self.alignment: int = getattr(allocator, "alignment", 16)
        self.backend = backend
        #: While a layer is recorded (te_core/tape): what takes each step in the place of the device.
        self.recorder: Any = None
        self.plans = device.of(_plans)
        self._threads = backend.executors(self)
        self._workspaces: dict[tuple[int, str], Tensor] = {}
        self._outgrown: list[Tensor] = []
        self._apart: Runtime | None = None
        self._sides: dict[str, Runtime] = {}
        #: Whether small results that belong together may share one block of memory.
        self.joins = True

    @classmethod
    def cpu(cls, allocator: Allocator | None = None) -> Runtime:
        """The NumPy reference backend; one shared runtime unless an allocator is given."""
        if allocator is not None:
            return cls(CPU, 0, allocator, _load_backend("cpu"))
        return CPU.of(_of_host)

    @classmethod
    def cuda(cls, device: int = 0, stream: int = 0, allocator: Allocator | None = None) -> Runtime:
        """A CUDA device and stream (0 is the default stream); memory from `allocator` or the driver's pool."""
        backend = _load_backend("cuda")
        place = cuda_device(device)
        if allocator is None:
            allocator = backend.default_allocator(place)
        return cls(place, stream, allocator, backend)

    def fresh(self) -> Runtime:
        """A runtime like this one with scratch memory of its own: for what is captured in a CUDA graph."""
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

    def side(self, name: str = "side") -> Runtime:
        """This device on another stream, made once for each name; where there is one stream only, this runtime.

        A name that begins with 0x is the address of a caller's stream.

        Nothing orders the two but `wait`, and memory that both use is to be told to the other's allocator:

            side.wait(rt)                 what side does from here on sees what rt has done
            ...                           work on side, and work on rt beside it
            side.record(x)                x is rt's: its memory is not given away before side has read it
            rt.wait(side)                 and back again, before rt's caller goes on
        """
        found = self._sides.get(name)
        if found is None:
            stream = self.backend.stream(self, name)
            if stream == self.stream:
                return self
            found = Runtime(self.device, stream, self._of_allocator("beside")(stream), self.backend)
            found.joins = self.joins
            self._sides[name] = found
        return found

    def wait(self, other: Runtime) -> None:
        """Later work of this runtime waits for all work that `other` has been given by now; the host does not."""
        if other.device is not self.device:
            raise ArgumentError("Runtime.wait", f"{other!r} for {self!r}", "runtimes of one device", "use its runtime")
        if other.stream != self.stream:
            self.backend.order(self, other.stream, self.stream)

    def record(self, *tensors: Tensor) -> None:
        """Note that work on this runtime's stream uses these, which another stream's allocator may own."""
        record = self._of_allocator("record_stream")
        for tensor in tensors:
            record(tensor, self.stream)

    def _of_allocator(self, name: str) -> Any:
        """What only those need who work on several streams."""
        try:
            return getattr(self.allocator, name)
        except AttributeError:
            got = f"a {type(self.allocator).__name__} without {name}"
            allowed = "an allocator with `beside` and `record_stream` (te_core.runtime.Allocator)"
            raise ArgumentError("Runtime.side", got, allowed, "add them, or work on one stream") from None

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
            do = "convert it by its own library; te_core.from_dlpack(x) makes a Tensor over it"
            raise ArgumentError("Runtime.numpy", f"a {type(tensor).__name__}", "a te_core Tensor", do)
        result: np.ndarray[Any, Any] = self.backend.copy_to_host(self, tensor)
        return result

    def synchronize(self) -> None:
        """The host waits until all work that this runtime was given is done."""
        self.numpy(self.empty((0,), dtypes.uint8))  # copies nothing, once the stream is empty

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
