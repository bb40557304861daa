"""What torch's operators do with quantized tensors: those that keep the class, and the way round for all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map

from te_torch.runtime import FLOATS
from te_torch.tensors.buffers import Buffers
from te_torch.tensors.tensor import QuantizedTensor

aten = torch.ops.aten
_KEEPING: dict[Any, Callable[..., Any]] = {}


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator with a quantized tensor among its arguments."""
    known = _KEEPING.get(func)
    if known is not None:
        if torch.is_inference_mode_enabled() and func.is_view and not args[0].is_inference():
            with torch.inference_mode(False):  # a view counts its base's versions, which inference tensors have not
                done = known(func, *args, **kwargs)
        else:
            done = known(func, *args, **kwargs)
        if done is not NotImplemented:
            return done
    return _on_values(func, args, kwargs)


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on dequantized values; what the operator changed is quantized into the argument that it changed."""
    changed: list[tuple[Any, torch.Tensor]] = []

    def values(t: Any) -> Any:
        return t._dense_values(t.dtype) if isinstance(t, QuantizedTensor) else t

    def changing(t: Any) -> Any:
        if not isinstance(t, QuantizedTensor):
            return t
        dense = t._dense_values(t.dtype)
        changed.append((t, dense))
        return dense

    schema = func._schema.arguments
    if func._schema.is_mutable:
        given = [
            tree_map(changing if a.alias_info is not None and a.alias_info.is_write else values, v)
            for a, v in zip(schema, args, strict=False)
        ]
        named = {a.name: a for a in schema}
        keywords = {
            k: tree_map(changing if (i := named[k].alias_info) is not None and i.is_write else values, v)
            for k, v in kwargs.items()
        }
    else:
        given, keywords = tree_map(values, args), tree_map(values, kwargs)
    result = func(*given, **keywords)
    if not changed:
        return result
    whole = {id(v) for v in (*args, *kwargs.values())}
    for t, dense in changed:
        t._requantize(dense)
        if id(t) not in whole:  # an element of a list (foreach, fused), for which torch does not count the change
            increment_version(t)
    back = {id(dense): t for t, dense in changed}
    return tree_map(lambda r: back.get(id(r), r) if isinstance(r, torch.Tensor) else r, result)


def _keeps(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for operator in operators:
            _KEEPING[operator] = function
        return function

    return register


@_keeps(aten.detach.default, aten.alias.default)
def _same(func: Any, t: Any) -> Any:
    return t._like(t.shape, t._buffers)


@_keeps(aten.clone.default)
def _clone(func: Any, t: Any, *, memory_format: Any = None) -> Any:
    return t.make_copy()


@_keeps(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, t: Any, shape: Sequence[int]) -> Any:
    from te_torch.tensors.storage import resolve_shape

    made = t._viewed(resolve_shape(t.shape, (list(shape),)))
    if made is None:
        raise NotImplementedError(
            f"{type(t).__name__} of shape {tuple(t.shape)} cannot be viewed as {tuple(shape)}: dequantize() it first"
        )
    return made


@_keeps(aten.contiguous.default)
def _contiguous(func: Any, t: Any, *, memory_format: Any = None) -> Any:
    return t


@_keeps(aten._to_copy.default)
def _to(func: Any, t: Any, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype")
    device = kwargs.get("device")
    if dtype is not None and dtype != t.dtype:
        values = t._dense_values(dtype if dtype in FLOATS else torch.float32)
        return func(values, **kwargs)
    made = t.make_copy(None if device is None else torch.device(device), bool(kwargs.get("non_blocking")))
    if kwargs.get("pin_memory"):
        made._set_buffers(Buffers(*[None if b is None else b.pin_memory() for b in made._buffers]))
    return made


@_keeps(aten.copy_.default)
def _copy(func: Any, dst: Any, src: Any, non_blocking: bool = False) -> Any:
    if not isinstance(dst, QuantizedTensor):
        dtype = dst.dtype if dst.dtype in FLOATS else torch.float32
        return dst.copy_(src._dense_values(dtype), non_blocking)
    if isinstance(src, QuantizedTensor) and dst._takes_bytes_of(src):
        dst._copy_bytes(src)
    else:
        values = src._dense_values(src.dtype) if isinstance(src, QuantizedTensor) else src
        if values.shape != dst.shape:
            values = values.expand(dst.shape)
        dst._requantize(values.to(dst.device))
    return dst


@_keeps(aten.empty_like.default, aten.new_empty.default)
def _empty(func: Any, t: Any, shape: Any = None, **kwargs: Any) -> Any:
    if t._quantizer is None:
        raise RuntimeError(f"{func}: a {type(t).__name__} without quantizer cannot be made anew")
    return _made_empty(t, t.shape if shape is None else shape, kwargs)


@_keeps(aten.new_zeros.default)
def _new_zeros(func: Any, t: Any, shape: Sequence[int], **kwargs: Any) -> Any:
    if t._quantizer is None or kwargs.get("dtype") not in (None, t.dtype):
        return NotImplemented
    made = _made_empty(t, shape, kwargs)
    made._zero()
    return made


@_keeps(aten.zeros_like.default)
def _zeros_like(func: Any, t: Any, **kwargs: Any) -> Any:
    """A plain tensor: an optimizer's state has to hold more than the quantized values could."""
    return torch.zeros(t.shape, dtype=kwargs.get("dtype") or t.dtype, device=kwargs.get("device") or t.device)


