"""DLPack in both directions, zero-copy, on ctypes: the one way memory crosses between libraries.

Import reads a producer's capsule (versioned or not) into a `Tensor` that keeps the capsule's memory alive
and releases it by the producer's own deleter. Export hands out a capsule that keeps the `Tensor` alive.
Streams follow the protocol: an importer names its stream and the producer orders its work before it; an
exporter orders the stream that wrote the tensor before the consumer's stream.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable
from math import prod
from threading import RLock
from typing import Any, NoReturn

import numpy as np

from te_core import dtypes, libraries
from te_core.errors import ArgumentError, LibraryError
from te_core.tensor import CPU, Device, ReadOnly, Tensor, _is_dense, _raw, cuda_device, dense_strides, from_numpy

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_LEGACY_STREAM = 1  # how the protocol spells the default stream: 0 is ambiguous there, and refused
_MAJOR = 1
_FLAGS, _READ_ONLY = 0b111, 0b001  # read-only, a copy, FP4 padded to bytes
_MOST_DIMENSIONS = 32  # as NumPy before 2.0
_MOST_BYTES = (1 << 63) - 1


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("dl", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("dl", _DLTensor),
    ]


_LAYOUTS = {b"dltensor": _Managed, b"dltensor_versioned": _ManagedVersioned}
# A capsule keeps its name's pointer, not a copy: these bytes live as long as the module.
_USED = {name: b"used_" + name for name in _LAYOUTS}

_api = ctypes.pythonapi
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))
_mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)  # the system's, to ask what is mapped


# ---------------------------------------------------------------------------------------------- import


class _Imported:
    """Holds a producer's managed tensor until the last view of it is gone."""

    __slots__ = ("managed", "stream")

    def __init__(self, managed: Any, stream: int | None) -> None:
        self.managed = managed
        self.stream = stream  # the CUDA stream we use the memory on: what an export is ordered after

    def __del__(self, address: Callable[[Any], int] = ctypes.addressof) -> None:  # also when modules have gone
        if self.managed.deleter:
            self.managed.deleter(address(self.managed))


class _Lent(_Imported, ReadOnly):
    """The same of a producer that lends it for reading."""

    __slots__ = ()


# A bare capsule may be shown to two threads, and only one can have it. Garbage may be collected meanwhile, and what its
# owner runs then may take another one.
_taking = RLock()


def from_dlpack(producer: Any, *, stream: int | None = None, dtype: Any = None) -> Tensor:
    """A zero-copy `Tensor` over anything that speaks DLPack.

    `stream` is the CUDA stream on which the tensor will be used (the producer's pending work is ordered
    before it); 0 or None is the default stream, and it means nothing for host memory. `dtype` names the real
    type of data that the producer can only export under another of its width, such as FP8 as uint8. Memory
    that its producer calls read-only is taken as well, and refused where an operation would write to it.

    A capsule that is refused is left as it was: whoever has it frees it.
    """
    try:
        capsule = _ask(producer, stream)
    except BufferError as error:  # NumPy exports none of ml_dtypes' types
        if not isinstance(producer, np.ndarray):
            _refuse(f"{type(producer).__name__}, which says {str(error)!r}", "memory that is lent", "copy the array")
        result = from_numpy(producer)
        return result if dtype is None else result.view_as(dtypes.dtype(dtype))
    with _taking:
        name, managed = _open(capsule)
        result = _read(managed.dl, producer)
        lent = name == b"dltensor_versioned" and managed.flags & _READ_ONLY
        result.owner = (_Lent if lent else _Imported)(managed, (stream or 0) if result.device.kind == "cuda" else None)
        _rename(capsule, _USED[name])  # from here on the memory is ours to release
    if dtype is not None:
        result = result.view_as(dtypes.dtype(dtype))
    return result


def _refuse(got: str, allowed: str, do: str) -> NoReturn:
    raise ArgumentError("from_dlpack", got, allowed, do)


def _ask(producer: Any, stream: int | None) -> Any:
    if type(producer).__name__ == "PyCapsule":
        return producer
    method, where = (getattr(producer, f"__dlpack{name}__", None) for name in ("", "_device"))
    kind, do = type(producer).__name__, "pass a NumPy, torch, JAX or CuPy array"
    if method is None or where is None:
        _refuse(kind, "an object with __dlpack__ and __dlpack_device__", do)
    device = where()
    if not isinstance(device, tuple) or len(device) != 2:
        _refuse(f"{kind} with the device {device!r}", "a pair (kind, number) from __dlpack_device__", do)
    # Host memory has no stream, and its producers refuse one.
    stream = stream or _LEGACY_STREAM if device[0] in (_CUDA, _CUDA_MANAGED) else None
    try:
        return method(stream=stream, max_version=(_MAJOR, 3))
    except TypeError:  # a producer of before DLPack 1.0 knows no max_version
        return method(stream=stream) if stream is not None else method()


def _open(capsule: Any) -> tuple[bytes, Any]:
    """The name of an unused capsule and the structure in it, which is one of those that we know."""
    for name, layout in _LAYOUTS.items():
        if _is_valid(capsule, name):
            managed = layout.from_address(_pointer(capsule, name))
            if layout is _ManagedVersioned and (managed.major != _MAJOR or managed.flags & ~_FLAGS):
                got = f"DLPack version {managed.major}.{managed.minor} with flags {managed.flags:#x}"
                _refuse(got, f"version {_MAJOR}, whose flags are {_FLAGS:#x}", "copy the array through NumPy")
            return name, managed
    _refuse(repr(capsule), "an unused DLPack capsule", "pass the array itself: a capsule can be read only once")


