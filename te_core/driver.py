"""The few calls of the CUDA driver that te_core makes itself, through ctypes.

Contexts: the runtime API of every framework works in a device's primary context, and so do we. On a machine
with one visible device a thread needs it current once; with several, work for a device is bracketed by
`enter` and `leave`, so that the device a framework has chosen for the thread stays chosen.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, TypeVar

from te_core.errors import LibraryError

#: CUdevice_attribute numbers by the name te_core uses.
ATTRIBUTES = {
    "multiprocessors": 16,
    "major": 75,
    "minor": 76,
    "l2_bytes": 38,
    "shared_per_block_optin": 97,
    "shared_per_multiprocessor": 81,
    "threads_per_multiprocessor": 39,
    "memory_pools": 115,
}

_NON_BLOCKING = 1  # of cuStreamCreate
_RELAXED = 2  # of CUstreamCaptureMode
_MAPPED = 3  # of cuMemHostRegister: for all contexts, and with an address on devices
LEGACY_STREAM = 1  # DLPack's number and the driver's own handle

_P = c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDeviceTotalMem_v2": [POINTER(c_size_t), c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSetCurrent": [_P],
    "cuCtxPushCurrent_v2": [_P],
    "cuCtxSynchronize": [],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuMemPoolCreate": [POINTER(c_void_p), _P],
    "cuMemPoolSetAttribute": [_P, c_int, _P],
    "cuMemAllocFromPoolAsync": [POINTER(c_uint64), c_size_t, _P, _P],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFreeAsync": [c_uint64, _P],
    "cuMemFree_v2": [c_uint64],
    "cuMemcpyHtoDAsync_v2": [c_uint64, _P, c_size_t, _P],
    "cuMemcpyDtoHAsync_v2": [_P, c_uint64, c_size_t, _P],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, _P],
    "cuMemsetD8Async": [c_uint64, ctypes.c_ubyte, c_size_t, _P],
    "cuMemHostRegister_v2": [_P, c_size_t, c_uint],
    "cuMemHostUnregister": [_P],
    "cuMemHostGetDevicePointer_v2": [POINTER(c_uint64), _P, c_uint],
    "cuStreamBatchMemOp_v2": [_P, c_uint, _P, c_uint],
    "cuStreamSynchronize": [_P],
    "cuStreamWaitEvent": [_P, _P, c_uint],
    "cuStreamIsCapturing": [_P, POINTER(c_int)],
    "cuStreamCreate": [POINTER(c_void_p), c_uint],
    "cuStreamDestroy_v2": [_P],
    "cuThreadExchangeStreamCaptureMode": [POINTER(c_int)],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventDestroy_v2": [_P],
    "cuEventRecord": [_P, _P],
    "cuEventSynchronize": [_P],
    "cuEventElapsedTime": [POINTER(ctypes.c_float), _P, _P],
    "cuTensorMapEncodeTiled": [_P, c_int, c_uint, c_uint64, _P, _P, _P, _P, c_int, c_int, c_int, c_int],
}


class _PoolProperties(ctypes.Structure):
    """CUmemPoolProps: pinned device memory of one device, not shared with other processes."""

    _fields_ = [
        ("allocation_type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("location_id", c_int),
        ("security", c_void_p),
        ("max_size", c_size_t),
        ("reserved", ctypes.c_ubyte * 56),
    ]


class MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams: a wait for a number in memory, or a write of one."""

    _fields_ = [
        ("operation", c_int),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint),
        ("alias", c_uint64),
        ("reserved", c_uint64),
    ]


#: By word: the CUstreamBatchMemOpType, and flags: a wait is for that very number.
_OPERATIONS = {"wait": (1, 1), "write": (2, 0)}


def flag_operations(*operations: tuple[str, int, int]) -> ctypes.Array[Any]:
    """For `Driver.flags`, one after another: (word, address of 32 bits, number).

    "wait" until the number stands there, or "write" it, once all that was on the stream before is done, and can be seen
    by who sees the number.
    """
    made = (MemoryOperation * len(operations))()
    for place, (word, address, value) in zip(made, operations, strict=True):
        place.operation, place.flags = _OPERATIONS[word]
        place.address, place.value = address, value
    return made


