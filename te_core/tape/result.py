"""What a recorded layer returned, and how it is made again over the memory of another call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from te_core.quantized import QuantizedTensor
from te_core.symbols import slot_of
from te_core.tape.walk import PIECES, NotRecordedError
from te_core.tensor import Tensor

#: Makes a tensor of: addresses and tensors by slot, the quantized tensors among the inputs, what was made before it.
_Maker = Callable[[list[int], list[Any], Sequence[Any], list[Any]], Any]
_Shape = Callable[[list[Any]], Any]
_PLAIN = frozenset((bool, int, float, str, type(None)))


class Result:
    """A result as a list of tensors to make, and the structure that they stand in.

    Inputs stand in it as themselves. An object that stands in several places is one object again.
    """

    __slots__ = ("_bases", "_inputs", "_makers", "_places", "_structure", "_wholes", "slots")

    def __init__(self, value: Any, inputs: Sequence[Tensor], wholes: Sequence[Any], bases: Sequence[int]) -> None:
        self.slots: set[int] = set()  # whose memory is in it
        self._inputs = {id(t): i for i, t in enumerate(inputs)}
        self._wholes = {id(q): i for i, q in enumerate(wholes)}
        self._bases = bases
        self._makers: list[_Maker] = []
        self._places: dict[int, int] = {}  # of what was met, by id
        self._structure = self._of(value)
        self._inputs = self._wholes = self._places = {}  # of the recording, which is over
        self._bases = ()

    def __call__(self, at: list[int], held: list[Any], wholes: Sequence[Any]) -> Any:
        """The result over this memory."""
        made: list[Any] = []
        for maker in self._makers:
            made.append(maker(at, held, wholes, made))
        return self._structure(made)

    def moved(self, places: dict[int, tuple[int, int]]) -> None:
        """Nothing of a result lies in memory that temporaries share."""
        assert not self.slots & places.keys()

    def _of(self, value: Any) -> _Shape:
        kind = value.__class__
        if kind in _PLAIN:
            return lambda made: value
        if kind is Tensor or kind is QuantizedTensor:
            number = self._leaf(value)
            return lambda made: made[number]
        if kind is tuple or kind is list:
            parts = [self._of(part) for part in value]
            return lambda made: kind([part(made) for part in parts])
        if isinstance(value, tuple):
            parts = [self._of(part) for part in value]
            return lambda made: kind(*[part(made) for part in parts])
        raise NotRecordedError(f"a result of type {kind.__name__}")

    def _leaf(self, value: Any) -> int:
        found = self._places.get(id(value))
        if found is None:
            maker = self._tensor(value) if value.__class__ is Tensor else self._quantized(value)
            self._makers.append(maker)
            found = self._places[id(value)] = len(self._makers) - 1
        return found

    def _tensor(self, t: Tensor) -> _Maker:
        number = self._inputs.get(id(t))
        if number is not None:
            return lambda at, held, wholes, made: held[number]
        slot = slot_of(t.ptr)
        offset, shape, dtype, device, strides = t.ptr - self._bases[slot], t.shape, t.dtype, t.device, t.strides
        self.slots.add(slot)
        if t.owner.__class__ is Tensor:  # a piece of a block
            owner = self._leaf(t.owner)
            return lambda at, held, wholes, made: Tensor(at[slot] + offset, shape, dtype, device, made[owner], strides)
        return lambda at, held, wholes, made: Tensor(at[slot] + offset, shape, dtype, device, held[slot].owner, strides)

    def _quantized(self, q: QuantizedTensor) -> _Maker:
        number = self._wholes.get(id(q))
        if number is not None:
            return lambda at, held, wholes, made: wholes[number]
        form, shape, owner = q.format, q.shape, q.owner
        if owner is not None:
            raise NotRecordedError("a result that belongs to a tensor of the caller's")
        pieces = [(name, self._leaf(t)) for name in PIECES if (t := getattr(q, name)) is not None]

        def make(at: list[int], held: list[Any], wholes: Sequence[Any], made: list[Any]) -> QuantizedTensor:
            result = QuantizedTensor(form, shape, None, None)
            for name, piece in pieces:
                setattr(result, name, made[piece])
            return result

        return make
