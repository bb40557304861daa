"""What a recorded layer returned, and how it is made again over the memory of another call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

from te_core.dtypes import DType
from te_core.quantized import QuantizedTensor
from te_core.symbols import slot_of
from te_core.tape.tape import Slot
from te_core.tape.walk import ADDED, PIECES, PLAIN, NotRecordedError
from te_core.tensor import Device, Tensor

#: What a tensor is made of: slot, offset, shape, dtype, device, strides; and of a piece the number of its block.
_Made = tuple[int, int, tuple[int, ...], DType, Device, "tuple[int, ...] | None", "int | None"]
#: Makes of the list of tensors what stands in its place.
_Build = Callable[[list[Any]], Any]


class Result:
    """A result as a list of tensors to make, and the structure that they stand in.

    Inputs stand in it as themselves. An object that stands in several places is one object again. What the layer added
    to a quantized tensor of the caller's is added to it again.

    `plain` says the same without views, for an adapter that has no need of them: in the structure of the result, in the
    place of each tensor its slot and shape; of a quantized one that belongs to a tensor of the caller's those of its
    first piece. None where a tensor is more than all of its memory, or quantized by the layer.
    """

    __slots__ = ("_added", "_bases", "_build", "_inputs", "_leaves", "_places", "_slots", "_wholes", "plain", "slots")

    def __init__(self, value: Any, inputs: Sequence[Tensor], wholes: Sequence[Any], recorded: Sequence[Slot]) -> None:
        self.slots: set[int] = set()  # whose memory is in it
        self._inputs = {id(t): i for i, t in enumerate(inputs)}
        self._wholes = {id(q): i for i, q in enumerate(wholes)}
        self._slots, self._bases = recorded, [slot.base for slot in recorded]
        #: Of each tensor: what it is made of, the input that it is, or what makes it of those before it.
        self._leaves: list[_Made | int | Callable[[Sequence[Any], list[Any]], Any]] = []
        self._places: dict[int, int] = {}  # of what was met, by id
        found = self._of(value)
        self._build: _Build = (lambda made: made[found]) if isinstance(found, int) else found
        self._added = [
            (i, name, self._leaf(t))
            for i, q in enumerate(wholes)
            for name in ADDED
            if (t := getattr(q, name, None)) is not None and id(t) not in self._inputs
        ]
        self.plain: Any = None if self._added else self._without_views(value)
        del self._inputs, self._wholes, self._places, self._slots, self._bases  # of the recording, which is over

    def __call__(self, at: list[int], held: list[Any]) -> Any:
        """The result over this memory."""
        wholes: Sequence[Any] = held[-1]
        made: list[Any] = [None]
        for leaf in self._leaves:
            if leaf.__class__ is int:
                made.append(held[leaf])
            elif leaf.__class__ is tuple:
                slot, offset, shape, dtype, device, strides, owner = leaf
                block = held[slot] if owner is None else made[owner]
                if owner is None and block.__class__ is Tensor:
                    block = block.owner
                made.append(Tensor(at[slot] + offset, shape, dtype, device, block, strides))
            else:
                made.append(leaf(wholes, made))  # type: ignore[operator]
        for i, name, number in self._added:
            setattr(wholes[i], name, made[number])
        return self._build(made)

    def _without_views(self, value: Any) -> Any:
        if value.__class__ is Tensor:
            slot = self._inputs.get(id(value), -1)
            if slot < 0:
                slot = slot_of(value.ptr)
                whole, offset = self._slots[slot], value.ptr - self._bases[slot]
                same = (offset, value.dtype, value.strides, value.size) == (0, whole.dtype, None, prod(whole.shape))
                if not same or value.owner.__class__ is Tensor:
                    return None
            return slot, value.shape
        if value is None:
            return ()
        if isinstance(value, QuantizedTensor) and id(value) in self._wholes and value.owner is not None:
            slot = next(self._inputs[id(t)] for name in PIECES[:6] if (t := getattr(value, name)) is not None)
            return slot, self._slots[slot].shape
        parts = [self._without_views(part) for part in value] if isinstance(value, tuple) else [None]
        return None if None in parts else tuple(parts)

    def _of(self, value: Any) -> int | _Build:
        """The number of a tensor (0: None), or what builds the value of them."""
        kind = value.__class__
        if value is None:
            return 0
        if kind is Tensor or isinstance(value, QuantizedTensor):
            return self._leaf(value)
        if kind in PLAIN:
            return lambda made: value
        if not isinstance(value, (tuple, list)):
            raise NotRecordedError(f"a result of type {kind.__name__}")
        parts: list[Any] = [self._of(part) for part in value]
        make = list if kind is list else partial(tuple.__new__, kind)
        if all(part.__class__ is int for part in parts):
            return lambda made: make([made[part] for part in parts])
        return lambda made: make([made[part] if part.__class__ is int else part(made) for part in parts])

    def _leaf(self, value: Any) -> int:
        found = self._places.get(id(value))
        if found is None:
            leaf = self._tensor(value) if value.__class__ is Tensor else self._quantized(value)
            self._leaves.append(leaf)
            found = self._places[id(value)] = len(self._leaves)
        return found

    def _tensor(self, t: Tensor) -> int | _Made:
        number = self._inputs.get(id(t))
        if number is not None:
            return number
        slot = slot_of(t.ptr)
        self.slots.add(slot)
        offset = t.ptr - self._bases[slot]
        block = self._leaf(t.owner) if t.owner.__class__ is Tensor else None  # that it is a piece of
        return slot, offset, t.shape, t.dtype, t.device, t.strides, block

    def _quantized(self, q: QuantizedTensor) -> Callable[[Sequence[Any], list[Any]], Any]:
        number = self._wholes.get(id(q))
        if number is not None:
            return lambda wholes, made: wholes[number]
        form, shape, owner = q.format, q.shape, q.owner
        if owner is not None:
            raise NotRecordedError("a result that belongs to a tensor of the caller's")
        pieces = [(name, self._leaf(t)) for name in PIECES if (t := getattr(q, name)) is not None]

        def make(wholes: Sequence[Any], made: list[Any]) -> QuantizedTensor:
            result = QuantizedTensor(form, shape, None, None)
            for name, piece in pieces:
                setattr(result, name, made[piece])
            return result

        return make
