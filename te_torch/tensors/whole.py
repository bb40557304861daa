"""Whether buffers are all of a quantized tensor: asked where one is loaded, or made of a user's own buffers.

The core fills up what is smaller than its padded shapes. Of a tensor whose data or scales end before its values do it
would make zeros, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch

from te_core import dtypes
from te_core.errors import ArgumentError, LibraryError, UnsupportedError
from te_core.quantized import BLOCK, Format, pieces_of
from te_core.tensor import CPU
from te_torch.doors import door
from te_torch.tensors.buffers import Buffers, least_of, matrix_of

_LOADING = "load a quantized tensor"
_AS_WRITTEN = "what pickle wrote of a quantized tensor of this package"


@contextmanager
def loading() -> Iterator[None]:
    """Inside, what a damaged file leads to is an error of ours."""
    try:
        yield
    except (ArgumentError, UnsupportedError, LibraryError):
        raise
    except Exception as error:
        raise _damaged(f"{type(error).__name__}: {error}"[:200]) from error


def _damaged(what: str) -> ArgumentError:
    return ArgumentError(_LOADING, what, _AS_WRITTEN, "load a file that is not damaged")


def check_loaded(key: Sequence[Any], buffers: Sequence[Any], shape: Sequence[Any], dtype: Any) -> None:
    """A file's words on a tensor are what they have to be, before anything is made of them."""
    sizes = [*shape]
    if any(type(n) is not int or n < 0 for n in sizes) or not isinstance(dtype, torch.dtype):
        raise _damaged(f"a tensor of shape {sizes} and type {dtype}"[:200])
    kinds = [type(part) for part in key]
    if kinds != [str, str, bool, bool, int] or key[1] not in ("tensor", *BLOCK) or key[4] not in (448, 256):
        raise _damaged(f"the format {key}"[:200])
    if (key[0] == dtypes.float4_e2m1.name) is not (key[1] == "nvfp4") or not key[0].startswith("float"):
        raise _damaged(f"the format {key}"[:200])
    if len(buffers) != len(Buffers._fields) or not all(b is None or type(b) is torch.Tensor for b in buffers):
        raise _damaged(f"buffers of types {[type(b).__name__ for b in buffers]}"[:200])


@partial(door, traced=lambda operation, form, shape, buffers: buffers)  # a trace's: no size is looked at
def check_whole(operation: str, form: Format, shape: Sequence[int], buffers: Buffers) -> Buffers:
    """The buffers, once it is clear that data, scales and amaxes reach as far as the values of this shape."""
    matrix, found = matrix_of(shape), [b for b in buffers if b is not None]
    if len({b.device for b in found}) > 1:
        places = ", ".join(sorted({str(b.device) for b in found}))
        raise ArgumentError(operation, f"buffers on {places}", "buffers on one device", "move them there")
    for columnwise, way in ((False, "rowwise"), (True, "columnwise")):
        data, scale, amax = buffers.of(columnwise)
        if data is None:
            continue
        if scale is None and form.scaling == "tensor":
            scale = buffers.row_scale
        refused, parts = partial(_refused, operation, way, tuple(shape)), pieces_of(CPU, form, matrix, columnwise)
        needed, scales, amaxes = least_of(form, matrix, columnwise)
        scale_type = torch.float32 if parts.scale_type is dtypes.float32 else torch.uint8
        for name, t, least, dtype in (("data", data, needed, torch.uint8), ("scales", scale, scales, scale_type)):
            if t is None or not _reaches(t, least):
                raise refused(name, t, f"{least}, or that padded")
            if t.dtype is not dtype:
                raise refused(name, t, str(dtype))
        if data.ndim == 2 and (data.shape[0] > parts.data[0] or data.shape[1] > parts.data[1]):
            raise refused("data", data, f"{needed}, or that padded: {parts.data}")
        if form.scaling == "tensor" and scale.numel() > 1:
            raise refused("scales", scale, "one scale")
        if amaxes and (amax is None or amax.numel() < amaxes or amax.dtype is not torch.float32):
            raise refused("amaxes", amax, f"{amaxes} in torch.float32")
    return buffers


def _reaches(t: torch.Tensor, least: tuple[int, ...]) -> bool:
    """Whether a buffer holds that much. Data may lie in the shape of the values: then it holds no more, either."""
    if not prod(least):
        return True
    if t.ndim == len(least):
        return all(n >= needed for n, needed in zip(t.shape, least, strict=True))
    return t.numel() == prod(least)


def _refused(
    operation: str, way: str, shape: tuple[int, ...], name: str, came: torch.Tensor | None, allowed: str
) -> ArgumentError:
    what = f"no {way} {name}" if came is None else f"{way} {name} of shape {tuple(came.shape)} in {came.dtype}"
    return ArgumentError(
        operation,
        f"{what} for values of shape {shape}",
        allowed,
        "pass all buffers of a tensor, as get_metadata() gives",
    )
