"""The argument checks that operations share. They run in every call that is interpreted: a replay asks nothing."""

from __future__ import annotations

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
        do = f"flatten the leading dimensions of {name} and make it contiguous"
        raise ArgumentError(operation, f"{name} = {t!r}", "a dense row-major matrix", do)


def dense(operation: str, name: str, t: Tensor) -> None:
    """`t` is dense, of any shape."""
    if not t.is_contiguous:
        raise ArgumentError(operation, f"{name} = {t!r}", "a dense tensor", f"make {name} contiguous")


def sized(
    operation: str, name: str, t: Tensor, size: tuple[int, ...], allowed: tuple[DType, ...], do: str = ""
) -> None:
    """`t` is dense, of this shape and one of these dtypes."""
    if tuple(t.shape) != tuple(size) or t.dtype not in allowed or not t.is_contiguous:
        wanted = f"a dense tensor of shape {tuple(size)} of {' or '.join(d.name for d in allowed)}"
        raise ArgumentError(operation, f"{name} = {t!r}", wanted, do or f"correct {name}")


def vector(
    operation: str, device: Device, name: str, t: Tensor | None, length: int, allowed: tuple[DType, ...]
) -> None:
    """`t`, if given, is a dense vector of this length and one of these dtypes, on the device."""
    if t is not None:
        sized(operation, name, t, (length,), allowed)
        on_device(operation, device, t)


def broadcast(operation: str, name: str, t: Tensor, full: tuple[int, ...], allowed: tuple[DType, ...]) -> None:
    """`t` is dense, of one of these dtypes, and broadcasts to this shape; its last dimension is whole."""
    fits = t.ndim == len(full) and all(n in (1, whole) for n, whole in zip(t.shape, full, strict=True))
    if not fits or t.shape[-1] != full[-1] or t.dtype not in allowed or not t.is_contiguous:
        wanted = (
            f"a dense tensor of {' or '.join(d.name for d in allowed)} that broadcasts to {full}, its last one whole"
        )
        raise ArgumentError(operation, f"{name} = {t!r}", wanted, f"correct {name}")


def one_of(operation: str, name: str, value: object, allowed: tuple[object, ...]) -> None:
    """`value` is one of the allowed ones."""
    if value not in allowed:
        raise ArgumentError(operation, f"{name}={value!r}", " or ".join(map(str, allowed)), f"choose an allowed {name}")


def on_device(operation: str, device: Device, *tensors: Tensor | None) -> None:
    """All given tensors lie on the runtime's device, whose kernels are given their bare addresses; META has none."""
    for t in tensors if device is not META else ():
        if t is not None and t.device is not device:
            got, do = f"{t!r} in a call on {device}", "move them to the runtime's device"
            raise ArgumentError(operation, got, "tensors of one device, the runtime's", do)


def written(operation: str, name: str, *tensors: Tensor | None) -> None:
    """All given tensors may be written to."""
    for t in tensors:
        if t is not None and not t.writable:
            got, do = f"{name} = {t!r} in read-only memory", f"pass a copy as {name}"
            raise ArgumentError(operation, got, "memory that may be written to", do)


def result(
    operation: str, device: Device, name: str, t: Tensor | None, size: tuple[int, ...], allowed: tuple[DType, ...]
) -> None:
    """What a caller gave for a result, if anything, is dense, writable, of this shape, one of these dtypes, and on the
    device.
    """
    if t is not None:
        sized(operation, name, t, size, allowed, "correct it, or leave it out")
        on_device(operation, device, t)
        written(operation, name, t)


def stored(operation: str, device: Device, name: str, q: QuantizedTensor, *, writes: bool = False) -> None:
    """The pieces of a quantized tensor are those of its format and shape, on the device; META has no pieces.

    Kernels read and write data and scales 16 bytes at a time, wherever they come from.
    """
    for columnwise in (False, True) if device is not META else ():
        side = "columnwise" if columnwise else "rowwise"
        if getattr(q, side) is None:
            continue
        parts = cached_pieces(q.format, tuple(q.shape), columnwise)
        wanted = {side: (parts.data, parts.data_type), side + "_scale": (parts.scale, parts.scale_type)}
        if parts.amax:  # an amax of a format without one is not read
            wanted[side + "_amax"] = (parts.amax,), dtypes.float32
        for piece, (size, kind) in wanted.items():
            t = getattr(q, piece)
            right = t is not None and t.shape == size and t.dtype is kind and t.device is device and t.is_contiguous
            if right and device.kind == "cuda":
                right = t.ptr % (kind.itemsize if size == (1,) else 16) == 0
            if not right or (writes and not t.writable):
                raise ArgumentError(
                    operation,
                    f"{name}.{piece} = {t!r} of {q!r}",
                    f"a dense {kind.name} tensor of shape {size} on {device}"
                    + " at a multiple of 16 bytes" * (device.kind == "cuda")
                    + " that may be written to" * writes,
                    f"quantize {name} anew, or correct its pieces",
                )


def dtype(t: Tensor | None) -> DType | None:
    """The dtype of a tensor that may be missing."""
    return None if t is None else t.dtype


def off(*tensors: Tensor | None) -> int:
    """How far addresses are off the 16-byte grid, all of them together."""
    bits = 0
    for t in tensors:
        bits |= 0 if t is None else t.ptr
    return bits & 15
