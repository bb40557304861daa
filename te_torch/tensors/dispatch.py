"""What torch's operators do with quantized tensors: those that keep the class, and the way round for all others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map

from te_core.errors import UnsupportedError
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import FLOATS
from te_torch.tensors import arriving, collectives
from te_torch.tensors.buffers import resolve_shape
from te_torch.tensors.changing import Change, end_all
from te_torch.tensors.sharding import refuse_what_cannot_be_gathered, tell_of_shards
from te_torch.tensors.views import Part

aten = torch.ops.aten
_KEEPING: dict[Any, Callable[..., Any]] = {}
_READ = (QuantizedTorch, list, tuple)  # what may have values to dequantize


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


@lru_cache(256)
def _writes(func: Any) -> tuple[bool, tuple[bool, ...], dict[str, bool]]:
    """Whether an operator changes its first argument, a tensor, alone (what optimizers do, once for each parameter);
    and of each argument, by place and by name, whether it is changed.
    """
    given = func._schema.arguments
    collective = collectives.writes_of(func)
    writes = collective or tuple([a.alias_info is not None and a.alias_info.is_write for a in given])
    alone = not collective and writes[:1] == (True,) and not any(writes[1:]) and str(given[0].type) == "Tensor"
    return alone, writes, {a.name: w for a, w in zip(given, writes, strict=True)}


def _values(v: Any) -> Any:
    """An argument, dequantized; operators take tensors and lists of them."""
    if isinstance(v, QuantizedTorch):
        return v._dense_values(v.dtype)
    if type(v) not in (list, tuple):
        return v
    return [t._dense_values(t.dtype) if isinstance(t, QuantizedTorch) else _values(t) for t in v]


def _changing(v: Any, changes: list[Change]) -> Any:
    """The same of an argument that the operator changes."""
    if isinstance(v, QuantizedTorch):
        changes.append(Change.of(v))
        return changes[-1].dense
    if type(v) not in (list, tuple):
        return v
    given = []
    for t in v:
        if isinstance(t, QuantizedTorch):
            changes.append(Change.of(t))
            t = changes[-1].dense
        elif type(t) is list:  # what each rank sends to each
            t = _changing(t, changes)
        given.append(t)
    return given


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on dequantized values; what the operator changed is quantized into the argument that it changed."""
    first_alone, writes, named = _writes(func)
    if first_alone and isinstance(args[0], QuantizedTorch) and not any([isinstance(v, _READ) for v in kwargs.values()]):
        change = Change.of(args[0])
        func(
            change.dense,
            *[t._dense_values(t.dtype) if isinstance(t, QuantizedTorch) else t for t in args[1:]],
            **kwargs,
        )
        change.end()
        return args[0]
    changes: list[Change] = []
    given = [_changing(v, changes) if w else _values(v) for v, w in zip(args, writes, strict=False)]
    keywords = {k: _changing(v, changes) if named[k] else _values(v) for k, v in kwargs.items()}
    if func.namespace == "c10d":
        result = collectives.run(func, given, keywords, bool(changes))
        collectives.follow_owner(func, given, keywords, [change.t for change in changes])
    else:
        result = func(*given, **keywords)
    if not changes:
        return result
    end_all(changes)
    whole = {id(v) for v in (*args, *kwargs.values())}
    # Elements of a list (foreach, fused): torch does not count their changes.
    increment_version([change.t for change in changes if id(change.t) not in whole])
    if result is None:
        return None
    back = {id(change.dense): change.t for change in changes}
    return tree_map(lambda r: back.get(id(r), r) if isinstance(r, torch.Tensor) else r, result)


