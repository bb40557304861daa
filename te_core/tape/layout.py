"""When a tape takes its memory, and when it lets go of it.

Memory is taken before the first step that reads or writes it, and let go of behind the last; what the result holds
stays. Small temporaries lie in one block, side by side while they live together, where that takes no more bytes at the
peak than the layer itself took.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from te_core import dtypes
from te_core.symbols import Way
from te_core.tape.beside import Beside, Noticed
from te_core.tape.bound import Step
from te_core.tape.tape import Drop, Slot, Take

#: Temporaries up to this many bytes may share the block, and the block has no more.
_SMALL, _BLOCK = 1 << 18, 1 << 20
#: Places in the block are multiples of this: of what every kernel's alignment may ask for.
_STEP = 256
#: What an allocator rounds up to: how bytes are counted here.
_ROUND = 512

Lives = dict[int, tuple[int, int]]  # of memory, by slot: its first step, and the one behind its last


def laid_out(
    slots: Sequence[Slot],
    steps: Sequence[Step],
    interpreted: tuple[dict[int, int], dict[int, int]],
    kept: set[int],
    released: frozenset[int],
    alignment: int,
) -> tuple[list[Slot], list[Any], int]:
    """(slots, steps with takes and drops, the peak).

    `interpreted`: before which steps the layer took and let go of memory.
    """
    lives, uses = lives_of(slots, steps, kept)
    end = len(steps)
    begins, ends = interpreted
    others = _other_streams(slots, steps)
    for i in others.keys() & lives.keys():  # they have waited for what was done before the layer took it, and no more
        lives[i] = begins[i], lives[i][1]
    apart = kept | {i for i in lives if slots[i].way or i in others}
    before = {i: (begins[i], end + 1 if i in kept else ends.get(i, end)) for i in begins}
    size = {i: slots[i].nbytes for i in (*before, *released)}
    given_up = {i: (0, uses[i][1] if i in uses else 0) for i in released}
    fitting = {i: life for i, life in lives.items() if i not in apart and size[i] <= _SMALL}
    places, block = side_by_side(fitting, size, _BLOCK)
    if len(places) > 1:  # the lives of those in the block become one, that of the last slot
        where = len(slots)
        alone = {i: life for i, life in lives.items() if i not in places}
        together = {**alone, where: (min(lives[i][0] for i in places), max(lives[i][1] for i in places))}
        limit = _peak(before | {i: (0, ends.get(i, end)) for i in released}, size)
        if _peak(together | given_up, {**size, where: block}) <= limit:
            for step in steps:
                if any(patch.slot in places for patch in step.patches):
                    step.patches = tuple(  # type: ignore[misc]
                        p._replace(slot=where, offset=p.offset + places[p.slot]) if p.slot in places else p
                        for p in step.patches
                    )
            slots = [*slots, Slot("memory", "temporaries", (block,), dtypes.uint8, block, 0)]
            lives, size = together, {**size, where: block}
    return list(slots), _with_memory(slots, steps, lives, kept, given_up, alignment), _peak(lives, size)


def lives_of(slots: Sequence[Slot], steps: Sequence[Step], kept: Collection[int]) -> tuple[Lives, Lives]:
    """(of memory that is used or kept, its first step and the one behind its last; the same of all slots)."""
    uses: Lives = {}
    for i, step in enumerate(steps):
        for patch in step.patches:
            first, _ = uses.get(patch.slot, (i, i))
            uses[patch.slot] = first, i + 1
    end = len(steps)
    lives: Lives = {}
    for i, slot in enumerate(slots):
        if slot.kind == "memory" and (i in uses or i in kept):
            first, last = uses.get(i, (end, end))
            lives[i] = first, end + 1 if i in kept else last
    return lives, uses


def _other_streams(slots: Sequence[Slot], steps: Sequence[Step]) -> dict[int, set[Way]]:
    """By slot, the streams that use it and are not its own."""
    found: dict[int, set[Way]] = {}
    for step in steps:
        way = step.way if isinstance(step, Beside) else ()
        for patch in () if isinstance(step, Noticed) else step.patches:
            if way != slots[patch.slot].way:
                found.setdefault(patch.slot, set()).add(way)
    return found


def _with_memory(
    slots: Sequence[Slot], steps: Sequence[Step], lives: Lives, kept: Collection[int], given_up: Lives, alignment: int
) -> list[Any]:
    """The steps, with takes before and drops behind them."""
    end = len(steps)
    others = _other_streams(slots, steps)
    noticed = {(patch.slot, step.way) for step in steps if isinstance(step, Noticed) for patch in step.patches}

    def dropped(slot: int, given: bool) -> list[Any]:
        ways = sorted(way for way in others.get(slot, ()) if (slot, way) not in noticed)
        return [*(Noticed(way, slot) for way in ways), Drop(slot, given)]

    uses = lives_of(slots, steps, ())[1]
    asked = {i: life for i, life in uses.items() if slots[i].kind == "scratch" and slots[i].way}
    final: list[Any] = [Drop(s, True) for s, (_, last) in given_up.items() if not last]
    for i in range(end + 1):
        final += [Take(s, slots[s], alignment) for s, life in (*lives.items(), *asked.items()) if life[0] == i]
        if i < end:
            final.append(steps[i])
            gone = [(s, False) for s, life in lives.items() if life[1] == i + 1 and s not in kept]
            gone += [(s, True) for s, (_, last) in given_up.items() if last == i + 1]
            final += [part for slot, given in gone for part in dropped(slot, given)]
    return final


def _peak(lives: Lives, size: dict[int, int]) -> int:
    """The most bytes that live at once."""
    changes: dict[int, int] = {}
    for slot, (first, last) in lives.items():
        nbytes = -(-max(size[slot], 1) // _ROUND) * _ROUND
        changes[2 * first + 1] = changes.get(2 * first + 1, 0) + nbytes
        changes[2 * max(last, first + 1)] = changes.get(2 * max(last, first + 1), 0) - nbytes
    most = now = 0
    for moment in sorted(changes):
        now += changes[moment]
        most = max(most, now)
    return most


def side_by_side(lives: Lives, size: dict[int, int], limit: int = 1 << 62) -> tuple[dict[int, int], int]:
    """(where memory lies in a block of at most so many bytes, the block's bytes): apart where lives overlap."""
    places: dict[int, int] = {}
    block = 0
    for i in sorted(lives, key=lambda i: -size[i]):
        (first, last), nbytes = lives[i], -(-max(size[i], 1) // _STEP) * _STEP
        beside = sorted(
            (places[j], places[j] + -(-max(size[j], 1) // _STEP) * _STEP)
            for j in places
            if lives[j][0] < last and first < lives[j][1]
        )
        at = 0
        for begin, stop in beside:
            if begin - at >= nbytes:
                break
            at = max(at, stop)
        if at + nbytes <= limit:
            places[i] = at
            block = max(block, at + nbytes)
    return places, block
