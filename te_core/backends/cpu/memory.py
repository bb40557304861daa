"""Memory of the host. Work is done when a call returns, so streams are one."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from te_core.runtime import HostAllocator, Runtime
from te_core.tensor import Device, Tensor


def default_allocator(device: Device) -> HostAllocator:
    """NumPy's memory."""
    return HostAllocator()


def copy_to_host(rt: Runtime, tensor: Tensor) -> np.ndarray[Any, Any]:
    """A copy of the values."""
    return tensor.numpy().copy()


def copy_from_host(rt: Runtime, array: np.ndarray[Any, Any], out: Tensor) -> None:
    """Fill a tensor with the values of an array."""
    out.numpy()[...] = array


def zero(rt: Runtime, out: Tensor) -> None:
    """Fill a dense tensor with zero bytes."""
    ctypes.memset(out.ptr, 0, out.nbytes)


def stream(rt: Runtime, name: str) -> int:
    """The one there is."""
    return 0


def order(rt: Runtime, producer: int, consumer: int) -> None:
    """Nothing is to wait for."""
