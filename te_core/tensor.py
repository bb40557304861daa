"""`Tensor`: a view of raw memory. Pointer, shape, strides, dtype, device, and who keeps it alive."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeVar

import numpy as np

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.spelling import choice_error

_T = TypeVar("_T")


class Device:
    """Where memory lives. A singleton for each (kind, index); compare with `is`."""

    __slots__ = ("_kept", "index", "kind")
    _known: dict[tuple[str, int], Device] = {}
    kind: str
    index: int
    _kept: dict[Callable[[Device], Any], Any]

    def __new__(cls, kind: str, index: int = 0) -> Device:
        """The device of this kind and index; always the same object."""
        found = cls._known.get((kind, index))
        if found is None:
            if kind not in ("cpu", "cuda", "meta"):
                raise choice_error("Device", "kind", kind, ("cpu", "cuda", "meta"))
            found = super().__new__(cls)
            found.kind, found.index, found._kept = kind, index, {}
            found = cls._known.setdefault((kind, index), found)
        return found

    def of(self, kind: Callable[[Device], _T]) -> _T:
        """What `kind` makes of this device: its plans, its kernels, its executors. Made once, and kept for good."""
        found: _T | None = self._kept.get(kind)
        return self._kept.setdefault(kind, kind(self)) if found is None else found

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        return Device, (self.kind, self.index)

    def __repr__(self) -> str:
        return f"{self.kind}:{self.index}" if self.kind == "cuda" else self.kind


CPU = Device("cpu")
META = Device("meta")


def cuda_device(index: int) -> Device:
    """The CUDA device of this index."""
    return Device("cuda", index)


class ReadOnly:
    """An owner whose memory nobody may write to."""

    __slots__ = ()


class Tensor:
    """A view of raw memory; `strides` (in elements) is None for dense row-major."""

    __slots__ = ("device", "dtype", "owner", "ptr", "shape", "strides")

    def __init__(
        self,
        ptr: int,
        shape: tuple[int, ...],
        dtype: DType,
        device: Device,
        owner: Any,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self.ptr = ptr
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.owner = owner
        self.strides = strides

    @property
    def memory(self) -> Any:
        """What keeps the memory alive: the owner, or of a piece the owner of the block that it lies in."""
        owner = self.owner
        while type(owner) is Tensor:
            owner = owner.owner
        return owner

    @property
    def writable(self) -> bool:
        """Whether its owner lets it be written to: not a read-only NumPy array, or what was lent for reading alone."""
        owner = self.owner
        while type(owner) is Tensor:
            owner = owner.owner
        return owner.flags.writeable if isinstance(owner, np.ndarray) else not isinstance(owner, ReadOnly)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements (not of any gaps between them)."""
        return self.dtype.nbytes(self.size)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie densely in row-major order."""
        return self.strides is None or _is_dense(self.shape, self.strides)

    def row_major_strides(self) -> tuple[int, ...]:
        """The strides in elements, also where `strides` is None."""
        return self.strides if self.strides is not None else dense_strides(self.shape)

    def reshape(self, *shape: int) -> Tensor:
        """The same memory in another shape (dense tensors only; one -1 is worked out)."""
        if -1 in shape:
            known = prod(n for n in shape if n != -1)
            shape = tuple(self.size // known if n == -1 and known else (0 if n == -1 else n) for n in shape)
        dense = self.strides is None or _is_dense(self.shape, self.strides)
        if not dense or prod(shape) != prod(self.shape) or any([n < 0 for n in shape]):  # min would compare sizes
            allowed = "a dense tensor and a shape of as many elements"
            do = "copy the tensor to dense memory first, or correct the shape"
            raise ArgumentError("Tensor.reshape", f"{self!r} to {shape}", allowed, do)
        return Tensor(self.ptr, shape, self.dtype, self.device, self.owner)

    def matrix(self) -> Tensor:
        """The same memory as a matrix: all leading dimensions as one."""
        shape = self.shape
        if len(shape) == 2:
            return self
        if len(shape) == 3 and self.strides is None:  # activations: nothing to check, and each call of a layer is here
            rows, tokens, width = shape
            return Tensor(self.ptr, (rows * tokens, width), self.dtype, self.device, self.owner)
        return self.reshape(prod(shape[:-1]), shape[-1])

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the first dimension, as a view."""
        if not 0 <= start <= stop <= self.shape[0]:
            got, allowed = f"{start}:{stop} of {self.shape[0]}", "0 <= start <= stop <= rows"
            raise ArgumentError("Tensor.rows", got, allowed, "correct the range")
        step = self.row_major_strides()[0]
        offset = self.dtype.nbytes(start * step)
        shape = (stop - start, *self.shape[1:])
        return Tensor(self.ptr + offset, shape, self.dtype, self.device, self.owner, self.strides)

    def view_as(self, dtype: DType) -> Tensor:
        """The same bytes under another dtype of equal width."""
        if dtype.bits != self.dtype.bits:
            got, do = f"{self.dtype} as {dtype}", "convert the values instead"
            raise ArgumentError("Tensor.view_as", got, "types of equal width", do)
        return Tensor(self.ptr, self.shape, dtype, self.device, self.owner, self.strides)

    def numpy(self) -> np.ndarray[Any, Any]:
        """A zero-copy NumPy view (CPU only); FP8 and bf16 come as ml_dtypes' types."""
        if self.device.kind != "cpu":
            do = "copy it to the host with Runtime.numpy(tensor)" if self.device.kind == "cuda" else "run the layer"
            raise ArgumentError("Tensor.numpy", f"{self!r}", "CPU tensors", do)
        return _raw(self).view(self.dtype.numpy)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """What NumPy's functions make of a tensor: `numpy()`, unless they ask for a copy or for another dtype."""
        found = self.numpy()
        if dtype is None or np.dtype(dtype) == found.dtype:
            return found.copy() if copy else found
        if copy is False:
            raise ArgumentError("Tensor.__array__", f"{self!r} as {np.dtype(dtype)}", "a copy", "leave copy=False out")
        return found.astype(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        from te_core import dlpack

        return dlpack.export(self, **kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.device.kind == "meta":
            raise BufferError("a meta tensor has no memory to export")
        return (1, 0) if self.device.kind == "cpu" else (2, self.device.index)

    def __repr__(self) -> str:
        stride = "" if self.strides is None else f", strides {tuple(self.strides)}"
        return f"Tensor({self.dtype} {tuple(self.shape)}{stride} on {self.device})"


class _ArrayBase:
    """What NumPy makes an array of: the array's `base`, which keeps the tensor, and so the memory, alive."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        width, owner = tensor.dtype.itemsize, tensor.owner
        while type(owner) is Tensor:  # `writable`, which the CPU backend would pay for each of its arrays
            owner = owner.owner
        lent = not owner.flags.writeable if type(owner) is np.ndarray else isinstance(owner, ReadOnly)
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.ptr, lent),
            "shape": tensor.shape,
            "strides": None if tensor.strides is None else tuple(s * width for s in tensor.strides),
            "typestr": dtypes.UNSIGNED[width],  # the protocol cannot name ml_dtypes' types
        }


def _raw(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory, host or device, as an array of unsigned integers (NumPy does not look at them)."""
    if tensor.dtype is dtypes.float4_e2m1:
        raise ArgumentError("Tensor", "packed FP4", "byte-sized types", "keep packed FP4 as uint8")
    if tensor.size == 0:  # there may be no address at all
        return np.empty(tensor.shape, dtypes.UNSIGNED[tensor.dtype.itemsize])
    return np.asarray(_ArrayBase(tensor))


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of a dense tensor, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def widest_access(*tensors: Tensor) -> int:
    """The most bytes, up to 16, that divide every address, stride between several elements, and row of tensors."""
    bits = 16
    for t in tensors:
        size = t.dtype.itemsize
        bits |= t.ptr | t.shape[-1] * size
        for step, n in zip(t.row_major_strides()[:-1], t.shape[:-1], strict=True):
            bits |= step * size if n > 1 else 0
    return bits & -bits


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True
    step = 1
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and s != step:
            return False
        step *= n
    return True


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A zero-copy `Tensor` over a NumPy array (ml_dtypes' types included)."""
    if not isinstance(array, np.ndarray):  # a NumPy scalar, say, has an address that dies at once
        do = "pass numpy.asarray(it), or use from_dlpack"
        raise ArgumentError("from_numpy", type(array).__name__, "a numpy.ndarray", do)
    if not array.dtype.isnative:
        raise ArgumentError("from_numpy", f"byte order of {array.dtype}", "native byte order", "convert the array")
    dt = dtypes.dtype(array.dtype)
    if dt is dtypes.float4_e2m1:
        got, do = "float4_e2m1, which NumPy keeps one to a byte", "pack two values into each byte of a uint8 array"
        raise ArgumentError("from_numpy", got, "byte-sized types", do)
    width = dt.itemsize
    if any(s % width for s in array.strides):
        got, do = f"byte strides {array.strides} of {dt}", "pass numpy.ascontiguousarray(array)"
        raise ArgumentError("from_numpy", got, "strides that are whole elements", do)
    strides = tuple(s // width for s in array.strides)
    dense = None if _is_dense(array.shape, strides) else strides
    address = array.__array_interface__["data"][0] if array.size else 0
    return Tensor(address, array.shape, dt, CPU, array, dense)
