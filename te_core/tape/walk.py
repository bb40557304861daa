"""The tensors in what layers and backends take and give: found in order, and exchanged for others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import cache, reduce
from operator import or_
from typing import Any

from te_core.layers.linear import Sink
from te_core.ops.quantize import ScalingState
from te_core.ops.swizzle import Scales as OrderedScales
from te_core.quantize.state import VIEWS, Scales
from te_core.quantized import Cast, QuantizedTensor
from te_core.tensor import Tensor


class NotRecordedError(Exception):
    """Why a call runs as it always has, in words."""


#: The tensors of a quantized one, in the order in which they are slots.
PIECES = (
    "rowwise",
    "rowwise_scale",
    "rowwise_amax",
    "columnwise",
    "columnwise_scale",
    "columnwise_amax",
    "rowwise_swizzled",
    "columnwise_swizzled",
    "block",
)
#: Those of them that a product adds: scales in its own order, made once for a tensor.
ADDED = ("rowwise_swizzled", "columnwise_swizzled")
#: What has tensors by name, as layers and backends take it.
_PARTS: dict[type, tuple[str, ...]] = {
    Scales: VIEWS,
    Sink: ("main",),
    ScalingState: ("scale", "history", "used"),
    Cast: ("scale", "amax", "rng", "nonfinite", "maxima"),
}
PLAIN = frozenset((bool, int, float, str, type(None)))


class Facts:
    """What recordings depend on of views that stay for many calls, by a number, which is hashed faster; and the views.

    A scaling state's, and a quantized weight's.
    """

    __slots__ = ("at", "bits", "number", "tensors")

    def __init__(self, number: int, tensors: list[Tensor]) -> None:
        self.number, self.tensors = number, tensors
        self.follow()

    def follow(self) -> None:
        """Note where the views point to."""
        self.at = [t.ptr for t in self.tensors]
        self.bits = reduce(or_, self.at, 0)


_MOST_NUMBERS = 4096
_numbers: dict[Any, int] = {}
_count = itertools.count()


class Apart(QuantizedTensor):
    """Stands for a quantized tensor whose pieces lie apart (a class of an adapter's): it has no block.

    Where a layer asks for one the adapter would copy the pieces together, which is no step.
    """

    __slots__ = ()

    @property
    def block(self) -> Tensor | None:
        """Not to be had."""
        raise NotRecordedError("pieces of a quantized tensor that have to be brought together")

    @block.setter
    def block(self, block: Tensor | None) -> None:
        assert block is None


def pieces_of(q: QuantizedTensor) -> tuple[str, ...]:
    """The names of a quantized tensor's pieces that are slots."""
    return PIECES if q.__class__ is QuantizedTensor else PIECES[:-1]


def facts(value: Any, found: list[Tensor], wholes: list[Any], device: Any) -> Any:
    """What a recording depends on of an argument besides addresses; its tensors join `found`, in order, and objects
    that a recording has to be given again join `wholes`: quantized tensors, communicators.
    """
    kind = value.__class__
    if kind is Tensor:
        if value.device is not device:
            raise NotRecordedError("a tensor of another device")
        found.append(value)
        return value.shape, value.dtype, value.strides
    if kind in PLAIN:
        return value
    if isinstance(value, QuantizedTensor):
        wholes.append(value)
        names = pieces_of(value)
        pieces = [facts(getattr(value, name), found, wholes, device) for name in names]
        return value.format, value.shape, value.owner is None, names is PIECES, *pieces
    if kind is Scales:
        known = facts_of_scales(value, device)
        found += known.tensors
        return known.number
    if kind is Sink:
        if value.queue is not None:
            raise NotRecordedError("weight gradients that are computed later")
        return facts(value.main, found, wholes, device), value.accumulate
    if kind is tuple or kind is list or isinstance(value, tuple):
        parts: list[Any] = [len(value)]
        for part in value:  # most are tensors, or not there: no call for those
            if part.__class__ is Tensor and part.device is device:
                found.append(part)
                parts.append((part.shape, part.dtype, part.strides))
            else:
                parts.append(None if part is None else facts(part, found, wholes, device))
        return tuple(parts)
    if hasattr(value, "all_gather"):  # a communicator
        if not value.met:
            raise NotRecordedError("ranks that have not met")
        wholes.append(value)
        return value.rank, value.size
    raise NotRecordedError(_unknown(kind))


#: Why a call with an inspector is not recorded.
INSPECTED = "an inspector looks on"


@cache
def _unknown(kind: type) -> str:
    """Why an argument of this type is not recorded; a type may say so itself."""
    if hasattr(kind, "inspect"):  # te_core.layers.inspector.Inspector
        return INSPECTED
    return getattr(kind, "not_recorded", f"an argument of type {kind.__name__}")


def facts_of_scales(scales: Scales, device: Any) -> Facts:
    """Views of a state are made once and used for many calls: so are their facts."""
    known: Facts | None = scales.facts
    if known is None:
        known = scales.facts = _facts_once([getattr(scales, name) for name in VIEWS], device)
    return known


def facts_of_weight(q: QuantizedTensor, device: Any) -> Facts:
    """Those of a quantized tensor, which an adapter keeps beside its own tensor as long as these pieces are it."""
    return _facts_once([q], device)


def _facts_once(values: list[Any], device: Any) -> Facts:
    tensors: list[Tensor] = []
    parts = [facts(value, tensors, [], device) for value in values]
    if len(_numbers) >= _MOST_NUMBERS:  # later ones get new numbers: what was known by the old is made again
        _numbers.clear()
    return Facts(_numbers.setdefault((*parts, device), next(_count)), tensors)


def exchanged(value: Any, leaf: Callable[[Tensor], Tensor], wholes: list[Any] | None = None) -> Any:
    """The same of other tensors: `leaf` gives one for each, in the order of `facts`. Objects join `wholes` as there."""
    kind = value.__class__
    if kind is Tensor:
        return leaf(value)
    if kind in PLAIN:
        return value
    if kind is tuple or kind is list:
        return kind([exchanged(part, leaf, wholes) for part in value])
    if isinstance(value, tuple):
        return kind(*[exchanged(part, leaf, wholes) for part in value])
    if kind is OrderedScales:
        return OrderedScales(exchanged(value._q, leaf, wholes), value._columnwise)
    if kind is Scales:
        return Scales(*[exchanged(getattr(value, name), leaf, wholes) for name in VIEWS])
    if kind is Sink:
        return Sink(exchanged(value.main, leaf, wholes), value.accumulate, value.queue)
    if kind is ScalingState:
        scale, history, used = (exchanged(getattr(value, part), leaf, wholes) for part in _PARTS[kind])
        return ScalingState(scale, history, used, value.limit)
    if kind is Cast:
        made = copy(value)
        for name in _PARTS[kind]:
            setattr(made, name, exchanged(getattr(value, name), leaf, wholes))
        return made
    if isinstance(value, QuantizedTensor):
        names = pieces_of(value)
        q = (QuantizedTensor if names is PIECES else Apart)(value.format, value.shape, None, None)
        q.owner = value.owner
        for name in names:
            setattr(q, name, exchanged(getattr(value, name), leaf, wholes))
        if wholes is not None:
            wholes.append(q)
        return q
    if wholes is not None and hasattr(value, "all_gather"):
        wholes.append(value)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Its tensors, in the order of `facts`."""
    found: list[Tensor] = []

    def leaf(t: Tensor) -> Tensor:
        found.append(t)
        return t

    exchanged(value, leaf)
    return found


def names_of(value: Any, name: str = "") -> Iterator[str]:
    """What each tensor is called, in the order of `facts`."""
    kind = value.__class__
    names = (
        pieces_of(value) if isinstance(value, QuantizedTensor) else _PARTS.get(kind, getattr(value, "_fields", None))
    )
    parts: Iterable[tuple[Any, Any]] = ()
    if kind is Tensor:
        yield name
    elif names is not None:
        parts = [(part, getattr(value, part)) for part in names]
    elif isinstance(value, (tuple, list)):
        parts = enumerate(value)
    elif kind is dict:
        parts = value.items()
    for key, part in parts:
        yield from names_of(part, f"{name}.{key}" if name else str(key))
