"""Symbolic addresses: while a layer is recorded, a tensor's `ptr` says a slot and an offset in one plain integer.

`ptr + offset` works unchanged, and so does a look at the lowest bits: a slot's base has the alignment that its memory
is promised to have, and no more. Real addresses are smaller by far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_MARK = 1 << 62
_SHIFT = 44  # a slot may be 16 TiB large
_SLOTS = 1 << 17


#: In the place of an argument of a step: the stream that it runs on.
STREAM = object()
#: A stream, by the names by which a layer asked for it (`Runtime.side`); () is that of its call.
Way = tuple[str, ...]


class Patch(NamedTuple):
    """A step's argument of this number is the address of the slot plus an offset."""

    number: int
    slot: int
    offset: int


def base(slot: int, alignment: int) -> int:
    """The address of a slot that is aligned to so many bytes (a power of two up to 256)."""
    assert slot < _SLOTS, slot
    return _MARK | slot << _SHIFT | alignment


def is_symbol(address: int) -> bool:
    """Whether an address is symbolic."""
    return address >= _MARK


def slot_of(address: int) -> int:
    """The slot that an address lies in."""
    return (address ^ _MARK) >> _SHIFT


def patches(arguments: Sequence[object], bases: Sequence[int]) -> tuple[Patch, ...]:
    """Which of a step's arguments are symbolic addresses. `bases`: of each slot, its base."""
    found = []
    for index, value in enumerate(arguments):
        if value.__class__ is int and value >= _MARK:
            slot = slot_of(value)
            found.append(Patch(index, slot, value - bases[slot]))
    return tuple(found)
