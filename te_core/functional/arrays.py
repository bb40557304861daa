"""Arrays of other libraries as tensors of the core, without a copy, and back again.

A reader is found by an array's type: by the module that the type is of, so that no library is imported for it, for a
library whose arrays come in is there already. What has no reader is read by DLPack, with its checks.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from te_core import dtypes
from te_core.dlpack import from_dlpack
from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.quantized import QuantizedTensor
from te_core.runtime import ByStream, Runtime
from te_core.tensor import CPU, Device, ReadOnly, Tensor, cuda_device, from_numpy

_MOST_STREAMS = 64  # of a device whose runtimes are kept


class Library(NamedTuple):
    """What the core has to know of a library of arrays."""

    read: Callable[[Any], Tensor]  # a view of an array's memory, which it keeps alive
    runtime: Callable[[Device], Runtime]  # where work on its arrays runs now
    give: Callable[[Tensor], Any]  # a result as one of its arrays, if it can be one
    #: Whether the library may reuse an array's memory before the work on our stream that reads it is done.
    waits: bool = False


def library_of(array: Any) -> Library:
    """The library that an array is of."""
    return _BY_TYPE[type(array)]


def read(operation: str, name: str, array: Any) -> Tensor:
    """The tensor that an array is, whatever library it is of."""
    try:
        return _BY_TYPE[type(array)].read(array)
    except ArgumentError as error:
        raise ArgumentError(operation, f"{name}: {error.got}", error.allowed, error.do) from error
    except Exception as error:  # a library's own
        got = f"{name} of type {type(array).__name__}, which says {str(error)[:200]!r}"
        allowed = "arrays of NumPy, CuPy, torch or JAX, te_core.Tensors, and what speaks DLPack"
        raise ArgumentError(operation, got, allowed, "pass an array whose memory can be read") from error


# ---------------------------------------------------------------------------------------------------- NumPy


_WHOLE = {d.numpy: d for d in dtypes.ALL if d.bits >= 8}  # packed values need a look at how they are packed
_in_capsule = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_DATA = 40  # in NumPy's PyArrayInterface: where an address is
_at = ctypes.c_void_p.from_address


def _read_numpy(array: Any) -> Tensor:
    dtype = _WHOLE.get(array.dtype)
    if dtype is None or not array.flags.c_contiguous:
        return from_numpy(array)
    interface = array.__array_struct__  # lives until its address was read; other ways to that cost twice as much
    return Tensor(_at(_in_capsule(interface, None) + _DATA).value or 0, array.shape, dtype, CPU, array)


def _read_other_numpy(array: Any) -> Tensor:
    """Of a class that is derived from NumPy's array, or no array at all."""
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError("read", "a masked array", "arrays without a mask", "pass array.filled(0)")
    return from_numpy(array)


def _default_cuda(device: Device) -> Runtime:
    return Runtime.cuda(device.index)


def _default(device: Device) -> Runtime:
    """The host's, or that of a device's default stream."""
    return Runtime.cpu() if device is CPU else device.of(_default_cuda)


def _give_numpy(tensor: Tensor) -> Any:
    owner = tensor.owner
    if type(owner) is np.ndarray and owner.shape == tensor.shape and owner.dtype == tensor.dtype.numpy:
        return owner
    return _itself(tensor) if tensor.dtype.is_fp8 else tensor.numpy()


# -------------------------------------------------------------------------------------------- te_core, others


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _read_core(tensor: Any) -> Tensor:
    if type(tensor) is Tensor:
        return tensor
    what = repr(tensor) if isinstance(tensor, QuantizedTensor) else type(tensor).__name__
    do = "pass an array, or a quantized tensor in a weight's place"
    raise ArgumentError("read", what, "arrays and te_core.Tensors", do)


# ------------------------------------------------------------------------- libraries with memory of their own


def _runtimes(device: Device) -> dict[Any, Runtime]:
    return {}


def _kept(device: Device, memory: Any, stream: int) -> Runtime:
    """The runtime of a library's memory on a stream."""
    runtimes = device.of(_runtimes)
    found = runtimes.get((memory, stream))
    if found is None:
        if len(runtimes) >= _MOST_STREAMS:
            runtimes.clear()
        allocator = memory(device)
        made = Runtime.cpu(allocator) if device is CPU else Runtime.cuda(device.index, stream, allocator)
        found = runtimes.setdefault((memory, stream), made)
    return found


# ---------------------------------------------------------------------------------------------------- CuPy


class _CupyMemory(ByStream):
    """Memory of CuPy's pool for the stream that is CuPy's current one."""

    alignment = 256

    def __init__(self, device: Device) -> None:
        self.device, self.cupy = device, sys.modules["cupy"]

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """A block of the pool."""
        nbytes, cuda = max(1, dtype.nbytes(prod(shape))), self.cupy.cuda
        if cuda.get_current_stream().ptr == stream and cuda.runtime.getDevice() == self.device.index:
            block = self.cupy.empty(nbytes, np.uint8)
        else:
            with cuda.Device(self.device.index), cuda.ExternalStream(stream):
                block = self.cupy.empty(nbytes, np.uint8)
        return Tensor(block.data.ptr, tuple(shape), dtype, self.device, block)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """A pool of CuPy's knows one stream: the block stays until both are done."""
        with self.cupy.cuda.Device(self.device.index):
            self.cupy.cuda.ExternalStream(stream).synchronize()