def keeps(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function as what these operators do with quantized tensors."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _KEEPING.update(dict.fromkeys(operators, function))
        return function

    return register


@keeps(aten.detach.default, aten.alias.default)
def _same(func: Any, t: Any) -> Any:
    return t._like(t.shape, t._buffers, place=t._place)


@keeps(aten.record_stream.default)
def _record_stream(func: Any, t: Any, stream: Any) -> None:
    """Of the memory that it has: its buffers'."""
    for buffer in t.flatten_inner():
        func(buffer, stream)


@keeps(aten.clone.default)
def _clone(func: Any, t: Any, *, memory_format: Any = None) -> Any:
    return t.make_copy()


@keeps(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, t: Any, shape: Sequence[int]) -> Any:
    made = t._viewed(resolve_shape(t.shape, (list(shape),)))
    if made is None:
        raise NotImplementedError(
            f"{type(t).__name__} of shape {tuple(t.shape)} cannot be viewed as {tuple(shape)}: dequantize() it first"
        )
    return made


@keeps(aten.contiguous.default)
def _contiguous(func: Any, t: Any, *, memory_format: Any = None) -> Any:
    return t


@keeps(aten._to_copy.default)
def _to(func: Any, t: Any, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype")
    device = kwargs.get("device")
    if dtype is not None and dtype != t.dtype:
        values = t._dense_values(dtype if dtype in FLOATS else torch.float32)
        return func(values, **kwargs)
    made = t.make_copy(None if device is None else torch.device(device), bool(kwargs.get("non_blocking")))
    if kwargs.get("pin_memory"):
        for buffer in made.flatten_inner():
            buffer.data = buffer.pin_memory()
    return made


@keeps(aten.copy_.default)
def _copy(func: Any, dst: Any, src: Any, non_blocking: bool = False) -> Any:
    if not isinstance(dst, QuantizedTorch):
        dtype = dst.dtype if dst.dtype in FLOATS else torch.float32
        return dst.copy_(src._dense_values(dtype), non_blocking)
    if isinstance(src, QuantizedTorch) and dst._takes_bytes_of(src):
        dst._copy_bytes(src)
    else:
        values = src._dense_values(src.dtype) if isinstance(src, QuantizedTorch) else src
        if values.shape != dst.shape:
            values = values.expand(dst.shape)
        if isinstance(src, QuantizedTorch) and arriving.is_part(dst):
            arriving.write(dst, src, values.to(dst.device))
        else:
            dst._requantize(values.to(dst.device))
    return dst


@keeps(aten.empty_like.default, aten.new_empty.default)
def _empty(func: Any, t: Any, shape: Any = None, **kwargs: Any) -> Any:
    if t._quantizer is None:  # as documented; what reads or changes a tensor makes itself a quantizer instead
        raise UnsupportedError(
            str(func),
            f"a {type(t).__name__} without quantizer",
            "one with a quantizer, which makes the new tensor",
            "give it one (its _get_quantizer() has the rule of its format), or make a plain tensor: torch.empty(...)",
        )
    return _made_empty(t, t.shape if shape is None else shape, kwargs)


@keeps(aten.new_zeros.default)
def _new_zeros(func: Any, t: Any, shape: Sequence[int], **kwargs: Any) -> Any:
    if kwargs.get("dtype") not in (None, t.dtype):
        return NotImplemented
    made = _made_empty(t, shape, kwargs)
    made._zero()
    if arriving.has_one_scale(t) and arriving.has_one_scale(made):
        made._scale_inv.copy_(t._scale_inv)  # zeros in any: a shard without rows knows its whole's
    tell_of_shards(made, t)
    return made


@keeps(aten.zeros_like.default)
def _zeros_like(func: Any, t: Any, **kwargs: Any) -> Any:
    """A plain tensor: an optimizer's state has to hold more than the quantized values could."""
    return torch.zeros(t.shape, dtype=kwargs.get("dtype") or t.dtype, device=kwargs.get("device") or t.device)


def _made_empty(t: Any, shape: Sequence[int], kwargs: dict[str, Any]) -> Any:
    quantizer = t._get_quantizer().copy()
    quantizer.internal = False
    quantizer.set_usage(**t.get_usages())
    return quantizer.make_empty(
        shape,
        dtype=kwargs.get("dtype") or t.dtype,
        device=kwargs.get("device") or t.device,
        pin_memory=bool(kwargs.get("pin_memory")),
    )


# ----------------------------------------------------------------------------------------- parts of a tensor


@keeps(aten.split.Tensor)
def _split(func: Any, t: Any, size: int, dim: int = 0) -> Any:
    if size <= 0 or not t.ndim:
        return NotImplemented
    refuse_what_cannot_be_gathered(t, dim % t.ndim)
    n = t.shape[dim]
    return _slices(func, t, dim, [(at, min(at + size, n)) for at in range(0, n, size)] or [(0, 0)])


@keeps(aten.split_with_sizes.default)
def _split_sizes(func: Any, t: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    ends = [0, *accumulate(sizes)]
    if not t.ndim or min(sizes, default=0) < 0 or ends[-1] != t.shape[dim]:
        return NotImplemented  # torch says what is wrong
    return _slices(func, t, dim, list(pairwise(ends)))


def _slices(func: Any, t: Any, dim: int, spans: Sequence[tuple[int, int]]) -> Any:
    dim %= t.ndim
    made = [_sliced(t, dim, first, last, 1) for first, last in spans]
    return _plain(func, t) if any(m is None for m in made) else made


@keeps(aten.slice.Tensor)
def _slice(func: Any, t: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if not t.ndim or step < 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(t.shape[dim])
    made = _sliced(t, dim % t.ndim, first, max(first, last), step)
    return _plain(func, t) if made is None else made


def _sliced(t: Any, dim: int, first: int, last: int, step: int) -> Any:
    """Every `step`th element of one dimension, from `first` to `last`."""
    count = -(-(last - first) // step)
    shape = (*t.shape[:dim], count, *t.shape[dim + 1 :])
    strides = t.stride()
    place = (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])
    part = Part(shape, place, t.storage_offset() + first * strides[dim])
    return _part(t, part, lambda data: aten.slice.Tensor(data, dim, first, last, step))


@keeps(aten.select.int)
def _select(func: Any, t: Any, dim: int, index: int) -> Any:
    if not t.ndim or not -t.shape[dim] <= index < t.shape[dim]:
        return NotImplemented
    dim, index = dim % t.ndim, index % t.shape[dim]
    strides = t.stride()
    part = Part(
        (*t.shape[:dim], *t.shape[dim + 1 :]),
        (*strides[:dim], *strides[dim + 1 :]),
        t.storage_offset() + index * strides[dim],
    )
    made = _part(t, part, lambda data: aten.select.int(data, dim, index))
    return _plain(func, t) if made is None else made


@keeps(aten.as_strided.default)
def _as_strided(func: Any, t: Any, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None) -> Any:
    offset = t.storage_offset() if storage_offset is None else storage_offset
    part = Part(tuple(size), tuple(stride), offset)

    def look(data: torch.Tensor) -> Any:
        if data.stride() != t.stride():
            return None
        return data.as_strided(size, stride, data.storage_offset() + offset - t.storage_offset())

    made = _part(t, part, look)
    return _plain(func, t) if made is None else made


def _part(t: Any, part: Part, look: Callable[[torch.Tensor], Any]) -> Any:
    """A part of a tensor as a view in its class; None where that is not possible."""
    if part.shape == tuple(t.shape) and part.place == t._place:
        return t._like(t.shape, t._buffers, place=part.place)
    return t._part(part, _rows(t, part), look)


def _rows(t: Any, part: Part) -> tuple[int, int] | None:
    """The rows of the first dimension that a part is, if it is whole rows."""
    if t.ndim < 2:
        return None
    row, rest = t.stride(0), (tuple(t.shape[1:]), t.stride()[1:])
    if t.ndim > 2 and (part.shape, part.stride) == rest:  # one of them
        count = 1
    elif (part.shape[1:], part.stride[1:]) == rest and (part.stride[:1] == (row,) or part.shape[0] < 2):
        count = part.shape[0]
    else:
        return None
    first, between = divmod(part.offset - t.storage_offset(), max(row, 1))
    return None if between or first < 0 or first + count > t.shape[0] else (first, first + count)


def _plain(func: Any, t: Any) -> Any:
    """A part that cannot stand alone comes as plain values."""
    warnings.warn(
        f"{type(t).__name__} of shape {tuple(t.shape)}: {func} cuts through what shares a scale, or is no view of the "
        "quantized data; the result is a plain tensor. Cut whole blocks of rows, or dequantize() first.",
        stacklevel=5,
    )
    return NotImplemented