Block = TypeVar("Block")


def taken_off(refused: list[Block]) -> Iterator[Block]:
    """What a list has now, one by one: another thread may be doing the same."""
    for _ in range(len(refused)):
        try:
            block = refused.pop(0)
        except IndexError:
            return
        yield block


class Driver:
    """libcuda, initialised. `lib` may be handed in by tests."""

    def __init__(self, lib: Any = None) -> None:
        self._lib = lib if lib is not None else _open_libcuda()
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._lib, name)
            function.argtypes, function.restype = arguments, c_int
        self._check(self._lib.cuInit(0), "cuInit")
        count = c_int(0)
        self._check(self._lib.cuDeviceGetCount(byref(count)), "cuDeviceGetCount")
        self.device_count = count.value
        self._contexts: dict[int, int] = {}
        self._pools: dict[int, int] = {}
        self._refused: list[tuple[int, int, int, tuple[int, ...]]] = []  # memory that a capture would not let go
        self._lock = threading.RLock()
        self._local = threading.local()
        self.current_context = self._current_context if lib is not None else self._fast_current_context()

    def _check(self, status: int, call: str) -> None:
        if status:
            raise self.failed(status, call)

    def failed(self, status: int, call: str) -> LibraryError:
        """What is raised for a status of a call."""
        name, text = c_char_p(), c_char_p()
        self._lib.cuGetErrorName(status, byref(name))
        self._lib.cuGetErrorString(status, byref(text))
        says = f"{(name.value or b'?').decode()} ({status}): {(text.value or b'').decode()}"
        do = "see the message; an earlier kernel's fault may be reported here "
        do += "(rerun with CUDA_LAUNCH_BLOCKING=1 to find it)"
        return LibraryError(call, says, "success", do)

    def address(self, name: str) -> int:
        """Where a function of the library is, for code that calls it by itself."""
        return ctypes.cast(getattr(self._lib, name), c_void_p).value or 0

    # ------------------------------------------------------------------------------ devices and contexts

    def name(self, index: int) -> str:
        """The device's marketing name."""
        buffer = ctypes.create_string_buffer(256)
        self._check(self._lib.cuDeviceGetName(buffer, 256, index), "cuDeviceGetName")
        return buffer.value.decode()

    def attribute(self, index: int, name: str) -> int:
        """A device attribute by its name in `ATTRIBUTES`."""
        value = c_int(0)
        self._check(self._lib.cuDeviceGetAttribute(byref(value), ATTRIBUTES[name], index), f"device attribute {name}")
        return value.value

    def memory(self, index: int) -> int:
        """Bytes of device memory."""
        value = c_size_t(0)
        self._check(self._lib.cuDeviceTotalMem_v2(byref(value), index), "cuDeviceTotalMem")
        return value.value

    def primary_context(self, index: int) -> int:
        """The device's primary context, retained once for the life of the process."""
        found = self._contexts.get(index)
        if found is not None:
            return found
        if not 0 <= index < self.device_count:
            do = "choose a visible device (CUDA_VISIBLE_DEVICES hides the others)"
            raise LibraryError("use a CUDA device", f"device {index}", f"0 to {self.device_count - 1}", do)
        with self._lock:
            if index not in self._contexts:
                context = c_void_p()
                self._check(self._lib.cuDevicePrimaryCtxRetain(byref(context), index), "cuDevicePrimaryCtxRetain")
                self._contexts[index] = context.value or 0
        return self._contexts[index]

    def _fast_current_context(self) -> Callable[[], int]:
        """CuPy's binding (a fifth of ctypes' cost) where several devices make it a question of each launch."""
        if self.device_count == 1:
            return self._current_context
        try:
            from cupy_backends.cuda.api.driver import ctxGetCurrent
        except ImportError:
            return self._current_context
        found: Callable[[], int] = ctxGetCurrent
        return found

    def _current_context(self) -> int:
        """The calling thread's context, 0 if it has none."""
        context = c_void_p()
        self._check(self._lib.cuCtxGetCurrent(byref(context)), "cuCtxGetCurrent")
        return context.value or 0

    def attach(self, index: int) -> int:
        """Prepare the calling thread to work on a device; returns the context to bracket work with, or 0.

        With one visible device its context becomes the thread's own, and no bracket is ever needed.
        """
        try:
            known: int = self._local.attached[index]
            return known
        except (AttributeError, KeyError):
            return self._attach(index)

    def _attach(self, index: int) -> int:
        context = self.primary_context(index)
        if self.device_count == 1:
            if self.current_context() == 0:
                self._check(self._lib.cuCtxSetCurrent(context), "cuCtxSetCurrent")
            context = 0
        self._local.__dict__.setdefault("attached", {})[index] = context
        return context

    def enter(self, context: int) -> bool:
        """Make a context current if it is not; True if `leave` must follow."""
        if self.current_context() == context:
            return False
        self._check(self._lib.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        return True

    def leave(self) -> None:
        """Undo an `enter` that returned True."""
        self._check(self._lib.cuCtxPopCurrent_v2(byref(c_void_p())), "cuCtxPopCurrent")

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Run a block in a device's primary context."""
        context = self.attach(index)
        entered = self.enter(context) if context else False
        try:
            yield
        finally:
            if entered:
                self.leave()

    @contextmanager
    def at_first_use(self, index: int) -> Iterator[None]:
        """The same for what is done once: loading code, making handles, building graphs.

        Allowed while this thread captures a CUDA graph, too: a capture otherwise refuses the allocations in it. What
        is done here belongs to no graph, and touches no stream that may be captured.
        """
        mode = c_int(_RELAXED)
        with self.on(index):
            self._check(self._lib.cuThreadExchangeStreamCaptureMode(byref(mode)), "cuThreadExchangeStreamCaptureMode")
            try:
                yield
            finally:
                self._lib.cuThreadExchangeStreamCaptureMode(byref(mode))  # back to what it was

    # ------------------------------------------------------------------------------ memory

    def pool(self, index: int) -> int:
        """te_core's own memory pool of a device (other users' pools keep their settings); 0 if it has none."""
        found = self._pools.get(index)
        if found is not None:
            return found
        with self.on(index), self._lock:
            if index not in self._pools:
                self._pools[index] = self._make_pool(index) if self.attribute(index, "memory_pools") else 0
        return self._pools[index]

    def _make_pool(self, index: int) -> int:
        properties = _PoolProperties(allocation_type=1, location_type=1, location_id=index)
        pool = c_void_p()
        self._check(self._lib.cuMemPoolCreate(byref(pool), byref(properties)), "cuMemPoolCreate")
        keep_all = c_uint64(2**64 - 1)  # attribute 4: freed memory stays in the pool, or each sync would unmap it
        self._check(self._lib.cuMemPoolSetAttribute(pool, 4, byref(keep_all)), "cuMemPoolSetAttribute")
        return pool.value or 0

    # Both run with the thread's capture mode relaxed: on another stream than the one that is captured they would break
    # the capture, and when a destructor runs, nobody chooses.

    def allocate(self, index: int, nbytes: int, stream: int) -> int:
        """Device memory, usable by work that follows on the stream."""
        pool = self.pool(index)
        address, mode = c_uint64(0), c_int(_RELAXED)
        context = self.attach(index)
        entered = self.enter(context) if context else False
        self._lib.cuThreadExchangeStreamCaptureMode(byref(mode))
        try:
            if self._refused:
                for block in taken_off(self._refused):
                    self._free(*block)
            if pool:
                status = self._lib.cuMemAllocFromPoolAsync(byref(address), nbytes or 1, pool, stream)
            else:
                status = self._lib.cuMemAlloc_v2(byref(address), nbytes or 1)
        finally:
            self._lib.cuThreadExchangeStreamCaptureMode(byref(mode))
            if entered:
                self.leave()
        if status:
            self._check(status, f"allocate {nbytes} bytes on cuda:{index}")
        return address.value

    def free(self, index: int, address: int, stream: int, others: tuple[int, ...] = ()) -> None:
        """Give memory back once the work now on the stream, and on the others, is done.

        Silent: it runs in destructors. What is refused because of a capture is given back by an allocation after it;
        what is refused otherwise (memory of a graph that is gone) is not tried again, for it may be another's by then.
        """
        mode = c_int(_RELAXED)
        context = self.attach(index)
        entered = self.enter(context) if context else False
        self._lib.cuThreadExchangeStreamCaptureMode(byref(mode))
        try:
            self._free(index, address, stream, others)
        finally:
            self._lib.cuThreadExchangeStreamCaptureMode(byref(mode))
            if entered:
                self.leave()

    def _free(self, index: int, address: int, stream: int, others: tuple[int, ...]) -> None:
        if others and not self.captured_alike(index, stream, others):
            self._refused.append((index, address, stream, others))
            return
        for other in others:
            self.order_streams(index, other, stream)
        pooled = self._pools.get(index)
        status = self._lib.cuMemFreeAsync(address, stream) if pooled else self._lib.cuMemFree_v2(address)
        if status and self._captured(stream):
            self._refused.append((index, address, stream, others))

    def captured_alike(self, index: int, stream: int, others: Sequence[int]) -> bool:
        """Whether all of these streams are captured, or none is. Else a wait would draw one into the other's graph."""
        with self.on(index):
            captured = self._captured(stream)
            return all(self._captured(other) == captured for other in others)

    def _captured(self, stream: int) -> bool:
        """Whether the stream is captured; also where the driver will not say, as of the default stream in a capture."""
        status = c_int(0)
        return self._lib.cuStreamIsCapturing(stream, byref(status)) != 0 or status.value != 0

    def tensor_map(self, shape: tuple[int, int], box: tuple[int, int]) -> bytes | None:
        """A CUtensorMap for a dense matrix of bytes: the copy engine takes boxes of it to shared memory, where eight
        rows of 128 bytes are swizzled together.

        The address of the matrix is to be written into its first eight bytes. None of a driver that has it elsewhere.
        """
        room, address = ctypes.create_string_buffer(192), 1 << 20
        at = ctypes.addressof(room) + -ctypes.addressof(room) % 64
        sizes, strides = (c_uint64 * 2)(*shape[::-1]), (c_uint64 * 1)(shape[1])
        boxed, ones = (c_uint * 2)(*box[::-1]), (c_uint * 2)(1, 1)
        how = 0, 3, 2, 0  # no interleaving, swizzled by 128 bytes, L2 reads 128 bytes, zeros beyond the matrix
        status = self._lib.cuTensorMapEncodeTiled(at, 0, 2, address, sizes, strides, boxed, ones, *how)
        self._check(status, "cuTensorMapEncodeTiled")
        made = ctypes.string_at(at, 128)
        return bytes(8) + made[8:] if made[:8] == address.to_bytes(8, "little") else None

    def constant(self, index: int, content: bytes) -> int:
        """The address of these bytes in device memory, for good: there when this returns, also during a capture."""
        host = ctypes.create_string_buffer(content, len(content))
        with self.at_first_use(index):
            stream = self.create_stream()  # its own: the caller's may be capturing, another may be the first to read
            try:
                address = self.allocate(index, len(content), stream)
                self.copy_to_device(address, ctypes.addressof(host), len(content), stream)
                self.synchronize(stream)
            finally:
                self.destroy_stream(stream)
        return address

    def copy_to_device(self, address: int, host: int, nbytes: int, stream: int) -> None:
        """Host to device on the stream; ordinary (pageable) memory may be reused when this returns."""
        self._check(self._lib.cuMemcpyHtoDAsync_v2(address, host, nbytes, stream), "cuMemcpyHtoDAsync")

    def copy_to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        """Device to host on the stream; synchronize before reading."""
        self._check(self._lib.cuMemcpyDtoHAsync_v2(host, address, nbytes, stream), "cuMemcpyDtoHAsync")

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Set bytes on the stream."""
        self._check(self._lib.cuMemsetD8Async(address, value, nbytes, stream), "cuMemsetD8Async")

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Device to device on the stream, also to and from memory of another device that is mapped here."""
        self._check(self._lib.cuMemcpyAsync(to, source, nbytes, stream), "cuMemcpyAsync")

    def register(self, index: int, host: int, nbytes: int) -> int:
        """The address by which a device knows these pages of the host, which stay where they are."""
        address = c_uint64(0)
        with self.at_first_use(index):
            self._check(self._lib.cuMemHostRegister_v2(host, nbytes, _MAPPED), "cuMemHostRegister")
            self._check(self._lib.cuMemHostGetDevicePointer_v2(byref(address), host, 0), "cuMemHostGetDevicePointer")
        return address.value

    def unregister(self, index: int, host: int) -> None:
        """Let go of them, once nothing on the device uses them."""
        with self.at_first_use(index):
            self._check(self._lib.cuMemHostUnregister(host), "cuMemHostUnregister")

    # ------------------------------------------------------------------------------ streams and events

    def synchronize(self, stream: int) -> None:
        """Wait for the work on a stream."""
        self._check(self._lib.cuStreamSynchronize(stream), "cuStreamSynchronize")

    def synchronize_device(self, index: int) -> None:
        """Wait for all work that a device has."""
        with self.on(index):
            self._check(self._lib.cuCtxSynchronize(), "cuCtxSynchronize")

    def is_capturing(self, stream: int) -> bool:
        """Whether a CUDA graph is being captured from the stream."""
        status = c_int(0)
        self._check(self._lib.cuStreamIsCapturing(stream, byref(status)), "cuStreamIsCapturing")
        return status.value != 0

    def create_stream(self) -> int:
        """A stream of the current context that waits for no other by itself."""
        made = c_void_p()
        self._check(self._lib.cuStreamCreate(byref(made), _NON_BLOCKING), "cuStreamCreate")
        return made.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Give a stream back once its work is done."""
        self._check(self._lib.cuStreamDestroy_v2(stream), "cuStreamDestroy")

    def create_event(self, *, timing: bool = False) -> int:
        """An event of the current context."""
        event = c_void_p()
        self._check(self._lib.cuEventCreate(byref(event), 0 if timing else 2), "cuEventCreate")
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        self._check(self._lib.cuEventDestroy_v2(event), "cuEventDestroy")

    def record(self, event: int, stream: int) -> None:
        """Mark the work now on the stream."""
        self._check(self._lib.cuEventRecord(event, stream), "cuEventRecord")

    def elapsed_ms(self, start: int, stop: int) -> float:
        """Milliseconds between two recorded timing events; waits for the second."""
        self._check(self._lib.cuEventSynchronize(stop), "cuEventSynchronize")
        value = ctypes.c_float(0)
        self._check(self._lib.cuEventElapsedTime(byref(value), start, stop), "cuEventElapsedTime")
        return value.value

    def wait(self, stream: int, event: int) -> None:
        """Make the stream wait for the work that an event marks."""
        self._check(self._lib.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")

    def flags(self, stream: int, made: ctypes.Array[Any]) -> None:
        """What `flag_operations` made, on the stream: no multiprocessor is used."""
        self._check(self._lib.cuStreamBatchMemOp_v2(stream, len(made), ctypes.addressof(made), 0), "cuStreamBatchMemOp")

    def order_streams(self, index: int, producer: int, consumer: int) -> None:
        """Make the consumer stream wait for the work now on the producer stream.

        Stream numbers as in DLPack: 0 and 1 are the legacy default stream, 2 the per-thread one, -1 asks for
        nothing. Safe in graph capture: an event's record and wait are the fork that capture follows. One event
        a thread serves all calls, because a wait refers to the record before it, not to later ones.
        """
        producer, consumer = producer or LEGACY_STREAM, consumer or LEGACY_STREAM
        if producer == consumer or consumer == -1:
            return
        events = self._local.__dict__.setdefault("events", {})
        with self.on(index):
            if index not in events:
                events[index] = self.create_event()
            self.record(events[index], producer)
            self.wait(consumer, events[index])


def _open_libcuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        allowed = "libcuda.so.1, installed with the NVIDIA driver"
        do = "run on a machine with an NVIDIA GPU and driver, or use Runtime.cpu()"
        raise LibraryError("load the CUDA driver", str(error), allowed, do) from error
