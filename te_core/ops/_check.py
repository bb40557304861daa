"""The argument checks that operations share. Most run when a plan is made; those that run on every call word no message
unless they fail.
"""

from __future__ import annotations

from typing import Any

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.quantized import QuantizedTensor, cached_pieces
from te_core.tensor import META, Device, Tensor


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
    """All given tensors lie on the runtime's device, whose kernels are given their bare addresses; META has none."""
    if device is META:
        return
    for t in tensors:
        if t is not None and t.device is not device:
            require(
                False,
                operation,
                f"{t!r} in a call on {device}",
                "tensors of one device, the runtime's",
                "move them to the runtime's device",
            )


def written(operation: str, name: str, t: Tensor | None) -> None:
    """`t`, if given, may be written to. In every call: plans do not know it."""
    if t is not None and not t.writable:
        require(
            False,
            operation,
            f"{name} = {t!r} in read-only memory",
            "memory that may be written to",
            f"pass a copy as {name}",
        )


def result(
    operation: str, device: Device, name: str, t: Tensor, size: tuple[int, ...], allowed: tuple[DType, ...]
) -> None:
    """What a caller gave for a result is dense, writable, of this shape, one of these dtypes, and on the device."""
    if tuple(t.shape) != tuple(size) or t.dtype not in allowed or not t.is_contiguous:
        require(
            False,
            operation,
            f"{name} = {t!r}",
            f"a dense tensor of shape {tuple(size)} of {' or '.join(d.name for d in allowed)}",
            f"correct {name}, or leave it out",
        )
    on_device(operation, device, t)
    written(operation, name, t)


def stored(operation: str, device: Device, name: str, q: QuantizedTensor, *, writes: bool = False) -> None:
    """The pieces of a quantized tensor are those of its format and shape, on the device; META has no pieces.

    Kernels read and write data and scales 16 bytes at a time, wherever they come from. (In every call: so nothing is
    called for a right tensor but what looks for its memory.)
    """
    if device is META:
        return
    cuda = device.kind == "cuda"
    for columnwise, pieces in (
        (False, (q.rowwise, q.rowwise_scale, q.rowwise_amax)),
        (True, (q.columnwise, q.columnwise_scale, q.columnwise_amax)),
    ):
        data = pieces[0]
        if data is None:
            continue
        parts, before = cached_pieces(q.format, q.shape, columnwise), None
        wanted = (parts.data, parts.data_type), (parts.scale, parts.scale_type), ((parts.amax,), dtypes.float32)
        for number in (0, 1, 2) if parts.amax else (0, 1):  # an amax of a format without one is not read
            t, (size, kind) = pieces[number], wanted[number]
            right = t is not None and t.shape == size and t.dtype is kind and t.device is device
            right = right and (t.strides is None or t.is_contiguous)  # type: ignore[union-attr]
            if cuda and right:
                right = not t.ptr % (kind.itemsize if size == (1,) else 16)  # type: ignore[union-attr]
            if writes and right and t.owner is not before:  # type: ignore[union-attr]
                before, right = t.owner, t.writable  # type: ignore[union-attr]
            if not right:
                which = ("columnwise" if columnwise else "rowwise") + ("", "_scale", "_amax")[number]
                require(
                    False,
                    operation,
                    f"{name}.{which} = {t!r} of {q!r}",
                    f"a dense {kind.name} tensor of shape {size} on {device}"
                    + " at a multiple of 16 bytes" * cuda
                    + " that may be written to" * writes,
                    f"quantize {name} anew, or correct its pieces",
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


def off(*tensors: Tensor | None) -> int:
    """How far addresses are off the 16-byte grid, all of them together."""
    bits = 0
    for t in tensors:
        bits |= 0 if t is None else t.ptr
    return bits & 15


def seen(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The facts of several tensors, any of which may be missing."""
    return tuple([None if t is None else (t.dtype, t.shape, t.strides, t.device) for t in tensors])
