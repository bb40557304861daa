"""DLPack in both directions, zero-copy, on ctypes: the one way memory crosses between libraries.

Import reads a producer's capsule (versioned or not) into a `Tensor` that keeps the capsule's memory alive
and releases it by the producer's own deleter. Export wraps a `Tensor` in a capsule that keeps it alive.
Streams follow the protocol: an importer names its stream and the producer orders its work before it; an
exporter orders the stream that wrote the tensor before the consumer's stream.
"""

from __future__ import annotations

import ctypes
from typing import Any

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.tensor import CPU, Tensor, _is_dense, cuda_device

VERSION = (1, 1)  # what we write: 1.1 names FP8 and FP4
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_LEGACY_STREAM = 1  # how the protocol spells the default stream: 0 is ambiguous there, and refused


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


_NAMES = {"dltensor": _Managed, "dltensor_versioned": _ManagedVersioned}
_api = ctypes.pythonapi
_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _CapsuleDestructor)(
    ("PyCapsule_New", _api)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))
# A destructor gets the dying capsule: it may be touched as a raw address only, never as a new reference.
_is_valid_raw = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer_raw = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)

# PyCapsule_New keeps the name's pointer, not a copy: these bytes live as long as the module.
_C_NAMES = {name: name.encode() for name in _NAMES}
_USED_NAMES = {name: b"used_" + name.encode() for name in _NAMES}


# ---------------------------------------------------------------------------------------------- import


class _Imported:
    """Holds a producer's managed tensor until the last view of it is gone."""

    __slots__ = ("managed", "stream")

    def __init__(self, managed: Any, stream: int | None) -> None:
        self.managed = managed
        self.stream = stream  # the CUDA stream we use the memory on: what an export is ordered after

    def __del__(self) -> None:
        if self.managed.deleter:
            self.managed.deleter(ctypes.addressof(self.managed))


def from_dlpack(producer: Any, *, stream: int | None = None, dtype: Any = None) -> Tensor:
    """A zero-copy `Tensor` over anything that speaks DLPack.

    `stream` is the CUDA stream on which the tensor will be used (the producer's pending work is ordered
    before it); 0 or None is the default stream, and it means nothing for host memory. `dtype` names the real
    type of data that the producer can only export under another of its width, such as FP8 as uint8. Memory
    that its producer calls read-only is taken as well: operations write to outputs only.
    """
    capsule = _ask(producer, stream)
    for name, layout in _NAMES.items():
        if _is_valid(capsule, _C_NAMES[name]):
            managed = layout.from_address(_pointer(capsule, _C_NAMES[name]))
            break
    else:
        raise ArgumentError(
            "from_dlpack", f"{type(producer).__name__} giving {capsule!r}", "an unused DLPack capsule",
            "pass the array itself: a capsule can be read once only",
        )  # fmt: skip
    result = _read(managed.dl, producer)
    result.owner = _Imported(managed, (stream or 0) if result.device.kind == "cuda" else None)
    _rename(capsule, _USED_NAMES[name])  # from here on the memory is ours to release
    if dtype is not None:
        result = result.view_as(dtypes.dtype(dtype))
    return result


def _ask(producer: Any, stream: int | None) -> Any:
    if type(producer).__name__ == "PyCapsule":
        return producer
    method = getattr(producer, "__dlpack__", None)
    if method is None:
        raise ArgumentError(
            "from_dlpack", type(producer).__name__, "an object with __dlpack__",
            "pass a NumPy, torch, JAX or CuPy array",
        )  # fmt: skip
    if producer.__dlpack_device__()[0] in (_CUDA, _CUDA_MANAGED):
        stream = stream or _LEGACY_STREAM
    else:
        stream = None  # host memory has no stream, and its producers refuse one
    try:
        return method(stream=stream, max_version=(1, 3))
    except TypeError:  # a producer of before DLPack 1.0 knows no max_version
        return method(stream=stream) if stream is not None else method()


def _read(dl: _DLTensor, producer: Any) -> Tensor:
    kinds = {_CPU: "cpu", _CUDA_HOST: "cpu", _CUDA: "cuda", _CUDA_MANAGED: "cuda"}
    kind = kinds.get(dl.device_type)
    if kind is None:
        raise ArgumentError(
            "from_dlpack", f"{type(producer).__name__} on DLPack device {dl.device_type}",
            "CPU and CUDA memory", "copy the array to the host or to a CUDA device",
        )  # fmt: skip
    dt = dtypes.from_dlpack(dl.code, dl.bits, dl.lanes)
    shape = tuple(dl.shape[: dl.ndim])
    strides = tuple(dl.strides[: dl.ndim]) if dl.strides else None
    if strides is not None and _is_dense(shape, strides):
        strides = None
    device = CPU if kind == "cpu" else cuda_device(dl.device_id)
    return Tensor((dl.data or 0) + dl.byte_offset, shape, dt, device, None, strides)


# ---------------------------------------------------------------------------------------------- export

_exports: dict[int, tuple[Any, ...]] = {}  # address of a managed tensor -> all that must outlive it


def _forget(address: int, pop: Any = _exports.pop) -> None:  # bound early: at exit, module globals go first
    pop(address, None)


_release = _Deleter(_forget)


def _drop(capsule: int) -> None:
    for name, layout in _NAMES.items():
        if _is_valid_raw(capsule, _C_NAMES[name]):  # nobody took it: release it here
            managed = layout.from_address(_pointer_raw(capsule, _C_NAMES[name]))
            managed.deleter(ctypes.addressof(managed))


_drop_unused = _CapsuleDestructor(_drop)


def export(
    tensor: Tensor,
    *,
    stream: int | None = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """A DLPack capsule over the tensor's memory, which lives until the consumer lets go."""
    here = tensor.__dlpack_device__()
    if copy or (dl_device is not None and tuple(dl_device) != here):
        raise BufferError(f"this tensor lies on DLPack device {here} and is exported without a copy only")
    if tensor.device.kind == "meta":
        raise BufferError("a meta tensor has no memory to export")
    if here[0] == _CUDA and stream != -1:
        _order_before(tensor, stream or 0)
    versioned = max_version is not None and max_version[0] >= 1
    name = "dltensor_versioned" if versioned else "dltensor"
    managed = _NAMES[name]()
    shape = (ctypes.c_int64 * max(1, tensor.ndim))(*tensor.shape)
    strides = (ctypes.c_int64 * max(1, tensor.ndim))(*tensor.row_major_strides())
    dt = tensor.dtype
    managed.dl = _DLTensor(
        tensor.ptr or None, here[0], here[1], tensor.ndim, dt.dlpack_code, dt.bits, 1, shape, strides, 0
    )
    managed.deleter = _release
    if versioned:
        managed.major, managed.minor = VERSION
        managed.flags = 0
    address = ctypes.addressof(managed)
    _exports[address] = (managed, shape, strides, tensor)
    return _new(address, _C_NAMES[name], _drop_unused)


def _order_before(tensor: Tensor, consumer: int) -> None:
    """Make the consumer's stream wait for the work that wrote the tensor."""
    owner = tensor.owner
    while isinstance(owner, Tensor):  # a tensor over another one's memory
        owner = owner.owner
    written_on = getattr(owner, "stream", None)
    if isinstance(written_on, int):
        if (written_on or _LEGACY_STREAM) != (consumer or _LEGACY_STREAM):
            from te_core import libraries

            libraries.driver().order_streams(tensor.device.index, written_on, consumer)
    elif hasattr(owner, "__dlpack__"):
        # A framework's own tensor: let the framework order its current stream before the consumer's.
        owner.__dlpack__(stream=consumer or _LEGACY_STREAM)