def _read_cupy(array: Any) -> Tensor:
    dtype, shape = dtypes.dtype(array.dtype), array.shape
    strides = None
    if not array.flags.c_contiguous:
        if any(step % dtype.itemsize for step in array.strides):
            raise ArgumentError("read", f"byte strides {array.strides}", "strides of whole elements", "copy the array")
        strides = tuple(step // dtype.itemsize for step in array.strides)
    return Tensor(array.data.ptr, shape, dtype, cuda_device(array.device.id), array, strides)


def _cupy_runtime(device: Device) -> Runtime:
    cuda = sys.modules["cupy"].cuda
    return _kept(device, _CupyMemory, 0 if device is CPU else cuda.get_current_stream(device.index).ptr)


def _give_cupy(tensor: Tensor) -> Any:
    cupy, block = sys.modules["cupy"], tensor.memory
    if not isinstance(block, cupy.ndarray) or tensor.dtype.numpy.kind == "V" or tensor.dtype.is_fp8:
        return tensor
    return cupy.ndarray(tensor.shape, tensor.dtype.numpy, memptr=block.data + (tensor.ptr - block.data.ptr))


# ---------------------------------------------------------------------------------------------------- torch


class _TorchMemory(ByStream):
    """Memory of torch's allocator."""

    alignment = 16

    def __init__(self, device: Device) -> None:
        self.device, self.torch = device, sys.modules["torch"]

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """A tensor of torch's."""
        torch, kind = self.torch, getattr(self.torch, dtype.torch_name)
        if self.device is not CPU and stream != torch.cuda.current_stream(self.device.index).cuda_stream:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, self.device.index)):
                block = torch.empty(shape, dtype=kind, device=repr(self.device))
        else:
            block = torch.empty(shape, dtype=kind, device=repr(self.device))
        return Tensor(block.data_ptr(), tuple(shape), dtype, self.device, block)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """As torch has it."""
        if self.device is not CPU and isinstance(tensor.memory, self.torch.Tensor):
            tensor.memory.record_stream(self.torch.cuda.ExternalStream(stream, self.device.index))


def _read_torch(array: Any) -> Tensor:
    torch = sys.modules["torch"]
    if type(array) is not torch.Tensor or array.layout is not torch.strided or array.is_neg():
        if type(array) is not torch.nn.Parameter:
            return from_dlpack(array)
    if array.requires_grad:
        do = "pass x.detach(), or use te_torch's modules"
        raise ArgumentError("read", "a tensor that requires grad", "tensors that autograd does not follow", do)
    if not array.is_cpu and not array.is_cuda:
        raise ArgumentError("read", f"a tensor on {array.device}", "tensors on cpu or cuda", "move it there")
    address, dtype = array.data_ptr(), dtypes._BY_NAME.get(str(array.dtype)[6:])  # behind "torch."
    if not address and array.numel():
        raise ArgumentError("read", "a tensor whose storage was freed", "tensors with memory", "allocate it again")
    device = CPU if array.is_cpu else cuda_device(array.get_device())
    strides = None if array.is_contiguous() else array.stride()
    return Tensor(address, tuple(array.shape), dtype or dtypes.dtype(array.dtype), device, array, strides)


def _torch_runtime(device: Device) -> Runtime:
    cuda = sys.modules["torch"].cuda
    return _kept(device, _TorchMemory, 0 if device is CPU else cuda.current_stream(device.index).cuda_stream)


def _give_torch(tensor: Tensor) -> Any:
    torch, block = sys.modules["torch"], tensor.memory
    if not isinstance(block, torch.Tensor):
        return tensor
    kind = getattr(torch, tensor.dtype.torch_name)
    if tensor.ptr == block.data_ptr() and tensor.shape == block.shape and kind is block.dtype:
        return block
    begin = tensor.ptr - block.data_ptr()
    return block.reshape(-1).view(torch.uint8)[begin : begin + tensor.nbytes].view(kind).reshape(tensor.shape)


# ----------------------------------------------------------------------------------------------------- JAX


class _Borrowed(ReadOnly):
    """Keeps an array of JAX, which nobody may write to."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array


def _finished(array: Any) -> None:
    """The host waits: an address says nothing of whether what it leads to is there yet."""
    array.block_until_ready()


def _read_jax(array: Any) -> Tensor:
    _finished(array)
    places = array.devices()
    order = array.format.layout.major_to_minor
    if len(places) != 1 or tuple(order) != tuple(range(array.ndim)):
        got = f"an array on {len(places)} devices in the order {tuple(order)} of dimensions"
        raise ArgumentError("read", got, "arrays on one device, row by row", "pass the shard of one device")
    (place,) = places
    device = CPU if place.platform == "cpu" else cuda_device(place.local_hardware_id)
    dtype = dtypes.dtype(array.dtype)
    return Tensor(array.unsafe_buffer_pointer(), array.shape, dtype, device, _Borrowed(array))


_OTHERS = Library(from_dlpack, _default, _itself, waits=True)
_JAX = Library(_read_jax, _default, _itself, waits=True)
_NUMPY = Library(_read_numpy, _default, _give_numpy)
#: By the first part of the name of the module that an array's type is of.
_BY_MODULE = {
    "numpy": _NUMPY._replace(read=_read_other_numpy),
    "te_core": Library(_read_core, _default, _itself),
    "cupy": Library(_read_cupy, _cupy_runtime, _give_cupy),
    "torch": Library(_read_torch, _torch_runtime, _give_torch),
    "jax": _JAX,
    "jaxlib": _JAX,
}


class _ByType(dict[type, Library]):
    """Types of arrays that came in. Those of other modules, of which a program may make any number, are not kept."""

    def __missing__(self, kind: type) -> Library:
        found = _BY_MODULE.get(kind.__module__.partition(".")[0], _OTHERS)
        return found if found is _OTHERS else self.setdefault(kind, found)


_BY_TYPE = _ByType({np.ndarray: _NUMPY})