def _made_empty(t: Any, shape: Sequence[int], kwargs: dict[str, Any]) -> Any:
    quantizer = t._quantizer.copy()
    quantizer.internal = False
    held = t.get_usages()
    quantizer.set_usage(**held)
    return quantizer.make_empty(
        shape, dtype=kwargs.get("dtype") or t.dtype, device=kwargs.get("device") or t.device,
        pin_memory=bool(kwargs.get("pin_memory")),
    )  # fmt: skip


@_keeps(aten.split.Tensor)
def _split(func: Any, t: Any, size: int, dim: int = 0) -> Any:
    if size <= 0:
        return NotImplemented
    ends = [*range(size, t.shape[dim], size), t.shape[dim]] if t.ndim else []
    return _pieces(t, ends, dim)


@_keeps(aten.split_with_sizes.default)
def _split_sizes(func: Any, t: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    ends, at = [], 0
    for n in sizes:
        at += n
        ends.append(at)
    return _pieces(t, ends, dim)


def _pieces(t: Any, ends: Sequence[int], dim: int) -> Any:
    made: list[Any] = []
    start = 0
    for end in ends:
        piece = _rows(t, start, end) if dim % max(t.ndim, 1) == 0 else None
        if piece is None:
            return NotImplemented
        made.append(piece)
        start = end
    return made


def _rows(t: Any, start: int, stop: int) -> Any:
    """Rows of the first dimension as views, in the same class; None where that is not possible."""
    return t._rows(start, stop) if t.ndim >= 2 else None


@_keeps(aten.slice.Tensor)
def _slice(func: Any, t: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if step != 1 or t.ndim == 0:
        return NotImplemented
    first, last, _ = slice(start, end).indices(t.shape[dim])
    if first == 0 and last == t.shape[dim]:
        return t._like(t.shape, t._buffers)
    made = _rows(t, first, max(first, last)) if dim % t.ndim == 0 else None
    return NotImplemented if made is None else made


@_keeps(aten.select.int)
def _select(func: Any, t: Any, dim: int, index: int) -> Any:
    if t.ndim < 3 or dim % t.ndim:
        return NotImplemented
    index %= t.shape[0]
    made = _rows(t, index, index + 1)
    return NotImplemented if made is None else made._viewed(t.shape[1:])


@_keeps(aten.as_strided.default)
def _as_strided(func: Any, t: Any, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None) -> Any:
    dense = tuple(torch.empty(tuple(size), device="meta").stride())
    if tuple(stride) != dense:
        return NotImplemented
    if tuple(size) == tuple(t.shape) and not storage_offset:
        return t._like(t.shape, t._buffers)
    width = t.shape[-1] if t.ndim == 2 else 0
    if len(size) != 2 or not width or size[1] != width or (storage_offset or 0) % width:
        return NotImplemented
    first = (storage_offset or 0) // width
    made = _rows(t, first, first + size[0]) if first + size[0] <= t.shape[0] else None
    return NotImplemented if made is None else made
