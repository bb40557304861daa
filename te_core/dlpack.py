"""DLPack in both directions, zero-copy, on ctypes: the one way memory crosses between libraries.

Import reads a producer's capsule (versioned or not) into a `Tensor` that keeps the capsule's memory alive
and releases it by the producer's own deleter. Export hands out a capsule that keeps the `Tensor` alive.
Streams follow the protocol: an importer names its stream and the producer orders its work before it; an
exporter orders the stream that wrote the tensor before the consumer's stream.
"""

from __future__ import annotations

import ctypes
from typing import Any

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.tensor import CPU, Tensor, _is_dense, _raw, cuda_device

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


_LAYOUTS = {b"dltensor": _Managed, b"dltensor_versioned": _ManagedVersioned}
# A capsule keeps its name's pointer, not a copy: these bytes live as long as the module.
_USED = {name: b"used_" + name for name in _LAYOUTS}

_api = ctypes.pythonapi
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))


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
    name, managed = _open(capsule)
    result = _read(managed.dl, producer)
    result.owner = _Imported(managed, (stream or 0) if result.device.kind == "cuda" else None)
    _rename(capsule, _USED[name])  # from here on the memory is ours to release
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


def _open(capsule: Any) -> tuple[bytes, Any]:
    """The name of an unused capsule and the structure in it."""
    for name, layout in _LAYOUTS.items():
        if _is_valid(capsule, name):
            return name, layout.from_address(_pointer(capsule, name))
    raise ArgumentError(
        "from_dlpack", repr(capsule), "an unused DLPack capsule",
        "pass the array itself: a capsule can be read only once",
    )  # fmt: skip


def _read(dl: _DLTensor, producer: Any) -> Tensor:
    kinds = {_CPU: "cpu", _CUDA_HOST: "cpu", _CUDA: "cuda", _CUDA_MANAGED: "cuda"}
    kind = kinds.get(dl.device_type)
    if kind is None:
        raise ArgumentError(
            "from_dlpack", f"{type(producer).__name__} on DLPack device {dl.device_type}",
            "CPU and CUDA memory", "copy the array to the host or to a CUDA device",
        )  # fmt: skip
    dt = dtypes.from_dlpack(dl.code, dl.bits, dl.lanes)
    if dt is dtypes.float4_e2m1:  # some producers pack two to a byte and some do not, and few say which
        raise ArgumentError(
            "from_dlpack", "float4_e2m1", "byte-sized types", "pass packed FP4 as uint8 (a view of the array)"
        )
    shape = tuple(dl.shape[: dl.ndim])
    strides = tuple(dl.strides[: dl.ndim]) if dl.strides else None
    if strides is not None and _is_dense(shape, strides):
        strides = None
    device = CPU if kind == "cpu" else cuda_device(dl.device_id)
    return Tensor((dl.data or 0) + dl.byte_offset, shape, dt, device, None, strides)


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