def _read(dl: _DLTensor, producer: Any) -> Tensor:
    device = _device(dl, producer)
    dt = dtypes.from_dlpack(dl.code, dl.bits, dl.lanes)
    if dt is dtypes.float4_e2m1:  # some producers pack two to a byte and some do not, and few say which
        _refuse("float4_e2m1", "byte-sized types", "pass packed FP4 as uint8 (a view of the array)")
    if not 0 <= dl.ndim <= _MOST_DIMENSIONS or (dl.ndim and not dl.shape):
        got, do = (
            f"{dl.ndim} dimensions{'' if dl.shape else ' without a shape'}",
            "reshape the array, or correct its producer",
        )
        _refuse(got, f"up to {_MOST_DIMENSIONS} dimensions and their sizes", do)
    shape = tuple(dl.shape[: dl.ndim]) if dl.ndim else ()
    strides = tuple(dl.strides[: dl.ndim]) if dl.ndim and dl.strides else None
    if strides is not None and _is_dense(shape, strides):
        strides = None
    return Tensor(_address(dl, shape, strides, dt, device), shape, dt, device, None, strides)


def _device(dl: _DLTensor, producer: Any) -> Device:
    if dl.device_type in (_CPU, _CUDA_HOST):
        return CPU
    if dl.device_type not in (_CUDA, _CUDA_MANAGED):
        do = "copy the array to the host or to a CUDA device"
        _refuse(f"{type(producer).__name__} on DLPack device {dl.device_type}", "CPU and CUDA memory", do)
    try:
        count = libraries.driver().device_count
    except LibraryError as error:
        _refuse(f"memory of cuda:{dl.device_id}", f"CPU memory, without a CUDA driver ({error.got})", error.do)
    if not 0 <= dl.device_id < count:
        allowed = f"the {count} CUDA devices that this process sees"
        _refuse(f"memory of cuda:{dl.device_id}", allowed, "copy the array to one of these")
    return cuda_device(dl.device_id)


def _address(
    dl: _DLTensor, shape: tuple[int, ...], strides: tuple[int, ...] | None, dt: dtypes.DType, device: Device
) -> int:
    """Where the first element lies; kernels get bare addresses, so this is where a wrong one has to be noticed."""
    described = f"shape {shape}{'' if strides is None else f' with strides {strides}'} of {dt}"
    if min(shape, default=0) < 0:
        _refuse(described, "sizes of 0 and more", "correct the producer")
    if 0 in shape:
        return 0  # there may be no address at all
    steps = dense_strides(shape) if strides is None else strides
    reach = [(n - 1) * step * dt.itemsize for n, step in zip(shape, steps, strict=True)]
    first, last = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + dt.itemsize - 1
    most = max(prod(shape) * dt.itemsize, last - first + 1)
    if most > _MOST_BYTES:
        _refuse(f"{described}, {most} bytes", f"up to {_MOST_BYTES} bytes", "correct the producer")
    if not dl.data:
        _refuse(f"{described} with no data (byte_offset {dl.byte_offset})", "an address", "correct the producer")
    address = dl.data + dl.byte_offset
    described += f" at address {dl.data:#x} with byte_offset {dl.byte_offset}"
    if address % dt.itemsize:
        _refuse(described, f"addresses that are multiples of {dt.itemsize}", "copy the array to memory of its own")
    ends = address + first, address + last
    if ends[0] < 0 or ends[1] >= 1 << 64 or (device is CPU and not all(map(_is_mapped, ends))):
        do = "correct the producer, and keep what it lends alive"
        _refuse(f"{described}, which reaches outside of this process's memory", "memory of this process", do)
    return int(address)


def _is_mapped(address: int) -> bool:
    """Whether the page of an address is there at all. (That all pages between are, nobody can tell as fast.)"""
    if _mincore is None:
        return True
    page = ctypes.c_void_p(address & -mmap.PAGESIZE)
    return _mincore(page, 1, ctypes.byref(ctypes.c_ubyte())) == 0 or ctypes.get_errno() != errno.ENOMEM


# ---------------------------------------------------------------------------------------------- export


def export(
    tensor: Tensor,
    *,
    stream: int | None = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """A DLPack capsule over the tensor's memory, which lives until the consumer lets go.

    NumPy makes the capsule, of unsigned integers in host memory, and its label is then changed to the real
    type and device. So all that runs when a capsule dies is NumPy's own C code, which is right at any time:
    from any thread, at interpreter exit, and while an exception is on its way (as when a consumer refuses the
    dtype), where a destructor written in Python cannot run.
    """
    here = tensor.__dlpack_device__()
    if copy or (dl_device is not None and tuple(dl_device) != here):
        raise BufferError(f"this tensor lies on DLPack device {here} and is exported without a copy only")
    if here[0] == _CUDA and stream != -1:
        _order_before(tensor, stream or 0)
    array = _raw(tensor)
    try:
        capsule = array.__dlpack__(max_version=max_version)
    except TypeError:  # NumPy before 2.1 writes unversioned capsules only, which every consumer takes
        capsule = array.__dlpack__()
    _, managed = _open(capsule)
    managed.dl.device_type, managed.dl.device_id = here
    managed.dl.code, managed.dl.bits = tensor.dtype.dlpack_code, tensor.dtype.bits
    return capsule


def _order_before(tensor: Tensor, consumer: int) -> None:
    """Make the consumer's stream wait for the work that wrote the tensor."""
    owner = tensor.memory
    written_on = getattr(owner, "stream", None)
    if isinstance(written_on, int):
        if (written_on or _LEGACY_STREAM) != (consumer or _LEGACY_STREAM):
            libraries.driver().order_streams(tensor.device.index, written_on, consumer)
    elif hasattr(owner, "__dlpack__"):
        # A framework's own tensor: let the framework order its current stream before the consumer's.
        owner.__dlpack__(stream=consumer or _LEGACY_STREAM)
