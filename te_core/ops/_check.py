"""The argument checks that operations share. Most run when a plan is made; those that run on every call word no message
unless they fail.
"""

from __future__ import annotations

from typing import Any

from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.tensor import Device, Tensor


def require(ok: bool, operation: str, got: str, allowed: str, do: str) -> None:
    """Raise an `ArgumentError` unless `ok`."""
    if not ok:
        raise ArgumentError(operation, got, allowed, do)


def matrix(operation: str, name: str, t: Tensor) -> None:
    """`t` is a dense matrix."""
    if len(t.shape) != 2 or not t.is_contiguous:
        require(
            False,
            operation,
            f"{name} = {t!r}",
            "a dense row-major matrix",
            f"flatten the leading dimensions of {name} and make it contiguous",
        )


def dense(operation: str, name: str, t: Tensor) -> None:
    """`t` is dense, of any shape."""
    if not t.is_contiguous:
        require(False, operation, f"{name} = {t!r}", "a dense tensor", f"make {name} contiguous")


def vector(operation: str, name: str, t: Tensor | None, length: int, allowed: tuple[DType, ...]) -> None:
    """`t`, if given, is a dense vector of this length and one of these dtypes."""
    if t is None or (t.shape == (length,) and t.is_contiguous and t.dtype in allowed):
        return
    require(
        False,
        operation,
        f"{name} = {t!r}",
        f"a dense vector of {length} elements of {' or '.join(d.name for d in allowed)}",
        f"correct {name}",
    )


def one_of(operation: str, name: str, value: object, allowed: tuple[object, ...]) -> None:
    """`value` is one of the allowed ones."""
    if value not in allowed:
        require(False, operation, f"{name}={value!r}", " or ".join(map(str, allowed)), f"choose an allowed {name}")


def same_device(operation: str, *tensors: Tensor | None) -> None:
    """All given tensors lie on one device."""
    devices = {t.device for t in tensors if t is not None}
    if len(devices) > 1:
        require(
            False,
            operation,
            f"tensors on {', '.join(sorted(map(repr, devices)))}",
            "tensors of one device",
            "move them to the runtime's device",
        )


def on_device(operation: str, device: Device, *tensors: Tensor | None) -> None:
    """All given tensors lie on the runtime's device, whose kernels are given their bare addresses."""
    for t in tensors:
        if t is not None and t.device is not device:
            require(
                False,
                operation,
                f"{t!r} in a call on {device}",
                "tensors of one device, the runtime's",
                "move them to the runtime's device",
            )


def shape(t: Tensor | None) -> tuple[int, ...] | None:
    """The shape of a tensor that may be missing."""
    return None if t is None else t.shape


def dtype(t: Tensor | None) -> DType | None:
    """The dtype of a tensor that may be missing."""
    return None if t is None else t.dtype


def facts(t: Tensor) -> tuple[Any, ...]:
    """What checks look at of a tensor: in a plan's key, so that a plan made for right ones lets no wrong one pass."""
    return t.dtype, t.shape, t.strides, t.device


def seen(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The facts of several tensors, any of which may be missing."""
    return tuple([None if t is None else facts(t) for t in tensors])
